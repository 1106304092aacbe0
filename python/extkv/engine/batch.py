"""The inputs of a step as persistent device tensors, filled from a plan.

All tensors are allocated once, at their largest size, before graphs are captured: a graph reads the
same addresses in every step. The tensors of a step lie in one buffer and reach the device in one
copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from extkv.engine.config import EngineConfig
    from extkv.sched import StepPlan


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
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    sample_rows: torch.Tensor
    max_query_len: int


_DTYPES = {
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "sample_rows": torch.int64,
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    # Last: only the rows of the step's sequences are copied.
    "block_table": torch.int32,
}
_ALIGNMENT = 16


class _Staging:
    """One buffer for all inputs of steps up to a size, on the device and on the host."""

    def __init__(
        self, num_tokens: int, num_rows: int, num_seqs: int, width: int, device: torch.device
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "query_start_loc": (num_seqs + 1,),
            "seq_lens": (num_seqs,),
            "sample_rows": (num_rows,),
            "token_ids": (num_tokens,),
            "positions": (num_tokens,),
            "slot_mapping": (num_tokens,),
            "block_table": (num_seqs, width),
        }
        offset, offsets = 0, {}
        for name, shape in shapes.items():
            offsets[name] = offset
            num_bytes = math.prod(shape) * _DTYPES[name].itemsize
            offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._table_offset, self._row_bytes = offsets["block_table"], width * 4
        self._device_bytes = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._host_bytes = self._device_bytes
        if device.type == "cuda":
            self._host_bytes = torch.zeros(offset, dtype=torch.uint8, pin_memory=True)

        def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: whole[offsets[name] :][: math.prod(shape) * _DTYPES[name].itemsize]
                .view(_DTYPES[name])
                .view(shape)
                for name, shape in shapes.items()
            }

        self.tensors = views(self._device_bytes)
        self.host = {name: view.numpy() for name, view in views(self._host_bytes).items()}

    def put(self, name: str, values: npt.NDArray[np.integer], size: int, padding: int) -> None:
        """Write values on the host, and padding up to a size."""
        host = self.host[name]
        host[: len(values)] = values
        host[len(values) : size] = padding

    def upload(self, num_seqs: int) -> None:
        """Start the copy of all inputs, with the block tables of so many sequences."""
        if self._host_bytes is not self._device_bytes:
            end = self._table_offset + num_seqs * self._row_bytes
            self._device_bytes[:end].copy_(self._host_bytes[:end], non_blocking=True)

    def blank(self) -> None:
        """Set the inputs to a batch that stores nothing and, of length 0, reads nothing."""
        for name in ("token_ids", "positions", "seq_lens", "block_table"):
            self.tensors[name].zero_()
        self.tensors["slot_mapping"].fill_(-1)

    def inputs(
        self, num_tokens: int, num_seqs: int, num_rows: int, max_query_len: int
    ) -> StepInputs:
        """Return views of the device tensors."""
        tensors = self.tensors
        return StepInputs(
            token_ids=tensors["token_ids"][:num_tokens],
            positions=tensors["positions"][:num_tokens],
            slot_mapping=tensors["slot_mapping"][:num_tokens],
            query_start_loc=tensors["query_start_loc"][: num_seqs + 1],
            seq_lens=tensors["seq_lens"][:num_seqs],
            block_table=tensors["block_table"][:num_seqs],
            sample_rows=tensors["sample_rows"][:num_rows],
            max_query_len=max_query_len,
        )


class InputBuffers:
    """Persistent input tensors of an engine: a set for any step, a small one for graphs."""

    def __init__(
        self, config: EngineConfig, device: torch.device, *, max_query_len: int = 1
    ) -> None:
        """Allocate the tensors.

        Args:
            config: Limits of the engine.
            device: Where the model is.
            max_query_len: Most tokens of a sequence in a step that decodes: 1 and its drafts.
        """
        num_seqs, width = config.max_num_seqs, config.max_blocks_per_seq
        num_rows = num_seqs * max_query_len
        self.max_query_len = max_query_len
        self._any = _Staging(config.max_num_batched_tokens, num_rows, num_seqs, width, device)
        self._decode = _Staging(num_rows, num_rows, num_seqs, width, device)

    def fill(self, plan: StepPlan) -> StepInputs:
        """Upload a plan and return views of it. The step before must be done with its inputs."""
        num_seqs, num_tokens = len(plan.seq_lens), len(plan.input_token_ids)
        self._fill(self._any, plan, num_seqs, num_tokens, plan.query_start_loc)
        longest = int(plan.num_scheduled_tokens.max(initial=1))
        return self._any.inputs(num_tokens, num_seqs, len(plan.sample_rows), longest)

    def fill_decode(self, plan: StepPlan, num_tokens: int, max_query_len: int) -> StepInputs:
        """Upload a decode plan for a captured graph, and return what the graph reads.

        Args:
            plan: A step whose every sequence feeds at most `max_query_len` tokens.
            num_tokens: Tokens of the graph. Those past the plan's are 0, store nothing and read
                nothing. Sequences past the plan's have no tokens.
            max_query_len: Most tokens of a sequence in the graph.
        """
        num_seqs = self._num_graph_seqs(num_tokens)
        starts = np.full(num_seqs + 1, plan.query_start_loc[-1])
        starts[: len(plan.query_start_loc)] = plan.query_start_loc
        self._fill(self._decode, plan, num_seqs, num_tokens, starts)
        return self._decode.inputs(num_tokens, num_seqs, num_tokens, max_query_len)

    def decode_views(self, num_tokens: int, max_query_len: int) -> StepInputs:
        """Return what a graph of `num_tokens` tokens reads, as `fill_decode` does.

        Its content is that of a batch that stores nothing and reads nothing, for a graph of any
        size.
        """
        self._decode.blank()
        starts = self._decode.tensors["query_start_loc"]
        starts.copy_(torch.arange(starts.shape[0]))
        num_seqs = self._num_graph_seqs(num_tokens)
        return self._decode.inputs(num_tokens, num_seqs, num_tokens, max_query_len)

    def _num_graph_seqs(self, num_tokens: int) -> int:
        """Most sequences that a graph of so many tokens can have."""
        return min(num_tokens, self._decode.tensors["seq_lens"].shape[0])

    def worst_case(self) -> StepInputs:
        """Return inputs of as many tokens and sequences as a step can have.

        They store nothing and, with sequences of length 0, read nothing.
        """
        self._any.blank()
        tensors = self._any.tensors
        num_tokens, num_seqs = tensors["token_ids"].shape[0], tensors["seq_lens"].shape[0]
        starts = torch.arange(num_seqs + 1) * num_tokens // num_seqs
        tensors["query_start_loc"].copy_(starts)
        num_rows = min(num_tokens, num_seqs * self.max_query_len)
        return self._any.inputs(num_tokens, num_seqs, num_rows, -(-num_tokens // num_seqs))

    @staticmethod
    def _fill(
        staging: _Staging,
        plan: StepPlan,
        num_seqs: int,
        num_tokens: int,
        starts: npt.NDArray[np.integer],
    ) -> None:
        # Placeholders of drafts are no tokens; they are rejected whatever they embed to.
        staging.put("token_ids", np.maximum(plan.input_token_ids, 0), num_tokens, 0)
        staging.put("positions", plan.positions, num_tokens, 0)
        staging.put("slot_mapping", plan.slot_mapping, num_tokens, -1)
        staging.put("query_start_loc", starts, num_seqs + 1, 0)
        staging.put("seq_lens", plan.seq_lens, num_seqs, 0)
        staging.put("sample_rows", plan.sample_rows, len(plan.sample_rows), 0)
        rows, width = plan.block_tables.shape
        staging.host["block_table"][:rows, :width] = plan.block_tables
        staging.upload(num_seqs)
