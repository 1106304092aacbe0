//! Messages of vLLM's EngineCore wire, as types with a decoder and an encoder per wire profile.
//!
//! | messages | module |
//! |---|---|
//! | start-up: HELLO, INIT, ready response, READY | [`handshake`] |
//! | front end to engine | [`request`], [`sampling`], [`structured_outputs`], [`pooling`], [`lora`], [`multimodal`], [`utility`] |
//! | engine to front end | [`output`], [`logprobs`], [`stats`], [`utility`] |
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
pub mod profile;
pub mod request;
pub mod utility;

pub use codec::{
    DecodeError, DecodeProblem, DecodeResult, Decoded, EncodeError, Map, Reader, Skipped, TokenIds,
    Untyped, UntypedError, Wire, Writer, decode, encode,
};
pub use coordinator::{CoordinatorCommand, CoordinatorNews, EngineLoad, Exclusion, StartDpWave};
pub use handshake::{
    EngineCoreReadyResponse, EngineHandshakeMetadata, EngineZmqAddresses, HandshakeMessage,
    HandshakeStatus, KvEventsConfig, ParallelSetting,
};
pub use profile::{Profile, ProfileError};
pub use request::{AbortRequests, RequestType};
pub use utility::{CallId, UtilityCall, UtilityOutput, UtilityResult};
