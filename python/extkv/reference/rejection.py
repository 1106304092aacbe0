"""Verify drafted tokens against target logits so that the output follows the target's law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch.nn import functional

from extkv.drafting import DraftLaw, Verification
from extkv.reference.markov_step import markov_logits
from extkv.reference.philox import Stream, philox_uniforms
from extkv.reference.sampling import VOCAB_TILE, RowFlag, draw_from_softmax, pick, softmax_weights
from extkv.sampling_params import LEAST_TEMPERATURE

if TYPE_CHECKING:
    from collections.abc import Callable

Method = Literal["standard", "block", "synthetic"]
_LEAST_RESIDUAL = 1e-8
_ALIGNMENT = 32
# Tokens of a residual that are drawn from together; as in the kernels.
DRAFT_VOCAB_TILE = 128


def verification_workspace_size(
    num_rows: int, num_reqs: int, vocab_size: int, *, method: Method = "standard"
) -> int:
    """Return how many float32 elements the kernels' workspace needs."""
    num_work = num_rows if method == "block" else num_reqs
    num_tiles, num_draft_tiles = -(-vocab_size // VOCAB_TILE), -(-vocab_size // DRAFT_VOCAB_TILE)
    sizes = [4 * num_rows * num_tiles, num_work * num_draft_tiles, num_reqs]
    sizes += [num_rows] * 3 + [num_work] * 4
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


class _Windows(NamedTuple):
    """Windows padded to [num_reqs, max_num_drafts + 1]; whole rows of p only where they are used.

    The target's rows are read twice, for their maxima and their sums, and not copied.
    """

    rows: torch.Tensor  # of the target; clamped where there is none
    is_row: torch.Tensor
    is_greedy: torch.Tensor
    heat: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor  # token after each row; -1 for none
    logits: torch.Tensor  # float32, [num_rows, vocab_size], of the target, without NaN
    cutoff: torch.Tensor | None  # [num_rows]
    largest: torch.Tensor
    mass: torch.Tensor  # sum of exp((value - largest) / T) over what may be drawn; 1 if greedy
    argmax: torch.Tensor
    flags: torch.Tensor

    def values_at(self, index: torch.Tensor) -> torch.Tensor:
        """Return one row per window ([num_reqs, vocab_size]): what may be drawn; else -inf."""
        rows = self.rows.gather(1, index[:, None])[:, 0]
        cutoff = None if self.cutoff is None else self.cutoff[rows]
        return _drawable(self.logits[rows], cutoff)

    def p_at(self, index: torch.Tensor) -> torch.Tensor:
        """Return the target's law of one row per window ([num_reqs, vocab_size])."""
        at = index[:, None]
        values, largest = self.values_at(index), self.largest.gather(1, at)
        weights = softmax_weights(values, largest, self.heat.gather(1, at))
        return weights.div_(self.mass.gather(1, at))

    def p_of_drafts(self) -> torch.Tensor:
        """Return the target's probability of each draft ([num_reqs, width])."""
        drafts = self.drafts.clamp(min=0)
        values = self.logits[self.rows, drafts]
        if self.cutoff is not None:
            values = torch.where(values >= self.cutoff[self.rows], values, -torch.inf)
        return softmax_weights(values, self.largest, self.heat) / self.mass

    def accept_uniforms(self) -> torch.Tensor:
        """Return the uniform that decides on the draft after each row; its lane is the slot.

        The last row of a full window has no draft: its uniform is 1, which accepts nothing.
        """
        seeds, positions = self.seeds[:, :-1], self.positions[:, :-1]
        lanes = torch.arange(seeds.shape[1], device=seeds.device).expand_as(seeds)
        numbers = philox_uniforms(
            seeds.flatten(), positions.flatten(), Stream.ACCEPT, lanes.flatten()
        )
        return functional.pad(numbers[:, 0].view(seeds.shape), (0, 1), value=1.0)


def verify_drafts(  # noqa: PLR0917 as the kernel
    target_logits: torch.Tensor,
    token_ids: torch.Tensor,
    window_starts: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    draft: DraftLaw | None,
    *,
    max_num_drafts: int,
    method: Method = "standard",
    cutoff: torch.Tensor | None = None,
    acceptance_rates: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,  # noqa: ARG001 division of work, not meaning
    out: Verification | None = None,
    settings: object = None,  # noqa: ARG001 division of work, not meaning
) -> Verification:
    """Verify the drafts of all requests; see `extkv.kernels.rejection.verify_drafts`."""
    num_reqs, device = window_starts.shape[0] - 1, target_logits.device
    if out is None:
        dtypes = (torch.int32, torch.int64, torch.int32)
        out = Verification(*(torch.zeros(num_reqs, dtype=d, device=device) for d in dtypes))
    if target_logits.shape[0] == 0 or num_reqs == 0:
        for tensor in out:
            tensor.zero_()
        return out
    windows = _windows(
        target_logits,
        token_ids,
        window_starts,
        temperature,
        seeds,
        positions,
        cutoff,
        max_num_drafts,
    )
    if method == "synthetic":
        draft = None
    log_q = _draft_log_probabilities(draft, windows)
    num_drafts = _usable_drafts(windows, log_q)
    q_rows = _draft_rows(draft, token_ids, windows)
    if method == "block":
        accepted = _standard_accepted(windows, log_q, num_drafts)
        is_greedy = windows.is_greedy[:, 0]
        if not bool(is_greedy.all()):
            found = _block_accepted(windows, log_q, num_drafts, q_rows)
            accepted = torch.where(is_greedy, accepted, found)
    elif method == "synthetic":
        assert acceptance_rates is not None
        rates = functional.pad(acceptance_rates, (0, 1))
        accepted = _first_failure(_accepts(windows.accept_uniforms(), rates), num_drafts)
    else:
        accepted = _standard_accepted(windows, log_q, num_drafts)
    scale = torch.ones_like(windows.heat[:, 0])
    if method == "block":
        scale = _prefix_scales(windows, log_q).gather(1, accepted[:, None])[:, 0].exp()
    is_rejected = (accepted < num_drafts) & (method != "synthetic")
    drawn = _draw(windows, q_rows, accepted, scale, is_rejected, is_one_hot=draft is None)
    first = accepted[:, None]
    flags = windows.flags.gather(1, first)[:, 0]
    is_chosen = windows.is_greedy[:, 0] | (flags & RowFlag.NO_CANDIDATE > 0)
    tokens = torch.where(is_chosen, windows.argmax.gather(1, first)[:, 0], drawn)
    is_request = windows.is_row[:, 0]
    out.num_accepted.copy_(accepted)
    out.next_tokens.copy_(torch.where(is_request, tokens, 0))
    out.flags.copy_(torch.where(is_request, flags, 0))
    return out


def _windows(  # noqa: PLR0917 as verify_drafts
    target_logits: torch.Tensor,
    token_ids: torch.Tensor,
    window_starts: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cutoff: torch.Tensor | None,
    max_num_drafts: int,
) -> _Windows:
    num_rows, vocab_size = target_logits.shape
    starts = window_starts.to(torch.int64)
    index = torch.arange(max_num_drafts + 1, device=target_logits.device)
    lengths = (starts[1:] - starts[:-1]).clamp(max=max_num_drafts + 1)
    rows = starts[:-1, None] + index
    is_row = index < lengths[:, None]
    rows = rows.clamp(max=num_rows - 1)
    following = token_ids[(rows + 1).clamp(max=num_rows - 1)]
    has_draft = index + 1 < lengths[:, None]
    is_token = has_draft & (following >= 0) & (following < vocab_size)
    logits = target_logits.to(torch.float32)
    largest, argmax = logits.max(1)
    # A maximum is NaN if any number is, so that the usual row is read once.
    has_nan = largest.isnan()
    if bool(has_nan.any()):
        logits = torch.where(logits.isnan(), -torch.inf, logits)
        largest, argmax = logits.max(1)
    flags = has_nan * RowFlag.HAS_NAN + (largest == -torch.inf) * RowFlag.NO_CANDIDATE
    is_greedy = ~(temperature >= LEAST_TEMPERATURE)
    heat = torch.where(is_greedy, 1.0, temperature)
    mass = torch.ones_like(heat)
    drawn = (~is_greedy).nonzero()[:, 0]
    if drawn.numel():
        is_all = drawn.numel() == num_rows
        part = logits if is_all else logits[drawn]
        values = _drawable(part, None if cutoff is None else cutoff[drawn])
        mass[drawn] = softmax_weights(values, largest[drawn, None], heat[drawn, None]).sum(1)
    return _Windows(
        rows,
        is_row,
        is_greedy[rows] | ~is_row,
        heat[rows],
        seeds[rows],
        positions[rows],
        torch.where(is_token, following, -1),
        logits,
        cutoff,
        largest[rows],
        mass[rows],
        argmax[rows],
        flags[rows],
    )


def _drawable(values: torch.Tensor, cutoff: torch.Tensor | None) -> torch.Tensor:
    """Return values with -inf below each row's cut-off."""
    return values if cutoff is None else torch.where(values >= cutoff[:, None], values, -torch.inf)


def _draft_log_probabilities(draft: DraftLaw | None, windows: _Windows) -> torch.Tensor:
    """Return log q of each draft, [num_reqs, width]; 0 for one-hot drafts."""
    num_reqs, width = windows.rows.shape
    if draft is None:
        return torch.zeros_like(windows.heat)
    rows = _request_rows(draft, num_reqs)
    numbers = draft.logits[rows, : width - 1] / windows.heat[:, : width - 1]
    return functional.pad(numbers - draft.log_sum_exp[rows, : width - 1], (0, 1))


def _request_rows(draft: DraftLaw, num_reqs: int) -> torch.Tensor:
    if draft.draft_rows is not None:
        return draft.draft_rows
    return torch.arange(num_reqs, device=draft.logits.device)


def _usable_drafts(windows: _Windows, log_q: torch.Tensor) -> torch.Tensor:
    """Return how many drafts come before the first placeholder, broken row or unknown law."""
    is_draft = (windows.drafts >= 0) & (windows.flags == 0)
    is_draft &= windows.is_greedy | log_q.isfinite()
    return is_draft.to(torch.int64).cumprod(1).sum(1)


def _log_p(windows: _Windows) -> torch.Tensor:
    """Return log p of each draft, [num_reqs, width]."""
    return windows.p_of_drafts().log()


def _accepts(uniforms: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Strict: what has probability 0 is not accepted even by a uniform of 0."""
    return uniforms < limits


def _residual(scale: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return max(scale * p - q, 0) of each row."""
    return (scale[:, None] * p - q).clamp(min=0.0)


def _first_failure(accepts: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    index = torch.arange(accepts.shape[1], device=accepts.device)
    accepts = accepts & (index < num_drafts[:, None])
    return accepts.to(torch.int64).cumprod(1).sum(1)


def _standard_accepted(
    windows: _Windows, log_q: torch.Tensor, num_drafts: torch.Tensor
) -> torch.Tensor:
    matches = windows.drafts == windows.argmax
    if bool(windows.is_greedy.all()):
        # No law decides, and no uniform.
        return _first_failure(matches, num_drafts)
    ratios = (_log_p(windows) - log_q).exp()
    accepts = _accepts(windows.accept_uniforms(), ratios)
    return _first_failure(torch.where(windows.is_greedy, matches, accepts), num_drafts)


def _prefix_scales(windows: _Windows, log_q: torch.Tensor) -> torch.Tensor:
    """Return log P_i, [num_reqs, width]: P_0 = 1, P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i))."""
    log_ratios = _log_p(windows) - log_q
    scales = torch.zeros_like(log_ratios)
    for i in range(1, log_ratios.shape[1]):
        scales[:, i] = (scales[:, i - 1] + log_ratios[:, i - 1]).clamp(max=0.0)
    return scales


def _block_accepted(
    windows: _Windows,
    log_q: torch.Tensor,
    num_drafts: torch.Tensor,
    q_rows: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the largest i with u_i < h_i, 0 for none, as arXiv 2403.10444, Algorithm 2."""
    scales = _prefix_scales(windows, log_q).exp()
    uniforms = windows.accept_uniforms()
    num_reqs, width = scales.shape
    accepted = torch.zeros_like(num_drafts)
    for i in range(1, width):
        scale = scales[:, i]
        index = torch.full((num_reqs,), i, device=scale.device)
        q = q_rows(index)
        residual = _residual(scale, windows.p_at(index), q).sum(1)
        total = residual + 1.0 - scale
        limit = torch.where(total > 0, residual / total, 1.0)
        limit = torch.where(num_drafts == i, scale, limit)
        accepts = (i <= num_drafts) & _accepts(uniforms[:, i - 1], limit)
        accepted = torch.where(accepts, i, accepted)
    return accepted


def _draft_rows(
    draft: DraftLaw | None, token_ids: torch.Tensor, windows: _Windows
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from an index per window to q [num_reqs, vocab_size] of the draft there."""
    num_reqs, width = windows.rows.shape
    vocab_size = windows.logits.shape[1]

    def one_hot(index: torch.Tensor) -> torch.Tensor:
        drafts = windows.drafts.gather(1, index[:, None])
        q = functional.one_hot(drafts.clamp(min=0)[:, 0], vocab_size).to(torch.float32)
        return torch.where(drafts >= 0, q, 0.0)

    def drawn(index: torch.Tensor) -> torch.Tensor:
        assert draft is not None
        rows, slot = _request_rows(draft, num_reqs), index.clamp(max=max(width - 2, 0))
        if draft.base_logits.shape[1] == 0:
            return windows.logits.new_zeros((num_reqs, vocab_size))
        previous = token_ids[windows.rows.gather(1, index[:, None])[:, 0]]
        logits = markov_logits(
            draft.base_logits[rows, slot],
            draft.projection,
            tokens=previous,
            embedding=draft.embedding,
            codes=None if draft.codes is None else draft.codes[rows, slot],
        )
        heat = windows.heat.gather(1, index[:, None])
        q = (logits / heat - draft.log_sum_exp[rows, slot][:, None]).exp()
        # A comparison with NaN is false.
        q = torch.where(q >= 0, q, 0.0)
        if draft.draft_ids is None:
            return q
        return torch.where(draft.draft_ids >= 0, q[:, draft.draft_ids.clamp(min=0)], 0.0)

    return one_hot if draft is None else drawn


def _draw(
    windows: _Windows,
    q_rows: Callable[[torch.Tensor], torch.Tensor],
    accepted: torch.Tensor,
    scale: torch.Tensor,
    is_rejected: torch.Tensor,
    *,
    is_one_hot: bool,
) -> torch.Tensor:
    """Return the next token of each request, of no meaning where its row is greedy or broken."""
    # Greedy windows take their argmax, so that nothing of theirs is computed.
    drawn = (~windows.is_greedy[:, 0]).nonzero()[:, 0]
    tokens = torch.zeros_like(accepted)
    if drawn.numel() == 0:
        return tokens
    at = accepted[:, None]
    heat, seeds, positions = (
        tensor.gather(1, at)[:, 0] for tensor in (windows.heat, windows.seeds, windows.positions)
    )
    values = windows.values_at(accepted)
    has_any = values.amax(1) > -torch.inf
    uses_residual = torch.zeros_like(is_rejected)
    if is_one_hot:
        drafts = windows.drafts.gather(1, at)
        is_draft = torch.zeros_like(values, dtype=torch.bool).scatter_(1, drafts.clamp(min=0), 1)
        is_hidden = is_draft & (is_rejected[:, None] & (drafts >= 0))
        values = torch.where(is_hidden, -torch.inf, values)
        has_any &= values.amax(1) > -torch.inf
    elif bool(is_rejected[drawn].any()):
        residual = _residual(scale, windows.p_at(accepted), q_rows(accepted))
        uses_residual = is_rejected & (residual.sum(1) > _LEAST_RESIDUAL)
        found = uses_residual.nonzero()[:, 0]
        uniforms = philox_uniforms(
            seeds[found], positions[found], Stream.RESIDUAL, torch.zeros_like(found)
        )
        tokens[found] = _pick_in_tiles(residual[found], uniforms)
    for stream, is_stream in ((Stream.RESIDUAL, is_rejected), (Stream.BONUS, ~is_rejected)):
        found = (is_stream & ~uses_residual & has_any).nonzero()[:, 0]
        if found.numel():
            tokens[found] = draw_from_softmax(
                values[found], heat[found], seeds[found], positions[found], stream
            )
    return tokens


def _pick_in_tiles(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Pick a tile of the row by its mass, then a token inside it."""
    num_rows, vocab_size = weights.shape
    width = min(DRAFT_VOCAB_TILE, vocab_size)
    tiles = functional.pad(weights, (0, -vocab_size % width))
    tiles = tiles.view(num_rows, -(-vocab_size // width), width)
    chosen = pick(tiles.sum(2), uniforms[:, 0])
    inside = tiles[torch.arange(num_rows, device=weights.device), chosen]
    return chosen * width + pick(inside, uniforms[:, 1])
