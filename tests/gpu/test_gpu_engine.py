"""The engine on a CUDA device: kernels, graphs, and a cache sized after capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, kernel_ops, random_model
from extkv.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=512,
    qk_norm=True,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class NumberTokenizer:
    """Tokens are their numbers."""

    vocab_size = 1000
    stop_token_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [int(word) for word in text.split()]

    def decode(self, token_ids) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()


def engine(device: str, dtype: torch.dtype = torch.float32, **options: object) -> LLM:
    ops = kernel_ops() if device == "cuda" else None
    model = random_model(CONFIG, dtype=dtype, device="cpu", seed=3)
    if device == "cuda":
        on_device = random_model(CONFIG, dtype=dtype, device="cuda", seed=3, ops=ops)
        for source, target in zip(
            model.weights.tensors(), on_device.weights.tensors(), strict=True
        ):
            target.copy_(source)
        model = on_device
    loaded = LoadedModel(Path("tiny"), model, NumberTokenizer(), None, GenerationDefaults())
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
    return LLM(loaded, device=device, **options)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 16, 17, 40, 100, 200, 250, 33, 64, 7, 9]
    return [torch.randint(1, 1000, (n,), generator=generator).tolist() for n in lengths]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(engine("cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 60},
        {"max_num_batched_tokens": 16},
        {"enable_extensible_kv_cache": False, "kv_cache_memory_bytes": 1 << 28},
    ],
    ids=["graphs", "eager", "preemption", "chunked", "fixed"],
)
def test_fp32_tokens_equal_the_host_engine(expected, options):
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = engine("cuda", **options)
    assert bool(llm.engine.runner.graph_sizes) != bool(options.get("enforce_eager"))
    found = tokens(llm)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert num_equal >= len(expected) - 1, f"{num_equal} of {len(expected)} equal"
    llm.close()


def test_prefix_hits_give_the_same_tokens():
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = engine("cuda")
    assert tokens(llm) == tokens(llm)
    assert llm.engine.scheduler.stats().prefix_cache.num_hit_tokens > 0
    llm.close()


def test_growth_and_shrink_in_the_middle_change_no_token(expected):
    """Captured graphs keep their addresses while blocks come and go."""
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = engine("cuda", num_gpu_blocks_override=60)
    step, sizes = llm.engine.step, {5: 200, 12: 40, 20: 90, 30: 400}
    count = 0

    def disturbed():
        nonlocal count
        count += 1
        if count in sizes:
            llm.engine.resize_cache(sizes[count])
        return step()

    llm.engine.step = disturbed
    found = tokens(llm)
    assert llm.kv_cache.num_blocks == 400
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert num_equal >= len(expected) - 1, f"{num_equal} of {len(expected)} equal"
    llm.engine.scheduler.check_integrity()
    llm.close()


def test_graphs_change_no_token_in_bfloat16():
    # Two engines share the device: the first leaves room for the second.
    eager = engine("cuda", torch.bfloat16, enforce_eager=True, gpu_memory_utilization=0.3)
    graphs = engine("cuda", torch.bfloat16, gpu_memory_utilization=0.6)
    assert tokens(eager) == tokens(graphs)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=30, ignore_eos=True)
    assert tokens(eager, sampled) == tokens(graphs, sampled)
    eager.close()
    graphs.close()


def test_the_cache_takes_what_is_left():
    llm = engine("cuda", torch.bfloat16, gpu_memory_utilization=0.5)
    free, total = torch.cuda.mem_get_info()
    assert llm.sizing_plan.limit == "utilization"
    assert free >= total // 2 - (1 << 30)
    llm.close()


def test_a_step_never_waits_for_the_device_but_for_its_tokens():
    """Reading a device value by surprise would raise in torch's synchronization debug mode."""
    llm = engine("cuda", torch.bfloat16, gpu_memory_utilization=0.5, enable_prefix_caching=False)
    options = {"max_tokens": 12, "ignore_eos": True, "seed": 5}
    params = [
        SamplingParams(temperature=0, **options),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, **options),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, **options),
        SamplingParams(logit_bias={3: 2.0}, allowed_token_ids=list(range(500)), **options),
        SamplingParams(bad_words=["7 8"], min_tokens=5, logprobs=4, prompt_logprobs=2, **options),
    ]
    every = [params[index % len(params)] for index in range(len(prompts()))]
    first = llm.generate(prompts(), every, use_tqdm=False)
    with pytest.warns(UserWarning, match="prototype feature"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        second = llm.generate(prompts(), every, use_tqdm=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [output.outputs[0].token_ids for output in first] == [
        output.outputs[0].token_ids for output in second
    ]
    llm.close()
