"""Loading a drafter beside the target it drafts for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from extkv.errors import ModelFileError
from extkv.models.checkpoint import Checkpoint
from extkv.models.dspark.config import check_pair
from extkv.models.dspark.config_file import read_drafter_config
from extkv.models.dspark.model import DSparkModel
from extkv.models.dspark.vocabulary import DRAFT_TO_TARGET, TARGET_TO_DRAFT, read_target_ids
from extkv.models.dspark.weights import (
    CONFIDENCE_BIAS,
    EMBEDDING,
    LM_HEAD,
    allocate_drafter_weights,
    drafter_slot_view,
    drafter_slots,
)
from extkv.models.weight_loading import fill_weights

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from extkv.models.decoder import DecoderModel
    from extkv.models.dspark.config import DSparkConfig
    from extkv.models.dspark.weights import DSparkWeights
    from extkv.models.ops import DecoderOps
    from extkv.models.weights import WeightSlot

# Tensors that trainers store and drafting does not use.
UNUSED_TENSORS = frozenset(
    {"mask_embedding", "mask_embedding.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
)


def load_drafter(
    path: str | os.PathLike[str],
    target: DecoderModel,
    *,
    max_model_len: int | None = None,
    pipeline_parallel_size: int = 1,
    ops: DecoderOps | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DSparkModel:
    """Read a drafter in the dtype and on the device of its target.

    Embedding and head are the target's own tensors where the checkpoint leaves them out or holds
    the same values, so that neither is ever in memory twice.

    Args:
        path: Directory with a `config.json` of DeepSpec or speculators, and `model.safetensors` or
            its shards.
        target: The target.
        max_model_len: Positions that may occur; by default those of the target. Never more than the
            drafter's own context length: `num_positions` of the result says how many there are.
        pipeline_parallel_size: Number of stages that the target is split into.
        ops: Kernels that the forward pass uses; by default those of the target.
        on_progress: Called with (tensors read, tensors in all) after each tensor.

    Raises:
        UnsupportedDrafterError: If it is a drafter of a kind that is known and not run yet.
        ModelFileError: If a file is missing or damaged, is no drafter, or a tensor is missing,
            unexpected, of another shape, or not finite.
        DrafterMismatchError: If the drafter cannot draft for this target.
        OutOfMemoryError: If the weights do not fit on the device.
    """
    directory = Path(path)
    config = read_drafter_config(directory)
    check_pair(config, target.config, pipeline_parallel_size=pipeline_parallel_size)
    checkpoint = Checkpoint(directory)
    if config.has_confidence_head:
        has_bias = CONFIDENCE_BIAS in checkpoint.tensor_names
        config = dataclasses.replace(config, confidence_has_bias=has_bias)
    weights = _load_weights(checkpoint, config, target, on_progress)
    length = target.num_positions if max_model_len is None else max_model_len
    return DSparkModel(
        config,
        weights,
        vocab_size=target.config.vocab_size,
        ops=target.ops if ops is None else ops,
        max_model_len=min(length, config.backbone.context_length),
    )


def _load_weights(
    checkpoint: Checkpoint,
    config: DSparkConfig,
    target: DecoderModel,
    on_progress: Callable[[int, int], None] | None,
) -> DSparkWeights:
    slots = {slot.name: slot for slot in drafter_slots(config)}
    for name, slot in slots.items():
        if name not in (EMBEDDING, LM_HEAD) or name in checkpoint.tensor_names:
            checkpoint.check(slot)
    tables = {DRAFT_TO_TARGET, TARGET_TO_DRAFT}
    checkpoint.check_rest(slots.keys() | tables | UNUSED_TENSORS, is_tied=False)
    target_ids = read_target_ids(checkpoint, config, target.config.vocab_size)
    if target_ids is not None:
        target_ids = target_ids.to(target.device)
    sources = _Vocabulary(checkpoint, config, target)
    shared = sources.shared(slots)
    weights = allocate_drafter_weights(
        config,
        target.dtype,
        target.device,
        shared=shared,
        target_ids=target_ids,
        is_tied=sources.is_tied,
    )
    names = [name for name in slots if name not in shared and name in checkpoint.tensor_names]
    destinations = [(slots[name], drafter_slot_view(weights, slots[name])) for name in names]
    fill_weights(checkpoint, destinations, device=target.device, on_progress=on_progress)
    if sources.is_gathered and target_ids is not None:
        head = weights.backbone.lm_head
        torch.index_select(target.weights.lm_head, 0, target_ids, out=head)
    return _without_second_copy(weights)


class _Vocabulary:
    """Decide where the embedding and the head of a drafter come from.

    Attributes:
        is_tied: Whether the head is the drafter's embedding.
        is_gathered: Whether the head is some rows of the target's.
    """

    def __init__(self, checkpoint: Checkpoint, config: DSparkConfig, target: DecoderModel) -> None:
        self._checkpoint = checkpoint
        self._target = target
        backbone, names = config.backbone, checkpoint.tensor_names
        is_whole = config.num_draft_tokens == backbone.vocab_size
        is_tied = backbone.tie_word_embeddings and is_whole and EMBEDDING in names
        self.is_tied = is_tied and LM_HEAD not in names
        is_reduced = config.num_draft_tokens < target.config.vocab_size
        self.is_gathered = is_reduced and LM_HEAD not in names

    def shared(self, slots: dict[str, WeightSlot]) -> dict[str, torch.Tensor]:
        """Return the target's tensors that the drafter uses as its own, by name.

        Raises:
            ModelFileError: If the embedding is missing and the target's is too short.
        """
        shared = {}
        embedding, lm_head = self._target.weights.embedding, self._target.weights.lm_head
        if self._is_shared(slots[EMBEDDING], embedding):
            shared[EMBEDDING] = embedding
        is_own_head = self.is_tied or self.is_gathered
        if not is_own_head and self._is_shared(slots[LM_HEAD], lm_head):
            shared[LM_HEAD] = lm_head
        return shared

    def _is_shared(self, slot: WeightSlot, tensor: torch.Tensor) -> bool:
        if slot.name in self._checkpoint.tensor_names:
            return self._checkpoint.is_equal(slot, tensor)
        if slot.name == EMBEDDING and tensor.shape[0] < slot.shape[0]:
            msg = (
                f"model file {self._checkpoint.directory}: tensor {slot.name} is missing, expected "
                f"shape {list(slot.shape)}: the target's has {tensor.shape[0]} rows"
            )
            raise ModelFileError(msg)
        return True


def _without_second_copy(weights: DSparkWeights) -> DSparkWeights:
    """Use the drafter's embedding as its head where a file stores the same values twice."""
    backbone = weights.backbone
    if LM_HEAD in weights.shared or not torch.equal(backbone.lm_head, backbone.embedding):
        return weights
    backbone = dataclasses.replace(backbone, lm_head=backbone.embedding)
    return dataclasses.replace(weights, backbone=backbone)
