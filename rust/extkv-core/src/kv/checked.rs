//! `u64` arithmetic whose overflow is an error that names what was computed.

use super::error::LayoutError;

pub(crate) fn add(what: &'static str, a: u64, b: u64) -> Result<u64, LayoutError> {
    a.checked_add(b).ok_or(LayoutError::Overflow { what })
}

pub(crate) fn mul(what: &'static str, a: u64, b: u64) -> Result<u64, LayoutError> {
    a.checked_mul(b).ok_or(LayoutError::Overflow { what })
}

pub(crate) fn product(
    what: &'static str,
    factors: impl IntoIterator<Item = u64>,
) -> Result<u64, LayoutError> {
    factors.into_iter().try_fold(1, |total, factor| mul(what, total, factor))
}

pub(crate) fn round_up(what: &'static str, value: u64, unit: u64) -> Result<u64, LayoutError> {
    crate::units::round_up(value, unit).ok_or(LayoutError::Overflow { what })
}

pub(crate) fn non_zero(what: &'static str, value: u64) -> Result<u64, LayoutError> {
    if value == 0 { Err(LayoutError::ZeroSize { what }) } else { Ok(value) }
}
