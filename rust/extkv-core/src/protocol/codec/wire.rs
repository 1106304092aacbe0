//! The trait of everything that has a form on the wire, and the two calls that use it.

use bytes::Bytes;

use super::error::{DecodeResult, EncodeError};
use super::reader::Reader;
use super::report::Decoded;
use super::writer::Writer;
use crate::protocol::Profile;

/// A value with a form on the wire.
pub trait Wire: Sized {
    /// Reads one value.
    ///
    /// # Errors
    ///
    /// [`super::DecodeError`] with the path to the field.
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self>;

    /// Writes the value. What cannot be written is reported when the message ends.
    fn write(&self, writer: &mut Writer);
}

/// Decodes a message from its frames: msgpack first, then raw array data.
///
/// Arrays of the message refer to `frames`; nothing of them is copied.
///
/// # Errors
///
/// [`super::DecodeError`] if the frames are no such message; its path names the field.
///
/// # Examples
///
/// ```
/// use extkv_core::protocol::{AbortRequests, Profile, decode, encode};
///
/// let abort = AbortRequests { request_ids: vec!["req-0".to_owned()] };
/// let frames = encode(&abort, Profile::V0_32)?;
/// assert_eq!(&frames[0][..], b"\x91\xa5req-0");
/// assert_eq!(decode::<AbortRequests>(&frames, Profile::V0_32)?.message, abort);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn decode<T: Wire>(frames: &[Bytes], profile: Profile) -> DecodeResult<Decoded<T>> {
    let mut reader = Reader::new(frames, profile)?;
    let message = T::read(&mut reader)?;
    Ok(Decoded { message, skipped: reader.finish()? })
}

/// Encodes a message in the bytes that Python's msgspec writes.
///
/// Fields that the profile does not have are left out. Arrays of 256 bytes and more become frames
/// of their own, without a copy.
///
/// # Errors
///
/// [`EncodeError`] if a part is too long for msgpack or a field has no value that the profile
/// requires.
pub fn encode<T: Wire>(message: &T, profile: Profile) -> Result<Vec<Bytes>, EncodeError> {
    let (first, aux_frames) = encode_parts(message, profile)?;
    let mut frames = Vec::with_capacity(1 + aux_frames.len());
    frames.push(first.into());
    frames.extend(aux_frames);
    Ok(frames)
}

/// Encodes as [`encode`] does, for a caller that copies the first frame elsewhere.
///
/// # Errors
///
/// As [`encode`].
pub fn encode_parts<T: Wire>(
    message: &T,
    profile: Profile,
) -> Result<(Vec<u8>, Vec<Bytes>), EncodeError> {
    let mut writer = Writer::new(profile);
    message.write(&mut writer);
    writer.finish()
}
