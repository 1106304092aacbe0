"""Arguments of a verification, checked once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from extkv.errors import InvalidArgumentError
from extkv.kernels.launch.arguments import FLOAT_DTYPES, check_tensor
from extkv.kernels.logit_cutoff import check_logits, check_rows

if TYPE_CHECKING:
    from extkv.drafting import DraftLaw

Method = Literal["standard", "block", "synthetic"]
MAX_NUM_DRAFTS = 31
_HEAD_DTYPES = (torch.bfloat16, torch.float32)


class VerificationCall(NamedTuple):
    """Arguments of `verify_drafts`, as it documents them."""

    target_logits: torch.Tensor
    token_ids: torch.Tensor
    window_starts: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    draft: DraftLaw | None
    max_num_drafts: int
    method: Method
    cutoff: torch.Tensor | None
    acceptance_rates: torch.Tensor | None

    @property
    def num_reqs(self) -> int:
        """Windows, empty ones included."""
        return self.window_starts.shape[0] - 1

    @property
    def codes(self) -> torch.Tensor | None:
        """What holds the codes of previous tokens: an embedding, or codes of each slot."""
        if self.draft is None:
            return None
        return self.draft.codes if self.draft.embedding is None else self.draft.embedding

    @property
    def rank(self) -> int:
        """Size of a code, 1 without any."""
        return 1 if self.codes is None else self.codes.shape[-1]

    @property
    def code_strides(self) -> tuple[int, int]:
        """Strides of a draft row, or of an embedding's row, and of a slot."""
        if self.codes is None:
            return 0, 0
        return self.codes.stride(0), 0 if self.has_tokens else self.codes.stride(1)

    @property
    def has_tokens(self) -> bool:
        """Whether codes are looked up by token."""
        return self.draft is not None and self.draft.embedding is not None


def _check_head(draft: DraftLaw, device: torch.device) -> None:
    if draft.projection is None:
        return
    if (draft.embedding is None) == (draft.codes is None):
        found = "neither" if draft.codes is None else "both"
        raise InvalidArgumentError(f"draft.projection needs embedding or codes, got {found}")
    num_draft_rows, num_slots, draft_vocab_size = draft.base_logits.shape
    for name, tensor, dtypes, shape in (
        ("projection", draft.projection, _HEAD_DTYPES, [draft_vocab_size, None]),
        ("embedding", draft.embedding, [draft.projection.dtype], [None, draft.projection.shape[1]]),
        (
            "codes",
            draft.codes,
            [draft.projection.dtype],
            [num_draft_rows, num_slots, draft.projection.shape[1]],
        ),
    ):
        if tensor is not None:
            check_tensor(f"draft.{name}", tensor, dtypes, shape, device, is_last_dim_dense=True)


def check_draft(call: VerificationCall) -> None:
    """Check the draft's law against the target and the windows.

    Raises:
        InvalidArgumentError: If something does not fit.
    """
    draft = call.draft
    if draft is None:
        return
    device, vocab_size = call.target_logits.device, call.target_logits.shape[1]
    check_tensor("draft.base_logits", draft.base_logits, FLOAT_DTYPES, [None] * 3, device)
    num_draft_rows, num_slots, draft_vocab_size = draft.base_logits.shape
    if num_slots < call.max_num_drafts:
        raise InvalidArgumentError(
            f"draft.base_logits must have at least {call.max_num_drafts} slots, got {num_slots}"
        )
    for name, numbers in (("logits", draft.logits), ("log_sum_exp", draft.log_sum_exp)):
        shape = [num_draft_rows, num_slots]
        check_tensor(f"draft.{name}", numbers, [torch.float32], shape, device)
    _check_head(draft, device)
    if draft.draft_rows is not None:
        shape = [call.num_reqs]
        check_tensor(
            "draft.draft_rows",
            draft.draft_rows,
            [torch.int64],
            shape,
            device,
            is_last_dim_dense=True,
        )
    elif num_draft_rows < call.num_reqs:
        raise InvalidArgumentError(
            f"draft.base_logits must have a row for each of {call.num_reqs} requests, got "
            f"{num_draft_rows}"
        )
    if draft.draft_ids is not None:
        ids = draft.draft_ids
        check_tensor(
            "draft.draft_ids", ids, [torch.int32], [vocab_size], device, is_last_dim_dense=True
        )
    elif draft_vocab_size != vocab_size:
        raise InvalidArgumentError(
            f"draft.base_logits must have the target's vocabulary of {vocab_size}, got "
            f"{draft_vocab_size} and no draft_ids"
        )


def check_windows(call: VerificationCall) -> None:
    """Check all arguments but the draft's law.

    Raises:
        InvalidArgumentError: If something does not fit.
    """
    device = check_logits(call.target_logits)
    num_rows = call.target_logits.shape[0]
    check_rows({"temperature": call.temperature}, num_rows, device)
    for name, tensor in (
        ("token_ids", call.token_ids),
        ("seeds", call.seeds),
        ("positions", call.positions),
    ):
        check_tensor(name, tensor, [torch.int64], [num_rows], device)
    starts, cutoff, rates = call.window_starts, call.cutoff, call.acceptance_rates
    check_tensor("window_starts", starts, [torch.int32], [None], device, is_last_dim_dense=True)
    if starts.shape[0] < 1:
        raise InvalidArgumentError("window_starts must have at least 1 element, got 0")
    if cutoff is not None:
        check_tensor("cutoff", cutoff, [torch.float32], [num_rows], device, is_last_dim_dense=True)
    if not 0 <= call.max_num_drafts <= MAX_NUM_DRAFTS:
        raise InvalidArgumentError(
            f"max_num_drafts must be in [0, {MAX_NUM_DRAFTS}], got {call.max_num_drafts}"
        )
    if call.method not in get_args(Method):
        raise InvalidArgumentError(
            f"method must be one of {', '.join(get_args(Method))}, got {call.method}"
        )
    if (rates is not None) != (call.method == "synthetic"):
        given = "none" if rates is None else "some"
        raise InvalidArgumentError(
            f"acceptance_rates belong to the synthetic method alone, got {given} for {call.method}"
        )
    if rates is not None:
        shape = [call.max_num_drafts]
        check_tensor(
            "acceptance_rates", rates, [torch.float32], shape, device, is_last_dim_dense=True
        )
