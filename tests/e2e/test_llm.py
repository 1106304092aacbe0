"""The batching engine gives each prompt what it would get alone, whatever happens around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import extkv
import pytest
import torch
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.sampling_params import SamplingParams
from support.plain_cache import greedy_tokens, logits_of

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=256,
)
NUM_TOKENS = 24


class LetterTokenizer:
    """One printable character per token."""

    vocab_size = 97
    stop_token_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [ord(character) % 97 for character in text]

    def decode(self, token_ids) -> str:
        return "".join(self.token_bytes(token_id).decode() for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([32 + token_id % 94])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = random_model(CONFIG, seed=3)
    return LoadedModel(Path("tiny"), model, LetterTokenizer(), None, GenerationDefaults())


OPTIONS: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True, params=[False, True], ids=["in-step", "async"])
def scheduling(request, monkeypatch):
    """Every test runs with the host's work inside the step, and beside the next one."""
    monkeypatch.setitem(OPTIONS, "async_scheduling", request.param)


def engine(loaded: LoadedModel, **options: object) -> LLM:
    return LLM(loaded, device="cpu", **{**OPTIONS, **options})


def prompts(count: int = 10) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 31, 40, 63, 64, 90][:count]
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[list[int]]:
    return [greedy_tokens(loaded.model, prompt, NUM_TOKENS) for prompt in prompts()]


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_idle(llm: LLM) -> None:
    llm.engine.scheduler.check_integrity()
    stats = llm.engine.scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"block_size": 32},
        {"enable_prefix_caching": False},
        {"enable_extensible_kv_cache": False, "kv_cache_memory_bytes": 1 << 20},
        {"num_gpu_blocks_override": 18},
    ],
    ids=["plain", "chunked", "blocks-of-32", "no-prefix-cache", "fixed", "tiny-cache"],
)
def test_every_batch_equals_each_prompt_alone(loaded, expected, options):
    llm = engine(loaded, **options)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 10
    if options.get("num_gpu_blocks_override"):
        assert llm.engine.scheduler.stats().num_preemptions > 0
    assert_idle(llm)


def test_prefix_hits_give_the_same_tokens(loaded, expected):
    llm = engine(loaded)
    llm.generate(prompts(), GREEDY, use_tqdm=False)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert [output.num_cached_tokens for output in outputs[-3:]] == [48, 48, 80]


@dataclass
class Disturbance:
    """Do something after some steps."""

    llm: LLM
    actions: dict[int, object]
    num_steps: int = 0

    def install(self) -> None:
        run = self.llm.engine.step

        def step():
            self.num_steps += 1
            action = self.actions.get(self.num_steps)
            if action is not None:
                action()
            return run()

        self.llm.engine.step = step


def test_growth_and_shrink_in_the_middle_change_no_token(loaded, expected):
    llm = engine(loaded, num_gpu_blocks_override=20)
    core = llm.engine
    Disturbance(
        llm,
        {
            3: lambda: core.resize_cache(40),
            7: lambda: core.resize_cache(16),
            12: lambda: core.resize_cache(60),
        },
    ).install()
    assert tokens_of(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected
    assert llm.kv_cache.num_blocks == 60
    assert_idle(llm)


def test_seeds_do_not_depend_on_the_batch(loaded):
    params = SamplingParams(temperature=0.9, seed=42, max_tokens=10, ignore_eos=True)
    single = engine(loaded).generate([prompts()[4]], params, use_tqdm=False)
    torch.rand(7)
    many = engine(loaded, max_num_batched_tokens=16).generate(prompts(), params, use_tqdm=False)
    assert tokens_of(single)[0] == tokens_of(many)[4]
    other = SamplingParams(temperature=0.9, seed=43, max_tokens=10, ignore_eos=True)
    assert tokens_of(engine(loaded).generate([prompts()[4]], other, use_tqdm=False)) != tokens_of(
        single
    )


def test_logprobs_are_those_of_the_model(loaded):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    prompt = prompts()[6]
    (output,) = engine(loaded).generate([prompt], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    logprobs = logits_of(loaded.model, prompt + tokens[:-1]).log_softmax(-1)
    entries = output.outputs[0].logprobs
    assert len(entries) == len(tokens)
    for index, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        exact = logprobs[len(prompt) - 1 + index, token]
        assert entry[token].logprob == pytest.approx(float(exact), abs=1e-4)
        assert entry[token].rank == 1
        assert len(entry) == 3
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for index, entry in enumerate(output.prompt_logprobs[1:]):
        exact = logprobs[index, prompt[index + 1]]
        assert entry[prompt[index + 1]].logprob == pytest.approx(float(exact), abs=1e-4)


def test_stop_strings_and_several_outputs(loaded):
    llm = engine(loaded)
    (plain,) = llm.generate(["abc"], GREEDY, use_tqdm=False)
    text = plain.outputs[0].text
    assert len(text) == NUM_TOKENS
    stop = text[5:7]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop])
    (stopped,) = llm.generate(["abc"], params, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    at_limit = text.index(stop) + len(stop)
    params = SamplingParams(temperature=0, max_tokens=at_limit, ignore_eos=True, stop=[stop])
    (both,) = llm.generate(["abc"], params, use_tqdm=False)
    assert (both.outputs[0].finish_reason, both.outputs[0].stop_reason) == ("stop", stop)
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(["abc"], several, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert_idle(llm)


def test_stop_tokens_and_end_of_sequence(loaded, expected):
    llm = engine(loaded)
    third = expected[3][2]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, stop_token_ids=[third])
    (output,) = llm.generate([prompts()[3]], params, use_tqdm=False)
    first = expected[3].index(third)
    assert list(output.outputs[0].token_ids) == expected[3][: first + 1]
    assert output.outputs[0].stop_reason == third


def test_closing_a_stream_aborts_its_request(loaded, expected):
    llm = engine(loaded)
    stream = llm.stream(prompts()[2], GREEDY)
    seen = [list(next(stream).outputs[0].token_ids) for _ in range(4)]
    assert seen == [expected[2][: n + 1] for n in range(4)]
    stream.close()
    assert_idle(llm)


def test_an_interrupt_leaves_the_engine_usable(loaded, expected):
    llm = engine(loaded)
    run, calls = llm.engine.runner.run, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return run(*arguments, **options)

    llm.engine.runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert_idle(llm)
    assert tokens_of(llm.generate(prompts(), GREEDY, use_tqdm=False)) == expected


def test_b10_nan_logits_fail_one_request_and_no_other(loaded, expected):
    llm = engine(loaded)
    run = llm.engine.runner.run

    def poisoned(plan, **options):
        logits = run(plan, **options).clone()
        for row, sequence in enumerate(plan.request_ids.tolist()):
            if sequence == 1 and plan.is_pure_decode:
                logits[row] = torch.nan
        return logits

    llm.engine.runner.run = poisoned
    outputs = llm.generate(prompts(4), GREEDY, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length", "length"]
    for index in (0, 2, 3):
        assert tokens_of(outputs)[index] == expected[index]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "prompt"),
        ([97], GREEDY, "97"),
        ([1] * 300, GREEDY, "300"),
        ([1], SamplingParams(stop_token_ids=[97]), "97"),
    ],
    ids=["empty", "token-out-of-range", "too-long", "stop-token-out-of-range"],
)
def test_bad_requests_are_typed_errors_and_leave_nothing(loaded, expected, prompt, params, words):
    llm = engine(loaded)
    with pytest.raises(extkv.ExtkvError, match=words):
        llm.generate([prompts()[0], prompt], [GREEDY, params], use_tqdm=False)
    assert_idle(llm)
    assert tokens_of(llm.generate([prompts()[0]], GREEDY, use_tqdm=False)) == expected[:1]


def test_limits_that_contradict_are_refused(loaded):
    with pytest.raises(extkv.InvalidArgumentError, match="max_num_batched_tokens is 4"):
        engine(loaded, max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(extkv.SizingError, match="kv_cache_memory_bytes"):
        engine(loaded, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(extkv.InvalidArgumentError, match="2 sampling parameters"):
        engine(loaded).generate(["a"], [GREEDY, GREEDY], use_tqdm=False)
