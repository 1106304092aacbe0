//! Features of draft positions.

use super::model::EstimatorError;
use crate::confidence::sanitized_logit;

/// Intercept, head, margin, request temperature, position.
pub(super) const NUM_FEATURES: usize = 5;

const MAX_HEAD_LOGIT: f32 = 20.0;
const MAX_MARGIN: f32 = 40.0;
const MAX_TEMPERATURE: f32 = 5.0;

/// Features of one draft.
pub(super) type Features = [f32; NUM_FEATURES];

/// Which features a model looks at, besides an intercept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FeatureSet {
    /// Logit of the trained confidence head.
    pub head: bool,
    /// Difference of the two largest draft logits.
    pub margin: bool,
    /// Sampling temperature of the request.
    pub request_temperature: bool,
    /// Position within the block.
    pub position: bool,
}

/// Features of the drafts of `R` requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct FeatureBatch<'a> {
    /// `R`.
    pub num_requests: usize,
    /// `[R, γ]` logits of the head.
    pub head_logits: Option<&'a [f32]>,
    /// `[R, γ]` largest minus second largest draft logit.
    pub margins: Option<&'a [f32]>,
    /// `[R]` sampling temperatures.
    pub request_temperatures: Option<&'a [f32]>,
}

impl FeatureSet {
    /// What the model says before any data: the head as it is, else that drafts are likely accepted.
    pub(super) fn prior(self) -> [f64; NUM_FEATURES] {
        if self.head { [0.0, 1.0, 0.0, 0.0, 0.0] } else { [2.0, 0.0, 0.0, 0.0, 0.0] }
    }

    pub(super) fn check(
        self,
        batch: &FeatureBatch<'_>,
        num_drafts: usize,
    ) -> Result<(), EstimatorError> {
        let num_cells = batch.num_requests * num_drafts;
        let arrays = [
            ("head_logits", self.head, batch.head_logits, num_cells),
            ("margins", self.margin, batch.margins, num_cells),
            (
                "request_temperatures",
                self.request_temperature,
                batch.request_temperatures,
                batch.num_requests,
            ),
        ];
        for (name, is_used, array, expected) in arrays {
            match array {
                None if is_used => return Err(EstimatorError::MissingFeature { name }),
                Some(array) if array.len() != expected => {
                    let found = array.len();
                    return Err(EstimatorError::WrongLength { name, found, expected });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes the logit of each draft of a checked batch into `logits` `[R, γ]`: that of
    /// [`FeatureSet::of`], summed array by array.
    pub(super) fn logits(
        self,
        batch: &FeatureBatch<'_>,
        num_drafts: usize,
        coefficients: &[f64; NUM_FEATURES],
        logits: &mut [f32],
    ) {
        let [intercept, of_head, of_margin, of_temperature, of_place] = coefficients.map(narrowed);
        let temperatures = batch.request_temperatures.filter(|_| self.request_temperature);
        for (row, logits) in logits.chunks_exact_mut(num_drafts).enumerate() {
            let temperature = temperatures.and_then(|of| of.get(row)).copied().unwrap_or(0.0);
            logits.fill(intercept + of_temperature * bounded(temperature, MAX_TEMPERATURE));
            if self.position {
                let slope = of_place / num_drafts as f32;
                let places = logits.iter_mut().enumerate();
                places.for_each(|(position, logit)| *logit += slope * position as f32);
            }
        }
        if let Some(head) = batch.head_logits.filter(|_| self.head) {
            for (logit, &head) in logits.iter_mut().zip(head) {
                *logit += of_head * limited(head);
            }
        }
        if let Some(margins) = batch.margins.filter(|_| self.margin) {
            for (logit, &margin) in logits.iter_mut().zip(margins) {
                *logit += of_margin * bounded(margin, MAX_MARGIN);
            }
        }
    }

    /// Features of a draft of a checked batch; what the set leaves out is 0.
    pub(super) fn of(
        self,
        batch: &FeatureBatch<'_>,
        num_drafts: usize,
        row: usize,
        position: usize,
    ) -> Features {
        let cell = row * num_drafts + position;
        let at = |is_used: bool, array: Option<&[f32]>, index: usize| {
            array.filter(|_| is_used).and_then(|array| array.get(index)).copied().unwrap_or(0.0)
        };
        let head = limited(at(self.head, batch.head_logits, cell));
        let margin = at(self.margin, batch.margins, cell);
        let temperature = at(self.request_temperature, batch.request_temperatures, row);
        let place = if self.position { position as f32 / num_drafts as f32 } else { 0.0 };
        [1.0, head, bounded(margin, MAX_MARGIN), bounded(temperature, MAX_TEMPERATURE), place]
    }
}

/// A head's logit within its limits; NaN is the lowest.
fn limited(logit: f32) -> f32 {
    sanitized_logit(logit).clamp(-MAX_HEAD_LOGIT, MAX_HEAD_LOGIT)
}

#[expect(clippy::cast_possible_truncation, reason = "a coefficient")]
fn narrowed(value: f64) -> f32 {
    value as f32
}

/// Within `[0, limit]`; NaN is 0.
fn bounded(value: f32, limit: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value.clamp(0.0, limit) }
}

#[cfg(test)]
mod tests {
    use super::{FeatureBatch, FeatureSet, NUM_FEATURES};
    use crate::estimator::irls::logit;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn odd() -> impl Strategy<Value = f32> {
        prop_oneof![8 => -30.0..50.0_f32, 1 => Just(f32::NAN), 1 => Just(f32::INFINITY)]
    }

    proptest! {
        /// Summed array by array the logits are those of the features one by one.
        #[test]
        fn logits_are_those_of_the_features(
            [head, margin, request_temperature, position] in any::<[bool; 4]>(),
            head_logits in vec(odd(), 4 * 3),
            margins in vec(odd(), 4 * 3),
            temperatures in vec(odd(), 4),
            coefficients in prop::array::uniform5(-2.0..2.0_f64),
        ) {
            let set = FeatureSet { head, margin, request_temperature, position };
            let batch = FeatureBatch {
                num_requests: 4,
                head_logits: Some(&head_logits),
                margins: Some(&margins),
                request_temperatures: Some(&temperatures),
            };
            let coefficients: [f64; NUM_FEATURES] = coefficients;
            let mut found = [0.0; 12];
            set.logits(&batch, 3, &coefficients, &mut found);
            for (cell, found) in found.into_iter().enumerate() {
                let features = set.of(&batch, 3, cell / 3, cell % 3);
                let expected = logit(&coefficients, &features);
                prop_assert!((f64::from(found) - expected).abs() < 1e-4, "{} {}", found, expected);
            }
        }
    }
}
