"""What the sampler keeps for each slot of the persistent batch.

Numbers that every row has lie in one array per parameter, on the device. Lists of tokens, which few
requests have, stay on the host and are packed for the rows of a step.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from extkv.errors import InvalidArgumentError
from extkv.structured_outputs.matcher import TokenMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from extkv.resolved_sampling import ResolvedSampling

# Lists of slots whose parameters are kept on the device, one behind the other.
_MAX_NUM_LISTS = 8
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
_INTS = ("seed", "top_k")


class Need(enum.IntEnum):
    """What a row needs besides the largest logit; bits that are added up."""

    DRAW = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    ALLOWED = 16
    BAD = 32
    BIAS = 64
    PENALTIES = 128
    GRAMMAR = 256


HIDES_LOGITS = Need.ALLOWED | Need.BAD | Need.GRAMMAR
CHANGES_LOGITS = HIDES_LOGITS | Need.BIAS | Need.PENALTIES
HAS_CUTOFF = Need.TOP_K | Need.TOP_P | Need.MIN_P


@dataclass(frozen=True)
class SlotRequest:
    """Describe the request that enters a slot.

    Attributes:
        sampling: Its parameters.
        prompt_token_ids: Its prompt.
        seed: Its random key, from `request_seed`.
        output_token_ids: Its output so far, of a request that was preempted.
    """

    sampling: ResolvedSampling
    prompt_token_ids: Sequence[int]
    seed: int
    output_token_ids: Sequence[int] = ()


class SlotState:
    """What the host keeps for the occupant of a slot.

    Attributes:
        generation: Generation of the slot.
        num_logprobs: Likeliest tokens to report; None for no report.
        allowed (int32, [1, n]): Tokens allowed, ascending.
        bias (int32, [2, n]): Tokens with a bias, and the bits of their float32 biases.
    """

    def __init__(self, generation: int, request: SlotRequest) -> None:
        """Take over a request with what it has written so far."""
        params = request.sampling.params
        self.generation = generation
        self.num_logprobs = params.logprobs
        self.allowed = _as_row(sorted(set(params.allowed_token_ids or ())))
        bias = params.logit_bias or {}
        bits = np.array(list(bias.values()), np.float32).view(np.int32)
        self.bias = np.concatenate([_as_row(list(bias)), bits[None]])
        self._needs = _needs_of(request.sampling)
        self._num_prompt_tokens = len(request.prompt_token_ids)
        grammar = request.sampling.grammar
        self._matcher = None if grammar is None else TokenMatcher(grammar, request.sampling)
        # A grammar keeps to `min_tokens` itself: where nothing else may follow, a stop token may.
        self._min_tokens = params.min_tokens if grammar is None else 0
        self._late = request.sampling.late_token_ids
        bad = request.sampling.bad_sequences
        self._bad_tokens = tuple(sequence[0] for sequence in bad if len(sequence) == 1)
        self._bad_sequences = [sequence for sequence in bad if len(sequence) > 1]
        self._num_output_tokens = 0
        self._last_tokens: list[int] = []
        self._counts: TokenCounts | None = None
        if self._needs & Need.PENALTIES:
            # Only the repetition penalty looks at the prompt.
            counts_prompt = params.repetition_penalty != 1
            self._counts = TokenCounts(request.prompt_token_ids if counts_prompt else ())
        self.append(request.output_token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add output tokens."""
        self._num_output_tokens += len(token_ids)
        if self._matcher is not None:
            self._matcher.append(token_ids)
        if self._counts is not None:
            self._counts.add(token_ids)
        if self._bad_sequences:
            longest = max(map(len, self._bad_sequences)) - 1
            self._last_tokens = [*self._last_tokens, *token_ids][-longest:]

    def needs_at(self, position: int) -> int:
        """Return the `Need` bits of the row whose token will stand at a position."""
        return self._needs | (Need.BAD if self._is_early(position) else 0)

    def bad_tokens(self, position: int, drafts: Sequence[int] = ()) -> NDArray[np.int32]:
        """Return what must not stand at a position, ends of bad words and stops (int32, [1, n]).

        `drafts` are tokens between the output and the position, as if they were output.
        """
        token_ids = list(self._bad_tokens)
        if self._is_early(position):
            token_ids += self._late
        if self._bad_sequences:
            self._check_is_next(position, drafts)
            before = [*self._last_tokens, *drafts]
            token_ids += (
                sequence[-1]
                for sequence in self._bad_sequences
                if tuple(before[1 - len(sequence) :]) == sequence[:-1]
            )
        return _as_row(token_ids)

    def counts(self, position: int, drafts: Sequence[int] = ()) -> NDArray[np.int32]:
        """Return distinct tokens and their counts in the output (int32, [2, n]).

        `drafts` are tokens between the output and the position, as if they were output.
        """
        if self._counts is None:
            return _NOTHING_TWICE
        self._check_is_next(position, drafts)
        return self._counts.entries_with(drafts)

    def matcher_at(self, position: int, drafts: Sequence[int] = ()) -> TokenMatcher | None:
        """Return the place of the output in its grammar, without the drafts; None for any text."""
        if self._matcher is not None:
            self._check_is_next(position, drafts)
        return self._matcher

    def _is_early(self, position: int) -> bool:
        return position - self._num_prompt_tokens < self._min_tokens

    def _check_is_next(self, position: int, drafts: Sequence[int]) -> None:
        expected = self._num_prompt_tokens + self._num_output_tokens + len(drafts)
        if position != expected:
            msg = f"position is {position}, expected {expected}: the tokens before it are not known"
            raise InvalidArgumentError(msg)


class TokenCounts:
    """The distinct tokens of a text and how often each is in its output, kept as it grows."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """Start with the tokens of the prompt, each with a count of 0."""
        distinct = np.unique(np.asarray(prompt_token_ids, np.int32))
        self._array = np.stack([distinct, np.zeros_like(distinct)])
        self._column_of = {token_id: column for column, token_id in enumerate(distinct.tolist())}

    @property
    def entries(self) -> NDArray[np.int32]:
        """Tokens and counts (int32, [2, n]), valid until the next `add`."""
        return self._array[:, : len(self._column_of)]

    def entries_with(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return the entries as if these tokens were counted too."""
        if not token_ids:
            return self.entries
        other = TokenCounts(())
        other._array, other._column_of = self.entries.copy(), dict(self._column_of)
        other.add(token_ids)
        return other.entries

    def add(self, token_ids: Sequence[int]) -> None:
        """Count output tokens."""
        for token_id in token_ids:
            column = self._column_of.setdefault(token_id, len(self._column_of))
            if column == self._array.shape[1]:
                spare = np.zeros((2, max(16, column)), np.int32)
                self._array = np.concatenate([self._array, spare], axis=1)
            self._array[0, column] = token_id
            self._array[1, column] += 1


@dataclass(frozen=True)
class RowParameters:
    """Hold the parameters of a step's rows; each is a tensor (float32 or int64, [num_rows])."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor
    positions: torch.Tensor


class SlotParameters:
    """One array per parameter over all slots, on the device, and what the host last wrote."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Allocate the arrays."""
        self._device = device
        self._host_floats = np.zeros((len(_FLOATS), num_slots), np.float32)
        self._host_ints = np.zeros((len(_INTS), num_slots), np.int64)
        self._floats = torch.zeros(self._host_floats.shape, dtype=torch.float32, device=device)
        self._ints = torch.zeros(self._host_ints.shape, dtype=torch.int64, device=device)
        self._is_stale = False
        self._of_slots: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}

    def write(self, slot: int, request: SlotRequest) -> None:
        """Set a slot's parameters; they reach the device with the next `rows`."""
        params = request.sampling.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._host_floats[:, slot] = (params.temperature, params.top_p, params.min_p, *penalties)
        self._host_ints[:, slot] = (request.seed, params.top_k)
        self._is_stale = True

    def rows(self, slots: Sequence[int], positions: Sequence[int] | torch.Tensor) -> RowParameters:
        """Return the parameters of rows, given each one's slot and position.

        Like calls return the same tensors while no slot is written: they are not to be changed.

        Args:
            slots: Slot of each row.
            positions: Position of each row; a tensor (int64, [num_rows], device) is passed on.
        """
        if not isinstance(positions, torch.Tensor):
            positions = upload(np.array(positions, np.int64), self._device)
        return RowParameters(**self.of(slots), positions=positions)

    def of(self, slots: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return what does not depend on positions; see `rows`."""
        if self._is_stale:
            self._floats.copy_(_staged(self._host_floats, self._device), non_blocking=True)
            self._ints.copy_(_staged(self._host_ints, self._device), non_blocking=True)
            self._is_stale = False
            self._of_slots.clear()
        key = tuple(slots)
        found = self._of_slots.get(key)
        if found is None:
            index = upload(np.array(key, np.int64), self._device)
            floats, ints = (of.index_select(1, index) for of in (self._floats, self._ints))
            rows = (*floats.unbind(), *ints.unbind())
            found = dict(zip((*_FLOATS, *_INTS), rows, strict=True))
            if len(self._of_slots) == _MAX_NUM_LISTS:
                self._of_slots.clear()
            self._of_slots[key] = found
        return found


def pack(
    rows: Sequence[NDArray[np.int32]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the entries of all rows one after another, in one upload.

    Args:
        rows (int32, [k, n]): Entries of each row; k is the same for all, n is not.
        device: Where they go.

    Returns:
        entries (int32, [k, num_entries], device) and row offsets (int32, [num_rows + 1], device).
    """
    entries = np.concatenate(rows, axis=1)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([row.shape[1] for row in rows], out=offsets[1:])
    packed = upload(np.concatenate([entries.reshape(-1), offsets]), device)
    return packed[: entries.size].view(entries.shape), packed[entries.size :]


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return the array on the device, without waiting for it."""
    return _staged(array, device).to(device, non_blocking=True)


class KeptUpload:
    """The array that was uploaded last: a step that needs the same one again does not upload it."""

    def __init__(self, device: torch.device) -> None:
        """Begin without any."""
        self._device = device
        self._bytes, self._tensor = b"", torch.empty(0)

    def __call__(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Return the array on the device, not to be changed; arrays have one dtype, 1 dimension."""
        found = array.tobytes()
        if found != self._bytes or not found:
            self._tensor, self._bytes = upload(array, self._device), found
        return self._tensor


def _staged(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return the array where a copy to the device can start; on CUDA a pinned copy of its own."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _as_row(token_ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array([token_ids], np.int32)


def _needs_of(sampling: ResolvedSampling) -> int:
    params = sampling.params
    is_drawn = not params.is_greedy
    has_penalties = params.repetition_penalty != 1 or (
        params.frequency_penalty != 0 or params.presence_penalty != 0
    )
    needs = {
        Need.DRAW: is_drawn,
        Need.TOP_K: is_drawn and params.top_k > 0,
        Need.TOP_P: is_drawn and params.top_p < 1,
        Need.MIN_P: is_drawn and params.min_p > 0,
        Need.ALLOWED: params.allowed_token_ids is not None,
        Need.BAD: bool(sampling.bad_sequences),
        Need.BIAS: bool(params.logit_bias),
        Need.PENALTIES: has_penalties,
        Need.GRAMMAR: sampling.grammar is not None,
    }
    return sum(bit for bit, is_needed in needs.items() if is_needed)


_NOTHING_TWICE = np.zeros((2, 0), np.int32)
