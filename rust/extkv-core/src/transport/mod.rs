//! Both ends of EngineCore's ZeroMQ transport.
//!
//! | module | knows |
//! |---|---|
//! | `frontend` | a front end's end: engines come, requests are streams, calls have outcomes |
//! | `engine` | an engine's end: clients, coordinator, what to answer without the engine's loop |
//! | `socket` | one address: connections, identities, interruptions |
//! | `outbox`, `gate` | how much may wait on the way out and on the way in |
//! | `stream` | TCP and Unix sockets |
//! | `zmtp` | greeting, handshake and frames of one connection |
//! | `io` | the thread that all of it runs on |
//!
//! Messages are read and written by [`crate::protocol`]. Why the framing is our own:
//! `docs/decisions/2026-11-30-zeromq.md`.

mod balance;
mod endpoint;
mod engine;
mod engine_input;
mod engine_options;
mod error;
mod front_state;
mod frontend;
mod frontend_input;
mod frontend_options;
#[cfg(feature = "test-util")]
pub(crate) mod fuzzing;
mod gate;
mod inbox;
mod io;
mod mailbox;
mod notifier;
mod outbox;
pub(crate) mod peek;
mod registry;
mod replies;
mod slot;
mod socket;
#[cfg(test)]
mod socket_tests;
mod stream;
mod streams;
mod zmtp;

pub use endpoint::Endpoint;
pub use engine::EngineEnd;
pub use engine_input::EngineInput;
pub use engine_options::EngineOptions;
pub use error::{TransportError, TransportResult};
pub use front_state::Counts;
pub use frontend::FrontEnd;
pub use frontend_options::{CoordinatorAddresses, FrontEndOptions};
pub use notifier::Notifier;
pub use registry::EngineStatus;
pub use socket::SocketLimits;
pub use streams::{Call, CallOutcome, Stream, StreamEnd, StreamItem};
pub use zmtp::{Frames, HeartbeatOptions};
