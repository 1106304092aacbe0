//! Growable device memory for LLM engines: reserve the address range first, commit later.
//!
//! | layer | module | knows |
//! |---|---|---|
//! | drivers | [`driver`] | how one device reserves, creates, maps and unmaps |
//! | memory | [`memory`] | reservations, segments, growth that happens whole or not at all |
//! | layouts | [`kv`], [`dtype`] | which block lies where, how many blocks fit: pure arithmetic |
//! | wire | [`protocol`] | the bytes of vLLM's EngineCore messages |
//! | transport | [`transport`] | EngineCore's sockets, both ends |
//! | values | [`units`], [`error`] | sizes with units, every failure as data |
//!
//! `kv` and `protocol` know neither of the layers above it; `memory` sees only the trait [`driver::VmmDriver`]. Nothing here knows Python or torch.

pub mod driver;
pub mod dtype;
pub mod error;
#[cfg(feature = "test-util")]
pub mod fuzzing;
pub mod kv;
pub mod memory;
pub mod protocol;
pub mod transport;
pub mod units;

pub use error::{DriverError, Error, ProbeError, Result};
