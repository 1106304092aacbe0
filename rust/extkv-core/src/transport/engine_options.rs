//! How an engine joins its front end, and what is said meanwhile.

use std::time::Duration;

use bytes::Bytes;

use crate::protocol::{EngineHandshakeMetadata, HandshakeMessage, HandshakeStatus, Profile};

use super::engine::frames_of;
use super::error::{TransportError, TransportResult};
use super::socket::SocketLimits;
use super::zmtp::Frames;

/// How an engine joins its front end.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Where the front end listens for HELLO.
    pub handshake_address: String,
    /// The engine's index, which is its identity.
    pub engine_index: u16,
    /// Whether it runs on the front end's node.
    pub is_local: bool,
    /// Whether it was started without a front end of its own.
    pub is_headless: bool,
    /// Hash of the parallel configuration, for mixture-of-experts models.
    pub parallel_config_hash: Option<String>,
    /// How requests are read and answers written.
    pub profile: Profile,
    /// How long the handshake may take.
    pub handshake_timeout: Duration,
    /// Bytes of input that may wait before reading stops.
    pub max_waiting_bytes: usize,
    /// For all sockets.
    pub limits: SocketLimits,
}

impl EngineOptions {
    /// Usual options for this address and index.
    #[must_use]
    pub fn new(handshake_address: &str, engine_index: u16) -> Self {
        Self {
            handshake_address: handshake_address.to_owned(),
            engine_index,
            is_local: false,
            is_headless: true,
            parallel_config_hash: None,
            profile: Profile::default(),
            handshake_timeout: Duration::from_secs(300),
            max_waiting_bytes: 64 << 20,
            limits: SocketLimits::default(),
        }
    }
}

/// An engine's socket identity: its index.
pub(super) fn identity(engine_index: u16) -> Bytes {
    Bytes::copy_from_slice(&engine_index.to_le_bytes())
}

/// HELLO or READY.
pub(super) fn handshake_frames(
    options: &EngineOptions,
    status: HandshakeStatus,
) -> TransportResult<Frames> {
    let message = HandshakeMessage {
        status,
        local: options.is_local,
        headless: options.is_headless,
        parallel_config_hash: match status {
            HandshakeStatus::Hello => None,
            HandshakeStatus::Ready => options.parallel_config_hash.clone(),
        },
    };
    frames_of("a handshake message", &message, options.profile)
}

/// Refuses an INIT whose clients have no two addresses each.
pub(super) fn check_addresses(metadata: &EngineHandshakeMetadata) -> TransportResult<()> {
    let addresses = &metadata.addresses;
    let (inputs, outputs) = (addresses.inputs.len(), addresses.outputs.len());
    if inputs == outputs && inputs > 0 {
        return Ok(());
    }
    let reason =
        format!("{inputs} input and {outputs} output addresses, expected one of each per client");
    Err(TransportError::Malformed { what: "INIT", reason })
}
