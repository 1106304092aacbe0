//! Messages as data: what a debugger prints and a binding makes objects of, and the way back.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::error::{DecodeProblem, DecodeResult};
use super::primitive::{Map, NullableList, TokenIds};
use super::untyped::Untyped;

/// A value of a message, borrowed.
#[derive(Debug)]
pub enum Part<'a> {
    /// No value.
    Nil,
    /// A truth value.
    Bool(bool),
    /// A number in [-2^63, 2^64).
    Int(i128),
    /// A number.
    Float(f64),
    /// A text.
    Text(&'a str),
    /// Raw bytes.
    Bytes(&'a [u8]),
    /// Token ids.
    Tokens(&'a TokenIds),
    /// A member of an enumeration.
    Member {
        /// The enumeration.
        enumeration: &'static str,
        /// The member's number on the wire.
        number: u8,
    },
    /// A numpy array.
    Numpy(ArrayPart<'a>),
    /// A torch tensor.
    Torch(ArrayPart<'a>),
    /// A value without a declared type.
    Untyped(&'a Untyped),
    /// Values in order.
    List(Vec<Self>),
    /// Values without an order.
    Set(Vec<Self>),
    /// Keys and values in the order of the wire.
    Map(Vec<(Self, Self)>),
    /// A message within the message.
    Record(&'a dyn Record),
}

impl Part<'_> {
    /// What the value takes in memory beyond its own record, near enough for a limit.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        let of_all =
            |parts: &[Self]| parts.iter().map(|part| MEMBER_BYTES + part.num_bytes()).sum();
        match self {
            Self::Nil | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Member { .. } => 0,
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Tokens(ids) => ids.len() * size_of::<u32>(),
            Self::Numpy(array) | Self::Torch(array) => array.data.len(),
            Self::Untyped(value) => value.msgpack().len(),
            Self::List(members) | Self::Set(members) => of_all(members),
            Self::Map(entries) => {
                let of_entry = |(key, value): &(Self, Self)| key.num_bytes() + value.num_bytes();
                entries.iter().map(|entry| 2 * MEMBER_BYTES + of_entry(entry)).sum()
            }
            Self::Record(record) => {
                let fields = record.parts();
                fields.iter().map(|(_, part)| MEMBER_BYTES + part.num_bytes()).sum()
            }
        }
    }
}

/// The record of a text or a list in another value.
const MEMBER_BYTES: usize = size_of::<String>();

/// An array of a message.
#[derive(Debug)]
pub struct ArrayPart<'a> {
    /// Its element type, as numpy or torch spells it.
    pub dtype: &'static str,
    /// Its length in each dimension.
    pub shape: &'a [u64],
    /// Its bytes in C order.
    pub data: &'a Bytes,
}

/// A message, or a part of one that has fields.
pub trait Record: std::fmt::Debug {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Its fields by name, in the order of the wire.
    fn parts(&self) -> Vec<(&'static str, Part<'_>)>;
}

/// Parts of an array that a [`Source`] holds: element type, shape, bytes in C order.
pub type ArraySource = (String, Vec<u64>, Bytes);

/// A foreign value that a message can be made of.
pub trait Source: Sized {
    /// Whether it is no value.
    fn is_nil(&self) -> bool;

    /// Whether it is a text.
    fn is_text(&self) -> bool;

    /// Whether it is an integer, and not a truth value.
    fn is_int(&self) -> bool;

    /// Whether it is a float.
    fn is_float(&self) -> bool;

    /// Whether it is raw bytes.
    fn is_bytes(&self) -> bool;

    /// Whether it is a map.
    fn is_map(&self) -> bool;

    /// Whether it is a list or another sequence of values.
    fn is_list(&self) -> bool;

    /// Name of its type, for errors.
    fn type_name(&self) -> String;

    /// A truth value.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::NotA`] if it is none; so for all that follow.
    fn bool(&self) -> DecodeResult<bool>;

    /// An integer; members of integer enumerations too.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn int(&self) -> DecodeResult<i128>;

    /// A float or an integer.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn float(&self) -> DecodeResult<f64>;

    /// A text.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn text(&self) -> DecodeResult<String>;

    /// Raw bytes.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn bytes(&self) -> DecodeResult<Vec<u8>>;

    /// Token ids, of a list or an array.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn tokens(&self) -> DecodeResult<TokenIds>;

    /// An array, its element type spelt as numpy does or as torch does.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn array(&self, is_torch: bool) -> DecodeResult<ArraySource>;

    /// A value of any type.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn untyped(&self) -> DecodeResult<Untyped>;

    /// The members of a list or set.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn items(&self) -> DecodeResult<Vec<Self>>;

    /// The entries of a map.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn entries(&self) -> DecodeResult<Vec<(Self, Self)>>;

    /// A field by name; `None` if it has none of that name.
    ///
    /// # Errors
    ///
    /// As [`Self::bool`].
    fn field(&self, name: &'static str) -> DecodeResult<Option<Self>>;

    /// The value itself, if the source wraps one of this type.
    fn native<T: Clone + 'static>(&self) -> Option<T>;

    /// The error that this is no `expected`.
    fn is_not(&self, expected: &'static str) -> super::DecodeError {
        DecodeProblem::NotA { expected, found: self.type_name() }.into()
    }
}

/// A value that is part of a message.
pub trait Visible: Sized {
    /// The value as data.
    fn part(&self) -> Part<'_>;

    /// The value that a source describes.
    ///
    /// # Errors
    ///
    /// [`super::DecodeError`] with the path to the field that does not fit.
    fn from_source<S: Source>(source: &S) -> DecodeResult<Self>;
}

/// An integer in the range that `expected` describes.
fn int_from<T: TryFrom<i128>>(source: &impl Source, expected: &'static str) -> DecodeResult<T> {
    let found = source.int()?;
    T::try_from(found).map_err(|_| DecodeProblem::OutOfRange { expected, found }.into())
}

macro_rules! visible_ints {
    ($($type:ty => $expected:literal),*) => {$(
        impl Visible for $type {
            fn part(&self) -> Part<'_> {
                Part::Int(i128::from(*self))
            }

            fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
                int_from(source, $expected)
            }
        }
    )*};
}

visible_ints! {
    u32 => "an int in [0, 2**32)",
    u64 => "an int in [0, 2**64)",
    i64 => "an int in [-2**63, 2**63)"
}

impl Visible for bool {
    fn part(&self) -> Part<'_> {
        Part::Bool(*self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.bool()
    }
}

impl Visible for f64 {
    fn part(&self) -> Part<'_> {
        Part::Float(*self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.float()
    }
}

impl Visible for String {
    fn part(&self) -> Part<'_> {
        Part::Text(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.text()
    }
}

impl Visible for TokenIds {
    fn part(&self) -> Part<'_> {
        Part::Tokens(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.tokens()
    }
}

impl Visible for Untyped {
    fn part(&self) -> Part<'_> {
        Part::Untyped(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.untyped()
    }
}

impl<T: Visible> Visible for Option<T> {
    fn part(&self) -> Part<'_> {
        self.as_ref().map_or(Part::Nil, T::part)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_nil() { Ok(None) } else { T::from_source(source).map(Some) }
    }
}

impl<T: Visible> Visible for Box<T> {
    fn part(&self) -> Part<'_> {
        T::part(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        T::from_source(source).map(Self::new)
    }
}

fn items_from<T: Visible, C: FromIterator<T>>(source: &impl Source) -> DecodeResult<C> {
    let items = source.items()?;
    let read = |(index, item)| T::from_source(item).map_err(|error| error.at_index(index));
    items.iter().enumerate().map(read).collect()
}

impl<T: Visible> Visible for Vec<T> {
    fn part(&self) -> Part<'_> {
        Part::List(self.iter().map(T::part).collect())
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        items_from(source)
    }
}

impl<T: Visible> Visible for NullableList<T> {
    fn part(&self) -> Part<'_> {
        self.0.part()
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        Option::from_source(source).map(|items| Self(items.unwrap_or_default()))
    }
}

impl<T: Visible + Ord> Visible for BTreeSet<T> {
    fn part(&self) -> Part<'_> {
        Part::Set(self.iter().map(T::part).collect())
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        items_from(source)
    }
}

impl<K: Visible + ToString, V: Visible> Visible for Map<K, V> {
    fn part(&self) -> Part<'_> {
        Part::Map(self.0.iter().map(|(key, value)| (key.part(), value.part())).collect())
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        let mut entries = Vec::new();
        for (index, (key, value)) in source.entries()?.iter().enumerate() {
            let key = K::from_source(key).map_err(|error| error.at_index(index))?;
            let value = V::from_source(value).map_err(|error| error.at_key(&key.to_string()))?;
            entries.push((key, value));
        }
        Ok(Self(entries))
    }
}
