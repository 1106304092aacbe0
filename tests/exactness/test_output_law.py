"""The output of drafting and verifying follows the target's law, whatever the drafts."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from chains import (
    EOS,
    Chain,
    Run,
    Tables,
    check_law,
    exact_law,
    filtered,
    generate,
    p_value,
    p_value_of,
)
from extkv.reference.markov_step import markov_logits, markov_step
from extkv.reference.rejection import verify_drafts

NUM_SEEDS = 200_000
LEAST_P = 1e-4
CPU = torch.device("cpu")
TWINS = types.SimpleNamespace(markov_step=markov_step, verify_drafts=verify_drafts)

CHAINS = [
    Chain(),
    Chain(num_drafts=1, vocab_size=3, num_tokens=3),
    Chain(num_drafts=3, vocab_size=3, num_tokens=3),
    Chain(num_drafts=4, vocab_size=3, dtype=torch.bfloat16, seed=3),
    Chain(vocab_size=8, has_head=False),
    Chain(temperature=0.5, dtype=torch.bfloat16, seed=1),
    Chain(temperature=2.5, vocab_size=5, has_codes=True),
    Chain(num_draft_ids=3, vocab_size=5),
    Chain(filters=(("top_k", 2),), min_tokens=1),
    Chain(filters=(("top_p", 0.7),), vocab_size=5),
    Chain(filters=(("min_p", 0.3),), vocab_size=5, has_codes=True),
    Chain(filters=(("top_k", 3), ("top_p", 0.8), ("min_p", 0.05)), vocab_size=6),
    Chain(penalty=1.5, num_tokens=3, vocab_size=3),
    Chain(has_masks=True, num_tokens=3, vocab_size=5),
    Chain(has_masks=True, num_drafts=4, vocab_size=5, penalty=0.7, filters=(("top_p", 0.8),)),
    Chain(has_masks=True, is_one_hot=True, num_tokens=3, vocab_size=4),
    Chain(has_masks=True, num_draft_ids=3, vocab_size=5, dtype=torch.bfloat16, seed=1),
    Chain(repetition=1.6, frequency=0.7, num_tokens=3, vocab_size=3, seed=4),
    Chain(bias=((2, 1.5), (0, -2.0)), allowed=(0, 2, 3, 4), vocab_size=5),
    Chain(bad=((1, 2), (2, 2), (0, 3)), num_drafts=3, num_tokens=3, vocab_size=4, seed=8),
    Chain(stops=True, num_drafts=3, num_tokens=4, vocab_size=3, min_tokens=1, seed=1),
    Chain(is_mixed=True, num_tokens=3, vocab_size=3, filters=(("top_p", 0.9),)),
    Chain(has_codes=True, dtype=torch.bfloat16, seed=7, vocab_size=7),
    Chain(is_one_hot=True, num_tokens=3, vocab_size=3),
    Chain(is_one_hot=True, bad=((1, 2), (2, 0)), stops=True, num_tokens=3, bias=((1, 0.8),)),
    Chain(is_one_hot=True, filters=(("top_k", 2),), vocab_size=5, dtype=torch.bfloat16),
    Chain(method="block", num_drafts=1, vocab_size=3),
    Chain(method="block"),
    Chain(method="block", num_drafts=3, vocab_size=3, num_tokens=3, seed=5),
    Chain(method="block", num_drafts=4, vocab_size=3, seed=6),
    Chain(method="block", dtype=torch.bfloat16, temperature=0.7, seed=2),
    Chain(method="block", filters=(("top_p", 0.7), ("min_p", 0.02)), vocab_size=5),
    Chain(method="block", num_draft_ids=3, vocab_size=5, min_tokens=2, filters=(("top_k", 3),)),
    Chain(method="block", is_one_hot=True, num_drafts=3, vocab_size=3),
    Chain(method="block", penalty=1.0, vocab_size=3),
    Chain(method="block", has_masks=True, num_drafts=3, num_tokens=3, vocab_size=4, seed=2),
    Chain(method="block", has_masks=True, is_one_hot=True, vocab_size=5),
    Chain(method="block", repetition=1.4, frequency=0.5, num_tokens=3, vocab_size=3, seed=3),
    Chain(method="block", bias=((1, 1.0),), allowed=(1, 2, 4), bad=((1, 2),), vocab_size=5),
    Chain(method="block", stops=True, num_drafts=4, num_tokens=4, vocab_size=3, seed=2),
    Chain(method="block", is_mixed=True, num_tokens=3, vocab_size=3, dtype=torch.bfloat16),
]
GREEDY = [
    Chain(temperature=0.0, num_drafts=3, num_tokens=4),
    Chain(temperature=0.0, num_drafts=3, num_tokens=4, is_one_hot=True, dtype=torch.bfloat16),
    Chain(temperature=0.0, num_drafts=4, num_tokens=4, method="block", min_tokens=2),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_output_follows_the_targets_law(chain: Chain):
    assert check_law(chain, TWINS, CPU, NUM_SEEDS) > LEAST_P


@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_seeds_of_a_mixed_batch_take_argmaxes_and_change_nothing(method: str):
    chain = Chain(method=method, is_mixed=True, num_drafts=3, num_tokens=4)
    alone = dataclasses.replace(chain, is_mixed=False)
    mixed, drawn = generate(chain, TWINS, CPU, 4000), generate(alone, TWINS, CPU, 4000)
    assert torch.equal(mixed.emitted()[::2], drawn.emitted()[::2])
    token = 1
    for step in range(chain.num_tokens):
        token = int(mixed.tables.target[step, token].argmax())
        assert mixed.emitted()[1::2, step].unique().tolist() == [token]


@pytest.mark.parametrize("has_codes", [False, True], ids=["embedding", "codes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_law_of_verification_is_the_law_of_the_draw(dtype: torch.dtype, has_codes: bool):
    """Drafts of a slot are counted against q as `verify_drafts` computes it again."""
    chain = Chain(
        vocab_size=8, num_drafts=3, num_draft_ids=6, dtype=dtype, has_codes=has_codes,
        temperature=0.8,
    )  # fmt: skip
    run = Run(chain, Tables(chain, CPU), TWINS, NUM_SEEDS)
    active = torch.arange(NUM_SEEDS)
    drafts, law = run.draft(active, run.tokens[:, 0], run.counts)
    assert law is not None
    assert law.projection is not None
    assert law.projection.dtype == law.base_logits.dtype == dtype
    slot = 1
    for before in drafts[:, 0].unique().tolist():
        chosen = (drafts[:, 0] == before).nonzero()[:, 0]
        logits = markov_logits(
            law.base_logits[chosen[:1], slot],
            law.projection,
            tokens=torch.tensor([before]),
            embedding=law.embedding,
            codes=None if law.codes is None else law.codes[chosen[:1], slot],
        )
        q = (logits[0].double() / 0.8 - law.log_sum_exp[chosen[0], slot]).exp()
        assert float(q.sum()) == pytest.approx(1, abs=1e-5)
        ids = (run.tables.draft_ids >= 0).nonzero()[:, 0]
        spread = torch.zeros(8, dtype=torch.float64).index_copy(0, ids, q / q.sum())
        assert p_value_of(drafts[chosen, slot], spread) > LEAST_P
        # What the ratio uses is the same number.
        log_q = law.logits[chosen, slot] / 0.8 - law.log_sum_exp[chosen, slot]
        expected = spread[drafts[chosen, slot]].log()
        torch.testing.assert_close(log_q.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chain", GREEDY, ids=lambda chain: chain.name)
def test_greedy_output_is_the_chain_of_argmaxes(chain: Chain):
    run = generate(chain, TWINS, CPU, 64)
    token = 1
    for step in range(chain.num_tokens):
        token = int(run.tables.target[step, token].argmax())
        assert run.tokens[:, step + 1].unique().tolist() == [token]


def test_exact_law_is_a_law():
    for chain in CHAINS:
        run = generate(chain, TWINS, CPU, 8)
        assert abs(float(exact_law(chain, run.tables).sum()) - 1) < 1e-9


def test_another_law_has_a_small_p_value():
    chain = Chain()
    run = generate(chain, TWINS, CPU, NUM_SEEDS)
    off = exact_law(chain, run.tables) * torch.linspace(0.95, 1.05, 16)
    assert p_value(run, off / off.sum()) < 1e-9


def test_block_verification_accepts_no_fewer_drafts():
    for seed in range(3):
        rates = []
        for method in ("standard", "block"):
            chain = Chain(method=method, num_drafts=3, num_tokens=1, seed=seed)
            run = generate(chain, TWINS, CPU, 50_000)
            rates.append(run.num_accepted / run.num_drafted)
        assert rates[1] >= rates[0] - 0.002


def first_tokens(
    p: list[float], q: list[float], *, is_one_hot: bool = False, **options
) -> torch.Tensor:
    """Return the frequencies of the first token for one draft and given distributions."""
    chain = Chain(
        vocab_size=len(p), num_tokens=1, num_drafts=1, has_head=False, is_one_hot=is_one_hot,
        **options,
    )  # fmt: skip
    tables = Tables(chain, CPU)
    tables.target[:] = torch.tensor(p).log()
    tables.base[:] = torch.tensor(q).log()
    run = Run(chain, tables, TWINS, NUM_SEEDS)
    active = torch.arange(NUM_SEEDS)
    run.round(active, lengths=torch.ones_like(active))
    return torch.bincount(run.tokens[:, 1], minlength=len(p)) / NUM_SEEDS


def test_b03_greedy_drafts_at_a_temperature_do_not_pull_the_output():
    found = first_tokens([0.1, 0.6, 0.3], [0.6, 0.3, 0.1], is_one_hot=True)
    assert float((found - torch.tensor([0.1, 0.6, 0.3])).abs().max()) <= 0.004


def test_b04_drafts_are_drawn_and_not_chosen():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5]).expand(4000, 4)
    seeds = torch.arange(4000) * 977
    drawn = markov_step(logits, None, torch.ones(4000), seeds, seeds * 0, slot=0)
    assert abs(int((drawn.tokens == 0).sum()) - 1820) <= 110
    cold = markov_step(logits, None, torch.zeros(4000), seeds, seeds * 0, slot=0)
    assert int(cold.tokens.count_nonzero()) == 0


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_b05_first_token_follows_the_temperature_and_seeds_repeat(temperature: float):
    chain = Chain(num_drafts=3, num_tokens=1, vocab_size=5, temperature=temperature, seed=9)
    runs = [generate(chain, TWINS, CPU, 100_000) for _ in range(2)]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    expected = (runs[0].tables.target[0, 1].to(torch.float64) / temperature).softmax(0)
    found = torch.bincount(runs[0].tokens[:, 1], minlength=5) / 100_000
    sigma = (expected * (1 - expected) / 100_000).sqrt()
    assert bool(((found - expected).abs() <= 3 * sigma).all())


def test_b15_filters_change_acceptance_and_never_the_output():
    p = [0.4, 0.3, 0.2, 0.1]
    drafts = [0.1, 0.2, 0.3, 0.4]
    assert first_tokens(p, drafts, filters=(("top_k", 1),)).tolist() == [1, 0, 0, 0]
    found = first_tokens(p, drafts, filters=(("top_p", 0.5),))
    assert found[2:].tolist() == [0, 0]
    assert abs(float(found[0]) - 0.571) <= 0.005


def test_b19_end_of_sequence_is_masked_row_by_row():
    # The target always prefers EOS; it may come as third token first, drafts or not.
    chain = Chain(temperature=0.0, num_drafts=3, num_tokens=3, min_tokens=2)
    tables = Tables(chain, CPU)
    tables.target[:, :, EOS] += torch.tensor(50.0)
    run = Run(chain, tables, TWINS, 16)
    while int(run.counts.min()) < 3:
        run.round((run.counts < 3).nonzero()[:, 0])
    emitted = run.tokens[:, 1:4]
    assert bool((emitted[:, :2] != EOS).all())
    assert bool((emitted[:, 2] == EOS).all())
    assert filtered(tables.target[2, 0].to(torch.float64), chain)[EOS] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_gpu_output_follows_the_targets_law(chain: Chain):
    from extkv.kernels import markov_step as step
    from extkv.kernels import rejection

    kernels = types.SimpleNamespace(
        markov_step=step.markov_step, verify_drafts=rejection.verify_drafts
    )
    assert check_law(chain, kernels, torch.device("cuda", 0), NUM_SEEDS) > LEAST_P


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["standard", "block"])
def test_gpu_and_twins_emit_the_same_tokens(method: str):
    from extkv.kernels import markov_step as step
    from extkv.kernels import rejection

    kernels = types.SimpleNamespace(
        markov_step=step.markov_step, verify_drafts=rejection.verify_drafts
    )
    chain = Chain(method=method, num_drafts=3, num_tokens=4, vocab_size=7)
    found = generate(chain, kernels, torch.device("cuda", 0), 20_000).tokens.cpu()
    expected = generate(chain, TWINS, CPU, 20_000).tokens
    # Float32 rounding moves a boundary past a uniform once in many thousand draws.
    differs = (found[:, : chain.num_tokens + 1] != expected[:, : chain.num_tokens + 1]).any(1)
    assert int(differs.sum()) <= 4
