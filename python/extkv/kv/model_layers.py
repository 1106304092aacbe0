"""From the shape of a model to the layers of its cache, grouped as vLLM groups them.

Layers of one kind have a buffer each. Where kinds differ (full attention beside sliding windows or
recurrent state), a buffer is a pool: one layer of each group takes blocks of it, under block ids of
its own. All blocks of a pool have the same bytes, so attention blocks are made as long as a state
needs and states are padded to them. In vLLM: `_get_kv_cache_groups_uniform_page_size` in
vllm/v1/core/kv_cache_utils.py at 001cabc, `HybridAttentionMambaModelConfig` in
vllm/model_executor/models/config.py at 0144dd5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError
from extkv.kv.layout import Layer, hybrid_layers
from extkv.kv.model.attention import LatentAttention
from extkv.kv.spec import MambaSpec, MLASpec, SlidingWindowSpec

if TYPE_CHECKING:
    from extkv.kv.model.shape import ModelShape
    from extkv.kv.spec import KVSpec

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
DEFAULT_BLOCK_SIZE = 16
# FlashMLA reads latents in blocks of 64 tokens.
LATENT_BLOCK_SIZE = 64
# Attention kernels take blocks of a multiple of 16 tokens.
BLOCK_SIZE_STEP = 16
# A group may be padded if the largest kind has at most this share more layers than the smallest.
PADDED_GROUP_RATIO = 1.5


@dataclass(frozen=True)
class CacheSettings:
    """What decides a cache beside the model.

    Attributes:
        dtype: Torch's name of the model's dtype.
        max_model_len: Tokens of the longest request.
        state_dtype: Torch's name of the dtype of recurrent state; None for the model's.
        kv_cache_dtype: ``"auto"`` for the model's dtype, ``"fp8"``, or ``"fp8_ds_mla"`` for MLA.
        block_size: Tokens per block; None for 16, or 64 with latent attention. Attention beside
            recurrent state gets longer blocks where a state needs them.
        tensor_parallel_size: Ranks that share each layer.

    Raises:
        InvalidArgumentError: If a number is not positive or the cache dtype is not known.
    """

    dtype: str
    max_model_len: int
    state_dtype: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Check what the core does not."""
        for name in ("max_model_len", "block_size", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(f"{name} must be at least 1, got {value}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidArgumentError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got "
                f"{self.kv_cache_dtype!r:.80}"
            )


@dataclass(frozen=True)
class CacheKind:
    """Layers that cache the same.

    Attributes:
        kind: What they cache, in words.
        num_layers: How many there are.
        bytes_per_block: Bytes of one of their blocks, padding included.
        unpadded_bytes: The same without padding.
    """

    kind: str
    num_layers: int
    bytes_per_block: int
    unpadded_bytes: int


def cache_layers(shape: ModelShape, settings: CacheSettings) -> list[Layer]:
    """Return the layers of the cache that one rank holds, those of a pool together.

    Raises:
        InvalidArgumentError: If the ranks do not divide the heads, or the cache dtype does not
            suit the model's attention.
        LayoutError: If layers that must share a pool cannot.
    """
    states = _state_specs(shape, settings)
    block_size = _block_size(shape, settings, states)
    layers = []
    for index, layer in enumerate(shape.layers):
        if layer.attention is not None:
            spec = layer.attention.spec(
                block_size, settings.dtype, settings.kv_cache_dtype, settings.tensor_parallel_size
            )
            layers.append(Layer(f"layers.{index}.attention", spec))
        if index in states:
            layers.append(Layer(f"layers.{index}.recurrent", states[index]))
    return _pooled(_one_size(hybrid_layers(layers)))


def cache_kinds(layers: list[Layer]) -> tuple[CacheKind, ...]:
    """Count the layers that cache the same."""
    kinds = _by_spec(layers)
    return tuple(_cache_kind(spec, len(of_kind)) for spec, of_kind in kinds.items())


def _cache_kind(spec: KVSpec, num_layers: int) -> CacheKind:
    unpadded = spec
    if isinstance(spec, MambaSpec):
        unpadded, kind = replace(spec, padded_bytes=None), "recurrent state"
    elif isinstance(spec, MLASpec):
        kind = "latent attention"
    elif isinstance(spec, SlidingWindowSpec):
        kind = f"attention over {spec.window} tokens"
    else:
        kind = "full attention"
    return CacheKind(kind, num_layers, spec.bytes_per_block, unpadded.bytes_per_block)


def _state_specs(shape: ModelShape, settings: CacheSettings) -> dict[int, MambaSpec]:
    """States of each recurrent layer by its index; checks the number of ranks on the way."""
    num_ranks, specs = settings.tensor_parallel_size, {}
    for index, layer in enumerate(shape.layers):
        if layer.attention is not None:
            layer.attention.check_ranks(num_ranks)
        if layer.recurrent is not None:
            layer.recurrent.check_ranks(num_ranks)
            state_dtype = settings.state_dtype or settings.dtype
            states = layer.recurrent.states(settings.dtype, state_dtype, num_ranks)
            specs[index] = MambaSpec(settings.max_model_len, states)
    return specs


def _block_size(shape: ModelShape, settings: CacheSettings, states: dict[int, MambaSpec]) -> int:
    """Tokens per block: what was asked, or more where an attention block must hold a state."""
    attention = [layer.attention for layer in shape.layers if layer.attention is not None]
    is_latent = any(isinstance(part, LatentAttention) for part in attention)
    asked = settings.block_size or (LATENT_BLOCK_SIZE if is_latent else DEFAULT_BLOCK_SIZE)
    if not attention or not states:
        return asked
    state_bytes = max(spec.bytes_per_block for spec in states.values())
    step_bytes = min(
        part.spec(
            BLOCK_SIZE_STEP,
            settings.dtype,
            settings.kv_cache_dtype,
            settings.tensor_parallel_size,
        ).bytes_per_block
        for part in attention
    )
    return max(asked, BLOCK_SIZE_STEP * -(-state_bytes // step_bytes))


def _one_size(layers: list[Layer]) -> list[Layer]:
    """Pad states to the largest block where attention and recurrent layers share pools."""
    is_state = [isinstance(layer.spec, MambaSpec) for layer in layers]
    if all(is_state) or not any(is_state):
        return layers
    block_bytes = max(layer.spec.bytes_per_block for layer in layers)
    pairs = zip(layers, is_state, strict=True)
    return [layer.padded_to(block_bytes) if pads else layer for layer, pads in pairs]


def _by_spec(layers: list[Layer]) -> dict[KVSpec, list[Layer]]:
    kinds: dict[KVSpec, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.spec, []).append(layer)
    return kinds


def _pooled(layers: list[Layer]) -> list[Layer]:
    kinds = _by_spec(layers)
    if len(kinds) < 2:  # noqa: PLR2004, one kind shares with nobody
        return layers
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    group_size = most if most < PADDED_GROUP_RATIO * fewest else fewest
    groups = []
    for of_kind in kinds.values():
        num_groups = -(-len(of_kind) // group_size)
        groups += [of_kind[first::num_groups] for first in range(num_groups)]
    found = []
    for index in range(group_size):
        owner, *others = [group[index] for group in groups if index < len(group)]
        found += [owner, *(layer.sharing_pool(owner.name) for layer in others)]
    return found
