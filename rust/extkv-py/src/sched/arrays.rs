//! Arrays of numbers in native byte order, between slices and Python's buffers.

use dspark_sched::{RequestId, TokenId};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use super::args::Refusal;

/// An array that Python may also write to, which `torch.from_numpy` asks for.
pub(super) type Array = Py<PyByteArray>;

/// Copies numbers into one new Python object.
pub(super) fn array<const N: usize, T: Element<N>>(
    py: Python<'_>,
    items: impl ExactSizeIterator<Item = T>,
) -> PyResult<Array> {
    let filled = PyByteArray::new_with(py, items.len() * N, |buffer| {
        let (places, _) = buffer.as_chunks_mut();
        places.iter_mut().zip(items).for_each(|(place, item)| *place = item.bytes());
        Ok(())
    })?;
    Ok(filled.unbind())
}

/// The numbers of a buffer, if they are whole.
pub(super) fn items_of<T: Number>(bytes: &[u8]) -> Result<Vec<T>, Refusal> {
    let refused = Refusal::Ragged { num_bytes: bytes.len(), item_bytes: T::NUM_BYTES };
    T::read(bytes).ok_or(refused)
}

/// A number that Python hands in.
pub(super) trait Number: Sized {
    /// Its values, as Python writes them.
    const BOUNDS: &'static str;
    /// Its size in a buffer.
    const NUM_BYTES: usize = size_of::<Self>();

    /// The numbers in bytes; None if one is not whole.
    fn read(bytes: &[u8]) -> Option<Vec<Self>>;
}

macro_rules! numbers {
    ($($number:ty => $bounds:literal),* $(,)?) => {$(
        impl Number for $number {
            const BOUNDS: &'static str = $bounds;

            fn read(bytes: &[u8]) -> Option<Vec<Self>> {
                let (chunks, rest) = bytes.as_chunks();
                let numbers = || chunks.iter().copied().map(Self::from_ne_bytes).collect();
                rest.is_empty().then(numbers)
            }
        }
    )*};
}

numbers! {
    i32 => "[-2**31, 2**31)",
    u32 => "[0, 2**32)",
    u64 => "[0, 2**64)",
    f32 => "the numbers of a float",
    f64 => "the numbers of a float",
}

/// An element of an array that Python gets.
pub(super) trait Element<const N: usize> {
    /// Its bytes in native order.
    fn bytes(self) -> [u8; N];
}

macro_rules! elements {
    ($($element:ty, $num_bytes:literal: $number:expr);* $(;)?) => {$(
        impl Element<$num_bytes> for $element {
            fn bytes(self) -> [u8; $num_bytes] {
                let number: fn(Self) -> _ = $number;
                number(self).to_ne_bytes()
            }
        }
    )*};
}

elements! {
    i8, 1: |number| number;
    i32, 4: |number| number;
    u32, 4: |number| number;
    i64, 8: |number| number;
    f32, 4: |number| number;
    f64, 8: |number| number;
    RequestId, 8: |request_id| request_id.0;
    TokenId, 4: TokenId::as_int32;
}
