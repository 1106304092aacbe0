"""Compile every kernel for sm_90 on a machine without a GPU, through the functions that launch it.

A stand-in for Triton's driver names the target; launches end after compilation. So what is compiled
is what a launch on an H200 would compile. Prints one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from attention_cases import make_case
from extkv.drafting import DraftLaw
from extkv.kernels import (
    decode_attention,
    draft_block_inputs,
    draft_loss,
    kv_append,
    logit_cutoff,
    markov_step,
    paged_attention,
    penalties,
    philox,
    rejection,
    rms_norm,
    rotary_embedding,
    sampling,
    silu_and_mul,
    small_batch_linear,
    token_bitmask,
    window_indices,
)
from extkv.kernels.launch import arguments, attention
from extkv.normalized import HeadNorms, ScaledRows
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")
HEAD_DIMS = (64, 80, 96, 128, 256)
BATCH_SIZES = (1, 3, 8, 16, 32)
MODULES = (
    decode_attention,
    draft_block_inputs,
    draft_loss,
    kv_append,
    logit_cutoff,
    markov_step,
    paged_attention,
    penalties,
    philox,
    rejection,
    rms_norm,
    rotary_embedding,
    sampling,
    silu_and_mul,
    small_batch_linear,
    token_bitmask,
    window_indices,
)


class Sm90Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        """Return the target."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream."""
        return device


def compile_only(kernels: list[Any]) -> None:
    """Make launches stop after compilation, and collect what they compiled."""
    triton.runtime.driver.set_active(Sm90Driver())
    run = JITFunction.run

    def compile_instead(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **{**kwargs, "warmup": True})
        kernels.append(compiled)
        return compiled

    JITFunction.run = compile_instead
    for module in (*MODULES, arguments, attention):
        if hasattr(module, "launch_device"):
            module.launch_device = lambda _, tensor: tensor.device


def attention_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a call for each variant of the attention kernels."""
    variants = [
        (head_dim, dtype, {}) for head_dim in HEAD_DIMS for dtype in (torch.bfloat16, torch.float16)
    ]
    variants += [(128, torch.float32, {})]
    variants += [(128, torch.bfloat16, {"is_causal": False, "sliding_window": 128})]
    for head_dim, dtype, options in variants:
        case = make_case(
            [(1, 5)], device=CPU, num_heads=8, head_dim=head_dim, dtype=dtype, block_size=16
        )
        name = f"{head_dim}-{str(dtype).removeprefix('torch.')}" + "-window" * bool(options)
        calls = {**case.arguments, **options}
        workspace = torch.zeros(1000_000)
        yield (
            f"paged_attention-{name}",
            lambda calls=calls: paged_attention.paged_attention(**calls),
        )
        yield (
            f"decode_attention-{name}",
            lambda calls=calls, workspace=workspace: decode_attention.decode_attention(
                **calls, num_splits=2, workspace=workspace
            ),
        )
        if head_dim == 128 and dtype == torch.bfloat16:
            yield (
                f"decode_attention-{name}-drafts",
                lambda calls=calls: decode_attention.decode_attention(**calls, max_query_len=16),
            )


def other_calls(num_rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a call for each variant of all other kernels, with a batch size."""
    ids = torch.zeros(num_rows, dtype=torch.int64)
    numbers = torch.ones(num_rows)
    offsets = torch.zeros(num_rows + 1, dtype=torch.int32)
    entries = torch.zeros(7, dtype=torch.int32)
    counts = torch.ones(num_rows, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        heads = torch.zeros(num_rows, 8, 128, dtype=dtype)
        hidden = torch.zeros(num_rows, 4096, dtype=dtype)
        cache = torch.zeros(2, 16, 8, 128, dtype=dtype)
        table = torch.zeros(64, 64)
        logits = torch.zeros(num_rows, 151_936, dtype=dtype)
        yield (
            f"kv_append-{name}",
            lambda heads=heads, cache=cache: kv_append.kv_append(heads, heads, cache, cache, ids),
        )
        yield f"rms_norm-{name}", lambda h=hidden: rms_norm.rms_norm(h, h[0], 1e-6)
        yield (
            f"rms_norm-{name}-residual",
            lambda h=hidden: rms_norm.rms_norm(h, h[0], 1e-6, residual=h),
        )
        yield f"rms_norm-{name}-heads", lambda h=heads: rms_norm.rms_norm(h, h[0, 0], 1e-6)
        yield (
            f"rotary_embedding-{name}",
            lambda h=heads, t=table: rotary_embedding.rotary_embedding(h, h, t, t, ids),
        )
        norms = HeadNorms(heads[0, 0], heads[0, 0], 1e-6)
        yield (
            f"rotary_embedding-{name}-norms",
            lambda h=heads, t=table, n=norms: rotary_embedding.rotary_embedding(
                h, h, t, t, ids, norms=n
            ),
        )
        few = hidden[:16]
        weight = torch.zeros(4096, 4096, dtype=dtype)
        rows = ScaledRows(few, torch.ones(256, 16), 1e-6)
        yield (
            f"small_batch_linear-{name}",
            lambda r=rows, w=weight: small_batch_linear.small_batch_linear(r, w),
        )
        yield (
            f"small_batch_linear-{name}-gated",
            lambda r=rows, w=weight: small_batch_linear.small_batch_linear(r, w, is_gated=True),
        )
        yield (
            f"small_batch_add_linear-{name}",
            lambda h=few, w=weight: small_batch_linear.small_batch_add_linear(
                h, h, w, norm=w[0], eps=1e-6
            ),
        )
        yield f"silu_and_mul-{name}", lambda h=hidden: silu_and_mul.silu_and_mul(h)
        yield f"draft_loss-{name}", lambda x=logits: draft_loss.draft_loss(x, x, ids, ids, numbers)
        yield f"draft_loss-{name}-values", lambda x=logits: draft_loss.draft_loss(x, x, ids, ids)
        yield f"argmax_tokens-{name}", lambda x=logits: sampling.argmax_tokens(x)
        yield (
            f"sample_tokens-{name}",
            lambda x=logits: sampling.sample_tokens(x, numbers, ids, ids),
        )
        yield (
            f"sample_tokens-{name}-cutoff",
            lambda x=logits: sampling.sample_tokens(x, numbers, ids, ids, cutoff=numbers),
        )
        yield (
            f"logit_cutoff-{name}",
            lambda x=logits: logit_cutoff.logit_cutoff(
                x, numbers, top_k=counts, top_p=numbers, min_p=numbers
            ),
        )
    wide = torch.zeros(num_rows, 151_936)
    words = torch.zeros(num_rows, 4748, dtype=torch.int32)
    yield "philox_words", lambda: philox.philox_words(ids, ids, 3, ids)
    yield "philox_uniforms", lambda: philox.philox_uniforms(ids, ids, 3, ids)
    yield "mask_allowed_tokens", lambda: penalties.mask_allowed_tokens(wide, entries, offsets)
    yield (
        "apply_token_bitmask",
        lambda: token_bitmask.apply_token_bitmask(wide, words, ids),
    )
    yield "mask_bad_tokens", lambda: penalties.mask_bad_tokens(wide, entries, offsets)
    yield (
        "add_logit_bias",
        lambda: penalties.add_logit_bias(wide, entries, torch.zeros(7), offsets),
    )
    yield (
        "apply_penalties",
        lambda: penalties.apply_penalties(
            wide,
            entries,
            entries,
            offsets,
            repetition=numbers,
            frequency=numbers,
            presence=numbers,
        ),
    )


def draft_calls(num_reqs: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a name and a call for each variant of the drafting kernels, with a batch size."""
    ids = torch.zeros(num_reqs, dtype=torch.int64)
    counts = torch.zeros(num_reqs, dtype=torch.int32)
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
    block_table = torch.zeros(num_reqs, 64, dtype=torch.int32)
    for name, sample_from_anchor in (("anchor", True), ("fill_in", False)):
        yield (
            f"draft_block_inputs-{name}",
            lambda flag=sample_from_anchor: draft_block_inputs.draft_block_inputs(
                ids,
                ids,
                starts,
                counts,
                block_table,
                block_size=16,
                num_drafts=7,
                mask_token_id=5,
                vocab_size=100,
                max_position=4096,
                sample_from_anchor=flag,
            ),
        )
    yield (
        "window_indices",
        lambda: window_indices.window_indices(
            ids, block_table, window=128, num_queries=5, block_size=16, max_position=4096
        ),
    )
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield from markov_calls(name, num_reqs, dtype)
        yield from verification_calls(name, num_reqs, dtype)


def markov_calls(
    name: str, num_rows: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of a Markov step."""
    base = torch.zeros(num_rows, 7, 151_936, dtype=dtype)[:, 2]
    head = torch.zeros(151_936, 256, dtype=dtype)
    heat = torch.ones(num_rows)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    offsets = torch.zeros(151_936, dtype=torch.int64)
    for variant, options in {
        "": {"tokens": ids, "embedding": head},
        "-codes": {"codes": head[:num_rows], "draft_to_target": offsets},
    }.items():
        yield (
            f"markov_step-{name}{variant}",
            lambda o=options: markov_step.markov_step(base, head, heat, ids, ids, slot=2, **o),
        )
    options = {"tokens": ids, "embedding": head}
    yield (
        f"markov_step-{name}-greedy",
        lambda: markov_step.markov_step(base, head, None, None, None, slot=2, **options),
    )
    yield (
        f"markov_step-{name}-headless",
        lambda: markov_step.markov_step(base, None, heat, ids, ids, slot=2),
    )


def verification_calls(
    name: str, num_reqs: int, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of a verification."""
    num_rows = num_reqs * 8
    target = torch.zeros(num_rows, 151_936, dtype=dtype)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    numbers = torch.ones(num_rows)
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32)
    head = torch.zeros(151_936, 256, dtype=dtype)
    values = torch.zeros(num_reqs, 7)
    base = torch.zeros(num_reqs, 7, 151_936, dtype=dtype)
    law = DraftLaw(base, values, values, projection=head, embedding=head)
    coded = law._replace(
        embedding=None,
        codes=torch.zeros(num_reqs, 7, 256, dtype=dtype),
        draft_ids=torch.zeros(151_936, dtype=torch.int32),
        draft_rows=torch.zeros(num_reqs, dtype=torch.int64),
    )
    call = (target, ids, starts, numbers, ids, ids)
    for variant, draft, options in (
        ("standard", law, {}),
        ("standard-codes", coded, {"cutoff": numbers}),
        ("standard-headless", law._replace(projection=None, embedding=None), {}),
        ("standard-one_hot", None, {"cutoff": numbers}),
        ("block", law, {"method": "block", "cutoff": numbers}),
        ("block-one_hot", None, {"method": "block"}),
        ("synthetic", None, {"method": "synthetic", "acceptance_rates": numbers[:7]}),
    ):
        yield (
            f"verify_drafts-{name}-{variant}",
            lambda d=draft, o=options: rejection.verify_drafts(*call, d, max_num_drafts=7, **o),
        )


def batch_calls(num_seqs: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what a serving step calls at a batch size."""
    case = make_case([(1, 5)] * num_seqs, device=CPU, num_heads=8, dtype=torch.bfloat16)
    workspace = torch.zeros(1000_000)
    for num_splits in (1, 2, 16):
        yield (
            "decode_attention",
            lambda n=num_splits: decode_attention.decode_attention(
                **case.arguments, num_splits=n, workspace=None if n == 1 else workspace
            ),
        )
    yield "paged_attention", lambda: paged_attention.paged_attention(**case.arguments)
    yield from other_calls(num_seqs)


def report(facts: dict[str, object]) -> None:
    """Print one line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def compile_all(calls: Iterator[tuple[str, Callable[[], object]]], kernels: list[Any]) -> None:
    """Report what each call compiles."""
    for name, call in calls:
        kernels.clear()
        call()
        for kernel in kernels:
            report(
                {
                    "name": name,
                    "kernel": kernel.metadata.name,
                    "shared": kernel.metadata.shared,
                    "num_cubin_bytes": len(kernel.asm["cubin"]),
                }
            )


def count_variants(
    calls: Callable[[int], Iterator[tuple[str, Callable[[], object]]]], kernels: list[Any]
) -> None:
    """Report for each kernel how many variants all batch sizes make together."""
    hashes: dict[str, set[str]] = {}
    for num_seqs in BATCH_SIZES:
        for name, call in calls(num_seqs):
            kernels.clear()
            call()
            for kernel in kernels:
                hashes.setdefault(f"{name} {kernel.metadata.name}", set()).add(kernel.hash)
    report({"num_variants": {name: len(found) for name, found in hashes.items()}})


def main() -> None:
    """Compile the kernels of attention, of drafting, or all others and what a step needs."""
    kernels: list[Any] = []
    compile_only(kernels)
    if sys.argv[1] == "attention":
        compile_all(attention_calls(), kernels)
    elif sys.argv[1] == "drafts":
        compile_all(draft_calls(3), kernels)
        count_variants(draft_calls, kernels)
    else:
        compile_all(other_calls(3), kernels)
        count_variants(batch_calls, kernels)


if __name__ == "__main__":
    main()
