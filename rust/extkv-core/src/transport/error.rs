//! Every way a transport can fail, as data.

use std::time::Duration;

use thiserror::Error as ThisError;

/// Result of the transport's functions.
pub type TransportResult<T> = std::result::Result<T, TransportError>;

/// A call on a transport that failed.
#[derive(Debug, ThisError)]
pub enum TransportError {
    /// An address that names no endpoint.
    #[error("address {address:?} is no endpoint: {expected}")]
    Address {
        /// What was given.
        address: String,
        /// What would have been right.
        expected: &'static str,
    },
    /// An endpoint that cannot be listened on.
    #[error("cannot listen on {address}")]
    Bind {
        /// The endpoint.
        address: String,
        /// Why not.
        source: std::io::Error,
    },
    /// An identity that ZMTP does not carry.
    #[error("identity has {length} bytes, at most {limit} are possible")]
    Identity {
        /// Its length.
        length: usize,
        /// The longest one.
        limit: usize,
    },
    /// The thread that serves sockets cannot be started.
    #[error("cannot start the transport's thread")]
    Thread(#[source] std::io::Error),
    /// The transport was closed, or is closing.
    #[error("the transport is closed")]
    Closed,
    /// No connection to this peer.
    #[error("no connection to {peer}: it has not come or has gone")]
    NotConnected {
        /// The peer, in words.
        peer: String,
    },
    /// The peer does not read what it is sent.
    #[error("{peer} does not read: {queued_bytes} bytes wait for it, the limit is {limit_bytes}")]
    Stalled {
        /// The peer, in words.
        peer: String,
        /// Bytes that wait already.
        queued_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// Nothing came in time.
    #[error("no {what} within {} s", waited.as_secs_f64())]
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        waited: Duration,
    },
    /// A peer sent something that cannot be understood where it must be.
    #[error("{what} cannot be read: {reason}")]
    Malformed {
        /// Which message.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// An engine that died, with the requests it had.
    #[error("engine {engine} is dead: {reason}")]
    EngineDead {
        /// Its index.
        engine: u16,
        /// How that was found.
        reason: String,
    },
    /// An engine that nobody knows.
    #[error("there is no engine {engine}, known: 0 to {}", num_engines.saturating_sub(1))]
    UnknownEngine {
        /// What was asked for.
        engine: u16,
        /// How many there are.
        num_engines: u16,
    },
    /// A client that nobody knows.
    #[error("there is no client {client}, known: 0 to {}", num_clients.saturating_sub(1))]
    UnknownClient {
        /// What was asked for.
        client: i64,
        /// How many there are.
        num_clients: usize,
    },
    /// A request id that is in use.
    #[error("request id {request_id:?} is in use")]
    DuplicateRequest {
        /// The id.
        request_id: String,
    },
    /// A message that cannot be encoded.
    #[error("{what} cannot be written: {reason}")]
    Unencodable {
        /// Which message.
        what: &'static str,
        /// Why.
        reason: String,
    },
}
