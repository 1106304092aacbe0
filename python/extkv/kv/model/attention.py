"""Attention layers: which weights they have, and what they cache on one of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from extkv.errors import InvalidArgumentError
from extkv.kv.model.weight import Weight, linear
from extkv.kv.spec import FullAttentionSpec, MLASpec, SlidingWindowSpec

PART = "attention"
FP8 = "float8_e4m3fn"
# The only latent that FlashMLA's packed format holds: compressed and rotary elements.
FP8_DS_MLA_LATENT = (512, 64)


@dataclass(frozen=True)
class GroupedAttention:
    """Attention with as many keys and values as there are key-value heads.

    Attributes:
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        qkv_bias: Whether queries, keys and values have a bias.
        output_bias: Whether the output projection has one.
        has_qk_norm: Whether query and key heads are normalised.
        has_output_gate: Whether the query projection also makes a gate for the output.
        window: Tokens that a token sees, itself included; None for all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    has_qk_norm: bool = False
    has_output_gate: bool = False
    window: int | None = None

    def weights(self) -> list[Weight]:
        """Return the projections and the norms of heads."""
        num_queries = self.num_heads * self.head_dim
        width = 2 * num_queries if self.has_output_gate else num_queries
        num_keys, bias = self.num_kv_heads * self.head_dim, self.qkv_bias
        found = linear(PART, width, self.hidden_size, bias=bias, max_ranks=self.num_heads)
        for _ in ("keys", "values"):
            # Ranks beyond the key-value heads hold copies.
            found += linear(
                PART, num_keys, self.hidden_size, bias=bias, max_ranks=self.num_kv_heads
            )
        found += linear(PART, self.hidden_size, num_queries, bias=self.output_bias)
        if self.has_qk_norm:
            found.append(Weight("norms", (self.head_dim,), count=2, max_ranks=1))
        return found

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that heads cannot be divided over.

        Raises:
            InvalidArgumentError: If it divides neither.
        """
        few, many = sorted((num_ranks, self.num_kv_heads))
        if self.num_heads % num_ranks or many % few:
            raise InvalidArgumentError(
                f"tensor_parallel_size {num_ranks} does not divide {self.num_heads} attention "
                f"heads and {self.num_kv_heads} key-value heads"
            )

    def spec(
        self, block_size: int, dtype: str, kv_cache_dtype: str, num_ranks: int
    ) -> FullAttentionSpec | SlidingWindowSpec:
        """Return what one rank caches; at least one head.

        Raises:
            InvalidArgumentError: If the cache dtype is of another kind of attention.
        """
        if kv_cache_dtype == "fp8_ds_mla":
            raise InvalidArgumentError("fp8_ds_mla is a cache of MLA layers, the model has none")
        cached = FP8 if kv_cache_dtype == "fp8" else dtype
        num_kv_heads = max(1, self.num_kv_heads // num_ranks)
        if self.window is None:
            return FullAttentionSpec(block_size, num_kv_heads, self.head_dim, cached)
        return SlidingWindowSpec(
            block_size, num_kv_heads, self.head_dim, cached, window=self.window
        )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA).

    Attributes:
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        query_rank: Width of the compressed query; None where queries are not compressed.
        latent_dim: Width of the compressed keys and values.
        rotary_dim: Rotary elements of a key, which all heads share.
        key_dim: Elements of a head's key without the rotary ones.
        value_dim: Elements of a head's value.
        bias: Whether the projections from and to the residual stream have a bias.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent_dim: int
    rotary_dim: int
    key_dim: int
    value_dim: int
    bias: bool = False

    def weights(self) -> list[Weight]:
        """Return the projections; those to the latent are whole on every rank."""
        hidden, heads = self.hidden_size, self.num_heads
        num_queries = heads * (self.key_dim + self.rotary_dim)
        if self.query_rank is None:
            found = linear(PART, num_queries, hidden)
        else:
            found = linear(PART, self.query_rank, hidden, bias=self.bias, max_ranks=1)
            found.append(Weight("norms", (self.query_rank,), max_ranks=1))
            found += linear(PART, num_queries, self.query_rank)
        latent = self.latent_dim + self.rotary_dim
        found += linear(PART, latent, hidden, bias=self.bias, max_ranks=1)
        found.append(Weight("norms", (self.latent_dim,), max_ranks=1))
        found += linear(PART, heads * (self.key_dim + self.value_dim), self.latent_dim)
        found += linear(PART, hidden, heads * self.value_dim, bias=self.bias)
        return found

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that heads cannot be divided over.

        Raises:
            InvalidArgumentError: If it does not divide them.
        """
        if self.num_heads % num_ranks:
            raise InvalidArgumentError(
                f"tensor_parallel_size {num_ranks} does not divide {self.num_heads} attention heads"
            )

    def spec(self, block_size: int, dtype: str, kv_cache_dtype: str, num_ranks: int) -> MLASpec:
        """Return what every rank caches: the whole latent, whatever `num_ranks` is.

        Raises:
            InvalidArgumentError: If the packed format cannot hold this latent.
        """
        del num_ranks
        if kv_cache_dtype != "fp8_ds_mla":
            cached = FP8 if kv_cache_dtype == "fp8" else dtype
            return MLASpec(block_size, self.latent_dim + self.rotary_dim, cached)
        if (self.latent_dim, self.rotary_dim) != FP8_DS_MLA_LATENT:
            raise InvalidArgumentError(
                f"fp8_ds_mla holds a latent of 512 + 64 elements, the model has {self.latent_dim} "
                f"+ {self.rotary_dim}"
            )
        return MLASpec.fp8_ds_mla(block_size)
