"""Verify drafted tokens against target logits so that the output follows the target's law.

Four launches: tile statistics of all target rows; decisions of each request; residual masses of the
rows that need them; the draw. The draft's distribution is never held: ratios need one logit and one
log-sum-exp per draft, and a residual computes the draft logits of its row again.

Uniforms are keyed by (seed, position of the token, stream, lane): `accept` has the draft's slot as
its lane, `residual` and `bonus` have lane 0. A row without drafts takes the same token as
`sample_tokens` gives it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from extkv.drafting import DraftLaw, Verification
from extkv.errors import InvalidArgumentError
from extkv.kernels.drafts.arguments import (
    Method,
    VerificationCall,
    check_draft,
    check_windows,
)
from extkv.kernels.drafts.decide import decide_kernel
from extkv.kernels.drafts.logits import DRAFT_VOCAB_TILE, PICK_DEPTH_TILE
from extkv.kernels.drafts.residual import draw_kernel, residual_masses_kernel
from extkv.kernels.launch.arguments import (
    check_tensor,
    on_device_of,
    padded_to_power_of_two,
)
from extkv.kernels.sampling import VOCAB_TILE, tile_statistics_kernel

# Regions of the workspace begin at multiples of this, so that kernels compile once.
_ALIGNMENT = 32
_INT_REGIONS = ("work_rows", "work_drafts", "work_slots", "kinds")


class ResidualSettings(NamedTuple):
    """Tiles of the residual masses' launch."""

    row_tile: int
    depth_tile: int
    num_warps: int
    num_stages: int


_FEW_SETTINGS = (ResidualSettings(16, 64, 4, 3), ResidualSettings(32, 64, 4, 4))
_MANY_SETTINGS = ResidualSettings(64, 64, 8, 3)


def residual_settings(num_reqs: int, dtype: torch.dtype, method: Method) -> ResidualSettings:
    """Return the tiles for a batch; they do not change what is drawn."""
    if dtype == torch.float32:
        return ResidualSettings(32, 32, 4, 3)
    few = (some for some in _FEW_SETTINGS if method != "block" and num_reqs <= some.row_tile)
    return next(few, _MANY_SETTINGS)


def _region_sizes(num_rows: int, num_reqs: int, vocab_size: int, method: str) -> list[int]:
    """Return sizes in elements, in the order of `_Workspace`."""
    num_work = num_rows if method == "block" else num_reqs
    num_tiles, num_draft_tiles = -(-vocab_size // VOCAB_TILE), -(-vocab_size // DRAFT_VOCAB_TILE)
    sizes = [4 * num_rows * num_tiles, num_work * num_draft_tiles]
    return [*sizes, *[num_rows] * 3, *[num_work] * 4, num_reqs]


class _Workspace(NamedTuple):
    """Views of the caller's workspace; float32, then int32."""

    statistics: torch.Tensor
    masses: torch.Tensor
    largest: torch.Tensor
    log_total: torch.Tensor
    log_p: torch.Tensor
    log_scale: torch.Tensor
    work_rows: torch.Tensor
    work_drafts: torch.Tensor
    work_slots: torch.Tensor
    kinds: torch.Tensor


def verification_workspace_size(
    num_rows: int, num_reqs: int, vocab_size: int, *, method: Method = "standard"
) -> int:
    """Return how many float32 elements the workspace of `verify_drafts` needs."""
    sizes = _region_sizes(num_rows, num_reqs, vocab_size, method)
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _views(workspace: torch.Tensor, sizes: list[int]) -> _Workspace:
    views, start = [], 0
    for name, size in zip(_Workspace._fields, sizes, strict=True):
        view = workspace[start : start + size]
        views.append(view.view(torch.int32) if name in _INT_REGIONS else view)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _Workspace(*views)


def _strides(tensor: torch.Tensor | None, num_dims: int) -> tuple[int, ...]:
    return (0,) * num_dims if tensor is None else tensor.stride()[:num_dims]


def _launch_decisions(call: VerificationCall, views: _Workspace, out: Verification) -> None:
    num_rows, vocab_size = call.target_logits.shape
    num_tiles = -(-vocab_size // VOCAB_TILE)
    draft = call.draft
    tile_statistics_kernel[num_rows, num_tiles](
        views.statistics,
        call.target_logits,
        call.temperature,
        call.cutoff,
        call.temperature.stride(0),
        call.target_logits.stride(0),
        num_rows,
        vocab_size,
        VOCAB_TILE=VOCAB_TILE,
        num_warps=4,
    )
    decide_kernel[(call.num_reqs,)](
        *out,
        views.kinds,
        views.work_rows,
        views.work_drafts,
        views.work_slots,
        views.log_scale,
        views.log_p,
        views.largest,
        views.log_total,
        views.statistics,
        call.target_logits,
        call.token_ids,
        call.window_starts,
        call.temperature,
        call.cutoff,
        call.seeds,
        call.positions,
        None if draft is None else draft.logits,
        None if draft is None else draft.log_sum_exp,
        None if draft is None else draft.draft_rows,
        call.acceptance_rates,
        call.target_logits.stride(0),
        call.token_ids.stride(0),
        call.temperature.stride(0),
        call.seeds.stride(0),
        call.positions.stride(0),
        *_strides(None if draft is None else draft.logits, 2),
        *_strides(None if draft is None else draft.log_sum_exp, 2),
        num_rows,
        vocab_size,
        IS_BLOCK=call.method == "block",
        MAX_DRAFTS=call.max_num_drafts,
        WINDOW=padded_to_power_of_two(call.max_num_drafts + 1),
        NUM_TILES=num_tiles,
        TILES_PADDED=padded_to_power_of_two(num_tiles),
        num_warps=4,
    )


def _launch_masses(
    call: VerificationCall, views: _Workspace, settings: ResidualSettings | None
) -> None:
    draft = call.draft
    if draft is None:
        return
    vocab_size = call.target_logits.shape[1]
    num_work = views.work_rows.shape[0]
    dtype = torch.float32 if call.codes is None else call.codes.dtype
    settings = settings or residual_settings(call.num_reqs, dtype, call.method)
    num_tiles = -(-vocab_size // DRAFT_VOCAB_TILE)
    residual_masses_kernel[(-(-num_work // settings.row_tile) * num_tiles,)](
        views.masses,
        views.work_rows,
        views.work_drafts,
        views.work_slots,
        views.log_scale,
        views.largest,
        views.log_total,
        call.target_logits,
        draft.base_logits,
        draft.projection,
        call.codes,
        call.token_ids,
        call.temperature,
        call.cutoff,
        draft.log_sum_exp,
        draft.draft_ids,
        call.target_logits.stride(0),
        *draft.base_logits.stride(),
        *_strides(draft.projection, 1),
        *call.code_strides,
        call.token_ids.stride(0),
        call.temperature.stride(0),
        *draft.log_sum_exp.stride(),
        num_work,
        1 if call.codes is None else call.codes.shape[0],
        vocab_size,
        HAS_TOKENS=call.has_tokens,
        RANK=call.rank,
        VOCAB_TILE=DRAFT_VOCAB_TILE,
        ROW_TILE=settings.row_tile,
        DEPTH_TILE=max(min(settings.depth_tile, padded_to_power_of_two(call.rank)), 16),
        num_warps=settings.num_warps,
        num_stages=settings.num_stages,
    )


def _launch_draw(call: VerificationCall, views: _Workspace, out: Verification) -> None:
    num_rows, vocab_size = call.target_logits.shape
    num_tiles, num_draft_tiles = -(-vocab_size // VOCAB_TILE), -(-vocab_size // DRAFT_VOCAB_TILE)
    draft = call.draft
    draw_kernel[(call.num_reqs,)](
        *out,
        views.kinds,
        views.masses,
        views.work_drafts,
        views.work_slots,
        views.log_scale,
        views.log_p,
        views.largest,
        views.log_total,
        views.statistics,
        call.target_logits,
        None if draft is None else draft.base_logits,
        None if draft is None else draft.projection,
        call.codes,
        call.token_ids,
        call.window_starts,
        call.temperature,
        call.cutoff,
        call.seeds,
        call.positions,
        None if draft is None else draft.log_sum_exp,
        None if draft is None else draft.draft_ids,
        call.target_logits.stride(0),
        *_strides(None if draft is None else draft.base_logits, 3),
        *_strides(None if draft is None else draft.projection, 1),
        *call.code_strides,
        call.token_ids.stride(0),
        call.temperature.stride(0),
        call.seeds.stride(0),
        call.positions.stride(0),
        *_strides(None if draft is None else draft.log_sum_exp, 2),
        num_rows,
        1 if call.codes is None else call.codes.shape[0],
        vocab_size,
        IS_BLOCK=call.method == "block",
        IS_ONE_HOT=draft is None,
        HAS_TOKENS=call.has_tokens,
        WINDOW=padded_to_power_of_two(call.max_num_drafts + 1),
        RANK=call.rank,
        NUM_TILES=num_tiles,
        TILES_PADDED=padded_to_power_of_two(num_tiles),
        VOCAB_TILE=VOCAB_TILE,
        DRAFT_TILES_PADDED=padded_to_power_of_two(num_draft_tiles),
        DRAFT_TILE=DRAFT_VOCAB_TILE,
        DEPTH_TILE=min(PICK_DEPTH_TILE, padded_to_power_of_two(call.rank)),
        num_warps=8,
    )


def _checked_out(call: VerificationCall, out: Verification | None) -> Verification:
    device, num_reqs = call.target_logits.device, call.num_reqs
    dtypes = (torch.int32, torch.int64, torch.int32)
    if out is None:
        return Verification(
            *(torch.empty(num_reqs, dtype=dtype, device=device) for dtype in dtypes)
        )
    for name, tensor, dtype in zip(Verification._fields, out, dtypes, strict=True):
        check_tensor(f"out.{name}", tensor, [dtype], [num_reqs], device, is_last_dim_dense=True)
    return out


def verify_drafts(  # noqa: PLR0917 what every row has comes first
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
    workspace: torch.Tensor | None = None,
    out: Verification | None = None,
    settings: ResidualSettings | None = None,
) -> Verification:
    """Accept a prefix of each request's drafts and draw the token after it.

    The window of request r is rows `window_starts[r]` to `window_starts[r + 1]`: the token decided
    last, then its drafts. Row i gives the distribution of the token after it, and so judges draft i
    and, once all drafts are accepted, draws one more token. A window may have no draft, and an
    empty one (of a padding request) gives 0, token 0, no flag. Drafts past `max_num_drafts` are
    left out.

    With p of the target, changed by penalties, masks, temperature and cut-off, and q of the draft:

    - `standard` accepts a draft while u < p(x) / q(x), then draws from max(p - q, 0).
    - `block` (arXiv 2403.10444) decides on whole prefixes, and accepts no fewer on average.
    - `synthetic` accepts by given rates. Its output does not follow the target: for benchmarks.

    Rows below a temperature of 1e-5 accept the argmax alone and end with it. Without `draft` the
    drafts count as chosen and not drawn: q is 1 there, so p(x) decides. A placeholder (-1), an id
    out of range, or a draft whose law is not finite ends the window: the next token comes from the
    target alone, and drafts after it are lost. So does a row with a NaN or without candidates; it
    flags its request, whose token must not be used. May be captured once `workspace` and `out`
    are given.

    Args:
        target_logits (float, [num_rows, vocab_size], device): Rows of any stride, dense tokens.
        token_ids (int64, [num_rows], device): Tokens of the windows; any stride.
        window_starts (int32, [num_reqs + 1], device): Ascending from 0, at most num_rows. Dense.
        temperature (float32, [num_rows], device): That of the request, also used to draft; any
            stride. `seeds` and `positions` likewise.
        seeds (int64, [num_rows], device): Seed of each row's request.
        positions (int64, [num_rows], device): Absolute position of the token that follows the row.
        draft: Distribution of the drafts; None for one-hot drafts, and for `synthetic`.
        max_num_drafts: Most drafts of a request, 0 to 31.
        method: How to decide.
        cutoff (float32, [num_rows], device): From `logit_cutoff` on `target_logits`; dense.
        acceptance_rates (float32, [max_num_drafts], device): Of `synthetic`: chance that a draft
            is accepted once those before it are. Dense.
        workspace (float32, [n], device): At least `verification_workspace_size` elements; None
            allocates them.
        out: Receives the result; dense.
        settings: Tiles of the residual masses; None chooses.

    Returns:
        The decision.

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit, or if what belongs
            together is not given together.
    """
    call = VerificationCall(
        target_logits,
        token_ids,
        window_starts,
        temperature,
        seeds,
        positions,
        None if method == "synthetic" else draft,
        max_num_drafts,
        method,
        cutoff,
        acceptance_rates,
    )
    check_windows(call)
    check_draft(call)
    out = _checked_out(call, out)
    num_rows, vocab_size = target_logits.shape
    sizes = _region_sizes(num_rows, call.num_reqs, vocab_size, method)
    needed = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    device = target_logits.device
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    check_tensor("workspace", workspace, [torch.float32], [None], device, is_last_dim_dense=True)
    if workspace.numel() < needed:
        raise InvalidArgumentError(
            f"workspace must have at least {needed} elements, got {workspace.numel()}"
        )
    if num_rows > 0 and call.num_reqs > 0:
        views = _views(workspace, sizes)
        with on_device_of(target_logits):
            _launch_decisions(call, views, out)
            _launch_masses(call, views, settings)
            _launch_draw(call, views, out)
    elif call.num_reqs > 0:
        for tensor in out:
            tensor.zero_()
    return out
