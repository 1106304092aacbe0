"""Records that pass between the drafting ops, their twins and the engine; tensors only, no code."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class DraftRequests(NamedTuple):
    """Hold what a draft round needs to know of each request of a step.

    Attributes:
        anchors (int64, [num_reqs], device): Token that was decided last.
        num_rejected (int32, [num_reqs], device): Last rows of the step that do not stand; all of a
            request that drafts nothing.
        temperature (float32, [num_reqs], device): Its temperature.
        seeds (int64, [num_reqs], device): Its random key. Both may be the tensors of the round
            before, with the numbers that they had then.
    """

    anchors: torch.Tensor
    num_rejected: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class DraftBlock(NamedTuple):
    """Inputs of a draft round, from `draft_block_inputs`.

    A request has `num_queries` slots: `num_drafts` of them if the anchor's slot is sampled, one
    more if it is not.

    Attributes:
        token_ids (int64, [num_reqs, num_queries]): Anchor, then mask tokens; ids an embedding has.
        positions (int64, [num_reqs, num_queries]): Positions for the rotary embedding, clamped to
            the last one allowed.
        slots (int64, [num_reqs, num_queries]): Cache slots of the block; -1 past the limit.
        sample_rows (int64, [num_reqs, num_drafts]): Rows of the flattened block that predict.
        sample_positions (int64, [num_reqs, num_drafts]): Position of the token each predicts, not
            clamped: it keys the draw.
        anchor_positions (int64, [num_reqs]): Position of the anchor; -1 for a request of no rows.
        seq_lens (int32, [num_reqs]): Tokens that a slot attends to, context and block; 0 for a
            request of no rows.
        context_positions (int64, [num_rows]): Positions of the rows just verified, clamped; 0 for
            rejected and padding rows.
        context_slots (int64, [num_rows]): Their cache slots; -1 for rejected and padding rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    anchor_positions: torch.Tensor
    seq_lens: torch.Tensor
    context_positions: torch.Tensor
    context_slots: torch.Tensor


class MarkovDraw(NamedTuple):
    """Result of `markov_step`, one element per row.

    Attributes:
        tokens (int64, [num_rows]): Drawn token, as an id of the target.
        logits (float32, [num_rows]): Its draft logit, bias included, not divided by the
            temperature; NaN in a row with a NaN or +inf.
        log_sum_exp (float32, [num_rows]): Of all draft logits over the temperature, so that the
            token's log-probability is `logits / temperature - log_sum_exp`. 0 for greedy rows.
        flags (int32, [num_rows]): `RowFlag` bits; 0 where all is well.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    log_sum_exp: torch.Tensor
    flags: torch.Tensor


class DraftLaw(NamedTuple):
    """What the distribution of sampled drafts is computed from again, where it is needed.

    Attributes:
        base_logits (float, [num_draft_rows, num_slots, draft_vocab_size]): Logits before the
            Markov bias, any strides.
        logits (float32, [num_draft_rows, num_slots]): As `MarkovDraw`, any strides.
        log_sum_exp (float32, [num_draft_rows, num_slots]): The same.
        projection (float, [draft_vocab_size, rank]): Of the Markov head; None for no bias. Last dim
            dense.
        embedding (float, [num_embeddings, rank]): Codes of the previous token, same dtype; last dim
            dense. None if `codes` are given.
        codes (float, [num_draft_rows, num_slots, rank]): Codes of each slot, of gated and recurrent
            heads; last dim dense. None if an `embedding` is given.
        draft_rows (int64, [num_reqs]): First index of the tensors above for each request; None
            where they have the order of the requests.
        draft_ids (int32, [vocab_size]): Draft id of each target token, -1 for none; None if both
            vocabularies are the same. Dense.
    """

    base_logits: torch.Tensor
    logits: torch.Tensor
    log_sum_exp: torch.Tensor
    projection: torch.Tensor | None = None
    embedding: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    draft_rows: torch.Tensor | None = None
    draft_ids: torch.Tensor | None = None


class Verification(NamedTuple):
    """Result of `verify_drafts`, one element per request.

    Attributes:
        num_accepted (int32, [num_reqs]): Drafts accepted, from the first on.
        next_tokens (int64, [num_reqs]): Token after them: recovered or bonus.
        flags (int32, [num_reqs]): `RowFlag` bits of the row that the next token comes from.
    """

    num_accepted: torch.Tensor
    next_tokens: torch.Tensor
    flags: torch.Tensor


class DraftLossRows(NamedTuple):
    """What `draft_loss` found for each row of draft logits.

    Attributes:
        cross_entropy (float32, [num_rows]): Minus the log-probability of the label in the drafter's
            law.
        total_variation (float32, [num_rows]): Sum over the vocabulary of the distance of both laws;
            1 minus its half is the chance that a draft is accepted.
        target_logprob (float32, [num_rows]): Log-probability of the label in the target's law.
        argmax (int64, [num_rows]): The drafter's likeliest token, the first of equals.
    """

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    target_logprob: torch.Tensor
    argmax: torch.Tensor
