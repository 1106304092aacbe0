//! What comes next, by its first byte.

use super::Reader;
use crate::protocol::codec::error::{DecodeError, DecodeProblem};

impl Reader<'_> {
    /// The error of a value that is not `expected`.
    #[cold]
    pub(crate) fn unexpected(&self, expected: &'static str) -> DecodeError {
        match self.bytes.get(self.at) {
            Some(marker) => DecodeProblem::WrongType { expected, found: type_name(*marker) }.into(),
            None => DecodeProblem::Truncated { missing: 1 }.into(),
        }
    }

    /// Whether an integer is next.
    pub(crate) fn is_int(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0x00..=0x7f | 0xcc..=0xd3 | 0xe0..=0xff))
    }

    /// Whether a string is next.
    pub(crate) fn is_str(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0xa0..=0xbf | 0xd9..=0xdb))
    }

    /// Whether a float is next.
    pub(crate) fn is_float(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0xca | 0xcb))
    }

    /// Whether a nil is next.
    pub(crate) fn is_nil(&self) -> bool {
        self.bytes.get(self.at) == Some(&0xc0)
    }

    /// Whether an array is next whose first member is as asked.
    pub(crate) fn is_array_of(&mut self, is_member: impl Fn(&Self) -> bool) -> bool {
        let start = self.at;
        let is_match = self.array_len("an array").is_ok_and(|len| len > 0) && is_member(self);
        self.at = start;
        is_match
    }

    /// Whether a map is next.
    pub(crate) fn is_map(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0x80..=0x8f | 0xde | 0xdf))
    }
}

/// Whether a marker begins an extension.
pub(super) fn is_ext(marker: u8) -> bool {
    matches!(marker, 0xc7..=0xc9 | 0xd4..=0xd8)
}

fn type_name(marker: u8) -> &'static str {
    match marker {
        0x80..=0x8f | 0xde | 0xdf => "a map",
        0x90..=0x9f | 0xdc | 0xdd => "an array",
        0xa0..=0xbf | 0xd9..=0xdb => "a str",
        0xc0 => "nil",
        0xc1 => "the reserved byte c1",
        0xc2 | 0xc3 => "a bool",
        0xc4..=0xc6 => "bytes",
        0xc7..=0xc9 | 0xd4..=0xd8 => "an extension",
        0xca | 0xcb => "a float",
        _ => "an int",
    }
}
