"""Write the keys and values of new tokens into a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store one key and one value per token; see `extkv.kernels.kv_append.kv_append`.

    Raises:
        IndexError: If a slot lies past the cache.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    blocks, positions = slots // block_size, slots % block_size
    key_cache[blocks, positions] = key[kept]
    value_cache[blocks, positions] = value[kept]
