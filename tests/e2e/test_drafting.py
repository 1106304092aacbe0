"""Drafting in the engine: the text is the same as without, whatever is drafted."""

from __future__ import annotations

import itertools

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.errors import DrafterMismatchError, InvalidArgumentError
from extkv.models import LoadedModel, ModelConfig
from extkv.models.dspark import drafter_config, random_drafter
from extkv.sampling_params import SamplingParams
from support.tiny_bigrams import (
    CONFIG,
    GREEDY,
    OPTIONS,
    assert_idle,
    engine,
    knowing_drafter,
    load,
    prompts,
    tokens,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load()


@pytest.fixture(scope="module")
def expected(loaded) -> list[list[int]]:
    return tokens(engine(loaded))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 14},
        {"async_scheduling": True},
        {"max_num_seqs": 2, "max_num_batched_tokens": 10},
        {"block_size": 32},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "preemption", "async", "chunked", "blocks-of-32", "no-prefix-cache"],
)
def test_greedy_text_is_that_of_the_target(loaded, expected, options):
    llm = engine(loaded, knowing_drafter(loaded), **options)
    assert tokens(llm) == expected
    counts = llm.draft_counts
    assert counts.accepted_length > 2
    assert counts.num_drafted[0] == counts.num_rounds
    assert all(a >= b for a, b in itertools.pairwise(counts.num_accepted))
    if "num_gpu_blocks_override" in options:
        assert llm.engine.scheduler.stats().num_preemptions > 0
    assert_idle(llm)
    assert tokens(llm) == expected  # now from cached prefixes, the drafter's context among them


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
def test_every_head_and_method_keeps_greedy_text(loaded, expected, head, method, drawn):
    speculative = {"rejection_sample_method": method, "draft_sample_method": drawn}
    llm = engine(loaded, knowing_drafter(loaded, head), speculative=speculative)
    assert tokens(llm) == expected


def test_fewer_drafts_than_the_block_are_a_prefix(loaded, expected):
    llm = engine(loaded, knowing_drafter(loaded), speculative={"num_speculative_tokens": 2})
    assert tokens(llm) == expected
    assert len(llm.draft_counts.num_drafted) == 2


def test_a_sequence_may_end_at_the_context_limit(loaded):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = prompts()[7]
    (plain,) = engine(loaded).generate([prompt], params, use_tqdm=False)
    llm = engine(loaded, knowing_drafter(loaded))
    (found,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(found.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    assert len(prompt) + len(found.outputs[0].token_ids) == CONFIG.context_length
    assert_idle(llm)


def test_growth_and_shrink_in_the_middle_keep_text_and_context(loaded, expected):
    llm = engine(loaded, knowing_drafter(loaded), num_gpu_blocks_override=20)
    step, sizes, count = llm.engine.step, {3: 40, 6: 14, 10: 42}, itertools.count(1)

    def disturbed():
        size = sizes.get(next(count))
        if size is not None:
            llm.engine.resize_cache(size)
        return step()

    llm.engine.step = disturbed
    assert tokens(llm) == expected
    assert llm.draft_counts.accepted_length > 2
    assert_idle(llm)


MIXED = [
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(temperature=0, max_tokens=20, logit_bias={3: 4.0, 5: -9.0}, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[1, 4, 7, 8], ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, min_tokens=9, stop_token_ids=[2, 6]),
    SamplingParams(temperature=0, max_tokens=20, bad_words_token_ids=[[4], [7, 8]]),
    SamplingParams(temperature=0, max_tokens=20, stop=["d"], ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=7, logprobs=3, ignore_eos=True),
]


def test_penalties_masks_stops_and_logprobs_are_those_without_drafts(loaded):
    drafter = knowing_drafter(loaded)
    plain = engine(loaded).generate(prompts(), MIXED, use_tqdm=False)
    llm = engine(loaded, drafter)
    found = llm.generate(prompts(), MIXED, use_tqdm=False)
    for one, other in zip(plain, found, strict=True):
        first, second = one.outputs[0], other.outputs[0]
        assert list(second.token_ids) == list(first.token_ids)
        assert (second.text, second.finish_reason) == (first.text, first.finish_reason)
        assert second.stop_reason == first.stop_reason
        assert (second.logprobs is None) == (first.logprobs is None)
        for entry, wanted in zip(second.logprobs or [], first.logprobs or [], strict=True):
            assert entry.keys() == wanted.keys()
            for token in wanted:
                assert entry[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-3)
    assert llm.draft_counts.accepted_length > 1.5
    assert_idle(llm)


def test_sampled_text_depends_on_its_seed_and_not_on_its_batch(loaded):
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)
    drafter = knowing_drafter(loaded)
    together = tokens(engine(loaded, drafter), params)
    (alone,) = engine(loaded, drafter).generate([prompts()[4]], params, use_tqdm=False)
    assert list(alone.outputs[0].token_ids) == together[4]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("drawn", ["probabilistic", "greedy"])
def test_sampled_text_follows_the_target_s_law(loaded, method, drawn):
    """Frequencies of three tokens after a prompt, against their exact probabilities."""
    num_samples, prompt = 1500, [5, 2]
    llm = engine(
        loaded,
        knowing_drafter(loaded),
        speculative={"rejection_sample_method": method, "draft_sample_method": drawn},
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    params = [
        SamplingParams(temperature=1.3, top_k=4, seed=seed, max_tokens=3, ignore_eos=True)
        for seed in range(num_samples)
    ]
    outputs = llm.generate([prompt] * num_samples, params, use_tqdm=False)
    law = exact_law(loaded, prompt, length=3, temperature=1.3, top_k=4)
    counts = dict.fromkeys(law, 0)
    for output in outputs:
        counts[tuple(output.outputs[0].token_ids)] += 1
    assert llm.draft_counts.accepted_length > 1.3
    # Cells of little mass together, as the test wants.
    rare = [key for key, p in law.items() if p * num_samples < 5]
    cells = [(counts[key], law[key] * num_samples) for key in law if key not in set(rare)]
    if rare:
        mass = sum(law[key] for key in rare) * num_samples
        cells.append((sum(counts[key] for key in rare), mass))
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = len(cells) - 1
    # Wilson and Hilferty's normal approximation of the chi-squared law, p = 1e-4.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi2 < limit, f"{chi2:.1f} on {degrees} degrees, limit {limit:.1f}"


def exact_law(
    loaded: LoadedModel, prompt: list[int], *, length: int, temperature: float, top_k: int
) -> dict[tuple[int, ...], float]:
    """Enumerate what the target writes, with its probabilities."""
    from support.plain_cache import PlainCache

    law = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, mass in law.items():
            feed = torch.tensor([*prompt, *text])
            hidden = loaded.model.forward(feed, torch.arange(len(feed)), PlainCache(CONFIG))
            logits = loaded.model.compute_logits(hidden[-1:])[0].double() / temperature
            least = logits.topk(top_k).values[-1]
            law_of_token = logits.masked_fill(logits < least, -torch.inf).softmax(0)
            for token in law_of_token.nonzero()[:, 0].tolist():
                longer[(*text, token)] = mass * float(law_of_token[token])
        law = longer
    return law


def test_an_abort_leaves_nothing_behind(loaded, expected):
    llm = engine(loaded, knowing_drafter(loaded), async_scheduling=True)
    stream = llm.stream(prompts()[3], GREEDY)
    next(stream)
    stream.close()
    assert_idle(llm)
    assert tokens(llm) == expected


def test_synthetic_acceptance_has_the_rates_asked_for(loaded):
    speculative = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0, 0.0],
    }
    llm = engine(loaded, knowing_drafter(loaded), speculative=speculative)
    tokens(llm)
    counts = llm.draft_counts
    assert counts.num_accepted[:2] == counts.num_drafted[:2]
    assert counts.num_accepted[2:] == [0, 0]


@pytest.mark.parametrize(
    ("speculative", "words"),
    [
        ({"method": "eagle"}, "method is 'eagle', known: dspark"),
        ({"draft_tokens": 3}, "speculative_config has draft_tokens"),
        ({"num_speculative_tokens": 5}, "is 5, the drafter makes at most 4"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"rejection_sample_method": "none"}, "known: standard, block, synthetic"),
        ({"draft_sample_method": "beam"}, "known: probabilistic, greedy"),
        ({"rejection_sample_method": "synthetic"}, "belong together"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.0]},
            "has 1 numbers for 4 drafts",
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [2.0] * 4},
            r"expected numbers in \[0, 1\]",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(loaded, speculative, words):
    with pytest.raises(InvalidArgumentError, match=words):
        engine(loaded, knowing_drafter(loaded), speculative=speculative)


def test_limits_and_pairs_that_cannot_work_are_refused(loaded):
    drafter = knowing_drafter(loaded)
    with pytest.raises(InvalidArgumentError, match=r"are 30 tokens, more than .* = 29"):
        engine(loaded, drafter, max_num_batched_tokens=29)
    with pytest.raises(InvalidArgumentError, match="names no drafter"):
        LLM(loaded, speculative_config={"method": "dspark"}, **OPTIONS)
    wide = ModelConfig(**{**vars(CONFIG), "hidden_size": 40})
    other = random_drafter(drafter_config(wide, num_layers=1, block_size=2), seed=1)
    with pytest.raises(DrafterMismatchError, match="hidden_size of the drafter is 40"):
        engine(loaded, other)
