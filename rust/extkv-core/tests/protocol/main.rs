//! The wire of vLLM's EngineCore: golden bytes, malformed input, round trips.

mod golden;
mod large_messages;
mod small_messages;
