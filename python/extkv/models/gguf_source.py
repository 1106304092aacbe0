"""The weights of a GGUF file, dequantised row by row into place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extkv.models.chunk_buffers import ChunkBuffers
    from extkv.models.family import Family
    from extkv.models.gguf_file import GGUFFile
    from extkv.models.weights import WeightSlot

# Dequantising takes a few times this many float32 numbers beside the result.
CHUNK_ELEMENTS = 1024 * 1024

OUTER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
INTERLEAVED = ("self_attn.q_proj", "self_attn.k_proj")


class GGUFWeights:
    """Read the weights of a GGUF file, slot by slot."""

    def __init__(self, file: GGUFFile, family: Family, head_dim: int) -> None:
        """Take an opened file of a known family."""
        self._file = file
        self._family = family
        self._head_dim = head_dim

    def describe(self, slot: WeightSlot) -> str:
        """Return what errors call the tensor of a slot."""
        return f"model file {self._file.path}: tensor {gguf_name(slot)}"

    def check(self, slot: WeightSlot) -> None:
        """Check that the tensor of a slot is there and has its shape.

        Raises:
            ModelFileError: If not.
        """
        self._file.check_tensor(gguf_name(slot), slot.shape)

    def check_rest(self, slots: Mapping[str, WeightSlot], *, is_tied: bool) -> None:  # noqa: ARG002, a tied GGUF file has no head
        """Check that the file holds no tensor that the model would ignore.

        Raises:
            ModelFileError: If there is one.
        """
        rest = set(self._file.tensor_names).difference(map(gguf_name, slots.values()))
        if rest:
            msg = (
                f"model file {self._file.path}: {len(rest)} tensors have no use in a plain "
                f"{self._family.gguf_architecture} model, first: {min(rest)}"
            )
            raise ModelFileError(msg)

    def fill(self, slot: WeightSlot, destination: torch.Tensor, _buffers: ChunkBuffers) -> None:
        """Dequantise the tensor of a slot into place.

        Raises:
            ModelFileError: If it has a quantisation the library cannot read.
        """
        name, num_rows = gguf_name(slot), slot.shape[0]
        is_matrix = slot.kind == "matrix"
        step = max(1, CHUNK_ELEMENTS // slot.shape[1]) if is_matrix else num_rows
        is_interleaved = self._family.gguf_interleaves_heads and _part_of(slot) in INTERLEAVED
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            rows = self._file.read_rows(name, first, last).to(destination.device, destination.dtype)
            if is_interleaved:
                row_ids = torch.arange(first, last, device=destination.device)
                destination.index_copy_(0, deinterleaved(row_ids, self._head_dim), rows)
            else:
                destination[first:last] = rows


def gguf_name(slot: WeightSlot) -> str:
    """Return the name that a GGUF file gives to the tensor of a slot."""
    suffix = slot.name.rpartition(".")[2]
    if slot.layer_id is None:
        return f"{OUTER_NAMES[_part_of(slot)]}.{suffix}"
    return f"blk.{slot.layer_id}.{LAYER_NAMES[_part_of(slot)]}.{suffix}"


def deinterleaved(row_ids: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return where stored query or key rows belong in Hugging Face order.

    GGUF stores the rows of a head interleaved (0, half, 1, half + 1, ...), so that neighbours
    rotate together: row `head * head_dim + 2 * pair_id + half_id` belongs at
    `head * head_dim + half_id * head_dim / 2 + pair_id`.

    Args:
        row_ids (int64, [num_rows]): Rows as stored.
        head_dim: Rows of one head.
    """
    offset = row_ids % head_dim
    return row_ids - offset + offset % 2 * (head_dim // 2) + offset // 2


def _part_of(slot: WeightSlot) -> str:
    name = slot.name.rpartition(".")[0]
    return name if slot.layer_id is None else name.removeprefix(f"model.layers.{slot.layer_id}.")
