//! Temperatures of confidences.

use std::sync::Mutex;

use dspark_sched::calibration::{
    FitSettings, OnlineSettings, OnlineTemperatures, PositionReport, Round, Rounds, TemperatureFit,
    Temperatures,
};
use dspark_sched::{RequestId, StepId};
use pyo3::prelude::*;

use super::args::Arg;
use super::arrays::{Array, array};
use super::lock::{check_lengths, given, locked};
use crate::error::{BindingError, BindingResult};

/// One temperature per draft position.
#[pyclass(frozen, name = "Temperatures", module = "extkv._extkv")]
pub(crate) struct PyTemperatures {
    inner: Temperatures,
}

#[pymethods]
impl PyTemperatures {
    #[new]
    fn new(values: Arg<Vec<f64>>) -> BindingResult<Self> {
        Ok(Self { inner: Temperatures::new(given(values, "values")?)? })
    }

    /// Read any of the files in use.
    #[staticmethod]
    fn from_json(text: &str) -> BindingResult<Self> {
        Ok(Self { inner: Temperatures::from_json(text)? })
    }

    /// The first temperatures.
    fn of_first(&self, num_drafts: Arg<u32>) -> BindingResult<Self> {
        Ok(Self { inner: self.inner.of_first(given(num_drafts, "num_drafts")? as usize)? })
    }

    /// float32.
    #[getter]
    fn values(&self, py: Python<'_>) -> PyResult<Array> {
        array(py, self.inner.values().iter().copied())
    }

    /// Confidences of logits, float32.
    fn confidences(&self, py: Python<'_>, logits: Arg<Vec<f32>>) -> PyResult<Array> {
        let mut cells = given(logits, "logits")?;
        self.inner.apply(&mut cells).map_err(BindingError::from)?;
        array(py, cells.into_iter())
    }
}

/// Rounds as flat arrays; the last of the tuple is -1 where no end of sequence was accepted.
type RoundArrays = (
    Arg<Vec<u64>>,
    Arg<Vec<u64>>,
    Arg<Vec<u64>>,
    Arg<Vec<f32>>,
    Arg<Vec<u32>>,
    Arg<Vec<u32>>,
    Arg<Vec<i32>>,
);

/// Rounds, checked to fit each other.
struct FlatRounds {
    num_drafts: usize,
    request_ids: Vec<u64>,
    logits_steps: Vec<u64>,
    outcome_steps: Vec<u64>,
    logits: Vec<f32>,
    num_verified: Vec<u32>,
    num_accepted: Vec<u32>,
    ends: Vec<i32>,
}

impl FlatRounds {
    fn parse(num_drafts: usize, arrays: RoundArrays) -> BindingResult<Self> {
        let rounds = Self {
            num_drafts,
            request_ids: given(arrays.0, "request_ids")?,
            logits_steps: given(arrays.1, "logits_steps")?,
            outcome_steps: given(arrays.2, "outcome_steps")?,
            logits: given(arrays.3, "logits")?,
            num_verified: given(arrays.4, "num_verified")?,
            num_accepted: given(arrays.5, "num_accepted")?,
            ends: given(arrays.6, "ends")?,
        };
        let num_rounds = rounds.request_ids.len();
        let lengths = [
            ("logits_steps", rounds.logits_steps.len()),
            ("outcome_steps", rounds.outcome_steps.len()),
            ("num_verified", rounds.num_verified.len()),
            ("num_accepted", rounds.num_accepted.len()),
            ("ends", rounds.ends.len()),
        ];
        check_lengths(num_rounds, &lengths)?;
        check_lengths(num_rounds * num_drafts, &[("logits", rounds.logits.len())])?;
        Ok(rounds)
    }

    fn iter(&self) -> impl Iterator<Item = Round<'_>> {
        let rows = self.logits.chunks_exact(self.num_drafts.max(1));
        rows.enumerate().map(|(row, logits)| Round {
            request_id: RequestId(self.request_ids[row]),
            logits_step: StepId(self.logits_steps[row]),
            outcome_step: StepId(self.outcome_steps[row]),
            logits,
            num_verified: self.num_verified[row] as usize,
            num_accepted: self.num_accepted[row] as usize,
            end: usize::try_from(self.ends[row]).ok(),
        })
    }

    fn whole(&self) -> BindingResult<Rounds> {
        let mut rounds = Rounds::new(self.num_drafts)?;
        self.iter().try_for_each(|round| rounds.push(&round))?;
        Ok(rounds)
    }
}

/// Fitted temperatures and how much they helped; float64 arrays by position.
#[pyclass(frozen, get_all, name = "TemperatureFit", module = "extkv._extkv")]
pub(crate) struct PyTemperatureFit {
    json: String,
    num_rounds: usize,
    temperatures: Array,
    ece_before: Array,
    ece_after: Array,
    accepted_ratio: Array,
    mean_before: Array,
    mean_after: Array,
    /// int32.
    num_rounds_by_position: Array,
}

impl PyTemperatureFit {
    fn copy(py: Python<'_>, fit: &TemperatureFit) -> PyResult<Self> {
        let list = |value: fn(&PositionReport) -> f64| array(py, fit.positions.iter().map(value));
        let counts = fit.positions.iter().map(|position| position.num_rounds);
        let counts = counts.map(|count| u32::try_from(count).unwrap_or(u32::MAX));
        Ok(Self {
            json: fit.to_json().map_err(BindingError::from)?,
            num_rounds: fit.num_rounds,
            temperatures: list(|position| position.temperature)?,
            ece_before: list(|position| position.ece_before)?,
            ece_after: list(|position| position.ece_after)?,
            accepted_ratio: list(|position| position.accepted_ratio)?,
            mean_before: list(|position| position.mean_before)?,
            mean_after: list(|position| position.mean_after)?,
            num_rounds_by_position: array(py, counts)?,
        })
    }
}

/// Fit temperatures to whole rounds.
#[pyfunction]
pub(crate) fn fit_temperatures(
    py: Python<'_>,
    num_drafts: Arg<u32>,
    rounds: RoundArrays,
    grid: (f64, f64, u32),
    num_bins: Arg<u32>,
    min_num_rounds: Arg<u32>,
) -> PyResult<PyTemperatureFit> {
    let num_drafts = given(num_drafts, "num_drafts")? as usize;
    let settings = FitSettings {
        min_temperature: grid.0,
        max_temperature: grid.1,
        num_temperatures: grid.2 as usize,
        num_bins: given(num_bins, "num_bins")? as usize,
        min_num_rounds: given(min_num_rounds, "min_num_rounds")? as usize,
    };
    let rounds = FlatRounds::parse(num_drafts, rounds)?.whole()?;
    let fit = py.detach(|| dspark_sched::calibration::fit_temperatures(&rounds, &settings));
    PyTemperatureFit::copy(py, &fit.map_err(BindingError::from)?)
}

/// Whether logits fit their own rounds best; AUC against the round before, the same, and after.
#[pyfunction]
pub(crate) fn check_pairing(
    num_drafts: Arg<u32>,
    rounds: RoundArrays,
) -> BindingResult<[Option<f64>; 3]> {
    let num_drafts = given(num_drafts, "num_drafts")? as usize;
    let rounds = FlatRounds::parse(num_drafts, rounds)?.whole()?;
    Ok(dspark_sched::calibration::check_pairing(&rounds)?.auc)
}

/// Temperatures that follow drift.
#[pyclass(frozen, name = "OnlineTemperatures", module = "extkv._extkv")]
pub(crate) struct PyOnlineTemperatures {
    num_drafts: usize,
    inner: Mutex<OnlineTemperatures>,
}

#[pymethods]
impl PyOnlineTemperatures {
    #[new]
    fn new(
        start: &PyTemperatures,
        decay: f64,
        prior_weight: f64,
        grid: (f64, f64, u32),
    ) -> BindingResult<Self> {
        let settings = OnlineSettings {
            decay,
            prior_weight,
            min_temperature: grid.0,
            max_temperature: grid.1,
            num_temperatures: grid.2 as usize,
        };
        let inner = OnlineTemperatures::new(start.inner.clone(), settings)?;
        let num_drafts = start.inner.values().len();
        Ok(Self { num_drafts, inner: Mutex::new(inner) })
    }

    /// Forget a little, then count the rounds of a step.
    fn observe_step(&self, py: Python<'_>, rounds: RoundArrays) -> BindingResult<()> {
        let rounds = FlatRounds::parse(self.num_drafts, rounds)?;
        let mut online = locked(py, &self.inner)?;
        online.begin_step();
        Ok(rounds.iter().try_for_each(|round| online.observe(&round))?)
    }

    /// Choose the temperatures anew.
    fn refit(&self, py: Python<'_>) -> BindingResult<PyTemperatures> {
        Ok(PyTemperatures { inner: locked(py, &self.inner)?.refit()?.clone() })
    }

    /// The temperatures of the last refit.
    fn temperatures(&self, py: Python<'_>) -> BindingResult<PyTemperatures> {
        Ok(PyTemperatures { inner: locked(py, &self.inner)?.temperatures().clone() })
    }

    /// Trials by position, after forgetting.
    fn num_trials(&self, py: Python<'_>) -> BindingResult<Vec<f64>> {
        Ok(locked(py, &self.inner)?.num_trials().collect())
    }
}
