"""Parts of requests: constraints, adapters, pooling, multimodal inputs, hints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from extkv.protocol.enums import RequestOutputKind
from extkv.protocol.record import Message

if TYPE_CHECKING:
    from extkv.protocol.arrays import Tensor

MultiModalField = Union["MultiModalBatchedField", "MultiModalSharedField", "MultiModalFlatField"]
NestedTensors = Union["Tensor", int, float, "list[NestedTensors]"]
NestedSlices = Union[slice, "list[NestedSlices]"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StructuredOutputsParams(Message):
    """A constraint on text. Exactly one of the constraints must be set.

    `json` is a schema as text or as a dict; `_backend` names the library that applies it.
    """

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    _backend: str | None = None
    _backend_was_auto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepetitionDetectionParams(Message):
    """When repeated text ends a request; a longest pattern of 0 looks for none."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LateInteractionParams(Message):
    """How late-interaction scores share a query."""

    mode: str
    query_key: str
    query_uses: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LateChunkingParams(Message):
    """Mean pooling over chunks of tokens (0.33 and later)."""

    chunk_size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolingParams(Message):
    """Parameters of a request that wants an embedding, a class or a score."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: dict[str, object] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    late_chunking_params: LateChunkingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoRARequest(Message):
    """The adapter that a request asks for: number at least 1, path not empty."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, object] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceholderRange(Message):
    """The prompt positions of one input; `is_embed` (bool, [length]) picks among them."""

    offset: int
    length: int
    is_embed: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalBatchedField(Message):
    """The tensors of several inputs go along a new first dimension."""

    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalSharedField(Message):
    """One tensor stands for `batch_size` inputs."""

    batch_size: int
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalFlatField(Message):
    """The tensors of several inputs follow each other in dimension `dim`."""

    slices: NestedSlices
    dim: int = 0
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalFieldElem(Message):
    """One named part of an input."""

    data: NestedTensors | None
    field: MultiModalField


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalFeatureSpec(Message):
    """One multimodal input; `data` is None if the engine should have it cached."""

    data: dict[str, MultiModalFieldElem] | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvHintAction(Message):
    """One action that an orchestrator asks of the KV cache."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvHintsEnvelope(Message):
    """Hints for the KV cache of one request."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]
