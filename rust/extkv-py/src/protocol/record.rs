//! Native classes around messages: getters, construction from keywords, text, equality.

use extkv_core::protocol::coordinator::EngineLoad;
use extkv_core::protocol::logprobs::SamplingMaskLists;
use extkv_core::protocol::multimodal::{
    BatchedField, FlatField, MultiModalFieldElem, PlaceholderRange, SharedField,
};
use extkv_core::protocol::pooling::{LateChunkingParams, LateInteractionParams};
use extkv_core::protocol::request::{KvHintAction, KvHintsEnvelope};
use extkv_core::protocol::sampling::RepetitionDetectionParams;
use extkv_core::protocol::stats::{
    CudaGraphStat, DebugPerfStats, KvCacheEvictionEvent, PerfStats, PrefixCacheStats,
    RequestSpecDecodeMetrics, SchedulerIterationDetails, SpecDecodingStats,
};
use extkv_core::protocol::{
    CoordinatorNews, EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse,
    EngineCoreRequest, EngineHandshakeMetadata, EngineZmqAddresses, HandshakeMessage,
    KvEventsConfig, LogprobsLists, LogprobsTensors, LoraFields, MultiModalFeatureSpec,
    PoolingParams, PrefillStats, Record, RequestError, SamplingParams, SchedulerStats, StartDpWave,
    StructuredOutputsFields, UtilityCall, UtilityOutput,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pyclass::CompareOp;
use pyo3::types::{PyBool, PyDict};

/// Refuses keywords that are no field.
pub(super) fn check_keywords(record: &dyn Record, keywords: &Bound<'_, PyDict>) -> PyResult<()> {
    let known = record.parts();
    for keyword in keywords.keys() {
        let name: String = keyword.extract()?;
        if !known.iter().any(|(field, _)| *field == name) {
            let text = format!("{} has no field {name:?}", record.name());
            return Err(PyTypeError::new_err(text));
        }
    }
    Ok(())
}

/// The answer to `==` and `!=`; messages have no order.
pub(super) fn equality(py: Python<'_>, is_equal: bool, compare: CompareOp) -> Py<PyAny> {
    match compare {
        CompareOp::Eq => PyBool::new(py, is_equal).to_owned().into_any().unbind(),
        CompareOp::Ne => PyBool::new(py, !is_equal).to_owned().into_any().unbind(),
        _ => py.NotImplemented(),
    }
}

/// The text of a message: its class, and the fields that differ from their default.
pub(super) fn text_of(
    object: &Bound<'_, PyAny>,
    record: &dyn Record,
    default: &dyn Record,
) -> PyResult<String> {
    let mut fields = Vec::new();
    for ((name, part), (_, usual)) in record.parts().iter().zip(default.parts()) {
        if format!("{part:?}") != format!("{usual:?}") {
            fields.push(format!("{name}={}", object.getattr(*name)?.repr()?));
        }
    }
    Ok(format!("{}({})", object.get_type().name()?, fields.join(", ")))
}

macro_rules! field_table {
    ($($Record:ident),* $(,)?) => {
        /// The fields of a message of this name.
        pub(super) fn fields_of(name: &str) -> Option<Vec<&'static str>> {
            let names = |record: &dyn Record| {
                record.parts().into_iter().map(|(field, _)| field).collect()
            };
            match name {
                $(stringify!($Record) => Some(names(&<$Record>::default())),)*
                _ => None,
            }
        }
    };
}

field_table! {
    BatchedField, CoordinatorNews, CudaGraphStat, DebugPerfStats, EngineCoreEvent,
    EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest,
    EngineHandshakeMetadata, EngineLoad, EngineZmqAddresses, FlatField, HandshakeMessage,
    KvCacheEvictionEvent, KvEventsConfig, KvHintAction, KvHintsEnvelope, LateChunkingParams,
    LateInteractionParams, LogprobsLists, LogprobsTensors, LoraFields, MultiModalFeatureSpec,
    MultiModalFieldElem, PerfStats, PlaceholderRange, PoolingParams, PrefillStats,
    PrefixCacheStats, RepetitionDetectionParams, RequestError, RequestSpecDecodeMetrics,
    SamplingMaskLists, SamplingParams, SchedulerIterationDetails, SchedulerStats, SharedField,
    SpecDecodingStats, StartDpWave, StructuredOutputsFields, UtilityCall, UtilityOutput,
}
