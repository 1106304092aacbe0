//! Both ends of EngineCore's ZeroMQ transport.
//!
//! | module | knows |
//! |---|---|
//! | `zmtp` | greeting, handshake and frames of one connection |
//! | `outbox`, `gate` | how much may wait on the way out and on the way in |
//! | `socket` | one address: connections, identities, interruptions |
//! | `io` | the thread that all of it runs on |
//!
//! Why the framing is our own: `docs/decisions/2026-11-30-zeromq.md`.

mod endpoint;
mod error;
mod gate;
mod inbox;
mod io;
mod outbox;
mod socket;
#[cfg(test)]
mod socket_tests;
mod zmtp;

pub use endpoint::Endpoint;
pub use error::{TransportError, TransportResult};
pub use socket::SocketLimits;
pub use zmtp::{Frames, HeartbeatOptions, SocketKind};
