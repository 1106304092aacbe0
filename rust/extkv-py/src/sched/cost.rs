//! The cost of steps: JSON in, JSON out, so that a table is the same on any machine.

use dspark_sched::step_cost::{CostTable, Drafting, QualityLimits, StepCost, StepLoad, StepSample};
use pyo3::prelude::*;

use super::args::Arg;
use super::lock::{check_lengths, given};
use crate::error::BindingResult;

/// What a decode step costs.
#[pyclass(frozen, name = "StepCost", module = "extkv._extkv")]
pub(crate) struct PyStepCost {
    pub(super) inner: StepCost,
}

#[pymethods]
impl PyStepCost {
    /// Read a table that is final.
    #[staticmethod]
    fn from_json(text: &str) -> BindingResult<Self> {
        Ok(Self { inner: StepCost::from_json(text)? })
    }

    /// Repair a measured table and check its quality.
    #[staticmethod]
    fn measured(text: &str, min_rise_ratio: f64, max_repair_ratio: f64) -> BindingResult<Self> {
        let limits = QualityLimits { min_rise_ratio, max_repair_ratio, ..QualityLimits::default() };
        let table = CostTable::from_json(text)?;
        Ok(Self { inner: StepCost::measured(table, &limits)? })
    }

    /// The table as JSON.
    fn to_json(&self) -> BindingResult<String> {
        Ok(self.inner.to_json()?)
    }

    /// Refuse a table whose tokens cost next to nothing.
    fn check_rise(&self, min_rise_ratio: f64) -> BindingResult<()> {
        Ok(self.inner.check_rise(min_rise_ratio)?)
    }

    /// Microseconds of a step.
    fn step_us(
        &self,
        num_requests: Arg<u32>,
        num_drafts: Arg<u32>,
        drafts: bool,
        num_other_tokens: Arg<u32>,
        num_context_tokens: Arg<u64>,
    ) -> BindingResult<f64> {
        let load = load(num_requests, num_other_tokens, num_context_tokens)?;
        Ok(self.inner.step_us(&load, given(num_drafts, "num_drafts")?, drafting(drafts)))
    }

    /// Tokens that run for a number of tokens.
    fn num_executed_tokens(&self, num_tokens: Arg<u32>) -> BindingResult<u32> {
        Ok(self.inner.num_executed_tokens(given(num_tokens, "num_tokens")?))
    }
}

/// Fit a table to measured steps; the table, and the worst and mean residual ratios.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "one array each")]
pub(crate) fn fit_step_cost(
    py: Python<'_>,
    num_requests: Arg<Vec<u32>>,
    num_tokens: Arg<Vec<u32>>,
    num_context_tokens: Arg<Vec<u64>>,
    drafts: Arg<Vec<u32>>,
    step_us: Arg<Vec<f64>>,
    spread_us: Arg<Vec<f64>>,
    tiers: Arg<Vec<u32>>,
    limits: (f64, f64, f64, f64),
) -> BindingResult<(PyStepCost, f64, f64)> {
    let requests = given(num_requests, "num_requests")?;
    let tokens = given(num_tokens, "num_tokens")?;
    let context = given(num_context_tokens, "num_context_tokens")?;
    let drafts = given(drafts, "drafts")?;
    let step_us = given(step_us, "step_us")?;
    let spread_us = given(spread_us, "spread_us")?;
    let tiers = given(tiers, "tiers")?;
    let lengths = [
        ("num_tokens", tokens.len()),
        ("num_context_tokens", context.len()),
        ("drafts", drafts.len()),
        ("step_us", step_us.len()),
        ("spread_us", spread_us.len()),
    ];
    check_lengths(requests.len(), &lengths)?;
    let samples: Vec<StepSample> = (0..requests.len())
        .map(|index| StepSample {
            num_requests: requests[index],
            num_tokens: tokens[index],
            num_context_tokens: context[index],
            drafting: drafting(drafts[index] != 0),
            step_us: step_us[index],
            spread_us: spread_us[index],
        })
        .collect();
    let (min_rise_ratio, max_repair_ratio, max_spread_ratio, max_residual_ratio) = limits;
    let limits =
        QualityLimits { min_rise_ratio, max_repair_ratio, max_spread_ratio, max_residual_ratio };
    let fitted = py.detach(|| dspark_sched::step_cost::fit_step_cost(&samples, tiers, &limits));
    let (inner, report) = fitted?;
    Ok((PyStepCost { inner }, report.worst_residual_ratio, report.mean_residual_ratio))
}

pub(super) fn load(
    num_requests: Arg<u32>,
    num_other_tokens: Arg<u32>,
    num_context_tokens: Arg<u64>,
) -> BindingResult<StepLoad> {
    Ok(StepLoad {
        num_requests: given(num_requests, "num_requests")?,
        num_other_tokens: given(num_other_tokens, "num_other_tokens")?,
        num_context_tokens: given(num_context_tokens, "num_context_tokens")?,
    })
}

fn drafting(drafts: bool) -> Drafting {
    if drafts { Drafting::Paid } else { Drafting::Skipped }
}
