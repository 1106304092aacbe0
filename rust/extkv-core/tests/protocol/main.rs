//! The wire of vLLM's EngineCore: golden bytes, malformed input, round trips.

mod golden;
mod small_messages;
