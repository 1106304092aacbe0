//! How far an array of fields has been read.

use super::error::{DecodeError, DecodeProblem};

/// The elements of an array that are not read yet.
#[derive(Debug)]
pub(crate) struct Elements {
    pub(super) len: usize,
    pub(super) left: usize,
}

impl Elements {
    /// Takes the next element, if there is one.
    pub(crate) fn take(&mut self) -> bool {
        let has_next = self.left > 0;
        self.left = self.left.saturating_sub(1);
        has_next
    }

    /// The error of a required element that is not there.
    pub(crate) fn missing(&self, field: &'static str) -> DecodeError {
        DecodeError::from(DecodeProblem::MissingElement { len: self.len }).in_field(field)
    }

    /// Takes elements that were read at once.
    pub(crate) fn take_many(&mut self, count: usize) {
        self.left = self.left.saturating_sub(count);
    }

    /// Elements in all.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}
