//! A share of the device's memory, as users write it.

use serde::{Deserialize, Serialize};

use super::error::SizingError;

/// A share of the device's memory, in whole millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Utilization {
    parts_per_million: u32,
}

const MILLION: u32 = 1_000_000;

impl Utilization {
    /// The whole device.
    pub const FULL: Self = Self { parts_per_million: MILLION };

    /// Reads a ratio such as 0.92.
    ///
    /// # Errors
    /// [`SizingError::Utilization`] unless it is above 0 (by a millionth) and at most 1.
    pub fn from_ratio(ratio: f64) -> Result<Self, SizingError> {
        let millionths = (ratio * f64::from(MILLION)).round();
        if !(1.0..=f64::from(MILLION)).contains(&millionths) {
            return Err(SizingError::Utilization { ratio });
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number from 1 to 1,000,000"
        )]
        let parts_per_million = millionths as u32;
        Ok(Self { parts_per_million })
    }

    /// The ratio.
    #[must_use]
    pub fn ratio(self) -> f64 {
        f64::from(self.parts_per_million) / f64::from(MILLION)
    }

    /// This share of `bytes`, rounded down.
    #[must_use]
    pub fn of(self, bytes: u64) -> u64 {
        let share = u128::from(bytes) * u128::from(self.parts_per_million) / u128::from(MILLION);
        // The share is at most 1, so it fits.
        u64::try_from(share).unwrap_or(bytes)
    }
}

impl TryFrom<f64> for Utilization {
    type Error = SizingError;

    fn try_from(ratio: f64) -> Result<Self, SizingError> {
        Self::from_ratio(ratio)
    }
}

impl From<Utilization> for f64 {
    fn from(utilization: Utilization) -> Self {
        utilization.ratio()
    }
}
