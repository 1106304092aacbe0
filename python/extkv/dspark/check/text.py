"""What a target says over a text: taps of its layers, and hidden states for its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError
from extkv.models.attention import causal_attention
from extkv.models.decoder import EMBEDDING_TAP

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from extkv.models.config import ModelConfig
    from extkv.models.decoder import DecoderModel


@dataclass(frozen=True)
class TargetText:
    """Hold a text and what the target computes over it.

    Attributes:
        token_ids (int64, [num_tokens]): Prompt, then what the target wrote.
        num_prompt_tokens: Length of the prompt.
        hidden (model dtype, [num_tokens, hidden_size]): Normalised hidden states.
        taps: Residual stream after each layer asked for (model dtype, [num_tokens, hidden_size]);
            -1 is the embedding output.
    """

    token_ids: torch.Tensor
    num_prompt_tokens: int
    hidden: torch.Tensor
    taps: dict[int, torch.Tensor]


class _OneSequence:
    """Causal attention over one sequence that is computed whole; stores nothing."""

    has_sliding_windows = True

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        window = self._config.layer_window(layer_id)
        return causal_attention(query, key, value, sliding_window=window)


def read_text(
    target: DecoderModel,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    tap_layer_ids: Collection[int],
) -> TargetText:
    """Run the target over a text.

    Args:
        target: The target.
        token_ids: The text; what follows the prompt should be the target's own.
        num_prompt_tokens: Length of the prompt.
        tap_layer_ids: Layers that are wanted.

    Raises:
        InvalidArgumentError: If the text is empty or longer than the target's positions, a token is
            out of its vocabulary, or a tap is no layer.
    """
    count, limit = len(token_ids), target.num_positions
    if not 1 <= count <= limit:
        raise InvalidArgumentError(f"the text has {count} tokens, expected 1 to {limit}")
    size = target.config.vocab_size
    outside = [token_id for token_id in token_ids if not 0 <= token_id < size]
    if outside:
        raise InvalidArgumentError(f"token {outside[0]} is out of range for vocab_size {size}")
    tokens = torch.tensor(token_ids, device=target.device)
    positions = torch.arange(count, device=target.device)
    layer_ids = sorted(tap_layer_ids)
    cache = _OneSequence(target.config)
    hidden, taps = target.forward(tokens, positions, cache, taps=layer_ids)
    return TargetText(tokens, num_prompt_tokens, hidden, dict(zip(layer_ids, taps, strict=True)))


def tappable(layer_id: int, num_layers: int) -> bool:
    """Whether a layer's output can be read."""
    return EMBEDDING_TAP <= layer_id < num_layers
