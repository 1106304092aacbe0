//! A checked table that answers what a step costs.
//!
//! `T = bias + α(requests) + context(context tokens) + θ(E(tokens))`, plus
//! `draft(requests) + draft_context(context tokens)` when the step drafts and
//! `window_context(context tokens)` when it verifies a draft. `E` rounds tokens up to the captured
//! graph tier; past the last tier a step runs unpadded. Times are microseconds.

use std::collections::BTreeMap;

use super::curve::{Curve, Knot, check_knots, check_time};
use super::error::CostError;
use super::repair::repaired;
use super::table::{CostTable, FORMAT, QualityLimits};
use super::tracker::CostScale;

/// Costs of fewer tokens than this are looked up without a search.
const NUM_DENSE_TOKENS: u32 = 16_384;

/// What a step holds besides drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Requests that decode: each has one token that is always verified.
    pub num_requests: u32,
    /// Tokens of other rows, for example prefill chunks.
    pub num_other_tokens: u32,
    /// Context tokens of all requests together.
    pub num_context_tokens: u64,
}

impl StepLoad {
    /// A load of decoding requests whose context is not counted.
    #[must_use]
    pub fn of_requests(num_requests: u32) -> Self {
        Self { num_requests, ..Self::default() }
    }

    /// Tokens of the step without drafts.
    #[must_use]
    pub fn num_base_tokens(&self) -> u32 {
        self.num_requests.saturating_add(self.num_other_tokens)
    }
}

/// Whether a step runs the draft pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafting {
    /// It does, even if it verifies none of the drafts.
    Paid,
    /// It does not.
    Skipped,
}

/// A checked table that answers what a step costs.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    bias_us: f64,
    requests: Curve,
    draft: Curve,
    tokens: Curve,
    context: Curve,
    draft_context: Curve,
    window_context: Curve,
    /// Whether a step counts as verifying even if it does not; see [`StepCost::envelope`].
    always_has_windows: bool,
    tiers: Vec<u32>,
    source: BTreeMap<String, String>,
    /// Where θ bends or jumps: knots and tiers.
    breaks: Vec<u32>,
    dense_us: Vec<f64>,
}

impl StepCost {
    /// Checks a table that is final: loaded, or written by hand.
    ///
    /// # Errors
    /// [`CostError::EmptyCurve`] without `token_us`, [`CostError::UnorderedKnots`],
    /// [`CostError::BadTime`], [`CostError::FallingCurve`], [`CostError::UnorderedTiers`] or
    /// [`CostError::FreeStep`].
    pub fn new(table: CostTable) -> Result<Self, CostError> {
        check_time("bias_us", table.bias_us)?;
        check_tiers(&table.tiers)?;
        if table.token_us.is_empty() {
            return Err(CostError::EmptyCurve { curve: "token_us" });
        }
        let mut cost = Self {
            bias_us: table.bias_us,
            requests: Curve::new("request_us", table.request_us)?,
            draft: Curve::new("draft_us", table.draft_us)?,
            tokens: Curve::new("token_us", table.token_us)?,
            context: Curve::new("context_us", table.context_us)?,
            draft_context: Curve::new("draft_context_us", table.draft_context_us)?,
            window_context: Curve::new("window_context_us", table.window_context_us)?,
            always_has_windows: false,
            tiers: table.tiers,
            source: table.source,
            breaks: Vec::new(),
            dense_us: Vec::new(),
        };
        let found_us = cost.smallest_step_us();
        if found_us <= 0.0 {
            return Err(CostError::FreeStep { found_us });
        }
        cost.dense_us = (0..NUM_DENSE_TOKENS).map(|tokens| cost.searched_us(tokens)).collect();
        cost.breaks = cost.sorted_breaks();
        Ok(cost)
    }

    /// Repairs a measured table so that no curve falls, and checks it.
    ///
    /// # Errors
    /// As [`StepCost::new`], and [`CostError::NoisyCurve`] where the repair would move a knot too
    /// far or [`CostError::FlatTable`] where tokens cost next to nothing.
    pub fn measured(mut table: CostTable, limits: &QualityLimits) -> Result<Self, CostError> {
        let bias_us = table.bias_us;
        let (requests, tokens) = (table.request_us.clone(), table.token_us.clone());
        let smallest_us = bias_us + knot_us(&requests, 0) + knot_us(&tokens, 0);
        // Plain steps of as many requests, or as many tokens, as a knot has.
        let of_requests = |at| bias_us + knot_us(&requests, at) + knot_us(&tokens, at);
        let of_tokens = |at| bias_us + knot_us(&requests, 0) + knot_us(&tokens, at);
        let smallest = |_| smallest_us;
        let steps: [(_, _, &dyn Fn(u64) -> f64); 6] = [
            ("request_us", &mut table.request_us, &of_requests),
            ("draft_us", &mut table.draft_us, &of_requests),
            ("token_us", &mut table.token_us, &of_tokens),
            ("context_us", &mut table.context_us, &smallest),
            ("draft_context_us", &mut table.draft_context_us, &smallest),
            ("window_context_us", &mut table.window_context_us, &smallest),
        ];
        for (curve, knots, step_us) in steps {
            check_knots(curve, knots)?;
            let step_us = |at| step_us(at).max(smallest_us);
            repair_knots(curve, knots, step_us, limits.max_repair_ratio)?;
        }
        let cost = Self::new(table)?;
        cost.check_rise(limits.min_rise_ratio)?;
        Ok(cost)
    }

    /// Refuses a flat table: with it every planner verifies everything.
    ///
    /// # Errors
    /// [`CostError::FlatTable`] when θ rises by less than `min_rise_ratio` of the smallest step.
    pub fn check_rise(&self, limit: f64) -> Result<(), CostError> {
        let (Some(&Knot(first, low_us)), Some(&Knot(last, high_us))) =
            (self.tokens.knots().first(), self.tokens.knots().last())
        else {
            return Err(CostError::EmptyCurve { curve: "token_us" });
        };
        let rise_us = high_us - low_us;
        let ratio = rise_us / self.smallest_step_us();
        if ratio >= limit {
            return Ok(());
        }
        Err(CostError::FlatTable { first, last, rise_us, ratio, limit })
    }

    /// Reads the JSON form.
    ///
    /// # Errors
    /// [`CostError::Json`], [`CostError::Format`], or as [`StepCost::new`].
    pub fn from_json(text: &str) -> Result<Self, CostError> {
        Self::new(CostTable::from_json(text)?)
    }

    /// Writes the JSON form.
    ///
    /// # Errors
    /// [`CostError::Json`] if the serializer refuses, which no checked table makes it do.
    pub fn to_json(&self) -> Result<String, CostError> {
        let refused = |error: serde_json::Error| CostError::Json { reason: error.to_string() };
        serde_json::to_string_pretty(&self.table()).map_err(refused)
    }

    /// The same costs with θ replaced by the convex curve below it, and without tiers. What windows
    /// cost is paid from the start: else the first draft were a stair.
    ///
    /// On it Θ has one maximum, so that a planner that stops early does not stop at a stair.
    #[must_use]
    pub fn envelope(&self) -> Self {
        let mut hull: Vec<Knot> = Vec::new();
        let points = self.breaks.iter().map(|&at| Knot(u64::from(at), self.searched_us(at)));
        for point in points {
            while let [.., first, middle] = hull.as_slice()
                && slope(first, middle) >= slope(middle, &point)
            {
                hull.pop();
            }
            hull.push(point);
        }
        let mut envelope = Self {
            tokens: Curve::unchecked(hull),
            tiers: Vec::new(),
            dense_us: Vec::new(),
            always_has_windows: true,
            ..self.clone()
        };
        envelope.breaks = envelope.sorted_breaks();
        envelope.dense_us = (0..NUM_DENSE_TOKENS).map(|at| envelope.searched_us(at)).collect();
        envelope
    }

    /// The table again.
    #[must_use]
    pub fn table(&self) -> CostTable {
        CostTable {
            format: FORMAT.to_owned(),
            bias_us: self.bias_us,
            request_us: self.requests.knots().to_vec(),
            draft_us: self.draft.knots().to_vec(),
            token_us: self.tokens.knots().to_vec(),
            context_us: self.context.knots().to_vec(),
            draft_context_us: self.draft_context.knots().to_vec(),
            window_context_us: self.window_context.knots().to_vec(),
            tiers: self.tiers.clone(),
            source: self.source.clone(),
        }
    }

    /// Tokens that run for `num_tokens`: the next captured size, or the same past the last one.
    #[must_use]
    pub fn num_executed_tokens(&self, num_tokens: u32) -> u32 {
        if num_tokens == 0 {
            return 0;
        }
        let index = self.tiers.partition_point(|&tier| tier < num_tokens);
        self.tiers.get(index).copied().unwrap_or(num_tokens)
    }

    /// Numbers of tokens in `(low, high]` at which θ bends or jumps: knots and captured sizes.
    /// Between two of them θ is linear, so a ratio of linear functions has its maximum at one.
    #[must_use]
    pub fn breaks_between(&self, low: u32, high: u32) -> &[u32] {
        let start = self.breaks.partition_point(|&tokens| tokens <= low);
        let end = self.breaks.partition_point(|&tokens| tokens <= high.max(low));
        &self.breaks[start..end]
    }

    /// Microseconds of a step with this many drafts to verify.
    #[must_use]
    pub fn step_us(&self, load: &StepLoad, num_drafts: u32, drafting: Drafting) -> f64 {
        self.times(load, CostScale::default(), drafting).at(num_drafts)
    }

    /// Times of the steps that differ in the number of drafts alone.
    #[must_use]
    pub fn times(&self, load: &StepLoad, scale: CostScale, drafting: Drafting) -> StepTimes<'_> {
        let [fixed_us, draft_us] = self.constant_us(load, drafting);
        StepTimes {
            cost: self,
            num_base_tokens: load.num_base_tokens(),
            constant_us: scale.fixed * fixed_us + scale.draft * draft_us,
            window_us: self.window_us(load),
            first_window: u32::from(!self.always_has_windows),
            verify_scale: scale.verify,
        }
    }

    /// The parts that do not depend on the number of drafts: without and of the draft pass.
    pub(super) fn constant_us(&self, load: &StepLoad, drafting: Drafting) -> [f64; 2] {
        let num_requests = u64::from(load.num_requests);
        let context = load.num_context_tokens;
        let fixed_us = self.bias_us + self.requests.at(num_requests) + self.context.at(context);
        let draft_us = match drafting {
            Drafting::Paid => self.draft.at(num_requests) + self.draft_context.at(context),
            Drafting::Skipped => 0.0,
        };
        [fixed_us, draft_us]
    }

    /// What verifying any draft adds.
    pub(super) fn window_us(&self, load: &StepLoad) -> f64 {
        self.window_context.at(load.num_context_tokens)
    }

    /// θ of a number of tokens, before they are rounded up.
    pub(super) fn token_us(&self, num_tokens: u32) -> f64 {
        let dense = self.dense_us.get(num_tokens as usize);
        dense.copied().unwrap_or_else(|| self.searched_us(num_tokens))
    }

    fn sorted_breaks(&self) -> Vec<u32> {
        let knots = self.tokens.knots().iter().filter_map(|knot| u32::try_from(knot.0).ok());
        let mut breaks: Vec<u32> = knots.chain(self.tiers.iter().copied()).collect();
        breaks.sort_unstable();
        breaks.dedup();
        breaks
    }

    fn searched_us(&self, num_tokens: u32) -> f64 {
        self.tokens.at(u64::from(self.num_executed_tokens(num_tokens)))
    }

    fn smallest_step_us(&self) -> f64 {
        self.bias_us + self.requests.at(1) + self.searched_us(1)
    }
}

/// Times of steps by the number of drafts they verify.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes<'cost> {
    cost: &'cost StepCost,
    num_base_tokens: u32,
    constant_us: f64,
    window_us: f64,
    /// Fewest drafts that pay for windows.
    first_window: u32,
    verify_scale: f64,
}

impl StepTimes<'_> {
    /// Microseconds of a step with this many drafts.
    #[must_use]
    pub fn at(&self, num_drafts: u32) -> f64 {
        let num_tokens = self.num_base_tokens.saturating_add(num_drafts);
        let window_us = if num_drafts >= self.first_window { self.window_us } else { 0.0 };
        self.constant_us + self.verify_scale * (self.cost.token_us(num_tokens) + window_us)
    }

    /// Tokens that run in it, padding included.
    #[must_use]
    pub fn num_executed_tokens(&self, num_drafts: u32) -> u32 {
        self.cost.num_executed_tokens(self.num_base_tokens.saturating_add(num_drafts))
    }
}

fn slope(low: &Knot, high: &Knot) -> f64 {
    (high.1 - low.1) / (high.0 - low.0) as f64
}

fn check_tiers(tiers: &[u32]) -> Result<(), CostError> {
    let mut before = 0;
    for &found in tiers {
        if found <= before {
            return Err(CostError::UnorderedTiers { found, before });
        }
        before = found;
    }
    Ok(())
}

/// The last knot that is not past `at`, or the first.
fn knot_us(knots: &[Knot], at: u64) -> f64 {
    let last = knots.iter().rev().find(|knot| knot.0 <= at);
    last.or(knots.first()).map_or(0.0, |knot| knot.1)
}

fn repair_knots(
    curve: &'static str,
    knots: &mut [Knot],
    step_us: impl Fn(u64) -> f64,
    limit: f64,
) -> Result<(), CostError> {
    let measured: Vec<f64> = knots.iter().map(|knot| knot.1).collect();
    let fixed = repaired(&measured);
    for (knot, us) in knots.iter_mut().zip(fixed) {
        let ratio = (knot.1 - us).abs() / step_us(knot.0);
        if ratio > limit {
            return Err(CostError::NoisyCurve { curve, at: knot.0, ratio, limit });
        }
        knot.1 = us;
    }
    Ok(())
}
