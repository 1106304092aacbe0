//! Temperatures that follow drift, from windows that may be trimmed.
//!
//! After vLLM's online variant (pull request 47513): decayed counters per position and logit bin, a
//! logarithmic grid, a prior. Censoring: position `k` is a trial only if its prefix was accepted and
//! `k` lies within the verified window. Its outcome then says something about the *conditional*
//! confidence `c_k` alone, whatever chose the window, since the choice saw nothing of draft `k`.

use super::error::CalibrationError;
use super::fit::{check_count, log_grid, sigmoid};
use super::rounds::Round;
use super::temperatures::Temperatures;
use crate::confidence::sanitized_logit;

const NUM_BINS: usize = 16;
const MAX_BIN_LOGIT: f64 = 8.0;

/// How fast to forget, and what to believe without data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnlineSettings {
    /// Weight of a count one step later.
    pub decay: f64,
    /// Trials per position that the starting temperatures are worth.
    pub prior_weight: f64,
    /// Lowest temperature tried.
    pub min_temperature: f64,
    /// Highest temperature tried.
    pub max_temperature: f64,
    /// Temperatures tried.
    pub num_temperatures: usize,
}

impl Default for OnlineSettings {
    fn default() -> Self {
        Self {
            decay: 0.999,
            prior_weight: 64.0,
            min_temperature: 0.125,
            max_temperature: 8.0,
            num_temperatures: 49,
        }
    }
}

/// Counters and the temperatures they say.
#[derive(Debug, Clone)]
pub struct OnlineTemperatures {
    settings: OnlineSettings,
    start: Temperatures,
    grid: Vec<f64>,
    /// `[γ · NUM_BINS]`.
    bins: Vec<Bin>,
    current: Temperatures,
}

#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    trials: f64,
    accepted: f64,
    logit_sum: f64,
}

impl OnlineTemperatures {
    /// Starts from temperatures, for example of an offline fit.
    ///
    /// # Errors
    /// [`CalibrationError::OutOfRange`] or [`CalibrationError::Zero`] for settings that cannot be.
    pub fn new(start: Temperatures, settings: OnlineSettings) -> Result<Self, CalibrationError> {
        let ranges = [
            ("decay", settings.decay, 0.0, 1.0, "a number in (0, 1]"),
            ("prior_weight", settings.prior_weight, 0.0, 1e9, "a number in (0, 1e9]"),
            ("min_temperature", settings.min_temperature, 0.0, 1e6, "a number in (0, 1e6]"),
            (
                "max_temperature",
                settings.max_temperature,
                settings.min_temperature,
                1e6,
                "a number in (min_temperature, 1e6]",
            ),
        ];
        for (name, found, low, high, expected) in ranges {
            if !(found > low && found <= high) {
                return Err(CalibrationError::OutOfRange { name, found, expected });
            }
        }
        if settings.num_temperatures == 0 {
            return Err(CalibrationError::Zero { name: "num_temperatures" });
        }
        check_count("num_temperatures", settings.num_temperatures)?;
        let grid =
            log_grid(settings.min_temperature, settings.max_temperature, settings.num_temperatures);
        let bins = vec![Bin::default(); start.values().len() * NUM_BINS];
        Ok(Self { settings, current: start.clone(), start, grid, bins })
    }

    /// The temperatures of the last [`OnlineTemperatures::refit`].
    #[must_use]
    pub fn temperatures(&self) -> &Temperatures {
        &self.current
    }

    /// Trials counted at each position, after forgetting.
    pub fn num_trials(&self) -> impl ExactSizeIterator<Item = f64> + '_ {
        self.bins.chunks_exact(NUM_BINS).map(|bins| bins.iter().map(|bin| bin.trials).sum())
    }

    /// Forgets a little; call once per step, before its rounds.
    pub fn begin_step(&mut self) {
        for bin in &mut self.bins {
            bin.trials *= self.settings.decay;
            bin.accepted *= self.settings.decay;
            bin.logit_sum *= self.settings.decay;
        }
    }

    /// Counts a round: positions up to the first rejection, within the window, before an end.
    ///
    /// # Errors
    /// [`CalibrationError::WrongLength`], [`CalibrationError::PairingMismatch`],
    /// [`CalibrationError::AcceptedPastWindow`] or [`CalibrationError::EndNotAccepted`].
    pub fn observe(&mut self, round: &Round<'_>) -> Result<(), CalibrationError> {
        round.check(self.start.values().len())?;
        let num_trials = round.num_counted().min(round.num_accepted + 1);
        for (position, &logit) in round.logits.iter().take(num_trials).enumerate() {
            let logit = f64::from(sanitized_logit(logit));
            let bin = &mut self.bins[position * NUM_BINS + bin_of(logit)];
            bin.trials += 1.0;
            bin.logit_sum += logit;
            bin.accepted += f64::from(u8::from(position < round.num_accepted));
        }
        Ok(())
    }

    /// Chooses each position's temperature: the most likely of the grid, given the counters and
    /// `prior_weight` trials that agree with the starting temperature.
    ///
    /// # Errors
    /// [`CalibrationError::BadTemperature`] never for a checked grid.
    pub fn refit(&mut self) -> Result<&Temperatures, CalibrationError> {
        let positions = self.bins.chunks_exact(NUM_BINS).zip(self.start.values());
        let fitted = positions.map(|(bins, &start)| self.most_likely(bins, f64::from(start)));
        self.current = Temperatures::new(fitted.collect())?;
        Ok(&self.current)
    }

    fn most_likely(&self, bins: &[Bin], start: f64) -> f64 {
        if bins.iter().all(|bin| bin.trials == 0.0) {
            return start;
        }
        let prior = self.settings.prior_weight / NUM_BINS as f64;
        let loss = |temperature: f64| -> f64 {
            let bins = bins.iter().enumerate();
            bins.map(|(index, bin)| {
                let middle = middle_of(index);
                let guessed = sigmoid(middle / start);
                let prior_loss = prior * cross_entropy(guessed, middle / temperature);
                if bin.trials < 1e-9 {
                    return prior_loss;
                }
                let (logit, ratio) = (bin.logit_sum / bin.trials, bin.accepted / bin.trials);
                prior_loss + bin.trials * cross_entropy(ratio, logit / temperature)
            })
            .sum()
        };
        let tried = self.grid.iter().map(|&temperature| (temperature, loss(temperature)));
        tried
            .fold((start, loss(start)), |best, tried| if tried.1 < best.1 { tried } else { best })
            .0
    }
}

/// Loss of a logit where this share is accepted, without overflow for large logits.
fn cross_entropy(accepted_ratio: f64, logit: f64) -> f64 {
    let softplus = logit.max(0.0) + (-logit.abs()).exp().ln_1p();
    softplus - accepted_ratio * logit
}

fn middle_of(bin: usize) -> f64 {
    (bin as f64 + 0.5) * (2.0 * MAX_BIN_LOGIT / NUM_BINS as f64) - MAX_BIN_LOGIT
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to the bins")]
fn bin_of(logit: f64) -> usize {
    let scaled = (logit + MAX_BIN_LOGIT) * (NUM_BINS as f64 / (2.0 * MAX_BIN_LOGIT));
    (scaled.clamp(0.0, NUM_BINS as f64 - 1.0)) as usize
}
