"""The sequential heads of a drafter: what a draft token adds to the logits of the next one.

The bias of draft `k` is `markov_w2 @ code`, where the code is a vector of `markov_rank` numbers
made from the token before, `x[k - 1]`, and, by type of head, from the hidden state `h[k]` and a
state:

- vanilla: `e = markov_w1[x[k - 1]]`
- gated: `sigmoid(G [h; e] + b) * e`
- rnn: `[gate; candidate; output] = J [s; e; h] + b`, the code is `tanh(output)`, and the state
  becomes `sigmoid(gate) * s + (1 - sigmoid(gate)) * tanh(candidate)`; it is 0 at the start of every
  block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.models.dspark.weights import DSparkWeights


def markov_embedding(weights: DSparkWeights, previous_token_ids: torch.Tensor) -> torch.Tensor:
    """Look up the Markov embedding of target tokens.

    Args:
        weights: Weights with a Markov head.
        previous_token_ids (int64 or int32, [...]): Target tokens; negative ids are placeholders and
            read as token 0.

    Returns:
        Tensor (model dtype, [..., markov_rank]).
    """
    return functional.embedding(previous_token_ids.clamp(min=0), _present(weights.markov_w1))


def initial_state(weights: DSparkWeights, num_rows: int) -> torch.Tensor | None:
    """Return the state at the start of a block.

    Returns:
        Tensor (model dtype, [num_rows, markov_rank]) of zeros, or None for a head without one.
    """
    if weights.joint_proj is None:
        return None
    rank = _present(weights.markov_w1).shape[1]
    return weights.joint_proj.new_zeros((num_rows, rank))


def markov_codes(
    weights: DSparkWeights,
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the vectors that `markov_w2` multiplies, and the state for the next draft.

    Args:
        weights: Weights with a Markov head.
        embedded (model dtype, [..., markov_rank]): Markov embedding of the tokens before.
        hidden (model dtype, [..., hidden_size]): Hidden states of the slots that predict.
        state (model dtype, [..., markov_rank]): What the call for the draft before returned, or
            `initial_state`.

    Returns:
        Codes (model dtype, [..., markov_rank]), and the state, None for a head without one.
    """
    if weights.gate_proj is not None:
        features = torch.cat((hidden, embedded), dim=-1)
        gate = functional.linear(features, weights.gate_proj, weights.gate_bias)
        return torch.sigmoid(gate) * embedded, None
    if weights.joint_proj is not None:
        features = torch.cat(
            (_present(state, "state of its Markov head here"), embedded, hidden), dim=-1
        )
        joint = functional.linear(features, weights.joint_proj, weights.joint_bias)
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        state = kept * _present(state, "state of its Markov head here") + (1 - kept) * torch.tanh(
            candidate
        )
        return torch.tanh(output), state
    return embedded, None


def confidence_logits(
    weights: DSparkWeights, hidden: torch.Tensor, embedded: torch.Tensor | None
) -> torch.Tensor:
    """Return the logit of the probability that each draft is accepted if those before it are.

    Args:
        weights: Weights with a confidence head.
        hidden (model dtype, [..., hidden_size]): Hidden states of the slots that predict.
        embedded (model dtype, [..., markov_rank]): Markov embedding of the tokens before; None for
            a head that does not read it.

    Returns:
        Tensor (float32, or float64 of float64 weights, [...]).
    """
    weight = _present(weights.confidence_proj, "confidence head")
    wide = torch.promote_types(weight.dtype, torch.float32)
    features = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
    bias = weights.confidence_bias
    logits = functional.linear(
        features.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
    )
    return logits.squeeze(-1)


def _present(tensor: torch.Tensor | None, what: str = "Markov head") -> torch.Tensor:
    if tensor is None:
        raise InvalidArgumentError(f"the drafter has no {what}")
    return tensor
