//! What an engine sends back: new tokens by request, statistics, results of calls, wave changes.

use std::collections::BTreeSet;

use super::codec::{
    DecodeProblem, DecodeResult, Map, Part, Reader, Source, Untyped, Visible, Wire, Writer, decode,
    encode,
};
use super::logprobs::{LogprobsLists, LogprobsTensors, SamplingMaskLists};
use super::output_columns::ColumnarOutputs;
use super::profile::Profile;
use super::stats::{PrefillStats, RequestSpecDecodeMetrics, SchedulerStats};
use super::tensor::{NumpyArray, TorchTensor};
use super::utility::UtilityOutput;

/// The whole message, a single frame and no msgpack, of an engine that has failed. An engine that
/// is killed sends nothing.
pub const ENGINE_CORE_DEAD: &[u8] = b"ENGINE_CORE_DEAD";

wire_enum! {
    /// Why a request ended.
    pub enum FinishReason {
        /// A stop token or stop string.
        Stop = 0,
        /// The most tokens, or the longest context.
        Length = 1,
        /// Aborted by the engine. A client's abort gets no output.
        Abort = 2,
        /// Failed, perhaps before any token.
        Error = 3,
        /// Repeated itself.
        Repetition = 4,
    }
}

wire_enum! {
    /// What happened to a request.
    #[derive(Default)]
    pub enum EngineCoreEventType {
        /// It began to wait.
        #[default]
        Queued = 1,
        /// It began to run.
        Scheduled = 2,
        /// It lost its blocks.
        Preempted = 3,
    }
}

/// What stopped a request: a token, or a stop string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token.
    Token(i64),
    /// A stop string.
    Text(String),
}

impl Wire for StopReason {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.is_int() {
            i64::read(reader).map(Self::Token)
        } else if reader.is_str() {
            String::read(reader).map(Self::Text)
        } else {
            Err(reader.unexpected("an int, a str or nil"))
        }
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Token(id) => id.write(writer),
            Self::Text(text) => text.write(writer),
        }
    }
}

wire_map! {
    /// Something that happened to a request.
    pub struct EngineCoreEvent {
        /// What.
        r#type as "type": EngineCoreEventType [required];
        /// When, on the engine's monotonic clock.
        timestamp: f64 [required];
    }
}

wire_map! {
    /// Why one request failed, while the engine is well.
    pub struct RequestError {
        /// Kind of failure.
        code: String [required];
        /// Its text.
        message: String [required];
        /// Whether the same request may work later.
        retryable: bool [or false];
    }
}

wire_array! {
    /// What is new about one request. What few outputs have is boxed, so that a batch of small ones
    /// takes little memory.
    pub struct EngineCoreOutput {
        /// The request.
        request_id: String [required];
        /// New tokens; more than one with speculative decoding, none for failures.
        new_token_ids: Vec<u32> [required];
        /// Their log-probabilities.
        new_logprobs: Option<Box<LogprobsLists>> [or None];
        /// Log-probabilities of the prompt.
        new_prompt_logprobs_tensors: Option<Box<LogprobsTensors>> [or None];
        /// Result of a pooling request.
        pooling_output: Option<Box<TorchTensor>> [or None];
        /// Why the request ended, if it did.
        finish_reason: Option<FinishReason> [or None];
        /// What stopped it.
        stop_reason: Option<StopReason> [or None];
        /// What happened to it.
        events: Option<Vec<EngineCoreEvent>> [or None];
        /// Where its KV data can be fetched, a map.
        kv_transfer_params: Option<Box<Untyped>> [or None];
        /// Where its encoder data can be fetched, a map.
        ec_transfer_params: Option<Box<Untyped>> [or None, since V0_26];
        /// Headers of distributed tracing.
        trace_headers: Option<Map<String, String>> [or None];
        /// Where its prompt's tokens came from.
        prefill_stats: Option<Box<PrefillStats>> [or None];
        /// Experts that each token went to.
        routed_experts: Option<Box<NumpyArray>> [or None];
        /// NaN values among the logits.
        num_nans_in_logits: i64 [or 0];
        /// Inputs that the front end thought cached and the engine has not: send them again.
        mm_cache_miss_hashes: Option<Vec<String>> [or None, since V0_32];
        /// Which tokens could be sampled.
        new_sampling_mask: Option<Box<SamplingMaskLists>> [or None, since V0_32];
        /// Drafts of the request.
        spec_decode_metrics: Option<Box<RequestSpecDecodeMetrics>> [or None, since V0_32];
        /// Log-probabilities of chosen tokens at prompt positions.
        prompt_token_id_logprobs: Option<Box<TorchTensor>> [or None, since V0_32];
        /// Why it failed.
        error: Option<Box<RequestError>> [or None, since V0_33];
    }
}

/// A message of an engine, given the form of its outputs.
macro_rules! wire_outputs {
    ($(#[$meta:meta])* pub struct $Name:ident of $Outputs:ty;) => {
        wire_array! {
            $(#[$meta])*
            pub struct $Name {
                /// The engine.
                engine_index: i64 [or 0];
                /// News by request.
                outputs: $Outputs [or Default::default()];
                /// State of the scheduler. A message may hold nothing else.
                scheduler_stats: Option<Box<SchedulerStats>> [or None];
                /// When it was sent, on the engine's monotonic clock; 0 if the engine did not say.
                timestamp: f64 [or 0.0];
                /// Result of a call.
                utility_output: Option<UtilityOutput> [or None];
                /// Requests that ended, for balancing load.
                finished_requests: Option<BTreeSet<String>> [or None];
                /// The wave that ended; 0 is a wave.
                wave_complete: Option<i64> [or None];
                /// The wave that a late request asks for.
                start_wave: Option<i64> [or None];
                /// Version of the weights.
                weight_version: Option<String> [or None, since V0_32];
            }
        }

        impl $Name {
            /// What the message is about.
            #[must_use]
            pub fn kind(&self) -> OutputsKind {
                if self.utility_output.is_some() {
                    OutputsKind::UtilityResult
                } else if self.wave_complete.is_some() || self.start_wave.is_some() {
                    OutputsKind::DpControl
                } else {
                    OutputsKind::RequestBatch
                }
            }
        }
    };
}
pub(crate) use wire_outputs;

wire_outputs! {
    /// One message of an engine.
    pub struct EngineCoreOutputs of Vec<EngineCoreOutput>;
}

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputsKind {
    /// News of requests and statistics; both may be missing.
    RequestBatch,
    /// The result of a call.
    UtilityResult,
    /// A change of the data-parallel wave.
    DpControl,
}

impl EngineCoreOutputs {
    /// The same message with its outputs as columns.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem`] with the path to a token id of 2^31 or more, which columns do not hold, or
    /// to what is too long to be a message.
    pub fn to_columns(&self) -> DecodeResult<ColumnarOutputs> {
        let frames = encode(self, Profile::V0_33)
            .map_err(|_| DecodeProblem::Invalid { rule: "the message is too long" })?;
        decode(&frames, Profile::V0_33).map(|decoded| decoded.message)
    }
}

/// Whether a message of these frames says that the engine has failed.
#[must_use]
pub fn is_dead_marker(frames: &[impl AsRef<[u8]>]) -> bool {
    matches!(frames, [only] if only.as_ref() == ENGINE_CORE_DEAD)
}

impl Visible for StopReason {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Token(id) => id.part(),
            Self::Text(text) => text.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_int() {
            i64::from_source(source).map(Self::Token)
        } else if source.is_text() {
            source.text().map(Self::Text)
        } else {
            Err(source.is_not("an int, a str or None"))
        }
    }
}
