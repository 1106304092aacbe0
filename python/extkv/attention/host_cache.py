"""Attention of a packed batch over the blocks of a `KVCache` in host memory.

What depends on the step and not on the layer (slots, masks, which sequences go together) is
computed once, in `bind`. Sequences that decode are attended together, padded to the longest of
their group by repeating a token of their own: no slot outside a sequence is read. Memory is bounded
by a few thousand gathered tokens or one sequence, whichever is more, and not by the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from extkv.attention.paged_cache import layer_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extkv.engine.batch import StepInputs
    from extkv.kv import KVCache
    from extkv.models.config import ModelConfig

# Most tokens, padding included, that a group of several sequences gathers.
GROUP_TOKENS = 4096
# Most new tokens of a sequence whose heads become rows; the mask is repeated for each head.
FOLDED_TOKENS = 16
# A group may be padded to this multiple of its tokens; short sequences always go together.
MAX_PADDING_RATIO = 1.5
SHORT_TOKENS = 64


@dataclass(frozen=True)
class _Group:
    """Sequences that one call attends, with equally many new tokens each.

    Attributes:
        rows: Their tokens in the packed batch.
        num_seqs: Number of sequences.
        slots: Cache slots of their keys, sequence after sequence; a slice where they lie one after
            the other; None where all keys are among the step's own.
        mask (model dtype, [num_seqs or 1, 1, rows, num_keys]): Added to the scores; a row per new
            token, and where heads become rows, per head of a KV head too.
        is_causal: Whether row i of the new tokens sees the first i + 1 keys; without a mask.
        is_folded: Whether the heads of one KV head become rows of it, so that its keys are read
            once.
    """

    rows: slice | torch.Tensor
    num_seqs: int
    slots: slice | torch.Tensor | None
    mask: torch.Tensor | None = None
    is_causal: bool = False
    is_folded: bool = False


class HostPagedCache:
    """Keys and values of all layers in blocks; `bind` a step's inputs before a forward pass."""

    has_sliding_windows = True

    def __init__(
        self,
        cache: KVCache,
        config: ModelConfig,
        *,
        prefix: str = "layers",
        is_causal: bool = True,
    ) -> None:
        """View the cache; its tensors keep their addresses when it grows or shrinks.

        Args:
            cache: A cache of `cache_layers` in host memory.
            config: Shape of the model.
            prefix: Of the layers' names.
            is_causal: Whether a token sees the new tokens before it only, and not all of its
                sequence.
        """
        self._is_causal = is_causal
        self._heads_per_kv = config.num_heads // config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._windows = [config.layer_window(index) for index in range(config.num_layers)]
        caches = layer_caches(cache, config.num_layers, prefix=prefix)
        self._block_size = caches[0][0].shape[1]
        # Each is [num_slots, num_kv_heads * head_dim].
        self._caches = [
            (keys.flatten(0, 1).flatten(1), values.flatten(0, 1).flatten(1))
            for keys, values in caches
        ]
        self._dtype = self._caches[0][0].dtype
        self._slots: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None
        self._groups: dict[int | None, list[_Group]] = {}
        self._is_whole = False
        self._gathered = (torch.empty(0), torch.empty(0))

    def bind(self, inputs: StepInputs) -> None:
        """Prepare the next forward pass over these inputs."""
        self._slots, self._kept = _kept_slots(inputs.slot_mapping)
        starts, seq_lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        self._groups = {
            window: list(self._plan(starts, seq_lens, inputs.block_table, window))
            for window in dict.fromkeys(self._windows)
        }
        num_tokens = inputs.token_ids.shape[0]
        self._is_whole = _num_attended(starts, seq_lens) == num_tokens

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values, then attend; see `AttentionCache.attend`."""
        self._append(layer_id, key, value)
        groups = self._groups[self._windows[layer_id]]
        if self._is_whole and len(groups) == 1 and isinstance(groups[0].rows, slice):
            return self._attend(layer_id, groups[0], query, key, value)
        new = torch.empty if self._is_whole else torch.zeros
        out = new(query.shape, dtype=query.dtype)
        for group in groups:
            rows = group.rows
            out[rows] = self._attend(layer_id, group, query[rows], key[rows], value[rows])
        return out

    def append(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the keys and values of all layers; see `PagedCache.append`."""
        slots, kept = _kept_slots(slot_mapping)
        for caches, key, value in zip(self._caches, keys, values, strict=True):
            _store(caches, key, value, slots, kept)

    def _append(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._slots is None:
            raise RuntimeError("bind comes before a forward pass")
        _store(self._caches[layer_id], key, value, self._slots, self._kept)

    def _attend(
        self,
        layer_id: int,
        group: _Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention output of a group's tokens, given their own rows."""
        num_seqs, num_tokens = group.num_seqs, query.shape[0]
        num_kv_heads, head_dim = key.shape[1:]
        if group.slots is not None:
            key, value = self._gather(layer_id, group.slots)
        keys, values = (
            part.view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2) for part in (key, value)
        )
        if num_tokens == num_seqs:
            rows = query.view(num_seqs, num_kv_heads, -1, head_dim)
        elif group.is_folded:
            heads = query.view(num_tokens, num_kv_heads, -1, head_dim)
            rows = heads.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        else:
            rows = query.view(num_seqs, -1, *query.shape[1:]).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            rows,
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=self._scale,
            enable_gqa=num_tokens != num_seqs and not group.is_folded,
        )
        if group.is_folded:
            attended = attended.view(num_kv_heads, num_tokens, -1, head_dim).transpose(0, 1)
        elif num_tokens != num_seqs:
            attended = attended.transpose(1, 2)
        return attended.reshape(query.shape)

    def _gather(
        self, layer_id: int, slots: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of slots, valid until the next call."""
        keys, values = self._caches[layer_id]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        count = slots.shape[0]
        if self._gathered[0].shape[0] < count:
            shape = (count + count // 4, keys.shape[1])
            self._gathered = (
                torch.empty(shape, dtype=self._dtype),
                torch.empty(shape, dtype=self._dtype),
            )
        gathered_keys, gathered_values = (part[:count] for part in self._gathered)
        torch.index_select(keys, 0, slots, out=gathered_keys)
        torch.index_select(values, 0, slots, out=gathered_values)
        return gathered_keys, gathered_values

    def _plan(
        self,
        starts: list[int],
        seq_lens: list[int],
        block_table: torch.Tensor,
        window: int | None,
    ) -> Iterator[_Group]:
        """Divide a step's sequences into groups."""
        decoding = []
        for seq, seq_len in enumerate(seq_lens):
            query_len = starts[seq + 1] - starts[seq]
            if query_len == 1 and seq_len > 0 and self._is_causal:
                decoding.append(seq)
            elif query_len > 0 and seq_len > 0:
                rows = slice(starts[seq], starts[seq + 1])
                yield self._chunk(rows, seq_len, block_table[seq], window)
        visible = {seq: min(seq_lens[seq], window or seq_lens[seq]) for seq in decoding}
        for members in group_by_length(visible):
            index = torch.tensor(members)
            tokens = [starts[seq] for seq in members]
            is_run = tokens == list(range(tokens[0], tokens[0] + len(tokens)))
            together = slice(tokens[0], tokens[-1] + 1) if is_run else torch.tensor(tokens)
            ends = torch.tensor([seq_lens[seq] for seq in members])[:, None]
            yield self._decoding(together, ends, block_table.index_select(0, index), window)

    def _decoding(
        self,
        rows: slice | torch.Tensor,
        ends: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,
    ) -> _Group:
        """Group sequences of one new token each.

        Args:
            rows: Their tokens.
            ends (int64, [num_seqs, 1]): Their lengths.
            block_table (int32, [num_seqs, max_blocks]): Their blocks.
            window: Number of keys that a token sees; None for all.
        """
        begins = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
        num_keys = int((ends - begins).max())
        positions = begins + torch.arange(num_keys)
        is_padding = positions >= ends
        slots = self._slots_of(positions.minimum(ends - 1), block_table)
        if not bool(is_padding.any()):
            return _Group(rows, len(ends), slots)
        mask = torch.zeros(is_padding.shape, dtype=self._dtype)
        mask.masked_fill_(is_padding, -torch.inf)
        return _Group(rows, len(ends), slots, mask[:, None, None])

    def _chunk(self, rows: slice, seq_len: int, blocks: torch.Tensor, window: int | None) -> _Group:
        """Take several new tokens of one sequence."""
        query_len = rows.stop - rows.start
        is_whole = query_len == seq_len and (window is None or window >= seq_len)
        if is_whole and self._is_causal:
            return _Group(rows, 1, None, is_causal=True)
        is_folded = 1 < query_len <= FOLDED_TOKENS
        begin = 0
        if window is not None:
            # Without causality all rows see the same keys, as many as fit the first row's window.
            begin = max(seq_len - query_len - window + int(self._is_causal), 0)
        positions = torch.arange(begin, seq_len)
        slots = self._slots_of(positions[None], blocks[None])
        if not self._is_causal:
            return _Group(rows, 1, slots, is_folded=is_folded)
        last = positions[-query_len:, None]
        is_hidden = positions > last
        if window is not None:
            is_hidden |= positions <= last - window
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype).masked_fill_(is_hidden, -torch.inf)
        if is_folded:
            mask = mask.repeat_interleave(self._heads_per_kv, 0)
        return _Group(rows, 1, slots, mask[None, None], is_folded=is_folded)

    def _slots_of(self, positions: torch.Tensor, block_table: torch.Tensor) -> slice | torch.Tensor:
        """Return cache slots of positions.

        Args:
            positions (int64, [num_seqs, num_keys]): Ascending in each row.
            block_table (int32, [num_seqs, max_blocks]): Blocks of each row.

        Returns:
            Tensor (int64, [num_seqs * num_keys]), or a slice where one sequence's lie in order.
        """
        blocks = block_table.gather(1, positions // self._block_size)
        slots = (blocks * self._block_size + positions % self._block_size).flatten()
        first, last = int(slots[0]), int(slots[-1])
        if (
            len(positions) == 1
            and last - first == len(slots) - 1
            and bool((slots.diff() == 1).all())
        ):
            return slice(first, last + 1)
        return slots


def _kept_slots(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the slots of the rows that have one, and those rows; None for all of them."""
    is_kept = slot_mapping >= 0
    if bool(is_kept.all()):
        return slot_mapping, None
    kept = is_kept.nonzero()[:, 0]
    return slot_mapping.index_select(0, kept), kept


def _store(
    caches: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    kept: torch.Tensor | None,
) -> None:
    """Store rows of a layer, or the kept ones of them, at slots."""
    for cache, rows in zip(caches, (key, value), strict=True):
        stored = rows if kept is None else rows.index_select(0, kept)
        cache.index_copy_(0, slots, stored.flatten(1))


def group_by_length(lengths: dict[int, int]) -> list[list[int]]:
    """Divide sequences into groups that waste little when padded to their longest.

    Args:
        lengths: Keys of each sequence.

    Returns:
        Groups of sequences, each in ascending order.
    """
    if not lengths:
        return []
    if _is_dense(len(lengths), sum(lengths.values()), max(lengths.values())):
        return [list(lengths)]
    groups: list[list[int]] = [[]]
    total = 0
    for seq in sorted(lengths, key=lambda seq: lengths[seq]):
        total += lengths[seq]
        # Lengths ascend, so this one is the longest.
        if not _is_dense(len(groups[-1]) + 1, total, lengths[seq]):
            groups.append([])
            total = lengths[seq]
        groups[-1].append(seq)
    return [sorted(group) for group in groups]


def _is_dense(num_seqs: int, num_tokens: int, longest: int) -> bool:
    """Whether sequences may be padded to the longest of them."""
    padded = num_seqs * longest
    if num_seqs > 1 and padded > GROUP_TOKENS:
        return False
    return longest <= SHORT_TOKENS or padded <= MAX_PADDING_RATIO * num_tokens


def _num_attended(starts: list[int], seq_lens: list[int]) -> int:
    """Count the tokens of sequences that have keys."""
    return sum(starts[seq + 1] - starts[seq] for seq, seq_len in enumerate(seq_lens) if seq_len > 0)
