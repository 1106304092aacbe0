//! Expected calibration error over equal-width bins of `[0, 1]`.

/// Returns `Σ_b n_b / n · |mean prediction_b - mean outcome_b|`; 0 without predictions.
///
/// A bin takes predictions in `[b / num_bins, (b + 1) / num_bins)`, the last one 1 as well.
///
/// ```
/// let pairs = [(0.75, true), (0.75, false), (0.25, false), (0.25, false)];
/// let error = dspark_sched::calibration::expected_calibration_error(pairs.into_iter(), 2);
/// assert_eq!(error, 0.25);
/// ```
#[must_use]
pub fn expected_calibration_error(
    pairs: impl Iterator<Item = (f64, bool)>,
    num_bins: usize,
) -> f64 {
    Bins::new(num_bins).error_of(pairs)
}

/// Reusable sums per bin.
pub(super) struct Bins {
    gaps: Vec<f64>,
}

impl Bins {
    pub(super) fn new(num_bins: usize) -> Self {
        Self { gaps: vec![0.0; num_bins.max(1)] }
    }

    /// The counts cancel: `n_b · |mean - mean|` is the absolute sum of differences.
    pub(super) fn error_of(&mut self, pairs: impl Iterator<Item = (f64, bool)>) -> f64 {
        self.gaps.fill(0.0);
        let last = self.gaps.len() - 1;
        let mut count = 0_usize;
        for (prediction, outcome) in pairs {
            let scaled = prediction.clamp(0.0, 1.0) * self.gaps.len() as f64;
            let bin = index_of(scaled).min(last);
            self.gaps[bin] += prediction - f64::from(u8::from(outcome));
            count += 1;
        }
        self.gaps.iter().map(|gap| gap.abs()).sum::<f64>() / count.max(1) as f64
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, small")]
fn index_of(scaled: f64) -> usize {
    scaled as usize
}
