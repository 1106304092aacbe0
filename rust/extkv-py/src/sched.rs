//! The request scheduler. Its calls take microseconds, so none of them detaches.
//!
//! Arrays cross the border as whole `bytearray`s: one object per array, none per element.

mod args;
mod arrays;
mod output;
mod plan;
mod results;
mod scheduler;
mod stats;

pub(crate) use args::ArgumentError;
pub(crate) use output::PyStepOutput;
pub(crate) use plan::PyPlan;
pub(crate) use scheduler::PyScheduler;
