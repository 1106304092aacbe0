//! The loop of decide, plan and observe: fallback, return, generations, refusals, and its worth.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod speculation;

use std::sync::LazyLock;

use dspark_sched::StepId;
use dspark_sched::controller::{
    ControllerSettings, DecisionReason, DraftGate, GateSettings, GateState, PlannerKind,
    ProbeOutlook, SpeculationController, StepReport,
};
use dspark_sched::step_cost::{CostScale, CostTable, Drafting, Knot, StepCost, StepLoad};
use dspark_sched::verify_plan::PlanError;
use speculation::{Random, slot_rows};

const NUM_DRAFTS: usize = 3;

/// A table with a knee: up to 64 tokens nearly free, then steep.
static KNEE: LazyLock<StepCost> = LazyLock::new(|| {
    let table = CostTable {
        bias_us: 1000.0,
        request_us: vec![Knot(1, 0.0), Knot(512, 500.0)],
        draft_us: vec![Knot(1, 150.0), Knot(512, 400.0)],
        token_us: vec![Knot(1, 0.0), Knot(64, 100.0), Knot(512, 8000.0), Knot(4096, 80_000.0)],
        tiers: (1..=64).map(|tier| tier * 8).collect(),
        ..CostTable::default()
    };
    StepCost::new(table).unwrap()
});

fn controller(planner: PlannerKind) -> SpeculationController {
    let settings = ControllerSettings { planner, ..ControllerSettings::new(512, NUM_DRAFTS) };
    SpeculationController::new(settings, Some(KNEE.clone())).unwrap()
}

/// One step of `num_requests` requests of one confidence, which is true or scaled by `truth`.
struct Step<'a> {
    step: u64,
    num_requests: u32,
    confidence: f32,
    truth: f64,
    scale: CostScale,
    random: &'a mut Random,
}

fn run(controller: &mut SpeculationController, step: Step<'_>) -> StepReport {
    let Step { step, num_requests, confidence, truth, scale, random } = step;
    let load = StepLoad::of_requests(num_requests);
    let rows = slot_rows(num_requests, 1);
    let decision = controller.decide(StepId(step), &rows, load, None, None).unwrap();
    let drafting = if decision.drafts { Drafting::Paid } else { Drafting::Skipped };
    let (mut accepted, mut num_drafts) = (Vec::new(), 0);
    if decision.drafts {
        let confidences = vec![confidence; num_requests as usize * NUM_DRAFTS];
        let plan = controller.plan(&confidences).unwrap();
        num_drafts = plan.report.num_admitted;
        let chance = f64::from(confidence) * truth;
        let accepts =
            |len: &u32| (0..*len).take_while(|_| random.uniform() < chance).count() as u32;
        accepted = plan.verify_lens.iter().map(accepts).collect();
    }
    let us = KNEE.times(&load, scale, drafting).at(num_drafts);
    controller.observe(&accepted, Some(us * (1.0 + 0.01 * random.normal()))).unwrap()
}

fn run_many(
    controller: &mut SpeculationController,
    steps: std::ops::Range<u64>,
    num_requests: u32,
    confidence: f32,
    truth: f64,
) -> Vec<StepReport> {
    let mut random = Random(steps.start + 77);
    let scale = CostScale::default();
    steps
        .map(|step| {
            let random = &mut random;
            run(controller, Step { step, num_requests, confidence, truth, scale, random })
        })
        .collect()
}

fn drafting_share(reports: &[StepReport]) -> f64 {
    reports.iter().filter(|report| report.decision.drafts).count() as f64 / reports.len() as f64
}

#[test]
fn drafting_is_given_up_under_load_and_taken_up_again() {
    for planner in [PlannerKind::Lagged, PlannerKind::Greedy] {
        let mut controller = controller(planner);
        let light = run_many(&mut controller, 1..200, 4, 0.8, 1.0);
        assert!(drafting_share(&light) > 0.97, "{planner:?}");
        let heavy = run_many(&mut controller, 200..600, 512, 0.8, 1.0);
        assert!(drafting_share(&heavy) < 0.05, "{planner:?} {}", drafting_share(&heavy));
        assert!(!controller.is_drafting());
        let light = run_many(&mut controller, 600..800, 4, 0.8, 1.0);
        assert!(drafting_share(&light) > 0.97, "{planner:?}");
        let stats = controller.stats();
        assert_eq!((stats.num_fallbacks, stats.num_returns), (1, 1));
        assert_eq!(stats.num_steps, 799);
        assert!(stats.num_probes >= 2, "{stats:?}");
    }
}

#[test]
fn drafts_that_are_never_accepted_are_given_up_and_probed() {
    let mut controller = controller(PlannerKind::Lagged);
    // The head claims 0.9 and nothing is accepted: the measured ratio counts.
    let reports = run_many(&mut controller, 1..1000, 32, 0.9, 0.0);
    assert!(drafting_share(&reports[100..]) < 0.05, "{}", drafting_share(&reports[100..]));
    assert!(controller.acceptance_ratio() < 0.2);
    // Then the head is right again: probes find out.
    let reports = run_many(&mut controller, 1000..6000, 4, 0.9, 1.0);
    assert!(drafting_share(&reports[4000..]) > 0.9, "{}", drafting_share(&reports[4000..]));
}

#[test]
fn a_probe_verifies_whole_windows_of_some_requests_in_turns() {
    for planner in [PlannerKind::Lagged, PlannerKind::Greedy] {
        let mut controller = controller(planner);
        let load = StepLoad::of_requests(512);
        let rows = slot_rows(512, 1);
        let mut probes = Vec::new();
        let mut num_steps = 0;
        while probes.len() < 3 {
            num_steps += 1;
            let decision = controller.decide(StepId(num_steps), &rows, load, None, None).unwrap();
            let mut lens = Vec::new();
            if decision.drafts {
                lens = controller.plan(&[0.3; 512 * NUM_DRAFTS]).unwrap().verify_lens.clone();
            }
            let drafting = if decision.drafts { Drafting::Paid } else { Drafting::Skipped };
            let us = KNEE.step_us(&load, lens.iter().sum(), drafting);
            controller.observe(&vec![0; lens.len()], Some(us)).unwrap();
            if decision.reason == DecisionReason::Probe {
                assert_eq!(decision.budget, Some(lens.iter().sum()));
                probes.push(lens);
            }
        }
        for lens in &probes {
            assert!(lens.iter().sum::<u32>() >= 64, "{planner:?}");
            assert!(lens.iter().filter(|&&len| len > 0 && len < 3).count() <= 1);
        }
        let probed = |row: usize| probes.iter().filter(|lens| lens[row] > 0).count();
        assert!((0..512).all(|row| probed(row) <= 1), "{planner:?}");
        assert!(probes[0][0] > 0);
    }
}

#[test]
fn costs_that_drift_are_followed() {
    let mut controller = controller(PlannerKind::Lagged);
    let mut random = Random(4);
    let scale = CostScale { fixed: 1.5, verify: 1.5, draft: 1.5 };
    let mut last = None;
    for step in 1..400 {
        let random = &mut random;
        let step = Step { step, num_requests: 8, confidence: 0.8, truth: 1.0, scale, random };
        last = Some(run(&mut controller, step));
    }
    let report = last.unwrap();
    let ratio = report.predicted_us.unwrap() / report.measured_us.unwrap();
    assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
}

#[test]
fn the_budget_is_history_and_shares_follow_the_present() {
    let mut settings = ControllerSettings::new(4, NUM_DRAFTS);
    settings.min_snapshot_requests = 1;
    settings.fill_tier = false;
    settings.lag = 1;
    let times = [1.0, 1.01, 1.02, 1.03, 1.04, 9.0, 9.5, 10.0];
    let cost = speculation::cost_of_times(&times);
    let mut controller = SpeculationController::new(settings, Some(cost)).unwrap();
    let rows = slot_rows(2, 1);
    let load = StepLoad::of_requests(2);
    let decide = |controller: &mut SpeculationController, step| {
        controller.decide(StepId(step), &rows, load, None, None).unwrap()
    };
    decide(&mut controller, 1);
    controller.plan(&[0.9, 0.9, 0.9, 0.1, 0.1, 0.1]).unwrap();
    controller.observe(&[0, 0], None).unwrap();
    let decision = decide(&mut controller, 2);
    assert_eq!((decision.budget, decision.num_executed_tokens), (Some(3), Some(5)));
    let plan = controller.plan(&[0.3, 0.3, 0.3, 0.95, 0.9, 0.9]).unwrap();
    assert_eq!(plan.verify_lens, [0, 3]);
}

#[test]
fn a_new_occupant_counts_as_sure() {
    let mut settings = ControllerSettings::new(2, NUM_DRAFTS);
    settings.min_snapshot_requests = 1;
    settings.lag = 1;
    // Flat enough to verify all of a sure request, not enough for one of 0.01.
    let cost = speculation::cost_of_times(&[1.0, 1.3, 1.6, 1.9]);
    let mut controller = SpeculationController::new(settings, Some(cost)).unwrap();
    let load = StepLoad::of_requests(1);
    let decide = |controller: &mut SpeculationController, step, generation| {
        let rows = slot_rows(1, generation);
        controller.decide(StepId(step), &rows, load, None, None).unwrap().budget
    };
    // Verified without drafts of worth: only the pooled acceptance is left for the old occupant.
    decide(&mut controller, 1, 1);
    controller.plan(&[0.9, 0.0, 0.0]).unwrap();
    controller.observe(&[1], None).unwrap();
    assert_eq!(decide(&mut controller, 2, 1), Some(1));
    assert_eq!(controller.cancel_newest_step(), Some(StepId(2)));
    assert_eq!(controller.cancel_newest_step(), None);
    assert_eq!(decide(&mut controller, 3, 2), Some(3));
}

#[test]
fn planners_without_a_decision_are_static() {
    let reason = |planner| {
        let mut controller = controller(planner);
        let load = StepLoad::of_requests(2);
        let decision = controller.decide(StepId(1), &slot_rows(2, 1), load, None, None).unwrap();
        let lens = decision.drafts.then(|| controller.plan(&[0.5; 6]).unwrap().verify_lens.clone());
        (decision.reason, lens)
    };
    assert_eq!(reason(PlannerKind::VerifyAll), (DecisionReason::Static, Some(vec![3, 3])));
    assert_eq!(reason(PlannerKind::Fixed(2)), (DecisionReason::Static, Some(vec![2, 2])));
    assert_eq!(reason(PlannerKind::NoDrafts), (DecisionReason::Static, None));
}

#[test]
fn without_a_table_everything_is_verified_and_limits_hold() {
    let settings = ControllerSettings::new(4, NUM_DRAFTS);
    let mut controller = SpeculationController::new(settings, None).unwrap();
    let load = StepLoad::of_requests(2);
    let rows = slot_rows(2, 1);
    let decision = controller.decide(StepId(1), &rows, load, Some(&[1, 9]), None).unwrap();
    assert_eq!((decision.drafts, decision.reason), (true, DecisionReason::NoCostTable));
    let plan = controller.plan(&[0.5; 6]).unwrap();
    assert_eq!((plan.verify_lens.as_slice(), plan.report.prediction), ([1, 3].as_slice(), None));
    let report = controller.observe(&[1, 2], Some(5.0)).unwrap();
    assert_eq!((report.num_accepted, report.num_tokens, report.predicted_us), (3, 5, None));
    let decision = controller.decide(StepId(2), &rows, load, Some(&[0, 0]), None).unwrap();
    assert_eq!((decision.drafts, decision.reason), (false, DecisionReason::NothingToDraft));
    assert_eq!(controller.observe(&[], None).unwrap().num_tokens, 2);
    let decision = controller.decide(StepId(3), &[], StepLoad::default(), None, Some(8)).unwrap();
    assert_eq!(decision.reason, DecisionReason::NothingToDraft);
}

#[test]
fn equal_calls_give_equal_steps() {
    let run = || {
        let mut controller = controller(PlannerKind::Lagged);
        run_many(&mut controller, 1..100, 40, 0.7, 0.9)
    };
    assert_eq!(run(), run());
}

#[test]
fn steps_may_be_decided_before_the_one_before_is_planned() {
    let times = [1.0, 1.3, 1.6, 1.9];
    let settings =
        ControllerSettings { min_snapshot_requests: 1, ..ControllerSettings::new(1, NUM_DRAFTS) };
    let cost = speculation::cost_of_times(&times);
    let mut controller = SpeculationController::new(settings, Some(cost)).unwrap();
    let rows = slot_rows(1, 1);
    let load = StepLoad::of_requests(1);
    let decide = |controller: &mut SpeculationController, step| {
        controller.decide(StepId(step), &rows, load, None, None)
    };
    decide(&mut controller, 1).unwrap();
    decide(&mut controller, 2).unwrap();
    let error = PlanError::TooMany { name: "steps in flight", asked: 3, limit: 2 };
    assert_eq!(decide(&mut controller, 3), Err(error));
    assert_eq!(controller.plan(&[0.9, 0.1, 0.1]).unwrap().verify_lens.len(), 1);
    assert_eq!(controller.observe(&[1], None).unwrap().step_id, StepId(1));
    // Step 3 may know step 1, not step 2.
    assert_eq!(decide(&mut controller, 3).unwrap().budget, Some(1));
    controller.plan(&[0.9, 0.9, 0.9]).unwrap();
    assert_eq!(controller.observe(&[0], None).unwrap().step_id, StepId(2));
    let plan = controller.plan(&[0.2, 0.9, 0.9]).unwrap();
    assert_eq!(plan.verify_lens, [1]);
    assert_eq!(controller.observe(&[0], None).unwrap().num_tokens, 1);
}

#[test]
fn calls_out_of_order_are_refused() {
    let mut controller = controller(PlannerKind::Lagged);
    let load = StepLoad::of_requests(1);
    let rows = slot_rows(1, 1);
    let order = |call, found, expected| PlanError::CallOrder { call, found, expected };
    assert_eq!(controller.observe(&[], None).unwrap_err(), order("observe", None, "decide"));
    let error = order("plan", None, "a decision to draft");
    assert_eq!(controller.plan(&[0.5; 3]).unwrap_err(), error);
    controller.decide(StepId(5), &rows, load, None, None).unwrap();
    let error = controller.observe(&[0], None).unwrap_err();
    assert_eq!(error, order("observe", Some(StepId(5)), "plan"));
    let error = controller.plan(&[0.5; 2]).unwrap_err();
    assert_eq!(error, PlanError::WrongLength { name: "confidences", found: 2, expected: 3 });
    let limit = controller.plan(&[0.5; 3]).unwrap().verify_lens[0];
    let error = order("plan", Some(StepId(5)), "a decision to draft");
    assert_eq!(controller.plan(&[0.5; 3]).unwrap_err(), error, "a step is planned once");
    let error = controller.observe(&[limit + 1], None).unwrap_err();
    assert_eq!(error, PlanError::AcceptedPastWindow { row: 0, found: limit + 1, limit });
    controller.observe(&[limit], None).unwrap();
    let error = controller.decide(StepId(5), &rows, load, None, None).unwrap_err();
    assert_eq!(error, PlanError::StepOrder { found: StepId(5), last: StepId(5) });
    let error = controller.decide(StepId(6), &[], load, None, None).unwrap_err();
    assert_eq!(error, PlanError::WrongLength { name: "rows", found: 0, expected: 1 });
    let error = controller.decide(StepId(6), &rows, load, Some(&[]), None).unwrap_err();
    assert_eq!(error, PlanError::WrongLength { name: "limits", found: 0, expected: 1 });
    let many = slot_rows(513, 1);
    let load = StepLoad::of_requests(513);
    let error = controller.decide(StepId(6), &many, load, None, None).unwrap_err();
    assert_eq!(error, PlanError::TooMany { name: "rows", asked: 513, limit: 512 });
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let defaults = ControllerSettings::new(4, NUM_DRAFTS);
    let gate = |change: fn(&mut GateSettings)| {
        let mut gate = GateSettings::default();
        change(&mut gate);
        ControllerSettings { gate, ..defaults }
    };
    for (settings, message) in [
        (ControllerSettings { planner: PlannerKind::Fixed(4), ..defaults }, "fixed verify length"),
        (ControllerSettings { lag: 0, ..defaults }, "lag is 0"),
        (ControllerSettings { max_num_requests: 0, ..defaults }, "max_num_requests is 0"),
        (gate(|gate| gate.min_predicted_gain = -0.1), "min_predicted_gain is -0.1"),
        (gate(|gate| gate.min_predicted_gain = f64::NAN), "min_predicted_gain is NaN"),
        (gate(|gate| gate.probe_interval = 0), "probe_interval is 0"),
        (gate(|gate| gate.max_probe_interval = 1), "max_probe_interval is 1"),
        (gate(|gate| gate.max_probe_share = 0.0), "max_probe_share is 0"),
        (gate(|gate| gate.max_probe_share = 1.5), "max_probe_share is 1.5"),
        (gate(|gate| gate.max_probe_share = f64::NAN), "max_probe_share is NaN"),
    ] {
        let error = SpeculationController::new(settings, None).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

fn gate(max_probe_share: f64) -> DraftGate {
    let settings = GateSettings {
        min_predicted_gain: 0.05,
        probe_interval: 2,
        max_probe_interval: 4,
        max_probe_share,
        explore_interval: 3,
    };
    DraftGate::new(settings).unwrap()
}

#[test]
fn a_gate_probes_at_doubling_intervals_and_explores_in_turns() {
    let mut gate = gate(1.0);
    let mut states = |gain, num: usize| {
        (0..num).map(|_| gate.decide(gain, ProbeOutlook::default)).collect::<Vec<_>>()
    };
    use GateState::{Closed, ExploreHalf, ExploreSkip, Open, Probe};
    assert_eq!(states(0.2, 6), [Open, Open, ExploreSkip, Open, Open, ExploreHalf]);
    assert_eq!(states(0.01, 1), [Open], "an open gate stays open while anything is gained");
    assert_eq!(states(0.0, 7), [Closed, Probe, Closed, Closed, Closed, Probe, Closed]);
    assert_eq!(states(0.01, 2), [Closed, Closed], "a closed gate asks for the least gain");
    assert_eq!(states(0.05, 1), [Open]);
}

#[test]
fn a_probe_waits_until_steps_without_drafts_have_paid_for_it() {
    let mut gate = gate(0.125);
    // Of 5 plain steps: 40 at an eighth.
    let price = || ProbeOutlook { plain_us: 10.0, extra_us: 50.0, worth: 1.0, num_drafts: 64 };
    let is_probe: Vec<bool> =
        (0..500).map(|_| gate.decide(-0.5, price) == GateState::Probe).collect();
    let probes: Vec<usize> = (0..500).filter(|&step| is_probe[step]).collect();
    assert_eq!(probes.first(), Some(&39));
    assert!(probes.array_windows().all(|[before, next]| next - before == 40), "{probes:?}");
}

#[test]
fn time_without_probes_pays_for_a_row_of_them() {
    let settings = GateSettings {
        probe_interval: 8,
        max_probe_interval: 800,
        max_probe_share: 0.125,
        ..GateSettings::default()
    };
    let mut gate = DraftGate::new(settings).unwrap();
    // A probe of a plain step: 8 steps pay for it.
    let mut next = |worth: f64| {
        let outlook = || ProbeOutlook { plain_us: 8.0, extra_us: 8.0, worth, num_drafts: 64 };
        (1..2000).find(|_| gate.decide(-0.5, outlook) == GateState::Probe).unwrap()
    };
    let first: Vec<usize> = (0..9).map(|_| next(1.0)).collect();
    assert_eq!(first, [8, 16, 32, 64, 128, 256, 512, 800, 800]);
    // 16 are paid for, and one more in every row of 8 steps.
    let row: Vec<usize> = (1..30).map(|power| next(1.5_f64.powi(power))).collect();
    assert!(row.iter().all(|&steps| steps == 8), "{row:?}");
}

#[test]
fn good_news_ask_for_the_next_probe_soon() {
    let settings =
        GateSettings { probe_interval: 16, max_probe_interval: 64, ..GateSettings::default() };
    let mut gate = DraftGate::new(settings).unwrap();
    let mut next_probe = |worth: f64| {
        let outlook = || ProbeOutlook { plain_us: 100.0, extra_us: 1.0, worth, num_drafts: 64 };
        (1..99).find(|_| gate.decide(-0.5, outlook) == GateState::Probe).unwrap()
    };
    assert_eq!([1.0, 1.0, 0.9, 1.0].map(&mut next_probe), [16, 32, 64, 64]);
    // Each probe brings more than the one before, until one does not.
    assert_eq!([1.3, 1.7, 3.0, 3.1, 3.1, 3.1].map(&mut next_probe), [8, 8, 8, 16, 32, 64]);
}

#[test]
fn small_probes_come_in_rows_that_verify_what_a_large_one_does() {
    let settings =
        GateSettings { probe_interval: 16, max_probe_interval: 64, ..GateSettings::default() };
    for (num_drafts, row) in [(7, 10), (28, 3), (63, 2), (64, 1), (448, 1)] {
        let mut gate = DraftGate::new(settings).unwrap();
        let outlook = || ProbeOutlook { plain_us: 100.0, extra_us: 1.0, worth: 1.0, num_drafts };
        let mut next = || (1..99).find(|_| gate.decide(-0.5, outlook) == GateState::Probe).unwrap();
        for interval in [16, 32, 64, 64] {
            assert_eq!(next(), interval, "{num_drafts} drafts");
            let others: Vec<usize> = (1..row).map(|_| next()).collect();
            assert_eq!(others, vec![8; row - 1], "{num_drafts} drafts");
        }
    }
}

#[test]
fn a_row_of_small_probes_is_paid_for_too() {
    let mut gate = gate(0.125);
    let price = || ProbeOutlook { plain_us: 10.0, extra_us: 50.0, worth: 1.0, num_drafts: 7 };
    let probes: Vec<usize> =
        (0..500).filter(|_| gate.decide(-0.5, price) == GateState::Probe).collect();
    assert_eq!(probes.first(), Some(&39));
    assert!(probes.array_windows().all(|[before, next]| next - before == 40), "{probes:?}");
}

#[test]
fn good_news_are_those_since_before_a_row() {
    let settings =
        GateSettings { probe_interval: 16, max_probe_interval: 64, ..GateSettings::default() };
    let mut gate = DraftGate::new(settings).unwrap();
    let mut next = |worth: f64| {
        let outlook = || ProbeOutlook { plain_us: 100.0, extra_us: 1.0, worth, num_drafts: 28 };
        (1..99).find(|_| gate.decide(-0.5, outlook) == GateState::Probe).unwrap()
    };
    // A row of three; what they bring is a quarter more only together, so another row follows.
    assert_eq!([1.0, 1.1, 1.2].map(&mut next), [16, 8, 8]);
    assert_eq!([1.3, 1.3, 1.3].map(&mut next), [8, 8, 8]);
    assert_eq!(next(1.3), 16);
}

#[test]
fn a_short_opening_does_not_make_probes_more_frequent() {
    let settings =
        GateSettings { probe_interval: 4, max_probe_interval: 16, ..GateSettings::default() };
    let mut gate = DraftGate::new(settings).unwrap();
    let closed = |gate: &mut DraftGate| {
        (1..99).find(|_| gate.decide(-0.5, ProbeOutlook::default) == GateState::Probe).unwrap()
    };
    assert_eq!([closed(&mut gate), closed(&mut gate), closed(&mut gate)], [4, 8, 16]);
    gate.decide(0.5, ProbeOutlook::default);
    assert_eq!(closed(&mut gate), 16);
    (0..4).for_each(|_| assert_eq!(gate.decide(0.5, ProbeOutlook::default), GateState::Open));
    assert_eq!(closed(&mut gate), 4);
}
