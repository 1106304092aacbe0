//! Time of planning and of the controller's calls for 512 requests of 7 drafts, on one core.
//!
//! `cargo bench -p dspark-sched`; the limit is 100 us per plan. `tests/plan_speed.rs` asserts it and
//! `tests/plan_allocation.rs` that nothing is allocated.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/speculation/mod.rs"]
mod speculation;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use dspark_sched::verify_plan::{BudgetRule, DraftBatch, PlanCost, VerifyPlanner};
use speculation::flat_cost;
use speculation::load::{NUM_DRAFTS, NUM_REQUESTS, SteadyLoop, random_survival, stairs};

fn planners(criterion: &mut Criterion) {
    let survival = random_survival(1);
    let (stairs, flat) = (stairs(), flat_cost());
    let envelope = stairs.envelope();
    let [stairs, envelope, flat] = [&stairs, &envelope, &flat].map(PlanCost::new);
    let batch = DraftBatch::new(&survival, NUM_REQUESTS);
    let mut planner = VerifyPlanner::new(NUM_REQUESTS as usize, NUM_DRAFTS).unwrap();
    let rule = BudgetRule { fill_tier: true, ..BudgetRule::default() };
    let half = NUM_REQUESTS * 7 / 2;
    let mut group = criterion.benchmark_group("512 requests, 7 drafts");
    group.bench_function("top", |bencher| {
        bencher.iter(|| {
            black_box(planner.top(black_box(&batch), half, Some(&stairs)).unwrap());
        });
    });
    group.bench_function("budget", |bencher| {
        bencher.iter(|| black_box(planner.budget(black_box(&batch), &stairs, &rule)));
    });
    group.bench_function("greedy, all admitted", |bencher| {
        bencher.iter(|| {
            black_box(planner.greedy(black_box(&batch), &flat, None).unwrap());
        });
    });
    group.bench_function("greedy on tiers", |bencher| {
        bencher.iter(|| {
            let plan = planner.greedy_on_tiers(black_box(&batch), &stairs, &envelope, None);
            black_box(plan.unwrap());
        });
    });
    group.finish();
}

fn controller(criterion: &mut Criterion) {
    let mut steps = SteadyLoop::new();
    criterion.bench_function("512 requests, 7 drafts/decide, plan, observe", |bencher| {
        bencher.iter(|| black_box(steps.step()));
    });
}

criterion_group!(benches, planners, controller);
criterion_main!(benches);
