//! A piecewise linear curve over counts.
//!
//! Lookup rule: linear between knots; below the first knot its value; past the last knot the last
//! segment goes on, which never falls. One knot is a constant, no knots are 0. A plateau is two
//! knots of equal time.

use serde::{Deserialize, Serialize};

use super::error::CostError;

/// Microseconds at a count; `[count, us]` in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Knot(pub u64, pub f64);

/// Times over a count, checked: knots rise, times are finite, not negative and never fall.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    knots: Vec<Knot>,
}

impl Curve {
    /// A curve through knots; none for a cost that is not paid.
    ///
    /// # Errors
    /// [`CostError::UnorderedKnots`], [`CostError::BadTime`] or [`CostError::FallingCurve`], with
    /// `name` for the curve.
    pub fn new(name: &'static str, knots: Vec<Knot>) -> Result<Self, CostError> {
        check_knots(name, &knots)?;
        for &[Knot(_, before_us), Knot(at, found_us)] in knots.array_windows() {
            if found_us < before_us {
                return Err(CostError::FallingCurve { curve: name, at, before_us, found_us });
            }
        }
        Ok(Self { knots })
    }

    /// A curve through knots that rise and never fall.
    pub(super) fn unchecked(knots: Vec<Knot>) -> Self {
        Self { knots }
    }

    /// The knots in order.
    #[must_use]
    pub fn knots(&self) -> &[Knot] {
        &self.knots
    }

    /// Microseconds at a count, by the rule above.
    #[must_use]
    pub fn at(&self, count: u64) -> f64 {
        let above = self.knots.partition_point(|knot| knot.0 < count);
        let (low, high) = match self.knots.as_slice() {
            [] => return 0.0,
            [only] => return only.1,
            [first, ..] if above == 0 => return first.1,
            [.., low, high] if above == self.knots.len() => (low, high),
            knots => (&knots[above - 1], &knots[above]),
        };
        let slope = (high.1 - low.1) / (high.0 - low.0) as f64;
        low.1 + slope * (count - low.0) as f64
    }
}

/// Checks order and times, whether or not the curve falls.
pub(super) fn check_knots(curve: &'static str, knots: &[Knot]) -> Result<(), CostError> {
    for &Knot(_, us) in knots {
        check_time(curve, us)?;
    }
    for &[Knot(before, _), Knot(found, _)] in knots.array_windows() {
        if found <= before {
            return Err(CostError::UnorderedKnots { curve, found, before });
        }
    }
    Ok(())
}

pub(super) fn check_time(name: &'static str, us: f64) -> Result<(), CostError> {
    let is_time = us.is_finite() && us >= 0.0;
    if is_time { Ok(()) } else { Err(CostError::BadTime { name, found: us }) }
}
