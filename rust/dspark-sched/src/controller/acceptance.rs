//! What drafts were worth lately, over all requests: enough to predict a step that has no
//! confidences yet, at any number of requests.

use crate::confidence::sanitized;
use crate::step_cost::StepLoad;
use crate::verify_plan::{PlanCost, Prediction};

const NUM_BINS: usize = 256;
/// Weight of the past when a drafting step follows another.
const DENSITY_DECAY: f64 = 0.9;
const RATIO_DECAY: f64 = 0.99;
/// Accepted and predicted drafts that are assumed before any data.
const RATIO_PRIOR: f64 = 64.0;
/// Predicted drafts that the ratio lately, and the usual one, remember at most.
const MEMORY: f64 = 256.0;
const USUAL_MEMORY: f64 = 16_384.0;
/// The same of the ratio lately when a probe ends, which must be able to say something new: as much as
/// the probe predicts, within these.
const PROBE_MEMORY: [f64; 2] = [8.0, 64.0];
/// Far above 1: after acceptance has risen, a model of confidences learns little from probes, and the
/// ratio alone must show it.
const MAX_RATIO: f64 = 8.0;

/// How many drafts of a request have about which survival.
#[derive(Debug, Clone)]
pub struct SurvivalDensity {
    /// Per bin of survival: drafts per request, and their survivals' sum.
    bins: Vec<[f64; 2]>,
    fresh: Vec<[f64; 2]>,
}

impl SurvivalDensity {
    /// Before any data: `num_drafts` drafts per request that are all accepted.
    #[must_use]
    pub fn new(num_drafts: usize) -> Self {
        let mut bins = vec![[0.0; 2]; NUM_BINS];
        bins[NUM_BINS - 1] = [num_drafts as f64; 2];
        Self { fresh: bins.clone(), bins }
    }

    /// Blends in the survivals of one step; `is_fresh_start` forgets what was before.
    pub fn observe(&mut self, survival: &[f32], num_requests: usize, is_fresh_start: bool) {
        if num_requests == 0 {
            return;
        }
        self.fresh.fill([0.0; 2]);
        for &survival in survival {
            let survival = sanitized(survival);
            let bin = &mut self.fresh[bin_of(survival)];
            bin[0] += 1.0;
            bin[1] += f64::from(survival);
        }
        let past = if is_fresh_start { 0.0 } else { DENSITY_DECAY };
        let share = (1.0 - past) / num_requests as f64;
        for (bin, fresh) in self.bins.iter_mut().zip(&self.fresh) {
            *bin = [past * bin[0] + share * fresh[0], past * bin[1] + share * fresh[1]];
        }
    }

    /// Drafts of a request that should be accepted if all are verified.
    #[must_use]
    pub fn num_likely(&self) -> f64 {
        self.bins.iter().map(|bin| bin[1]).sum()
    }

    /// The best number of drafts for a load, and what it should bring.
    ///
    /// Candidates are the ends of bins, from high survival to low, and the bends and jumps of the
    /// cost on the way.
    #[must_use]
    pub fn best(
        &self,
        load: &StepLoad,
        cost: &PlanCost<'_>,
        max_num_drafts: u32,
    ) -> (u32, Prediction) {
        let objective = cost.objective(load);
        let base = load.num_base_tokens();
        let requests = f64::from(load.num_requests);
        let mut best = (objective.rate(0, 0.0), 0, 0.0);
        let (mut count, mut sum) = (0.0, 0.0);
        for &[per_request, survival] in self.bins.iter().rev().filter(|bin| bin[0] > 0.0) {
            let mut consider = |num_drafts: u32| {
                let here = sum + survival / per_request * (f64::from(num_drafts) - count);
                let rate = objective.rate(num_drafts, here);
                if rate > best.0 {
                    best = (rate, num_drafts, here);
                }
            };
            let start = whole(count).min(max_num_drafts);
            let end = whole(count + requests * per_request).min(max_num_drafts);
            for &num_tokens in
                cost.cost.breaks_between(base.saturating_add(start), base.saturating_add(end))
            {
                consider(num_tokens - base);
            }
            if end > start {
                consider(end);
            }
            count += requests * per_request;
            sum += requests * survival;
        }
        let prediction = Prediction {
            step_us: objective.times.at(best.1),
            num_tokens: objective.num_tokens(best.2),
            gain: objective.gain(best.0),
        };
        (best.1, prediction)
    }
}

/// Accepted drafts over predicted ones: lately, and what was usual before; 1 before any data.
///
/// A model of confidences that is refitted takes over what the ratio had learnt, and until the ratio
/// forgets it, both count. So lately is short. What was usual moves slowly, and shows while it differs
/// that predictions are in flux.
#[derive(Debug, Clone, Copy)]
pub struct AcceptanceRatio {
    lately: Sums,
    usual: Sums,
}

#[derive(Debug, Clone, Copy)]
struct Sums {
    predicted: f64,
    accepted: f64,
}

impl Default for AcceptanceRatio {
    fn default() -> Self {
        let prior = Sums { predicted: RATIO_PRIOR, accepted: RATIO_PRIOR };
        Self { lately: prior, usual: prior }
    }
}

impl AcceptanceRatio {
    /// The ratio lately, between 0 and 8.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.lately.ratio()
    }

    /// The ratio that was usual, between 0 and 8.
    #[must_use]
    pub fn usual(&self) -> f64 {
        self.usual.ratio()
    }

    /// Keeps the ratio, but as if it came from few drafts: what was learnt before a pause weighs about
    /// as much as a probe that predicts so many.
    pub fn weaken(&mut self, predicted: f64) {
        let [least, most] = PROBE_MEMORY;
        self.lately.forget(predicted.max(least).min(most));
    }

    /// Counts one step's verified drafts: the sum of their survivals, and how many were accepted.
    pub fn observe(&mut self, predicted: f64, accepted: f64) {
        if !(predicted.is_finite() && accepted.is_finite()) || predicted <= 0.0 {
            return;
        }
        for (sums, memory) in [(&mut self.lately, MEMORY), (&mut self.usual, USUAL_MEMORY)] {
            sums.forget(memory);
            let prior = RATIO_PRIOR * (1.0 - RATIO_DECAY);
            sums.predicted = RATIO_DECAY * sums.predicted + predicted + prior;
            sums.accepted = RATIO_DECAY * sums.accepted + accepted + prior;
        }
    }
}

impl Sums {
    fn ratio(&self) -> f64 {
        (self.accepted / self.predicted).clamp(0.0, MAX_RATIO)
    }

    /// Lets the past weigh so many predicted drafts at most.
    fn forget(&mut self, memory: f64) {
        let share = (memory / self.predicted).min(1.0);
        self.predicted *= share;
        self.accepted *= share;
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of drafts")]
fn whole(count: f64) -> u32 {
    (count + 1e-6).floor() as u32
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a probability")]
fn bin_of(survival: f32) -> usize {
    ((survival * NUM_BINS as f32) as usize).min(NUM_BINS - 1)
}
