//! Sizes that say their unit, and the rounding that every layer shares.

use std::fmt;

/// A number of bytes; prints as `64 MiB`, `1.5 GiB` or `3000 bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

const UNITS: [(u64, &str); 5] =
    [(1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in UNITS {
            if self.0 >= unit {
                let whole = self.0 / unit;
                let tenths = u128::from(self.0 % unit) * 10 / u128::from(unit);
                return if self.0.is_multiple_of(unit) {
                    write!(f, "{whole} {name}")
                } else {
                    write!(f, "{whole}.{tenths} {name} ({} bytes)", self.0)
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// Rounds `value` up to a multiple of `unit` (a non-zero number); `None` when that overflows.
#[must_use]
pub fn round_up(value: u64, unit: u64) -> Option<u64> {
    value.checked_next_multiple_of(unit)
}

/// Bytes of a contiguous tensor; `None` when that overflows or is no whole number of bytes.
#[must_use]
pub fn tensor_bytes(shape: &[u64], item_bits: u64) -> Option<u64> {
    let num_items = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim))?;
    let num_bits = num_items.checked_mul(item_bits)?;
    num_bits.is_multiple_of(8).then_some(num_bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_exact_and_inexact_sizes() {
        assert_eq!(Bytes(0).to_string(), "0 bytes");
        assert_eq!(Bytes(1023).to_string(), "1023 bytes");
        assert_eq!(Bytes(2 << 20).to_string(), "2 MiB");
        assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB (1610612736 bytes)");
        assert_eq!(Bytes(u64::MAX).to_string(), "16383.9 PiB (18446744073709551615 bytes)");
    }

    #[test]
    fn tensor_sizes_refuse_overflow_and_fractions() {
        assert_eq!(tensor_bytes(&[2, 3], 16), Some(12));
        assert_eq!(tensor_bytes(&[0, u64::MAX], 8), Some(0));
        assert_eq!(tensor_bytes(&[], 32), Some(4));
        assert_eq!(tensor_bytes(&[3], 4), None);
        assert_eq!(tensor_bytes(&[u64::MAX, 2], 8), None);
    }

    #[test]
    fn rounding_up_refuses_overflow() {
        assert_eq!(round_up(0, 4096), Some(0));
        assert_eq!(round_up(1, 4096), Some(4096));
        assert_eq!(round_up(4096, 4096), Some(4096));
        assert_eq!(round_up(u64::MAX, 4096), None);
    }
}
