"""What one layer caches: attention keys and values, an MLA latent, or recurrent state.

A spec knows the bytes of one block; where they lie is a layout's business. Other engines call a
block a page. Every spec is checked when it is made and never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from extkv import _extkv
from extkv.device import checked_size
from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    DtypeLike = torch.dtype | str

FP8_DS_MLA_BYTES_PER_TOKEN = 656


def dtype_size_bytes(dtype: DtypeLike) -> int:
    """Return the bytes of one element of a dtype.

    Raises:
        InvalidArgumentError: If the name is not known.
    """
    return _extkv.dtype_of(dtype)[1]


@dataclass(frozen=True)
class KVSpec:
    """Base of all specs.

    Attributes:
        native: The same spec in the native module.
    """

    native: _extkv.KvSpec = field(init=False, repr=False, compare=False)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of this layer."""
        return self.native.bytes_per_block

    @property
    def alignment_bytes(self) -> int:
        """What every block start is a multiple of, and its readers rely on."""
        return self.native.alignment_bytes

    def blocks_per_request(self, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Return the blocks that one request of `max_model_len` tokens holds at most."""
        return self.native.blocks_per_request(
            checked_size("max_model_len", max_model_len),
            checked_size("max_num_batched_tokens", max_num_batched_tokens),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        return partial(type(self), **values), ()

    def _complete(self, native: _extkv.KvSpec, **values: object) -> None:
        """Set the native twin and the fields that were brought into one form."""
        for name, value in {"native": native, **values}.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class FullAttentionSpec(KVSpec):
    """Keys and values of every token.

    ``bytes_per_block = block_size * num_kv_heads * (head_dim + head_dim_v) * size of the dtype``.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: Heads that have keys and values.
        head_dim: Elements of one key.
        dtype: A torch.dtype or a name of one; kept as torch's name (``"bfloat16"``).
        head_dim_v: Elements of one value; None for those of a key.

    Raises:
        LayoutError: If a size is 0 or the block does not fit 64 bits.
        InvalidArgumentError: If a size is negative or the dtype is not known.

    Example:
        >>> FullAttentionSpec(16, 8, 128, "bfloat16").bytes_per_block
        65536
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DtypeLike
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        """Check every size once."""
        native = _extkv.KvSpec.full_attention(*_attention_sizes(self), self.dtype)
        self._complete(native, dtype=_extkv.dtype_of(self.dtype)[0])


@dataclass(frozen=True)
class SlidingWindowSpec(KVSpec):
    """Keys and values of the last `window` tokens.

    Attributes:
        block_size: Tokens per block.
        num_kv_heads: Heads that have keys and values.
        head_dim: Elements of one key.
        dtype: A torch.dtype or a name of one; kept as torch's name.
        head_dim_v: Elements of one value; None for those of a key.
        window: Tokens that a query may see, itself included.

    Raises:
        LayoutError: If a size is 0 or the block does not fit 64 bits.
        InvalidArgumentError: If a size is negative or the dtype is not known.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DtypeLike
    head_dim_v: int | None = None
    window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Check every size once."""
        window = checked_size("window", self.window)
        native = _extkv.KvSpec.sliding_window(*_attention_sizes(self), self.dtype, window)
        self._complete(native, dtype=_extkv.dtype_of(self.dtype)[0])


@dataclass(frozen=True)
class MLASpec(KVSpec):
    """The latent of every token of a multi-head latent attention layer.

    Attributes:
        block_size: Tokens per block.
        latent_dim: Elements per token; DeepSeek has 512 compressed and 64 rotary ones.
        dtype: A torch.dtype or a name of one; kept as torch's name.
        format: ``"latent"``: plain elements. ``"fp8_ds_mla"``: FlashMLA's 656 bytes per token, see
            `fp8_ds_mla`.

    Raises:
        LayoutError: If a size is 0 or the block does not fit 64 bits.
        InvalidArgumentError: If a size is negative, or the dtype or the format is not known.
    """

    block_size: int
    latent_dim: int = 576
    dtype: DtypeLike = "bfloat16"
    format: Literal["latent", "fp8_ds_mla"] = "latent"

    def __post_init__(self) -> None:
        """Check every size once."""
        block_size = checked_size("block_size", self.block_size)
        latent_dim = checked_size("latent_dim", self.latent_dim)
        name, _ = _extkv.dtype_of(self.dtype)
        if self.format == "latent":
            native = _extkv.KvSpec.mla(block_size, latent_dim, self.dtype)
        elif self.format != "fp8_ds_mla":
            raise InvalidArgumentError(
                f"format must be latent or fp8_ds_mla, got {self.format!r:.80}"
            )
        elif (latent_dim, name) != (FP8_DS_MLA_BYTES_PER_TOKEN, "uint8"):
            raise InvalidArgumentError(
                f"fp8_ds_mla has 656 uint8 per token, not {latent_dim} {name}; use "
                "MLASpec.fp8_ds_mla(block_size)"
            )
        else:
            native = _extkv.KvSpec.fp8_ds_mla(block_size)
        self._complete(native, dtype=name)

    @classmethod
    def fp8_ds_mla(cls, block_size: int) -> MLASpec:
        """Describe FlashMLA's packed FP8 cache: 512 fp8 values, 4 fp32 scales, 64 bf16 rotary.

        The cache sees it as 656 uint8 per token; every block starts at a multiple of 16 bytes.
        """
        return cls(block_size, FP8_DS_MLA_BYTES_PER_TOKEN, "uint8", "fp8_ds_mla")


@dataclass(frozen=True)
class StateSpec:
    """One state of a recurrent layer, for one request.

    Attributes:
        name: For example ``"conv"`` or ``"ssm"``.
        shape: Its shape without speculation, for example ``(channels, kernel - 1)``.
        dtype: A torch.dtype or a name of one; kept as torch's name.
        widened_dim: The dim that is one longer for each speculated token, so that a rejected token
            can be rolled back; None for none.

    Raises:
        InvalidArgumentError: If a size is negative or the dtype is not known.
    """

    name: str
    shape: Sequence[int]
    dtype: DtypeLike
    widened_dim: int | None = None

    def __post_init__(self) -> None:
        """Bring shape and dtype into one form."""
        shape = tuple(checked_size(f"shape of state {self.name}", size) for size in self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", _extkv.dtype_of(self.dtype)[0])
        if self.widened_dim is not None:
            checked_size("widened_dim", self.widened_dim)


@dataclass(frozen=True)
class MambaSpec(KVSpec):
    """Recurrent state: one block per request (and per speculated token), whatever its length.

    States lie one after another, each at a multiple of its element size. Mamba, linear attention
    and short convolutions are all described this way.

    Attributes:
        block_size: Tokens after which a state is kept, usually `max_model_len`.
        states: What one block holds.
        num_speculative_tokens: Speculated tokens that the states are widened for, here and nowhere
            else.
        padded_bytes: Bytes of a block, for a pool that other layers share; None for no padding.

    Raises:
        LayoutError: If there are no states, a size is 0, or `padded_bytes` is too small; the
            message names both sizes.
        InvalidArgumentError: If a size is negative.
    """

    block_size: int
    states: Sequence[StateSpec]
    num_speculative_tokens: int = 0
    padded_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check every size once."""
        padded_bytes = self.padded_bytes
        if padded_bytes is not None:
            padded_bytes = checked_size("padded_bytes", padded_bytes)
        native = _extkv.KvSpec.mamba(
            checked_size("block_size", self.block_size),
            [(s.name, list(s.shape), s.dtype, s.widened_dim) for s in self.states],
            checked_size("num_speculative_tokens", self.num_speculative_tokens),
            padded_bytes,
        )
        self._complete(native, states=tuple(self.states))


def common_block_bytes(specs: Iterable[KVSpec]) -> int:
    """Return the smallest block that each spec can be padded to, for a pool that layers share.

    Raises:
        LayoutError: If it does not fit 64 bits.
    """
    return _extkv.common_block_bytes([spec.native for spec in specs])


def _attention_sizes(spec: FullAttentionSpec | SlidingWindowSpec) -> tuple[int, int, int, int]:
    head_dim = checked_size("head_dim", spec.head_dim)
    return (
        checked_size("block_size", spec.block_size),
        checked_size("num_kv_heads", spec.num_kv_heads),
        head_dim,
        head_dim if spec.head_dim_v is None else checked_size("head_dim_v", spec.head_dim_v),
    )
