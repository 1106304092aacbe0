"""Weights of a drafter: where each published tensor goes, and what is derived from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from extkv.errors import OutOfMemoryError
from extkv.models.weights import LayerWeights, ModelWeights, WeightSlot, slot_view, weight_slots

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from extkv.models.config import ModelConfig
    from extkv.models.dspark.config import DSparkConfig

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"
# Fields of `DSparkWeights.backbone` that may be the target's own tensors.
SHAREABLE = {EMBEDDING: "embedding", LM_HEAD: "lm_head"}


@dataclass(frozen=True)
class DSparkWeights:
    """Hold the weights of a drafter, all of one dtype on one device.

    Attributes:
        backbone: The decoder. `embedding` is [vocab_size, hidden_size], `lm_head`
            [num_draft_tokens, hidden_size].
        fc: [hidden_size, num_taps * hidden_size], taps in the order of `tap_layer_ids`.
        hidden_norm: [hidden_size].
        markov_w1: [vocab_size, markov_rank], by target token; None without a Markov head.
        markov_w2: [num_draft_tokens, markov_rank], or None.
        gate_proj: [markov_rank, hidden_size + markov_rank], for a gated head.
        gate_bias: [markov_rank], for a gated head.
        joint_proj: [3 * markov_rank, 2 * markov_rank + hidden_size], for an RNN head.
        joint_bias: [3 * markov_rank], for an RNN head.
        confidence_proj: [1, confidence_size], or None without a confidence head.
        confidence_bias: [1], or None.
        target_ids (int64, [num_draft_tokens]): Target token of each draft token, ascending; None
            where draft tokens are target tokens.
        shared: Names of the tensors that are the target's, `embed_tokens.weight` and
            `lm_head.weight`.
    """

    backbone: ModelWeights
    fc: torch.Tensor
    hidden_norm: torch.Tensor
    markov_w1: torch.Tensor | None = None
    markov_w2: torch.Tensor | None = None
    gate_proj: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    joint_proj: torch.Tensor | None = None
    joint_bias: torch.Tensor | None = None
    confidence_proj: torch.Tensor | None = None
    confidence_bias: torch.Tensor | None = None
    target_ids: torch.Tensor | None = None
    shared: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        """Bytes of the drafter's own weights, without those that are the target's."""
        own = {id(tensor): tensor for _, tensor in self.tensors()}
        for name in self.shared:
            own.pop(id(getattr(self.backbone, SHAREABLE[name])), None)
        return sum(tensor.nbytes for tensor in own.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor with the name of its field, layers as `layers.0.qkv_proj`."""
        yield from _tensors_of(self)
        yield from _tensors_of(self.backbone)
        for layer_id, layer in enumerate(self.backbone.layers):
            yield from ((f"layers.{layer_id}.{name}", value) for name, value in _tensors_of(layer))


def _tensors_of(owner: object) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(owner).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def drafter_slots(config: DSparkConfig) -> Iterator[WeightSlot]:
    """Yield a slot for every tensor of a drafter, by its published name.

    The embedding comes first and the head second: a file may leave them out.
    """
    backbone = config.backbone
    hidden = backbone.hidden_size
    yield WeightSlot(EMBEDDING, (backbone.vocab_size, hidden), "matrix", None, "embedding")
    yield WeightSlot(LM_HEAD, (config.num_draft_tokens, hidden), "matrix", None, "lm_head")
    yield WeightSlot("fc.weight", (hidden, config.num_taps * hidden), "matrix", None, "fc")
    yield WeightSlot("hidden_norm.weight", (hidden,), "norm", None, "hidden_norm")
    for slot in weight_slots(backbone):
        if slot.field not in ("embedding", "lm_head"):
            yield dataclasses.replace(slot, name=slot.name.removeprefix("model."))
    yield from _markov_slots(config)
    if config.has_confidence_head:
        shape = (1, config.confidence_size)
        yield WeightSlot("confidence_head.proj.weight", shape, "matrix", None, "confidence_proj")
        if config.confidence_has_bias:
            yield WeightSlot(CONFIDENCE_BIAS, (1,), "bias", None, "confidence_bias")


def _markov_slots(config: DSparkConfig) -> Iterator[WeightSlot]:
    rank, hidden = config.markov_rank, config.backbone.hidden_size
    if rank == 0:
        return
    tables = {"w1": config.backbone.vocab_size, "w2": config.num_draft_tokens}
    for name, rows in tables.items():
        field = f"markov_{name}"
        yield WeightSlot(f"markov_head.{field}.weight", (rows, rank), "matrix", None, field)
    projections = {"gated": ("gate", rank, hidden + rank), "rnn": ("joint", 3 * rank, None)}
    if config.markov_head_type in projections:
        name, rows, width = projections[config.markov_head_type]
        shape = (rows, 2 * rank + hidden if width is None else width)
        prefix = f"markov_head.{name}_proj"
        yield WeightSlot(f"{prefix}.weight", shape, "matrix", None, f"{name}_proj")
        yield WeightSlot(f"{prefix}.bias", (rows,), "bias", None, f"{name}_bias")


def drafter_slot_view(weights: DSparkWeights, slot: WeightSlot) -> torch.Tensor:
    """Return the contiguous part of the weights that a slot names."""
    is_own = slot.layer_id is None and slot.field in vars(weights)
    if is_own:
        whole: torch.Tensor = getattr(weights, slot.field)
        return whole
    return slot_view(weights.backbone, slot)


def allocate_drafter_weights(
    config: DSparkConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shared: dict[str, torch.Tensor] | None = None,
    target_ids: torch.Tensor | None = None,
    is_tied: bool = False,
) -> DSparkWeights:
    """Return weights of undefined content.

    Args:
        config: Shape of the drafter.
        dtype: Dtype of the weights.
        device: Where they are.
        shared: Tensors to use instead of allocating, by published name.
        target_ids: See `DSparkWeights`.
        is_tied: Whether the head is the embedding.

    Raises:
        OutOfMemoryError: If they do not fit on the device.
    """
    given = shared or {}
    is_own = {EMBEDDING: EMBEDDING not in given, LM_HEAD: LM_HEAD not in given and not is_tied}
    own = [slot for slot in drafter_slots(config) if is_own.get(slot.name, True)]
    try:
        fields = _empty(own, dtype, device)
    # A full CUDA device raises a subclass of RuntimeError, a full host RuntimeError itself.
    except RuntimeError as error:
        requested = sum(slot.num_elements for slot in own) * dtype.itemsize
        msg = f"cannot allocate {requested:,} bytes of drafter weights on {device}: {error}"
        raise OutOfMemoryError(msg, requested=requested) from error
    outside = fields.pop(None)
    outside |= {SHAREABLE[name]: tensor for name, tensor in given.items()}
    embedding = outside.pop("embedding")
    backbone = ModelWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(**fields[layer_id]) for layer_id in range(config.backbone.num_layers)
        ),
        final_norm=outside.pop("final_norm"),
        lm_head=outside.pop("lm_head", embedding),
    )
    return DSparkWeights(
        backbone=backbone, **outside, target_ids=target_ids, shared=frozenset(given)
    )


def _empty(
    slots: Iterable[WeightSlot], dtype: torch.dtype, device: torch.device
) -> dict[int | None, dict[str, torch.Tensor]]:
    """Return memory for each field, by layer and name."""
    shapes: dict[int | None, dict[str, tuple[int, ...]]] = {}
    for slot in slots:
        # The slots of a field come in ascending rows, so the last one sets its length.
        rows = slot.first_row + slot.shape[0]
        shapes.setdefault(slot.layer_id, {})[slot.field] = (rows, *slot.shape[1:])
    return {
        layer_id: {
            field: torch.empty(shape, dtype=dtype, device=device) for field, shape in owned.items()
        }
        for layer_id, owned in shapes.items()
    }


def stack_context_projection(
    config: ModelConfig, layers: Collection[LayerWeights]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy the key and value rows of all layers into one projection.

    Args:
        config: The drafter's backbone.
        layers: Its layers.

    Returns:
        Weight ([num_layers * 2 * num_kv_heads * head_dim, hidden_size], keys of layer 0, values of
        layer 0, keys of layer 1, ...), and the bias of the same rows or None.

    Raises:
        OutOfMemoryError: If the copy does not fit on the device.
    """
    first = config.num_heads * config.head_dim
    weights = [layer.qkv_proj[first:] for layer in layers]
    biases = [layer.qkv_bias[first:] for layer in layers if layer.qkv_bias is not None]
    try:
        return torch.cat(weights), torch.cat(biases) if biases else None
    except RuntimeError as error:
        requested = sum(weight.nbytes for weight in weights)
        msg = f"cannot allocate {requested:,} bytes for the context's projection: {error}"
        raise OutOfMemoryError(msg, requested=requested) from error
