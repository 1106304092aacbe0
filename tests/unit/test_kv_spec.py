"""Specs: bytes per block, one form of each dtype, and every refusal."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import extkv
import pytest
import torch
from extkv.kv import (
    FullAttentionSpec,
    KVSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
    common_block_bytes,
)
from extkv.kv.spec import dtype_size_bytes

ATTENTION = FullAttentionSpec(16, 8, 128, "bfloat16")
CONV = StateSpec("conv", (3, 8192), "bfloat16", widened_dim=0)
SSM = StateSpec("ssm", (32, 128, 128), "float32")
MAMBA = MambaSpec(4096, [CONV, SSM])
SPECS = [
    ATTENTION,
    SlidingWindowSpec(16, 8, 128, "bfloat16", window=1024),
    MLASpec(64),
    MLASpec.fp8_ds_mla(64),
    MAMBA,
]


def test_attention_block_is_tokens_by_heads_by_both_widths():
    assert ATTENTION.bytes_per_block == 16 * 8 * (128 + 128) * 2
    assert FullAttentionSpec(16, 8, 192, "bfloat16", 128).bytes_per_block == 16 * 8 * 320 * 2
    assert SlidingWindowSpec(16, 8, 128, "fp8", window=1024).bytes_per_block == 16 * 8 * 256
    assert FullAttentionSpec(1, 1, 1, "uint8").bytes_per_block == 2


def test_mla_token_is_576_elements_or_656_packed_bytes():
    assert MLASpec(64).bytes_per_block == 64 * 1152
    assert MLASpec(64, 576, "float8_e4m3fn").bytes_per_block == 64 * 576
    packed = MLASpec.fp8_ds_mla(64)
    assert packed.bytes_per_block == 64 * 656
    assert (packed.alignment_bytes, MLASpec(64).alignment_bytes) == (16, 2)


def test_speculation_widens_a_state_and_padding_the_block():
    assert MAMBA.bytes_per_block == 3 * 8192 * 2 + 32 * 128 * 128 * 4
    wide = dataclasses.replace(MAMBA, num_speculative_tokens=3)
    assert wide.bytes_per_block == 6 * 8192 * 2 + 32 * 128 * 128 * 4
    assert dataclasses.replace(MAMBA, padded_bytes=1 << 22).bytes_per_block == 1 << 22


@pytest.mark.parametrize("dtype", [torch.bfloat16, "torch.bfloat16", "bfloat16", "bf16"])
def test_every_way_to_write_a_dtype_is_the_same_spec(dtype: object):
    spec = FullAttentionSpec(16, 8, 128, dtype)
    assert spec == ATTENTION
    assert hash(spec) == hash(ATTENTION)
    assert spec.dtype == "bfloat16"
    assert StateSpec("conv", [3, 8192], dtype, 0) == CONV
    assert MLASpec(64, dtype=dtype) == MLASpec(64)
    assert dtype_size_bytes(dtype) == 2


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_specs_are_values(spec: KVSpec):
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)  # noqa: S301
    assert isinstance(spec, KVSpec)
    assert type(spec).__name__ in repr(spec)
    assert "native" not in repr(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 1
    assert spec.native == pickle.loads(pickle.dumps(spec)).native  # noqa: S301
    assert len({spec.native, *(other.native for other in SPECS)}) == len(SPECS)


def test_requests_hold_what_their_layer_keeps():
    assert ATTENTION.blocks_per_request(1000, 64) == 63
    assert SlidingWindowSpec(16, 8, 128, "bf16", window=128).blocks_per_request(10_000, 64) == 13
    assert MAMBA.blocks_per_request(1_000_000, 64) == 1
    wide = dataclasses.replace(MAMBA, num_speculative_tokens=3)
    assert wide.blocks_per_request(1_000_000, 64) == 4


def test_a_pool_has_the_largest_block_at_the_largest_alignment():
    assert common_block_bytes([ATTENTION, MAMBA]) == MAMBA.bytes_per_block
    assert common_block_bytes([MLASpec.fp8_ds_mla(1), FullAttentionSpec(1, 1, 329, "uint8")]) == 672
    assert common_block_bytes([]) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0, 8, 128, "bf16"), "block_size is 0"),
        (lambda: FullAttentionSpec(16, 0, 128, "bf16"), "num_kv_heads is 0"),
        (lambda: FullAttentionSpec(16, 8, 0, "bf16"), "head_dim is 0"),
        (lambda: FullAttentionSpec(16, 8, 128, "bf16", 0), "head_dim_v is 0"),
        (lambda: SlidingWindowSpec(16, 8, 128, "bf16", window=0), "window is 0"),
        (lambda: FullAttentionSpec(2**60, 8, 128, "bf16"), "overflows 64 bits"),
        (lambda: MLASpec(0), "block_size is 0"),
        (lambda: MLASpec(64, 0), "latent_dim is 0"),
        (lambda: MLASpec.fp8_ds_mla(2**60), "overflows 64 bits"),
        (lambda: MambaSpec(16, []), "no states"),
        (lambda: MambaSpec(0, [SSM]), "block_size is 0"),
        (lambda: MambaSpec(16, [StateSpec("s", (3, 0), "uint8")]), r"s\[1\] has size 0"),
        (lambda: MambaSpec(16, [StateSpec("s", (3,), "uint8", 1)]), "dim 1 cannot be widened"),
        (lambda: MambaSpec(16, [SSM], padded_bytes=8), "8 bytes is too small: 2 MiB are needed"),
        (lambda: MambaSpec(16, [SSM], padded_bytes=(2 << 20) + 2), "no multiple|not a multiple"),
        (lambda: common_block_bytes([MLASpec(2**63, 1, "uint8"), MAMBA, ATTENTION]), None),
    ],
)
def test_refuses_specs_that_cannot_be(make, message):
    if message is None:
        assert make() == 2**63
        return
    with pytest.raises(extkv.LayoutError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(-1, 8, 128, "bf16"), "block_size"),
        (lambda: FullAttentionSpec(16, 8, 2**64, "bf16"), "head_dim"),
        (lambda: FullAttentionSpec(16, 8, 128, "float7"), 'unknown dtype "float7"'),
        (lambda: FullAttentionSpec(16, 8, 128, torch.complex64), "complex64"),
        (lambda: SlidingWindowSpec(16, 8, 128, "bf16", window=-1), "window"),
        (lambda: MLASpec(64, dtype="int3"), "int3"),
        (lambda: MLASpec(64, format="fp4"), "format must be latent or fp8_ds_mla, got 'fp4'"),
        (lambda: MLASpec(64, format="fp8_ds_mla"), "656 uint8 per token, not 576 bfloat16"),
        (lambda: StateSpec("s", (-1,), "uint8"), "shape of state s"),
        (lambda: StateSpec("s", (1,), "q"), "unknown dtype"),
        (lambda: StateSpec("s", (1,), "uint8", -1), "widened_dim"),
        (lambda: MambaSpec(16, [SSM], num_speculative_tokens=-1), "num_speculative_tokens"),
        (lambda: MambaSpec(16, [SSM], padded_bytes=-1), "padded_bytes"),
        (lambda: ATTENTION.blocks_per_request(-1, 1), "max_model_len"),
    ],
)
def test_refuses_arguments_out_of_range(make, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        make()


def test_a_size_that_is_no_integer_is_a_type_error():
    with pytest.raises(TypeError):
        FullAttentionSpec(16.0, 8, 128, "bf16")


def test_layout_errors_are_argument_errors():
    assert issubclass(extkv.LayoutError, extkv.InvalidArgumentError)
    assert issubclass(extkv.LayoutError, ValueError)


def test_importing_specs_imports_no_torch(run_python):
    result = run_python("""
        import sys
        import extkv.kv
        print("torch" in sys.modules)
        print(extkv.kv.FullAttentionSpec(16, 8, 128, "bfloat16").bytes_per_block)
    """)
    assert result.stdout.split() == ["False", "65536"], result.stderr
