//! Writes msgpack in the one form that Python's msgspec writes: shortest headers and integers,
//! float64 always.

use bytes::Bytes;

use super::error::EncodeError;
use super::reader::RAW_VIEW;
use crate::protocol::Profile;

/// Arrays below this size go into the first frame.
pub(crate) const INLINE_BELOW_BYTES: usize = 256;

/// How an integer lies in the first bytes of a big-endian word.
#[derive(Debug)]
pub(crate) struct IntForm {
    /// Bytes in all.
    pub(crate) len: usize,
    /// The first byte, in place.
    marker: u64,
    /// Where the value's lowest bit lies.
    pub(crate) shift: u32,
    /// The value's bits, once they are shifted down.
    pub(crate) mask: u64,
}

/// Forms of non-negative integers: one byte, then marker and 1, 2 or 4 bytes.
pub(crate) const INT_FORMS: [IntForm; 4] = [
    IntForm { len: 1, marker: 0, shift: 56, mask: 0x7f },
    IntForm { len: 2, marker: 0xcc << 56, shift: 48, mask: 0xff },
    IntForm { len: 3, marker: 0xcd << 56, shift: 40, mask: 0xffff },
    IntForm { len: 5, marker: 0xce << 56, shift: 24, mask: 0xffff_ffff },
];

/// The frames of a message being written.
#[derive(Debug)]
pub struct Writer {
    buffer: Vec<u8>,
    aux_frames: Vec<Bytes>,
    profile: Profile,
    problem: Option<EncodeError>,
}

impl Writer {
    pub(crate) fn new(profile: Profile) -> Self {
        Self { buffer: Vec::with_capacity(256), aux_frames: Vec::new(), profile, problem: None }
    }

    /// The wire profile of the message.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Makes room for bytes that are about to be written.
    pub(crate) fn reserve(&mut self, num_bytes: usize) {
        self.buffer.reserve(num_bytes);
    }

    /// The msgpack, and the raw array data.
    pub(crate) fn finish(self) -> Result<(Vec<u8>, Vec<Bytes>), EncodeError> {
        match self.problem {
            Some(problem) => Err(problem),
            None => Ok((self.buffer, self.aux_frames)),
        }
    }

    /// Remembers why the message cannot be written; the first reason counts.
    pub(crate) fn fail(&mut self, problem: EncodeError) {
        self.problem.get_or_insert(problem);
    }

    pub(crate) fn nil(&mut self) {
        self.buffer.push(0xc0);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.buffer.push(0xc2 + u8::from(value));
    }

    #[inline]
    pub(crate) fn u64(&mut self, value: u64) {
        if let Ok(value) = u32::try_from(value) {
            return self.u32(value);
        }
        self.tagged(0xcf, value.to_be_bytes());
    }

    #[inline]
    pub(crate) fn u32(&mut self, value: u32) {
        match (u8::try_from(value), u16::try_from(value)) {
            (Ok(value @ ..=0x7f), _) => self.buffer.push(value),
            (Ok(value), _) => self.tagged(0xcc, [value]),
            (_, Ok(value)) => self.tagged(0xcd, value.to_be_bytes()),
            _ => self.tagged(0xce, value.to_be_bytes()),
        }
    }

    /// Integers one after the other, without a branch on their sizes: token ids have none to
    /// predict.
    pub(crate) fn u32s(&mut self, values: impl ExactSizeIterator<Item = u32>) {
        let start = self.buffer.len();
        self.buffer.resize(start + values.len() * 5 + 8, 0);
        let mut at = start;
        for value in values {
            let form = &INT_FORMS[usize::from(value > 0x7f)
                + usize::from(value > 0xff)
                + usize::from(value > 0xffff)];
            let word = form.marker | u64::from(value) << form.shift;
            if let Some(place) = self.buffer.get_mut(at..at + 8) {
                place.copy_from_slice(&word.to_be_bytes());
            }
            at += form.len;
        }
        self.buffer.truncate(at);
    }

    pub(crate) fn i64(&mut self, value: i64) {
        if let Ok(value) = u64::try_from(value) {
            return self.u64(value);
        }
        match (i8::try_from(value), i16::try_from(value), i32::try_from(value)) {
            (Ok(value @ -32..), ..) => self.buffer.extend(value.to_be_bytes()),
            (Ok(value), ..) => self.tagged(0xd0, value.to_be_bytes()),
            (_, Ok(value), _) => self.tagged(0xd1, value.to_be_bytes()),
            (.., Ok(value)) => self.tagged(0xd2, value.to_be_bytes()),
            _ => self.tagged(0xd3, value.to_be_bytes()),
        }
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.tagged(0xcb, value.to_be_bytes());
    }

    #[inline]
    fn tagged<const N: usize>(&mut self, marker: u8, bytes: [u8; N]) {
        self.buffer.push(marker);
        self.buffer.extend_from_slice(&bytes);
    }

    #[inline]
    pub(crate) fn str(&mut self, value: &str) {
        match u8::try_from(value.len()) {
            Ok(len @ ..32) => self.buffer.push(0xa0 | len),
            _ => self.sized_header("string", value.len(), Some(0xd9), 0xda, 0xdb),
        }
        self.buffer.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn bin(&mut self, value: &[u8]) {
        self.sized_header("bytes", value.len(), Some(0xc4), 0xc5, 0xc6);
        self.buffer.extend_from_slice(value);
    }

    #[inline]
    pub(crate) fn array_len(&mut self, len: usize) {
        match u8::try_from(len) {
            Ok(len @ ..16) => self.buffer.push(0x90 | len),
            _ => self.sized_header("array", len, None, 0xdc, 0xdd),
        }
    }

    pub(crate) fn map_len(&mut self, len: usize) {
        match u8::try_from(len) {
            Ok(len @ ..16) => self.buffer.push(0x80 | len),
            _ => self.sized_header("map", len, None, 0xde, 0xdf),
        }
    }

    /// Opens a map whose header is filled in later, always of the 16-bit form.
    pub(crate) fn begin_map16(&mut self) -> usize {
        self.tagged(0xde, [0, 0]);
        self.buffer.len()
    }

    /// Fills in the header of a map that `begin_map16` opened.
    pub(crate) fn end_map16(&mut self, start: usize, len: u16) {
        if let Some(header) = self.buffer.get_mut(start - 2..start) {
            header.copy_from_slice(&len.to_be_bytes());
        }
    }

    fn sized_header(&mut self, what: &'static str, len: usize, m8: Option<u8>, m16: u8, m32: u8) {
        match (m8, u8::try_from(len), u16::try_from(len), u32::try_from(len)) {
            (Some(marker), Ok(len), ..) => self.tagged(marker, [len]),
            (_, _, Ok(len), _) => self.tagged(m16, len.to_be_bytes()),
            (.., Ok(len)) => self.tagged(m32, len.to_be_bytes()),
            _ => self.fail(EncodeError::TooLong { what, len }),
        }
    }

    /// Bytes that are msgpack already.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Raw array data as an extension.
    pub(crate) fn raw_view(&mut self, data: &[u8]) {
        match data.len() {
            len @ (1 | 2 | 4 | 8 | 16) => {
                let size_class = len.trailing_zeros().to_le_bytes();
                self.buffer.push(0xd4 + size_class.first().copied().unwrap_or(0));
            }
            len => self.sized_header("bytes", len, Some(0xc7), 0xc8, 0xc9),
        }
        self.buffer.extend(RAW_VIEW.to_be_bytes());
        self.buffer.extend_from_slice(data);
    }

    /// Raw array data as an auxiliary frame, of which the index is written.
    pub(crate) fn aux_frame(&mut self, data: Bytes) {
        self.aux_frames.push(data);
        self.u64(self.aux_frames.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_what_no_header_can_announce() {
        let len = 1 << 32;
        for (what, open) in
            [("array", Writer::array_len as fn(&mut _, _)), ("map", Writer::map_len)]
        {
            let mut writer = Writer::new(Profile::V0_32);
            open(&mut writer, len - 1);
            open(&mut writer, len);
            writer.nil();
            assert_eq!(writer.finish(), Err(EncodeError::TooLong { what, len }));
        }
    }
}
