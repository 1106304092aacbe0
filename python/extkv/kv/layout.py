"""Where the blocks of every layer lie, and which buffers that takes.

A layout is a logical shape with named dims, a stride order and the dim that counts blocks. With
``N`` blocks and ``P`` bytes per block and segment, block ``b`` of segment ``s`` is bytes
``(s * N + b) * P`` to ``(s * N + b + 1) * P`` of its tensor. `docs/kv-layouts.md` draws them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from extkv import _extkv
from extkv._extkv import CachePlan
from extkv.device import checked_size
from extkv.errors import InvalidArgumentError, LayoutError
from extkv.kv.spec import MambaSpec, MLASpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extkv.kv.spec import DtypeLike, FullAttentionSpec, KVSpec, SlidingWindowSpec

    AttentionSpec = FullAttentionSpec | SlidingWindowSpec

__all__ = ["CachePlan", "Layer", "Layout", "hybrid_layers", "plan_cache"]


class Layout:
    """Where the elements of every block lie, for any number of blocks. Never changes.

    `stride_order` has vLLM's meaning: physical dim ``i``, counted from the outermost, is logical
    dim ``stride_order[i]``.

    Example:
        >>> layout = Layout.new([("kv", 2), ("blocks", None), ("bytes", 64)], (1, 0, 2), "uint8")
        >>> layout.num_segments, layout.shape(10), layout.strides(10)
        (1, (2, 10, 64), (64, 128, 1))
    """

    __slots__ = ("_native",)

    def __init__(self, native: _extkv.Layout) -> None:
        self._native = native

    @classmethod
    def new(
        cls,
        dims: Sequence[tuple[str, int | None]],
        stride_order: Sequence[int] | None,
        dtype: DtypeLike,
    ) -> Layout:
        """Lay a logical shape out.

        Args:
            dims: Name and size of each logical dim; the size of the one that counts blocks is None.
            stride_order: Logical dims from the outermost in memory to the innermost; None for the
                order in which they are written.
            dtype: A torch.dtype or a name of one.

        Raises:
            LayoutError: If not exactly one dim counts blocks, a size is 0, or the order is no
                permutation of the dims.
            InvalidArgumentError: If a size is negative or the dtype is not known.
        """
        block_dims = [index for index, (_, size) in enumerate(dims) if size is None]
        if len(block_dims) != 1:
            raise LayoutError(f"exactly one dim must have the size None, got {list(dims)!r:.200}")
        order = range(len(dims)) if stride_order is None else stride_order
        sized = [(name, 1 if size is None else size) for name, size in dims]
        native = _extkv.Layout.ordered(_checked(sized), _order(order), block_dims[0], dtype)
        return cls(native)

    @classmethod
    def from_strides(
        cls,
        dims: Sequence[tuple[str, int]],
        strides: Sequence[int],
        dtype: DtypeLike,
        *,
        block_dim: str = "blocks",
    ) -> Layout:
        """Derive the layout of a tensor with strides that a backend reports.

        Args:
            dims: Name and size of each logical dim; at least two blocks.
            strides: Elements between neighbours along each dim.
            dtype: A torch.dtype or a name of one.
            block_dim: Name of the dim that counts blocks.

        Raises:
            LayoutError: If the strides alias, leave a gap, or do not say where blocks lie; the
                message names the dim.
            InvalidArgumentError: If a size is negative or the dtype is not known.
        """
        names = [name for name, _ in dims]
        if names.count(block_dim) != 1:
            raise LayoutError(f"exactly one dim must be called {block_dim!r}, got {names}")
        index = names.index(block_dim)
        return cls(_extkv.Layout.from_strides(_checked(dims), list(strides), index, dtype))

    @classmethod
    def kv_split(cls, spec: AttentionSpec) -> Layout:
        """All keys, then all values: ``(2, N, tokens, heads, head_dim)``, 2 segments.

        Raises:
            LayoutError: If keys and values have different widths.
        """
        return cls(_extkv.Layout.kv_split(spec.native))

    @classmethod
    def block_major(cls, spec: AttentionSpec) -> Layout:
        """Keys and values of a block side by side: ``(N, 2, tokens, heads, head_dim)``, 1 segment.

        Raises:
            LayoutError: If keys and values have different widths.
        """
        return cls(_extkv.Layout.block_major(spec.native))

    @classmethod
    def fused(cls, spec: AttentionSpec) -> Layout:
        """Key and value of a head side by side: ``(N, tokens, heads, head_dim + head_dim_v)``."""
        return cls(_extkv.Layout.fused(spec.native))

    @classmethod
    def split_keys(cls, spec: AttentionSpec) -> Layout:
        """The keys alone, ``(N, tokens, heads, head_dim)``; goes with `split_values`."""
        return cls(_extkv.Layout.split_keys(spec.native))

    @classmethod
    def split_values(cls, spec: AttentionSpec) -> Layout:
        """The values alone, ``(N, tokens, heads, head_dim_v)``."""
        return cls(_extkv.Layout.split_values(spec.native))

    @classmethod
    def mla(cls, spec: MLASpec) -> Layout:
        """The latents of an MLA layer: ``(N, tokens, latent_dim)``, 1 segment."""
        return cls(_extkv.Layout.mla(spec.native))

    def with_stride_order(self, stride_order: Sequence[int]) -> Layout:
        """Return the same logical shape in another physical order, without padding.

        Raises:
            LayoutError: If the order is no permutation of the dims.
        """
        return Layout(self._native.with_stride_order(_order(stride_order)))

    def padded_to(self, num_bytes: int) -> Layout:
        """Return the layout with `num_bytes` from one block of a segment to the next.

        Raises:
            LayoutError: If that is less than a block has, or misaligns its elements.
        """
        return Layout(self._native.padded_to(checked_size("num_bytes", num_bytes)))

    @property
    def native(self) -> _extkv.Layout:
        """The same layout in the native module."""
        return self._native

    @property
    def dims(self) -> tuple[tuple[str, int | None], ...]:
        """Name and size of each logical dim; None for the one that counts blocks."""
        block_dim = self._native.block_dim
        dims = enumerate(self._native.dims)
        return tuple((name, None if i == block_dim else size) for i, (name, size) in dims)

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Logical dims from the outermost in memory to the innermost."""
        return tuple(self._native.stride_order)

    @property
    def block_dim(self) -> int:
        """Index of the logical dim that counts blocks."""
        return self._native.block_dim

    @property
    def dtype(self) -> str:
        """Torch's name of the element type."""
        return self._native.dtype

    @property
    def num_segments(self) -> int:
        """Separate runs of memory that each hold a part of every block."""
        return self._native.num_segments

    @property
    def bytes_per_block_per_segment(self) -> int:
        """Bytes of a block in one segment, padding included."""
        return self._native.bytes_per_block_per_segment

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all segments, padding included."""
        return self._native.bytes_per_block

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape for a number of blocks.

        Raises:
            LayoutError: If there are no blocks, or more than a tensor can address.
        """
        return tuple(self._native.shape(checked_size("num_blocks", num_blocks)))

    def strides(self, num_blocks: int) -> tuple[int, ...]:
        """Return the elements between neighbours along each logical dim.

        Raises:
            LayoutError: If there are no blocks, or more than a tensor can address.
        """
        return tuple(self._native.strides(checked_size("num_blocks", num_blocks)))

    def block_ranges(self, block: int, num_blocks: int) -> list[tuple[int, int]]:
        """Return first byte and end of a block in each segment of a tensor of `num_blocks`.

        Raises:
            LayoutError: If there is no such block.
        """
        return self._native.block_ranges(
            checked_size("block", block), checked_size("num_blocks", num_blocks)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._native == other._native

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        dims, order = list(self.dims), self.stride_order
        return f"Layout(dims={dims}, stride_order={order}, dtype={self.dtype!r})"


class Layer:
    """One layer of a cache: a name, what it caches, where that lies. Never changes.

    Args:
        name: The engine's name, unique in a cache.
        spec: What the layer caches.
        layout: Where; several layouts make several tensors one after another. None for the usual
            one: `Layout.kv_split`, `Layout.mla`, or a block of states.

    Raises:
        LayoutError: If the usual layout does not exist for the spec (different widths of keys and
            values).
        InvalidArgumentError: If a layout is given for recurrent state.
    """

    __slots__ = ("_native", "_spec")

    def __init__(
        self, name: str, spec: KVSpec, layout: Layout | Sequence[Layout] | None = None
    ) -> None:
        self._spec = spec
        self._native = _native_layer(name, spec, layout)

    @classmethod
    def stacked(cls, name: str, spec: KVSpec, order: str = "LBHNC") -> Layer:
        """Put the layer into one tensor ``[L, B, H, N, C]`` with every layer of its kind.

        Args:
            name: The engine's name.
            spec: What the layer caches; recurrent state cannot be stacked.
            order: Order in memory: LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC.

        Raises:
            InvalidArgumentError: If the order is not known.
        """
        return cls.from_native(spec, _extkv.Layer.stacked(name, spec.native, order))

    @classmethod
    def from_native(cls, spec: KVSpec, native: _extkv.Layer) -> Layer:
        """Wrap a layer of the native module that has this spec."""
        layer = cls.__new__(cls)
        object.__setattr__(layer, "_spec", spec)
        object.__setattr__(layer, "_native", native)
        return layer

    def sharing_blocks(self, other_name: str) -> Layer:
        """Return the layer, reading the blocks that an earlier layer writes, under the same ids."""
        return Layer.from_native(self._spec, self._native.sharing_blocks(other_name))

    def sharing_pool(self, other_name: str) -> Layer:
        """Return the layer, with block ids of its own in the memory of an earlier layer."""
        return Layer.from_native(self._spec, self._native.sharing_pool(other_name))

    def padded_to(self, num_bytes: int) -> Layer:
        """Return the layer with blocks of `num_bytes`, so that layers can share a pool.

        Raises:
            LayoutError: If a block is not one run of bytes, or the size is too small or misaligned.
        """
        native = self._native.padded_to(checked_size("num_bytes", num_bytes))
        spec = self._spec
        if isinstance(spec, MambaSpec):
            spec = replace(spec, padded_bytes=num_bytes)
        return Layer.from_native(spec, native)

    @property
    def native(self) -> _extkv.Layer:
        """The same layer in the native module."""
        return self._native

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._native.name

    @property
    def spec(self) -> KVSpec:
        """What the layer caches."""
        return self._spec

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """One layout per tensor; none for stacked layers and recurrent state."""
        return tuple(Layout(native) for native in self._native.layouts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self._native == other._native

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.spec})"


def hybrid_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Re-stride the attention layers of a hybrid model; return those of other models unchanged.

    A layer of recurrent state makes a model hybrid. Then a block of every layer is one run of
    bytes: the block dim becomes the outermost in memory, shapes stay.

    Raises:
        LayoutError: If a layer has several tensors, or is stacked so that its bytes in a block are
            not one run.
    """
    listed = list(layers)
    natives = _extkv.hybrid_layers([layer.native for layer in listed])
    return [
        Layer.from_native(layer.spec, native) for layer, native in zip(listed, natives, strict=True)
    ]


def plan_cache(
    layers: Iterable[Layer], *, max_blocks: int | None = None, max_bytes: int | None = None
) -> CachePlan:
    """Plan the buffers that memory reserves and the tensors that layers see.

    Args:
        layers: Layers in order; a layer that shares comes after the one it shares with.
        max_blocks: Most blocks there can ever be, or
        max_bytes: most bytes over all buffers; exactly one of the two.

    Raises:
        LayoutError: If the layers do not make a cache together, or no block fits.
        InvalidArgumentError: If neither or both sizes are given, or one is negative.
    """
    natives = [layer.native for layer in layers]
    if max_blocks is not None and max_bytes is None:
        return CachePlan.of_blocks(natives, checked_size("max_blocks", max_blocks))
    if max_bytes is not None and max_blocks is None:
        return CachePlan.of_bytes(natives, checked_size("max_bytes", max_bytes))
    raise InvalidArgumentError("give exactly one of max_blocks and max_bytes")


def _native_layer(
    name: str, spec: KVSpec, layout: Layout | Sequence[Layout] | None
) -> _extkv.Layer:
    if isinstance(spec, MambaSpec):
        if layout is not None:
            raise InvalidArgumentError(f"layer {name} is recurrent: its spec says where states lie")
        return _extkv.Layer.state(name, spec.native)
    if layout is None:
        is_mla = isinstance(spec, MLASpec)
        native = (_extkv.Layout.mla if is_mla else _extkv.Layout.kv_split)(spec.native)
        return _extkv.Layer.strided(name, spec.native, [native])
    parts = [layout] if isinstance(layout, Layout) else list(layout)
    return _extkv.Layer.strided(name, spec.native, [part.native for part in parts])


def _checked(dims: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, checked_size(f"dim {name}", size)) for name, size in dims]


def _order(stride_order: Iterable[int]) -> list[int]:
    return [checked_size("stride order entry", entry) for entry in stride_order]
