"""Chooses one token per row of logits, each as its request wants it.

In vLLM's order: log-probabilities of the logits as they are; grammar, allowed tokens, bad words and
early stops, logit bias, penalties; temperature, min-p, top-k, top-p; the draw. Only what some row
needs is run. A row's token depends on its logits, parameters, seed and position, and on no other
row. Nothing here waits for the device but `wait` of what is returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from extkv.engine.sampled_tokens import HAS_NAN, PendingLogprobs, PendingTokens
from extkv.engine.sampling_slots import (
    CHANGES_LOGITS,
    HAS_CUTOFF,
    HIDES_LOGITS,
    Need,
    SlotParameters,
    SlotRequest,
    SlotState,
    pack,
    upload,
)
from extkv.errors import InvalidArgumentError
from extkv.op_modules import op_module
from extkv.resolved_sampling import ResolvedSampling
from extkv.sampling_params import MAX_LOGPROBS, SamplingParams
from extkv.structured_outputs.masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.engine.sampling_slots import RowParameters
    from extkv.structured_outputs.masks import TokenMasks

    # A row: what the host keeps of its request, its position, and the drafts before it.
    _Place = tuple[SlotState, int, Sequence[int]]


# Bounds the memory of lists of allowed tokens, which may each be as long as the vocabulary.
_ALLOWED_ROWS = 64
# As much memory: a mask has a bit where a list has a number.
_MASKED_ROWS = 32 * _ALLOWED_ROWS


class PreparedRows(NamedTuple):
    """Rows of logits, changed as their requests want.

    Attributes:
        logits (float, [num_rows, vocab_size], device): With masks, biases and penalties.
        parameters: Temperature, seed, position and the rest of each row.
        cutoff (float32, [num_rows], device): Smallest logit that may be drawn; None for no limit.
        hidden_flags (int32, [num_rows], device): `RowFlag` bits before masks; None without masks.
        masks: What the grammars allow; None without grammars.
    """

    logits: torch.Tensor
    parameters: RowParameters
    cutoff: torch.Tensor | None
    hidden_flags: torch.Tensor | None
    masks: TokenMasks | None


class Sampler:
    """Choose tokens for a persistent batch.

    Example:
        >>> sampler = Sampler(vocab_size=4, num_slots=2, device=torch.device("cpu"))
        >>> sampling = ResolvedSampling(SamplingParams(temperature=0), max_tokens=1)
        >>> sampler.enter(0, 1, SlotRequest(sampling, prompt_token_ids=[3], seed=7))
        >>> sampler.sample(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [0], [1], [1]).wait().token_ids
        [1]
    """

    def __init__(self, *, vocab_size: int, num_slots: int, device: torch.device) -> None:
        """Allocate the arrays over all slots.

        Args:
            vocab_size: Columns of the logits.
            num_slots: Slots of the persistent batch.
            device: Where the logits are: on CUDA the kernels run, elsewhere their reference.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._states: list[SlotState | None] = [None] * num_slots
        self._parameters = SlotParameters(num_slots, device)
        self._sampling = op_module(device, "sampling")
        self._penalties = op_module(device, "penalties")
        self._bitmask = op_module(device, "token_bitmask")
        self._cutoff = op_module(device, "logit_cutoff")
        self._workspace = self._new_workspace(num_slots)

    def enter(self, slot: int, generation: int, request: SlotRequest) -> None:
        """Give a slot to a request, in place of the one before."""
        self._states[slot] = SlotState(generation, request)
        self._parameters.write(slot, request)

    def append(self, slot: int, token_ids: Sequence[int]) -> None:
        """Add what a step brought to the output of a slot's request, before its next row."""
        state = self._states[slot]
        assert state is not None
        state.append(token_ids)

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        generations: Sequence[int],
        positions: Sequence[int],
        *,
        may_overwrite: bool = False,
    ) -> PendingTokens:
        """Choose the tokens of a step.

        Args:
            logits (float, [num_rows, vocab_size], device): One row per token to choose.
            slots: Slot of each row; several rows may have the same one.
            generations: Generation of each row's slot.
            positions: Where in its sequence each token will stand: the number of tokens before it.
            may_overwrite: Whether the logits are not needed any more; saves a copy of float32 ones.

        Returns:
            The tokens on the device; `wait` gives them on the host.

        Raises:
            InvalidArgumentError: If the shape does not fit, a slot has another occupant, or a row
                needs tokens before it that were not appended.
        """
        states = self._occupants(slots, generations)
        self._check_shape(logits, len(states))
        wanted = {
            row: min(state.num_logprobs, self._vocab_size)
            for row, state in enumerate(states)
            if state.num_logprobs is not None
        }
        pending = PendingTokens(len(states), wanted, self._device)
        is_kept = not may_overwrite or bool(wanted)
        self._choose(logits, states, slots, positions, pending, is_kept=is_kept)
        if wanted:
            is_all = len(wanted) == len(states)
            rows = None if is_all else upload(np.array(list(wanted), np.int64), self._device)
            pending.add_logprobs(logits, rows)
        pending.start_copy()
        return pending

    @property
    def device(self) -> torch.device:
        """Where the logits are."""
        return self._device

    def num_logprobs(self, slot: int) -> int | None:
        """Likeliest tokens that a slot's request wants reported; None for no report."""
        state = self._states[slot]
        if state is None or state.num_logprobs is None:
            return None
        return min(state.num_logprobs, self._vocab_size)

    @torch.inference_mode()
    def prepare(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        generations: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        *,
        device_positions: torch.Tensor | None = None,
    ) -> PreparedRows:
        """Change rows as their requests want, without choosing tokens.

        Args:
            logits (float, [num_rows, vocab_size], device): One row per token to choose; kept.
            slots: Slot of each row.
            generations: Generation of each row's slot.
            positions: Where in its sequence each token will stand.
            drafts: Drafts between the output and each position; they count as output.
            device_positions (int64, [num_rows], device): The positions, where they are there.

        Raises:
            InvalidArgumentError: As `sample`.
        """
        states = self._occupants(slots, generations)
        self._check_shape(logits, len(states))
        placed = list(zip(states, positions, drafts, strict=True))
        needs = 0
        for state, position, _ in placed:
            needs |= state.needs_at(position)
        where = positions if device_positions is None else device_positions
        rows = self._parameters.rows(slots, where)
        return self._prepare(logits, placed, rows, needs, is_kept=True)

    def draw_parameters(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return temperatures (float32) and seeds (int64) of slots, on the device.

        They are not to be changed; like calls return the same tensors until a slot is entered.
        """
        found = self._parameters.of(slots)
        return found["temperature"], found["seed"]

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: int
    ) -> PendingLogprobs:
        """Compute log-probabilities of prompt tokens.

        Args:
            logits (float, [num_rows, vocab_size], device): Rows of prompt positions.
            token_ids: The prompt token that follows each of them.
            num_logprobs: Likeliest tokens to report beside it.

        Returns:
            One entry per row; `wait` gives them on the host.
        """
        return PendingLogprobs(logits, token_ids, min(num_logprobs, self._vocab_size))

    def profile(self, logits: torch.Tensor, *, num_history_tokens: int) -> None:
        """Run the most expensive step over logits, so that its memory can be measured.

        Args:
            logits (float, [num_rows, vocab_size], device): As many rows as a step can have.
            num_history_tokens: Most tokens of one sequence.
        """
        params = SamplingParams(
            top_k=1 + self._vocab_size // 2,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.1,
            logprobs=MAX_LOGPROBS,
            logit_bias={0: 1.0},
            allowed_token_ids=range(self._vocab_size),
        )
        history = range(min(num_history_tokens, self._vocab_size))
        request = SlotRequest(ResolvedSampling(params, max_tokens=1), history, seed=0)
        num_rows = logits.shape[0]
        other = Sampler(vocab_size=self._vocab_size, num_slots=num_rows, device=self._device)
        state = SlotState(0, request)
        for slot in range(num_rows):
            other._states[slot] = state
            other._parameters.write(slot, request)
        rows = range(num_rows)
        other.sample(logits, rows, [0] * num_rows, [len(history)] * num_rows).wait()

    def _occupants(self, slots: Sequence[int], generations: Sequence[int]) -> list[SlotState]:
        states = []
        for slot, generation in zip(slots, generations, strict=True):
            state = self._states[slot]
            if state is None or state.generation != generation:
                found = "none" if state is None else state.generation
                msg = f"slot {slot} has generation {found}, expected {generation}"
                raise InvalidArgumentError(msg)
            states.append(state)
        return states

    def _check_shape(self, logits: torch.Tensor, num_rows: int) -> None:
        if logits.shape != (num_rows, self._vocab_size):
            msg = f"logits have {list(logits.shape)}, expected {[num_rows, self._vocab_size]}"
            raise InvalidArgumentError(msg)

    def _choose(
        self,
        logits: torch.Tensor,
        states: Sequence[SlotState],
        slots: Sequence[int],
        positions: Sequence[int],
        pending: PendingTokens,
        *,
        is_kept: bool,
    ) -> None:
        needs = 0
        for state, position in zip(states, positions, strict=True):
            needs |= state.needs_at(position)
        ops, out = self._sampling, (pending.token_ids, pending.flags)
        workspace = self._workspace_for(len(states))
        if not needs:
            ops.argmax_tokens(logits, workspace=workspace, out=out)
            return
        placed = [(state, at, ()) for state, at in zip(states, positions, strict=True)]
        rows = self._parameters.rows(slots, positions)
        prepared = self._prepare(logits, placed, rows, needs, is_kept=is_kept)
        ops.sample_tokens(
            prepared.logits,
            rows.temperature,
            rows.seed,
            rows.positions,
            cutoff=prepared.cutoff,
            workspace=workspace,
            out=out,
        )
        if prepared.hidden_flags is not None:
            pending.flags |= prepared.hidden_flags & HAS_NAN
        if prepared.masks is not None:
            pending.masked_failures = prepared.masks.failures

    def _prepare(
        self,
        logits: torch.Tensor,
        placed: Sequence[_Place],
        rows: RowParameters,
        needs: int,
        *,
        is_kept: bool,
    ) -> PreparedRows:
        hidden = masks = None
        if needs & HIDES_LOGITS:
            # A NaN under a mask is no less a broken row.
            workspace = self._workspace_for(len(placed))
            _, hidden = self._sampling.argmax_tokens(logits, workspace=workspace)
        if needs & CHANGES_LOGITS:
            logits = logits.to(torch.float32, copy=is_kept)
            if needs & Need.GRAMMAR:
                masks = self._mask_by_grammar(logits, placed)
            self._change(logits, placed, rows, needs)
        return PreparedRows(logits, rows, self._find_cutoff(logits, rows, needs), hidden, masks)

    def _mask_by_grammar(self, logits: torch.Tensor, placed: Sequence[_Place]) -> TokenMasks:
        """Make the masks while the device computes the logits, and apply them in place."""
        rows = [(state.matcher_at(at, drafts), drafts) for state, at, drafts in placed]
        masks = fill_masks(rows, self._vocab_size)
        for start in range(0, len(masks.row_ids), _MASKED_ROWS):
            part = slice(start, start + _MASKED_ROWS)
            words, row_ids = upload(masks.words[part], self._device), masks.row_ids[part]
            self._bitmask.apply_token_bitmask(logits, words, upload(row_ids, self._device))
        return masks

    def _change(
        self, logits: torch.Tensor, placed: Sequence[_Place], rows: RowParameters, needs: int
    ) -> None:
        """Apply masks, biases and penalties in place."""
        ops, device = self._penalties, self._device
        if needs & Need.ALLOWED:
            for start in range(0, len(placed), _ALLOWED_ROWS):
                part = slice(start, start + _ALLOWED_ROWS)
                allowed = [state.allowed for state, _, _ in placed[part]]
                (token_ids,), offsets = pack(allowed, device)
                ops.mask_allowed_tokens(logits[part], token_ids, offsets)
        if needs & Need.BAD:
            bad = [state.bad_tokens(at, drafts) for state, at, drafts in placed]
            (token_ids,), offsets = pack(bad, device)
            ops.mask_bad_tokens(logits, token_ids, offsets)
        if needs & Need.BIAS:
            (token_ids, bits), offsets = pack([state.bias for state, _, _ in placed], device)
            ops.add_logit_bias(logits, token_ids, bits.view(torch.float32), offsets)
        if needs & Need.PENALTIES:
            entries = [state.counts(at, drafts) for state, at, drafts in placed]
            (token_ids, counts), offsets = pack(entries, device)
            ops.apply_penalties(
                logits,
                token_ids,
                counts,
                offsets,
                repetition=rows.repetition,
                frequency=rows.frequency,
                presence=rows.presence,
            )

    def _find_cutoff(
        self, logits: torch.Tensor, rows: RowParameters, needs: int
    ) -> torch.Tensor | None:
        if not needs & HAS_CUTOFF:
            return None
        cutoff: torch.Tensor = self._cutoff.logit_cutoff(
            logits,
            rows.temperature,
            top_k=rows.top_k if needs & Need.TOP_K else None,
            top_p=rows.top_p if needs & Need.TOP_P else None,
            min_p=rows.min_p if needs & Need.MIN_P else None,
        )
        return cutoff

    def _workspace_for(self, num_rows: int) -> torch.Tensor:
        """Return the workspace, larger than before if rows of drafts make it necessary."""
        if num_rows > len(self._states):
            return self._new_workspace(num_rows)
        return self._workspace

    def _new_workspace(self, num_rows: int) -> torch.Tensor:
        size = self._sampling.sampling_workspace_size(num_rows, self._vocab_size)
        return torch.empty(size, dtype=torch.float32, device=self._device)
