"""Weights of a model in the one layout that the decoder runs: fused projections.

Query, key and value rows lie one after the other in `qkv_proj`, gate and up rows in
`gate_up_proj`, so that each is one matrix multiplication. A `WeightSlot` says where a published
tensor goes. Loaders fill the slots in place and never hold a second copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from extkv.errors import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extkv.models.config import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """Hold the weights of one layer; projections are [out_features, in_features].

    Attributes:
        input_norm: [hidden_size].
        qkv_proj: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], queries first.
        o_proj: [hidden_size, num_heads * head_dim].
        post_attention_norm: [hidden_size].
        gate_up_proj: [2 * intermediate_size, hidden_size], gate first.
        down_proj: [hidden_size, intermediate_size].
        q_norm: [head_dim], or None without query and key norms.
        k_norm: [head_dim], or None.
        qkv_bias: [(num_heads + 2 * num_kv_heads) * head_dim], or None.
        o_bias: [hidden_size], or None.
        gate_up_bias: [2 * intermediate_size], or None.
        down_bias: [hidden_size], or None.
    """

    input_norm: torch.Tensor
    qkv_proj: torch.Tensor
    o_proj: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """Hold the weights of a model, all of one dtype on one device.

    Attributes:
        embedding: [vocab_size, hidden_size].
        layers: One entry per layer.
        final_norm: [hidden_size].
        lm_head: [vocab_size, hidden_size]; the embedding itself where the two are tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return every weight once, those outside the layers first."""
        tensors = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors += [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return tensors


SlotKind = Literal["matrix", "norm", "bias"]


@dataclass(frozen=True)
class WeightSlot:
    """Say where one published tensor goes.

    Attributes:
        name: Its name in a Hugging Face checkpoint.
        shape: Its shape.
        kind: What it is used as.
        layer_id: Layer it belongs to, None outside the layers.
        field: Field of `LayerWeights` or `ModelWeights` that holds it.
        first_row: Its first row in that field.
    """

    name: str
    shape: tuple[int, ...]
    kind: SlotKind
    layer_id: int | None
    field: str
    first_row: int = 0

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


def weight_slots(config: ModelConfig) -> Iterator[WeightSlot]:
    """Yield a slot for every tensor of a model, the embedding first, then layer by layer."""
    table = (config.vocab_size, config.hidden_size)
    yield WeightSlot("model.embed_tokens.weight", table, "matrix", None, "embedding")
    for layer_id in range(config.num_layers):
        yield from _layer_slots(config, layer_id)
    yield WeightSlot("model.norm.weight", table[1:], "norm", None, "final_norm")
    if not config.tie_word_embeddings:
        yield WeightSlot("lm_head.weight", table, "matrix", None, "lm_head")


def count_parameters(config: ModelConfig) -> int:
    """Return the number of weights of a model; a tied head counts once."""
    layers = sum(slot.num_elements for slot in _layer_slots(config, 0))
    num_tables = 1 if config.tie_word_embeddings else 2
    outside = (num_tables * config.vocab_size + 1) * config.hidden_size
    return outside + config.num_layers * layers


def slot_view(weights: ModelWeights, slot: WeightSlot) -> torch.Tensor:
    """Return the contiguous part of the weights that a slot names."""
    owner = weights if slot.layer_id is None else weights.layers[slot.layer_id]
    whole: torch.Tensor = getattr(owner, slot.field)
    return whole.narrow(0, slot.first_row, slot.shape[0])


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Return weights of undefined content.

    Raises:
        OutOfMemoryError: If they do not fit on the device.
    """
    try:
        return _allocate(config, dtype, device)
    # A full CUDA device raises a subclass of RuntimeError, a full host RuntimeError itself.
    except RuntimeError as error:
        requested = count_parameters(config) * dtype.itemsize
        msg = f"cannot allocate {requested:,} bytes of weights on {device}: {error}"
        raise OutOfMemoryError(msg, requested=requested) from error


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    def empty(slots: Iterable[WeightSlot]) -> dict[str, torch.Tensor]:
        shapes = {}
        for slot in slots:
            # The slots of a field come in ascending rows, so the last one sets its length.
            shapes[slot.field] = (slot.first_row + slot.shape[0], *slot.shape[1:])
        return {
            field: torch.empty(shape, dtype=dtype, device=device) for field, shape in shapes.items()
        }

    outside = empty(slot for slot in weight_slots(config) if slot.layer_id is None)
    layers = tuple(
        LayerWeights(**empty(_layer_slots(config, layer_id)))
        for layer_id in range(config.num_layers)
    )
    outside.setdefault("lm_head", outside["embedding"])
    return ModelWeights(layers=layers, **outside)


def _layer_slots(config: ModelConfig, layer_id: int) -> Iterator[WeightSlot]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    qkv = {"q": q_rows, "k": kv_rows, "v": kv_rows}

    def norm(name: str, field: str, width: int = hidden) -> WeightSlot:
        full_name = f"model.layers.{layer_id}.{name}.weight"
        return WeightSlot(full_name, (width,), "norm", layer_id, field)

    yield norm("input_layernorm", "input_norm")
    has_bias = config.attention_bias
    yield from _fused_slots(layer_id, "self_attn", "qkv", qkv, hidden, has_bias=has_bias)
    if config.qk_norm:
        yield norm("self_attn.q_norm", "q_norm", config.head_dim)
        yield norm("self_attn.k_norm", "k_norm", config.head_dim)
    yield from _fused_slots(layer_id, "self_attn", "o", {"o": hidden}, q_rows, has_bias=has_bias)
    yield norm("post_attention_layernorm", "post_attention_norm")
    gate_up, has_bias = {"gate": mlp, "up": mlp}, config.mlp_bias
    yield from _fused_slots(layer_id, "mlp", "gate_up", gate_up, hidden, has_bias=has_bias)
    yield from _fused_slots(layer_id, "mlp", "down", {"down": hidden}, mlp, has_bias=has_bias)


def _fused_slots(
    layer_id: int, group: str, fused: str, parts: dict[str, int], width: int, *, has_bias: bool
) -> Iterator[WeightSlot]:
    """Yield the slots of projections whose rows, by name, lie one after the other."""
    first = 0
    for part, rows in parts.items():
        name = f"model.layers.{layer_id}.{group}.{part}_proj"
        shape = (rows, width)
        yield WeightSlot(f"{name}.weight", shape, "matrix", layer_id, f"{fused}_proj", first)
        if has_bias:
            yield WeightSlot(f"{name}.bias", (rows,), "bias", layer_id, f"{fused}_bias", first)
        first += rows
