"""Every kernel compiles for an H200 without one, fits it, and does so once for all batch sizes."""

from __future__ import annotations

from typing import Any

import pytest

SHARED_BYTES_PER_BLOCK = 227 * 1024
HEAD_DIMS = (64, 80, 96, 128, 256)
ATTENTION = [
    *(f"{head_dim}-{dtype}" for head_dim in HEAD_DIMS for dtype in ("bfloat16", "float16")),
    "128-float32",
    "128-bfloat16-window",
]
OTHERS = [
    *(
        f"{op}-{dtype}{variant}"
        for op, variants in {
            "kv_append": [""],
            "rms_norm": ["", "-residual", "-heads"],
            "rotary_embedding": ["", "-norms"],
            "small_batch_linear": ["", "-gated"],
            "small_batch_add_linear": [""],
            "silu_and_mul": [""],
            "draft_loss": ["", "-values"],
            "argmax_tokens": [""],
            "sample_tokens": ["", "-cutoff"],
            "logit_cutoff": [""],
        }.items()
        for variant in variants
        for dtype in ("bfloat16", "float32")
    ),
    *(
        f"{op}-{dtype}{variant}"
        for op, variants in {
            "markov_step": ["", "-codes", "-greedy", "-headless"],
            "verify_drafts": [
                "-standard",
                "-standard-codes",
                "-standard-headless",
                "-standard-one_hot",
                "-block",
                "-block-one_hot",
                "-synthetic",
            ],
        }.items()
        for variant in variants
        for dtype in ("bfloat16", "float32")
    ),
    "draft_block_inputs-anchor",
    "draft_block_inputs-fill_in",
    "window_indices",
    "philox_words",
    "philox_uniforms",
    "mask_allowed_tokens",
    "mask_bad_tokens",
    "apply_token_bitmask",
    "add_logit_bias",
    "apply_penalties",
]
NAMES = [
    *(f"{op}-{variant}" for op in ("paged_attention", "decode_attention") for variant in ATTENTION),
    "decode_attention-128-bfloat16-drafts",
    *OTHERS,
]


@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_fits(name: str, sm90_builds: list[dict[str, Any]]):
    built = [facts for facts in sm90_builds if facts.get("name") == name]
    assert built
    for facts in built:
        assert facts["num_cubin_bytes"] > 0
        assert facts["shared"] <= SHARED_BYTES_PER_BLOCK, facts


def test_b105_batch_sizes_share_one_variant_of_each_kernel(sm90_builds: list[dict[str, Any]]):
    reports = [facts["num_variants"] for facts in sm90_builds if "num_variants" in facts]
    counts = {name: count for report in reports for name, count in report.items()}
    assert "decode_attention _reduce_splits_kernel" in counts
    assert "verify_drafts-bfloat16-block draw_kernel" in counts
    # Where tiles of rows decide what is read again, they follow the batch: 16 rows, then 32.
    tiled = {name for name in counts if name.endswith(("_groups_kernel", "masses_kernel"))}
    assert {counts.pop(name) for name in tiled} == {1, 2}
    assert set(counts.values()) == {1}, counts
