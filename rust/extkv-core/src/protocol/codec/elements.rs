//! How far an array of fields has been read.

use super::error::{DecodeError, DecodeProblem, DecodeResult};
use super::reader::Reader;

/// The elements of an array that are not read yet.
#[derive(Debug)]
pub(crate) struct Elements {
    len: usize,
    left: usize,
}

impl Elements {
    /// Takes the next element, if there is one.
    pub(crate) fn take(&mut self) -> bool {
        let has_next = self.left > 0;
        self.left = self.left.saturating_sub(1);
        has_next
    }

    /// Takes the next element, which must be there.
    #[inline]
    pub(crate) fn require(&mut self, field: &'static str) -> DecodeResult<()> {
        if self.take() { Ok(()) } else { Err(self.missing(field)) }
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

impl Reader<'_> {
    /// Opens an array whose elements are fields.
    #[inline]
    pub(crate) fn elements(&mut self, expected: &'static str) -> DecodeResult<Elements> {
        let len = self.array_len(expected)?;
        Ok(Elements { len, left: len })
    }

    /// Reads an element that must be there.
    #[inline]
    pub(crate) fn field<T>(
        &mut self,
        elements: &mut Elements,
        name: &'static str,
        read: impl FnOnce(&mut Self) -> DecodeResult<T>,
    ) -> DecodeResult<T> {
        elements.require(name)?;
        read(self).map_err(|error| error.in_field(name))
    }

    /// Passes over what is left of an array, and counts it.
    #[inline]
    pub(crate) fn skip_extra(&mut self, elements: &Elements) -> DecodeResult<()> {
        if elements.left > 0 {
            self.skipped.add_elements(elements.left);
            for index in elements.len - elements.left..elements.len {
                self.skip().map_err(|error| error.at_index(index))?;
            }
        }
        Ok(())
    }
}
