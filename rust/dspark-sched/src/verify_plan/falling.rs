//! Survivals of a batch from the largest to the smallest, for sums over the first of them.
//!
//! A radix sort of the bits: positive floats order as their bits, and those up to 1 have 30. Equal
//! survivals are equal here, so places do not matter.

use super::batch::DraftBatch;
use super::order::for_each_draft;

/// First bits of the digits, of 10 bits each.
const SHIFTS: [u32; 3] = [0, 10, 20];
const NUM_BUCKETS: usize = 1 << 10;

/// Survivals in order, and the space to sort them.
#[derive(Debug, Clone)]
pub(super) struct FallingSurvivals {
    sorted: Vec<u32>,
    spare: Vec<u32>,
    counts: Box<[[u32; NUM_BUCKETS]; SHIFTS.len()]>,
}

impl FallingSurvivals {
    pub(super) fn with_capacity(num_cells: usize) -> Self {
        Self {
            sorted: Vec::with_capacity(num_cells),
            spare: Vec::with_capacity(num_cells),
            counts: Box::new([[0; NUM_BUCKETS]; SHIFTS.len()]),
        }
    }

    /// Takes the drafts that may be accepted: survival above 0, within the row's limit.
    pub(super) fn fill(&mut self, batch: &DraftBatch<'_>, num_drafts: usize) {
        self.sorted.clear();
        self.counts.iter_mut().for_each(|counts| counts.fill(0));
        for_each_draft(batch, num_drafts, |_, _, survival| {
            // Small for a large survival.
            let key = f32::to_bits(1.0) - survival.to_bits();
            for (counts, shift) in self.counts.iter_mut().zip(SHIFTS) {
                counts[bucket(key, shift)] += 1;
            }
            self.sorted.push(key);
        });
        self.spare.clear();
        self.spare.resize(self.sorted.len(), 0);
        for (counts, shift) in self.counts.iter_mut().zip(SHIFTS) {
            let mut start = 0;
            for count in counts.iter_mut() {
                start += std::mem::replace(count, start);
            }
            for &key in &self.sorted {
                let place = &mut counts[bucket(key, shift)];
                self.spare[*place as usize] = key;
                *place += 1;
            }
            std::mem::swap(&mut self.sorted, &mut self.spare);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The survivals, none larger than the one before.
    pub(super) fn survivals(&self) -> impl Iterator<Item = f64> + '_ {
        self.sorted.iter().map(|&key| f64::from(f32::from_bits(f32::to_bits(1.0) - key)))
    }
}

fn bucket(key: u32, shift: u32) -> usize {
    (key >> shift) as usize % NUM_BUCKETS
}

#[cfg(test)]
mod tests {
    use super::FallingSurvivals;
    use crate::verify_plan::DraftBatch;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn survivals_come_in_order_and_none_is_lost(
            rows in vec(vec(prop_oneof![0.0_f32..=1.0, Just(1e-40), Just(1.0), Just(0.0)], 3), 0..30),
            limit in 0_u32..4,
        ) {
            let flat: Vec<f32> = rows.iter().flat_map(|row| crate::survival(row)).collect();
            let limits = vec![limit; rows.len()];
            let load = crate::step_cost::StepLoad::of_requests(crate::ids::saturating_u32(rows.len()));
            let batch = DraftBatch { survival: &flat, limits: Some(&limits), load };
            let mut falling = FallingSurvivals::with_capacity(flat.len());
            // A second fill must not see the first one.
            falling.fill(&batch, 3);
            falling.fill(&batch, 3);
            let mut expected: Vec<f32> = flat
                .chunks_exact(3)
                .flat_map(|row| row.iter().copied().take(limit as usize))
                .filter(|&survival| survival > 0.0)
                .collect();
            expected.sort_unstable_by(|left, right| right.total_cmp(left));
            let found: Vec<f64> = falling.survivals().collect();
            prop_assert_eq!(found, expected.into_iter().map(f64::from).collect::<Vec<f64>>());
        }
    }
}
