//! How large physical handles are.
//!
//! Set-access costs time per handle and network cards register handles one by one, so few large
//! handles are better than many granules; unmapping works on whole handles, so one handle for
//! everything could never shrink. A handle therefore never crosses the start of a segment and is
//! at most [`ChunkPolicy::max_chunk_bytes`] long.
//!
//! A buffer that grows granule by granule must not collect a handle per granule for ever. With
//! [`Growth::Geometric`] a new handle is at least 1/64 of what its segment holds already, so a
//! segment of `n` granules has at most `128 + 64 ln(n / 64)` handles plus `n / max_chunk`, and
//! commits at most 1.6 % more than asked. When memory is too short for the surplus the growth
//! commits exactly what was asked. Mapped handles are never moved or replaced by growth.

use super::granules::GranuleRange;

/// Share of a segment's granules that a new handle has at least, as a divisor.
const GEOMETRIC_DIVISOR: u64 = 64;

/// Whether growth may commit more than asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Growth {
    /// A new handle is at least 1/64 of what its segment holds.
    #[default]
    Geometric,
    /// Commit what was asked, rounded up to granules.
    Exact,
}

/// Sizes of physical handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkPolicy {
    /// Largest handle in bytes, rounded up to a granule; `None` for one handle per run.
    pub max_chunk_bytes: Option<u64>,
    /// Whether growth may commit more than asked.
    pub growth: Growth,
}

impl ChunkPolicy {
    /// Largest handle where the caller does not care: 256 MiB. See `bench/memory`.
    pub const DEFAULT_MAX_CHUNK_BYTES: u64 = 256 << 20;
}

impl Default for ChunkPolicy {
    fn default() -> Self {
        Self {
            max_chunk_bytes: Some(Self::DEFAULT_MAX_CHUNK_BYTES),
            growth: Growth::default(),
        }
    }
}

impl ChunkPolicy {
    /// Last granule that a growth of a segment should back: at least `needed.end`.
    ///
    /// `held` are the segment's logical granules before, `limit` the first granule past those
    /// that belong to the segment alone.
    pub(crate) fn end_with_surplus(
        &self,
        held: GranuleRange,
        needed: GranuleRange,
        limit: u64,
    ) -> u64 {
        match self.growth {
            Growth::Exact => needed.end,
            Growth::Geometric => {
                let surplus_end = held.end + held.len() / GEOMETRIC_DIVISOR;
                needed.end.max(surplus_end.min(limit))
            }
        }
    }

    /// Cuts runs of granules into handles: at `borders` (sorted), and at the largest size.
    pub(crate) fn cut(
        &self,
        runs: &[GranuleRange],
        borders: &[u64],
        granule: u64,
    ) -> Vec<GranuleRange> {
        let max_granules = self
            .max_chunk_bytes
            .map_or(u64::MAX, |bytes| bytes.div_ceil(granule).max(1));
        let mut chunks = Vec::new();
        for run in runs {
            let mut start = run.start;
            while start < run.end {
                let next_border = borders.partition_point(|border| *border <= start);
                let border = borders.get(next_border).copied().unwrap_or(u64::MAX);
                let end = run.end.min(border).min(start.saturating_add(max_granules));
                chunks.push(GranuleRange { start, end });
                start = end;
            }
        }
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(start: u64, end: u64) -> GranuleRange {
        GranuleRange { start, end }
    }

    fn policy(max_chunk_bytes: Option<u64>, growth: Growth) -> ChunkPolicy {
        ChunkPolicy {
            max_chunk_bytes,
            growth,
        }
    }

    #[test]
    fn cuts_at_borders_and_at_the_largest_size() {
        let exact = policy(Some(30), Growth::Exact);
        let chunks = exact.cut(&[range(0, 7), range(9, 10)], &[0, 4, 8], 10);
        assert_eq!(
            chunks,
            [range(0, 3), range(3, 4), range(4, 7), range(9, 10)]
        );
    }

    #[test]
    fn one_handle_per_run_still_stops_at_borders() {
        let whole = policy(None, Growth::Exact);
        assert_eq!(
            whole.cut(&[range(0, 8)], &[0, 4], 10),
            [range(0, 4), range(4, 8)]
        );
    }

    #[test]
    fn a_largest_size_below_a_granule_is_one_granule() {
        let tiny = policy(Some(1), Growth::Exact);
        assert_eq!(
            tiny.cut(&[range(0, 2)], &[], 10),
            [range(0, 1), range(1, 2)]
        );
    }

    #[test]
    fn surplus_is_a_64th_within_the_segment_and_never_below_the_need() {
        let geometric = policy(None, Growth::Geometric);
        assert_eq!(
            geometric.end_with_surplus(range(0, 63), range(63, 64), 1000),
            64
        );
        assert_eq!(
            geometric.end_with_surplus(range(0, 640), range(640, 641), 1000),
            650
        );
        assert_eq!(
            geometric.end_with_surplus(range(0, 640), range(640, 641), 645),
            645
        );
        assert_eq!(
            geometric.end_with_surplus(range(0, 640), range(640, 700), 1000),
            700
        );
        assert_eq!(
            geometric.end_with_surplus(range(0, 640), range(640, 646), 645),
            646
        );
        let exact = policy(None, Growth::Exact);
        assert_eq!(
            exact.end_with_surplus(range(0, 640), range(640, 641), 1000),
            641
        );
    }
}
