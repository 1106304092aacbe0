//! The wire of vLLM's EngineCore: golden bytes, malformed input, round trips.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail by panicking")]

mod golden;
mod large_messages;
mod malformed;
mod pack;
mod round_trips;
mod small_messages;
mod tolerance;
