"""A drafter in training: float32 weights, its optimizer, and its loss on a batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from extkv.dspark.train.anchors import slot_weights
from extkv.dspark.train.draft_vocabulary import NEVER, DraftVocabulary
from extkv.dspark.train.forward import BlockOutput, forward_blocks
from extkv.dspark.train.initial_weights import NOT_TRAINED, initial_weights
from extkv.dspark.train.losses import Comparison, LossTerms, confidence_loss, token_loss
from extkv.dspark.train.optimizers import Optimizer
from extkv.models.dspark import DSparkModel, DSparkWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extkv.dspark.train.batches import Batch
    from extkv.dspark.train.settings import StudentSettings
    from extkv.models.decoder import DecoderModel

# Weights that are not rounded to the compute dtype before they are used.
_UNROUNDED = ("markov_w1", "markov_w2")


class Student:
    """A drafter in training.

    Attributes:
        settings: What it is.
        parameters: Its own weights by name (float32 or float64), as `DSparkWeights.tensors` names
            them.
        num_drafts: Drafts of a block.
        vocabulary: Tokens that it can draft; None for all.
    """

    def __init__(
        self, settings: StudentSettings, target: DecoderModel, *, tap_layer_ids: Sequence[int]
    ) -> None:
        """Begin.

        Args:
            settings: What it is.
            target: The target; activations have its dtype.
            tap_layer_ids: Taps that batches come with, its own among them.
        """
        self.settings = settings
        self.num_drafts = settings.config.num_drafts
        self._target = target
        self._taps = [tap_layer_ids.index(tap) for tap in settings.config.tap_layer_ids]
        self._template = initial_weights(settings, target)
        target_ids = self._template.target_ids
        self.vocabulary = None
        if target_ids is not None:
            self.vocabulary = DraftVocabulary(target_ids, target.config.vocab_size)
        self.parameters = {
            name: tensor.requires_grad_()
            for name, tensor in self._template.tensors()
            if name not in NOT_TRAINED
        }
        self.optimizer = Optimizer(self.parameters, settings.optimizer)
        decay = settings.loss.slot_decay
        self.slot_weights = slot_weights(self.num_drafts, decay).to(target.device)
        self.sums: dict[str, torch.Tensor] = {}
        length = min(target.num_positions, settings.config.backbone.context_length)
        # Rotations do not depend on weights.
        self._rotations = self.model(torch.float32, max_model_len=length).decoder.rotations

    def total_weight(self, batch: Batch) -> torch.Tensor:
        """Return the weight of all rows of a batch (float32, [])."""
        return self.slot_weights[batch.rows[self.num_drafts].slots].sum()

    def forward(
        self, batch: Batch, taps: torch.Tensor, *, has_gradient: bool = True
    ) -> BlockOutput:
        """Run its blocks; see `forward_blocks`.

        Args:
            batch: The batch.
            taps (compute dtype, [num_taps, num_tokens, hidden_size]): Of all layers that are
                tapped for anybody.
            has_gradient: Whether weights ask for gradients.
        """
        own = taps[self._taps].transpose(0, 1).flatten(1)
        weights = self._rounded(lambda tensor: tensor if has_gradient else tensor.detach())
        return forward_blocks(self.settings.config, weights, self._rotations, batch, own)

    def backward(
        self,
        batch: Batch,
        taps: torch.Tensor,
        target_logits: torch.Tensor,
        total_weight: torch.Tensor,
        *,
        chunk_bytes: int,
    ) -> None:
        """Add the gradients of a batch, and its figures to `sums`.

        Args:
            batch: The batch, on the device.
            taps: See `forward`.
            target_logits (float, [num_target_rows, vocab_size]): Logits of `batch.predicting`.
            total_weight (float32, []): Weight of all rows of the step, on all devices.
            chunk_bytes: Bytes of draft logits that exist at a time.
        """
        rows = batch.rows[self.num_drafts]
        output = self.forward(batch, taps)
        weights = self.slot_weights[rows.slots] / (total_weight + 1e-6)
        terms = self.terms(output, batch, target_logits, weights, chunk_bytes=chunk_bytes)
        loss = terms.loss
        confidences = output.confidence_logits
        if confidences is not None:
            logits = confidences.flatten()[rows.places]
            term = confidence_loss(logits, terms.acceptance, weights)
            loss = loss + self.settings.loss.confidence_weight * term
            self._add("confidence", term)
            error = logits.detach().sigmoid() - terms.acceptance
            self._add("confidence_error", (error.abs() * weights).sum())
            self._add("confidence_bias", (error * weights).sum())
        loss.backward()  # type: ignore[no-untyped-call]
        self._note(terms, rows.slots, rows.label_ids, weights)

    def terms(
        self,
        output: BlockOutput,
        batch: Batch,
        target_logits: torch.Tensor,
        weights: torch.Tensor,
        *,
        chunk_bytes: int,
    ) -> LossTerms:
        """Compare what it made of a batch with the target.

        Args:
            output: What `forward` returned.
            batch: The batch.
            target_logits: See `backward`.
            weights (float32, [num_rows]): Weight of each row.
            chunk_bytes: See `backward`.

        Returns:
            One element per row of `batch.rows`; `argmax` are tokens of the target.
        """
        rows = batch.rows[self.num_drafts]
        if self.vocabulary is None:
            comparison = Comparison(target_logits, rows.target_rows, rows.label_ids, weights)
            return self._token_loss(output, rows.places, comparison, chunk_bytes)
        labels = self.vocabulary.draft_ids[rows.label_ids]
        # Tokens that can be drafted come first: the others have no cross-entropy.
        is_outside = labels == len(self.vocabulary)
        order = torch.argsort(is_outside.to(torch.uint8), stable=True)
        comparison = Comparison(
            self.vocabulary.restrict(target_logits),
            rows.target_rows[order],
            labels[order],
            weights[order],
            num_outside=int(is_outside.sum()),
        )
        found = self._token_loss(output, rows.places[order], comparison, chunk_bytes)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return LossTerms(
            found.loss,
            found.cross_entropy[back],
            found.total_variation[back],
            found.target_logprob[back],
            self.vocabulary.target_ids[found.argmax[back]],
        )

    def _token_loss(
        self, output: BlockOutput, places: torch.Tensor, comparison: Comparison, chunk_bytes: int
    ) -> LossTerms:
        hidden = output.hidden.flatten(0, 2)[places]
        codes = None if output.codes is None else output.codes.flatten(0, 2)[places]
        markov_weight = self.parameters.get("markov_w2")
        if markov_weight is not None and not hidden.requires_grad:
            markov_weight = markov_weight.detach()
        return token_loss(
            hidden,
            codes,
            markov_weight,
            self._template.backbone.lm_head,
            comparison,
            self.settings.loss,
            chunk_bytes=chunk_bytes,
        )

    def model(self, dtype: torch.dtype, *, max_model_len: int | None = None) -> DSparkModel:
        """Return a copy of the drafter for inference.

        Args:
            dtype: Dtype of its own weights; to run it, the target's.
            max_model_len: Positions that may occur; by default the target's.
        """
        weights = self._rounded(lambda tensor: tensor.detach().to(dtype, copy=True), is_whole=True)
        length = self._target.num_positions if max_model_len is None else max_model_len
        return DSparkModel(
            self.settings.config,
            weights,
            vocab_size=self._target.config.vocab_size,
            ops=self._target.ops,
            max_model_len=min(length, self.settings.config.backbone.context_length),
        )

    def figures(self, num_steps: int) -> dict[str, Any]:
        """Return means of the last steps, and forget them; waits for the device."""
        found: dict[str, Any] = {
            name: total.item() / num_steps for name, total in self.sums.items() if total.ndim == 0
        }
        counted = self.sums.get("num_rows")
        if counted is not None:
            counts = counted.clamp(min=1)
            for name in ("acceptance", "greedy_acceptance"):
                found[f"{name}_by_slot"] = (self.sums[name] / counts).tolist()
        self.sums = {}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {"parameters": self.parameters, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])

    def _rounded(
        self, change: Callable[[torch.Tensor], torch.Tensor], *, is_whole: bool = False
    ) -> DSparkWeights:
        """Return the weights for a pass, of the compute dtype but for tables by token.

        Args:
            change: Done to each weight first.
            is_whole: Leave rounding to `change`.
        """
        dtype = self._target.dtype

        def fields(owner: object, prefix: str = "") -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in vars(owner).items():
                if f"{prefix}{name}" in self.parameters:
                    tensor = change(value)
                    keeps = is_whole or name in _UNROUNDED
                    found[name] = tensor if keeps else tensor.to(dtype)
            return found

        template = self._template
        layers = tuple(
            dataclasses.replace(layer, **fields(layer, f"layers.{index}."))
            for index, layer in enumerate(template.backbone.layers)
        )
        backbone = dataclasses.replace(
            template.backbone, layers=layers, **fields(template.backbone)
        )
        return dataclasses.replace(template, backbone=backbone, **fields(template))

    def _note(
        self,
        terms: LossTerms,
        slots: torch.Tensor,
        label_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        self._add("loss", terms.loss)
        # Of tokens that can be drafted.
        is_inside = terms.cross_entropy < -NEVER / 2
        self._add("cross_entropy", (terms.cross_entropy * weights * is_inside).sum())
        self._add("total_variation", (terms.total_variation * weights).sum())
        hits = (terms.argmax == label_ids).to(torch.float32)
        zeros = torch.zeros(self.num_drafts, device=slots.device)
        for name, values in (
            ("acceptance", terms.acceptance.to(torch.float32)),
            ("greedy_acceptance", hits),
            ("num_rows", torch.ones_like(hits)),
        ):
            self._add(name, zeros.index_add(0, slots, values))

    def _add(self, name: str, value: torch.Tensor) -> None:
        value = value.detach()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
