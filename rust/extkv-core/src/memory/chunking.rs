//! How large physical handles are.
//!
//! Set-access costs time per handle and network cards register handles one by one, so few large
//! handles are better than many granules; unmapping works on whole handles, so one handle for
//! everything could never shrink. The automatic size is the larger of 1/16 of what a growth adds,
//! over all its buffers, and 1/64 of what the segment holds already, and no handle crosses the
//! start of a segment: a growth makes about 16 handles and one per segment, and shrinking is never
//! much coarser than the growth it takes back. See `bench/memory/bench_commit.py`.
//!
//! A buffer that grows granule by granule must not collect a handle per granule for ever. With
//! [`Growth::Geometric`] a growth adds at least 1/64 of what its segment holds, so a segment of `n`
//! granules has at most `128 + 64 ln(n / 64)` handles, and commits at most 1.6 % more than asked.
//! When memory is too short for the surplus the growth commits exactly what was asked. Mapped
//! handles are never moved or replaced by growth.

use super::granules::GranuleRange;

/// Share of a segment's granules that a new handle has at least, as a divisor.
const HELD_DIVISOR: u64 = 64;
/// Share of a growth that a new handle has at least, as a divisor.
const GROWTH_DIVISOR: u64 = 16;

/// Whether growth may commit more than asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Growth {
    /// A growth adds at least 1/64 of what its segment holds.
    #[default]
    Geometric,
    /// Commit what was asked, rounded up to granules.
    Exact,
}

/// How large one physical handle may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ChunkSize {
    /// The larger of 1/16 of the growth and 1/64 of what the segment holds.
    #[default]
    Automatic,
    /// At most this many bytes, rounded up to a granule.
    AtMost(u64),
    /// One handle per run of granules within a segment.
    WholeRun,
}

/// Sizes of physical handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChunkPolicy {
    /// Largest handle.
    pub size: ChunkSize,
    /// Whether growth may commit more than asked.
    pub growth: Growth,
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
                let surplus_end = held.end + held.len() / HELD_DIVISOR;
                needed.end.max(surplus_end.min(limit))
            }
        }
    }

    /// Cuts runs of granules into handles: at the starts of segments, and at the largest size.
    ///
    /// `segments` holds each segment's first granule and the number of granules it holds;
    /// `num_added` is the number of granules that the growth adds over all its buffers.
    pub(crate) fn cut(
        &self,
        runs: &[GranuleRange],
        segments: &[(u64, u64)],
        num_added: u64,
        granule: u64,
    ) -> Vec<GranuleRange> {
        let max_granules = |num_held: u64| match self.size {
            ChunkSize::Automatic => {
                num_added.div_ceil(GROWTH_DIVISOR).max(num_held.div_ceil(HELD_DIVISOR)).max(1)
            }
            ChunkSize::AtMost(bytes) => bytes.div_ceil(granule).max(1),
            ChunkSize::WholeRun => u64::MAX,
        };
        let mut chunks = Vec::new();
        for run in runs {
            let mut start = run.start;
            while start < run.end {
                let next = segments.partition_point(|(first, _)| *first <= start);
                let border = segments.get(next).map_or(u64::MAX, |(first, _)| *first);
                let num_held = next.checked_sub(1).map_or(0, |own| segments[own].1);
                let longest = start.saturating_add(max_granules(num_held));
                let end = run.end.min(border).min(longest);
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

    fn policy(size: ChunkSize, growth: Growth) -> ChunkPolicy {
        ChunkPolicy { size, growth }
    }

    #[test]
    fn cuts_at_borders_and_at_the_largest_size() {
        let exact = policy(ChunkSize::AtMost(30), Growth::Exact);
        let segments = [(0, 0), (4, 0), (8, 0)];
        let chunks = exact.cut(&[range(0, 7), range(9, 10)], &segments, 8, 10);
        assert_eq!(chunks, [range(0, 3), range(3, 4), range(4, 7), range(9, 10)]);
    }

    #[test]
    fn one_handle_per_run_still_stops_at_borders() {
        let whole = policy(ChunkSize::WholeRun, Growth::Exact);
        let chunks = whole.cut(&[range(0, 8)], &[(0, 0), (4, 0)], 8, 10);
        assert_eq!(chunks, [range(0, 4), range(4, 8)]);
    }

    #[test]
    fn a_largest_size_below_a_granule_is_one_granule() {
        let tiny = policy(ChunkSize::AtMost(1), Growth::Exact);
        assert_eq!(tiny.cut(&[range(0, 2)], &[(0, 0)], 2, 10), [range(0, 1), range(1, 2)]);
    }

    #[test]
    fn automatic_size_follows_the_growth_and_what_is_held() {
        let automatic = policy(ChunkSize::Automatic, Growth::Exact);
        let sizes = |runs: &[GranuleRange], segments: &[(u64, u64)]| -> Vec<u64> {
            let num_added = runs.iter().map(|run| run.len()).sum();
            automatic.cut(runs, segments, num_added, 10).iter().map(|chunk| chunk.len()).collect()
        };
        assert_eq!(sizes(&[range(0, 16)], &[(0, 0)]), [1; 16]);
        assert_eq!(sizes(&[range(0, 160)], &[(0, 0)]), [10; 16]);
        assert_eq!(sizes(&[range(640, 672)], &[(0, 640)]), [10, 10, 10, 2]);
        // Two segments: each is cut by what it holds itself.
        let both = sizes(&[range(128, 136), range(500, 508)], &[(0, 128), (500, 0)]);
        assert_eq!(both, [2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]);
        // A growth of many buffers is cut by what it adds in all of them.
        assert_eq!(automatic.cut(&[range(0, 16)], &[(0, 0)], 16 * 20, 10).len(), 1);
    }

    #[test]
    fn surplus_is_a_64th_within_the_segment_and_never_below_the_need() {
        let geometric = policy(ChunkSize::Automatic, Growth::Geometric);
        assert_eq!(geometric.end_with_surplus(range(0, 63), range(63, 64), 1000), 64);
        assert_eq!(geometric.end_with_surplus(range(0, 640), range(640, 641), 1000), 650);
        assert_eq!(geometric.end_with_surplus(range(0, 640), range(640, 641), 645), 645);
        assert_eq!(geometric.end_with_surplus(range(0, 640), range(640, 700), 1000), 700);
        assert_eq!(geometric.end_with_surplus(range(0, 640), range(640, 646), 645), 646);
        let exact = policy(ChunkSize::Automatic, Growth::Exact);
        assert_eq!(exact.end_with_surplus(range(0, 640), range(640, 641), 1000), 641);
    }
}
