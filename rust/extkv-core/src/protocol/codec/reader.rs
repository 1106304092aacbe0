//! Reads msgpack from the first frame of a message: tolerant, and never past the input.
//!
//! Nothing is allocated on the word of a header: a header that announces more than the bytes left
//! is refused first.

mod markers;
mod skip;

use bytes::Bytes;

use super::error::{DecodeProblem, DecodeResult};
use super::report::Skipped;
use super::writer::INT_FORMS;
use crate::protocol::Profile;

use markers::is_ext;
pub(crate) use skip::{RAW_VIEW, check_extension};

/// A cursor over the first frame of a message.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    frames: &'a [Bytes],
    profile: Profile,
    depth: usize,
    /// What was passed over.
    pub(crate) skipped: Skipped,
}

/// Index into [`INT_FORMS`] by first byte; past its end for anything else.
const FORM_OF: [u8; 256] = {
    let mut forms = [u8::MAX; 256];
    let mut marker = 0;
    while marker < 0x80 {
        forms[marker] = 0;
        marker += 1;
    }
    forms[0xcc] = 1;
    forms[0xcd] = 2;
    forms[0xce] = 3;
    forms
};

/// A place in the input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    at: usize,
    skipped: Skipped,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(frames: &'a [Bytes], profile: Profile) -> DecodeResult<Self> {
        let bytes = frames.first().ok_or(DecodeProblem::NoFrames)?;
        Ok(Self { bytes, at: 0, frames, profile, depth: 0, skipped: Skipped::default() })
    }

    /// A cursor that begins within the first frame.
    pub(crate) fn at(frames: &'a [Bytes], profile: Profile, at: usize) -> DecodeResult<Self> {
        Ok(Self { at, ..Self::new(frames, profile)? })
    }

    /// A place to come back to.
    pub(crate) fn mark(&self) -> Mark {
        Mark { at: self.at, skipped: self.skipped }
    }

    /// Goes back, as if nothing had been read since.
    pub(crate) fn rewind(&mut self, mark: Mark) {
        self.at = mark.at;
        self.skipped = mark.skipped;
    }

    /// The next bytes, if there are that many.
    pub(crate) fn peek_bytes(&self, len: usize) -> Option<&'a [u8]> {
        self.bytes.get(self.at..)?.get(..len)
    }

    /// Passes over bytes that were peeked at.
    pub(crate) fn advance(&mut self, len: usize) {
        self.at += len;
    }

    /// The wire profile of the message.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Position in the first frame.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// The bytes of the first frame between two positions.
    pub(crate) fn slice(&self, start: usize, end: usize) -> Bytes {
        self.frames.first().map(|frame| frame.slice(start..end)).unwrap_or_default()
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    /// The auxiliary frame of this index, counted from 1.
    pub(crate) fn aux_frame(&self, index: i128) -> DecodeResult<&'a Bytes> {
        let last = self.frames.len().saturating_sub(1);
        usize::try_from(index)
            .ok()
            .filter(|index| *index > 0)
            .and_then(|index| self.frames.get(index))
            .ok_or_else(|| DecodeProblem::NoSuchFrame { index, last }.into())
    }

    /// Ends the message.
    pub(crate) fn finish(self) -> DecodeResult<Skipped> {
        match self.left() {
            0 => Ok(self.skipped),
            len => Err(DecodeProblem::TrailingBytes { len }.into()),
        }
    }

    pub(crate) fn peek(&self) -> DecodeResult<u8> {
        match self.bytes.get(self.at) {
            Some(marker) => Ok(*marker),
            None => Err(DecodeProblem::Truncated { missing: 1 }.into()),
        }
    }

    fn byte(&mut self) -> DecodeResult<u8> {
        let marker = self.peek()?;
        self.at += 1;
        Ok(marker)
    }

    fn take(&mut self, len: usize) -> DecodeResult<&'a [u8]> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match rest.get(..len) {
            Some(taken) => {
                self.at += len;
                Ok(taken)
            }
            None => Err(DecodeProblem::Truncated { missing: (len - rest.len()) as u64 }.into()),
        }
    }

    fn array_of<const N: usize>(&mut self) -> DecodeResult<[u8; N]> {
        match self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<N>()) {
            Some(taken) => {
                self.at += N;
                Ok(*taken)
            }
            None => Err(DecodeProblem::Truncated { missing: (N - self.left()) as u64 }.into()),
        }
    }

    /// Takes a nil, if one is next.
    #[inline]
    pub(crate) fn take_nil(&mut self) -> bool {
        let is_nil = self.bytes.get(self.at) == Some(&0xc0);
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(crate) fn bool(&mut self) -> DecodeResult<bool> {
        match self.peek()? {
            0xc2 => {
                self.at += 1;
                Ok(false)
            }
            0xc3 => {
                self.at += 1;
                Ok(true)
            }
            _ => Err(self.unexpected("a bool")),
        }
    }

    /// The frames of the message.
    pub(crate) fn frames(&self) -> &'a [Bytes] {
        self.frames
    }

    pub(crate) fn int(&mut self) -> DecodeResult<i128> {
        let marker = self.peek()?;
        if !self.is_int() {
            return Err(self.unexpected("an int"));
        }
        self.at += 1;
        Ok(match marker {
            0x00..=0x7f => i128::from(marker),
            0xcc => i128::from(self.byte()?),
            0xcd => i128::from(u16::from_be_bytes(self.array_of()?)),
            0xce => i128::from(u32::from_be_bytes(self.array_of()?)),
            0xcf => i128::from(u64::from_be_bytes(self.array_of()?)),
            0xd0 => i128::from(i8::from_be_bytes(self.array_of()?)),
            0xd1 => i128::from(i16::from_be_bytes(self.array_of()?)),
            0xd2 => i128::from(i32::from_be_bytes(self.array_of()?)),
            0xd3 => i128::from(i64::from_be_bytes(self.array_of()?)),
            _ => i128::from(i8::from_be_bytes([marker])),
        })
    }

    /// An integer of a narrower type, which `expected` describes.
    pub(crate) fn int_as<T: TryFrom<i128>>(&mut self, expected: &'static str) -> DecodeResult<T> {
        let found = self.int()?;
        T::try_from(found).map_err(|_| DecodeProblem::OutOfRange { expected, found }.into())
    }

    /// A token id.
    #[inline]
    pub(crate) fn u32(&mut self) -> DecodeResult<u32> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        match rest {
            [marker @ ..=0x7f, ..] => {
                self.at += 1;
                Ok(u32::from(*marker))
            }
            [0xcd, high, low, ..] => {
                self.at += 3;
                Ok(u32::from(u16::from_be_bytes([*high, *low])))
            }
            [0xce, a, b, c, d, ..] => {
                self.at += 5;
                Ok(u32::from_be_bytes([*a, *b, *c, *d]))
            }
            _ => self.int_as("an int in [0, 2**32)"),
        }
    }

    /// Token ids one after the other, without a branch on their sizes.
    pub(crate) fn u32s(&mut self, len: usize, mut store: impl FnMut(u32)) -> DecodeResult<()> {
        for index in 0..len {
            let word = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<8>());
            let form =
                word.and_then(|word| INT_FORMS.get(usize::from(FORM_OF[usize::from(word[0])])));
            let id = match (word, form) {
                (Some(word), Some(form)) => {
                    self.at += form.len;
                    let value = (u64::from_be_bytes(*word) >> form.shift) & form.mask;
                    u32::try_from(value).unwrap_or(u32::MAX)
                }
                _ => self.u32().map_err(|error| error.at_index(index))?,
            };
            store(id);
        }
        Ok(())
    }

    pub(crate) fn float(&mut self) -> DecodeResult<f64> {
        match self.peek()? {
            0xcb => {
                self.at += 1;
                Ok(f64::from_be_bytes(self.array_of()?))
            }
            0xca => {
                self.at += 1;
                Ok(f64::from(f32::from_be_bytes(self.array_of()?)))
            }
            _ if self.is_int() => Ok(self.int()? as f64),
            _ => Err(self.unexpected("a float")),
        }
    }

    #[inline]
    pub(crate) fn str(&mut self) -> DecodeResult<&'a str> {
        let marker = self.peek()?;
        let len = match marker {
            0xa0..=0xbf => {
                self.at += 1;
                usize::from(marker & 0x1f)
            }
            0xd9..=0xdb => {
                self.at += 1;
                self.length(marker - 0xd9)?
            }
            _ => return Err(self.unexpected("a str")),
        };
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| DecodeProblem::InvalidUtf8.into())
    }

    /// The bytes of a bin, as a range of the first frame.
    pub(crate) fn bin(&mut self) -> DecodeResult<&'a [u8]> {
        let marker = self.peek()?;
        if !(0xc4..=0xc6).contains(&marker) {
            return Err(self.unexpected("bytes"));
        }
        self.at += 1;
        let len = self.length(marker - 0xc4)?;
        self.take(len)
    }

    /// A length of 1, 2 or 4 bytes, for size classes 0, 1 and 2.
    fn length(&mut self, size_class: u8) -> DecodeResult<usize> {
        Ok(match size_class {
            0 => usize::from(self.byte()?),
            1 => usize::from(u16::from_be_bytes(self.array_of()?)),
            _ => u32::from_be_bytes(self.array_of()?) as usize,
        })
    }

    /// Opens an array of at most as many elements as bytes are left.
    #[inline]
    pub(crate) fn array_len(&mut self, expected: &'static str) -> DecodeResult<usize> {
        let marker = self.peek()?;
        let len = match marker {
            0x90..=0x9f => {
                self.at += 1;
                usize::from(marker & 0x0f)
            }
            0xdc | 0xdd => {
                self.at += 1;
                self.length(marker - 0xdc + 1)?
            }
            _ => return Err(self.unexpected(expected)),
        };
        self.fits("array", len, 1)
    }

    /// Opens a map of at most half as many entries as bytes are left.
    pub(crate) fn map_len(&mut self, expected: &'static str) -> DecodeResult<usize> {
        let marker = self.peek()?;
        let len = match marker {
            0x80..=0x8f => {
                self.at += 1;
                usize::from(marker & 0x0f)
            }
            0xde | 0xdf => {
                self.at += 1;
                self.length(marker - 0xde + 1)?
            }
            _ => return Err(self.unexpected(expected)),
        };
        self.fits("map", len, 2)
    }

    fn fits(&self, what: &'static str, len: usize, bytes_each: usize) -> DecodeResult<usize> {
        let left = self.left();
        if len > left / bytes_each {
            return Err(DecodeProblem::TooLong { what, len: len as u64, left: left as u64 }.into());
        }
        Ok(len)
    }

    /// The type and the range of an extension's data.
    pub(crate) fn ext(&mut self) -> DecodeResult<(i8, usize, usize)> {
        let marker = self.peek()?;
        if !is_ext(marker) {
            return Err(self.unexpected("an extension"));
        }
        self.at += 1;
        let len = match marker {
            0xd4..=0xd8 => 1_usize << (marker - 0xd4),
            _ => self.length(marker - 0xc7)?,
        };
        let code = i8::from_be_bytes(self.array_of()?);
        let start = self.at;
        self.take(len)?;
        Ok((code, start, self.at))
    }

    /// Takes an integer of one byte, if one is next.
    #[inline]
    pub(crate) fn take_fixint(&mut self) -> Option<u8> {
        let value = *self.bytes.get(self.at).filter(|byte| **byte < 0x80)?;
        self.at += 1;
        Some(value)
    }

    /// Takes raw array data of up to 255 bytes, if it is next and whole; returns its range.
    #[inline]
    pub(crate) fn take_short_raw_view(&mut self) -> Option<(usize, usize)> {
        let [0xc7, len, 3] = *self.peek_bytes(3)? else { return None };
        let start = self.at + 3;
        let end = start + usize::from(len);
        if end > self.bytes.len() {
            return None;
        }
        self.at = end;
        Some((start, end))
    }
}
