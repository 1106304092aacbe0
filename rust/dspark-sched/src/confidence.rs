//! Survival of drafts: the chance that a draft and all before it are accepted.
//!
//! With confidences `c_1 … c_γ` of one request, survival is `a_j = c_1 · … · c_j` (DSpark, section
//! 4: `a_{r,j}`). It never increases with `j`, so the best drafts of a request form a prefix.

/// A confidence as a probability: NaN and infinities are 0, the rest is clamped to `[0, 1]`.
#[must_use]
pub fn sanitized(confidence: f32) -> f32 {
    if confidence.is_finite() { confidence.clamp(0.0, 1.0) } else { 0.0 }
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
