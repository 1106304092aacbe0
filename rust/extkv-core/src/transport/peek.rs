//! The first field of a message that cannot be read, so that the right one can be answered.

use bytes::Bytes;

use crate::protocol::{Profile, Reader};

/// Request id of a request that may be malformed after it.
pub(crate) fn request_id(frames: &[Bytes]) -> Option<String> {
    let mut reader = Reader::new(frames, Profile::default()).ok()?;
    let mut elements = reader.elements("a request").ok()?;
    elements.take().then(|| reader.str().ok().map(str::to_owned)).flatten()
}

/// Client index and call id of a call that may be malformed after them.
pub(crate) fn call_id(frames: &[Bytes]) -> Option<i128> {
    let mut reader = Reader::new(frames, Profile::default()).ok()?;
    let mut elements = reader.elements("a call").ok()?;
    (elements.take() && reader.int().is_ok() && elements.take())
        .then(|| reader.int().ok())
        .flatten()
}

/// Engine index of a batch of outputs that may be malformed after it.
pub(crate) fn engine_index(frames: &[Bytes]) -> Option<usize> {
    let mut reader = Reader::new(frames, Profile::default()).ok()?;
    let mut elements = reader.elements("outputs").ok()?;
    if !elements.take() {
        return None;
    }
    reader.int().ok().and_then(|index| usize::try_from(index).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(bytes: &'static [u8]) -> Vec<Bytes> {
        vec![Bytes::from_static(bytes)]
    }

    #[test]
    fn first_fields_are_found_before_garbage() {
        assert_eq!(request_id(&frames(b"\x92\xa2r1\xc1")).as_deref(), Some("r1"));
        assert_eq!(call_id(&frames(b"\x93\x00\x07\xc1")), Some(7));
        assert_eq!(engine_index(&frames(b"\x92\x03\xc1")), Some(3));
    }

    #[test]
    fn nothing_is_found_in_garbage() {
        for bytes in [&b""[..], b"\xc1", b"\x90", b"\x91\xc0", b"\x91\xff", b"\x80", b"\x92\x00"] {
            let frames = vec![Bytes::from_static(bytes)];
            assert_eq!(request_id(&frames), None);
            assert_eq!(call_id(&frames), None);
        }
        assert_eq!(engine_index(&frames(b"\x91\xff")), None);
        assert_eq!(engine_index(&[]), None);
    }
}
