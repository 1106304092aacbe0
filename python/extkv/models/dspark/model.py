"""Forward pass of a DSpark drafter: context keys and values, blocks, and the heads.

The drafter attends to two kinds of keys: those of the context, made from the target's residual
stream of every decided token before the anchor, and those of its own block. Context keys and
values of a token depend on that token alone, so they are made once, whatever the chunks. Nothing
here reads a tensor value on the host, so a CUDA graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from extkv.errors import InvalidArgumentError
from extkv.models.decoder import DecoderModel
from extkv.models.dspark import heads
from extkv.models.dspark.weights import stack_context_projection
from extkv.models.host_decoder import HostDecoder, linear, rms_norm
from extkv.models.ops import DecoderOps, Norm
from extkv.normalized import HeadNorms

if TYPE_CHECKING:
    from extkv.models.decoder import AttentionCache
    from extkv.models.dspark.config import DSparkConfig
    from extkv.models.dspark.weights import DSparkWeights


class DSparkModel:
    """Run a drafter.

    Attributes:
        config: Shape and layout.
        weights: Weights.
        decoder: The backbone as a decoder of its own; `decoder.config` describes the layers that a
            cache must hold.
        ops: Implementation of what is computed outside attention.
        num_positions: Positions that may occur are 0 to `num_positions - 1`.
    """

    def __init__(
        self,
        config: DSparkConfig,
        weights: DSparkWeights,
        *,
        vocab_size: int | None = None,
        ops: DecoderOps | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Take weights that match the configuration; the loader checks them.

        Args:
            config: Shape and layout.
            weights: Weights; not copied, but for key and value rows (see `refresh`).
            vocab_size: Number of token ids of the target; by default the drafter's own.
            ops: Kernels to use instead of plain PyTorch.
            max_model_len: Number of positions that may occur, at most the drafter's context length
                (the default).

        Raises:
            InvalidArgumentError: If `max_model_len` is out of range.
        """
        self.config = config
        self.weights = weights
        self.ops = DecoderOps() if ops is None else ops
        self.decoder = HostDecoder.of(
            DecoderModel(
                config.backbone, weights.backbone, ops=self.ops, max_model_len=max_model_len
            )
        )
        self.num_positions = self.decoder.num_positions
        num_rows = config.num_draft_tokens
        if weights.target_ids is None and vocab_size is not None:
            # Rows that only pad the drafter's tables are never drafted.
            num_rows = min(num_rows, vocab_size)
        self._lm_head = weights.backbone.lm_head[:num_rows]
        self._markov_w2 = None if weights.markov_w2 is None else weights.markov_w2[:num_rows]
        eps = config.backbone.rms_norm_eps
        self._hidden_norm = Norm(weights.hidden_norm, eps)
        self._key_norms = [layer.k_norm for layer in weights.backbone.layers]
        self.refresh()

    def refresh(self) -> None:
        """Copy the layers' key and value rows into the one projection of the context again.

        The only weights that exist twice; call this after changing `weights` in place.
        """
        self._context_proj, self._context_bias = stack_context_projection(
            self.config.backbone, self.weights.backbone.layers
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, activations, keys and values."""
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.decoder.device

    @property
    def num_bytes(self) -> int:
        """Bytes of what the drafter adds to the target: its own weights and the context's copy."""
        bias = self._context_bias
        copied = self._context_proj.nbytes + (0 if bias is None else bias.nbytes)
        return self.weights.num_bytes + copied

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Target token of each draft token (int64, [num_draft_tokens]); None where it is itself."""
        return self.weights.target_ids

    @property
    def lm_head(self) -> torch.Tensor:
        """Weight of the base logits (model dtype, [num_draft_tokens, hidden_size])."""
        return self._lm_head

    @property
    def markov_weight(self) -> torch.Tensor | None:
        """What codes are multiplied by (model dtype, [num_draft_tokens, markov_rank]), or None."""
        return self._markov_w2

    @torch.inference_mode()
    def context(
        self, taps: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of context tokens, for all layers.

        Args:
            taps (model dtype, [num_taps, num_tokens, hidden_size]): Residual stream of the target
                after the layers `config.tap_layer_ids`, as `DecoderModel.forward` writes it.
            positions (int64 or int32, [num_tokens]): Position of each token in its own sequence.

        Returns:
            Keys, normalised and rotated, and values, neither (model dtype, [num_layers, num_tokens,
            num_kv_heads, head_dim]); only heads are contiguous. Both lie in one tensor.

        Raises:
            InvalidArgumentError: If `taps` has another shape or dtype.
        """
        self._check_taps(taps, positions)
        backbone, ops = self.config.backbone, self.ops
        num_tokens = positions.shape[0]
        features = taps.transpose(0, 1).flatten(1)
        if isinstance(self.decoder, HostDecoder):
            projected = linear(features, self.weights.fc, None)
            projected = rms_norm(projected, *self._hidden_norm)
            fused = linear(projected, self._context_proj, self._context_bias)
        else:
            stream = torch.zeros_like(taps[0])
            normalized = ops.add_linear(stream, features, self.weights.fc, None, self._hidden_norm)
            fused = ops.linear(normalized, self._context_proj, self._context_bias)
        # Per layer its keys, then its values.
        shape = (num_tokens, backbone.num_layers, 2, backbone.num_kv_heads, backbone.head_dim)
        keys, values = fused.view(shape).permute(2, 1, 0, 3, 4)
        self._rotate_keys(keys, positions)
        return keys, values

    def block_forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: AttentionCache
    ) -> torch.Tensor:
        """Return the normalised hidden states of the slots of any number of blocks.

        Args:
            token_ids (int64 or int32, [num_blocks * block_size]): The anchor of each block, then
                masks, block after block.
            positions (int64 or int32, [num_blocks * block_size]): Slot `j` of a block is at
                `anchor position + j`, below `num_positions`.
            cache: Receives the keys and values of every layer once, layer 0 first. It must let
                every slot of a block see the block's context, which ends before the anchor, and all
                slots of the block: attention is not causal.

        Returns:
            Tensor (model dtype, [num_blocks * block_size, hidden_size]). In fill-in layout the row
            of the anchor's slot predicts nothing.

        Raises:
            InvalidArgumentError: If the cache ignores the drafter's sliding windows.
        """
        return self.decoder.forward(token_ids, positions, cache)

    @torch.inference_mode()
    def base_logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of slots before the Markov head.

        Args:
            hidden (model dtype, [num_rows, hidden_size]): Rows of `block_forward`.
            out (model dtype, [num_rows, num_draft_tokens]): Receives the result.

        Returns:
            Tensor (model dtype, [num_rows, num_draft_tokens]), by draft token: `out`, or a new one.
        """
        if isinstance(self.decoder, HostDecoder):
            found = linear(hidden, self._lm_head, None)
            return found if out is None else out.copy_(found)
        if out is not None:
            return torch.mm(hidden, self._lm_head.t(), out=out)
        return functional.linear(hidden, self._lm_head)

    def initial_state(self, num_blocks: int) -> torch.Tensor | None:
        """Return the state of the Markov head before the first draft; None where it has none."""
        return heads.initial_state(self.weights, num_blocks)

    @torch.inference_mode()
    def codes(
        self,
        previous_token_ids: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the vectors that `markov_weight` multiplies for the next draft of each block.

        The logits of the draft are `base_logits + codes @ markov_weight.T`.

        Args:
            previous_token_ids (int64 or int32, [num_blocks]): Target token before the draft: the
                anchor for the first one. Negative ids are placeholders and read as token 0.
            hidden (model dtype, [num_blocks, hidden_size]): Hidden states of the slots that
                predict.
            state (model dtype, [num_blocks, markov_rank]): What the call for the draft before
                returned, or `initial_state`; ignored by heads without one.

        Returns:
            Codes (model dtype, [num_blocks, markov_rank]), and the state for the next draft.

        Raises:
            InvalidArgumentError: If the drafter has no Markov head, or its head needs a state.
        """
        embedded = heads.markov_embedding(self.weights, previous_token_ids)
        return heads.markov_codes(self.weights, embedded, hidden, state)

    @torch.inference_mode()
    def confidence_logits(
        self, hidden: torch.Tensor, previous_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the probability that drafts are accepted if those before them are.

        Args:
            hidden (model dtype, [..., hidden_size]): Hidden states of the slots that predict.
            previous_token_ids (int64 or int32, [...]): Target token before each draft, not the
                draft itself.

        Returns:
            Tensor (float32, [...]).

        Raises:
            InvalidArgumentError: If the drafter has no confidence head.
        """
        embedded = None
        if self.config.has_confidence_head and self.config.confidence_reads_markov:
            embedded = heads.markov_embedding(self.weights, previous_token_ids)
        return heads.confidence_logits(self.weights, hidden, embedded)

    @torch.inference_mode()
    def to_target_ids(self, draft_token_ids: torch.Tensor) -> torch.Tensor:
        """Return the target tokens of draft tokens, of any shape."""
        if self.weights.target_ids is None:
            return draft_token_ids
        return self.weights.target_ids[draft_token_ids]

    def _rotate_keys(self, keys: torch.Tensor, positions: torch.Tensor) -> None:
        """Normalise and rotate the keys of all layers in place, two layers at a time.

        Args:
            keys (model dtype, [num_layers, num_tokens, num_kv_heads, head_dim]): The keys.
            positions: As in `context`.
        """
        cosine, sine = self.decoder.rotations
        eps = self.config.backbone.rms_norm_eps
        for layer_id in range(0, keys.shape[0], 2):
            first, first_norm = keys[layer_id], self._key_norms[layer_id]
            # The second place of an odd last layer stays empty.
            second, second_norm = first[:, :0], first_norm
            if layer_id + 1 < keys.shape[0]:
                second, second_norm = keys[layer_id + 1], self._key_norms[layer_id + 1]
            norms = None
            if first_norm is not None and second_norm is not None:
                norms = HeadNorms(first_norm, second_norm, eps)
            self.ops.rotate(first, second, cosine, sine, positions, norms=norms)

    def _check_taps(self, taps: torch.Tensor, positions: torch.Tensor) -> None:
        config = self.config
        shape = (config.num_taps, positions.shape[0], config.backbone.hidden_size)
        if tuple(taps.shape) != shape or taps.dtype != self.dtype:
            msg = (
                f"taps are {taps.dtype} {list(taps.shape)}, expected {self.dtype} {list(shape)} "
                f"for {config.num_taps} taps of {positions.shape[0]} tokens"
            )
            raise InvalidArgumentError(msg)
