//! Segments: the parts of a reservation whose committed prefixes grow in lockstep.
//!
//! The size of a buffer is one number, in units. Segment `k` holds `size * unit_k` bytes from its
//! own start. Equal segments have a unit of one byte (the tensor API); segments of KV layouts have
//! their bytes per block as unit. Segments lie back to back, so two can share a granule.

use crate::error::{Error, Result};

/// One segment of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First byte within the reservation.
    pub offset: u64,
    /// Bytes reserved.
    pub capacity: u64,
    /// Bytes that one unit of the buffer's size takes in this segment.
    pub unit: u64,
}

impl Segment {
    /// End of the segment's committed bytes, within the reservation, at a size.
    #[must_use]
    pub fn committed_end(&self, size: u64) -> u64 {
        self.offset + self.prefix(size)
    }

    /// Committed bytes of the segment at a size that fits.
    #[must_use]
    pub fn prefix(&self, size: u64) -> u64 {
        (size.saturating_mul(self.unit)).min(self.capacity)
    }
}

/// All segments of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentLayout {
    segments: Vec<Segment>,
    total: u64,
    bytes_per_unit: u64,
    max_size: u64,
}

impl SegmentLayout {
    /// `num_segments` equal parts of `total` bytes, sized in bytes per segment.
    ///
    /// # Errors
    /// `ZeroCapacity`, `ZeroSegments`, or `Indivisible`.
    pub fn equal(total: u64, num_segments: u64) -> Result<Self> {
        if num_segments == 0 {
            return Err(Error::ZeroSegments);
        }
        if total == 0 {
            return Err(Error::ZeroCapacity);
        }
        if !total.is_multiple_of(num_segments) {
            return Err(Error::Indivisible { total, num_segments });
        }
        let capacity = total / num_segments;
        let segments = (0..num_segments)
            .map(|index| Segment { offset: index * capacity, capacity, unit: 1 })
            .collect();
        Ok(Self { segments, total, bytes_per_unit: num_segments, max_size: capacity })
    }

    /// Segments of their own capacity and bytes per unit (block), back to back in this order.
    ///
    /// # Errors
    /// `ZeroSegments`; `ZeroCapacity` for a segment or a unit of no bytes; `SizeOverflow`.
    pub fn unequal(parts: &[(u64, u64)]) -> Result<Self> {
        let overflow = || Error::SizeOverflow { what: "the sum of segment capacities" };
        let mut segments = Vec::with_capacity(parts.len());
        let (mut total, mut bytes_per_unit, mut max_size) = (0u64, 0u64, u64::MAX);
        for (capacity, unit) in parts.iter().copied() {
            if capacity == 0 || unit == 0 {
                return Err(Error::ZeroCapacity);
            }
            segments.push(Segment { offset: total, capacity, unit });
            total = total.checked_add(capacity).ok_or_else(overflow)?;
            bytes_per_unit = bytes_per_unit.checked_add(unit).ok_or_else(overflow)?;
            max_size = max_size.min(capacity / unit);
        }
        if segments.is_empty() {
            return Err(Error::ZeroSegments);
        }
        Ok(Self { segments, total, bytes_per_unit, max_size })
    }

    /// The segments, by offset.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Bytes of all segments together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Largest size that fits every segment.
    #[must_use]
    pub fn max_size(&self) -> u64 {
        self.max_size
    }

    /// Committed bytes over all segments at a size.
    #[must_use]
    pub fn logical_bytes(&self, size: u64) -> u64 {
        self.bytes_per_unit.saturating_mul(size)
    }

    /// Checks that every segment holds `size` units.
    ///
    /// # Errors
    /// `CapacityExceeded` with the bytes of the first segment that is too small.
    pub fn check_fits(&self, size: u64) -> Result<()> {
        if size <= self.max_size {
            return Ok(());
        }
        let fits = |segment: &&Segment| size <= segment.capacity / segment.unit;
        let small = self.segments.iter().find(|segment| !fits(segment));
        let (unit, capacity) = small.map_or((1, self.max_size), |s| (s.unit, s.capacity));
        Err(Error::CapacityExceeded { requested: size.saturating_mul(unit), capacity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_segments_divide_the_total() {
        let layout = SegmentLayout::equal(12, 3).unwrap();
        assert_eq!(layout.segments()[2], Segment { offset: 8, capacity: 4, unit: 1 });
        assert_eq!((layout.total(), layout.max_size(), layout.logical_bytes(2)), (12, 4, 6));
        assert_eq!(layout.segments()[1].committed_end(3), 7);
    }

    #[test]
    fn unequal_segments_share_one_size() {
        let layout = SegmentLayout::unequal(&[(100, 10), (35, 7)]).unwrap();
        assert_eq!(layout.max_size(), 5);
        assert_eq!(layout.logical_bytes(5), 85);
        assert_eq!(layout.segments()[1], Segment { offset: 100, capacity: 35, unit: 7 });
        let error = layout.check_fits(6).unwrap_err();
        assert_eq!(error, Error::CapacityExceeded { requested: 42, capacity: 35 });
    }

    #[test]
    fn rejects_sizes_that_make_no_segments() {
        assert_eq!(SegmentLayout::equal(0, 1).unwrap_err(), Error::ZeroCapacity);
        assert_eq!(SegmentLayout::equal(4, 0).unwrap_err(), Error::ZeroSegments);
        let indivisible = Error::Indivisible { total: 10, num_segments: 3 };
        assert_eq!(SegmentLayout::equal(10, 3).unwrap_err(), indivisible);
        assert_eq!(SegmentLayout::unequal(&[]).unwrap_err(), Error::ZeroSegments);
        assert_eq!(SegmentLayout::unequal(&[(8, 0)]).unwrap_err(), Error::ZeroCapacity);
        let overflow = SegmentLayout::unequal(&[(u64::MAX, 1), (1, 1)]).unwrap_err();
        assert_eq!(overflow, Error::SizeOverflow { what: "the sum of segment capacities" });
    }
}
