//! Why a cost table is refused.

/// A table, or a set of measured steps, that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// A curve without a knot where one is needed.
    #[error("curve {curve} has no knots: at least 1 is needed")]
    EmptyCurve {
        /// Name of the curve.
        curve: &'static str,
    },
    /// Knots that do not rise.
    #[error("curve {curve} has a knot at {found} after one at {before}: knots must rise")]
    UnorderedKnots {
        /// Name of the curve.
        curve: &'static str,
        /// Place of the knot.
        found: u64,
        /// Place of the knot before.
        before: u64,
    },
    /// A time that is negative, infinite or not a number.
    #[error("{name} is {found} us: a finite number of at least 0 is needed")]
    BadTime {
        /// What was given.
        name: &'static str,
        /// The time.
        found: f64,
    },
    /// A curve that falls although the table claims to be repaired.
    #[error(
        "curve {curve} falls from {before_us} us to {found_us} us at {at}: repair the measured \
         table first"
    )]
    FallingCurve {
        /// Name of the curve.
        curve: &'static str,
        /// Place of the knot.
        at: u64,
        /// Time at the knot before.
        before_us: f64,
        /// Time at the knot.
        found_us: f64,
    },
    /// Graph sizes that do not rise, or a size of 0.
    #[error("graph tier {found} follows {before}: tiers are positive and rise")]
    UnorderedTiers {
        /// The tier.
        found: u32,
        /// The tier before, or 0.
        before: u32,
    },
    /// A table in which a step costs nothing.
    #[error("a step of 1 request and 1 token costs {found_us} us: more than 0 is needed")]
    FreeStep {
        /// Time of the smallest step.
        found_us: f64,
    },
    /// Verification tokens that cost nothing: such a table can only say "verify everything".
    #[error(
        "tokens cost {rise_us} us more at {last} than at {first}, {ratio:.4} of a step: below \
         {limit} the table is flat; verify everything, or measure larger steps"
    )]
    FlatTable {
        /// First measured number of tokens.
        first: u64,
        /// Last measured number of tokens.
        last: u64,
        /// Difference of their costs.
        rise_us: f64,
        /// The same over the time of the first step.
        ratio: f64,
        /// Least ratio accepted.
        limit: f64,
    },
    /// A curve that falls by more than noise explains.
    #[error(
        "curve {curve} is too noisy: monotone repair moves the knot at {at} by {ratio:.3} of a \
         step, the limit is {limit}; measure with more repeats"
    )]
    NoisyCurve {
        /// Name of the curve.
        curve: &'static str,
        /// Place of the knot.
        at: u64,
        /// How far the repair moved it, over the time of a step.
        ratio: f64,
        /// Largest ratio accepted.
        limit: f64,
    },
    /// Repeats of one step that differ by more than noise explains.
    #[error(
        "a step of {num_requests} requests and {num_tokens} tokens is too noisy: its repeats \
         spread over {ratio:.3} of the median, the limit is {limit}"
    )]
    NoisySample {
        /// Requests of the step.
        num_requests: u32,
        /// Tokens of the step.
        num_tokens: u32,
        /// Spread over median.
        ratio: f64,
        /// Largest ratio accepted.
        limit: f64,
    },
    /// Measured steps that fall where a table may not.
    #[error(
        "the steps are too noisy for a monotone table, since larger ones took less: one of \
         {num_requests} requests and {num_tokens} tokens would be {ratio:.3} of its time off, the \
         limit is {limit}; measure with more repeats"
    )]
    FallingSteps {
        /// Requests of the step.
        num_requests: u32,
        /// Tokens of the step.
        num_tokens: u32,
        /// Distance of the best table that never falls from the best one that may, over the time.
        ratio: f64,
        /// Largest ratio accepted.
        limit: f64,
    },
    /// Measured steps that the additive form does not describe.
    #[error(
        "a step of {num_requests} requests and {num_tokens} tokens took {step_us} us, the fit \
         says {fitted_us} us: off by more than {limit} of it"
    )]
    PoorFit {
        /// Requests of the step.
        num_requests: u32,
        /// Tokens of the step.
        num_tokens: u32,
        /// Measured time.
        step_us: f64,
        /// Fitted time.
        fitted_us: f64,
        /// Largest ratio accepted.
        limit: f64,
    },
    /// Measured steps from which the cost of drafting cannot be told.
    #[error(
        "{num_drafting} of {num_samples} measured steps draft: both kinds are needed to tell the \
         cost of drafting"
    )]
    DraftNotSeparable {
        /// Steps that draft.
        num_drafting: usize,
        /// All steps.
        num_samples: usize,
    },
    /// A measured step with fewer tokens than requests, or with none.
    #[error(
        "a measured step has {num_requests} requests and {num_tokens} tokens: each request has at \
         least 1 token"
    )]
    BadSample {
        /// Requests of the step.
        num_requests: u32,
        /// Tokens of the step.
        num_tokens: u32,
    },
    /// Text that is no table.
    #[error("the cost table is not readable: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
    /// A table of another kind or version.
    #[error("the cost table says {found:?}: {expected:?} is needed")]
    Format {
        /// Format and version found.
        found: String,
        /// Format and version known.
        expected: &'static str,
    },
}
