"""The forward pass of `DecoderModel` for weights in host memory, in float32.

It computes the same with fewer and larger operations, because on a processor the time between them
counts, and overwrites what nobody reads again, because the page faults of new memory cost more than
the arithmetic on it. Few rows go through batched multiplications: MKL copies all weights around for
each ordinary one, and not for those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from extkv.models.decoder import DecoderModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.models.decoder import AttentionCache
    from extkv.models.weights import LayerWeights

# Weight rows of one product of a batched multiplication, and the numbers of tokens that it is
# faster for; measured with MKL 2024.2 on AVX-512.
BLOCK_ROWS = 32
MIN_BATCHED_ROWS = 3
MAX_BATCHED_ROWS = 16


class HostDecoder(DecoderModel):
    """Run a model on the host; see `DecoderModel`."""

    @classmethod
    def of(cls, model: DecoderModel) -> DecoderModel:
        """Return a decoder of the same weights; the model itself where this class is not for it.

        Args:
            model: A model. Anywhere but in host memory, or of another dtype than float32, it is
                returned as it is.
        """
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return model
        return cls(model.config, model.weights, ops=model.ops, max_model_len=model.num_positions)

    @torch.inference_mode()
    def compute_logits(
        self, hidden: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of hidden states; see `DecoderModel.compute_logits`."""
        if out is not None:
            return super().compute_logits(hidden, out=out)
        return linear(hidden, self.weights.lm_head, None)

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: AttentionCache,
        taps: Sequence[int],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        config, layers = self.config, self.weights.layers
        # Each is [num_tokens, 1, head_dim / 2].
        angles = tuple(
            table.index_select(0, positions)[:, None] for table in (self._cosine, self._sine)
        )
        residual = functional.embedding(token_ids, self.weights.embedding)
        for layer_id, layer in enumerate(layers):
            _copy_tap(layer_id - 1, residual, taps, out)
            hidden = rms_norm(residual, layer.input_norm, config.rms_norm_eps)
            attended = self._attended(layer_id, hidden, angles, cache)
            add_linear(residual, attended.flatten(1), layer.o_proj, layer.o_bias)
            hidden = rms_norm(residual, layer.post_attention_norm, config.rms_norm_eps)
            add_linear(residual, gated_mlp(hidden, layer), layer.down_proj, layer.down_bias)
        _copy_tap(config.num_layers - 1, residual, taps, out)
        return rms_norm(residual, self.weights.final_norm, config.rms_norm_eps)

    def _attended(
        self,
        layer_id: int,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, ...],
        cache: AttentionCache,
    ) -> torch.Tensor:
        config, layer = self.config, self.weights.layers[layer_id]
        fused = linear(hidden, layer.qkv_proj, layer.qkv_bias)
        heads = fused.view(hidden.shape[0], -1, config.head_dim)
        key_start, value_start = config.num_heads, config.num_heads + config.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, norm in (
                (heads[:, :key_start], layer.q_norm),
                (heads[:, key_start:value_start], layer.k_norm),
            ):
                part.copy_(rms_norm(part, norm, config.rms_norm_eps))
        rotate(heads[:, :value_start], *angles)
        return cache.attend(
            layer_id,
            heads[:, :key_start],
            heads[:, key_start:value_start],
            heads[:, value_start:],
        )


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise rows; see `extkv.models.ops.RMSNorm`."""
    norm: torch.Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1 / hidden.shape[-1]).add_(eps).rsqrt_()
    return (hidden * scale).mul_(weight)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
    """Rotate heads in place; dimension `i` pairs with `i + head_dim / 2`.

    Args:
        heads (float32, [num_tokens, num_heads, head_dim]): Only heads are contiguous.
        cosine (float32, [num_tokens, 1, head_dim / 2]): Cosine of each angle.
        sine (float32, [num_tokens, 1, head_dim / 2]): Sine of each angle.
    """
    first, second = heads.chunk(2, dim=-1)
    crossed = first * sine
    first.mul_(cosine).addcmul_(second, sine, value=-1)
    torch.addcmul(crossed, second, cosine, out=second)


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` (float32, [num_tokens, out_features])."""
    if not _is_batched(hidden, weight):
        return functional.linear(hidden, weight, bias)
    blocks = _block_products(hidden, weight)
    product = blocks.transpose(0, 1).flatten(1)
    return product if bias is None else product.add_(bias)


def add_linear(
    residual: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Add `hidden @ weight.T + bias` to the residual stream in place."""
    if _is_batched(hidden, weight):
        num_rows = hidden.shape[0]
        blocks = _block_products(hidden, weight)
        residual.view(num_rows, -1, BLOCK_ROWS).add_(blocks.transpose(0, 1))
    else:
        residual.addmm_(hidden, weight.t())
    if bias is not None:
        residual.add_(bias)


def gated_mlp(hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """Return SiLU of the gate projection times the up projection, the input of `down_proj`."""
    weight, num_rows = layer.gate_up_proj, hidden.shape[0]
    if layer.gate_up_bias is None and _is_batched(hidden, weight) and _num_blocks(weight) % 2 == 0:
        # The first half of the blocks is the gate.
        gate, up = _block_products(hidden, weight).chunk(2)
        gated = torch.empty(num_rows, weight.shape[0] // 2)
        by_block = gated.view(num_rows, -1, BLOCK_ROWS).transpose(0, 1)
        torch.mul(functional.silu(gate, inplace=True), up, out=by_block)
        return gated
    gate, up = linear(hidden, weight, layer.gate_up_bias).chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def _is_batched(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether blocks of weight rows are multiplied one by one."""
    is_few = MIN_BATCHED_ROWS <= hidden.shape[0] <= MAX_BATCHED_ROWS
    return is_few and weight.shape[0] % BLOCK_ROWS == 0


def _num_blocks(weight: torch.Tensor) -> int:
    return weight.shape[0] // BLOCK_ROWS


def _block_products(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return products by block of weight rows (float32, [num_blocks, num_tokens, BLOCK_ROWS])."""
    num_blocks = _num_blocks(weight)
    blocks = weight.view(num_blocks, BLOCK_ROWS, -1)
    return torch.bmm(hidden.expand(num_blocks, *hidden.shape), blocks.transpose(1, 2))


def _copy_tap(
    layer_id: int, residual: torch.Tensor, taps: Sequence[int], out: torch.Tensor | None
) -> None:
    if out is not None:
        for index, tap in enumerate(taps):
            if tap == layer_id:
                out[index].copy_(residual)
