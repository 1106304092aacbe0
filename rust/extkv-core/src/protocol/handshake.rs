//! Start-up messages: HELLO and READY of an engine, INIT of its front end, and the ready response.

use bytes::Bytes;

use super::codec::{
    DecodeProblem, DecodeResult, Decoded, Map, Part, Reader, Source, Visible, Wire, Writer, decode,
};
use super::profile::Profile;

/// Which of the two messages an engine sends on the handshake socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HandshakeStatus {
    /// The engine process is up and wants its addresses.
    #[default]
    Hello,
    /// The engine has loaded its model.
    Ready,
}

impl HandshakeStatus {
    /// Its text on the wire.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Hello => "HELLO",
            Self::Ready => "READY",
        }
    }

    fn of_text(text: &str) -> DecodeResult<Self> {
        match text {
            "HELLO" => Ok(Self::Hello),
            "READY" => Ok(Self::Ready),
            _ => Err(DecodeProblem::unknown_text("handshake status", text).into()),
        }
    }
}

impl Wire for HandshakeStatus {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.str().and_then(Self::of_text)
    }

    fn write(&self, writer: &mut Writer) {
        writer.str(self.text());
    }
}

wire_map_struct! {
    /// HELLO and READY, engine to front end.
    pub struct HandshakeMessage {
        /// Which of the two.
        status: HandshakeStatus [required];
        /// Whether the engine runs on the front end's node.
        local: bool [required];
        /// Whether the engine was started without a front end of its own.
        headless: bool [required];
        /// Hash of the parallel configuration, sent by engines of mixture-of-experts models.
        parallel_config_hash: Option<String> [or None];
    }
}

impl Wire for HandshakeMessage {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        Self::read_entries(reader)
    }

    fn write(&self, writer: &mut Writer) {
        writer.map_len(3 + usize::from(self.parallel_config_hash.is_some()));
        writer.str("status");
        self.status.write(writer);
        writer.str("local");
        self.local.write(writer);
        writer.str("headless");
        self.headless.write(writer);
        if let Some(hash) = &self.parallel_config_hash {
            writer.str("parallel_config_hash");
            writer.str(hash);
        }
    }
}

wire_map! {
    /// Where an engine finds its peers.
    pub struct EngineZmqAddresses {
        /// Input addresses, one per client.
        inputs: Vec<String> [required];
        /// Output addresses, one per client.
        outputs: Vec<String> [required];
        /// Where the coordinator publishes to engines.
        coordinator_input: Option<String> [or None];
        /// Where engines push to the coordinator.
        coordinator_output: Option<String> [or None];
        /// Where the coordinator publishes to front ends.
        frontend_stats_publish_address: Option<String> [or None];
    }
}

/// One setting of the parallel configuration that the front end decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParallelSetting {
    /// A number, such as a port.
    Int(i64),
    /// A text, such as an address.
    Text(String),
    /// Numbers, such as ports.
    Ints(Vec<i64>),
}

impl Wire for ParallelSetting {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.is_int() {
            i64::read(reader).map(Self::Int)
        } else if reader.is_str() {
            String::read(reader).map(Self::Text)
        } else {
            Vec::read(reader).map(Self::Ints)
        }
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Int(value) => value.write(writer),
            Self::Text(value) => value.write(writer),
            Self::Ints(values) => values.write(writer),
        }
    }
}

wire_map! {
    /// INIT, front end to engine.
    pub struct EngineHandshakeMetadata {
        /// Where the engine finds its peers.
        addresses: EngineZmqAddresses [required];
        /// Settings of coordinated mixture-of-experts engines, else empty.
        parallel_config: Map<String, ParallelSetting> [required];
    }
}

wire_map! {
    /// How an engine publishes its KV cache events.
    pub struct KvEventsConfig {
        /// Whether it does.
        enable_kv_cache_events: bool [or false];
        /// `null` or `zmq`.
        publisher: Option<String> [or None];
        /// Where events are published.
        endpoint: String [or "tcp://*:5557".to_owned()];
        /// Where missed events can be asked for.
        replay_endpoint: Option<String> [or None];
        /// Steps kept for replay.
        buffer_steps: i64 [or 10_000];
        /// High-water mark of the publisher.
        hwm: i64 [or 100_000];
        /// Events that may wait for publication.
        max_queue_size: i64 [or 100_000];
        /// Topic of the events.
        topic: String [or String::new()];
    }
}

wire_map! {
    /// What an engine tells each client once its model is loaded, on every input address.
    ///
    /// It is decoded before the wire profile is known; [`Self::vllm_version`] chooses it. Fields
    /// that only later profiles have are `None` when an older engine leaves them out.
    pub struct EngineCoreReadyResponse {
        /// Longest context in tokens.
        max_model_len: i64 [required];
        /// Blocks of the KV cache.
        num_gpu_blocks: i64 [required];
        /// Tokens of a block.
        block_size: i64 [required];
        /// Where the coordinator publishes statistics.
        dp_stats_address: Option<String> [required];
        /// Type of the model's activations, such as `bfloat16`.
        dtype: Option<String> [or None, needed since V0_25];
        /// The engine's vLLM version; old engines leave it out.
        vllm_version: Option<String> [or None, needed since V0_25];
        /// Processes of the engine.
        world_size: Option<i64> [or None, needed since V0_25];
        /// Engines in parallel.
        data_parallel_size: Option<i64> [or None, needed since V0_25];
        /// Tensor-parallel ranks.
        tensor_parallel_size: Option<i64> [or None, needed since V0_32];
        /// Pipeline-parallel ranks.
        pipeline_parallel_size: Option<i64> [or None, needed since V0_32];
        /// Decode-context-parallel ranks.
        decode_context_parallel_size: Option<i64> [or None, needed since V0_32];
        /// The engine's index.
        data_parallel_rank: Option<i64> [or None, needed since V0_32];
        /// Requests that run at a time.
        max_num_seqs: Option<i64> [or None, needed since V0_32];
        /// Tokens of one step.
        max_num_batched_tokens: Option<i64> [or None, needed since V0_32];
        /// Identity of this engine instance.
        instance_id: Option<String> [or None, needed since V0_32];
        /// Whether LoRA requests are served.
        supports_lora: Option<bool> [or None, needed since V0_32];
        /// LoRA adapters at a time.
        max_loras: Option<i64> [or None, needed since V0_32];
        /// Tokens of a state block of hybrid models.
        mamba_block_size: Option<i64> [or None, since V0_32];
        /// Tokens that the KV cache holds.
        kv_cache_size_tokens: Option<i64> [or None];
        /// Requests of the longest length that the KV cache holds.
        kv_cache_max_concurrency: Option<f64> [or None];
        /// How KV cache events are published.
        kv_events_config: Option<KvEventsConfig> [or None, since V0_32];
        /// How new weights arrive.
        weight_transfer_backend: Option<String> [or None, since V0_32];
        /// Whether the engine can sleep.
        enable_sleep_mode: bool [or false, since V0_32];
        /// Whether a draft model's weights can be replaced.
        supports_draft_weight_updates: bool [or false, since V0_32];
        /// Tokens of an attention block, where it differs from `block_size`.
        effective_attention_block_size: Option<i64> [or None, since V0_32];
        /// Port of the coordination store.
        coord_store_port: i64 [or 0, since V0_33];
        /// Where the coordinator publishes to engines.
        coordinator_input_address: Option<String> [or None, since V0_33];
        /// Where engines push to the coordinator.
        coordinator_output_address: Option<String> [or None, since V0_33];
    }
}

/// Reads what an engine registers with on an input address: its ready response, or an empty frame
/// from engines that have none.
///
/// # Errors
///
/// [`super::DecodeError`] if the frames are neither.
pub fn decode_registration(
    frames: &[Bytes],
) -> DecodeResult<Option<Decoded<EngineCoreReadyResponse>>> {
    match frames {
        [only] if only.is_empty() => Ok(None),
        _ => decode(frames, Profile::V0_33).map(Some),
    }
}

impl Visible for HandshakeStatus {
    fn part(&self) -> Part<'_> {
        Part::Text(self.text())
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.text().and_then(|text| Self::of_text(&text))
    }
}

impl Visible for ParallelSetting {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Int(value) => value.part(),
            Self::Text(value) => value.part(),
            Self::Ints(values) => values.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_int() {
            i64::from_source(source).map(Self::Int)
        } else if source.is_text() {
            source.text().map(Self::Text)
        } else {
            Vec::from_source(source).map(Self::Ints)
        }
    }
}
