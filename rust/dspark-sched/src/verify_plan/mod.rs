//! How many drafts of each request to verify.
//!
//! With survival `a_{r,j}`, a plan of lengths `ℓ_r` yields `τ = R + Σ_r Σ_{j≤ℓ_r} a_{r,j}` tokens in
//! expectation and takes `T(R + Σ_r ℓ_r)`; all planners look for a large `Θ = τ / T` (DSpark, section
//! 4). They differ in what they may look at.
//!
//! Verification is exact only if the admission of a draft depends on nothing but history and the
//! drafts before it: never on the draft itself, nor on a later one. A confidence `c_j` is a function
//! of the drafts before `j` (the head reads the token at `j - 1`, and hidden states of mask slots), so
//! `a_j` may decide about draft `j`, and `a_{j+1}` may not. Each planner says why it keeps to that.
//!
//! | module | subject |
//! |---|---|
//! | `batch` | what planners read: survival, limits, costs |
//! | `order` | the order of drafts, with ties that no token value decides |
//! | `planner` | the planners |
//! | `report` | what a plan asks for, what lands, what it should bring |
//! | `falling` | survivals in order, without places |
//! | `exhaustive` | every plan tried: the oracle of tests |

mod batch;
mod error;
mod exhaustive;
mod falling;
mod order;
mod planner;
mod report;

pub use batch::{DraftBatch, PlanCost};
pub use error::PlanError;
pub(crate) use error::check_length;
pub use exhaustive::{ExhaustivePlan, MAX_NUM_PLANS, exhaustive_plan};
pub use planner::{BudgetRule, DraftBudget, VerifyPlanner};
pub use report::{PlanReport, Prediction, VerifyPlan};
