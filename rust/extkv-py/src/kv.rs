//! KV cache specs, layouts and plans: pure arithmetic, too short to leave the interpreter for.

mod cache_plan;
mod layout;
mod spec;

pub(crate) use cache_plan::{PyCachePlan, PyLayer, hybrid_layers};
pub(crate) use layout::PyLayout;
pub(crate) use spec::{DtypeArg, PyKvSpec, common_block_bytes, dtype_of};
