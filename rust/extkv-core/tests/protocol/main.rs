//! The wire of vLLM's EngineCore: golden bytes, malformed input, round trips.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by panicking")]

mod every_type;
mod golden;
mod large_messages;
mod malformed;
#[path = "../support/numbers.rs"]
mod numbers;
mod pack;
mod random_source;
mod round_trips;
mod small_messages;
mod tolerance;
