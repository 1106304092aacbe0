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
        let head = sanitized_logit(at(self.head, batch.head_logits, cell));
        let margin = at(self.margin, batch.margins, cell);
        let temperature = at(self.request_temperature, batch.request_temperatures, row);
        let place = if self.position { position as f32 / num_drafts as f32 } else { 0.0 };
        [
            1.0,
            head.clamp(-MAX_HEAD_LOGIT, MAX_HEAD_LOGIT),
            bounded(margin, MAX_MARGIN),
            bounded(temperature, MAX_TEMPERATURE),
            place,
        ]
    }
}

/// Within `[0, limit]`; NaN is 0.
fn bounded(value: f32, limit: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value.clamp(0.0, limit) }
}
