//! Acceptance from features: recovery, fusion, censoring, refusals.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod speculation;

use dspark_sched::estimator::{
    AcceptanceModel, EstimatorError, EstimatorSettings, FeatureBatch, FeatureSet,
};
use speculation::Random;

const HEAD: FeatureSet =
    FeatureSet { head: true, margin: false, request_temperature: false, position: false };
const MARGIN: FeatureSet = FeatureSet { head: false, margin: true, ..HEAD };
const ALL: FeatureSet =
    FeatureSet { head: true, margin: true, request_temperature: true, position: true };

/// Drafts whose acceptance both the head and the margin know something about.
struct World {
    head_logits: Vec<f32>,
    margins: Vec<f32>,
    temperatures: Vec<f32>,
    num_accepted: Vec<u32>,
}

const NUM_REQUESTS: usize = 8;
const NUM_DRAFTS: usize = 4;

impl World {
    fn draw(random: &mut Random) -> Self {
        let cells = NUM_REQUESTS * NUM_DRAFTS;
        let head_logits: Vec<f32> = (0..cells).map(|_| (1.5 * random.normal()) as f32).collect();
        let margins: Vec<f32> = (0..cells).map(|_| (4.0 * random.uniform()) as f32).collect();
        let temperatures: Vec<f32> = (0..NUM_REQUESTS).map(|row| (row % 2) as f32).collect();
        let num_accepted = (0..NUM_REQUESTS)
            .map(|row| {
                let accepts = |position: &u32| {
                    let cell = row * NUM_DRAFTS + *position as usize;
                    let truth = Self::truth(head_logits[cell], margins[cell], temperatures[row]);
                    random.uniform() < 1.0 / (1.0 + (-truth).exp())
                };
                (0..NUM_DRAFTS as u32).take_while(accepts).count() as u32
            })
            .collect();
        Self { head_logits, margins, temperatures, num_accepted }
    }

    fn truth(head: f32, margin: f32, temperature: f32) -> f64 {
        0.5 + 0.6 * f64::from(head) + 0.8 * f64::from(margin) - 1.2 * f64::from(temperature)
    }

    fn batch(&self) -> FeatureBatch<'_> {
        FeatureBatch {
            num_requests: NUM_REQUESTS,
            head_logits: Some(&self.head_logits),
            margins: Some(&self.margins),
            request_temperatures: Some(&self.temperatures),
        }
    }
}

fn model(features: FeatureSet) -> AcceptanceModel {
    let settings = EstimatorSettings { capacity: 20_000, ..EstimatorSettings::default() };
    AcceptanceModel::new(features, NUM_DRAFTS, settings).unwrap()
}

fn learnt(features: FeatureSet) -> (AcceptanceModel, f64) {
    let mut model = model(features);
    let mut random = Random(9);
    for _ in 0..1_000 {
        let world = World::draw(&mut random);
        let verified = [NUM_DRAFTS as u32; NUM_REQUESTS];
        model.observe(&world.batch(), &verified, &world.num_accepted).unwrap();
    }
    let report = model.refit().unwrap();
    assert!(report.loss_after <= report.loss_before);
    (model, report.loss_after)
}

#[test]
fn a_fit_recovers_known_coefficients() {
    let (model, _) = learnt(ALL);
    let found = model.coefficients();
    for (found, expected) in found.into_iter().zip([0.5, 0.6, 0.8, -1.2, 0.0]) {
        assert!((found - expected).abs() < 0.15, "{found} for {expected}");
    }
}

#[test]
fn both_features_know_more_than_either() {
    let [head, margin, both] =
        [HEAD, MARGIN, FeatureSet { margin: true, ..HEAD }].map(|features| learnt(features).1);
    assert!(both < head && both < margin, "{head} {margin} {both}");
}

#[test]
fn trimmed_windows_do_not_bias_the_model() {
    let mut model = model(ALL);
    let mut random = Random(21);
    for _ in 0..2_000 {
        let world = World::draw(&mut random);
        // A window as long as the heads before it are confident.
        let heads = world.head_logits.chunks_exact(NUM_DRAFTS);
        let verified: Vec<u32> =
            heads.map(|row| row.iter().take_while(|&&z| z > -0.5).count() as u32).collect();
        let accepted: Vec<u32> =
            world.num_accepted.iter().zip(&verified).map(|(&a, &v)| a.min(v)).collect();
        model.observe(&world.batch(), &verified, &accepted).unwrap();
    }
    model.refit().unwrap();
    let found = model.coefficients();
    for (found, expected) in found.into_iter().zip([0.5, 0.6, 0.8, -1.2, 0.0]) {
        assert!((found - expected).abs() < 0.25, "{found} for {expected}");
    }
}

#[test]
fn before_any_data_the_head_is_believed_and_drafts_are_tried() {
    let heads = [0.0, 1.0, f32::NAN, 30.0];
    let batch = FeatureBatch {
        num_requests: 1,
        head_logits: Some(&heads),
        margins: Some(&[0.5, f32::NAN, -1.0, f32::INFINITY]),
        request_temperatures: None,
    };
    let mut out = [0.0; 4];
    model(HEAD).confidences(&batch, &mut out).unwrap();
    assert!(out[0] == 0.5 && (out[1] - 0.731_058_6).abs() < 1e-6 && out[2] < 1e-8);
    model(MARGIN).confidences(&batch, &mut out).unwrap();
    assert!(out.iter().all(|c| (0.85..0.9).contains(c)), "{out:?}");
    assert_eq!(model(HEAD).refit(), None);
}

#[test]
fn a_model_is_refitted_every_so_many_steps() {
    let settings =
        EstimatorSettings { capacity: 64, min_num_trials: 10, refit_interval: 3, ridge: 1.0 };
    let mut model = AcceptanceModel::new(HEAD, NUM_DRAFTS, settings).unwrap();
    let mut random = Random(1);
    let mut fits = Vec::new();
    for _ in 0..6 {
        let world = World::draw(&mut random);
        let verified = [NUM_DRAFTS as u32; NUM_REQUESTS];
        model.observe(&world.batch(), &verified, &world.num_accepted).unwrap();
        fits.push(model.end_step().is_some());
    }
    assert_eq!(fits, [false, false, true, false, false, true]);
    assert_eq!(model.num_trials(), 64, "older trials are forgotten");
}

#[test]
fn separable_data_keep_the_model_finite() {
    let settings = EstimatorSettings { min_num_trials: 1, ..EstimatorSettings::default() };
    let mut model = AcceptanceModel::new(HEAD, 1, settings).unwrap();
    let heads = [20.0, -20.0];
    let batch =
        FeatureBatch { num_requests: 2, head_logits: Some(&heads), ..FeatureBatch::default() };
    for _ in 0..500 {
        model.observe(&batch, &[1, 1], &[1, 0]).unwrap();
    }
    model.refit().unwrap();
    assert!(model.coefficients().iter().all(|c| c.is_finite() && c.abs() < 10.0));
}

#[test]
fn what_cannot_be_is_refused() {
    let mut model = model(ALL);
    let many = FeatureBatch { num_requests: 1 << 21, ..FeatureBatch::default() };
    assert!(matches!(model.check(&many), Err(EstimatorError::OutOfRange { .. })));
    let world = World::draw(&mut Random(2));
    let good = world.batch();
    let mut out = [0.0; NUM_REQUESTS * NUM_DRAFTS];
    let missing = FeatureBatch { margins: None, ..good };
    let error = model.confidences(&missing, &mut out);
    assert_eq!(error, Err(EstimatorError::MissingFeature { name: "margins" }));
    let short = FeatureBatch { request_temperatures: Some(&[1.0]), ..good };
    let wrong = |name, found, expected| EstimatorError::WrongLength { name, found, expected };
    let error = model.confidences(&short, &mut out);
    assert_eq!(error, Err(wrong("request_temperatures", 1, 8)));
    assert_eq!(model.confidences(&good, &mut out[..3]), Err(wrong("confidences", 3, 32)));
    assert_eq!(model.observe(&good, &[1], &[1; 8]), Err(wrong("num_verified", 1, 8)));
    assert_eq!(model.observe(&good, &[1; 8], &[1]), Err(wrong("num_accepted", 1, 8)));
    for (verified, accepted) in [(1, 2), (5, 2)] {
        let error = model.observe(&good, &[verified; 8], &[accepted; 8]).unwrap_err();
        let expected = EstimatorError::AcceptedPastWindow {
            row: 0,
            num_accepted: accepted,
            num_verified: verified,
            num_drafts: 4,
        };
        assert_eq!(error, expected);
    }
    assert_eq!(model.num_trials(), 0);
    let defaults = EstimatorSettings::default();
    for (settings, name) in [
        (EstimatorSettings { capacity: 0, ..defaults }, "capacity"),
        (EstimatorSettings { capacity: usize::MAX, ..defaults }, "capacity"),
        (EstimatorSettings { refit_interval: 0, ..defaults }, "refit_interval"),
        (EstimatorSettings { ridge: f64::NAN, ..defaults }, "ridge"),
        (EstimatorSettings { min_num_trials: 9_999, ..defaults }, "min_num_trials"),
    ] {
        let error = AcceptanceModel::new(HEAD, 4, settings).unwrap_err();
        assert!(matches!(error, EstimatorError::OutOfRange { name: n, .. } if n == name));
    }
}
