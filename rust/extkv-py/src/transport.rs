//! EngineCore's transport: an engine's end and a front end's end. Waiting and coding is detached.

mod engine;
mod frontend;
mod limits;
mod outputs;
mod values;

pub(crate) use engine::PyEngineEnd;
pub(crate) use frontend::{PyCall, PyFrontEnd, PyStream};
