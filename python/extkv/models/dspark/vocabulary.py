"""The reduced vocabulary of a drafter: which target token each draft token is.

Files store it twice: `d2t` holds the target id minus the draft id of each draft token, `t2d` a flag
for each target token that can be drafted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError, ModelFileError

if TYPE_CHECKING:
    from extkv.models.checkpoint import Checkpoint
    from extkv.models.dspark.config import DSparkConfig

DRAFT_TO_TARGET, TARGET_TO_DRAFT = "d2t", "t2d"


def read_target_ids(
    checkpoint: Checkpoint, config: DSparkConfig, vocab_size: int
) -> torch.Tensor | None:
    """Read the tables of a checkpoint.

    Args:
        checkpoint: The drafter's tensors.
        config: The drafter.
        vocab_size: Number of token ids of the target.

    Returns:
        Tensor (int64, [num_draft_tokens], host): target token of each draft token; None where the
        two are the same.

    Raises:
        ModelFileError: If the drafter's vocabulary is smaller than the target's and there is no
            `d2t`, a table has another shape, or the tables contradict.
    """
    num_draft_tokens = config.num_draft_tokens
    has_tables = DRAFT_TO_TARGET in checkpoint.tensor_names
    if not has_tables:
        if num_draft_tokens < vocab_size:
            msg = (
                f"model file {checkpoint.directory}: tensor {DRAFT_TO_TARGET} is missing: "
                f"draft_vocab_size is {num_draft_tokens}, vocab_size of the target {vocab_size}"
            )
            raise ModelFileError(msg)
        return None
    offsets = checkpoint.read_table(DRAFT_TO_TARGET, (num_draft_tokens,))
    try:
        target_ids = target_ids_of(offsets, min(vocab_size, config.backbone.vocab_size))
    except InvalidArgumentError as error:
        raise ModelFileError(f"model file {checkpoint.directory}: {error}") from error
    if TARGET_TO_DRAFT in checkpoint.tensor_names:
        flags = checkpoint.read_table(TARGET_TO_DRAFT, (config.backbone.vocab_size,))
        _check_flags(checkpoint, target_ids, flags)
    is_identity = num_draft_tokens == vocab_size and not bool(offsets.any())
    return None if is_identity else target_ids


def target_ids_of(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the target tokens that a `d2t` table means.

    Args:
        offsets (int64, [num_draft_tokens]): Target id minus draft id.
        vocab_size: Number of token ids of the target.

    Returns:
        Tensor (int64, [num_draft_tokens]).

    Raises:
        InvalidArgumentError: If a target id is out of range, or they do not ascend.
    """
    draft_ids = torch.arange(offsets.shape[0], device=offsets.device)
    target_ids = draft_ids + offsets
    is_outside = (target_ids < 0) | (target_ids >= vocab_size)
    if bool(is_outside.any()):
        first = int(is_outside.nonzero()[0])
        msg = (
            f"d2t: draft token {first} is target token {int(target_ids[first])}, "
            f"out of range for vocab_size {vocab_size}"
        )
        raise InvalidArgumentError(msg)
    is_back = target_ids[1:] <= target_ids[:-1]
    if bool(is_back.any()):
        first = int(is_back.nonzero()[0]) + 1
        msg = (
            f"d2t: draft token {first} is target token {int(target_ids[first])}, "
            f"expected more than {int(target_ids[first - 1])} of the draft token before"
        )
        raise InvalidArgumentError(msg)
    return target_ids


def offsets_of(target_ids: torch.Tensor) -> torch.Tensor:
    """Return the `d2t` table (int64, [num_draft_tokens]) of ascending target ids."""
    return target_ids - torch.arange(target_ids.shape[0], device=target_ids.device)


def flags_of(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the `t2d` table (bool, [vocab_size]) of target ids."""
    flags = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids.device)
    flags[target_ids] = True
    return flags


def _check_flags(checkpoint: Checkpoint, target_ids: torch.Tensor, flags: torch.Tensor) -> None:
    expected = flags_of(target_ids, flags.shape[0])
    is_different = (flags != 0) != expected
    if bool(is_different.any()):
        token_id = int(is_different.nonzero()[0])
        msg = (
            f"model file {checkpoint.directory}: {TARGET_TO_DRAFT} says {bool(flags[token_id])} "
            f"for target token {token_id}, {DRAFT_TO_TARGET} says {bool(expected[token_id])}"
        )
        raise ModelFileError(msg)
