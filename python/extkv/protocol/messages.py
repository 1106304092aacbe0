"""The Python class of each message and enumeration of the native codec."""

from __future__ import annotations

from extkv.protocol import control, enums, output_parts, request_parts, stats

# The codec's name of a message, if its class here has another.
_RENAMED: dict[str, type] = {
    "BatchedField": request_parts.MultiModalBatchedField,
    "CudaGraphStat": stats.CUDAGraphStat,
    "FlatField": request_parts.MultiModalFlatField,
    "KvCacheEvictionEvent": stats.KVCacheEvictionEvent,
    "KvEventsConfig": control.KVEventsConfig,
    "LoraFields": request_parts.LoRARequest,
    "SharedField": request_parts.MultiModalSharedField,
    "StructuredOutputsFields": request_parts.StructuredOutputsParams,
}
_SAME_NAME: tuple[type, ...] = (
    control.CoordinatorNews,
    control.EngineCoreReadyResponse,
    control.EngineHandshakeMetadata,
    control.EngineLoad,
    control.EngineZmqAddresses,
    control.FirstRequest,
    control.HandshakeMessage,
    control.ScaleElasticEp,
    control.StartDpWave,
    control.UtilityCall,
    enums.EngineCoreEventType,
    enums.FinishReason,
    enums.RequestOutputKind,
    enums.RequestType,
    output_parts.EngineCoreEvent,
    output_parts.LogprobsLists,
    output_parts.LogprobsTensors,
    output_parts.RequestError,
    output_parts.SamplingMaskLists,
    output_parts.UtilityOutput,
    output_parts.UtilityResult,
    request_parts.KvHintAction,
    request_parts.KvHintsEnvelope,
    request_parts.LateChunkingParams,
    request_parts.LateInteractionParams,
    request_parts.MultiModalFeatureSpec,
    request_parts.MultiModalFieldElem,
    request_parts.PlaceholderRange,
    request_parts.PoolingParams,
    request_parts.RepetitionDetectionParams,
    stats.DebugPerfStats,
    stats.PerfStats,
    stats.PrefillStats,
    stats.PrefixCacheStats,
    stats.RequestSpecDecodeMetrics,
    stats.SchedulerIterationDetails,
    stats.SchedulerStats,
    stats.SpecDecodingStats,
)
# Read by the native module: class by the codec's name.
CLASSES: dict[str, type] = _RENAMED | {cls.__name__: cls for cls in _SAME_NAME}
