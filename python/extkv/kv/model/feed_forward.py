"""Feed-forward layers: one network for every token, or experts that a router chooses from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from extkv.kv.model.weight import Weight, linear


@dataclass(frozen=True)
class Mlp:
    """One network.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside.
        is_gated: Whether a third matrix gates the inner values.
        bias: Whether the projections have a bias.
    """

    hidden_size: int
    intermediate_size: int
    is_gated: bool = True
    bias: bool = False

    def weights(self, part: str = "mlp") -> list[Weight]:
        """Return the projections, counted under `part`."""
        up = linear(part, self.intermediate_size, self.hidden_size, bias=self.bias)
        down = linear(part, self.hidden_size, self.intermediate_size, bias=self.bias)
        return [*up, *up, *down] if self.is_gated else [*up, *down]


@dataclass(frozen=True)
class MixtureOfExperts:
    """A router, experts, and what every token passes.

    Attributes:
        hidden_size: Width of the residual stream.
        num_experts: Experts to choose from.
        expert: One of them.
        shared: The network that every token passes; None for none.
        has_shared_gate: Whether the shared network is gated per token.
        latent_size: Width to which experts' input is compressed; None where it is not.
        latent_bias: Whether that compression has a bias.
    """

    hidden_size: int
    num_experts: int
    expert: Mlp
    shared: Mlp | None = None
    has_shared_gate: bool = False
    latent_size: int | None = None
    latent_bias: bool = False

    def weights(self) -> list[Weight]:
        """Return router, experts and shared network."""
        found = [Weight("router", (self.num_experts, self.hidden_size), max_ranks=1)]
        expert = self.expert.weights("experts")
        found += [replace(weight, count=self.num_experts) for weight in expert]
        if self.shared is not None:
            found += self.shared.weights("shared experts")
        if self.has_shared_gate:
            found.append(Weight("router", (1, self.hidden_size), max_ranks=1))
        if self.latent_size is not None:
            for sizes in (
                (self.latent_size, self.hidden_size),
                (self.hidden_size, self.latent_size),
            ):
                found += linear("experts", *sizes, bias=self.latent_bias, max_ranks=1)
        return found
