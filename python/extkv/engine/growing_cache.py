"""KV cache of one sequence in host memory that grows block by block as the text grows.

Keys and values of all layers share one reservation of `2 * num_layers` segments: segment `2 *
layer_id` holds keys, the next one values. Token `t` of a segment starts at byte `t * num_kv_heads *
head_dim * itemsize`. Only blocks up to `num_blocks` are committed; the views cover the full
capacity and never move, so nothing is copied when the cache grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import extkv
from extkv.errors import CapacityError, FreedError, InvalidArgumentError
from extkv.models.attention import causal_attention

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from extkv.models.config import LlamaConfig

DEFAULT_BLOCK_SIZE = 16


class GrowingKVCache:
    """Hold keys and values of one sequence and attend over them.

    A forward pass is one `extend`, which makes room for the new tokens, and then one `attend` (or
    `append`) per layer, which fills it.

    Example:
        >>> with GrowingKVCache(config, max_model_len=8192, dtype=torch.float32) as cache:
        ...     cache.extend(len(token_ids))  # doctest: +SKIP
        ...     hidden = model.forward(token_ids, positions, cache)
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> None:
        """Reserve address space for `max_model_len` tokens and commit one block.

        Args:
            config: Gives the number of layers and the size of a token.
            max_model_len: Most tokens the cache can hold.
            dtype: Dtype of keys and values.
            block_size: Tokens per block, the unit of growth.

        Raises:
            InvalidArgumentError: If `block_size` is not positive, or `max_model_len` is not between
                1 and the model's context length.
            OutOfMemoryError: If the first block does not fit.
        """
        if block_size < 1:
            msg = f"block_size is {block_size}, expected at least 1"
            raise InvalidArgumentError(msg)
        if not 1 <= max_model_len <= config.context_length:
            msg = (
                f"max_model_len is {max_model_len}, expected 1 to the model's context length "
                f"{config.context_length}"
            )
            raise InvalidArgumentError(msg)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._num_tokens = 0
        self._num_new_tokens = 0
        token_shape = (config.num_kv_heads, config.head_dim)
        self._block_bytes = block_size * token_shape[0] * token_shape[1] * dtype.itemsize
        max_num_blocks = -(-max_model_len // block_size)
        num_segments = 2 * config.num_layers
        self._memory = extkv.ExtensibleTensor(
            num_segments * max_num_blocks * self._block_bytes, "cpu", num_segments
        )
        # Positions are always written before they are read, so new bytes need no zeroing.
        self._memory.resize_per_segment_(self._block_bytes)
        shape = (max_num_blocks * block_size, *token_shape)
        views = [
            self._memory.view(dtype, shape, segment=segment, full=True)
            for segment in range(num_segments)
        ]
        self._keys, self._values = views[0::2], views[1::2]

    @property
    def num_tokens(self) -> int:
        """Number of tokens the cache has room made for; `extend` raises it."""
        return self._num_tokens

    @property
    def num_blocks(self) -> int:
        """Number of blocks committed in each segment."""
        return self._memory.bytes_per_segment // self._block_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address space reserved."""
        return self._memory.capacity_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes of physical memory committed."""
        return self._memory.physical_bytes

    @property
    def base_ptr(self) -> int:
        """Address of the first key; the same for the life of the cache."""
        return self._memory.base_ptr

    def extend(self, num_new_tokens: int) -> None:
        """Make room for the next tokens, committing blocks where they do not fit. All or nothing.

        Args:
            num_new_tokens: Number of tokens of the next forward pass.

        Raises:
            InvalidArgumentError: If `num_new_tokens` is not positive.
            CapacityError: If the sequence would be longer than `max_model_len`.
            OutOfMemoryError: If the blocks do not fit in memory; the cache is as before.
            FreedError: If the cache is closed.
        """
        self._require_open()
        if num_new_tokens < 1:
            msg = f"num_new_tokens is {num_new_tokens}, expected at least 1"
            raise InvalidArgumentError(msg)
        num_tokens = self._num_tokens + num_new_tokens
        if num_tokens > self.max_model_len:
            msg = (
                f"cannot hold {num_tokens} tokens, {self._num_tokens} cached and "
                f"{num_new_tokens} new: max_model_len is {self.max_model_len}"
            )
            raise CapacityError(msg)
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks > self.num_blocks:
            self._memory.resize_per_segment_(num_blocks * self._block_bytes)
        self._num_tokens = num_tokens
        self._num_new_tokens = num_new_tokens

    def append(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values of the tokens that the last `extend` made room for.

        Args:
            layer_id: Layer, counted from 0.
            key (cache dtype, [num_new_tokens, num_kv_heads, head_dim]): Copied.
            value (cache dtype, [num_new_tokens, num_kv_heads, head_dim]): Copied.

        Raises:
            InvalidArgumentError: If the number of tokens is not that of the last `extend`.
            FreedError: If the cache is closed.
        """
        self._require_open()
        if not key.shape[0] == value.shape[0] == self._num_new_tokens:
            msg = (
                f"got keys of {key.shape[0]} and values of {value.shape[0]} tokens, "
                f"room was made for {self._num_new_tokens}"
            )
            raise InvalidArgumentError(msg)
        start = self._num_tokens - self._num_new_tokens
        self._keys[layer_id][start : self._num_tokens] = key
        self._values[layer_id][start : self._num_tokens] = value

    def keys_values(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all cached tokens of a layer.

        Returns:
            Two views (cache dtype, [num_tokens, num_kv_heads, head_dim]) of the cache's memory.
            Rows that were not appended yet hold no meaning.

        Raises:
            FreedError: If the cache is closed.
        """
        self._require_open()
        return self._keys[layer_id][: self._num_tokens], self._values[layer_id][: self._num_tokens]

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values and return the attention output (see `AttentionCache`)."""
        self.append(layer_id, key, value)
        return causal_attention(query, *self.keys_values(layer_id))

    def close(self) -> None:
        """Give the memory back; a view that the caller still holds defers that to its end."""
        self._keys, self._values = [], []
        self._memory.free()

    def __enter__(self) -> Self:
        """Return the cache itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the cache."""
        self.close()

    def _require_open(self) -> None:
        if self._memory.closed:
            msg = "the KV cache is closed"
            raise FreedError(msg)
