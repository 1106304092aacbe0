"""Forward pass of a decoder-only model over packed tokens.

The model has no batch dimension and no cache of its own: tokens of any number of sequences lie one
after the other, and the cache object decides which keys each of them sees. A forward pass reads no
tensor value on the host and makes no tensor from host data, so a CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, overload

import torch
from torch.nn import functional

from extkv.errors import InvalidArgumentError
from extkv.models.ops import DecoderOps, Norm
from extkv.models.rope import rope_tables
from extkv.normalized import HeadNorms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.models.config import ModelConfig
    from extkv.models.weights import ModelWeights

# Tap that stands for the embedding output.
EMBEDDING_TAP = -1


class AttentionCache(Protocol):
    """Store keys and values, and attend over them.

    A cache that honours `ModelConfig.layer_window` says so with an attribute
    `has_sliding_windows = True`; without it, models with such layers refuse the cache.
    """

    def attend(
        self, layer_id: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the keys and values of the new tokens, and return their attention output.

        Only heads are contiguous in the arguments: they can be parts of one fused tensor.

        Args:
            layer_id: Layer, counted from 0.
            query (model dtype, [num_tokens, num_heads, head_dim]): Rotated queries.
            key (model dtype, [num_tokens, num_kv_heads, head_dim]): Rotated keys.
            value (model dtype, [num_tokens, num_kv_heads, head_dim]): Values.

        Returns:
            Tensor (model dtype, [num_tokens, num_heads, head_dim]): each token attends to its own
            sequence up to and including itself.
        """
        ...


class DecoderModel:
    """Run a model.

    RoPE rotates the two halves of a head against each other (Hugging Face order), so weights stored
    in interleaved order must be un-permuted before.

    Attributes:
        config: Shape and constants.
        weights: Weights.
        ops: Implementation of what is computed outside attention.
        num_positions: Positions that may occur are 0 to `num_positions - 1`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        ops: DecoderOps | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Take weights that match the configuration; the loader checks them.

        Args:
            config: Shape and constants.
            weights: Weights; not copied.
            ops: Kernels to use instead of plain PyTorch.
            max_model_len: Number of positions that may occur, at most the model's context length
                (the default). The tables of RoPE take `4 * head_dim` bytes for each.

        Raises:
            InvalidArgumentError: If `max_model_len` is out of range.
        """
        length = num_positions(config, max_model_len)
        self.config = config
        self.weights = weights
        self.ops = DecoderOps() if ops is None else ops
        self.num_positions = length
        self._cosine, self._sine = rope_tables(config, length, weights.embedding.device)
        windows = [config.layer_window(layer_id) for layer_id in range(config.num_layers)]
        # A window that no sequence outgrows hides nothing.
        self._has_windows = any(window is not None and window < length for window in windows)
        eps = config.rms_norm_eps
        self._norms = [Norm(layer.input_norm, eps) for layer in weights.layers]
        self._norms.append(Norm(weights.final_norm, eps))
        self._mlp_norms = [Norm(layer.post_attention_norm, eps) for layer in weights.layers]
        self._head_norms = [
            None
            if layer.q_norm is None or layer.k_norm is None
            else HeadNorms(layer.q_norm, layer.k_norm, eps)
            for layer in weights.layers
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations, keys and values."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.embedding.device

    @property
    def rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every position (float32, [num_positions, head_dim / 2])."""
        return self._cosine, self._sine

    @overload
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: AttentionCache
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: AttentionCache,
        *,
        taps: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: AttentionCache,
        *,
        taps: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised hidden states of the new tokens and add them to the cache.

        Args:
            token_ids (int64 or int32, [num_tokens]): New tokens, in range of the vocabulary.
            positions (int64 or int32, [num_tokens]): Position of each token in its own sequence,
                below `num_positions`.
            cache: Receives keys and values of every layer once, layer 0 first.
            taps: Layers whose residual stream is wanted, counted from 0; -1 is the embedding
                output. In transformers' `output_hidden_states`, tap `i` is entry `i + 1`, except
                that its last entry is normalised and the tap is not.
            out (model dtype, [num_taps, num_tokens, hidden_size]): Receives the taps, in the order
                of `taps`; allocated by default.

        Returns:
            Tensor (model dtype, [num_tokens, hidden_size]), and `out` as second item where `taps`
            are given.

        Raises:
            InvalidArgumentError: If a tap is no layer of the model, `out` has another shape or
                dtype, or the cache ignores the model's sliding windows.
        """
        if self._has_windows and not getattr(cache, "has_sliding_windows", False):
            msg = (
                f"{type(cache).__name__} ignores sliding windows, "
                f"the model's is {self.config.sliding_window} tokens"
            )
            raise InvalidArgumentError(msg)
        if taps is None:
            return self._run(token_ids, positions, cache, (), None)
        out = self._tap_output(taps, token_ids.shape[0], out)
        return self._run(token_ids, positions, cache, taps, out), out

    @torch.inference_mode()
    def compute_logits(
        self, hidden: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits of hidden states that `forward` returned.

        Args:
            hidden (model dtype, [num_tokens, hidden_size]): Normalised hidden states.
            out (model dtype, [num_tokens, vocab_size]): Receives the result.

        Returns:
            Tensor (model dtype, [num_tokens, vocab_size]): `out`, or a new tensor.
        """
        if out is not None:
            return torch.mm(hidden, self.weights.lm_head.t(), out=out)
        return functional.linear(hidden, self.weights.lm_head)

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: AttentionCache,
        taps: Sequence[int],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, ops = self.weights, self.ops
        residual = functional.embedding(token_ids, weights.embedding)
        _copy_tap(EMBEDDING_TAP, residual, taps, out)
        normalized = ops.normalize(residual, self._norms[0])
        for layer_id, layer in enumerate(weights.layers):
            heads = ops.linear(normalized, layer.qkv_proj, layer.qkv_bias)
            attended = self._attention(layer_id, heads, positions, cache)
            normalized = ops.add_linear(
                residual, attended, layer.o_proj, layer.o_bias, self._mlp_norms[layer_id]
            )
            gated = ops.gated_linear(normalized, layer.gate_up_proj, layer.gate_up_bias)
            # The normalisation that follows: of the next layer, or the last one.
            normalized = ops.add_linear(
                residual, gated, layer.down_proj, layer.down_bias, self._norms[layer_id + 1]
            )
            _copy_tap(layer_id, residual, taps, out)
        return ops.hidden(normalized, residual, self._norms[-1])

    def _attention(
        self, layer_id: int, fused: torch.Tensor, positions: torch.Tensor, cache: AttentionCache
    ) -> torch.Tensor:
        """Rotate queries and keys, and attend.

        Args:
            layer_id: The layer.
            fused (model dtype, [num_tokens, num_all_heads * head_dim]): Queries, keys, values.
            positions: As in `forward`.
            cache: As in `forward`.

        Returns:
            Tensor (model dtype, [num_tokens, num_heads * head_dim]).
        """
        config = self.config
        heads = fused.view(fused.shape[0], -1, config.head_dim)
        key_start, value_start = config.num_heads, config.num_heads + config.num_kv_heads
        query, key = heads[:, :key_start], heads[:, key_start:value_start]
        norms = self._head_norms[layer_id]
        self.ops.rotate(query, key, self._cosine, self._sine, positions, norms=norms)
        return cache.attend(layer_id, query, key, heads[:, value_start:]).flatten(1)

    def _tap_output(
        self, taps: Sequence[int], num_tokens: int, out: torch.Tensor | None
    ) -> torch.Tensor:
        num_layers = self.config.num_layers
        for tap in taps:
            if not EMBEDDING_TAP <= tap < num_layers:
                msg = f"tap is {tap}, expected {EMBEDDING_TAP} to {num_layers - 1}"
                raise InvalidArgumentError(msg)
        shape = (len(taps), num_tokens, self.config.hidden_size)
        if out is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if tuple(out.shape) != shape or out.dtype != self.dtype:
            msg = (
                f"out is {out.dtype} {list(out.shape)}, expected {self.dtype} {list(shape)} "
                f"for {len(taps)} taps of {num_tokens} tokens"
            )
            raise InvalidArgumentError(msg)
        return out


def num_positions(config: ModelConfig, max_model_len: int | None) -> int:
    """Return how many positions may occur: `max_model_len`, by default the context length.

    Raises:
        InvalidArgumentError: If `max_model_len` is out of range.
    """
    length = config.context_length if max_model_len is None else max_model_len
    if not 1 <= length <= config.context_length:
        msg = f"max_model_len is {length}, expected 1 to {config.context_length}"
        raise InvalidArgumentError(msg)
    return length


def _copy_tap(
    layer_id: int, residual: torch.Tensor, taps: Sequence[int], out: torch.Tensor | None
) -> None:
    if out is not None:
        for index, tap in enumerate(taps):
            if tap == layer_id:
                out[index].copy_(residual)
