//! When to draft, with which budget, and what came of it.

use std::sync::Mutex;

use dspark_sched::controller::{
    ControllerSettings, Decision, DecisionReason, GateSettings, PlannerKind, SpeculationController,
    StepReport,
};
use dspark_sched::step_cost::StepLoad;
use dspark_sched::survival_history::SlotRow;
use dspark_sched::{Generation, SlotId, StepId};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use super::args::Arg;
use super::cost::PyStepCost;
use super::lock::{check_lengths, given, given_or_none, locked, unknown};
use super::planner::{PredictionTuple, PyVerifyPlan, prediction_tuple};
use crate::error::{BindingError, BindingResult};

/// What to do in a step.
#[pyclass(frozen, get_all, name = "Decision", module = "extkv._extkv")]
pub(crate) struct PyDecision {
    drafts: bool,
    budget: Option<u32>,
    num_executed_tokens: Option<u32>,
    reason: &'static str,
    expected: Option<PredictionTuple>,
}

impl From<Decision> for PyDecision {
    fn from(decision: Decision) -> Self {
        let reason = match decision.reason {
            DecisionReason::Static => "static",
            DecisionReason::NoCostTable => "no_cost_table",
            DecisionReason::Gain => "gain",
            DecisionReason::NoGain => "no_gain",
            DecisionReason::Probe => "probe",
            DecisionReason::Explore => "explore",
            DecisionReason::NothingToDraft => "nothing_to_draft",
        };
        Self {
            drafts: decision.drafts,
            budget: decision.budget,
            num_executed_tokens: decision.num_executed_tokens,
            reason,
            expected: decision.expected.map(prediction_tuple),
        }
    }
}

/// What a step was planned to be and what it was.
#[pyclass(frozen, get_all, name = "StepReport", module = "extkv._extkv")]
pub(crate) struct PyStepReport {
    step_id: u64,
    reason: &'static str,
    num_admitted: u32,
    num_padding_tokens: u32,
    requested_trim: u32,
    landed_trim: u32,
    prediction: Option<PredictionTuple>,
    predicted_us: Option<f64>,
    measured_us: Option<f64>,
    num_accepted: u32,
    num_tokens: u32,
}

impl From<StepReport> for PyStepReport {
    fn from(report: StepReport) -> Self {
        Self {
            step_id: report.step_id.0,
            reason: PyDecision::from(report.decision).reason,
            num_admitted: report.plan.num_admitted,
            num_padding_tokens: report.plan.num_padding_tokens,
            requested_trim: report.plan.requested_trim,
            landed_trim: report.plan.landed_trim,
            prediction: report.plan.prediction.map(prediction_tuple),
            predicted_us: report.predicted_us,
            measured_us: report.measured_us,
            num_accepted: report.num_accepted,
            num_tokens: report.num_tokens,
        }
    }
}

/// Decides, plans and learns.
#[pyclass(frozen, name = "SpeculationController", module = "extkv._extkv")]
pub(crate) struct PySpeculationController {
    inner: Mutex<SpeculationController>,
}

#[pymethods]
impl PySpeculationController {
    #[new]
    #[pyo3(signature = (
        *, max_num_requests, num_drafts, cost, planner, fixed_len, lag, fill_tier,
        min_snapshot_requests, min_predicted_gain, probe_interval, max_probe_interval, max_probe_share,
        explore_interval
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        max_num_requests: Arg<u32>,
        num_drafts: Arg<u32>,
        cost: Option<PyRef<'_, PyStepCost>>,
        planner: &str,
        fixed_len: Arg<u32>,
        lag: Arg<u32>,
        fill_tier: bool,
        min_snapshot_requests: Arg<u32>,
        min_predicted_gain: f64,
        probe_interval: Arg<u32>,
        max_probe_interval: Arg<u32>,
        max_probe_share: f64,
        explore_interval: Arg<u32>,
    ) -> BindingResult<Self> {
        let settings = ControllerSettings {
            max_num_requests: given(max_num_requests, "max_num_requests")? as usize,
            num_drafts: given(num_drafts, "num_drafts")? as usize,
            planner: planner_kind(planner, given(fixed_len, "fixed_len")?)?,
            lag: given(lag, "lag")?,
            fill_tier,
            min_snapshot_requests: given(min_snapshot_requests, "min_snapshot_requests")?,
            gate: GateSettings {
                min_predicted_gain,
                probe_interval: given(probe_interval, "probe_interval")?,
                max_probe_interval: given(max_probe_interval, "max_probe_interval")?,
                max_probe_share,
                explore_interval: given(explore_interval, "explore_interval")?,
            },
        };
        let cost = cost.map(|cost| cost.inner.clone());
        Ok(Self { inner: Mutex::new(SpeculationController::new(settings, cost)?) })
    }

    /// Whether a step drafts, from history alone.
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn decide(
        &self,
        py: Python<'_>,
        step_id: Arg<u64>,
        slots: Arg<Vec<u32>>,
        generations: Arg<Vec<u32>>,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
        limits: Option<Arg<Vec<u32>>>,
        max_num_drafts: Option<Arg<u32>>,
    ) -> BindingResult<PyDecision> {
        let rows = slot_rows(slots, generations)?;
        let load = StepLoad {
            num_requests: u32::try_from(rows.len()).unwrap_or(u32::MAX),
            num_other_tokens: given(num_other_tokens, "num_other_tokens")?,
            num_context_tokens: given(num_context_tokens, "num_context_tokens")?,
        };
        let limits = given_or_none(limits, "limits")?;
        let max_num_drafts = given_or_none(max_num_drafts, "max_num_drafts")?;
        let step_id = StepId(given(step_id, "step_id")?);
        let mut controller = locked(py, &self.inner)?;
        Ok(controller.decide(step_id, &rows, load, limits.as_deref(), max_num_drafts)?.into())
    }

    /// Verify lengths of the oldest step in flight that has none.
    fn plan(&self, py: Python<'_>, confidences: Arg<Vec<f32>>) -> PyResult<PyVerifyPlan> {
        let confidences = given(confidences, "confidences")?;
        let mut controller = locked(py, &self.inner)?;
        PyVerifyPlan::copy(py, controller.plan(&confidences).map_err(BindingError::from)?)
    }

    /// End the oldest step in flight.
    fn observe(
        &self,
        py: Python<'_>,
        num_accepted: Arg<Vec<u32>>,
        measured_us: Option<f64>,
    ) -> BindingResult<PyStepReport> {
        let num_accepted = given(num_accepted, "num_accepted")?;
        Ok(locked(py, &self.inner)?.observe(&num_accepted, measured_us)?.into())
    }

    /// Give the newest step in flight up; its number.
    fn cancel_newest_step(&self, py: Python<'_>) -> BindingResult<Option<u64>> {
        Ok(locked(py, &self.inner)?.cancel_newest_step().map(|step_id| step_id.0))
    }

    /// Replace the cost table.
    fn set_cost(&self, py: Python<'_>, cost: Option<PyRef<'_, PyStepCost>>) -> BindingResult<()> {
        locked(py, &self.inner)?.set_cost(cost.map(|cost| cost.inner.clone()));
        Ok(())
    }

    /// Whether drafting pays at present.
    fn is_drafting(&self, py: Python<'_>) -> BindingResult<bool> {
        Ok(locked(py, &self.inner)?.is_drafting())
    }

    /// Accepted drafts over predicted ones.
    fn acceptance_ratio(&self, py: Python<'_>) -> BindingResult<f64> {
        Ok(locked(py, &self.inner)?.acceptance_ratio())
    }

    /// Drift of the cost's parts: fixed, verify, draft.
    fn cost_scale(&self, py: Python<'_>) -> BindingResult<(f64, f64, f64)> {
        let scale = locked(py, &self.inner)?.cost_scale();
        Ok((scale.fixed, scale.verify, scale.draft))
    }

    /// Counters.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = locked(py, &self.inner)?.stats();
        [
            ("num_steps", stats.num_steps),
            ("num_drafting_steps", stats.num_drafting_steps),
            ("num_fallbacks", stats.num_fallbacks),
            ("num_returns", stats.num_returns),
            ("num_probes", stats.num_probes),
            ("num_verified", stats.num_verified),
            ("num_accepted", stats.num_accepted),
            ("requested_trim", stats.requested_trim),
            ("landed_trim", stats.landed_trim),
            ("num_padding_tokens", stats.num_padding_tokens),
        ]
        .into_py_dict(py)
    }
}

/// Rows by slot and generation.
pub(super) fn slot_rows(
    slots: Arg<Vec<u32>>,
    generations: Arg<Vec<u32>>,
) -> BindingResult<Vec<SlotRow>> {
    let slots = given(slots, "slots")?;
    let generations = given(generations, "generations")?;
    check_lengths(slots.len(), &[("generations", generations.len())])?;
    let pairs = slots.into_iter().zip(generations);
    let row =
        |(slot, generation)| SlotRow { slot_id: SlotId(slot), generation: Generation(generation) };
    Ok(pairs.map(row).collect())
}

fn planner_kind(planner: &str, fixed_len: u32) -> BindingResult<PlannerKind> {
    const KNOWN: &str = "lagged, greedy, verify_all, fixed, none";
    match planner {
        "lagged" => Ok(PlannerKind::Lagged),
        "greedy" => Ok(PlannerKind::Greedy),
        "verify_all" => Ok(PlannerKind::VerifyAll),
        "fixed" => Ok(PlannerKind::Fixed(fixed_len)),
        "none" => Ok(PlannerKind::NoDrafts),
        other => Err(unknown("planner", other, KNOWN)),
    }
}
