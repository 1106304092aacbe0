//! Messages of vLLM's EngineCore wire, as types with a decoder and an encoder per wire profile.
//!
//! | messages | module |
//! |---|---|
//! | start-up: HELLO, INIT, ready response, READY | [`handshake`] |
//! | front end to engine | [`request`], [`sampling`], [`structured_outputs`], [`pooling`], [`lora`], [`multimodal`], [`utility`] |
//! | engine to front end | [`output`], [`logprobs`], [`stats`], [`utility`] |
//! | the same, as columns | [`output_columns`] to read, [`output_rows`] to write |
//! | data-parallel coordinator | [`coordinator`] |
//! | arrays inside messages | [`tensor`] |
//! | which release puts what where | [`profile`] |
//!
//! [`decode`] tolerates what a newer or older peer may send (short arrays, further elements, unknown
//! keys) and refuses what cannot be meant, with the path to the field. [`encode`] writes the bytes
//! that Python's encoder writes. Knows neither sockets nor Python.

#[macro_use]
mod codec;

pub mod coordinator;
pub mod handshake;
pub mod logprobs;
pub mod lora;
pub mod multimodal;
pub mod output;
pub mod output_columns;
pub mod output_rows;
pub mod pooling;
pub mod profile;
pub mod request;
pub mod sampling;
pub mod stats;
pub mod structured_outputs;
pub mod tensor;
pub mod utility;

pub use codec::{
    ArrayPart, ArraySource, DecodeError, DecodeProblem, DecodeResult, Decoded, EncodeError, Map,
    NullableList, Part, Reader, Record, Skipped, Source, TokenIds, Untyped, UntypedError, Visible,
    Wire, Writer, decode, encode, encode_parts,
};
pub use coordinator::{CoordinatorCommand, CoordinatorNews, EngineLoad, Exclusion, StartDpWave};
pub use handshake::{
    EngineCoreReadyResponse, EngineHandshakeMetadata, EngineZmqAddresses, HandshakeMessage,
    HandshakeStatus, KvEventsConfig, ParallelSetting,
};
pub use logprobs::{LogprobsLists, LogprobsTensors, SamplingMaskLists};
pub use lora::{LoraFields, LoraRequest};
pub use multimodal::MultiModalFeatureSpec;
pub use output::{
    ENGINE_CORE_DEAD, EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs,
    FinishReason, OutputsKind, RequestError, StopReason,
};
pub use output_columns::{ColumnarOutputs, OutputColumns, StackError};
pub use output_rows::{LogprobsRows, OutputRows, RowsError};
pub use pooling::PoolingParams;
pub use profile::{Profile, ProfileError};
pub use request::{AbortRequests, EngineCoreRequest, RequestType};
pub use sampling::{RequestOutputKind, SamplingParams};
pub use stats::{PrefillStats, SchedulerStats};
pub use structured_outputs::{Constraint, StructuredOutputsFields, StructuredOutputsParams};
pub use tensor::{NumpyArray, TorchTensor};
pub use utility::{CallId, UtilityCall, UtilityOutput, UtilityResult};
