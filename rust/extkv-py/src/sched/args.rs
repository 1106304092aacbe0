//! Arguments that may have any value in Python. One that cannot be is refused by its name.

use std::error::Error;
use std::fmt;

use dspark_sched::{
    Draft, FinishReason, NumBlocks, NumTokens, RequestId, SchedulingPolicy, TokenId,
};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use super::arrays::{Number, items_of};

/// A named argument that cannot be.
#[derive(Debug)]
pub(crate) struct ArgumentError {
    pub(super) name: &'static str,
    pub(super) refusal: Refusal,
}

/// Why an argument cannot be.
#[derive(Debug)]
pub(crate) enum Refusal {
    OutOfRange { bounds: &'static str, found: String },
    Ragged { num_bytes: usize, item_bytes: usize },
    Unknown { found: String, known: &'static str },
    Offsets { num_request_ids: usize, num_token_ids: usize },
    Length { found: usize, expected: usize },
}

impl fmt::Display for ArgumentError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name;
        match &self.refusal {
            Refusal::OutOfRange { bounds, found } => {
                write!(formatter, "{name} must be in {bounds}, got {found}")
            }
            Refusal::Ragged { num_bytes, item_bytes } => {
                write!(formatter, "{name} has {num_bytes} bytes: a multiple of {item_bytes} needed")
            }
            Refusal::Unknown { found, known } => {
                write!(formatter, "{name} must be one of {known}, got {found:?}")
            }
            Refusal::Length { found, expected } => {
                write!(formatter, "{name} has {found} elements: {expected} needed")
            }
            Refusal::Offsets { num_request_ids, num_token_ids } => write!(
                formatter,
                "{name} must rise from 0 to {num_token_ids}, the number of token_ids, with one \
                 more number than request_ids, which has {num_request_ids}"
            ),
        }
    }
}

impl Error for ArgumentError {}

/// What an argument says, or why it cannot be.
pub(crate) struct Arg<T>(Result<T, Refusal>);

impl<T> Arg<T> {
    pub(super) fn named(self, name: &'static str) -> Result<T, ArgumentError> {
        self.0.map_err(|refusal| ArgumentError { name, refusal })
    }
}

impl<T: Parse> FromPyObject<'_, '_> for Arg<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        T::parse(value).map(Self)
    }
}

/// A type that an [`Arg`] can have.
pub(super) trait Parse: Sized {
    /// A value of a wrong type is an error; one of a wrong size is refused.
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>>;
}

macro_rules! parse_numbers {
    ($($number:ty),*) => {$(
        impl Parse for $number {
            fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
                match value.extract() {
                    Ok(number) => Ok(Ok(number)),
                    Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                        Ok(Err(out_of_range::<Self>(value)))
                    }
                    Err(error) => Err(error),
                }
            }
        }
    )*};
}

parse_numbers!(i32, u32, u64, f32, f64);

macro_rules! parse_newtypes {
    ($($newtype:ident),*) => {$(
        impl Parse for $newtype {
            fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
                Ok(Parse::parse(value)?.map(Self))
            }
        }
    )*};
}

parse_newtypes!(NumBlocks, NumTokens, RequestId);

fn out_of_range<T: Number>(value: Borrowed<'_, '_, PyAny>) -> Refusal {
    let digits = value.str().map(|text| text.to_string());
    let found = digits.unwrap_or_else(|_| "a number of thousands of digits".to_owned());
    Refusal::OutOfRange { bounds: T::BOUNDS, found }
}

/// A buffer of native numbers, or an iterable of them.
impl<T: Number + Parse> Parse for Vec<T> {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        if let Ok(bytes) = value.cast::<PyBytes>() {
            return Ok(items_of(bytes.as_bytes()));
        }
        if let Ok(bytes) = value.cast::<PyByteArray>() {
            return Ok(items_of(&bytes.to_vec()));
        }
        value.try_iter()?.map(|item| T::parse(item?.as_borrowed())).collect()
    }
}

/// Token ids: never negative, and within int32 as everywhere in a plan.
pub(super) struct TokenIds(pub(super) Vec<TokenId>);

impl Parse for TokenIds {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        let numbers: Result<Vec<i32>, Refusal> = Vec::parse(value)?;
        let token_ids = |numbers: Vec<i32>| numbers.into_iter().map(token_id).collect();
        Ok(numbers.and_then(token_ids).map(Self))
    }
}

fn token_id(number: i32) -> Result<TokenId, Refusal> {
    let refused = |_| Refusal::OutOfRange { bounds: "[0, 2**31)", found: number.to_string() };
    u32::try_from(number).map(TokenId).map_err(refused)
}

/// A draft, None for a placeholder, or a token that a model may lack.
impl Parse for Option<TokenId> {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        if value.is_none() {
            return Ok(Ok(None));
        }
        Ok(i32::parse(value)?.and_then(token_id).map(Some))
    }
}

/// Drafts of one request.
pub(super) struct Drafts(pub(super) Vec<Draft>);

impl Parse for Drafts {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        let drafts = value.try_iter()?.map(|item| Draft::parse(item?.as_borrowed()));
        Ok(drafts.collect::<PyResult<Result<_, _>>>()?.map(Self))
    }
}

impl Parse for SchedulingPolicy {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        Ok(match value.extract::<&str>()? {
            "fcfs" => Ok(Self::Fcfs),
            "priority" => Ok(Self::Priority),
            other => Err(Refusal::Unknown { found: other.to_owned(), known: "fcfs, priority" }),
        })
    }
}

impl Parse for FinishReason {
    fn parse(value: Borrowed<'_, '_, PyAny>) -> PyResult<Result<Self, Refusal>> {
        let known = "stop, length, abort, error";
        Ok(match value.extract::<&str>()? {
            "stop" => Ok(Self::Stop),
            "length" => Ok(Self::Length),
            "abort" => Ok(Self::Abort),
            "error" => Ok(Self::Error),
            other => Err(Refusal::Unknown { found: other.to_owned(), known }),
        })
    }
}
