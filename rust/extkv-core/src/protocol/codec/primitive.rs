//! The wire form of plain values: numbers, text, lists, sets and maps.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use super::error::DecodeResult;
use super::reader::Reader;
use super::wire::Wire;
use super::writer::Writer;

impl Wire for bool {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.bool()
    }

    fn write(&self, writer: &mut Writer) {
        writer.bool(*self);
    }
}

impl Wire for u32 {
    #[inline]
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.u32()
    }

    #[inline]
    fn write(&self, writer: &mut Writer) {
        writer.u32(*self);
    }
}

impl Wire for u64 {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.int_as("an int in [0, 2**64)")
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(*self);
    }
}

impl Wire for i64 {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.int_as("an int in [-2**63, 2**63)")
    }

    fn write(&self, writer: &mut Writer) {
        writer.i64(*self);
    }
}

impl Wire for f64 {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.float()
    }

    fn write(&self, writer: &mut Writer) {
        writer.float(*self);
    }
}

impl Wire for String {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.str().map(str::to_owned)
    }

    fn write(&self, writer: &mut Writer) {
        writer.str(self);
    }
}

impl<T: Wire> Wire for Option<T> {
    #[inline]
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.take_nil() { Ok(None) } else { T::read(reader).map(Some) }
    }

    #[inline]
    fn write(&self, writer: &mut Writer) {
        match self {
            Some(value) => value.write(writer),
            None => writer.nil(),
        }
    }
}

impl<T: Wire> Wire for Box<T> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        T::read(reader).map(Self::new)
    }

    fn write(&self, writer: &mut Writer) {
        T::write(self, writer);
    }
}

/// Reads the members of an array one by one.
pub(crate) fn read_items<T>(
    reader: &mut Reader<'_>,
    read: impl Fn(&mut Reader<'_>) -> DecodeResult<T>,
) -> DecodeResult<Vec<T>> {
    let len = reader.array_len("an array")?;
    let mut items = Vec::with_capacity(len.min(reader.left() / size_of::<T>().max(1) + 1));
    for index in 0..len {
        items.push(read(reader).map_err(|error| error.at_index(index))?);
    }
    Ok(items)
}

impl<T: Wire> Wire for Vec<T> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        read_items(reader, T::read)
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(self.len());
        self.iter().for_each(|item| item.write(writer));
    }
}

/// A list that a peer may leave nil: then it is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NullableList<T>(pub Vec<T>);

impl<T> Default for NullableList<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Wire> Wire for NullableList<T> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        Option::read(reader).map(|items| Self(items.unwrap_or_default()))
    }

    fn write(&self, writer: &mut Writer) {
        self.0.write(writer);
    }
}

impl<T: Wire + Ord> Wire for BTreeSet<T> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        read_items(reader, T::read).map(Self::from_iter)
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(self.len());
        self.iter().for_each(|item| item.write(writer));
    }
}

/// Token ids of a prompt, shared by clones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenIds(Arc<[u32]>);

impl Deref for TokenIds {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

impl From<Vec<u32>> for TokenIds {
    fn from(ids: Vec<u32>) -> Self {
        Self(ids.into())
    }
}

impl FromIterator<u32> for TokenIds {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        Self(ids.into_iter().collect())
    }
}

impl Wire for TokenIds {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let len = reader.array_len("an array of token ids")?;
        let mut ids = Vec::with_capacity(len);
        reader.u32s(len, |id| ids.push(id))?;
        Ok(ids.into())
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(self.len());
        writer.u32s(self.iter().copied());
    }
}

/// A map that keeps the order of the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map<K, V>(pub Vec<(K, V)>);

impl<K, V> Default for Map<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq, V> Map<K, V> {
    /// The value of a key; the last one, if the key came twice.
    #[must_use]
    pub fn get<Q: ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: PartialEq<Q>,
    {
        self.0.iter().rev().find(|(found, _)| found == key).map(|(_, value)| value)
    }
}

impl<K, V> FromIterator<(K, V)> for Map<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl<K: Wire + ToString, V: Wire> Wire for Map<K, V> {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let len = reader.map_len("a map")?;
        let mut entries = Vec::with_capacity(len.min(reader.left() / size_of::<(K, V)>() + 1));
        for index in 0..len {
            let key = K::read(reader).map_err(|error| error.at_index(index))?;
            let value = V::read(reader).map_err(|error| error.at_key(&key.to_string()))?;
            entries.push((key, value));
        }
        Ok(Self(entries))
    }

    fn write(&self, writer: &mut Writer) {
        writer.map_len(self.0.len());
        for (key, value) in &self.0 {
            key.write(writer);
            value.write(writer);
        }
    }
}
