"""A thousand random requests, some aborted at any time, leave nothing and disturb no other."""

from __future__ import annotations

import gc
import random
import re
from pathlib import Path

import pytest
from extkv.engine import core
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel, ModelConfig, random_model
from extkv.sampling_params import SamplingParams
from support.engines import assert_idle, tokens_of

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=160,
    sliding_window=50,
    full_attention_layer_ids=frozenset({1}),
)
NUM_REQUESTS = 1000
MIB = 1 << 20
# What allocator and interpreter keep for themselves after the first half.
RESIDENT_GROWTH = 8 * MIB


class LetterTokenizer:
    """One printable character per token."""

    vocab_size = 97
    stop_token_ids = frozenset({0})

    def encode(self, text, *, add_special_tokens=True):
        del add_special_tokens
        return [ord(character) - 32 for character in text]

    def decode(self, token_ids):
        return "".join(self.token_bytes(token_id).decode() for token_id in token_ids)

    def token_bytes(self, token_id):
        return bytes([32 + token_id % 94])


def resident_bytes():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def num_live_sequences():
    gc.collect()
    return sum(type(found) is core.Sequence for found in gc.get_objects())


def random_prompt(rng, prefixes):
    """Return a text of its own after nothing, or after some of a text that others begin with."""
    shared = rng.choice(prefixes)
    own = [rng.randrange(1, 97) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
    return shared[: rng.choice([0, 0, 16, 31, 64, 80])] + own


def random_params(rng):
    fields = {
        "temperature": rng.choice([0, 0, 0, 0.3, 1.0, 2.0]),
        "max_tokens": rng.choice([1, 2, 7, 16, 30]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.choice([None, rng.randrange(1 << 40)]),
    }
    options = {
        "n": lambda: rng.choice([2, 3]),
        "top_k": lambda: rng.choice([1, 5, 200]),
        "top_p": lambda: rng.choice([0.1, 0.9]),
        "min_p": lambda: rng.choice([0.05, 0.5]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.2]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.7]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.7]),
        "logprobs": lambda: rng.choice([0, 3]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "logit_bias": lambda: {rng.randrange(97): rng.choice([-5.0, 5.0])},
        "allowed_token_ids": lambda: rng.sample(range(1, 97), 20),
        "bad_words_token_ids": lambda: [[rng.randrange(1, 97)], [3, rng.randrange(1, 97)]],
        "min_tokens": lambda: min(fields["max_tokens"], 5),
        "stop_token_ids": lambda: rng.sample(range(1, 97), 5),
        "stop": lambda: [chr(rng.randrange(40, 120))],
    }
    for name, draw in options.items():
        if rng.random() < 0.12:
            fields[name] = draw()
    if fields.get("n"):
        fields["temperature"] = 1.0
    return SamplingParams(**fields)


class Load:
    """Random requests in one engine, up to a few dozen at once."""

    def __init__(self, loaded):
        self.rng = random.Random(11)
        self.llm = LLM(
            loaded,
            device="cpu",
            max_num_seqs=8,
            max_num_batched_tokens=56,
            num_gpu_blocks_override=40,
        )
        self.prefixes = [[self.rng.randrange(1, 97) for _ in range(80)] for _ in range(4)]
        self.waiting: list = []
        self.done: list = []

    def run(self, num_requests):
        """Queue requests as others end, until all have ended."""
        left = num_requests
        num_steps = 0
        while left or self.waiting:
            while left and len(self.waiting) < 24:
                left -= 1
                prompt, params = random_prompt(self.rng, self.prefixes), random_params(self.rng)
                priority = self.rng.randrange(3)
                request = self.llm._add(prompt, params, priority)
                self.waiting.append((request, prompt, params))
            if self.rng.random() < 0.15:
                self._abort(self.rng.choice(self.waiting)[0])
            if self.rng.random() < 0.02:
                self.llm.engine.resize_cache(self.rng.choice([24, 40, 55, 88]))
            self.llm.engine.step()
            num_steps += 1
            assert num_steps < 40 * num_requests, "somebody always advances"
            self.done += [entry for entry in self.waiting if entry[0].is_finished]
            self.waiting = [entry for entry in self.waiting if not entry[0].is_finished]

    def _abort(self, request):
        """Abort one output of a request, or all."""
        count = self.rng.choice([1, len(request.sequences)])
        for sequence in request.sequences[:count]:
            self.llm.engine.abort(sequence)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(
        Path("tiny"), random_model(CONFIG, seed=4), LetterTokenizer(), None, GenerationDefaults()
    )


@pytest.fixture(scope="module")
def load(loaded):
    """The load after its thousand requests, with what it left in memory half-way and at the end."""
    made = Load(loaded)
    made.run(NUM_REQUESTS // 2)
    kept = made.done
    made.done = []
    assert_idle(made.llm)
    made.half_way = resident_bytes()
    made.run(NUM_REQUESTS // 2)
    made.at_the_end = resident_bytes()
    made.done = kept + made.done
    return made


def test_every_request_ended_for_a_reason_it_asked_for(load):
    assert len(load.done) == NUM_REQUESTS
    reasons = [seq.output.finish_reason for entry in load.done for seq in entry[0].sequences]
    assert set(reasons) == {"stop", "length", "abort"}
    assert reasons.count("abort") >= 50
    for request, _, params in load.done:
        for sequence in request.sequences:
            count = len(sequence.token_ids)
            assert count <= params.max_tokens
            if sequence.output.finish_reason == "length":
                assert count == params.max_tokens
            if params.logprobs is not None:
                assert len(sequence.output.logprobs) == count
            if params.allowed_token_ids is not None:
                assert set(sequence.token_ids) <= set(params.allowed_token_ids)
            assert sequence.error is None


def test_no_block_slot_or_sequence_is_held_and_every_path_was_taken(load):
    assert_idle(load.llm)
    engine = load.llm.engine
    assert not engine._slot_of
    assert len(engine._occupants) <= 8
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 20
    assert stats.prefix_cache.num_hit_tokens > 1000


def test_memory_does_not_grow(load):
    assert load.at_the_end - load.half_way <= RESIDENT_GROWTH


def test_sequences_are_kept_by_their_requests_alone(loaded):
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=4, detokenize=False)
    llm = LLM(loaded, device="cpu", max_num_seqs=8)
    before = num_live_sequences()
    for _ in range(20):
        llm.generate([prompt] * 4, params, use_tqdm=False)
    assert num_live_sequences() == before


def test_greedy_outputs_are_those_of_the_requests_alone(load, loaded):
    llm = LLM(loaded, device="cpu", max_num_seqs=1, enable_prefix_caching=False)
    greedy = [entry for entry in load.done if entry[2].is_greedy]
    sample = greedy[:: len(greedy) // 60]
    assert len(sample) >= 60
    num_whole = 0
    for request, prompt, params in sample:
        (alone,) = tokens_of(llm.generate([prompt], params, use_tqdm=False))
        (sequence,) = request.sequences
        count = len(sequence.token_ids)
        is_aborted = sequence.output.finish_reason == "abort"
        assert sequence.token_ids == (alone[:count] if is_aborted else alone)
        num_whole += not is_aborted
    assert num_whole >= 40


def test_draws_with_a_seed_are_those_of_the_requests_alone(load, loaded):
    llm = LLM(loaded, device="cpu", max_num_seqs=4, enable_prefix_caching=False)
    seeded = [entry for entry in load.done if entry[2].seed is not None and not entry[2].is_greedy]
    for request, prompt, params in seeded[:: len(seeded) // 30]:
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        for sequence, completion in zip(request.sequences, alone.outputs, strict=True):
            count = len(sequence.token_ids)
            is_aborted = sequence.output.finish_reason == "abort"
            tokens = list(completion.token_ids)
            assert sequence.token_ids == (tokens[:count] if is_aborted else tokens)
