//! A cost table as it is stored, its JSON form, and what is refused of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::curve::Knot;
use super::error::CostError;

pub(super) const FORMAT: &str = "extkv.step_cost.v1";

/// A table as it is measured, edited and stored. Field names are those of the JSON file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// `extkv.step_cost.v1`; set on writing.
    #[serde(default)]
    pub format: String,
    /// Time of a step that nothing below explains.
    #[serde(default)]
    pub bias_us: f64,
    /// α: time over requests, whether or not the step drafts.
    #[serde(default)]
    pub request_us: Vec<Knot>,
    /// Time of the draft pass over requests.
    #[serde(default)]
    pub draft_us: Vec<Knot>,
    /// θ: time over executed tokens: one per request, drafts and prefill. At least one knot.
    pub token_us: Vec<Knot>,
    /// Time over the context tokens of all requests together.
    #[serde(default)]
    pub context_us: Vec<Knot>,
    /// The draft pass's time over the context tokens of all requests together.
    #[serde(default)]
    pub draft_context_us: Vec<Knot>,
    /// What verification adds over the same: attention of several rows per request reads slower
    /// than that of one. Paid in full by every step that verifies a draft.
    #[serde(default)]
    pub window_context_us: Vec<Knot>,
    /// Numbers of tokens with a captured graph, rising; none when every size runs as it is.
    #[serde(default)]
    pub tiers: Vec<u32>,
    /// Where it was measured: device, model, versions. Free text, for people.
    #[serde(default)]
    pub source: BTreeMap<String, String>,
}

impl CostTable {
    /// Reads the JSON form without checking the numbers.
    ///
    /// # Errors
    /// [`CostError::Json`] or [`CostError::Format`].
    pub fn from_json(text: &str) -> Result<Self, CostError> {
        let refused = |error: serde_json::Error| CostError::Json { reason: error.to_string() };
        let table: Self = serde_json::from_str(text).map_err(refused)?;
        if table.format != FORMAT {
            return Err(CostError::Format { found: table.format, expected: FORMAT });
        }
        Ok(table)
    }
}

/// What is refused as flat or noisy. Ratios are of the time of the smallest step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QualityLimits {
    /// Least rise of θ over its measured range.
    pub min_rise_ratio: f64,
    /// Largest move of a knot by monotone repair, over a plain step of as many requests or tokens;
    /// of a fit, largest distance of the best table that never falls from the best one that may.
    pub max_repair_ratio: f64,
    /// Largest spread (p90 - p10) of the repeats of one step, over their median.
    pub max_spread_ratio: f64,
    /// Largest distance of a measured step from the additive fit, over its time.
    pub max_residual_ratio: f64,
}

impl Default for QualityLimits {
    fn default() -> Self {
        Self {
            min_rise_ratio: 0.02,
            max_repair_ratio: 0.10,
            max_spread_ratio: 0.20,
            max_residual_ratio: 0.15,
        }
    }
}
