//! What a front end sends to an engine: the type byte and the payloads it announces.

use super::codec::{
    DecodeProblem, DecodeResult, Map, Part, Reader, Source, TokenIds, Untyped, Visible, Wire,
    Writer,
};
use super::lora::LoraRequest;
use super::multimodal::MultiModalFeatureSpec;
use super::pooling::PoolingParams;
use super::sampling::SamplingParams;
use super::tensor::TorchTensor;

wire_enum! {
    /// What a request frame holds; sent as one byte in a frame before the payload.
    pub enum RequestType {
        /// A new request.
        Add = 0,
        /// Request ids to stop.
        Abort = 1,
        /// Run a wave; only on the coordinator's socket.
        StartDpWave = 2,
        /// Call a method of the engine.
        Utility = 3,
    }
}

impl RequestType {
    /// The type frame.
    #[must_use]
    pub const fn frame(self) -> [u8; 1] {
        [self.number()]
    }

    /// The type that a frame announces. Types 4 and 5 never leave an engine process.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::UnknownMember`] if the frame is not one known byte.
    pub fn from_frame(frame: &[u8]) -> DecodeResult<Self> {
        let known = match frame {
            [number] => Self::from_number(*number),
            _ => None,
        };
        known.ok_or_else(|| {
            let shown: Vec<String> =
                frame.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            let found = match frame.len() {
                0 => "an empty frame".to_owned(),
                1 => format!("byte {}", shown.concat()),
                len => format!("a frame of {len} bytes ({}…)", shown.concat()),
            };
            DecodeProblem::UnknownMember { enumeration: "request type", found }.into()
        })
    }
}

/// Payload of [`RequestType::Abort`]. Unknown ids are ignored by engines, and a client's abort gets
/// no answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AbortRequests {
    /// Requests to stop.
    pub request_ids: Vec<String>,
}

impl Wire for AbortRequests {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        Vec::read(reader).map(|request_ids| Self { request_ids })
    }

    fn write(&self, writer: &mut Writer) {
        self.request_ids.write(writer);
    }
}

impl Visible for AbortRequests {
    fn part(&self) -> Part<'_> {
        self.request_ids.part()
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        Vec::from_source(source).map(|request_ids| Self { request_ids })
    }
}

wire_map! {
    /// One action that an orchestrator asks of the KV cache.
    pub struct KvHintAction {
        /// Its identity.
        action_id: String [required];
        /// What to do.
        action_type: String [required];
        /// Version of the action's payload.
        action_version: String [required];
        /// Arguments, a map of JSON values.
        payload: Untyped [required];
    }
}

wire_map! {
    /// Hints for the KV cache of one request.
    pub struct KvHintsEnvelope {
        /// Version of the envelope.
        protocol_version: String [required];
        /// Its identity.
        message_id: String [required];
        /// What to do.
        actions: Vec<KvHintAction> [required];
    }
}

wire_array! {
    /// Payload of [`RequestType::Add`].
    pub struct EngineCoreRequest {
        /// Unique among the engine's live requests.
        request_id: String [required];
        /// The prompt's tokens; `None` if only embeddings are given.
        prompt_token_ids: Option<TokenIds> [required];
        /// Images and other inputs.
        mm_features: Option<Vec<MultiModalFeatureSpec>> [required];
        /// How tokens are chosen; `None` for a pooling request.
        sampling_params: Option<Box<SamplingParams>> [required];
        /// What to pool; `None` for a generating request.
        pooling_params: Option<Box<PoolingParams>> [required];
        /// Unix time in seconds.
        arrival_time: f64 [required];
        /// The adapter to use.
        lora_request: Option<LoraRequest> [required];
        /// Keeps the prefix cache of different users apart.
        cache_salt: Option<String> [required];
        /// The engine that must run it.
        data_parallel_rank: Option<i64> [required];
        /// Embeddings in place of tokens.
        prompt_embeds: Option<TorchTensor> [or None];
        /// Which prompt positions are tokens and not embeddings.
        prompt_is_token_ids: Option<Vec<bool>> [or None];
        /// Which output socket gets the outputs.
        client_index: i64 [or 0];
        /// The data-parallel wave that the front end knows.
        current_wave: i64 [or 0];
        /// Lower runs earlier; may be negative.
        priority: i64 [or 0];
        /// Headers of distributed tracing.
        trace_headers: Option<Map<String, String>> [or None];
        /// Whether more input may follow.
        resumable: bool [or false];
        /// The id that the user knows.
        external_req_id: Option<String> [or None];
        /// Whether reasoning ended in the prompt.
        reasoning_ended: Option<bool> [or None];
        /// Arguments of the reasoning parser, a map.
        reasoning_parser_kwargs: Option<Untyped> [or None];
        /// Whether the request ends at once, without output.
        abort_immediately: bool [or false];
        /// The session it belongs to.
        session_id: Option<String> [or None, since V0_32];
        /// Hints for the KV cache.
        kv_hints: Option<KvHintsEnvelope> [or None, since V0_32];
    }
}
