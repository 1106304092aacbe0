//! When to draft, with which budget, and what came of it: one object for an engine's loop.
//!
//! Per step: [`SpeculationController::decide`] before the draft pass, from history alone;
//! [`SpeculationController::plan`] with the confidences if it drafts;
//! [`SpeculationController::observe`] with accepted lengths and the step's time.
//!
//! | module | subject |
//! |---|---|
//! | `settings` | what may be chosen |
//! | `acceptance` | what drafts were worth lately, over all requests |
//! | `gate` | fallback to no drafts, probes, return |
//! | `probe` | how little a probe verifies |
//! | `in_flight` | steps decided and not yet observed |
//! | `report` | decisions, reports, counters |
//! | `speculation` | the controller |

mod acceptance;
mod gate;
mod in_flight;
mod probe;
mod report;
mod settings;
mod speculation;

pub use acceptance::{AcceptanceRatio, SurvivalDensity};
pub use gate::{DraftGate, GateSettings, GateState, ProbeOutlook};
pub use report::{ControllerStats, Decision, DecisionReason, StepReport};
pub use settings::{ControllerSettings, PlannerKind};
pub use speculation::SpeculationController;
