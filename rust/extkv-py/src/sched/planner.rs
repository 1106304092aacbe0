//! Verify lengths of one step.

use std::sync::Mutex;

use dspark_sched::step_cost::StepLoad;
use dspark_sched::verify_plan::{
    BudgetRule, DraftBatch, PlanCost, Prediction, VerifyPlan, VerifyPlanner,
};
use pyo3::prelude::*;

use super::args::Arg;
use super::arrays::{Array, array};
use super::cost::{PyStepCost, load};
use super::lock::{given, given_or_none, locked};
use crate::error::{BindingError, BindingResult};

/// Time, tokens and gain, as predicted.
pub(super) type PredictionTuple = (f64, f64, f64);

pub(super) fn prediction_tuple(prediction: Prediction) -> PredictionTuple {
    (prediction.step_us, prediction.num_tokens, prediction.gain)
}

/// How many drafts each request verifies, copied.
#[pyclass(frozen, get_all, name = "VerifyPlan", module = "extkv._extkv")]
pub(crate) struct PyVerifyPlan {
    /// int32.
    verify_lens: Array,
    num_requests: u32,
    num_available: u32,
    num_admitted: u32,
    num_executed_tokens: u32,
    num_padding_tokens: u32,
    requested_trim: u32,
    landed_trim: u32,
    prediction: Option<PredictionTuple>,
}

impl PyVerifyPlan {
    pub(super) fn copy(py: Python<'_>, plan: &VerifyPlan) -> PyResult<Self> {
        let report = &plan.report;
        Ok(Self {
            verify_lens: array(py, plan.verify_lens.iter().copied())?,
            num_requests: report.num_requests,
            num_available: report.num_available,
            num_admitted: report.num_admitted,
            num_executed_tokens: report.num_executed_tokens,
            num_padding_tokens: report.num_padding_tokens,
            requested_trim: report.requested_trim,
            landed_trim: report.landed_trim,
            prediction: report.prediction.map(prediction_tuple),
        })
    }
}

/// Survivals and what else a step computes.
struct Batch {
    survival: Vec<f32>,
    limits: Option<Vec<u32>>,
    load: StepLoad,
}

impl Batch {
    fn parse(
        survival: Arg<Vec<f32>>,
        limits: Option<Arg<Vec<u32>>>,
        loads: (Arg<u32>, Arg<u32>, Arg<u64>),
    ) -> BindingResult<Self> {
        Ok(Self {
            survival: given(survival, "survival")?,
            limits: given_or_none(limits, "limits")?,
            load: load(loads.0, loads.1, loads.2)?,
        })
    }

    fn as_batch(&self) -> DraftBatch<'_> {
        DraftBatch { survival: &self.survival, limits: self.limits.as_deref(), load: self.load }
    }
}

/// Planners of verify lengths.
#[pyclass(frozen, name = "VerifyPlanner", module = "extkv._extkv")]
pub(crate) struct PyVerifyPlanner {
    inner: Mutex<VerifyPlanner>,
}

#[pymethods]
impl PyVerifyPlanner {
    #[new]
    fn new(max_num_requests: Arg<u32>, num_drafts: Arg<u32>) -> BindingResult<Self> {
        let max_num_requests = given(max_num_requests, "max_num_requests")? as usize;
        let num_drafts = given(num_drafts, "num_drafts")? as usize;
        Ok(Self { inner: Mutex::new(VerifyPlanner::new(max_num_requests, num_drafts)?) })
    }

    /// Algorithm 1 of the DSpark paper.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn greedy(
        &self,
        py: Python<'_>,
        survival: Arg<Vec<f32>>,
        limits: Option<Arg<Vec<u32>>>,
        num_requests: Arg<u32>,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
        cost: &PyStepCost,
        max_num_drafts: Option<Arg<u32>>,
    ) -> PyResult<PyVerifyPlan> {
        let loads = (num_requests, num_other_tokens, num_context_tokens);
        let batch = Batch::parse(survival, limits, loads)?;
        let max_num_drafts = given_or_none(max_num_drafts, "max_num_drafts")?;
        let mut planner = locked(py, &self.inner)?;
        let plan = planner.greedy(&batch.as_batch(), &PlanCost::new(&cost.inner), max_num_drafts);
        PyVerifyPlan::copy(py, plan.map_err(BindingError::from)?)
    }

    /// The best number of drafts by survivals of an earlier step: number, prediction, worthwhile.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn budget(
        &self,
        py: Python<'_>,
        survival: Arg<Vec<f32>>,
        limits: Option<Arg<Vec<u32>>>,
        num_requests: Arg<u32>,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
        cost: &PyStepCost,
        max_num_drafts: Option<Arg<u32>>,
        min_predicted_gain: f64,
        fill_tier: bool,
    ) -> BindingResult<(u32, PredictionTuple, bool)> {
        let loads = (num_requests, num_other_tokens, num_context_tokens);
        let batch = Batch::parse(survival, limits, loads)?;
        let max_num_drafts = given_or_none(max_num_drafts, "max_num_drafts")?;
        let rule = BudgetRule { max_num_drafts, min_predicted_gain, fill_tier };
        let mut planner = locked(py, &self.inner)?;
        let budget = planner.budget(&batch.as_batch(), &PlanCost::new(&cost.inner), &rule)?;
        Ok((budget.num_drafts, prediction_tuple(budget.prediction), budget.is_worthwhile))
    }

    /// The drafts of largest survival, of a number fixed before.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn top(
        &self,
        py: Python<'_>,
        survival: Arg<Vec<f32>>,
        limits: Option<Arg<Vec<u32>>>,
        num_requests: Arg<u32>,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
        cost: Option<PyRef<'_, PyStepCost>>,
        num_drafts: Arg<u32>,
    ) -> PyResult<PyVerifyPlan> {
        let loads = (num_requests, num_other_tokens, num_context_tokens);
        let batch = Batch::parse(survival, limits, loads)?;
        let num_drafts = given(num_drafts, "num_drafts")?;
        let cost = cost.as_ref().map(|cost| PlanCost::new(&cost.inner));
        let mut planner = locked(py, &self.inner)?;
        let plan = planner.top(&batch.as_batch(), num_drafts, cost.as_ref());
        PyVerifyPlan::copy(py, plan.map_err(BindingError::from)?)
    }

    /// The same number of drafts of every request.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn fixed(
        &self,
        py: Python<'_>,
        survival: Arg<Vec<f32>>,
        limits: Option<Arg<Vec<u32>>>,
        num_requests: Arg<u32>,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
        cost: Option<PyRef<'_, PyStepCost>>,
        num_drafts: Arg<u32>,
    ) -> PyResult<PyVerifyPlan> {
        let loads = (num_requests, num_other_tokens, num_context_tokens);
        let batch = Batch::parse(survival, limits, loads)?;
        let num_drafts = given(num_drafts, "num_drafts")?;
        let cost = cost.as_ref().map(|cost| PlanCost::new(&cost.inner));
        let mut planner = locked(py, &self.inner)?;
        let plan = planner.fixed(&batch.as_batch(), num_drafts, cost.as_ref());
        PyVerifyPlan::copy(py, plan.map_err(BindingError::from)?)
    }
}
