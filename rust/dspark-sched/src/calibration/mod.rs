//! Temperatures that make confidences mean what they say, position by position.
//!
//! Sequential temperature scaling (DSpark, section 4): for `k = 1 … γ` in turn, pick `T_k` so that
//! the survival `A_k = A_{k-1} · σ(logit_k / T_k)` matches how often the first `k` drafts were
//! accepted. The rank of drafts of one position stays; their place among other positions moves.
//!
//! | module | subject |
//! |---|---|
//! | `rounds` | verified rounds with tagged pairs of logits and outcomes |
//! | `pairing` | whether logits and outcomes belong together |
//! | `ece` | expected calibration error |
//! | `fit` | the offline fit and its report |
//! | `temperatures` | the result, and its JSON forms |
//! | `online` | the same under drift and trimmed windows |

mod ece;
mod error;
mod fit;
mod online;
mod pairing;
mod rounds;
mod temperatures;

pub use ece::expected_calibration_error;
pub use error::CalibrationError;
pub(crate) use fit::sigmoid;
pub use fit::{FitSettings, PositionReport, TemperatureFit, fit_temperatures, log_grid};
pub use online::{OnlineSettings, OnlineTemperatures};
pub use pairing::{MIN_NUM_PAIRING_ROUNDS, PairingReport, check_pairing};
pub use rounds::{Round, Rounds};
pub use temperatures::{TemperatureFile, Temperatures};
