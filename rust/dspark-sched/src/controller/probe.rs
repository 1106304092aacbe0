//! How little a probe verifies, and of which requests.
//!
//! The draft pass runs for all requests; verifying drafts may at most double what that costs. Whole
//! windows of some requests say more than first drafts of all: about every position, and without
//! choosing the likely ones. The requests take turns and nothing of their drafts is looked at, so no
//! admission depends on a draft.

use crate::step_cost::{Drafting, StepLoad};
use crate::verify_plan::PlanCost;

/// A probe verifies at least so many drafts, if there are as many; else a row of probes does.
pub(super) const MIN_NUM_DRAFTS: u32 = 64;

/// How much a probe verifies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Probe {
    pub(super) num_drafts: u32,
    /// Time of the step in its place that neither drafts nor verifies.
    pub(super) plain_us: f64,
    /// What it takes beyond that.
    pub(super) extra_us: f64,
}

/// The probe of a load with at most `limit` drafts.
pub(super) fn probe_of(load: &StepLoad, cost: &PlanCost<'_>, limit: u32) -> Probe {
    let times = cost.cost.times(load, cost.scale, Drafting::Paid);
    let plain_us = cost.cost.times(load, cost.scale, Drafting::Skipped).at(0);
    let least_us = times.at(1.min(limit));
    let most_us = least_us + (least_us - plain_us).max(0.0);
    // Times never fall with drafts.
    let (mut low, mut high) = (MIN_NUM_DRAFTS.min(limit), limit);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if times.at(middle) <= most_us {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let room = times.num_executed_tokens(low).saturating_sub(load.num_base_tokens());
    let num_drafts = room.min(limit).max(low);
    Probe { num_drafts, plain_us, extra_us: times.at(num_drafts) - plain_us }
}

/// Lets requests from `first` on keep their limits until these add up to `num_drafts`, and the others
/// none; returns the request after the last one.
pub(super) fn keep_windows(limits: &mut [u32], first: usize, num_drafts: u32) -> usize {
    let num_requests = limits.len();
    if num_requests == 0 {
        return 0;
    }
    let first = first % num_requests;
    let (mut left, mut next) = (num_drafts, first);
    for row in (first..num_requests).chain(0..first) {
        if left > 0 {
            next = row + 1;
        }
        limits[row] = limits[row].min(left);
        left -= limits[row];
    }
    next
}

#[cfg(test)]
mod tests {
    use super::{Probe, keep_windows, probe_of};
    use crate::step_cost::{CostTable, Drafting, Knot, StepCost, StepLoad};
    use crate::verify_plan::PlanCost;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// A drafting step of 128 requests costs 500 us more, each draft past that 10 us.
    fn table(tiers: Vec<u32>) -> StepCost {
        StepCost::new(CostTable {
            bias_us: 1000.0,
            token_us: vec![Knot(1, 0.0), Knot(128, 0.0), Knot(256, 1280.0)],
            draft_us: vec![Knot(1, 500.0)],
            tiers,
            ..CostTable::default()
        })
        .unwrap()
    }

    #[test]
    fn verification_doubles_what_the_draft_pass_costs_at_most() {
        let cost = table(Vec::new());
        let load = StepLoad::of_requests(128);
        let probe = probe_of(&load, &PlanCost::new(&cost), 896);
        // 490 us more than the first draft: 50 drafts would do, 64 are the least.
        assert_eq!(probe, Probe { num_drafts: 64, plain_us: 1000.0, extra_us: 500.0 + 640.0 });
        let cheap = CostTable { token_us: vec![Knot(1, 0.0), Knot(1024, 102.4)], ..cost.table() };
        let cost = StepCost::new(cheap).unwrap();
        assert_eq!(probe_of(&load, &PlanCost::new(&cost), 896).num_drafts, 896);
    }

    #[test]
    fn a_probe_fills_its_tier_and_keeps_to_its_limit() {
        let cost = table(vec![128, 224, 1024]);
        let load = StepLoad::of_requests(128);
        let num_drafts = |limit| probe_of(&load, &PlanCost::new(&cost), limit).num_drafts;
        assert_eq!([num_drafts(896), num_drafts(70), num_drafts(3), num_drafts(0)], [96, 70, 3, 0]);
    }

    #[test]
    fn requests_take_turns() {
        let mut first = 0;
        let mut next = |num_drafts: u32| {
            let mut limits = [3, 3, 0, 3];
            first = keep_windows(&mut limits, first, num_drafts);
            limits
        };
        assert_eq!(next(4), [3, 1, 0, 0]);
        assert_eq!(next(4), [1, 0, 0, 3]);
        assert_eq!(next(3), [0, 3, 0, 0]);
        assert_eq!(next(99), [3, 3, 0, 3]);
        assert_eq!(keep_windows(&mut [], 3, 5), 0);
    }

    proptest! {
        #[test]
        fn kept_windows_hold_what_was_asked_for(
            limits in vec(0_u32..8, 1..20),
            first in 0_usize..50,
            num_drafts in 0_u32..200,
        ) {
            let mut kept = limits.clone();
            let next = keep_windows(&mut kept, first, num_drafts);
            prop_assert!(next <= limits.len());
            prop_assert!(kept.iter().zip(&limits).all(|(kept, limit)| kept <= limit));
            prop_assert_eq!(kept.iter().sum::<u32>(), num_drafts.min(limits.iter().sum()));
            // All but the last one are whole or untouched.
            let is_part = |(kept, limit): (&u32, &u32)| *kept > 0 && kept < limit;
            prop_assert!(kept.iter().zip(&limits).filter(|&pair| is_part(pair)).count() <= 1);
        }

        #[test]
        fn a_probe_costs_what_its_drafts_cost(num_requests in 1_u32..256, limit in 0_u32..1500) {
            let cost = table(vec![1, 2, 4, 8, 64, 256]);
            let load = StepLoad::of_requests(num_requests);
            let Probe { num_drafts, plain_us, extra_us } =
                probe_of(&load, &PlanCost::new(&cost), limit);
            prop_assert!(num_drafts <= limit && num_drafts >= limit.min(64));
            let us = cost.step_us(&load, num_drafts, Drafting::Paid);
            prop_assert!((plain_us + extra_us - us).abs() < 1e-6);
            prop_assert!(extra_us >= 0.0);
        }
    }
}
