//! What tests of speculation share: cost tables from rates, and a small generator of numbers.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used)]

pub(crate) mod load;

use dspark_sched::step_cost::{CostTable, Knot, StepCost};
use dspark_sched::survival_history::SlotRow;
use dspark_sched::{Generation, SlotId};

/// A table in which a step of `n` tokens takes `times[n - 1]`, and nothing else costs.
pub(crate) fn cost_of_times(times: &[f64]) -> StepCost {
    let token_us = (1..).zip(times).map(|(tokens, &us)| Knot(tokens, us)).collect();
    StepCost::new(CostTable { token_us, ..CostTable::default() }).unwrap()
}

/// A table of steps per time unit over tokens, as the paper writes costs: SPS(1), SPS(2), …
pub(crate) fn cost_of_rates(rates: &[f64]) -> StepCost {
    cost_of_times(&rates.iter().map(|rate| 1.0 / rate).collect::<Vec<_>>())
}

/// A step takes the same whatever it holds.
pub(crate) fn flat_cost() -> StepCost {
    cost_of_times(&[10.0])
}

/// Survival `[R, γ]` of confidences by row.
pub(crate) fn survival_of(rows: &[&[f32]]) -> Vec<f32> {
    rows.iter().flat_map(|row| dspark_sched::survival(row)).collect()
}

/// Rows in slots 0, 1, … with one generation.
pub(crate) fn slot_rows(num_rows: u32, generation: u32) -> Vec<SlotRow> {
    let row = |slot| SlotRow { slot_id: SlotId(slot), generation: Generation(generation) };
    (0..num_rows).map(row).collect()
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal.
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}
