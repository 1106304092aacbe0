"""The shape of a decoder-only model: layers, widths and formats, as its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.kv.model.weight import Weight

if TYPE_CHECKING:
    from typing import TypeAlias

    from extkv.kv.model.attention import GroupedAttention, LatentAttention
    from extkv.kv.model.feed_forward import MixtureOfExperts, Mlp
    from extkv.kv.model.recurrent import GatedDeltaNet, Mamba1, Mamba2

    Attention: TypeAlias = GroupedAttention | LatentAttention
    Recurrent: TypeAlias = Mamba1 | Mamba2 | GatedDeltaNet


@dataclass(frozen=True)
class DecoderLayer:
    """One layer.

    Attributes:
        attention: Its attention; None for none.
        recurrent: Its recurrent state; None for none. A layer may have both.
        feed_forward: Its feed-forward part; None for none.
        num_norms: Norms as wide as the residual stream.
    """

    attention: Attention | None = None
    recurrent: Recurrent | None = None
    feed_forward: Mlp | MixtureOfExperts | None = None
    num_norms: int = 2

    def weights(self) -> list[Weight]:
        """Return all weights but the norms that `num_norms` counts."""
        parts = (self.attention, self.recurrent, self.feed_forward)
        return [weight for part in parts if part is not None for weight in part.weights()]


@dataclass(frozen=True)
class ModelShape:
    """A model.

    Attributes:
        architecture: Name of the architecture.
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        layers: Its layers, first to last.
        tie_word_embeddings: Whether the output head is the embedding itself.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[DecoderLayer, ...]
    tie_word_embeddings: bool

    def weights(self) -> list[Weight]:
        """Return every weight, those of one kind together."""
        num_norms = 1 + sum(layer.num_norms for layer in self.layers)
        found = [Weight("embedding", (self.vocab_size, self.hidden_size))]
        for layer in self.layers:
            found += layer.weights()
        found.append(Weight("norms", (self.hidden_size,), count=num_norms, max_ranks=1))
        if not self.tie_word_embeddings:
            found.append(Weight("output head", (self.vocab_size, self.hidden_size)))
        return found

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        return sum(weight.num_parameters for weight in self.weights())
