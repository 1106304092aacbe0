//! Values without a declared type, kept as their checked msgpack bytes.
//!
//! So an untyped value costs no more memory than its bytes and is written back exactly as it came.

use bytes::Bytes;
use thiserror::Error as ThisError;

use super::error::{DecodeError, DecodeResult};
use super::reader::Reader;
use super::wire::{Wire, decode};
use super::writer::Writer;
use crate::protocol::Profile;

/// One value of any type that Python objects can be made of: nil, bool, numbers, text, bytes,
/// arrays, maps and raw array data. Pickled objects are refused when it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Untyped(Bytes);

/// A [`rmpv::Value`] that has no form on the wire.
#[derive(Debug, Clone, PartialEq, ThisError)]
pub enum UntypedError {
    /// The value holds what a message must not hold.
    #[error("the value cannot be sent")]
    Refused {
        /// Where and why.
        #[source]
        source: DecodeError,
    },
}

impl Untyped {
    /// The value nil.
    #[must_use]
    pub fn nil() -> Self {
        Self(Bytes::from_static(&[0xc0]))
    }

    /// Checks the msgpack of exactly one value.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the bytes are not one value, or hold a pickled object.
    pub fn from_msgpack(bytes: Bytes) -> DecodeResult<Self> {
        decode(&[bytes], Profile::default()).map(|decoded| decoded.message)
    }

    /// The value's msgpack.
    #[must_use]
    pub fn msgpack(&self) -> &Bytes {
        &self.0
    }

    /// Whether the value is nil.
    #[must_use]
    pub fn is_nil(&self) -> bool {
        self.0.as_ref() == [0xc0]
    }

    /// The value as a tree. Costs some 40 times the memory of the bytes.
    #[must_use]
    pub fn to_value(&self) -> rmpv::Value {
        let mut bytes = self.0.as_ref();
        rmpv::decode::read_value(&mut bytes).unwrap_or(rmpv::Value::Nil)
    }

    /// The wire form of a tree.
    ///
    /// # Errors
    ///
    /// [`UntypedError::Refused`] for pickled and unknown extensions, keys that Python cannot hash,
    /// and trees that are too deep.
    pub fn from_value(value: &rmpv::Value) -> Result<Self, UntypedError> {
        let mut bytes = Vec::new();
        let written = rmpv::encode::write_value(&mut bytes, value);
        debug_assert!(written.is_ok(), "writing to a vector does not fail");
        Self::from_msgpack(bytes.into()).map_err(|source| UntypedError::Refused { source })
    }
}

impl Default for Untyped {
    fn default() -> Self {
        Self::nil()
    }
}

impl Wire for Untyped {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let start = reader.position();
        reader.check()?;
        Ok(Self(reader.slice(start, reader.position())))
    }

    fn write(&self, writer: &mut Writer) {
        writer.raw(&self.0);
    }
}
