"""One cache of each layout, and how to look at its blocks, on any device."""

from __future__ import annotations

import torch
from extkv.kv import (
    FullAttentionSpec,
    KVCache,
    Layer,
    Layout,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
    hybrid_layers,
)

ATTENTION = FullAttentionSpec(16, 2, 64, "float16")  # 8 KiB per block
MAMBA = MambaSpec(
    16, [StateSpec("conv", (3, 128), "float16"), StateSpec("ssm", (4, 64), "float32")]
)
CAPACITY = 40


NAMES = [f"layers.{index}" for index in range(3)]
SPLIT_SEEN_BLOCK_MAJOR = Layout.kv_split(ATTENTION).with_stride_order((1, 0, 2, 3, 4))


def layers_of(kind: str) -> list[Layer]:
    if kind == "hybrid":
        return hybrid_layers(
            [Layer(NAMES[0], ATTENTION), Layer(NAMES[1], MAMBA), Layer(NAMES[2], ATTENTION)]
        )
    if kind in ORDERS:
        return [Layer.stacked(name, ATTENTION, kind) for name in NAMES]
    spec, layout = {
        "kv_split": (ATTENTION, Layout.kv_split(ATTENTION)),
        "block_major": (ATTENTION, Layout.block_major(ATTENTION)),
        "kv_first_block_outermost": (ATTENTION, SPLIT_SEEN_BLOCK_MAJOR),
        "mla": (MLASpec(16), None),
        "mla_fp8": (MLASpec.fp8_ds_mla(16), None),
        "sliding_window": (SlidingWindowSpec(16, 2, 64, "float16", window=128), None),
        "mamba": (MAMBA, None),
    }[kind]
    return [Layer(name, spec, layout) for name in NAMES]


ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
KINDS = [
    "kv_split",
    "block_major",
    "kv_first_block_outermost",
    "mla",
    "mla_fp8",
    "sliding_window",
    "mamba",
    "hybrid",
    *ORDERS,
]


def reserve(kind: str, device: str = "cpu", **options: object) -> KVCache:
    return KVCache.reserve(layers_of(kind), max_blocks=CAPACITY, device=device, **options)


def block_dim(tensor: torch.Tensor, capacity: int) -> int:
    (dim,) = [d for d, size in enumerate(tensor.shape) if size == capacity]
    return dim


def blocks(cache: KVCache, start: int, end: int) -> list[torch.Tensor]:
    """Every tensor of the cache, narrowed to some blocks."""
    narrowed = []
    for value in cache.tensors().values():
        for tensor in value if isinstance(value, list) else [value]:
            dim = block_dim(tensor, cache.capacity_blocks)
            narrowed.append(tensor.narrow(dim, start, end - start))
    return narrowed


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    for index, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(seed * 1000 + index)
        values = torch.randint(1, 100, tensor.shape, generator=generator)
        tensor.copy_(values.to(torch.float32) if tensor.is_floating_point() else values)


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def are_zero(tensors: list[torch.Tensor]) -> bool:
    return not any(bool(tensor.to(torch.float32).any()) for tensor in tensors)
