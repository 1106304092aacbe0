//! The request scheduler, and what plans its drafts. Calls take microseconds, so they do not detach,
//! except the fits.
//!
//! Arrays cross the border as whole `bytearray`s: one object per array, none per element.

mod args;
mod arrays;
mod calibration;
mod controller;
mod cost;
mod estimator;
mod lock;
mod output;
mod plan;
mod planner;
mod results;
mod scheduler;
mod stats;

pub(crate) use args::ArgumentError;
pub(crate) use calibration::{
    PyOnlineTemperatures, PyTemperatureFit, PyTemperatures, check_pairing, fit_temperatures,
};
pub(crate) use controller::{PyDecision, PySpeculationController, PyStepReport};
pub(crate) use cost::{PyStepCost, fit_step_cost};
pub(crate) use estimator::{PyAcceptanceModel, PyAcceptanceRates};
pub(crate) use output::PyStepOutput;
pub(crate) use plan::PyPlan;
pub(crate) use planner::{PyVerifyPlan, PyVerifyPlanner};
pub(crate) use scheduler::PyScheduler;
