//! Time of planning 512 requests of 7 drafts. The timing is ignored by default:
//! `cargo test --release -p dspark-sched --test plan_speed -- --ignored --nocapture`.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_possible_truncation)]

mod speculation;

use std::time::Instant;

use dspark_sched::step_cost::{CostTable, Knot, StepCost};
use dspark_sched::verify_plan::{BudgetRule, DraftBatch, PlanCost, VerifyPlanner};
use speculation::{Random, flat_cost, survival_of};

const NUM_REQUESTS: u32 = 512;
const NUM_DRAFTS: usize = 7;

fn median_us(mut call: impl FnMut()) -> f64 {
    let mut samples: Vec<f64> = (0..301)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    samples[150]
}

#[test]
#[ignore = "a timing; needs a release build and a quiet machine"]
fn planning_takes_less_than_100_us_for_512_requests() {
    let mut random = Random(1);
    let confidences: Vec<[f32; NUM_DRAFTS]> =
        (0..NUM_REQUESTS).map(|_| [(); NUM_DRAFTS].map(|()| random.uniform() as f32)).collect();
    let rows: Vec<&[f32]> = confidences.iter().map(<[f32; NUM_DRAFTS]>::as_slice).collect();
    let survival = survival_of(&rows);
    let table = CostTable {
        token_us: vec![Knot(1, 4000.0), Knot(256, 9000.0), Knot(4096, 110_000.0)],
        tiers: (1..=64).map(|tier| tier * 8).collect(),
        ..CostTable::default()
    };
    let stairs = StepCost::new(table).unwrap();
    let (envelope, flat) = (stairs.envelope(), flat_cost());
    let [stairs, envelope, flat] = [&stairs, &envelope, &flat].map(PlanCost::new);
    let batch = DraftBatch::new(&survival, NUM_REQUESTS);
    let mut planner = VerifyPlanner::new(NUM_REQUESTS as usize, NUM_DRAFTS).unwrap();
    let rule = BudgetRule { fill_tier: true, ..BudgetRule::default() };
    let times = [
        ("top", median_us(|| drop(planner.top(&batch, 1792, Some(&stairs)).map(|_| ())))),
        ("budget", median_us(|| drop(planner.budget(&batch, &stairs, &rule)))),
        (
            "greedy, all admitted",
            median_us(|| drop(planner.greedy(&batch, &flat, None).map(|_| ()))),
        ),
        (
            "greedy on tiers",
            median_us(|| {
                drop(planner.greedy_on_tiers(&batch, &stairs, &envelope, None).map(|_| ()));
            }),
        ),
    ];
    for (name, us) in times {
        println!("512 requests, 7 drafts, {name}: median {us:.1} us");
        assert!(us < 100.0, "{name} takes {us} us");
    }
}
