"""Drafting for one sequence in plain PyTorch: the context as whole tensors, no paged cache.

Slow and simple: tests compare the engine with it, and tools try layouts with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from extkv.errors import InvalidArgumentError
from extkv.models.dspark.blocks import block_positions, block_token_ids, draft_rows
from extkv.sampling_params import LEAST_TEMPERATURE

if TYPE_CHECKING:
    from extkv.models.dspark.model import DSparkModel


@dataclass(frozen=True)
class Draft:
    """Hold the draft of one block.

    Attributes:
        token_ids (int64, [num_drafts]): Target tokens.
        logits (float32 or float64, [num_drafts, num_draft_tokens]): Logits with the Markov bias,
            before the temperature, by draft token.
        probabilities (like `logits`, [num_drafts, vocab_size]): The law that each token was drawn
            from, by target token; one token of probability 1 where none was drawn.
        confidence_logits (float32 or float64, [num_drafts]): None without a confidence head.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor
    probabilities: torch.Tensor
    confidence_logits: torch.Tensor | None


class WholeContext:
    """Keys and values of one sequence's context, with attention of one block over them.

    Attributes:
        keys (model dtype, [num_layers, num_tokens, num_kv_heads, head_dim]): Rotated keys.
        values (model dtype, [num_layers, num_tokens, num_kv_heads, head_dim]): Values.
    """

    has_sliding_windows = True

    def __init__(self, model: DSparkModel) -> None:
        """Begin with an empty context."""
        self._config = model.config.backbone
        shape = (self._config.num_layers, 0, self._config.num_kv_heads, self._config.head_dim)
        self.keys = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.values = self.keys.clone()

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.keys.shape[1]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what `DSparkModel.context` returned for the tokens that follow."""
        self.keys = torch.cat((self.keys, keys), dim=1)
        self.values = torch.cat((self.values, values), dim=1)

    def crop(self, num_tokens: int) -> None:
        """Keep the first tokens only."""
        self.keys, self.values = self.keys[:, :num_tokens], self.values[:, :num_tokens]

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend from every slot of a block to the context and to all slots; store nothing.

        A sliding window begins at its number of tokens before the block, for every slot.
        """
        window = self._config.layer_window(layer_id)
        begin = 0 if window is None else max(self.num_tokens - window, 0)
        keys = torch.cat((self.keys[layer_id, begin:], key))
        values = torch.cat((self.values[layer_id, begin:], value))
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],  # [1, num_heads, block_size, head_dim]
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            is_causal=False,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


class ReferenceSpeculator:
    """Draft for one sequence.

    Append the taps of every token that is decided and went through the target, in order; then
    `draft` after the anchor, the one decided token that did not.

    Attributes:
        model: The drafter.
        context: Keys and values so far.
    """

    def __init__(self, model: DSparkModel) -> None:
        """Begin with an empty context."""
        self.model = model
        self.context = WholeContext(model)

    def append(self, taps: torch.Tensor) -> None:
        """Add the tokens that follow to the context.

        Args:
            taps (model dtype, [num_taps, num_tokens, hidden_size]): Their taps.

        Raises:
            InvalidArgumentError: If `taps` does not fit, or more tokens come than positions exist.
        """
        start, end = self.context.num_tokens, self.context.num_tokens + taps.shape[1]
        if end > self.model.num_positions:
            limit = self.model.num_positions
            msg = f"the context would have {end} tokens, the drafter has {limit} positions"
            raise InvalidArgumentError(msg)
        positions = torch.arange(start, end, device=self.model.device)
        self.context.append(*self.model.context(taps, positions))

    def hidden(self, anchor_token_id: int) -> torch.Tensor:
        """Return the hidden states of the slots that predict.

        Returns:
            Tensor (model dtype, [num_drafts, hidden_size]).
        """
        config, device = self.model.config, self.model.device
        anchor_position = torch.tensor([self.context.num_tokens], device=device)
        token_ids = block_token_ids(config, torch.tensor([anchor_token_id], device=device))
        positions = block_positions(config, anchor_position, self.model.num_positions)
        return draft_rows(config, self.model.block_forward(token_ids, positions, self.context))[0]

    @torch.inference_mode()
    def draft(
        self,
        anchor_token_id: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        num_drafts: int | None = None,
    ) -> Draft:
        """Draft the tokens after an anchor, which stands right after the context.

        All slots run even where fewer drafts are wanted, because each slot sees the others.

        Args:
            anchor_token_id: The last decided token, a target token.
            temperature: Divisor of the logits; below 1e-5 the largest logit wins.
            generator: Source of random numbers, on the drafter's device.
            num_drafts: Number of drafts, at most those of the block (the default).

        Raises:
            InvalidArgumentError: If `num_drafts` or the anchor is out of range.
        """
        model = self.model
        count = model.config.num_drafts if num_drafts is None else num_drafts
        if not 1 <= count <= model.config.num_drafts:
            msg = f"num_drafts is {count}, expected 1 to {model.config.num_drafts}"
            raise InvalidArgumentError(msg)
        if not 0 <= anchor_token_id < model.config.backbone.vocab_size:
            size = model.config.backbone.vocab_size
            msg = f"anchor token is {anchor_token_id}, out of range for vocab_size {size}"
            raise InvalidArgumentError(msg)
        hidden = self.hidden(anchor_token_id)[:count]
        previous = torch.tensor([anchor_token_id], device=model.device)
        state = model.initial_state(1)
        logits, laws, preceding = [], [], []
        for step in range(count):
            row = model.base_logits(hidden[step : step + 1])
            if model.markov_weight is not None:
                codes, state = model.codes(previous, hidden[step : step + 1], state)
                row = row + functional.linear(codes, model.markov_weight)
            row = row.to(torch.promote_types(row.dtype, torch.float32))
            law = _law(row, temperature)
            preceding.append(previous)
            previous = model.to_target_ids(_choose(law, temperature, generator))
            logits.append(row)
            laws.append(law)
        token_ids = torch.cat((*preceding[1:], previous))
        confidence = None
        if model.config.has_confidence_head:
            confidence = model.confidence_logits(hidden, torch.cat(preceding))
        return Draft(token_ids, torch.cat(logits), self._by_target(torch.cat(laws)), confidence)

    def _by_target(self, laws: torch.Tensor) -> torch.Tensor:
        """Spread laws over draft tokens out over all target tokens."""
        target_ids = self.model.target_ids
        if target_ids is None:
            return laws
        spread = laws.new_zeros((laws.shape[0], self.model.config.backbone.vocab_size))
        return spread.index_copy_(1, target_ids, laws)


def _law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature < LEAST_TEMPERATURE:
        return functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    return torch.softmax(logits / temperature, dim=-1)


def _choose(
    law: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    if temperature < LEAST_TEMPERATURE:
        return law.argmax(dim=-1)
    return torch.multinomial(law, 1, generator=generator)[:, 0]
