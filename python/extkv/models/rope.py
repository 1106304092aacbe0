"""Rotary position embedding: frequencies, their scaling for long contexts, and tables.

All is computed in float32 and in the order of transformers' `modeling_rope_utils` (5.17), so that
the angles are equal to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.models.config import ModelConfig


@dataclass(frozen=True)
class LinearScaling:
    """Divide all frequencies by one factor.

    Raises:
        InvalidArgumentError: If `factor` is not a positive finite number.
    """

    factor: float

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_positive(self)

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    def frequencies(self, theta: float, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair (float32, [head_dim / 2])."""
        return plain_frequencies(theta, head_dim) / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divide low frequencies by a factor, keep high ones, and blend between.

    Attributes:
        factor: Divisor of the low frequencies.
        low_freq_factor: Wavelengths above `original_context_length / low_freq_factor` are low.
        high_freq_factor: Wavelengths below `original_context_length / high_freq_factor` are high.
        original_context_length: Tokens the model was first trained for.

    Raises:
        InvalidArgumentError: If a field is not a positive finite number, or `high_freq_factor` is
            not above `low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: float

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_positive(self)
        if self.high_freq_factor <= self.low_freq_factor:
            msg = (
                f"high_freq_factor is {self.high_freq_factor}, "
                f"expected more than low_freq_factor {self.low_freq_factor}"
            )
            raise InvalidArgumentError(msg)

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    def frequencies(self, theta: float, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair (float32, [head_dim / 2])."""
        plain = plain_frequencies(theta, head_dim)
        length, low, high = (
            self.original_context_length,
            self.low_freq_factor,
            self.high_freq_factor,
        )
        wavelengths = 2 * math.pi / plain
        scaled = torch.where(wavelengths > length / low, plain / self.factor, plain)
        weight = (length / wavelengths - low) / (high - low)
        blended = (1 - weight) * scaled / self.factor + weight * scaled
        is_between = (wavelengths >= length / high) & (wavelengths <= length / low)
        return torch.where(is_between, blended, scaled)


@dataclass(frozen=True)
class YarnScaling:
    """Blend divided and plain frequencies by how often a pair turns in the original context.

    Attributes:
        factor: Divisor of the frequencies that turn rarely.
        original_context_length: Tokens the model was first trained for.
        attention_factor: What cosines and sines are multiplied with.
        beta_fast: Pairs that turn more often keep their frequency.
        beta_slow: Pairs that turn less often have it divided.
        truncate: Whether the ends of the blend are rounded outward to whole pairs.

    Raises:
        InvalidArgumentError: If a field is not a positive finite number.
    """

    factor: float
    original_context_length: float
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_positive(self)

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return self.attention_factor

    def frequencies(self, theta: float, head_dim: int) -> torch.Tensor:
        """Return the angle per position of each pair (float32, [head_dim / 2])."""
        wavelengths = theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
        plain, divided = 1.0 / wavelengths, 1.0 / (self.factor * wavelengths)
        low = self._pair_that_turns(self.beta_fast, theta, head_dim)
        high = self._pair_that_turns(self.beta_slow, theta, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        pair_ids = torch.arange(head_dim // 2, dtype=torch.float32)
        keep = 1 - torch.clamp((pair_ids - low) / width, 0, 1)
        return divided * (1 - keep) + plain * keep

    def _pair_that_turns(self, num_turns: float, theta: float, head_dim: int) -> float:
        """Return which pair turns `num_turns` times in the original context."""
        ratio = self.original_context_length / (num_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return the factor that YaRN uses where the file gives none."""
    if mscale and mscale_all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Return the unscaled angle per position of each pair (float32, [head_dim / 2])."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def rope_tables(
    config: ModelConfig, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of every position.

    Returns:
        Two tensors (float32, [num_positions, head_dim / 2], `device`).
    """
    scaling = config.rope_scaling
    if scaling is None:
        frequencies, factor = plain_frequencies(config.rope_theta, config.head_dim), 1.0
    else:
        frequencies = scaling.frequencies(config.rope_theta, config.head_dim)
        factor = scaling.table_factor
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    cosine = angles.cos().mul_(factor)
    return cosine, angles.sin_().mul_(factor)


def _check_positive(scaling: RopeScaling) -> None:
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if not isinstance(value, bool) and not (value > 0 and math.isfinite(value)):
            msg = f"rope scaling: {field.name} is {value}, expected a positive number"
            raise InvalidArgumentError(msg)
