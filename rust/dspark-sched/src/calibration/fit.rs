//! The offline fit.

use super::ece::Bins;
use super::error::CalibrationError;
use super::rounds::Rounds;
use super::temperatures::Temperatures;
use crate::confidence::sanitized_logit;

/// Grid, bins and least data of a fit. The defaults are those in use: 41 points from 0.1 to 10 on a
/// logarithmic scale, 15 bins, 1000 rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FitSettings {
    /// Lowest temperature tried.
    pub min_temperature: f64,
    /// Highest temperature tried.
    pub max_temperature: f64,
    /// Temperatures tried.
    pub num_temperatures: usize,
    /// Bins of the calibration error.
    pub num_bins: usize,
    /// Least number of rounds at every position.
    pub min_num_rounds: usize,
}

impl Default for FitSettings {
    fn default() -> Self {
        Self {
            min_temperature: 0.1,
            max_temperature: 10.0,
            num_temperatures: 41,
            num_bins: 15,
            min_num_rounds: 1000,
        }
    }
}

impl FitSettings {
    fn check(&self) -> Result<(), CalibrationError> {
        for (name, value) in
            [("num_temperatures", self.num_temperatures), ("num_bins", self.num_bins)]
        {
            if value == 0 {
                return Err(CalibrationError::Zero { name });
            }
        }
        check_count("num_temperatures", self.num_temperatures)?;
        check_count("num_bins", self.num_bins)?;
        let (low, high) = (self.min_temperature, self.max_temperature);
        if !(low.is_finite() && low > 0.0) {
            let expected = "a finite number above 0";
            return Err(CalibrationError::OutOfRange {
                name: "min_temperature",
                found: low,
                expected,
            });
        }
        if !(high.is_finite() && high >= low) {
            let expected = "a finite number of at least min_temperature";
            return Err(CalibrationError::OutOfRange {
                name: "max_temperature",
                found: high,
                expected,
            });
        }
        Ok(())
    }
}

/// Refuses counts that only a mistake asks for.
pub(super) fn check_count(name: &'static str, count: usize) -> Result<(), CalibrationError> {
    const LIMIT: usize = 10_000;
    let refused =
        CalibrationError::OutOfRange { name, found: count as f64, expected: "at most 10000" };
    if count <= LIMIT { Ok(()) } else { Err(refused) }
}

/// What a fit did at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PositionReport {
    /// The temperature.
    pub temperature: f64,
    /// Calibration error of the survival with all temperatures 1.
    pub ece_before: f64,
    /// The same with the fitted temperatures.
    pub ece_after: f64,
    /// Rounds that count here: those not ended before.
    pub num_rounds: usize,
    /// Share of them in which all drafts up to here were accepted.
    pub accepted_ratio: f64,
    /// Mean survival before.
    pub mean_before: f64,
    /// Mean survival after.
    pub mean_after: f64,
}

/// Fitted temperatures and how much they helped.
#[derive(Debug, Clone, PartialEq)]
pub struct TemperatureFit {
    /// The temperatures.
    pub temperatures: Temperatures,
    /// `[γ]` what happened at each position.
    pub positions: Vec<PositionReport>,
    /// Rounds given.
    pub num_rounds: usize,
}

/// Temperatures from `low` to `high`, equally far apart on a logarithmic scale.
#[must_use]
pub fn log_grid(low: f64, high: f64, num_points: usize) -> Vec<f64> {
    let last = num_points.saturating_sub(1).max(1) as f64;
    (0..num_points).map(|index| low * (high / low).powf(index as f64 / last)).collect()
}

/// Fits one temperature per position, the first position first and each then frozen.
///
/// A temperature is the one of the grid with the least calibration error of the survival up to its
/// position; among equals the one closest to 1. Rounds count up to an accepted end of sequence.
///
/// # Errors
/// [`CalibrationError::TooFewRounds`], or [`CalibrationError::Zero`] and
/// [`CalibrationError::OutOfRange`] for settings that cannot be.
pub fn fit_temperatures(
    rounds: &Rounds,
    settings: &FitSettings,
) -> Result<TemperatureFit, CalibrationError> {
    settings.check()?;
    let mut grid =
        log_grid(settings.min_temperature, settings.max_temperature, settings.num_temperatures);
    grid.sort_by(|a, b| a.ln().abs().total_cmp(&b.ln().abs()));
    let mut bins = Bins::new(settings.num_bins);
    let mut before = vec![1.0; rounds.len()];
    let mut after = vec![1.0; rounds.len()];
    let mut positions = Vec::with_capacity(rounds.num_drafts());
    for position in 0..rounds.num_drafts() {
        let column = Column::of(rounds, position);
        if column.rounds.len() < settings.min_num_rounds {
            let (found, needed) = (column.rounds.len(), settings.min_num_rounds);
            return Err(CalibrationError::TooFewRounds { position: position + 1, found, needed });
        }
        let errors = grid.iter().map(|&t| (t, bins.error_of(column.pairs(&after, t))));
        let (temperature, ece_after) = errors
            .fold((1.0, f64::INFINITY), |best, tried| if tried.1 < best.1 { tried } else { best });
        let ece_before = bins.error_of(column.pairs(&before, 1.0));
        column.advance(&mut before, 1.0);
        column.advance(&mut after, temperature);
        positions.push(PositionReport {
            temperature,
            ece_before,
            ece_after,
            num_rounds: column.rounds.len(),
            accepted_ratio: column.mean(|round| f64::from(u8::from(round.is_accepted))),
            mean_before: column.mean(|round| before[round.index]),
            mean_after: column.mean(|round| after[round.index]),
        });
    }
    let temperatures = Temperatures::new(positions.iter().map(|p| p.temperature).collect())?;
    Ok(TemperatureFit { temperatures, positions, num_rounds: rounds.len() })
}

/// One position of the rounds that reach it.
struct Column {
    rounds: Vec<ColumnRound>,
}

struct ColumnRound {
    index: usize,
    logit: f64,
    is_accepted: bool,
}

impl Column {
    fn of(rounds: &Rounds, position: usize) -> Self {
        let reached =
            rounds.iter().enumerate().filter(|(_, (_, kept))| kept.num_counted > position);
        let column = reached.map(|(index, (logits, kept))| ColumnRound {
            index,
            logit: f64::from(sanitized_logit(logits[position])),
            is_accepted: kept.num_accepted > position,
        });
        Self { rounds: column.collect() }
    }

    fn pairs<'a>(
        &'a self,
        survival: &'a [f64],
        temperature: f64,
    ) -> impl Iterator<Item = (f64, bool)> + 'a {
        self.rounds.iter().map(move |round| {
            (survival[round.index] * sigmoid(round.logit / temperature), round.is_accepted)
        })
    }

    fn advance(&self, survival: &mut [f64], temperature: f64) {
        for round in &self.rounds {
            survival[round.index] *= sigmoid(round.logit / temperature);
        }
    }

    fn mean(&self, value: impl Fn(&ColumnRound) -> f64) -> f64 {
        self.rounds.iter().map(value).sum::<f64>() / self.rounds.len().max(1) as f64
    }
}

/// `1 / (1 + exp(-x))`.
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
