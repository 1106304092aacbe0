//! One array of all log-probabilities of a batch.

use bytes::Bytes;
use thiserror::Error as ThisError;

use crate::protocol::tensor::{ArraySpan, NumpyArray, NumpyDtype, Shape, WireDtype};

/// Arrays that cannot be stacked.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum StackError {
    /// Two arrays differ in more than their first dimension.
    #[error(
        "the log-probabilities of output {index} are {dtype} of shape {shape:?}, those before are \
         {first_dtype} of shape {first_shape:?}: read them one by one"
    )]
    Differ {
        /// The output whose array differs.
        index: u32,
        /// Its element type.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
        /// Element type of the first array.
        first_dtype: &'static str,
        /// Shape of the first array.
        first_shape: Vec<u64>,
    },
}

/// Copies arrays into one, row after row.
pub(super) fn stack_spans<'a>(
    spans: impl Iterator<Item = (u32, &'a ArraySpan<NumpyDtype>)>,
    frames: &[Bytes],
) -> Result<NumpyArray, StackError> {
    let mut first: Option<&ArraySpan<NumpyDtype>> = None;
    let mut num_rows = 0_u64;
    let mut data = Vec::new();
    for (index, span) in spans {
        let head = *first.get_or_insert(span);
        let is_alike = head.dtype == span.dtype && head.shape.get(1..) == span.shape.get(1..);
        let (true, Some(rows)) = (is_alike, span.shape.first()) else {
            return Err(StackError::Differ {
                index,
                dtype: span.dtype.name(),
                shape: span.shape.to_vec(),
                first_dtype: head.dtype.name(),
                first_shape: head.shape.to_vec(),
            });
        };
        num_rows += rows;
        let bytes = frames.get(span.frame).and_then(|frame| frame.get(span.start..span.end));
        data.extend_from_slice(bytes.unwrap_or_default());
    }
    let (dtype, mut shape) = match first {
        Some(head) => (head.dtype, head.shape.clone()),
        None => (NumpyDtype::default(), Shape::from_slice(&[0, 0])),
    };
    if let Some(rows) = shape.first_mut() {
        *rows = num_rows;
    }
    Ok(NumpyArray::new(dtype, shape, data.into()).unwrap_or_default())
}
