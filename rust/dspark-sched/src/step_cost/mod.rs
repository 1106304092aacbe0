//! What a decode step costs: `T = bias + α(requests) + θ(tokens) + context`, as a measured table.
//!
//! The additive form is SGLang's and TensorRT-LLM's; splitting the draft pass off α is ours, since
//! a step that skips drafting does not pay it, and a step that verifies nothing does not pay for
//! windows.
//!
//! | module | subject |
//! |---|---|
//! | `curve` | a piecewise linear curve and its lookup rule |
//! | `repair` | monotone repair |
//! | `table` | the table as it is stored, and its JSON form |
//! | `step` | time of a step: graph tiers, parts, envelope |
//! | `fit` | a table from measured steps |
//! | `least_squares` | what the fit solves |
//! | `tracker` | slow drift of the parts, from measured step times |

mod curve;
mod error;
mod fit;
mod least_squares;
mod repair;
mod step;
mod table;
mod tracker;

pub use curve::{Curve, Knot};
pub use error::CostError;
pub use fit::{FitReport, StepSample, fit_step_cost};
pub use repair::repaired;
pub use step::{Drafting, StepCost, StepLoad, StepTimes};
pub use table::{CostTable, QualityLimits};
pub use tracker::{CostScale, CostTracker};
