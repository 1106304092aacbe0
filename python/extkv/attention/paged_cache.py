"""Attention of a packed batch over the blocks of a `KVCache`.

The model hands each layer's new keys and values here; they are stored at their slots and attended
over through block tables. On CUDA the Triton kernels do both, on the host their PyTorch twins;
`host_cache` gives the same on the host, and faster.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from extkv.kv import FullAttentionSpec, Layer, SlidingWindowSpec
from extkv.op_modules import op_module

if TYPE_CHECKING:
    from extkv.engine.batch import StepInputs
    from extkv.kv import KVCache, KVSpec
    from extkv.models.config import ModelConfig


def cache_layers(
    config: ModelConfig, block_size: int, dtype: torch.dtype, *, prefix: str = "layers"
) -> list[Layer]:
    """Return what a model caches, one layer per decoder layer, keys and values split."""
    layers = []
    for layer_id in range(config.num_layers):
        window = config.layer_window(layer_id)
        spec: KVSpec
        if window is None:
            spec = FullAttentionSpec(block_size, config.num_kv_heads, config.head_dim, dtype)
        else:
            spec = SlidingWindowSpec(
                block_size, config.num_kv_heads, config.head_dim, dtype, window=window
            )
        layers.append(Layer(f"{prefix}.{layer_id}", spec))
    return layers


def layer_caches(
    cache: KVCache, num_layers: int, *, prefix: str = "layers"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each of `cache_layers` in a cache.

    Each is [num_blocks, block_size, num_kv_heads, head_dim]; they keep their addresses when the
    cache grows or shrinks.
    """
    tensors = cache.tensors()
    caches = []
    for layer_id in range(num_layers):
        tensor = tensors[f"{prefix}.{layer_id}"]
        if isinstance(tensor, list):
            raise TypeError("attention layers have one tensor")
        caches.append((tensor[0], tensor[1]))
    return caches


class NullCache:
    """Attention that stores and reads nothing: the shapes and memory of a step without a cache."""

    has_sliding_windows = True

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return zeros of the query's shape."""
        del layer_id, key, value
        return torch.zeros(query.shape, dtype=query.dtype, device=query.device)


class PagedCache:
    """Keys and values of a model's layers in blocks; `bind` a step's inputs before a forward pass.

    Args:
        cache: Holds the layers `prefix.0` and so on.
        config: The model's shape.
        max_num_seqs: Most sequences of a step.
        max_model_len: Most tokens of a sequence.
        max_query_len: Most new tokens per sequence in steps that decode.
        prefix: Of the layers' names.
        is_causal: Whether a token sees the new tokens before it only, and not all of its sequence.
    """

    has_sliding_windows = True

    def __init__(
        self,
        cache: KVCache,
        config: ModelConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_query_len: int = 1,
        prefix: str = "layers",
        is_causal: bool = True,
    ) -> None:
        self._config = config
        self._is_causal = is_causal
        self._caches = layer_caches(cache, config.num_layers, prefix=prefix)
        self._ops = _ops_for(cache.device)
        self._scale = config.head_dim**-0.5
        self._is_cuda = cache.device.type == "cuda"
        self._num_processors = 1
        if self._is_cuda:
            properties = torch.cuda.get_device_properties(cache.device)
            self._num_processors = properties.multi_processor_count
        self._max_model_len, self._max_query_len = max_model_len, max_query_len
        self._inputs: StepInputs | None = None
        self._num_splits = 1
        self._workspace: torch.Tensor | None = None
        if self._is_cuda:
            self._workspace = self._split_workspace(max_num_seqs, max_query_len)

    def append(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the keys and values of all layers, apart from a forward pass.

        Args:
            keys (model dtype, [num_layers, num_tokens, num_kv_heads, head_dim]): Only heads are
                contiguous.
            values (model dtype, [num_layers, num_tokens, num_kv_heads, head_dim]): Likewise.
            slot_mapping (int64, [num_tokens]): Target slot of each token, negative to skip it.
        """
        for key, value, caches in zip(keys, values, self._caches, strict=True):
            self._ops.kv_append(key, value, *caches, slot_mapping)

    def _split_workspace(self, max_num_seqs: int, max_query_len: int) -> torch.Tensor:
        """Allocate the workspace of decode steps of any batch, before graphs are captured."""
        num_heads, head_dim = self._config.num_heads, self._config.head_dim
        sizes = [
            self._ops.decode_workspace_size(
                num_seqs * max_query_len, num_heads, head_dim, self._splits(num_seqs)
            )
            for num_seqs in range(1, max_num_seqs + 1)
        ]
        device = self._caches[0][0].device
        return torch.empty(max(1, *sizes), dtype=torch.float32, device=device)

    def bind(self, inputs: StepInputs) -> None:
        """Use these inputs in the next forward pass; a captured graph keeps using them."""
        self._inputs = inputs
        # A graph has room for more sequences than its tokens fill with whole windows.
        num_tokens, num_seqs = inputs.positions.shape[0], inputs.seq_lens.shape[0]
        num_filled = -(-num_tokens // max(inputs.max_query_len, 1))
        self._num_splits = self._splits(min(num_seqs, num_filled))

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values, then attend; see `AttentionCache.attend`."""
        inputs = self._inputs
        if inputs is None:
            raise RuntimeError("bind comes before a forward pass")
        key_cache, value_cache = self._caches[layer_id]
        self._ops.kv_append(key, value, key_cache, value_cache, inputs.slot_mapping)
        options = {
            "query_start_loc": inputs.query_start_loc,
            "seq_lens": inputs.seq_lens,
            "block_table": inputs.block_table,
            "scale": self._scale,
            "sliding_window": self._config.layer_window(layer_id),
            "is_causal": self._is_causal,
        }
        attended: torch.Tensor
        if inputs.max_query_len <= self._max_query_len and self._is_cuda:
            attended = self._ops.decode_attention(
                query,
                key_cache,
                value_cache,
                **options,
                max_query_len=inputs.max_query_len,
                num_splits=self._num_splits,
                workspace=self._workspace,
            )
        else:
            attended = self._ops.paged_attention(query, key_cache, value_cache, **options)
        return attended

    def _splits(self, num_seqs: int) -> int:
        if not self._is_cuda:
            return 1
        return int(
            self._ops.choose_num_splits(
                num_seqs,
                self._config.num_kv_heads,
                self._max_model_len,
                self._num_processors,
            )
        )


def _ops_for(device: torch.device) -> SimpleNamespace:
    """Collect the operations for a device; Triton is imported on CUDA only."""
    ops = SimpleNamespace()
    for name in ("kv_append", "paged_attention", "decode_attention"):
        vars(ops).update(vars(op_module(device, name)))
    return ops
