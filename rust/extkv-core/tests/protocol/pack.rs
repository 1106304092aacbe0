//! Hand-made messages: msgpack of trees, and messages with one part replaced.

use bytes::Bytes;
use extkv_core::protocol::{DecodeError, DecodeProblem, Decoded, Profile, Wire, decode};
use rmpv::Value;

/// The msgpack of a tree.
pub(crate) fn pack(value: &Value) -> Bytes {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes.into()
}

/// A list.
pub(crate) fn list<const N: usize>(items: [Value; N]) -> Value {
    Value::Array(items.to_vec())
}

/// A map with text keys.
pub(crate) fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

/// An output of `len` elements: the two required ones, then nil. The field `index` is `value`.
pub(crate) fn output(len: usize, index: usize, value: Value) -> Value {
    let mut elements = vec![Value::Nil; len];
    for (at, element) in [(0, "req".into()), (1, list([7.into()])), (index, value)] {
        if at < len {
            elements[at] = element;
        }
    }
    let num_nans_at = if len == 13 { 12 } else { 13 };
    if index != num_nans_at && num_nans_at < len {
        elements[num_nans_at] = 0.into();
    }
    Value::Array(elements)
}

/// A batch of one output.
pub(crate) fn batch(output: Value) -> Value {
    let (nil, zero) = (Value::Nil, Value::from(0));
    let outputs = list([output]);
    list([
        zero,
        outputs,
        nil.clone(),
        1.5.into(),
        nil.clone(),
        nil.clone(),
        nil.clone(),
        nil.clone(),
        nil,
    ])
}

/// A batch of one output of 0.32 in which a field is `value`.
pub(crate) fn batch_with(index: usize, value: Value) -> Value {
    batch(output(18, index, value))
}

/// A request of 22 elements in which a field is `value`.
pub(crate) fn request_with(index: usize, value: Value) -> Value {
    let mut elements = vec![Value::Nil; 22];
    for (at, element) in [
        (0, "req".into()),
        (5, 1.5.into()),
        (11, 0.into()),
        (12, 0.into()),
        (13, 0.into()),
        (15, false.into()),
        (19, false.into()),
        (index, value),
    ] {
        elements[at] = element;
    }
    Value::Array(elements)
}

/// A request with these sampling parameters.
pub(crate) fn request_sampling<const N: usize>(entries: [(&str, Value); N]) -> Value {
    request_with(3, map(entries))
}

/// Decodes a tree under the profile of 0.32.
pub(crate) fn read<T: Wire>(value: &Value) -> Result<Decoded<T>, DecodeError> {
    read_frames(&[pack(value)])
}

/// Decodes frames under the profile of 0.32.
pub(crate) fn read_frames<T: Wire>(frames: &[Bytes]) -> Result<Decoded<T>, DecodeError> {
    decode(frames, Profile::V0_32)
}

/// Checks where and why a tree is refused.
pub(crate) fn assert_refused<T: Wire + std::fmt::Debug>(
    value: &Value,
    path: &str,
    problem: &DecodeProblem,
) {
    let error = read::<T>(value).unwrap_err();
    assert_eq!((error.path().as_str(), error.problem()), (path, problem), "{error}");
}
