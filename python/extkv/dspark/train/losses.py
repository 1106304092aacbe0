"""The loss of a batch, with draft logits that exist a chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from extkv.dspark.train.draft_vocabulary import NEVER
from extkv.op_modules import op_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extkv.drafting import DraftLossRows
    from extkv.dspark.train.settings import LossSettings


class Comparison(NamedTuple):
    """What rows of drafts are compared with.

    Attributes:
        target_logits (float, [num_target_rows, vocab_size]): Logits of the target. One column more
            than drafts have stands for all tokens that cannot be drafted.
        target_rows (int64, [num_rows]): Which of them each row is to match.
        label_ids (int64, [num_rows]): Token that came.
        weights (float32, [num_rows]): Weight of each row in the loss.
        num_outside: The last so many rows have a token that cannot be drafted: there is no
            cross-entropy in their loss.
    """

    target_logits: torch.Tensor
    target_rows: torch.Tensor
    label_ids: torch.Tensor
    weights: torch.Tensor
    num_outside: int = 0


class LossTerms(NamedTuple):
    """The loss and what it is made of.

    Attributes:
        loss (float32 or float64, []): Weighted sum over the rows; has a gradient.
        cross_entropy (float32 or float64, [num_rows]): See `DraftLossRows`.
        total_variation (float32 or float64, [num_rows]): The same.
        target_logprob (float32 or float64, [num_rows]): The same.
        argmax (int64, [num_rows]): The same.
    """

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    target_logprob: torch.Tensor
    argmax: torch.Tensor

    @property
    def acceptance(self) -> torch.Tensor:
        """Chance that each draft is accepted, `1 - total_variation / 2` in [0, 1]."""
        return (1 - self.total_variation / 2).clamp(0, 1)


def token_loss(  # noqa: PLR0917, what the two heads are made of
    hidden: torch.Tensor,
    codes: torch.Tensor | None,
    markov_weight: torch.Tensor | None,
    lm_head: torch.Tensor,
    comparison: Comparison,
    settings: LossSettings,
    *,
    chunk_bytes: int,
) -> LossTerms:
    """Return the loss of rows of drafts against tokens and laws, without the confidence.

    The gradient is computed with the loss, chunk by chunk, so that logits never pass from one to
    the other. The head gets none.

    Args:
        hidden (float, [num_rows, hidden_size]): Hidden states of the rows.
        codes (float, [num_rows, markov_rank]): Their codes; None without a Markov head.
        markov_weight (float, [vocab_size, markov_rank]): What the codes are multiplied by, rounded
            to the dtype of `hidden` first; its gradient is not.
        lm_head (float, [vocab_size, hidden_size]): The target's head.
        comparison: What they are compared with.
        settings: Weights of the terms.
        chunk_bytes: Bytes of logits that may exist at a time; one row at least.
    """
    return LossTerms(
        *_TokenLoss.apply(hidden, codes, markov_weight, lm_head, comparison, settings, chunk_bytes)  # type: ignore[no-untyped-call]
    )


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917, of a torch.autograd.Function
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        codes: torch.Tensor | None,
        markov_weight: torch.Tensor | None,
        lm_head: torch.Tensor,
        comparison: Comparison,
        settings: LossSettings,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, ...]:
        features, weight = hidden, lm_head
        if codes is not None and markov_weight is not None:
            # One product for both heads.
            features = torch.cat((hidden, codes), dim=1)
            weight = torch.cat((lm_head, markov_weight.to(hidden.dtype)), dim=1)
        is_reduced = comparison.target_logits.shape[1] > weight.shape[0]
        if is_reduced:
            weight = torch.cat((weight, weight.new_zeros((1, weight.shape[1]))))
        has_gradient = any(ctx.needs_input_grad)
        gradient = torch.empty_like(features) if has_gradient else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        markov_gradient = None
        if has_gradient and markov_weight is not None:
            markov_gradient = torch.zeros_like(markov_weight)
        op = op_module(hidden.device, "draft_loss").draft_loss
        chunk = max(chunk_bytes // (weight.shape[0] * hidden.dtype.itemsize), 1)
        found: list[DraftLossRows] = []
        num_inside = len(hidden) - comparison.num_outside
        for rows in _chunks(num_inside, len(hidden), chunk):
            logits = functional.linear(features[rows], weight)
            if is_reduced:
                logits[:, -1] = NEVER
            found.append(
                op(
                    logits,
                    comparison.target_logits,
                    comparison.target_rows[rows],
                    comparison.label_ids[rows],
                    comparison.weights[rows] if has_gradient else None,
                    ce_weight=settings.ce_weight if rows.start < num_inside else 0.0,
                    tv_weight=settings.tv_weight,
                )
            )
            if gradient is not None:
                torch.mm(logits, weight, out=gradient[rows])
                if markov_gradient is not None and codes is not None:
                    of_tokens = logits[:, : len(markov_gradient)]
                    markov_gradient += of_tokens.t() @ codes[rows]
        ctx.gradient, ctx.markov_gradient = gradient, markov_gradient
        ctx.num_hidden = hidden.shape[1]
        columns = [torch.cat(parts) for parts in zip(*found, strict=True)] if found else []
        if not columns:
            empty = hidden.new_zeros(0, dtype=wide)
            columns = [empty, empty, empty, comparison.label_ids[:0]]
        per_row = settings.tv_weight * columns[1]
        per_row[:num_inside] += settings.ce_weight * columns[0][:num_inside]
        loss = (per_row * comparison.weights.to(per_row.dtype)).sum()
        ctx.mark_non_differentiable(*columns)
        return loss, *columns

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        gradient, markov_gradient = ctx.gradient, ctx.markov_gradient
        ctx.gradient = ctx.markov_gradient = None
        scaled = gradient * grad_loss.to(gradient.dtype)
        of_hidden = scaled[:, : ctx.num_hidden]
        of_codes = of_weight = None
        if markov_gradient is not None:
            of_codes = scaled[:, ctx.num_hidden :]
            of_weight = markov_gradient * grad_loss
        return of_hidden, of_codes, of_weight, None, None, None, None


def _chunks(num_inside: int, num_rows: int, size: int) -> Iterator[slice]:
    """Yield parts of at most `size` rows that lie on one side of `num_inside`."""
    for first, last in ((0, num_inside), (num_inside, num_rows)):
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))


def confidence_loss(
    logits: torch.Tensor, acceptance: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the cross-entropy of confidences with chances of acceptance.

    Args:
        logits (float32 or float64, [num_rows]): Logits of the confidence head.
        acceptance (float, [num_rows]): Chance that each draft is accepted; gets no gradient.
        weights (float32, [num_rows]): Weight of each row.
    """
    labels = acceptance.detach().to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(
        logits, labels, weight=weights.to(logits.dtype), reduction="sum"
    )
