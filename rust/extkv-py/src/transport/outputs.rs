//! Outputs as an engine's loop gives them, one tuple each, turned into messages without the lock.

use bytes::Bytes;
use extkv_core::protocol::output::{EngineCoreEvent, EngineCoreEventType, StopReason};
use extkv_core::protocol::{
    EngineCoreOutput, FinishReason, LogprobsLists, LogprobsTensors, NumpyArray, PrefillStats,
    RequestError, TorchTensor,
};
use pyo3::FromPyObject;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Log-probabilities: token ids (int32) and values (float32) of shape [rows, columns], ranks (int32)
/// of shape [rows].
#[derive(FromPyObject)]
pub(super) struct LogprobArrays {
    token_ids: Vec<u8>,
    logprobs: Vec<u8>,
    ranks: Vec<u8>,
    num_columns: u64,
}

/// What became of a prompt's tokens.
#[derive(FromPyObject)]
struct Prefill {
    num_prompt_tokens: i64,
    num_cached_tokens: i64,
    num_cache_creation_tokens: i64,
}

/// What happened to a request and when.
type Event = (u8, f64);

/// One output, by the names of `extkv.serve.outputs.RequestNews`.
#[derive(FromPyObject)]
pub(super) struct News {
    request_id: String,
    new_token_ids: Vec<u32>,
    finish_reason: Option<u8>,
    stop_reason: Option<StopArg>,
    logprobs: Option<LogprobArrays>,
    prompt_logprobs: Option<LogprobArrays>,
    events: Option<Vec<Event>>,
    prefill: Option<Prefill>,
    error: Option<String>,
}

#[derive(FromPyObject)]
enum StopArg {
    Token(i64),
    Text(String),
}

impl News {
    /// The wire form.
    pub(super) fn into_output(self) -> PyResult<EngineCoreOutput> {
        let finish_reason = self
            .finish_reason
            .map(|number| {
                FinishReason::from_number(number).ok_or_else(|| unknown("finish reason", number))
            })
            .transpose()?;
        let events =
            self.events.map(|events| events.into_iter().map(event).collect()).transpose()?;
        Ok(EngineCoreOutput {
            request_id: self.request_id,
            new_token_ids: self.new_token_ids,
            new_logprobs: self.logprobs.map(LogprobArrays::into_lists).transpose()?.map(Box::new),
            new_prompt_logprobs_tensors: self
                .prompt_logprobs
                .map(LogprobArrays::into_tensors)
                .transpose()?
                .map(Box::new),
            finish_reason,
            stop_reason: self.stop_reason.map(|reason| match reason {
                StopArg::Token(id) => StopReason::Token(id),
                StopArg::Text(text) => StopReason::Text(text),
            }),
            events,
            prefill_stats: self.prefill.map(prefill_stats).map(Box::new),
            error: self.error.map(|message| {
                let code = "invalid_request".to_owned();
                Box::new(RequestError { code, message, retryable: false })
            }),
            ..EngineCoreOutput::default()
        })
    }
}

impl LogprobArrays {
    fn shape(&self) -> [u64; 2] {
        [(self.ranks.len() / 4) as u64, self.num_columns]
    }

    fn into_lists(self) -> PyResult<LogprobsLists> {
        let shape = self.shape();
        let array = |name, shape: &[u64], data: Vec<u8>| {
            NumpyArray::named(name, shape, Bytes::from(data)).map_err(bad_array)
        };
        Ok(LogprobsLists {
            logprob_token_ids: array("<i4", &shape, self.token_ids)?,
            logprobs: array("<f4", &shape, self.logprobs)?,
            sampled_token_ranks: array("<i4", &shape[..1], self.ranks)?,
            cu_num_generated_tokens: None,
        })
    }

    fn into_tensors(self) -> PyResult<LogprobsTensors> {
        let shape = self.shape();
        let tensor = |name, shape: &[u64], data: Vec<u8>| {
            TorchTensor::named(name, shape, Bytes::from(data)).map_err(bad_array)
        };
        Ok(LogprobsTensors {
            logprob_token_ids: tensor("int32", &shape, self.token_ids)?,
            logprobs: tensor("float32", &shape, self.logprobs)?,
            selected_token_ranks: tensor("int32", &shape[..1], self.ranks)?,
            ..LogprobsTensors::default()
        })
    }
}

fn event((number, timestamp): Event) -> PyResult<EngineCoreEvent> {
    let r#type =
        EngineCoreEventType::from_number(number).ok_or_else(|| unknown("event", number))?;
    Ok(EngineCoreEvent { r#type, timestamp })
}

fn prefill_stats(prefill: Prefill) -> PrefillStats {
    PrefillStats {
        num_prompt_tokens: prefill.num_prompt_tokens,
        num_computed_tokens: prefill.num_prompt_tokens.saturating_sub(prefill.num_cached_tokens),
        num_cached_tokens: prefill.num_cached_tokens,
        num_local_cached_tokens: prefill.num_cached_tokens,
        num_cache_creation_tokens: prefill.num_cache_creation_tokens,
        ..PrefillStats::default()
    }
}

fn unknown(what: &str, number: u8) -> PyErr {
    PyValueError::new_err(format!("{number} is no {what}"))
}

fn bad_array(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("log-probabilities: {error}"))
}
