//! Temperatures: recovery from synthetic rounds, files, pairing, drift, refusals.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod speculation;

use dspark_sched::calibration::{
    CalibrationError, FitSettings, OnlineSettings, OnlineTemperatures, Round, Rounds, Temperatures,
    check_pairing, expected_calibration_error, fit_temperatures, log_grid,
};
use dspark_sched::{RequestId, StepId};
use speculation::Random;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Logits of a head that should be divided by `temperatures`, and what then happens.
fn round(random: &mut Random, temperatures: &[f64]) -> (Vec<f32>, usize) {
    let logits: Vec<f32> =
        temperatures.iter().map(|t| (t * (1.0 + 1.5 * random.normal())) as f32).collect();
    let accepted = logits.iter().zip(temperatures);
    let mut outcomes = accepted.map(|(&z, t)| random.uniform() < sigmoid(f64::from(z) / t));
    let num_accepted = outcomes.position(|is_accepted| !is_accepted);
    (logits, num_accepted.unwrap_or(temperatures.len()))
}

fn whole(logits: &[f32], num_accepted: usize) -> Round<'_> {
    Round {
        request_id: RequestId(1),
        logits_step: StepId(1),
        outcome_step: StepId(1),
        logits,
        num_verified: logits.len(),
        num_accepted,
        end: None,
    }
}

const TRUE: [f64; 4] = [2.5, 1.6, 0.6, 1.0];

fn synthetic(num_rounds: u64) -> Rounds {
    let mut rounds = Rounds::new(4).unwrap();
    let mut random = Random(11);
    for index in 0..num_rounds {
        let (logits, num_accepted) = round(&mut random, &TRUE);
        let step = StepId(index / 8);
        let tags = Round {
            request_id: RequestId(index % 8),
            logits_step: step,
            outcome_step: step,
            ..whole(&logits, num_accepted)
        };
        rounds.push(&tags).unwrap();
    }
    rounds
}

#[test]
fn a_fit_recovers_known_temperatures_and_error_falls() {
    let fit = fit_temperatures(&synthetic(40_000), &FitSettings::default()).unwrap();
    // The grid is 12 % apart; the last position has little weight in the survival.
    for (position, expected) in fit.positions.iter().zip(TRUE) {
        let ratio = position.temperature / expected;
        assert!((0.75..1.35).contains(&ratio), "{} for {expected}", position.temperature);
        assert!(position.ece_after <= position.ece_before + 1e-12, "{position:?}");
        assert!(position.ece_after < 0.01, "{position:?}");
        assert!((position.mean_after - position.accepted_ratio).abs() < 0.01);
    }
    assert!(fit.positions[0].ece_before > 0.05);
    assert_eq!(fit.num_rounds, 40_000);
}

#[test]
fn calibration_error_is_what_the_formula_says() {
    assert_eq!(expected_calibration_error(std::iter::empty(), 15), 0.0);
    let pairs = [(0.9, true), (0.8, false), (1.0, true), (0.1, true)];
    // Bins [0, 0.5) and [0.5, 1]: 0.9 off in one of four; 0.7 / 3 off in three of four.
    let error = expected_calibration_error(pairs.into_iter(), 2);
    assert!((error - (0.9 + 0.7) / 4.0).abs() < 1e-12, "{error}");
}

#[test]
fn the_grid_is_logarithmic() {
    let grid = log_grid(0.1, 10.0, 41);
    assert_eq!((grid.len(), grid[0]), (41, 0.1));
    assert!((grid[20] - 1.0).abs() < 1e-12 && (grid[40] - 10.0).abs() < 1e-12);
    assert_eq!(log_grid(0.5, 2.0, 1), [0.5]);
}

#[test]
fn drafts_after_an_accepted_end_do_not_count() {
    let mut rounds = Rounds::new(2).unwrap();
    let settings = FitSettings { min_num_rounds: 10, ..FitSettings::default() };
    let logits = [3.0, -3.0];
    for index in 0..20 {
        let end = if index % 2 == 0 { Some(0) } else { None };
        rounds.push(&Round { end, ..whole(&logits, 1 + index % 2) }).unwrap();
    }
    let fit = fit_temperatures(&rounds, &settings).unwrap();
    let counts: Vec<usize> = fit.positions.iter().map(|position| position.num_rounds).collect();
    assert_eq!(counts, [20, 10]);
    // Half the rounds end there; the others accept the second draft every time.
    assert_eq!(fit.positions[1].accepted_ratio, 1.0);
    let settings = FitSettings { min_num_rounds: 11, ..settings };
    let error = fit_temperatures(&rounds, &settings).unwrap_err();
    assert_eq!(error, CalibrationError::TooFewRounds { position: 2, found: 10, needed: 11 });
}

#[test]
fn rounds_that_cannot_be_are_refused() {
    assert_eq!(Rounds::new(0), Err(CalibrationError::Zero { name: "num_drafts" }));
    let mut rounds = Rounds::new(2).unwrap();
    let logits = [1.0, 1.0];
    let good = whole(&logits, 1);
    let error = rounds.push(&Round { logits: &logits[..1], ..good });
    assert_eq!(error, Err(CalibrationError::WrongLength { found: 1, expected: 2 }));
    let error = rounds.push(&Round { num_verified: 1, ..good });
    assert_eq!(error, Err(CalibrationError::Censored { found: 1, needed: 2 }));
    let error = rounds.push(&Round { num_accepted: 3, ..good });
    assert_eq!(error, Err(CalibrationError::AcceptedPastWindow { found: 3, limit: 2 }));
    let error = rounds.push(&Round { end: Some(1), ..good });
    assert_eq!(error, Err(CalibrationError::EndNotAccepted { found: 1, limit: 1 }));
    let error = rounds.push(&Round { outcome_step: StepId(2), ..good });
    let mismatch = CalibrationError::PairingMismatch {
        request_id: RequestId(1),
        logits_step: StepId(1),
        outcome_step: StepId(2),
    };
    assert_eq!(error, Err(mismatch));
    assert!(rounds.is_empty());
    rounds.push(&good).unwrap();
    assert_eq!((rounds.len(), rounds.num_drafts()), (1, 2));
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let rounds = synthetic(8);
    let defaults = FitSettings::default();
    let bad = [
        (FitSettings { num_bins: 0, ..defaults }, "num_bins is 0"),
        (FitSettings { num_temperatures: 0, ..defaults }, "num_temperatures is 0"),
        (FitSettings { num_bins: 10_001, ..defaults }, "num_bins is 10001"),
        (FitSettings { min_temperature: 0.0, ..defaults }, "min_temperature is 0"),
        (FitSettings { max_temperature: 0.01, ..defaults }, "max_temperature is 0.01"),
        (defaults, "position 1 has 8 rounds: at least 1000 are needed"),
    ];
    for (settings, message) in bad {
        let error = fit_temperatures(&rounds, &settings).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let start = Temperatures::identity(2).unwrap();
    let defaults = OnlineSettings::default();
    let bad = [
        (OnlineSettings { decay: 0.0, ..defaults }, "decay is 0"),
        (OnlineSettings { prior_weight: f64::NAN, ..defaults }, "prior_weight is NaN"),
        (OnlineSettings { min_temperature: -1.0, ..defaults }, "min_temperature is -1"),
        (OnlineSettings { max_temperature: 0.1, ..defaults }, "max_temperature is 0.1"),
        (OnlineSettings { num_temperatures: 0, ..defaults }, "num_temperatures is 0"),
        (OnlineSettings { num_temperatures: 1 << 40, ..defaults }, "at most 10000"),
    ];
    for (settings, message) in bad {
        let error = OnlineTemperatures::new(start.clone(), settings).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

/// Rounds whose outcomes are those `offset` rounds away, with tags that claim otherwise.
fn shifted(offset: usize) -> Rounds {
    let mut rounds = Rounds::new(4).unwrap();
    let mut random = Random(5);
    for request in 0..16 {
        let drawn: Vec<_> = (0..200).map(|_| round(&mut random, &TRUE)).collect();
        for (step, ((logits, _), (_, num_accepted))) in
            drawn.iter().zip(&drawn[offset..]).enumerate()
        {
            let step = StepId(step as u64);
            let tags = Round {
                request_id: RequestId(request),
                logits_step: step,
                outcome_step: step,
                ..whole(logits, *num_accepted)
            };
            rounds.push(&tags).unwrap();
        }
    }
    rounds
}

#[test]
fn pairs_off_by_one_round_are_detected() {
    let report = check_pairing(&shifted(0)).unwrap();
    assert!(report.auc[1].unwrap() > 0.7, "{report:?}");
    let error = check_pairing(&shifted(1)).unwrap_err();
    assert!(matches!(error, CalibrationError::PairingSuspect { offset: -1, .. }), "{error}");
    // Such pairs also look worse calibrated after the fit than true ones.
    let settings = FitSettings::default();
    let [right, wrong] =
        [0, 1].map(|offset| fit_temperatures(&shifted(offset), &settings).unwrap());
    assert!(wrong.positions[0].temperature > 2.0 * right.positions[0].temperature);
}

#[test]
fn few_rounds_say_nothing_about_pairing() {
    let report = check_pairing(&synthetic(50)).unwrap();
    assert_eq!(report.auc, [None; 3]);
}

#[test]
fn files_of_other_engines_are_read() {
    let expected = [2.0, 0.5];
    for text in [
        r#"{"temperatures": [2.0, 0.5], "ece_before": [0.1, 0.1], "num_samples": 5}"#,
        r#"{"sts_temperatures": [2, 0.5], "pairing": "v2", "block_size": 2}"#,
        r#"{"temperatures": [2.0, 0.5], "sts_temperatures": [2.0, 0.5]}"#,
    ] {
        assert_eq!(Temperatures::from_json(text).unwrap().values(), expected, "{text}");
    }
    let fit = fit_temperatures(&synthetic(2_000), &FitSettings::default()).unwrap();
    let text = fit.to_json().unwrap();
    assert_eq!(Temperatures::from_json(&text).unwrap(), fit.temperatures);
    assert!(text.contains("\"ece_after\"") && text.contains("\"num_samples\": 2000"));
}

#[test]
fn files_that_cannot_be_are_refused() {
    let refused = |text: &str| Temperatures::from_json(text).unwrap_err();
    assert!(matches!(refused("["), CalibrationError::Json { .. }));
    assert!(matches!(refused(r#"{"temperatures": ["x"]}"#), CalibrationError::Json { .. }));
    assert_eq!(refused("{}"), CalibrationError::NoTemperatures);
    assert_eq!(refused(r#"{"temperatures": []}"#), CalibrationError::NoTemperatures);
    let both = r#"{"temperatures": [1.0], "sts_temperatures": [2.0]}"#;
    assert_eq!(refused(both), CalibrationError::Conflict);
    for found in [0.0, -1.0, 1e300] {
        let error = refused(&format!("{{\"temperatures\": [1.0, {found:?}]}}"));
        assert_eq!(error, CalibrationError::BadTemperature { position: 2, found });
    }
    let two = Temperatures::identity(2).unwrap();
    assert_eq!(two.of_first(1).unwrap().values(), [1.0]);
    let error = CalibrationError::TooFewTemperatures { found: 2, needed: 3 };
    assert_eq!(two.of_first(3), Err(error));
    assert_eq!(Temperatures::identity(0), Err(CalibrationError::NoTemperatures));
}

#[test]
fn temperatures_turn_logits_into_confidences() {
    let temperatures = Temperatures::new(vec![2.0, 1.0]).unwrap();
    let mut cells = [2.0, 0.0, f32::NAN, f32::INFINITY];
    temperatures.apply(&mut cells).unwrap();
    assert!((f64::from(cells[0]) - sigmoid(1.0)).abs() < 1e-6 && cells[1] == 0.5);
    assert!(cells[2] < 1e-15 && cells[3] == 1.0);
    assert!(temperatures.apply(&mut cells[..3]).is_err());
}

/// Rounds of heads with these temperatures; windows follow the confidences, as a planner's do.
fn learn(online: &mut OnlineTemperatures, truth: &[f64; 4], num_steps: usize, seed: u64) {
    let mut random = Random(seed);
    for _ in 0..num_steps {
        online.begin_step();
        for _ in 0..16 {
            let (logits, num_accepted) = round(&mut random, truth);
            let is_bold = |&z: &f32| z > 0.5;
            let num_verified = logits.iter().position(|z| !is_bold(z)).unwrap_or(4);
            let num_accepted = num_accepted.min(num_verified);
            let trimmed = Round { num_verified, ..whole(&logits, num_accepted) };
            online.observe(&trimmed).unwrap();
        }
    }
    online.refit().unwrap();
}

#[test]
fn online_temperatures_follow_drift_from_trimmed_windows() {
    let start = Temperatures::new(TRUE.to_vec()).unwrap();
    let mut online = OnlineTemperatures::new(start.clone(), OnlineSettings::default()).unwrap();
    assert_eq!(online.refit().unwrap(), &start, "nothing seen, nothing changed");
    learn(&mut online, &TRUE, 1_500, 1);
    for (found, expected) in online.temperatures().values().iter().zip(TRUE) {
        assert!((f64::from(*found) / expected).ln().abs() < 0.25, "{found} for {expected}");
    }
    let drifted = TRUE.map(|t| 1.5 * t);
    learn(&mut online, &drifted, 4_000, 2);
    for (found, expected) in online.temperatures().values().iter().zip(drifted) {
        assert!((f64::from(*found) / expected).ln().abs() < 0.25, "{found} for {expected}");
    }
}

#[test]
fn censored_positions_are_no_trials() {
    let start = Temperatures::identity(4).unwrap();
    let settings = OnlineSettings { decay: 0.5, ..OnlineSettings::default() };
    let mut online = OnlineTemperatures::new(start, settings).unwrap();
    let logits = [1.0; 4];
    let trials = |online: &OnlineTemperatures| online.num_trials().collect::<Vec<f64>>();
    online.observe(&Round { num_verified: 2, ..whole(&logits, 2) }).unwrap();
    assert_eq!(trials(&online), [1.0, 1.0, 0.0, 0.0], "the window ends");
    online.observe(&whole(&logits, 1)).unwrap();
    assert_eq!(trials(&online), [2.0, 2.0, 0.0, 0.0], "the first rejection ends it");
    online.observe(&Round { end: Some(0), ..whole(&logits, 3) }).unwrap();
    assert_eq!(trials(&online), [3.0, 2.0, 0.0, 0.0], "an accepted end of sequence ends it");
    online.begin_step();
    assert_eq!(trials(&online), [1.5, 1.0, 0.0, 0.0]);
    let error = online.observe(&Round { num_verified: 1, ..whole(&logits, 2) });
    assert_eq!(error, Err(CalibrationError::AcceptedPastWindow { found: 2, limit: 1 }));
}
