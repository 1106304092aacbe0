//! Passes over values: unknown ones of any kind, and untyped ones after a check.

use super::{Reader, is_ext};
use crate::protocol::codec::error::{DecodeProblem, DecodeResult};

/// Levels of nesting that are followed.
const MAX_DEPTH: usize = 64;
/// Extension type of an array's raw bytes.
pub(crate) const RAW_VIEW: i8 = 3;

impl Reader<'_> {
    /// Passes over one value of any kind.
    pub(crate) fn skip(&mut self) -> DecodeResult<()> {
        self.pass(Trust::Anything)
    }

    /// Passes over one value that Python objects can be made of, and nothing else.
    pub(crate) fn check(&mut self) -> DecodeResult<()> {
        self.pass(Trust::PlainData)
    }

    fn pass(&mut self, trust: Trust) -> DecodeResult<()> {
        let marker = self.peek()?;
        match marker {
            0xc0 | 0xc2 | 0xc3 => self.at += 1,
            0xca | 0xcb => drop(self.float()?),
            0x80..=0x8f | 0xde | 0xdf => return self.nested(|reader| reader.pass_map(trust)),
            0x90..=0x9f | 0xdc | 0xdd => return self.nested(|reader| reader.pass_array(trust)),
            0xa0..=0xbf | 0xd9..=0xdb => drop(self.str()?),
            0xc4..=0xc6 => drop(self.bin()?),
            _ if is_ext(marker) => {
                let (code, ..) = self.ext()?;
                if trust == Trust::PlainData {
                    check_extension(code)?;
                }
            }
            0xc1 => return Err(self.unexpected("a value")),
            _ => drop(self.int()?),
        }
        Ok(())
    }

    fn pass_array(&mut self, trust: Trust) -> DecodeResult<()> {
        for index in 0..self.array_len("an array")? {
            self.pass(trust).map_err(|error| error.at_index(index))?;
        }
        Ok(())
    }

    fn pass_map(&mut self, trust: Trust) -> DecodeResult<()> {
        for index in 0..self.map_len("a map")? {
            if trust == Trust::PlainData && !self.is_plain_key() {
                return Err(self.unexpected("a str, a number, a bool, bytes or nil as key"));
            }
            self.pass(trust).map_err(|error| error.at_index(index))?;
            self.pass(trust).map_err(|error| error.at_index(index))?;
        }
        Ok(())
    }

    fn is_plain_key(&self) -> bool {
        self.is_int()
            || self.is_str()
            || matches!(self.bytes.get(self.at), Some(0xc0 | 0xc2..=0xc6 | 0xca | 0xcb))
    }

    /// Runs `read` one level deeper.
    pub(crate) fn nested<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> DecodeResult<T>,
    ) -> DecodeResult<T> {
        if self.depth >= MAX_DEPTH {
            return Err(DecodeProblem::TooDeep { limit: MAX_DEPTH }.into());
        }
        self.depth += 1;
        let result = read(self);
        self.depth -= 1;
        result
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    Anything,
    PlainData,
}

/// Refuses extension types other than raw array bytes.
pub(crate) fn check_extension(code: i8) -> DecodeResult<()> {
    match code {
        RAW_VIEW => Ok(()),
        1 | 2 => Err(DecodeProblem::Pickled { code }.into()),
        _ => Err(DecodeProblem::UnknownExtension { code }.into()),
    }
}
