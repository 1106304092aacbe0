"""Drafting on a CUDA device: the text is the one that the host gives without drafts."""

from __future__ import annotations

import pytest
import torch
from extkv.sampling_params import SamplingParams
from support.bigrams import engine, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(engine("cpu"))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 50}],
    ids=["graphs", "eager", "preemption"],
)
def test_fp32_text_with_drafts_is_that_of_the_host_without(expected, head, options):
    llm = engine("cuda", head=head, **options)
    found = tokens(llm)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert num_equal >= len(expected) - 1, f"{num_equal} of {len(expected)} equal"
    if head == "vanilla":
        assert llm.draft_counts.accepted_length > 2
    llm.engine.scheduler.check_integrity()
    llm.close()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_graphs_change_no_token_in_bfloat16(method):
    speculative = {"rejection_sample_method": method}
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    found = []
    for eager in (True, False):
        llm = engine(
            "cuda", torch.bfloat16, head="vanilla", speculative=speculative, enforce_eager=eager
        )
        found.append((tokens(llm), tokens(llm, sampled)))
        assert llm.draft_counts.accepted_length > 1.5
        llm.close()
    assert found[0] == found[1]


def test_drafts_without_the_extensible_cache(expected):
    llm = engine(
        "cuda", head="vanilla", enable_extensible_kv_cache=False, kv_cache_memory_bytes=1 << 28
    )
    num_equal = sum(a == b for a, b in zip(tokens(llm), expected, strict=True))
    assert num_equal >= len(expected) - 1
    llm.close()
