//! Survival of drafts: the chance that a draft and all before it are accepted.
//!
//! With confidences `c_1 … c_γ` of one request, survival is `a_j = c_1 · … · c_j` (DSpark, section
//! 4: `a_{r,j}`). It never increases with `j`, so the best drafts of a request form a prefix.

/// Confidence logits are cut to this size, as in the published temperature files.
pub const MAX_ABS_LOGIT: f32 = 80.0;

/// A confidence as a probability: NaN and infinities are 0, the rest is clamped to `[0, 1]`.
#[must_use]
pub fn sanitized(confidence: f32) -> f32 {
    if confidence.is_finite() { confidence.clamp(0.0, 1.0) } else { 0.0 }
}

/// A logit within ±[`MAX_ABS_LOGIT`]; NaN is the lowest.
#[must_use]
pub fn sanitized_logit(logit: f32) -> f32 {
    if logit.is_nan() { -MAX_ABS_LOGIT } else { logit.clamp(-MAX_ABS_LOGIT, MAX_ABS_LOGIT) }
}

/// The confidence of a logit at a temperature: `1 / (1 + exp(-logit / temperature))`.
///
/// The temperature is positive; [`crate::calibration::Temperatures`] holds only such.
///
/// ```
/// assert_eq!(dspark_sched::confidence::confidence_of_logit(0.0, 2.0), 0.5);
/// assert!(dspark_sched::confidence::confidence_of_logit(f32::NAN, 1.0) < 1e-30);
/// ```
#[must_use]
pub fn confidence_of_logit(logit: f32, temperature: f32) -> f32 {
    1.0 / (1.0 + (-sanitized_logit(logit) / temperature).exp())
}

/// Yields the survival of each draft of one request, from its confidences in draft order.
///
/// ```
/// let survival: Vec<f32> = dspark_sched::survival(&[0.5, f32::NAN, 0.9]).collect();
/// assert_eq!(survival, [0.5, 0.0, 0.0]);
/// ```
pub fn survival(confidences: &[f32]) -> impl ExactSizeIterator<Item = f32> + '_ {
    let mut product = 1.0;
    confidences.iter().map(move |&confidence| {
        product *= sanitized(confidence);
        product
    })
}
