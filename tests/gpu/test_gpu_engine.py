"""The engine on a CUDA device: kernels, graphs, and a cache sized after capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.engine.sampling_params import SamplingParams
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, kernel_ops, random_model

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

    def decode(self, token_ids) -> str:
        return "".join(f" {token_id}" for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()


def engine(device: str, dtype: torch.dtype = torch.float32, **options: object) -> LLM:
    ops = kernel_ops() if device == "cuda" else None
    model = random_model(CONFIG, dtype=dtype, device="cpu", seed=3)
    if device == "cuda":
        on_device = random_model(CONFIG, dtype=dtype, device="cuda", seed=3, ops=ops)
        for source, target in zip(tensors_of(model), tensors_of(on_device), strict=True):
            target.copy_(source)
        model = on_device
    loaded = LoadedModel(Path("tiny"), model, NumberTokenizer(), None, GenerationDefaults())
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
    return LLM(loaded, device=device, **options)


def tensors_of(model) -> list[torch.Tensor]:
    weights = model.weights
    found = [weights.embedding, weights.final_norm, weights.lm_head]
    for layer in weights.layers:
        found += [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return found


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
    [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 60}, {"max_num_batched_tokens": 16}],
    ids=["graphs", "eager", "preemption", "chunked"],
)
def test_fp32_tokens_equal_the_host_engine(expected, options):
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = engine("cuda", **options)
    assert bool(llm.engine.runner.graph_sizes) != bool(options.get("enforce_eager"))
    found = tokens(llm)
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert num_equal >= len(expected) - 1, f"{num_equal} of {len(expected)} equal"
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
