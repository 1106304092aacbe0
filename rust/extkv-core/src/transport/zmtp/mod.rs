//! ZMTP 3.1 with the NULL mechanism, as far as EngineCore needs it: greeting, handshake, frames.
//!
//! Nothing here allocates more than a small multiple of what the peer has really sent, and no bytes
//! of a peer end anything but its own connection.

mod connection;
mod frames;
mod greeting;

pub use connection::HeartbeatOptions;
pub(crate) use connection::{read_messages, shake_hands, write_messages};
pub(crate) use frames::{FrameReader, Limits};
#[cfg(feature = "test-util")]
pub(crate) use greeting::{PeerInfo, greeting};

use thiserror::Error as ThisError;

/// Frames of one message, each with memory of its own or shared with its neighbours.
pub type Frames = Vec<bytes::Bytes>;

/// What a socket is to its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketKind {
    /// Talks to many, each known by its identity.
    Router,
    /// Talks to one router, under an identity.
    Dealer,
    /// Sends only.
    Push,
    /// Receives only.
    Pull,
    /// Subscribes with messages of its own.
    Xsub,
}

impl SocketKind {
    /// The name on the wire.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
            Self::Push => "PUSH",
            Self::Pull => "PULL",
            Self::Xsub => "XSUB",
        }
    }

    fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Self::Router | Self::Dealer => matches!(peer, b"ROUTER" | b"DEALER"),
            Self::Push => peer == b"PULL",
            Self::Pull => peer == b"PUSH",
            Self::Xsub => matches!(peer, b"PUB" | b"XPUB"),
        }
    }
}

/// Why a connection ended.
#[derive(Debug, ThisError)]
pub(crate) enum ZmtpError {
    /// The peer closed it, between two messages.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed it within a message.
    #[error("the connection ended within a message, {missing} bytes before the next border")]
    Truncated {
        /// Bytes that were still expected, at least.
        missing: usize,
    },
    /// The network failed.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The greeting is not ZMTP 3 with the NULL mechanism.
    #[error("bad greeting: {0}")]
    Greeting(&'static str),
    /// The handshake command is wrong.
    #[error("bad handshake: {0}")]
    Handshake(&'static str),
    /// The sockets do not fit each other.
    #[error("a {own} socket does not talk to a {peer} socket")]
    Kind {
        /// Our kind.
        own: &'static str,
        /// The peer's, as it says.
        peer: String,
    },
    /// A message is too large.
    #[error("a message of more than {limit} bytes")]
    MessageTooLarge {
        /// The limit.
        limit: usize,
    },
    /// A message has too many frames.
    #[error("a message of more than {limit} frames")]
    TooManyFrames {
        /// The limit.
        limit: usize,
    },
    /// A frame header with reserved bits, or a command between the frames of a message.
    #[error("bad frame: {0}")]
    Frame(&'static str),
    /// The peer reported an error.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// No sign of life.
    #[error("no sign of life for {0} s")]
    Silent(f64),
}
