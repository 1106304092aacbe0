"""Optimizers over named weights, their schedule, and clipping."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.dspark.train.settings import OptimizerSettings

# Tables by token and the confidence head: rows of them are no projections.
_NO_PROJECTION = ("markov_w1", "markov_w2", "confidence_proj")


class Optimizer:
    """One optimizer, or Muon for projections beside AdamW for the rest, with one schedule."""

    def __init__(self, parameters: dict[str, torch.Tensor], settings: OptimizerSettings) -> None:
        """Take the weights.

        Args:
            parameters: Weights by name, all asking for gradients.
            settings: Which optimizer, and how fast.

        Raises:
            InvalidArgumentError: If Muon is asked for and this torch has none.
        """
        self._settings = settings
        self._parameters = list(parameters.values())
        projections = []
        if settings.name == "muon":
            projections = [
                tensor
                for name, tensor in parameters.items()
                if tensor.ndim == 2 and name not in _NO_PROJECTION  # noqa: PLR2004
            ]
        chosen = {id(tensor) for tensor in projections}
        rest = [tensor for tensor in self._parameters if id(tensor) not in chosen]
        self._parts: list[torch.optim.Optimizer] = []
        if rest:
            self._parts.append(_adamw(rest, settings))
        if projections:
            self._parts.append(_muon(projections, settings))

    def step(self, progress: float) -> torch.Tensor:
        """Clip the gradients, change the weights, and drop the gradients.

        Args:
            progress: Share of the run that is done, in [0, 1].

        Returns:
            Norm of all gradients together before clipping (float32, []).
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
        rate = self._settings.lr * schedule(progress, self._settings.warmup_ratio)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        """Return everything that the next step depends on."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on from a state."""
        for part, found in zip(self._parts, state, strict=True):
            part.load_state_dict(found)


def schedule(progress: float, warmup_ratio: float) -> float:
    """Return the share of the largest rate: linear up to 1, then along a cosine to 0.

    Args:
        progress: Share of the run that is done; clamped to [0, 1].
        warmup_ratio: Share in which it rises.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_ratio:
        return progress / warmup_ratio
    done = (progress - warmup_ratio) / (1 - warmup_ratio)
    return 0.5 * (1 + math.cos(math.pi * done))


def _adamw(tensors: list[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        tensors,
        lr=settings.lr,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=tensors[0].is_cuda,
    )


def _muon(tensors: list[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        msg = f"optimizer is 'muon', torch {torch.__version__} has none: use adamw"
        raise InvalidArgumentError(msg)
    found: torch.optim.Optimizer = torch.optim.Muon(
        tensors,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return found
