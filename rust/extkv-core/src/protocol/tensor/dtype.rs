//! Element types of arrays on the wire, in numpy's and in torch's spelling.

use std::fmt;

/// How one library spells the element types of its arrays.
pub trait WireDtype: Copy + fmt::Debug + PartialEq + 'static {
    /// Whether this is torch's spelling.
    const IS_TORCH: bool;

    /// The type of this name, if arrays can have it.
    fn from_name(name: &str) -> Option<Self>;

    /// The type of a name that is still packed, for the types that come with every output.
    fn from_packed(packed: [u8; 4]) -> Option<Self> {
        let _ = packed;
        None
    }

    /// The type's name on the wire.
    fn name(self) -> &'static str;

    /// Bytes of one element.
    fn size_bytes(self) -> u64;
}

/// Element type of a numpy array, by `dtype.str`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NumpyDtype {
    name: &'static str,
    size_bytes: u64,
}

/// Element type of a torch tensor, by its name without `torch.`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TorchDtype {
    name: &'static str,
    size_bytes: u64,
}

const NUMPY_NAMES: [(&str, u64); 25] = [
    ("|b1", 1),
    ("|i1", 1),
    ("|u1", 1),
    ("<i2", 2),
    ("<i4", 4),
    ("<i8", 8),
    ("<u2", 2),
    ("<u4", 4),
    ("<u8", 8),
    ("<f2", 2),
    ("<f4", 4),
    ("<f8", 8),
    ("<c8", 8),
    ("<c16", 16),
    (">i2", 2),
    (">i4", 4),
    (">i8", 8),
    (">u2", 2),
    (">u4", 4),
    (">u8", 8),
    (">f2", 2),
    (">f4", 4),
    (">f8", 8),
    (">c8", 8),
    (">c16", 16),
];

const TORCH_NAMES: [(&str, u64); 21] = [
    ("bool", 1),
    ("uint8", 1),
    ("int8", 1),
    ("int16", 2),
    ("int32", 4),
    ("int64", 8),
    ("uint16", 2),
    ("uint32", 4),
    ("uint64", 8),
    ("float16", 2),
    ("bfloat16", 2),
    ("float32", 4),
    ("float64", 8),
    ("complex32", 4),
    ("complex64", 8),
    ("complex128", 16),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
];

impl NumpyDtype {
    /// 32-bit little-endian integers.
    pub const INT32: Self = Self { name: "<i4", size_bytes: 4 };
    /// 64-bit little-endian integers.
    pub const INT64: Self = Self { name: "<i8", size_bytes: 8 };
    /// 32-bit little-endian floats.
    pub const FLOAT32: Self = Self { name: "<f4", size_bytes: 4 };
}

impl Default for NumpyDtype {
    fn default() -> Self {
        Self::FLOAT32
    }
}

impl Default for TorchDtype {
    fn default() -> Self {
        Self { name: "float32", size_bytes: 4 }
    }
}

impl WireDtype for NumpyDtype {
    const IS_TORCH: bool = false;

    fn from_name(name: &str) -> Option<Self> {
        let mut known = NUMPY_NAMES.into_iter().filter(|(known, _)| *known == name);
        known.next().map(|(name, size_bytes)| Self { name, size_bytes })
    }

    fn from_packed(packed: [u8; 4]) -> Option<Self> {
        match &packed {
            b"\xa3<i4" => Some(Self::INT32),
            b"\xa3<f4" => Some(Self::FLOAT32),
            b"\xa3<i8" => Some(Self::INT64),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        self.name
    }

    fn size_bytes(self) -> u64 {
        self.size_bytes
    }
}

impl WireDtype for TorchDtype {
    const IS_TORCH: bool = true;

    fn from_name(name: &str) -> Option<Self> {
        let mut known = TORCH_NAMES.into_iter().filter(|(known, _)| *known == name);
        known.next().map(|(name, size_bytes)| Self { name, size_bytes })
    }

    fn name(self) -> &'static str {
        self.name
    }

    fn size_bytes(self) -> u64 {
        self.size_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_numpy_name_says_its_size() {
        let sizes: Vec<u64> = ["|b1", "<i2", ">i4", "<f8", "<c16"]
            .into_iter()
            .map(|name| NumpyDtype::from_name(name).unwrap().size_bytes())
            .collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16]);
        for (name, size) in NUMPY_NAMES {
            let dtype = NumpyDtype::from_name(name).unwrap();
            assert_eq!((dtype.name(), dtype.size_bytes()), (name, size));
            assert_eq!(name[2..].parse(), Ok(size));
        }
        for name in ["|O", "|V4", "<U3", "|S1", "i4", ""] {
            assert_eq!(NumpyDtype::from_name(name), None);
        }
    }
}
