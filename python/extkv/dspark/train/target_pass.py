"""One pass of the target over padded texts: taps and logits, for all drafters in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.dspark.train.batches import Batch
    from extkv.models.decoder import DecoderModel

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TargetOutput(NamedTuple):
    """What the target says about a batch.

    Attributes:
        taps (model dtype, [num_taps, num_texts * num_tokens, hidden_size]): Residual stream.
        logits (model dtype, [num_target_rows, vocab_size]): Logits of `Batch.predicting`.
    """

    taps: torch.Tensor
    logits: torch.Tensor


class PaddedTexts:
    """Causal attention over texts of one length, each from position 0; stores nothing."""

    def __init__(self, num_texts: int) -> None:
        """Take the number of texts."""
        self._num_texts = num_texts

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend; see `AttentionCache.attend`."""
        del layer_id

        def by_text(rows: torch.Tensor) -> torch.Tensor:
            return rows.reshape(self._num_texts, -1, *rows.shape[1:]).transpose(1, 2)

        with sdpa_kernel(_BACKENDS):
            attended = functional.scaled_dot_product_attention(
                by_text(query),
                by_text(key),
                by_text(value),
                is_causal=True,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return attended.transpose(1, 2).reshape(query.shape)


def run_target(target: DecoderModel, batch: Batch, tap_layer_ids: Sequence[int]) -> TargetOutput:
    """Run the target over a batch.

    Args:
        target: The target.
        batch: Texts, on the target's device.
        tap_layer_ids: Layers whose output is wanted.
    """
    num_texts, num_tokens = batch.token_ids.shape
    positions = torch.arange(num_tokens, device=target.device).repeat(num_texts)
    # Made outside of inference mode, so that gradients can be computed through what reads it.
    shape = (len(tap_layer_ids), num_texts * num_tokens, target.config.hidden_size)
    taps = torch.empty(shape, dtype=target.dtype, device=target.device)
    hidden, _ = target.forward(
        batch.token_ids.flatten(), positions, PaddedTexts(num_texts), taps=tap_layer_ids, out=taps
    )
    with torch.inference_mode():
        logits = target.compute_logits(hidden.index_select(0, batch.predicting))
    return TargetOutput(taps, logits)
