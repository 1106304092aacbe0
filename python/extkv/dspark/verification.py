"""Verify a step's drafts: each window's rows are changed as its request wants, then judged.

A window is the token decided last and the drafts after it. Every row has the penalties, masks and
cut-offs that it would have if the drafts before it were output already, so the target's law is that
of decoding one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from extkv.drafting import Verification
from extkv.engine.sampled_tokens import (
    HAS_NAN,
    HostCopy,
    failure_reason,
    line_len,
    read_logprobs,
    write_logprobs,
)
from extkv.engine.sampling_slots import upload
from extkv.op_modules import op_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extkv.drafting import DraftLaw
    from extkv.dspark.options import SpeculativeOptions
    from extkv.engine.sampler import Sampler
    from extkv.outputs import RowLogprobs


class Window(NamedTuple):
    """One request of a step.

    Attributes:
        slot: Its slot in the persistent batch.
        generation: The slot's generation.
        position: Where the first token to decide will stand.
        last_token: The token before it, which the first draft was drawn after.
        drafts: Its drafts.
    """

    slot: int
    generation: int
    position: int
    last_token: int
    drafts: Sequence[int]


class PlacedRows(NamedTuple):
    """Rows of windows as the step's inputs hold them on the device; not to be changed.

    Attributes:
        token_ids (int64, [num_rows], device): Tokens of the windows.
        window_starts (int32, [num_windows + 1], device): First row of each window, and the end.
        positions (int64, [num_rows], device): Where the token after each row will stand.
    """

    token_ids: torch.Tensor
    window_starts: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class VerifiedTokens:
    """Hold what a step decided, on the host.

    Attributes:
        windows: Tokens of each window: accepted drafts, and the one after them. That one is not to
            be used where a failure is named.
        failures: The reason for each window without a token.
        window_logprobs: Log-probabilities of each window that wants them, one entry per token.
    """

    windows: list[list[int]]
    failures: dict[int, str]
    window_logprobs: dict[int, list[RowLogprobs]]


@dataclass
class DraftCounts:
    """Count drafts since the engine started.

    Attributes:
        num_rounds: Windows with drafts.
        num_drafted: Drafts verified, per place in the block.
        num_accepted: Those accepted.
        num_draft_rounds: Times a batch was drafted for.
        num_verifications: Times a batch of windows was verified.
        draft_s: Seconds of drafting.
        verify_s: Seconds of deciding on drafts, after the target's step.
    """

    num_rounds: int = 0
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_draft_rounds: int = 0
    num_verifications: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one window."""
        if num_drafts == 0:
            return
        self.num_rounds += 1
        missing = num_drafts - len(self.num_drafted)
        self.num_drafted += [0] * missing
        self.num_accepted += [0] * missing
        for place in range(num_drafts):
            self.num_drafted[place] += 1
            self.num_accepted[place] += place < num_accepted

    @property
    def accepted_length(self) -> float:
        """Tokens per window with drafts, the one after the drafts included; 0 before the first."""
        return 1 + sum(self.num_accepted) / self.num_rounds if self.num_rounds else 0.0

    @property
    def draft_ms(self) -> float:
        """Milliseconds of drafting for a batch; 0 before the first time."""
        return 1e3 * self.draft_s / self.num_draft_rounds if self.num_draft_rounds else 0.0

    @property
    def verify_ms(self) -> float:
        """Milliseconds of deciding on a batch's drafts; 0 before the first time."""
        return 1e3 * self.verify_s / self.num_verifications if self.num_verifications else 0.0


class _Decision:
    """A decision in one buffer, so that one copy brings it to the host.

    Attributes:
        numbers (int32, [4 * width], device): Next tokens (two numbers each), accepted drafts,
            flags, each with padding up to `width` windows.
        width: Windows that there is room for.
        verification: The same, apart.
    """

    def __init__(self, num_windows: int, device: torch.device) -> None:
        """Allocate the buffer."""
        # Each part begins at 16 bytes, so that kernels compile once.
        self.width = width = -(-num_windows // 4) * 4
        self.numbers = torch.empty(4 * width, dtype=torch.int32, device=device)
        numbers, end = self.numbers, 2 * width + num_windows
        self.verification = Verification(
            num_accepted=numbers[2 * width : end],
            next_tokens=numbers[: 2 * num_windows].view(torch.int64),
            flags=numbers[3 * width : end + width],
        )


class PendingWindows:
    """What `Verifier.verify` decided, on its way to the host.

    Attributes:
        verification: The decision, on the device.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        decision: _Decision,
        lines: torch.Tensor | None,
        wanted: dict[int, int],
        counts: DraftCounts,
        *,
        masked_failures: Mapping[int, str],
    ) -> None:
        """Start the copy.

        Args:
            windows: The windows.
            decision: The decision.
            lines (int32, [n, line], device): Log-probabilities of the rows of the windows that
                want them, in order.
            wanted: Windows with log-probabilities, and how many likeliest tokens each wants.
            counts: Receives what was accepted.
            masked_failures: Why a row has no mask of its grammar.
        """
        self._masked_failures = masked_failures
        self.verification = decision.verification
        self._counts = counts
        self._windows, self._wanted = windows, wanted
        numbers = decision.numbers
        if lines is not None:
            numbers = torch.cat([numbers, lines.flatten()])
        self._width, self._line_len = decision.width, 0 if lines is None else lines.shape[1]
        self._copy = HostCopy(numbers)

    def wait(self) -> VerifiedTokens:
        """Wait for the copy to the host."""
        host = self._copy.wait()
        count, width = len(self._windows), self._width
        numbers = host.numpy()
        following = numbers[: 2 * count].view(np.int64).tolist()
        accepted = numbers[2 * width :][:count].tolist()
        flags = numbers[3 * width :][:count].tolist()
        for window, num in zip(self._windows, accepted, strict=True):
            self._counts.add(len(window.drafts), num)
        token_ids = [
            [*window.drafts[:num], token]
            for window, num, token in zip(self._windows, accepted, following, strict=True)
        ]
        failures = {row: failure_reason(flag) for row, flag in enumerate(flags) if flag}
        failures.update(self._failures_of_masks(accepted))
        logprobs = self._logprobs(host[4 * width :], token_ids) if self._wanted else {}
        for row in failures:
            logprobs.pop(row, None)
        return VerifiedTokens(token_ids, failures, logprobs)

    def _failures_of_masks(self, accepted: Sequence[int]) -> dict[int, str]:
        """Return the failures of windows that decided a token without a mask."""
        failures: dict[int, str] = {}
        start = 0
        for index, (window, num) in enumerate(zip(self._windows, accepted, strict=True)):
            # Where a row has no mask, those after it have none.
            if start + num in self._masked_failures:
                failures[index] = self._masked_failures[start + num]
            start += 1 + len(window.drafts)
        return failures

    def _logprobs(
        self, numbers: torch.Tensor, token_ids: list[list[int]]
    ) -> dict[int, list[RowLogprobs]]:
        lines = numbers.view(-1, self._line_len)
        start, found = 0, {}
        for row, num_top in self._wanted.items():
            chosen = token_ids[row]
            end = start + len(chosen)
            found[row] = read_logprobs(lines[start:end], chosen, [num_top] * len(chosen))
            start += 1 + len(self._windows[row].drafts)
        return found


class Verifier:
    """Decide how many drafts of each window stand, and the token after them."""

    def __init__(self, sampler: Sampler, options: SpeculativeOptions, *, num_drafts: int) -> None:
        """Take the sampler whose slots the requests are in.

        Args:
            sampler: The sampler.
            options: How to verify.
            num_drafts: Most drafts of a window.
        """
        self._sampler = sampler
        self._method = options.rejection_sample_method
        self._num_drafts = num_drafts
        self.counts = DraftCounts()
        self._rejection = op_module(sampler.device, "rejection")
        rates = options.synthetic_acceptance_rates
        self._rates: torch.Tensor | None = None
        if rates is not None:
            self._rates = torch.tensor(rates[:num_drafts], device=sampler.device)

    @torch.inference_mode()
    def verify(
        self,
        logits: torch.Tensor,
        windows: Sequence[Window],
        law: DraftLaw | None,
        placed: PlacedRows | None = None,
    ) -> PendingWindows:
        """Verify the windows of a step.

        Args:
            logits (float, [num_rows, vocab_size], device): Rows of the windows, one after another.
            windows: The windows.
            law: How the drafts were drawn; None if they were chosen.
            placed: The same rows on the device, where they are there; else they are uploaded.

        Returns:
            The decision; `wait` gives it on the host.

        Raises:
            InvalidArgumentError: If a slot has another occupant, or the rows do not fit.
        """
        sampler, device = self._sampler, self._sampler.device
        rows = [(window, place) for window in windows for place in range(1 + len(window.drafts))]
        prepared = sampler.prepare(
            logits,
            [window.slot for window, _ in rows],
            [window.generation for window, _ in rows],
            [window.position + place for window, place in rows],
            [window.drafts[:place] for window, place in rows],
            device_positions=None if placed is None else placed.positions,
        )
        masks = prepared.masks
        # It looks at no law, so it must not see a draft that the grammar forbids.
        hides = masks is not None and self._method == "synthetic"
        if placed is not None and not hides:
            token_ids, window_starts = placed.token_ids, placed.window_starts
        else:
            starts = np.zeros(len(windows) + 1, np.int32)
            np.cumsum([1 + len(window.drafts) for window in windows], out=starts[1:])
            tokens = [token for window in windows for token in (window.last_token, *window.drafts)]
            if masks is not None and hides:
                tokens = [-1 if row in masks.unreachable else t for row, t in enumerate(tokens)]
            token_ids = upload(np.array(tokens, np.int64), device)
            window_starts = upload(starts, device)
        decision = _Decision(len(windows), device)
        verification = decision.verification
        parameters = prepared.parameters
        self._rejection.verify_drafts(
            prepared.logits,
            token_ids,
            window_starts,
            parameters.temperature,
            parameters.seed,
            parameters.positions,
            law,
            max_num_drafts=self._num_drafts,
            method=self._method,
            cutoff=prepared.cutoff,
            acceptance_rates=self._rates,
            out=verification,
        )
        if prepared.hidden_flags is not None:
            last = window_starts[:-1] + verification.num_accepted
            verification.flags.bitwise_or_(prepared.hidden_flags[last] & HAS_NAN)
        failures = {} if masks is None else masks.failures
        return self._pending(
            logits, windows, decision, token_ids, window_starts, masked_failures=failures
        )

    def _pending(
        self,
        logits: torch.Tensor,
        windows: Sequence[Window],
        decision: _Decision,
        token_ids: torch.Tensor,
        window_starts: torch.Tensor,
        *,
        masked_failures: Mapping[int, str],
    ) -> PendingWindows:
        """Compute log-probabilities of what was decided, and start the copy."""
        wanted: dict[int, int] = {}
        rows: list[int] = []
        start = 0
        for index, window in enumerate(windows):
            num_top = self._sampler.num_logprobs(window.slot)
            size = 1 + len(window.drafts)
            if num_top is not None:
                wanted[index] = num_top
                rows += range(start, start + size)
            start += size
        lines = None
        if wanted:
            # Row i decides the token after it: a draft, or at the end the next token.
            chosen = torch.cat([token_ids[1:], token_ids[:1]])
            made = decision.verification
            last = (window_starts[:-1] + made.num_accepted).to(torch.int64)
            chosen = chosen.scatter(0, last, made.next_tokens)
            shape = (len(rows), line_len(max(wanted.values())))
            lines = torch.empty(shape, dtype=torch.int32, device=logits.device)
            write_logprobs(logits, upload(np.array(rows, np.int64), logits.device), chosen, lines)
        return PendingWindows(
            windows, decision, lines, wanted, self.counts, masked_failures=masked_failures
        )
