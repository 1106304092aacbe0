//! Element types of cached tensors: their size in bytes and torch's name for them.
//!
//! Only whole-byte types; packed formats (`fp8_ds_mla`) are arrays of [`Dtype::UInt8`].

use std::fmt;
use std::str::FromStr;

use thiserror::Error as ThisError;

/// The type of one tensor element. Prints as torch names it (`bfloat16`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// `float64`, 8 bytes.
    Float64,
    /// `float32`, 4 bytes.
    Float32,
    /// `bfloat16`, 2 bytes.
    BFloat16,
    /// `float16`, 2 bytes.
    Float16,
    /// `float8_e4m3fn`, 1 byte; what engines call `fp8`.
    Float8E4M3,
    /// `float8_e5m2`, 1 byte.
    Float8E5M2,
    /// `int64`, 8 bytes.
    Int64,
    /// `int32`, 4 bytes.
    Int32,
    /// `int16`, 2 bytes.
    Int16,
    /// `int8`, 1 byte.
    Int8,
    /// `uint8`, 1 byte; raw bytes of packed formats.
    UInt8,
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("unknown dtype {name:?}; use a torch name such as bfloat16, float8_e4m3fn or uint8")]
pub struct UnknownDtype {
    /// The name as given.
    pub name: String,
}

impl Dtype {
    /// Every element type.
    pub const ALL: [Self; 11] = [
        Self::Float64,
        Self::Float32,
        Self::BFloat16,
        Self::Float16,
        Self::Float8E4M3,
        Self::Float8E5M2,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::UInt8,
    ];

    /// Bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::BFloat16 | Self::Float16 | Self::Int16 => 2,
            Self::Float8E4M3 | Self::Float8E5M2 | Self::Int8 | Self::UInt8 => 1,
        }
    }

    /// The attribute of the `torch` module that is this type.
    #[must_use]
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::Float64 => "float64",
            Self::Float32 => "float32",
            Self::BFloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Float8E4M3 => "float8_e4m3fn",
            Self::Float8E5M2 => "float8_e5m2",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::UInt8 => "uint8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.torch_name())
    }
}

impl FromStr for Dtype {
    type Err = UnknownDtype;

    /// Reads a torch name (with or without `torch.`) or an engine's short name (`bf16`, `fp8`).
    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        let short = name.strip_prefix("torch.").unwrap_or(name);
        match short {
            "double" | "fp64" => return Ok(Self::Float64),
            "float" | "fp32" => return Ok(Self::Float32),
            "bf16" => return Ok(Self::BFloat16),
            "half" | "fp16" => return Ok(Self::Float16),
            "fp8" | "fp8_e4m3" => return Ok(Self::Float8E4M3),
            "fp8_e5m2" => return Ok(Self::Float8E5M2),
            _ => {}
        }
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.torch_name() == short)
            .ok_or_else(|| UnknownDtype { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_torch_name_reads_back_as_itself() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert_eq!(format!("torch.{dtype}").parse(), Ok(dtype));
        }
    }

    #[test]
    fn short_names_of_engines_are_read() {
        assert_eq!("bf16".parse(), Ok(Dtype::BFloat16));
        assert_eq!("half".parse(), Ok(Dtype::Float16));
        assert_eq!("fp8".parse(), Ok(Dtype::Float8E4M3));
        assert_eq!("fp8_e5m2".parse(), Ok(Dtype::Float8E5M2));
    }

    #[test]
    fn sizes_are_those_of_torch() {
        let sizes: Vec<u64> = Dtype::ALL.into_iter().map(Dtype::size_bytes).collect();
        assert_eq!(sizes, [8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1]);
    }

    #[test]
    fn rejects_unknown_name_and_says_it() {
        let error = "torch.float7".parse::<Dtype>().unwrap_err();
        assert_eq!(error, UnknownDtype { name: "torch.float7".to_owned() });
        assert!(error.to_string().contains("torch.float7"));
    }
}
