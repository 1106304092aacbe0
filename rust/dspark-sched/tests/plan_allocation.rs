//! Planning and the controller's loop allocate nothing once they are warm.

#![allow(clippy::unwrap_used)]

mod speculation;

use std::alloc::System;

use dspark_sched::verify_plan::{BudgetRule, DraftBatch, PlanCost, VerifyPlanner};
use speculation::load::{NUM_DRAFTS, NUM_REQUESTS, SteadyLoop, random_survival, stairs};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Enough steps for every shape of step: probes come after 64, exploration after 128.
const NUM_WARMUP_STEPS: usize = 200;
const NUM_STEPS: usize = 200;

fn check(name: &str, mut call: impl FnMut()) {
    let region = Region::new(ALLOCATOR);
    call();
    let change = region.change();
    let found = (change.allocations, change.reallocations);
    assert_eq!(found, (0, 0), "{name}: allocations and reallocations");
}

/// Counts are of the whole process, so there is one test.
#[test]
fn nothing_is_allocated_in_steady_state() {
    check_that_the_counter_counts();
    check_planners();
    check_controller();
}

fn check_that_the_counter_counts() {
    let region = Region::new(ALLOCATOR);
    drop(std::hint::black_box(vec![0_u8; 100]));
    assert_eq!(region.change().allocations, 1);
}

fn check_planners() {
    let survival = random_survival(1);
    let stairs = stairs();
    let envelope = stairs.envelope();
    let [stairs, envelope] = [&stairs, &envelope].map(PlanCost::new);
    let batch = DraftBatch::new(&survival, NUM_REQUESTS);
    // No call before: construction takes all memory.
    let mut planner = VerifyPlanner::new(NUM_REQUESTS as usize, NUM_DRAFTS).unwrap();
    let rule = BudgetRule { fill_tier: true, ..BudgetRule::default() };
    check("top", || drop(planner.top(&batch, 1792, Some(&stairs)).map(|_| ())));
    check("budget", || drop(planner.budget(&batch, &stairs, &rule)));
    check("greedy", || drop(planner.greedy(&batch, &stairs, None).map(|_| ())));
    check("greedy on tiers", || {
        drop(planner.greedy_on_tiers(&batch, &stairs, &envelope, None).map(|_| ()));
    });
    check("fixed", || drop(planner.fixed(&batch, 3, Some(&stairs)).map(|_| ())));
}

fn check_controller() {
    let mut steps = SteadyLoop::new();
    let num_drafting = (0..NUM_WARMUP_STEPS).filter(|_| steps.step() > NUM_REQUESTS / 2).count();
    assert!(num_drafting > NUM_WARMUP_STEPS / 2, "{num_drafting} steps verified drafts");
    check("decide, plan, observe", || {
        for _ in 0..NUM_STEPS {
            steps.step();
        }
    });
}
