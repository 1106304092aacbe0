//! Shared native objects, one call at a time, and arguments of speculation.

use std::sync::{Mutex, MutexGuard};

use dspark_sched::Error;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use super::args::{Arg, ArgumentError, Refusal};
use crate::error::{BindingError, BindingResult};

pub(super) fn locked<'a, T>(
    py: Python<'_>,
    inner: &'a Mutex<T>,
) -> BindingResult<MutexGuard<'a, T>> {
    let broken = |_| Error::Corrupt { rule: "every call returns", subject: 0 };
    Ok(inner.lock_py_attached(py).map_err(broken)?)
}

/// The value of an argument of speculation, which has errors of its own.
pub(super) fn given<T>(arg: Arg<T>, name: &'static str) -> BindingResult<T> {
    arg.named(name).map_err(BindingError::SpeculationArgument)
}

/// The value of an argument that may be left out.
pub(super) fn given_or_none<T>(
    arg: Option<Arg<T>>,
    name: &'static str,
) -> BindingResult<Option<T>> {
    arg.map(|arg| given(arg, name)).transpose()
}

/// Refuses arrays of unequal lengths.
pub(super) fn check_lengths(
    expected: usize,
    arrays: &[(&'static str, usize)],
) -> BindingResult<()> {
    match arrays.iter().find(|&&(_, found)| found != expected) {
        None => Ok(()),
        Some(&(name, found)) => {
            let refusal = Refusal::Length { found, expected };
            Err(BindingError::SpeculationArgument(ArgumentError { name, refusal }))
        }
    }
}

/// Refuses a word that is not known.
pub(super) fn unknown(name: &'static str, found: &str, known: &'static str) -> BindingError {
    let refusal = Refusal::Unknown { found: found.to_owned(), known };
    BindingError::SpeculationArgument(ArgumentError { name, refusal })
}
