//! What a decode step costs: `T = bias + α(requests) + θ(tokens) + context`, as a measured table.
//!
//! The additive form is SGLang's and TensorRT-LLM's; splitting the draft pass off α is ours, since
//! a step that skips drafting does not pay it.
//!
//! | module | subject |
//! |---|---|
//! | `curve` | a piecewise linear curve and its lookup rule |
//! | `repair` | monotone repair |
//! | `table` | the table, its JSON form, graph tiers, time of a step |
//! | `fit` | a table from measured steps |
//! | `tracker` | slow drift of the parts, from measured step times |

mod curve;
mod error;
mod fit;
mod repair;
mod table;
mod tracker;

pub use curve::{Curve, Knot};
pub use error::CostError;
pub use fit::{FitReport, StepSample, fit_step_cost};
pub use repair::{Repaired, repaired};
pub use table::{CostTable, Drafting, QualityLimits, StepCost, StepLoad, StepTimes};
pub use tracker::{CostScale, CostTracker};
