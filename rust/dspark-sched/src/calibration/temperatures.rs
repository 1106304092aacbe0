//! Temperatures by position, and the files they come in.
//!
//! JSON: an object with `temperatures` (SGLang) or `sts_temperatures` (TensorRT-LLM), or both if they
//! are equal; optionally `ece_before`, `ece_after`, `num_samples`. Other fields are ignored.

use serde::{Deserialize, Serialize};

use super::error::CalibrationError;
use super::fit::TemperatureFit;
use crate::confidence::confidence_of_logit;
use crate::verify_plan::PlanError;

/// One temperature per draft position: finite and positive, at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct Temperatures {
    values: Vec<f32>,
}

/// The JSON form.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TemperatureFile {
    /// Temperatures of positions 1 … γ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperatures: Option<Vec<f64>>,
    /// The same under TensorRT-LLM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sts_temperatures: Option<Vec<f64>>,
    /// Calibration error at each position with all temperatures 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ece_before: Option<Vec<f64>>,
    /// Calibration error at each position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ece_after: Option<Vec<f64>>,
    /// Rounds that the fit saw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_samples: Option<u64>,
}

impl Temperatures {
    /// Temperatures of positions 1 … γ.
    ///
    /// # Errors
    /// [`CalibrationError::NoTemperatures`] or [`CalibrationError::BadTemperature`].
    pub fn new(values: Vec<f64>) -> Result<Self, CalibrationError> {
        if values.is_empty() {
            return Err(CalibrationError::NoTemperatures);
        }
        let checked = values.iter().enumerate().map(|(index, &found)| {
            let value = narrowed(found);
            let is_fine = value.is_finite() && value > 0.0 && (1.0 / value).is_finite();
            let refused = CalibrationError::BadTemperature { position: index + 1, found };
            if is_fine { Ok(value) } else { Err(refused) }
        });
        Ok(Self { values: checked.collect::<Result<_, _>>()? })
    }

    /// Temperatures that change nothing.
    ///
    /// # Errors
    /// [`CalibrationError::NoTemperatures`] for no drafts.
    pub fn identity(num_drafts: usize) -> Result<Self, CalibrationError> {
        Self::new(vec![1.0; num_drafts])
    }

    /// Reads any of the JSON forms.
    ///
    /// # Errors
    /// [`CalibrationError::Json`], [`CalibrationError::Conflict`], or as [`Temperatures::new`].
    pub fn from_json(text: &str) -> Result<Self, CalibrationError> {
        let refused =
            |error: serde_json::Error| CalibrationError::Json { reason: error.to_string() };
        let file: TemperatureFile = serde_json::from_str(text).map_err(refused)?;
        match (file.temperatures, file.sts_temperatures) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(CalibrationError::Conflict),
            (Some(values), _) | (None, Some(values)) => Self::new(values),
            (None, None) => Err(CalibrationError::NoTemperatures),
        }
    }

    /// Temperatures of positions 1 … γ.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Replaces logits `[R, γ]` by confidences, row by row.
    ///
    /// # Errors
    /// [`PlanError::WrongLength`] if the logits are not whole rows.
    pub fn apply(&self, logits: &mut [f32]) -> Result<(), PlanError> {
        let rows = logits.len() / self.values.len();
        crate::verify_plan::check_length("logits", logits.len(), rows * self.values.len())?;
        for row in logits.chunks_exact_mut(self.values.len()) {
            for (logit, &temperature) in row.iter_mut().zip(&self.values) {
                *logit = confidence_of_logit(*logit, temperature);
            }
        }
        Ok(())
    }

    /// The first `num_drafts` temperatures, for a drafter that draws fewer.
    ///
    /// # Errors
    /// [`CalibrationError::TooFewTemperatures`] or [`CalibrationError::NoTemperatures`].
    pub fn of_first(&self, num_drafts: usize) -> Result<Self, CalibrationError> {
        let found = self.values.len();
        let needed = num_drafts;
        let values = self.values.get(..num_drafts);
        let values = values.ok_or(CalibrationError::TooFewTemperatures { found, needed })?;
        Self::new(values.iter().map(|&value| f64::from(value)).collect())
    }
}

impl TemperatureFit {
    /// The JSON form, with both names of the list so that either engine reads it.
    ///
    /// # Errors
    /// [`CalibrationError::Json`] if the serializer refuses, which no fit makes it do.
    pub fn to_json(&self) -> Result<String, CalibrationError> {
        let list = |value: fn(&super::PositionReport) -> f64| {
            Some(self.positions.iter().map(value).collect::<Vec<f64>>())
        };
        let file = TemperatureFile {
            temperatures: list(|position| position.temperature),
            sts_temperatures: list(|position| position.temperature),
            ece_before: list(|position| position.ece_before),
            ece_after: list(|position| position.ece_after),
            num_samples: Some(self.num_rounds as u64),
        };
        let refused =
            |error: serde_json::Error| CalibrationError::Json { reason: error.to_string() };
        serde_json::to_string_pretty(&file).map_err(refused)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be finite afterwards")]
fn narrowed(value: f64) -> f32 {
    value as f32
}
