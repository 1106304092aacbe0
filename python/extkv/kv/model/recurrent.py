"""Recurrent layers: which weights they have, and the states of one request on one rank.

Shapes of states are those of vLLM's `MambaStateShapeCalculator` (vllm/model_executor/layers/mamba/
mamba_utils.py at 02d7108): the convolution's window first, then its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from extkv.errors import InvalidArgumentError
from extkv.kv.model.weight import Weight, linear
from extkv.kv.spec import StateSpec

PART = "recurrent"


def _check_divides(num_ranks: int, what: str, number: int) -> None:
    if number % num_ranks:
        raise InvalidArgumentError(
            f"tensor_parallel_size {num_ranks} does not divide {number} {what}"
        )


def _states(
    num_channels: int, kernel: int, dtype: str, recurrent: tuple[int, ...], state_dtype: str
) -> tuple[StateSpec, ...]:
    convolution = StateSpec("conv", (kernel - 1, num_channels), dtype, widened_dim=0)
    return convolution, StateSpec("ssm", recurrent, state_dtype)


@dataclass(frozen=True)
class Mamba1:
    """A selective state space as in Mamba, with the norms that Jamba adds.

    Attributes:
        hidden_size: Width of the residual stream.
        num_channels: Width of the inner stream.
        state_size: State elements per channel.
        kernel: Width of the convolution; at least 2.
        time_step_rank: Width of the compressed time step.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the projections from and to the residual stream have one.
    """

    hidden_size: int
    num_channels: int
    state_size: int
    kernel: int
    time_step_rank: int
    conv_bias: bool = True
    bias: bool = False

    def weights(self) -> list[Weight]:
        """Return the projections, the convolution and the state matrices."""
        channels, rank = self.num_channels, self.time_step_rank
        return [
            *linear(PART, 2 * channels, self.hidden_size, bias=self.bias),
            Weight(PART, (channels, self.kernel + int(self.conv_bias))),
            *linear(PART, rank + 2 * self.state_size, channels),
            *linear(PART, channels, rank, bias=True),
            Weight(PART, (channels, self.state_size + 1)),  # A and D
            *linear(PART, self.hidden_size, channels, bias=self.bias),
            Weight("norms", (rank + 2 * self.state_size,), max_ranks=1),
        ]

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that channels cannot be divided over.

        Raises:
            InvalidArgumentError: If it does not divide them.
        """
        _check_divides(num_ranks, "channels", self.num_channels)

    def states(self, dtype: str, state_dtype: str, num_ranks: int) -> tuple[StateSpec, ...]:
        """Return the states of one request on one rank."""
        channels = self.num_channels // num_ranks
        return _states(channels, self.kernel, dtype, (channels, self.state_size), state_dtype)


@dataclass(frozen=True)
class Mamba2:
    """A state space whose heads share one decay, as in Mamba 2.

    Attributes:
        hidden_size: Width of the residual stream.
        num_channels: Width of the inner stream.
        num_heads: Heads of the state.
        head_dim: Width of a head.
        num_groups: Groups of heads that share their input and output matrices.
        state_size: State elements per channel.
        kernel: Width of the convolution; at least 2.
        conv_bias: Whether the convolution has a bias.
        input_bias: Whether the projection from the residual stream has one.
        output_bias: Whether the projection to it has one.
        has_norm: Whether the output is normalised.
    """

    hidden_size: int
    num_channels: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    has_norm: bool = True

    def weights(self) -> list[Weight]:
        """Return the projections, the convolution and the scalars of heads."""
        channels, groups = self.num_channels, 2 * self.num_groups * self.state_size
        per_channel = self.kernel + int(self.conv_bias)
        found = linear(PART, 2 * channels + self.num_heads, self.hidden_size, bias=self.input_bias)
        found += linear(
            PART, groups, self.hidden_size, bias=self.input_bias, max_ranks=self.num_groups
        )
        found += [
            Weight(PART, (channels, per_channel)),
            Weight(PART, (groups, per_channel), max_ranks=self.num_groups),
            Weight(PART, (self.num_heads,), count=3),  # A, D and the time step's bias
            *linear(PART, self.hidden_size, channels, bias=self.output_bias),
        ]
        if self.has_norm:
            found.append(Weight("norms", (channels,)))
        return found

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that heads or groups cannot be divided over.

        Raises:
            InvalidArgumentError: If it does not divide them; one group is copied instead.
        """
        _check_divides(num_ranks, "heads of recurrent layers", self.num_heads)
        if self.num_groups > 1:
            _check_divides(num_ranks, "groups of recurrent layers", self.num_groups)

    def states(self, dtype: str, state_dtype: str, num_ranks: int) -> tuple[StateSpec, ...]:
        """Return the states of one request on one rank; a single group is on every rank."""
        groups = max(1, self.num_groups // num_ranks)
        channels = self.num_channels // num_ranks + 2 * groups * self.state_size
        recurrent = (self.num_heads // num_ranks, self.head_dim, self.state_size)
        return _states(channels, self.kernel, dtype, recurrent, state_dtype)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention with a gated delta rule, as in Qwen3-Next.

    Attributes:
        hidden_size: Width of the residual stream.
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        kernel: Width of the convolution; at least 2.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def weights(self) -> list[Weight]:
        """Return the projections, the convolution and the scalars of heads."""
        num_values = self.num_value_heads * self.value_dim
        return [
            *linear(PART, self.num_channels + num_values, self.hidden_size),
            Weight(PART, (2 * self.num_value_heads, self.hidden_size)),
            Weight(PART, (self.num_channels, self.kernel)),
            Weight(PART, (self.num_value_heads,), count=2),  # A and the time step's bias
            *linear(PART, self.hidden_size, num_values),
            Weight("norms", (self.value_dim,), max_ranks=1),
        ]

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that heads cannot be divided over.

        Raises:
            InvalidArgumentError: If it does not divide them.
        """
        _check_divides(num_ranks, "key heads of recurrent layers", self.num_key_heads)
        _check_divides(num_ranks, "value heads of recurrent layers", self.num_value_heads)

    def states(self, dtype: str, state_dtype: str, num_ranks: int) -> tuple[StateSpec, ...]:
        """Return the states of one request on one rank."""
        recurrent = (self.num_value_heads // num_ranks, self.value_dim, self.key_dim)
        channels = self.num_channels // num_ranks
        return _states(channels, self.kernel, dtype, recurrent, state_dtype)
