//! The mechanics below the messages: cursor, writer, errors with paths, and the trait between.

#[macro_use]
mod fields;

mod elements;
mod error;
mod parts;
mod primitive;
mod reader;
mod report;
mod untyped;
mod wire;
mod writer;

pub use error::{DecodeError, DecodeProblem, DecodeResult, EncodeError};
pub use parts::{ArrayPart, ArraySource, Part, Record, Source, Visible};
pub use primitive::{Map, NullableList, TokenIds};
pub use reader::Reader;
pub use report::{Decoded, Skipped};
pub use untyped::{Untyped, UntypedError};
pub use wire::{Wire, decode, encode, encode_parts};
pub use writer::Writer;

pub(crate) use elements::Elements;
pub(crate) use error::shortened;
pub(crate) use primitive::read_items;
pub(crate) use reader::check_extension;
pub(crate) use writer::INLINE_BELOW_BYTES;
