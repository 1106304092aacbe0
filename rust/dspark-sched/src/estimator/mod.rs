//! Confidence from whatever a drafter offers: a trained head, the margin of its logits, or both.
//!
//! One logistic model over features of a draft position, refitted online. With the head alone it is a
//! Platt scaling of it; with the margin alone it serves drafters without a head (vLLM's estimator,
//! issue 52228); together they inform each other. A request's sampling temperature is a feature,
//! since a head is trained at temperature 1.
//!
//! Every feature of draft `j` must be a function of the drafts before `j`. The head's logit is; the
//! margin between the two largest draft logits is; the logit or probability of the *drawn* token is
//! not, and would make verification inexact.
//!
//! | module | subject |
//! |---|---|
//! | `features` | what a model may look at |
//! | `irls` | the fit of one logistic model |
//! | `model` | the online estimator |
//! | `rates` | rates of acceptance, which need nothing of the drafter |

mod features;
mod irls;
mod model;
mod rates;

pub use features::{FeatureBatch, FeatureSet};
pub use model::{AcceptanceModel, EstimatorError, EstimatorSettings, RefitReport};
pub use rates::AcceptanceRates;
