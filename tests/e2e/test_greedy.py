"""Greedy decoding: which token, when it stops, and what it refuses."""

import dataclasses
import types

import pytest
import torch
from extkv.engine import GrowingKVCache, NonFiniteLogitsError, generate, greedy, stream_token_ids
from extkv.errors import CapacityError, FreedError, InvalidArgumentError
from extkv.models import LlamaModel


class LetterTokenizer:
    """One letter per token."""

    def __init__(self, stop_token_ids=frozenset()):
        self.stop_token_ids = stop_token_ids

    def token_bytes(self, token_id):
        return chr(0x41 + token_id).encode()


def as_loaded(model, stop_token_ids=frozenset()):
    tokenizer = LetterTokenizer(stop_token_ids)
    return types.SimpleNamespace(model=model, config=model.config, tokenizer=tokenizer)


@pytest.fixture
def cache(tiny_model):
    with GrowingKVCache(tiny_model.config, max_model_len=1000, dtype=torch.float32) as cache:
        yield cache


def greedy_by_recomputing(model, prompt, max_tokens):
    """The definition: one whole forward pass per token, in a cache of its own."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        with GrowingKVCache(model.config, max_model_len=1000, dtype=torch.float32) as cache:
            cache.extend(len(token_ids))
            positions = torch.arange(len(token_ids))
            hidden = model.forward(torch.tensor(token_ids), positions, cache)
            token_ids.append(int(model.compute_logits(hidden[-1]).argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17])
def test_cached_decoding_equals_recomputing(tiny_model, cache, num_prompt_tokens):
    prompt = torch.randint(37, (num_prompt_tokens,), generator=torch.Generator().manual_seed(1))
    stream = stream_token_ids(tiny_model, cache, prompt.tolist(), max_tokens=20)
    assert list(stream) == greedy_by_recomputing(tiny_model, prompt.tolist(), 20)


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_prefill_in_chunks_gives_the_same_tokens(tiny_model, cache, chunk, monkeypatch):
    prompt = [(7 * i) % 37 for i in range(50)]
    expected = greedy_by_recomputing(tiny_model, prompt, 5)
    monkeypatch.setattr(greedy, "PREFILL_CHUNK_TOKENS", chunk)
    assert list(stream_token_ids(tiny_model, cache, prompt, max_tokens=5)) == expected


def test_ends_after_max_tokens(tiny_model):
    result = generate(as_loaded(tiny_model), [1, 2], max_tokens=9)
    assert (len(result.token_ids), result.finish_reason) == (9, "length")
    assert result.num_prompt_tokens == 2


def test_ends_after_a_stop_token_and_keeps_it(tiny_model):
    free = generate(as_loaded(tiny_model), [1, 2], max_tokens=9).token_ids
    stop = free[4]
    result = generate(as_loaded(tiny_model, frozenset({stop})), [1, 2], max_tokens=9)
    assert result.token_ids == free[: free.index(stop) + 1]
    assert result.finish_reason == "stop"


def test_streams_the_text_piece_by_piece(tiny_model):
    pieces = []
    result = generate(as_loaded(tiny_model), [3], max_tokens=5, on_text=pieces.append)
    assert len(pieces) == 5
    assert "".join(pieces) == result.text == "".join(chr(0x41 + t) for t in result.token_ids)


def test_prompt_and_output_may_fill_max_model_len_exactly(tiny_model):
    result = generate(as_loaded(tiny_model), [1] * 20, max_tokens=12, max_model_len=32)
    assert len(result.token_ids) == 12


def test_rejects_more_tokens_than_max_model_len(tiny_model):
    message = "prompt of 20 tokens and max_tokens 13 make 33, max_model_len is 32"
    with pytest.raises(CapacityError, match=message):
        generate(as_loaded(tiny_model), [1] * 20, max_tokens=13, max_model_len=32)


def test_rejects_an_empty_prompt(tiny_model):
    with pytest.raises(InvalidArgumentError, match="the prompt has 0 tokens"):
        generate(as_loaded(tiny_model), [])


@pytest.mark.parametrize("token_id", [-1, 37])
def test_rejects_a_token_id_out_of_range(tiny_model, token_id):
    message = f"prompt token 1 is {token_id}, out of range for 37 tokens"
    with pytest.raises(InvalidArgumentError, match=message):
        generate(as_loaded(tiny_model), [0, token_id])


def test_rejects_max_tokens_zero(tiny_model):
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0"):
        generate(as_loaded(tiny_model), [1], max_tokens=0)


def test_arguments_are_checked_before_the_first_token_is_asked_for(tiny_model, cache):
    with pytest.raises(InvalidArgumentError):
        stream_token_ids(tiny_model, cache, [], max_tokens=1)


def test_equal_logits_choose_the_smallest_id():
    assert greedy.choose_token(torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), 0) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rejects_logits_that_are_not_finite(value):
    logits = torch.zeros(50)
    logits[30] = value
    with pytest.raises(NonFiniteLogitsError, match=f"at position 7: the largest logit is {value}"):
        greedy.choose_token(logits, 7)


def test_a_broken_weight_raises_instead_of_choosing_a_token(tiny_model):
    norm = torch.full_like(tiny_model.weights.final_norm, float("nan"))
    weights = dataclasses.replace(tiny_model.weights, final_norm=norm)
    with pytest.raises(NonFiniteLogitsError, match="37 of 37 are NaN"):
        generate(as_loaded(LlamaModel(tiny_model.config, weights)), [1])


def test_an_interrupt_while_streaming_closes_the_cache(tiny_model, monkeypatch):
    caches = []

    class SeenCache(GrowingKVCache):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            caches.append(self)

    def interrupt(_piece):
        raise KeyboardInterrupt

    monkeypatch.setattr(greedy, "GrowingKVCache", SeenCache)
    with pytest.raises(KeyboardInterrupt):
        generate(as_loaded(tiny_model), [1], on_text=interrupt)
    with pytest.raises(FreedError):
        caches[0].extend(1)
