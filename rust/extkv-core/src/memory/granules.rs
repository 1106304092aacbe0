//! Granule arithmetic: which granules of a reservation are backed by physical memory.
//!
//! A granule is the smallest piece of physical memory. Byte ranges are widened outward to
//! granules, so two byte ranges can share one; the set holds each granule once.

use fixedbitset::FixedBitSet;

/// A half-open range of granule indices within one reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GranuleRange {
    /// First granule.
    pub start: u64,
    /// One past the last granule.
    pub end: u64,
}

impl GranuleRange {
    /// The granules that hold any byte of `[start, end)`. Empty for an empty byte range.
    #[must_use]
    pub fn covering(start: u64, end: u64, granule: u64) -> Self {
        let first = start / granule;
        if end <= start {
            return Self { start: first, end: first };
        }
        Self { start: first, end: end.div_ceil(granule) }
    }

    /// Number of granules.
    #[must_use]
    pub fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether the range holds no granule.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.end <= self.start
    }

    /// Whether both ranges hold a common granule.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// Sorts ranges and joins those that touch or overlap; drops empty ones.
#[must_use]
pub(crate) fn merged(mut ranges: Vec<GranuleRange>) -> Vec<GranuleRange> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable();
    let mut joined: Vec<GranuleRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// The backed granules of one reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GranuleSet {
    bits: FixedBitSet,
    num_backed: u64,
}

impl GranuleSet {
    /// A set over `num_granules` granules, none backed.
    #[must_use]
    pub fn new(num_granules: usize) -> Self {
        Self { bits: FixedBitSet::with_capacity(num_granules), num_backed: 0 }
    }

    /// Number of backed granules. Constant time.
    #[must_use]
    pub fn num_backed(&self) -> u64 {
        self.num_backed
    }

    /// Whether a granule is backed.
    #[must_use]
    pub fn contains(&self, granule: u64) -> bool {
        usize::try_from(granule).is_ok_and(|index| self.bits.contains(index))
    }

    /// The maximal runs of granules of `range` that are not backed, in order.
    #[must_use]
    pub fn missing_runs(&self, range: GranuleRange) -> Vec<GranuleRange> {
        self.runs(range, false)
    }

    /// The maximal runs of granules of `range` that are backed, in order.
    #[must_use]
    pub fn backed_runs(&self, range: GranuleRange) -> Vec<GranuleRange> {
        self.runs(range, true)
    }

    fn runs(&self, range: GranuleRange, backed: bool) -> Vec<GranuleRange> {
        let mut runs: Vec<GranuleRange> = Vec::new();
        for granule in range.start..range.end {
            if self.contains(granule) != backed {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == granule => run.end += 1,
                _ => runs.push(GranuleRange { start: granule, end: granule + 1 }),
            }
        }
        runs
    }

    /// Marks granules as backed.
    pub fn insert(&mut self, range: GranuleRange) {
        self.set(range, true);
    }

    /// Marks granules as not backed.
    pub fn remove(&mut self, range: GranuleRange) {
        self.set(range, false);
    }

    fn set(&mut self, range: GranuleRange, backed: bool) {
        for granule in range.start..range.end {
            let Ok(index) = usize::try_from(granule) else {
                continue;
            };
            if index >= self.bits.len() || self.bits.contains(index) == backed {
                continue;
            }
            self.bits.set(index, backed);
            self.num_backed = if backed { self.num_backed + 1 } else { self.num_backed - 1 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(start: u64, end: u64) -> GranuleRange {
        GranuleRange { start, end }
    }

    #[test]
    fn byte_ranges_widen_outward() {
        assert_eq!(GranuleRange::covering(0, 0, 4), range(0, 0));
        assert_eq!(GranuleRange::covering(0, 1, 4), range(0, 1));
        assert_eq!(GranuleRange::covering(3, 5, 4), range(0, 2));
        assert_eq!(GranuleRange::covering(4, 8, 4), range(1, 2));
        assert!(GranuleRange::covering(7, 7, 4).is_empty());
    }

    #[test]
    fn runs_skip_backed_granules() {
        let mut set = GranuleSet::new(10);
        set.insert(range(2, 4));
        set.insert(range(3, 5));
        assert_eq!(set.num_backed(), 3);
        assert_eq!(set.missing_runs(range(0, 8)), [range(0, 2), range(5, 8)]);
        assert_eq!(set.backed_runs(range(0, 8)), [range(2, 5)]);
        set.remove(range(0, 3));
        assert_eq!(set.num_backed(), 2);
        assert!(!set.contains(2) && set.contains(3) && !set.contains(11));
    }

    #[test]
    fn touching_ranges_merge() {
        let ranges = vec![range(5, 6), range(0, 2), range(2, 3), range(4, 4), range(1, 2)];
        assert_eq!(merged(ranges), [range(0, 3), range(5, 6)]);
    }
}
