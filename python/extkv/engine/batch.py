"""The inputs of a step as persistent device tensors, filled from a plan.

All tensors are allocated once, at their largest size, before graphs are captured: a graph reads the
same addresses in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from extkv.engine.config import EngineConfig
    from extkv.engine.scheduling import StepPlan


@dataclass(frozen=True)
class StepInputs:
    """Views of the persistent tensors for one step.

    Attributes:
        token_ids (int64, [num_tokens], device): Tokens to feed.
        positions (int64, [num_tokens], device): Position of each in its sequence.
        slot_mapping (int64, [num_tokens], device): Cache slot of each; negative to skip it.
        query_start_loc (int32, [num_seqs + 1], device): First token of each sequence.
        seq_lens (int32, [num_seqs], device): Tokens of each sequence, this step's included.
        block_table (int32, [num_seqs, max_blocks], device): Blocks of each sequence.
        sample_rows (int64, [num_rows], device): Tokens whose logits are wanted.
        max_query_len: Most tokens that one sequence feeds.
        max_seq_len: Length of the longest sequence.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    sample_rows: torch.Tensor
    max_query_len: int
    max_seq_len: int


class InputBuffers:
    """Persistent input tensors of an engine, and pinned host copies to fill them from."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._device = device
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        width = config.max_blocks_per_seq
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": ((num_tokens,), torch.int64),
            "positions": ((num_tokens,), torch.int64),
            "slot_mapping": ((num_tokens,), torch.int64),
            "query_start_loc": ((num_seqs + 1,), torch.int32),
            "seq_lens": ((num_seqs,), torch.int32),
            "block_table": ((num_seqs, width), torch.int32),
            "sample_rows": ((num_seqs,), torch.int64),
        }
        is_cuda = device.type == "cuda"
        self._device_tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        self._host_tensors = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=True)
            if is_cuda
            else self._device_tensors[name]
            for name, (shape, dtype) in shapes.items()
        }

    def fill(self, plan: StepPlan, *, padded_seqs: int | None = None) -> StepInputs:
        """Upload a plan and return views of it.

        Args:
            plan: The step.
            padded_seqs: For a decode step: number of sequences of the graph that replays it. The
                rows past the plan's feed token 0, store nothing and read nothing.
        """
        num_seqs, num_tokens = len(plan.seq_lens), len(plan.input_token_ids)
        rows = num_seqs if padded_seqs is None else padded_seqs
        tokens = num_tokens if padded_seqs is None else padded_seqs
        width = plan.block_tables.shape[1]
        # Placeholders of drafts are no tokens; they are rejected whatever they embed to.
        self._put("token_ids", np.maximum(plan.input_token_ids, 0), tokens, 0)
        self._put("positions", plan.positions, tokens, 0)
        self._put("slot_mapping", plan.slot_mapping, tokens, -1)
        # Every row of a decode step, padded or not, feeds one token.
        starts = plan.query_start_loc if padded_seqs is None else np.arange(padded_seqs + 1)
        self._put("query_start_loc", starts, rows + 1, 0)
        self._put("seq_lens", plan.seq_lens, rows, 0)
        table = self._host_tensors["block_table"]
        table[:num_seqs, :width] = torch.from_numpy(plan.block_tables)
        self._put("sample_rows", plan.sample_rows, len(plan.sample_rows), 0)
        return self._upload(plan, rows, tokens)

    def worst_case(self) -> StepInputs:
        """Return inputs of as many tokens and sequences as a step can have.

        They store nothing and, with sequences of length 0, read nothing.
        """
        tensors = self._blank()
        num_tokens, num_seqs = tensors["token_ids"].shape[0], tensors["seq_lens"].shape[0]
        starts = torch.arange(num_seqs + 1) * num_tokens // num_seqs
        tensors["query_start_loc"].copy_(starts)
        return StepInputs(
            **tensors, max_query_len=-(-num_tokens // num_seqs), max_seq_len=num_tokens
        )

    def decode_views(self, num_seqs: int) -> StepInputs:
        """Return the views that a decode graph of `num_seqs` sequences reads.

        Their content is that of a batch that stores nothing and reads nothing.
        """
        tensors = self._blank()
        size = tensors["query_start_loc"].shape[0]
        tensors["query_start_loc"].copy_(torch.arange(size))
        return StepInputs(
            token_ids=tensors["token_ids"][:num_seqs],
            positions=tensors["positions"][:num_seqs],
            slot_mapping=tensors["slot_mapping"][:num_seqs],
            query_start_loc=tensors["query_start_loc"][: num_seqs + 1],
            seq_lens=tensors["seq_lens"][:num_seqs],
            block_table=tensors["block_table"][:num_seqs],
            sample_rows=tensors["sample_rows"][:num_seqs],
            max_query_len=1,
            max_seq_len=tensors["block_table"].shape[1],
        )

    def _blank(self) -> dict[str, torch.Tensor]:
        """Set the device tensors to a batch that stores nothing and, of length 0, reads nothing."""
        tensors = self._device_tensors
        for name in ("token_ids", "positions", "seq_lens", "block_table"):
            tensors[name].zero_()
        tensors["slot_mapping"].fill_(-1)
        return tensors

    def _put(self, name: str, values: np.ndarray, size: int, padding: int) -> None:
        host = self._host_tensors[name]
        count = len(values)
        host[:count] = torch.from_numpy(np.ascontiguousarray(values))
        host[count:size] = padding

    def _upload(self, plan: StepPlan, rows: int, tokens: int) -> StepInputs:
        sizes = {
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "query_start_loc": rows + 1,
            "seq_lens": rows,
            "block_table": rows,
            "sample_rows": len(plan.sample_rows),
        }
        views = {}
        for name, size in sizes.items():
            views[name] = self._device_tensors[name][:size]
            if self._device.type == "cuda":
                views[name].copy_(self._host_tensors[name][:size], non_blocking=True)
        return StepInputs(
            **views,
            max_query_len=int(plan.num_scheduled_tokens.max(initial=1)),
            max_seq_len=int(plan.seq_lens.max(initial=1)),
        )
