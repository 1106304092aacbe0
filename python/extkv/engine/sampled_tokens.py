"""What a step chose, on its way from the device to the host: one buffer, one copy.

The buffer is int32: token ids (two numbers each), flags, then one line per row that wants
log-probabilities: rank, likeliest tokens, and the bits of the chosen token's and their logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.engine.sampling_slots import upload
from extkv.outputs import RowLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Bounds the memory of log-probabilities, which are as large as the logits in float32.
_LOGPROB_ROWS = 64
# A bit of `RowFlag` in kernels and reference.
HAS_NAN = 1


@dataclass(frozen=True)
class SampledTokens:
    """Hold what a step chose, on the host.

    Attributes:
        token_ids: The token of each row; None where none could be chosen.
        failures: The reason for each row without a token.
        logprobs: Log-probabilities of each row that wants them and has a token.
    """

    token_ids: list[int | None]
    failures: dict[int, str]
    logprobs: dict[int, RowLogprobs]

    @property
    def windows(self) -> list[list[int]]:
        """The one token of each row, 0 where none could be chosen."""
        return [[0 if token is None else token] for token in self.token_ids]

    @property
    def window_logprobs(self) -> dict[int, list[RowLogprobs]]:
        """Log-probabilities of each row's one token."""
        return {row: [entry] for row, entry in self.logprobs.items()}


class PendingTokens:
    """Hold what a step chose, on the device.

    Attributes:
        token_ids (int64, [num_rows], device): Token of each row; not to be used where `wait`
            reports a failure.
        flags (int32, [num_rows], device): `RowFlag` bits of each row.
        masked_failures: Why a row has no mask of its grammar.
    """

    def __init__(
        self, num_rows: int, num_logprobs: Mapping[int, int], device: torch.device
    ) -> None:
        """Allocate the buffer.

        Args:
            num_rows: Rows of the step.
            num_logprobs: For each row with log-probabilities, how many likeliest tokens it wants.
            device: Where the results are.
        """
        self._num_logprobs = dict(num_logprobs)
        self._num_top = max(num_logprobs.values(), default=0)
        size = 3 * num_rows + len(num_logprobs) * line_len(self._num_top)
        self._buffer = torch.empty(size, dtype=torch.int32, device=device)
        self.token_ids = self._buffer[: 2 * num_rows].view(torch.int64)
        self.flags = self._buffer[2 * num_rows : 3 * num_rows]
        self._copy: HostCopy | None = None
        self.masked_failures: Mapping[int, str] = {}

    def add_logprobs(self, logits: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Fill in the log-probabilities.

        Args:
            logits (float, [num_rows, vocab_size], device): As the model made them.
            rows (int64, [n], device): Rows that want them; None if all do.
        """
        lines = self._buffer[3 * self.flags.shape[0] :].view(-1, line_len(self._num_top))
        write_logprobs(logits, rows, self.token_ids, lines)

    def start_copy(self) -> None:
        """Start the copy to the host, when all is filled in."""
        self._copy = HostCopy(self._buffer)

    def wait(self) -> SampledTokens:
        """Wait for the copy to the host."""
        assert self._copy is not None
        host = self._copy.wait()
        num_rows = self.flags.shape[0]
        tokens: list[int | None] = host[: 2 * num_rows].view(torch.int64).tolist()
        flags = host[2 * num_rows : 3 * num_rows].tolist()
        failures = {row: failure_reason(flag) for row, flag in enumerate(flags) if flag}
        failures.update(self.masked_failures)
        for row in failures:
            tokens[row] = None
        lines = host[3 * num_rows :].view(-1, line_len(self._num_top))
        chosen = [tokens[row] or 0 for row in self._num_logprobs]
        entries = read_logprobs(lines, chosen, list(self._num_logprobs.values()))
        logprobs = dict(zip(self._num_logprobs, entries, strict=True))
        for row in failures:
            logprobs.pop(row, None)
        return SampledTokens(tokens, failures, logprobs)


class PendingLogprobs:
    """Log-probabilities of given tokens, on their way to the host."""

    def __init__(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> None:
        """Compute them and start the copy; see `Sampler.prompt_logprobs`."""
        self._token_ids, self._num_top = list(token_ids), num_top
        shape = (len(token_ids), line_len(num_top))
        lines = torch.empty(shape, dtype=torch.int32, device=logits.device)
        chosen = upload(np.array(self._token_ids, np.int64), logits.device)
        write_logprobs(logits, None, chosen, lines)
        self._copy = HostCopy(lines)

    def wait(self) -> list[RowLogprobs]:
        """Wait for the copy and return one entry per row."""
        num_tops = [self._num_top] * len(self._token_ids)
        return read_logprobs(self._copy.wait(), self._token_ids, num_tops)


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start the copy on the current stream."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host, once the copy is done."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def write_logprobs(
    logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, lines: torch.Tensor
) -> None:
    """Write a line per row: rank, likeliest tokens, bits of the logarithms.

    Args:
        logits (float, [num_rows, vocab_size], device): As the model made them.
        rows (int64, [n], device): Rows to look at; None for all.
        token_ids (int64, [num_rows], device): The chosen tokens.
        lines (int32, [n, 2 * num_top + 2], device): Receives the result.
    """
    num_top = lines.shape[1] // 2 - 1
    for start in range(0, lines.shape[0], _LOGPROB_ROWS):
        part = slice(start, start + _LOGPROB_ROWS)
        index = part if rows is None else rows[part]
        logprobs = logits[index].to(torch.float32).log_softmax(1)
        chosen = logprobs.gather(1, token_ids[index, None])
        top = logprobs.topk(num_top, dim=1)
        lines[part, 0] = (logprobs > chosen).sum(1) + 1
        lines[part, 1 : num_top + 1] = top.indices
        lines.view(torch.float32)[part, num_top + 1 :] = torch.cat([chosen, top.values], dim=1)


def read_logprobs(
    lines: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[RowLogprobs]:
    """Read lines that `write_logprobs` wrote, on the host.

    Args:
        lines (int32, [n, 2 * num_top + 2], host): The lines.
        token_ids: The chosen token of each.
        num_tops: How many of the likeliest tokens to keep of each.
    """
    middle = lines.shape[1] // 2
    numbers = lines[:, :middle].tolist()
    logprobs = lines.view(torch.float32)[:, middle:].tolist()
    return [
        RowLogprobs(token_id, values[0], rank, top[:num_top], values[1 : num_top + 1])
        for token_id, num_top, (rank, *top), values in zip(
            token_ids, num_tops, numbers, logprobs, strict=True
        )
    ]


def line_len(num_top: int) -> int:
    """Return the int32 numbers of a line with so many likeliest tokens."""
    return 2 * num_top + 2


def failure_reason(flag: int) -> str:
    """Say why no token could be chosen from a row with these `RowFlag` bits."""
    if flag & HAS_NAN:
        return "the logits hold NaN"
    return "no token can be chosen: every logit is -inf"
