"""Public failures of drafting (bug cases), with a drafter that reads its drafts in its context."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from extkv.dspark.check import read_text
from extkv.dspark.speculator import LAYER_PREFIX
from extkv.dspark.verification import DraftCounts
from extkv.engine.llm import LLM
from extkv.engine.sampling_slots import TokenCounts
from extkv.errors import InvalidArgumentError
from extkv.models import GenerationDefaults, LoadedModel, random_model
from extkv.models.dspark import DSparkModel, load_drafter, random_drafter, save_native
from extkv.models.weights import slot_view, weight_slots
from extkv.sampling_params import SamplingParams
from support.echo_pair import CONFIG, MASK, TAPS, VOCAB_SIZE, echo_drafter, echo_target, echo_texts
from support.engines import assert_idle, resizing, tokens_of
from support.letter_tokenizer import LetterTokenizer
from support.plain_cache import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: one thread is faster than two that wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded_from(model) -> LoadedModel:
    tokenizer = LetterTokenizer(VOCAB_SIZE)
    return LoadedModel(Path("echo"), model, tokenizer, None, GenerationDefaults())


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_from(echo_target())


@pytest.fixture(scope="module")
def drafter(loaded) -> DSparkModel:
    return echo_drafter(loaded.model)


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    lengths = [9, 20, 33, 65]
    texts = echo_texts(loaded.model, 4, 65, seed=11)
    return [text[:length] for text, length in zip(texts, lengths, strict=True)]


def engine(loaded, drafter=None, *, speculative=None, **options) -> LLM:
    if drafter is not None:
        options["speculative_config"] = speculative or {"method": "dspark"}
    return LLM(loaded, drafter, **{**OPTIONS, **options})


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **{"ignore_eos": True} | options)


def answers(llm: LLM, prompts, params) -> list[list[int]]:
    return tokens_of(llm.generate(prompts, params, use_tqdm=False))


def test_b17_log_probabilities_are_those_without_drafts(loaded, drafter, prompts):
    params = greedy(32, logprobs=5)
    plain = engine(loaded).generate(prompts, params, use_tqdm=False)
    llm = engine(loaded, drafter)
    drafted = llm.generate(prompts, params, use_tqdm=False)
    assert llm.draft_counts.accepted_length > 2
    for one, other in zip(plain, drafted, strict=True):
        first, second = one.outputs[0], other.outputs[0]
        assert list(second.token_ids) == list(first.token_ids)
        assert len(second.logprobs) == len(second.token_ids) == 32
        for token, wanted, found in zip(
            second.token_ids, first.logprobs, second.logprobs, strict=True
        ):
            assert token in found
            assert found[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-3)
            # Which of equally likely tokens are among the five is open.
            ranked = [sorted(entry.logprob for entry in row.values()) for row in (found, wanted)]
            assert ranked[0] == pytest.approx(ranked[1], abs=1e-3)


def test_b21_an_accepted_block_counts_by_token():
    counts = TokenCounts([3, 3])
    tokens, numbers = counts.entries_with([7, 7, 9])
    found = dict(zip(tokens.tolist(), numbers.tolist(), strict=True))
    assert {token: found[token] for token in (7, 9)} == {7: 2, 9: 1}


def test_b21_min_tokens_counts_tokens_and_not_steps(loaded, drafter, prompts):
    (free,) = answers(engine(loaded), [prompts[3]], greedy(32))
    stop = free[1]
    params = greedy(32, min_tokens=6, stop_token_ids=[stop])
    (plain,) = engine(loaded).generate([prompts[3]], params, use_tqdm=False)
    llm = engine(loaded, drafter)
    (drafted,) = llm.generate([prompts[3]], params, use_tqdm=False)
    tokens = list(drafted.outputs[0].token_ids)
    assert tokens == list(plain.outputs[0].token_ids)
    assert drafted.outputs[0].finish_reason == plain.outputs[0].finish_reason
    assert stop not in tokens[:6]
    assert llm.draft_counts.num_rounds < len(tokens) - 1


@pytest.mark.parametrize("length", [33, 65])
def test_b30_drafts_are_the_same_cold_and_warm(loaded, drafter, prompts, length):
    prompt = (prompts[3] * 2)[:length]
    llm = engine(loaded, drafter)
    speculator = llm.engine.drafting._speculator
    propose, seen = speculator.propose, []

    def noting(*arguments, **options):
        drafts = propose(*arguments, **options)
        seen.append(drafts.tolist())
        return drafts

    speculator.propose = noting
    rounds, cached = [], []
    for _ in range(2):
        seen.clear()
        (output,) = llm.generate([prompt], greedy(25), use_tqdm=False)
        cached.append(output.num_cached_tokens)
        rounds.append(seen[-6:])
    # B31: the drafter's context is in the target's blocks, so whole blocks are hit.
    assert cached == [0, length // 16 * 16]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) >= 5
    assert llm.draft_counts.accepted_length > 2


def test_b32_a_hit_is_one_for_target_and_drafter(loaded, drafter, prompts):
    llm = engine(loaded, drafter)
    names = [name for name in llm.kv_cache.tensors() if name.startswith(LAYER_PREFIX)]
    assert len(names) == drafter.config.backbone.num_layers
    shapes = {tuple(llm.kv_cache.tensors()[name].shape[1:3]) for name in names}
    target = llm.kv_cache.tensors()["layers.0"]
    assert shapes == {tuple(target.shape[1:3])}
    first = answers(llm, [prompts[3]], greedy(8))
    (second,) = llm.generate([prompts[3]], greedy(8), use_tqdm=False)
    assert second.num_cached_tokens == 64  # four blocks
    assert tokens_of([second]) == first


def test_b40_drafts_of_ragged_contexts_are_those_alone(loaded, drafter, prompts):
    alone = [answers(engine(loaded, drafter), [prompt], greedy(24))[0] for prompt in prompts]
    llm = engine(loaded, drafter)
    assert answers(llm, prompts, greedy(24)) == alone
    together = llm.draft_counts.num_accepted
    single = []
    for prompt in prompts:
        one = engine(loaded, drafter)
        answers(one, [prompt], greedy(24))
        single.append(one.draft_counts.num_accepted)
    assert together == [sum(counts) for counts in zip(*single, strict=True)]


def test_b42_float32_text_is_identical_to_the_context_limit(loaded, drafter, prompts):
    params = greedy(CONFIG.context_length - len(prompts[0]))
    (plain,) = answers(engine(loaded), [prompts[0]], params)
    llm = engine(loaded, drafter)
    assert answers(llm, [prompts[0]], params) == [plain]
    assert len(prompts[0]) + len(plain) == CONFIG.context_length
    assert_idle(llm)


# Two bfloat16 logits near 8 lie 0.0625 apart; batched products round them differently.
LARGEST_TIE = 0.25


def test_b42_bfloat16_text_differs_at_near_ties_only(loaded, drafter, prompts):
    half = random_model(CONFIG, dtype=torch.bfloat16, seed=0)
    for slot in weight_slots(CONFIG):
        slot_view(half.weights, slot).copy_(slot_view(loaded.model.weights, slot))
    config = dataclasses.replace(drafter.config)
    small = random_drafter(config, half, seed=1)
    plain = answers(engine(loaded_from(half)), prompts, greedy(64))
    drafted = answers(engine(loaded_from(half), small), prompts, greedy(64))
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        different = [place for place in range(64) if one[place] != other[place]]
        if different:
            logits = logits_of(half, prompt + one[: different[0]])[-1].float()
            largest, second = logits.topk(2).values.tolist()
            assert largest - second < LARGEST_TIE


def test_b54_nothing_counts_after_the_first_rejection():
    counts = DraftCounts()
    counts.add(7, 2)  # accepted mask 1 1 0 1 0 0 0
    assert counts.num_accepted == [1, 1, 0, 0, 0, 0, 0]
    assert counts.num_drafted == [1] * 7
    assert counts.accepted_length == 3
    counts.add(0, 0)
    assert counts.num_rounds == 1


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_b61_fewer_drafts_than_a_block_of_seven_stay_lossless(loaded, prompts, num_drafts):
    config = dataclasses.replace(echo_drafter(loaded.model).config, block_size=7)
    seven = DSparkModel(config, echo_drafter(loaded.model).weights, vocab_size=VOCAB_SIZE)
    expected = answers(engine(loaded), prompts, greedy(20))
    llm = engine(loaded, seven, speculative={"num_speculative_tokens": num_drafts})
    assert answers(llm, prompts, greedy(20)) == expected
    counts = llm.draft_counts
    assert len(counts.num_drafted) == num_drafts
    assert counts.accepted_length > 1.5


def test_b61_more_drafts_than_a_block_are_refused(loaded):
    config = dataclasses.replace(echo_drafter(loaded.model).config, block_size=7)
    seven = random_drafter(config, loaded.model, seed=1)
    with pytest.raises(InvalidArgumentError, match="is 8, the drafter makes at most 7"):
        engine(loaded, seven, speculative={"num_speculative_tokens": 8})


def test_b62_a_drafter_is_sized_for_the_served_length(loaded, drafter, prompts, tmp_path):
    backbone = dataclasses.replace(drafter.config.backbone, context_length=1_048_576)
    config = dataclasses.replace(drafter.config, backbone=backbone)
    save_native(DSparkModel(config, drafter.weights, max_model_len=160), tmp_path)
    found = load_drafter(tmp_path, loaded.model)
    assert found.num_positions == loaded.model.num_positions == 160
    assert found.decoder.rotations[0].shape[0] == 160
    short = load_drafter(tmp_path, loaded.model, max_model_len=40)
    assert short.num_positions == 40
    # B26: past the drafter's positions text goes on, as without drafts.
    expected = answers(engine(loaded), prompts, greedy(30))
    llm = engine(loaded, short)
    assert answers(llm, prompts, greedy(30)) == expected
    assert llm.draft_counts.num_rounds > 0
    assert_idle(llm)


@pytest.mark.parametrize(
    "options",
    [{"num_gpu_blocks_override": 14}, {"max_num_seqs": 2, "max_num_batched_tokens": 12}],
    ids=["preemption", "chunked"],
)
def test_the_drafter_s_context_survives(loaded, drafter, prompts, options):
    """Drafts come out of the context here, so acceptance shows that it is whole."""
    expected = answers(engine(loaded), prompts, greedy(40))
    calm = engine(loaded, drafter)
    assert answers(calm, prompts, greedy(40)) == expected
    llm = engine(loaded, drafter, **options)
    assert answers(llm, prompts, greedy(40)) == expected
    if "num_gpu_blocks_override" in options:
        assert llm.engine.scheduler.stats().num_preemptions > 0
    assert llm.draft_counts.accepted_length > calm.draft_counts.accepted_length - 0.15
    assert_idle(llm)


def test_the_drafter_s_context_survives_growth_and_shrink(loaded, drafter, prompts):
    expected = answers(engine(loaded), prompts, greedy(40))
    llm = engine(loaded, drafter, num_gpu_blocks_override=26)
    with resizing(llm, {3: 40, 6: 16, 10: 42}):
        assert answers(llm, prompts, greedy(40)) == expected
    assert llm.draft_counts.accepted_length > 2
    assert_idle(llm)


def test_masks_and_reserved_tokens_are_never_written(loaded, drafter, prompts):
    for tokens in answers(engine(loaded, drafter), prompts, greedy(40)):
        assert all(0 <= token < MASK for token in tokens)


@pytest.mark.parametrize("chunk", [7, 64])
def test_context_is_that_of_the_committed_tokens_whatever_was_rejected(
    loaded, drafter, prompts, chunk
):
    """All tokens before the anchor, no rejected one, however they came: dspark.md 9, accounting."""
    llm = engine(loaded, drafter, max_num_seqs=1, max_num_batched_tokens=chunk)
    speculator = llm.engine.drafting._speculator
    propose, contexts = speculator.propose, []

    def noting(inputs, requests):
        drafts = propose(inputs, requests)
        anchor = int(speculator._block.anchor_positions[0])
        at = torch.arange(max(anchor, 0))
        blocks = inputs.block_table[0, at // 16].long()
        layer = llm.kv_cache.tensors()["draft.layers.0"]
        contexts.append([part[blocks, at % 16].clone() for part in layer])
        return drafts

    speculator.propose = noting
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True)
    (output,) = llm.generate([prompts[2]], params, use_tqdm=False)
    text = [*prompts[2], *output.outputs[0].token_ids]
    counts = llm.draft_counts
    assert 1.5 < counts.accepted_length < 4  # some drafts were rejected
    read = read_text(loaded.model, text, 1, TAPS)
    taps = torch.stack([read.taps[layer_id] for layer_id in TAPS])
    keys, values = drafter.context(taps, torch.arange(len(text)))
    lengths = [len(found[0]) for found in contexts]
    assert lengths == sorted(lengths)
    assert lengths[-1] > len(prompts[2]) + 30
    for found in contexts:
        count = len(found[0])
        torch.testing.assert_close(found[0], keys[0, :count], rtol=1e-3, atol=2e-2)  # of size 8
        torch.testing.assert_close(found[1], values[0, :count], rtol=1e-3, atol=1e-3)
