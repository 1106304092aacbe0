"""One step of a Markov head: bias of the previous token, added to base logits, and a draw.

Neither bias nor logits reach memory. One kernel reads the projection once for the whole batch and
leaves a number per row and group of 64 tokens, see `drafts/markov_groups.py`; a second draws a
token per row from them. A row takes one Philox call, as in `sample_tokens`.

A draw is keyed by (seed, position, stream draft, slot). The slot is needed: after a rejection the
next round drafts the same positions again, and block verification looks at all drafts of a round,
so a draw that came back would be correlated with what was decided.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from extkv.drafting import MarkovDraw
from extkv.errors import InvalidArgumentError
from extkv.kernels.drafts.markov_groups import GROUP_SIZE
from extkv.kernels.drafts.markov_kernels import markov_draw_kernel, markov_groups_kernel
from extkv.kernels.launch.arguments import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_tensor,
    launch_device,
    on_device_of,
    padded_to_power_of_two,
)
from extkv.kernels.logit_cutoff import MAX_VOCAB_SIZE, check_rows

# float16 is not among them: neither checkpoints nor engines hold a head in it.
HEAD_DTYPES = (torch.bfloat16, torch.float32)
# Compute capability that has programmatic dependent launch.
_EARLIEST_MAJOR = 9
# Depth of a chunk where one program computes a group of one row: all loads are under way together.
DRAW_DEPTH_TILE = 512


class MarkovSettings(NamedTuple):
    """Tiles of a launch.

    Attributes:
        vocab_tile: Tokens of a tile, a multiple of 64.
        row_tile: Rows of a tile.
        depth_tile: Columns of the projection that are read at once.
        num_warps: Warps of a program.
        num_stages: Reads of a tile's columns that are under way.
        num_tile_stages: Tiles whose reads are under way, where programs do several.
        programs_per_processor: Programs that do all tiles in turn, with the codes of their rows
            kept on the processor; None for a program per tile, as if the depth tile is below the
            rank.
        is_early: Whether kernels are launched before the one before has ended, and wait inside.
    """

    vocab_tile: int
    row_tile: int
    depth_tile: int
    num_warps: int
    num_stages: int
    num_tile_stages: int = 1
    programs_per_processor: int | None = None
    is_early: bool = False


_SETTINGS = (
    MarkovSettings(64, 16, 64, 4, 2, is_early=True),
    MarkovSettings(64, 32, 64, 4, 3),
    MarkovSettings(64, 64, 64, 8, 3),
    MarkovSettings(64, 128, 64, 4, 3),
)
# Between these batch sizes, and for ranks of this size, reading the codes again costs most.
_RESIDENT_ROWS, _RESIDENT_RANKS = range(33, 65), range(129, 257)
_RESIDENT_SETTINGS = MarkovSettings(64, 64, 256, 8, 2, 2, programs_per_processor=2)
_FLOAT32_SETTINGS = MarkovSettings(64, 32, 32, 4, 3)


def markov_settings(num_rows: int, rank: int, dtype: torch.dtype) -> MarkovSettings:
    """Return the tiles for a batch; they do not change which token a row draws."""
    if dtype == torch.float32:
        return _FLOAT32_SETTINGS
    if num_rows in _RESIDENT_ROWS and rank in _RESIDENT_RANKS:
        return _RESIDENT_SETTINGS
    return next((some for some in _SETTINGS if num_rows <= some.row_tile), _SETTINGS[-1])


@functools.cache
def _processor(device: torch.device) -> tuple[int, bool]:
    """Return the multiprocessors of a device, and whether its kernels can be launched early."""
    if device.type != "cuda":
        return 1, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= _EARLIEST_MAJOR


def markov_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Return how many float32 elements the workspace of `markov_step` needs."""
    return num_rows * -(-vocab_size // GROUP_SIZE)


class _Step(NamedTuple):
    """Checked arguments of a step."""

    base_logits: torch.Tensor
    projection: torch.Tensor | None
    codes: torch.Tensor | None
    tokens: torch.Tensor | None
    temperature: torch.Tensor | None
    seeds: torch.Tensor | None
    positions: torch.Tensor | None
    slot: int
    draft_to_target: torch.Tensor | None


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def launch(step: _Step, workspace: torch.Tensor, out: MarkovDraw, settings: MarkovSettings) -> None:
    """Run both kernels on checked arguments."""
    num_rows, vocab_size = step.base_logits.shape
    num_groups = -(-vocab_size // GROUP_SIZE)
    num_tiles = -(-vocab_size // settings.vocab_tile)
    num_row_tiles = -(-num_rows // settings.row_tile)
    num_processors, can_be_early = _processor(step.base_logits.device)
    rank = 1 if step.codes is None else step.codes.shape[1]
    num_embeddings = 1 if step.codes is None else step.codes.shape[0]
    depth_tile = max(min(settings.depth_tile, padded_to_power_of_two(rank)), 16)
    is_resident, num_programs = False, num_tiles
    if (
        settings.programs_per_processor is not None
        and step.projection is not None
        and depth_tile >= rank
    ):
        is_resident = True
        most = settings.programs_per_processor * num_processors
        num_programs = min(num_tiles, max(most // num_row_tiles, 1))
    is_early = settings.is_early and can_be_early
    # The first step of a round follows kernels that know nothing of it.
    is_step_early = is_early and step.slot > 0
    with on_device_of(step.base_logits):
        markov_groups_kernel[(num_row_tiles * num_programs,)](
            workspace,
            step.base_logits,
            step.projection,
            step.codes,
            step.tokens,
            step.temperature,
            *step.base_logits.stride(),
            _stride(step.projection),
            _stride(step.codes),
            _stride(step.tokens),
            _stride(step.temperature),
            num_rows,
            num_embeddings,
            vocab_size,
            num_groups,
            RANK=rank,
            IS_REVERSED=step.slot % 2 == 1,
            VOCAB_TILE=settings.vocab_tile,
            ROW_TILE=settings.row_tile,
            DEPTH_TILE=depth_tile,
            NUM_TILE_STAGES=settings.num_tile_stages,
            IS_RESIDENT=is_resident,
            IS_EARLY=is_step_early,
            launch_pdl=is_step_early,
            num_warps=settings.num_warps,
            num_stages=settings.num_stages,
        )
        markov_draw_kernel[(num_rows,)](
            *out,
            workspace,
            step.base_logits,
            step.projection,
            step.codes,
            step.tokens,
            step.temperature,
            step.seeds,
            step.positions,
            step.draft_to_target,
            *(tensor.stride(0) for tensor in out),
            *step.base_logits.stride(),
            _stride(step.projection),
            _stride(step.codes),
            _stride(step.tokens),
            _stride(step.temperature),
            _stride(step.seeds),
            _stride(step.positions),
            step.slot,
            num_embeddings,
            vocab_size,
            num_groups,
            RANK=rank,
            DEPTH_TILE=min(DRAW_DEPTH_TILE, padded_to_power_of_two(rank)),
            GROUPS_PADDED=padded_to_power_of_two(num_groups),
            IS_EARLY=is_early,
            launch_pdl=is_early,
            num_warps=4,
        )


def _check_head(
    base_logits: torch.Tensor,
    projection: torch.Tensor | None,
    tokens: torch.Tensor | None,
    embedding: torch.Tensor | None,
    codes: torch.Tensor | None,
) -> torch.Tensor | None:
    """Check the Markov head and return the tensor that holds the codes, None for no head."""
    device, (num_rows, vocab_size) = base_logits.device, base_logits.shape
    given = [
        name
        for name, tensor in (("tokens", tokens), ("embedding", embedding), ("codes", codes))
        if tensor is not None
    ]
    if projection is None:
        if given:
            raise InvalidArgumentError(f"{given[0]} needs a projection, got none")
        return None
    if given not in (["tokens", "embedding"], ["codes"]):
        raise InvalidArgumentError(
            "a projection needs tokens and embedding, or codes, got "
            f"{' and '.join(given) or 'none'}"
        )
    check_tensor(
        "projection", projection, HEAD_DTYPES, [vocab_size, None], device, is_last_dim_dense=True
    )
    dtype, rank = projection.dtype, projection.shape[1]
    if rank < 1:
        raise InvalidArgumentError("rank of the projection must be at least 1, got 0")
    if codes is not None:
        check_tensor("codes", codes, [dtype], [num_rows, rank], device, is_last_dim_dense=True)
        return codes
    assert tokens is not None
    assert embedding is not None
    check_tensor("tokens", tokens, [torch.int64], [num_rows], device)
    check_tensor("embedding", embedding, [dtype], [None, rank], device, is_last_dim_dense=True)
    if embedding.shape[0] < 1:
        raise InvalidArgumentError("embedding must have at least 1 row, got 0")
    return embedding


def _checked_out(num_rows: int, device: torch.device, out: MarkovDraw | None) -> MarkovDraw:
    dtypes = (torch.int64, torch.float32, torch.float32, torch.int32)
    if out is None:
        return MarkovDraw(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))
    for name, tensor, dtype in zip(MarkovDraw._fields, out, dtypes, strict=True):
        check_tensor(f"out.{name}", tensor, [dtype], [num_rows], device)
    return out


def markov_step(
    base_logits: torch.Tensor,
    projection: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    slot: int,
    tokens: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    draft_to_target: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: MarkovDraw | None = None,
    settings: MarkovSettings | None = None,
) -> MarkovDraw:
    """Draw a draft token per row from softmax((base + projection . code) / temperature).

    A row's draw is a function of its logits, code, temperature, seed, position and slot: not of its
    place or of other rows. Rows below a temperature of 1e-5 take the largest logit, the leftmost of
    equals, as all rows do without `temperature`. A NaN or +inf leaves its group of 64 tokens out
    and flags the row, whose logit is NaN then, so that verification takes the draft for none. A row
    of nothing else gives draft token 0. May be captured once `workspace` and `out` are given.

    Args:
        base_logits (float, [num_rows, vocab_size], device): Logits of the slot, of the draft's
            vocabulary, any strides. Columns no target token has are left out by a narrower view.
        projection (bfloat16 or float32, [vocab_size, rank], device): Second matrix of the head,
            last dim dense; None for no bias.
        temperature (float32, [num_rows], device): Any stride; None for greedy rows only.
        seeds (int64, [num_rows], device): Seed of each row's request, any stride. None without
            `temperature`.
        positions (int64, [num_rows], device): Absolute position of the drawn token, any stride.
            None without `temperature`.
        slot: Number of the draft in its round, from 0; part of the key.
        tokens (int64, [num_rows], device): Previous token of each row as an id of the target, any
            stride; a placeholder (-1) is read as token 0.
        embedding (as projection, [num_embeddings, rank], device): First matrix of the head; the
            code of a row is that of its token. Last dim dense.
        codes (as projection, [num_rows, rank], device): Codes, instead of tokens and embedding.
            Last dim dense.
        draft_to_target (int32 or int64, [vocab_size], device): Added to a draft id to make the
            target's, for a reduced draft vocabulary. Dense.
        workspace (float32, [n], device): At least `markov_workspace_size` elements; None allocates
            them.
        out: Receives the result; tensors of any stride, such as columns of [num_rows, num_slots].
        settings: Tiles; None chooses.

    Returns:
        The draw.

    Raises:
        InvalidArgumentError: If a dtype, shape, number or device does not fit, or if what belongs
            together is not given together.
    """
    device = launch_device("base_logits", base_logits)
    check_tensor("base_logits", base_logits, FLOAT_DTYPES, [None, None], device)
    num_rows, vocab_size = base_logits.shape
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise InvalidArgumentError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
    if not 0 <= slot < 2**31:
        raise InvalidArgumentError(f"slot must be in [0, 2**31), got {slot}")
    source = _check_head(base_logits, projection, tokens, embedding, codes)
    if temperature is not None:
        if seeds is None or positions is None:
            raise InvalidArgumentError("temperature needs seeds and positions, got none")
        check_rows({"temperature": temperature}, num_rows, device)
        check_tensor("seeds", seeds, [torch.int64], [num_rows], device)
        check_tensor("positions", positions, [torch.int64], [num_rows], device)
    if draft_to_target is not None:
        check_tensor(
            "draft_to_target",
            draft_to_target,
            INT_DTYPES,
            [vocab_size],
            device,
            is_last_dim_dense=True,
        )
    out = _checked_out(num_rows, device, out)
    needed = markov_workspace_size(num_rows, vocab_size)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    check_tensor("workspace", workspace, [torch.float32], [None], device, is_last_dim_dense=True)
    if workspace.numel() < needed:
        raise InvalidArgumentError(
            f"workspace must have at least {needed} elements, got {workspace.numel()}"
        )
    if num_rows > 0:
        step = _Step(
            base_logits,
            projection,
            source,
            tokens,
            temperature,
            seeds,
            positions,
            slot,
            draft_to_target,
        )
        dtype, rank = torch.float32, 1
        if projection is not None:
            dtype, rank = projection.dtype, projection.shape[1]
        launch(step, workspace, out, settings or markov_settings(num_rows, rank, dtype))
    return out
