//! Confidences from a logistic model fitted online.

use std::sync::Mutex;

use dspark_sched::estimator::{
    AcceptanceModel, AcceptanceRates, EstimatorSettings, FeatureBatch, FeatureSet, RefitReport,
};
use dspark_sched::survival_history::SlotRow;
use pyo3::prelude::*;

use super::args::Arg;
use super::arrays::{Array, array};
use super::controller::slot_rows;
use super::lock::{given, given_or_none, locked, unknown};
use crate::error::{BindingError, BindingResult};

/// Trials, iterations, loss before and after.
type Refit = (usize, usize, f64, f64);

/// A logistic model of acceptance.
#[pyclass(frozen, name = "AcceptanceModel", module = "extkv._extkv")]
pub(crate) struct PyAcceptanceModel {
    num_drafts: usize,
    inner: Mutex<AcceptanceModel>,
}

/// Head logits, margins, request temperatures.
type FeatureArrays = (Option<Arg<Vec<f32>>>, Option<Arg<Vec<f32>>>, Option<Arg<Vec<f32>>>);

/// Features as flat arrays.
struct FlatFeatures {
    num_requests: usize,
    head_logits: Option<Vec<f32>>,
    margins: Option<Vec<f32>>,
    request_temperatures: Option<Vec<f32>>,
}

impl FlatFeatures {
    fn parse(num_requests: Arg<u32>, arrays: FeatureArrays) -> BindingResult<Self> {
        Ok(Self {
            num_requests: given(num_requests, "num_requests")? as usize,
            head_logits: given_or_none(arrays.0, "head_logits")?,
            margins: given_or_none(arrays.1, "margins")?,
            request_temperatures: given_or_none(arrays.2, "request_temperatures")?,
        })
    }

    fn batch(&self) -> FeatureBatch<'_> {
        FeatureBatch {
            num_requests: self.num_requests,
            head_logits: self.head_logits.as_deref(),
            margins: self.margins.as_deref(),
            request_temperatures: self.request_temperatures.as_deref(),
        }
    }
}

#[pymethods]
impl PyAcceptanceModel {
    #[new]
    #[pyo3(signature = (*, num_drafts, features, capacity, min_num_trials, refit_interval, ridge))]
    fn new(
        num_drafts: Arg<u32>,
        features: Vec<String>,
        capacity: Arg<u32>,
        min_num_trials: Arg<u32>,
        refit_interval: Arg<u32>,
        ridge: f64,
    ) -> BindingResult<Self> {
        let num_drafts = given(num_drafts, "num_drafts")? as usize;
        let settings = EstimatorSettings {
            capacity: given(capacity, "capacity")? as usize,
            min_num_trials: given(min_num_trials, "min_num_trials")? as usize,
            refit_interval: given(refit_interval, "refit_interval")?,
            ridge,
        };
        let model = AcceptanceModel::new(feature_set(&features)?, num_drafts, settings)?;
        Ok(Self { num_drafts, inner: Mutex::new(model) })
    }

    /// Confidences of drafts, float32.
    fn confidences(
        &self,
        py: Python<'_>,
        num_requests: Arg<u32>,
        features: FeatureArrays,
    ) -> PyResult<Array> {
        let features = FlatFeatures::parse(num_requests, features)?;
        let model = locked(py, &self.inner)?;
        model.check(&features.batch()).map_err(BindingError::from)?;
        let mut out = vec![0.0; features.num_requests * self.num_drafts];
        model.confidences(&features.batch(), &mut out).map_err(BindingError::from)?;
        array(py, out.into_iter())
    }

    /// Remember what came of drafts.
    fn observe(
        &self,
        py: Python<'_>,
        num_requests: Arg<u32>,
        features: FeatureArrays,
        num_verified: Arg<Vec<u32>>,
        num_accepted: Arg<Vec<u32>>,
    ) -> BindingResult<()> {
        let features = FlatFeatures::parse(num_requests, features)?;
        let verified = given(num_verified, "num_verified")?;
        let accepted = given(num_accepted, "num_accepted")?;
        Ok(locked(py, &self.inner)?.observe(&features.batch(), &verified, &accepted)?)
    }

    /// Count a step, and fit now and then.
    fn end_step(&self, py: Python<'_>) -> BindingResult<Option<Refit>> {
        Ok(locked(py, &self.inner)?.end_step().map(refit_tuple))
    }

    /// Fit the trials kept.
    fn refit(&self, py: Python<'_>) -> BindingResult<Option<Refit>> {
        Ok(locked(py, &self.inner)?.refit().map(refit_tuple))
    }

    /// Intercept, head, margin, request temperature, position.
    fn coefficients(&self, py: Python<'_>) -> BindingResult<[f64; 5]> {
        Ok(locked(py, &self.inner)?.coefficients())
    }

    /// Trials kept.
    fn num_trials(&self, py: Python<'_>) -> BindingResult<usize> {
        Ok(locked(py, &self.inner)?.num_trials())
    }
}

/// Rates of acceptance per position and request.
#[pyclass(frozen, name = "AcceptanceRates", module = "extkv._extkv")]
pub(crate) struct PyAcceptanceRates {
    num_drafts: usize,
    inner: Mutex<AcceptanceRates>,
}

#[pymethods]
impl PyAcceptanceRates {
    #[new]
    fn new(num_slots: Arg<u32>, num_drafts: Arg<u32>) -> BindingResult<Self> {
        let num_slots = given(num_slots, "num_slots")? as usize;
        let num_drafts = given(num_drafts, "num_drafts")? as usize;
        Ok(Self { num_drafts, inner: Mutex::new(AcceptanceRates::new(num_slots, num_drafts)?) })
    }

    /// Confidences of drafts, float32.
    fn confidences(
        &self,
        py: Python<'_>,
        slots: Arg<Vec<u32>>,
        generations: Arg<Vec<u32>>,
    ) -> PyResult<Array> {
        let rows: Vec<SlotRow> = slot_rows(slots, generations)?;
        let rates = locked(py, &self.inner)?;
        let mut out = vec![0.0; rows.len() * self.num_drafts];
        rates.confidences(&rows, &mut out).map_err(BindingError::from)?;
        array(py, out.into_iter())
    }

    /// Count what came of drafts.
    fn observe(
        &self,
        py: Python<'_>,
        slots: Arg<Vec<u32>>,
        generations: Arg<Vec<u32>>,
        num_verified: Arg<Vec<u32>>,
        num_accepted: Arg<Vec<u32>>,
    ) -> BindingResult<()> {
        let rows = slot_rows(slots, generations)?;
        let verified = given(num_verified, "num_verified")?;
        let accepted = given(num_accepted, "num_accepted")?;
        Ok(locked(py, &self.inner)?.observe(&rows, &verified, &accepted)?)
    }

    /// Chance of each position once those before it are accepted.
    fn rates(&self, py: Python<'_>) -> BindingResult<Vec<f64>> {
        Ok(locked(py, &self.inner)?.rates().to_vec())
    }
}

fn refit_tuple(report: RefitReport) -> Refit {
    (report.num_trials, report.num_iterations, report.loss_before, report.loss_after)
}

fn feature_set(names: &[String]) -> BindingResult<FeatureSet> {
    let mut set = FeatureSet::default();
    for name in names {
        match name.as_str() {
            "head" => set.head = true,
            "margin" => set.margin = true,
            "request_temperature" => set.request_temperature = true,
            "position" => set.position = true,
            other => {
                let known = "head, margin, request_temperature, position";
                return Err(unknown("features", other, known));
            }
        }
    }
    Ok(set)
}
