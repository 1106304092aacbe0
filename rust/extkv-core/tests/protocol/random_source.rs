//! Messages of random fields, made by asking each message what it wants.

use bytes::Bytes;
use extkv_core::protocol::{
    ArraySource, DecodeResult, Profile, Source, TokenIds, Untyped, Visible, Wire, encode,
};

use crate::numbers::Numbers;

/// Values of whatever type a message asks for. One seed gives one message.
#[derive(Debug, Clone, Copy)]
struct RandomSource {
    seed: u64,
    depth: usize,
    /// Whether every field has a value.
    is_dense: bool,
}

/// What a source says that it is; it also gives values of any other type that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Nil,
    Text,
    Int,
    Float,
    Bytes,
    Map,
    List,
}

const DEEPEST: usize = 9;
/// Fields whose presence decides which of several messages it is.
const DECIDING: [&str; 3] = ["slices", "batch_size", "num_engines"];
/// A field that the latest profile does not have.
const PAST: &str = "tensorizer_config_dict";

impl RandomSource {
    fn numbers(&self, salt: &str) -> Numbers {
        let mut numbers = Numbers(self.seed);
        for byte in salt.bytes() {
            numbers.0 = numbers.next() ^ u64::from(byte);
        }
        numbers
    }

    fn kind(&self) -> Kind {
        let mut numbers = self.numbers("kind");
        if !self.is_dense && numbers.below(3) > 0 {
            return Kind::Nil;
        }
        let is_deep = self.depth >= DEEPEST;
        let kinds = [Kind::Text, Kind::Int, Kind::Float, Kind::Bytes, Kind::Map, Kind::List];
        numbers.choose(&kinds[..if is_deep { 5 } else { 6 }])
    }

    fn member(&self, index: usize) -> Self {
        let seed = self.numbers("member").next().wrapping_add(index as u64);
        Self { seed: Numbers(seed).next(), depth: self.depth + 1, ..*self }
    }

    fn count(&self) -> usize {
        let counts = if self.depth >= DEEPEST { &[0][..] } else { &[0, 1, 1, 2, 3, 17] };
        self.numbers("count").choose(counts)
    }
}

impl Source for RandomSource {
    fn is_nil(&self) -> bool {
        self.kind() == Kind::Nil
    }

    fn is_text(&self) -> bool {
        self.kind() == Kind::Text
    }

    fn is_int(&self) -> bool {
        self.kind() == Kind::Int
    }

    fn is_float(&self) -> bool {
        self.kind() == Kind::Float
    }

    fn is_bytes(&self) -> bool {
        self.kind() == Kind::Bytes
    }

    fn is_map(&self) -> bool {
        self.kind() == Kind::Map
    }

    fn is_list(&self) -> bool {
        self.kind() == Kind::List
    }

    fn type_name(&self) -> String {
        format!("{:?}", self.kind())
    }

    fn bool(&self) -> DecodeResult<bool> {
        Ok(self.numbers("bool").below(2) == 0)
    }

    fn int(&self) -> DecodeResult<i128> {
        let mut numbers = self.numbers("int");
        // Members of enumerations are small numbers.
        Ok(match numbers.below(40) {
            0 => i128::from(numbers.next().cast_signed()),
            1..15 => i128::from(numbers.next() >> 33) >> numbers.below(31),
            _ => i128::from(numbers.next() % 2 + 1),
        })
    }

    fn float(&self) -> DecodeResult<f64> {
        let mut numbers = self.numbers("float");
        Ok(numbers.choose(&[0.0, 1.0, -2.5, 0.7, 1e300, f64::INFINITY, f64::MIN_POSITIVE]))
    }

    fn text(&self) -> DecodeResult<String> {
        let mut numbers = self.numbers("text");
        let text = numbers.choose(&["a", "HELLO", "READY", "größer", "\u{1f980}", "x\0y"]);
        Ok(text.repeat(numbers.choose(&[1, 1, 1, 1, 40, 300])))
    }

    fn bytes(&self) -> DecodeResult<Vec<u8>> {
        Ok(vec![7; self.numbers("bytes").choose(&[0, 2, 300])])
    }

    fn tokens(&self) -> DecodeResult<TokenIds> {
        let mut numbers = self.numbers("tokens");
        let ids: Vec<u32> = (0..numbers.choose(&[0, 1, 20, 70_000]))
            .map(|_| u32::try_from(numbers.next() >> 32).unwrap() >> numbers.below(32))
            .collect();
        Ok(ids.into())
    }

    fn array(&self, is_torch: bool) -> DecodeResult<ArraySource> {
        let mut numbers = self.numbers("array");
        let (dtype, size) = match is_torch {
            true => numbers.choose(&[("float32", 4), ("bool", 1), ("bfloat16", 2), ("int64", 8)]),
            false => {
                numbers.choose(&[("<f4", 4), ("<i4", 4), ("|b1", 1), (">i2", 2), ("<c16", 16)])
            }
        };
        let shape =
            numbers.choose(&[&[][..], &[0], &[3], &[2, 5], &[100, 3], &[1, 0, 2], &[1, 2, 2]]);
        let count: u64 = shape.iter().product();
        let data = vec![9; usize::try_from(count).unwrap() * size];
        Ok((dtype.to_owned(), shape.to_vec(), data.into()))
    }

    fn untyped(&self) -> DecodeResult<Untyped> {
        let values: [&'static [u8]; 4] =
            [b"\x01", b"\x92\xcb\x40\x09\0\0\0\0\0\0\xc4\x01z", b"\x90", b"\xa1t"];
        let msgpack =
            if self.is_map() { b"\x81\xa1a\xc0" } else { self.numbers("untyped").choose(&values) };
        Untyped::from_msgpack(Bytes::from_static(msgpack))
    }

    fn items(&self) -> DecodeResult<Vec<Self>> {
        Ok((0..self.count()).map(|index| self.member(index)).collect())
    }

    fn entries(&self) -> DecodeResult<Vec<(Self, Self)>> {
        Ok((0..self.count()).map(|i| (self.member(2 * i), self.member(2 * i + 1))).collect())
    }

    fn field(&self, name: &'static str) -> DecodeResult<Option<Self>> {
        let mut numbers = self.numbers(name);
        let is_absent = name == PAST || (DECIDING.contains(&name) && numbers.below(2) == 0);
        let field = Self { seed: numbers.next(), depth: self.depth + 1, ..*self };
        Ok((!is_absent).then_some(field))
    }

    fn native<T: Clone + 'static>(&self) -> Option<T> {
        None
    }
}

/// A message of random fields. Values that break a rule of a message, or that lack what must be
/// written, are drawn again.
pub(crate) fn random<T: Wire + Visible>(numbers: &mut Numbers) -> T {
    let drawn = (0..10_000).find_map(|_| {
        let is_dense = numbers.below(4) == 0;
        let source = RandomSource { seed: numbers.next(), depth: 0, is_dense };
        T::from_source(&source).ok().filter(|message| encode(message, Profile::V0_33).is_ok())
    });
    drawn.unwrap()
}
