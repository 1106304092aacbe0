//! What a decoder passed over because it does not know it: counted, never an error.

/// Parts of a message that the profile does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Skipped {
    elements: u64,
    keys: u64,
}

impl Skipped {
    /// Trailing array elements past the last known field, at any level.
    #[must_use]
    pub fn elements(self) -> u64 {
        self.elements
    }

    /// Map keys that are no field, at any level.
    #[must_use]
    pub fn keys(self) -> u64 {
        self.keys
    }

    /// Whether everything was known.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.elements == 0 && self.keys == 0
    }

    pub(crate) fn add_elements(&mut self, count: usize) {
        self.elements = self.elements.saturating_add(count as u64);
    }

    pub(crate) fn add_key(&mut self) {
        self.keys = self.keys.saturating_add(1);
    }
}

/// A decoded message and what was passed over in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded<T> {
    /// The message.
    pub message: T,
    /// What the decoder did not know.
    pub skipped: Skipped,
}
