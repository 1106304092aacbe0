"""The suite sees each known way to lose the target's law: a mutated twin must fail it."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import chains
import pytest
import torch
from chains import Chain, Run, Tables, check_law, exact_law, generate, p_value_of
from extkv.reference import markov_step, rejection
from extkv.reference.philox import Stream, philox_uniforms

if TYPE_CHECKING:
    from extkv.drafting import DraftLaw, Verification

CPU = torch.device("cpu")
TWINS = types.SimpleNamespace(
    markov_step=markov_step.markov_step, verify_drafts=rejection.verify_drafts
)
NUM_SEEDS = 40_000
LEAST_P = 1e-4
METHODS = pytest.mark.parametrize("method", ["standard", "block"])


def p_of(chain: Chain, ops: Any = TWINS) -> float:
    """Return the p-value of a chain's output."""
    return check_law(chain, ops, CPU, NUM_SEEDS)


@METHODS
def test_sees_residual_noise_shared_with_the_draft(method: str, monkeypatch: pytest.MonkeyPatch):
    chain = Chain(method=method, num_tokens=1, vocab_size=8)
    assert p_of(chain) > LEAST_P

    def shared(seeds, positions, stream, lanes):
        stream = Stream.DRAFT if stream == Stream.RESIDUAL else stream
        return philox_uniforms(seeds, positions, stream, lanes)

    monkeypatch.setattr(rejection, "philox_uniforms", shared)
    assert p_of(chain) < LEAST_P


@METHODS
def test_sees_accept_noise_shared_with_the_draft(method: str, monkeypatch: pytest.MonkeyPatch):
    chain = Chain(method=method, num_tokens=1, seed=3)

    def shared(seeds, positions, stream, lanes):
        if stream == Stream.ACCEPT:
            return philox_uniforms(seeds, positions, Stream.DRAFT, lanes).flip(1)[:, 2:]
        return philox_uniforms(seeds, positions, stream, lanes)

    monkeypatch.setattr(rejection, "philox_uniforms", shared)
    assert p_of(chain) < LEAST_P


@METHODS
def test_sees_one_accept_uniform_used_for_all_drafts(method: str, monkeypatch: pytest.MonkeyPatch):
    chain = Chain(method=method, num_drafts=3, num_tokens=3, vocab_size=3, seed=5)
    assert p_of(chain) > LEAST_P
    fresh = rejection._Windows.accept_uniforms
    monkeypatch.setattr(
        rejection._Windows, "accept_uniforms", lambda self: fresh(self)[:, :1].expand_as(self.rows)
    )
    assert p_of(chain) < LEAST_P


@pytest.mark.parametrize("module", [markov_step, rejection], ids=["draft", "accept"])
def test_sees_noise_of_a_round_used_again_in_the_next(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
):
    # The next round drafts positions of this one again. Block verification has looked at their
    # drafts and uniforms, so a key of seed, position and stream alone is not enough for it.
    chain = Chain(method="block", num_drafts=3, num_tokens=2)
    assert p_of(chain) > LEAST_P

    def without_slot(seeds, positions, stream, lanes):
        return philox_uniforms(seeds, positions, stream, torch.zeros_like(lanes))

    monkeypatch.setattr(module, "philox_uniforms", without_slot)
    assert p_of(chain) < LEAST_P


def coarse(seeds, positions, stream, lanes) -> torch.Tensor:
    """Return uniforms of which every fourth that decides on a draft is exactly 0."""
    numbers = philox_uniforms(seeds, positions, stream, lanes)
    return (numbers * 4).floor() / 4 if stream == Stream.ACCEPT else numbers


@METHODS
@pytest.mark.parametrize("is_one_hot", [False, True])
def test_sees_an_inclusive_comparison(
    is_one_hot: bool, method: str, monkeypatch: pytest.MonkeyPatch
):
    chain = Chain(
        method=method,
        num_tokens=2,
        vocab_size=5,
        filters=(("top_k", 2),),
        is_one_hot=is_one_hot,
        seed=2,
    )
    monkeypatch.setattr(rejection, "philox_uniforms", coarse)

    def num_impossible() -> int:
        run = generate(chain, TWINS, CPU, NUM_SEEDS)
        law = exact_law(chain, run.tables)
        cells = run.tokens[:, 1] * 5 + run.tokens[:, 2]
        return int((law[cells] == 0).sum())

    assert num_impossible() == 0
    monkeypatch.setattr(rejection, "_accepts", lambda uniforms, limits: uniforms <= limits)
    assert num_impossible() > 100


@METHODS
@pytest.mark.parametrize(
    "residual",
    [
        lambda scale, p, q: p + 0 * scale[:, None] * q,
        lambda scale, p, q: (q - scale[:, None] * p).clamp(min=0.0),
        lambda scale, p, q: (scale[:, None] * p - q).abs(),
    ],
    ids=["target", "reversed", "absolute"],
)
def test_sees_a_wrong_residual(residual, method: str, monkeypatch: pytest.MonkeyPatch):
    chain = Chain(method=method, num_tokens=2, seed=1)
    assert p_of(chain) > LEAST_P
    monkeypatch.setattr(rejection, "_residual", residual)
    assert p_of(chain) < LEAST_P


def test_sees_a_block_residual_without_its_scale(monkeypatch: pytest.MonkeyPatch):
    chain = Chain(method="block", num_tokens=3, num_drafts=3, vocab_size=3, seed=5)
    monkeypatch.setattr(rejection, "_residual", lambda _, p, q: (p - q).clamp(min=0.0))
    assert p_of(chain) < LEAST_P


@METHODS
def test_sees_a_residual_that_forgets_the_markov_bias(method: str):
    def without_head(*arguments: Any, **options: Any) -> Verification:
        *first, law = arguments
        assert law is not None
        law = law._replace(projection=None, embedding=None)
        return rejection.verify_drafts(*first, law, **options)

    ops = types.SimpleNamespace(markov_step=TWINS.markov_step, verify_drafts=without_head)
    assert p_of(Chain(method=method, seed=1), ops) < LEAST_P


@METHODS
def test_sees_a_ratio_with_the_law_of_another_slot(method: str):
    def shifted(*arguments: Any, **options: Any) -> Verification:
        *first, law = arguments
        assert law is not None
        law = law._replace(log_sum_exp=law.log_sum_exp.roll(1, dims=1))
        return rejection.verify_drafts(*first, law, **options)

    ops = types.SimpleNamespace(markov_step=TWINS.markov_step, verify_drafts=shifted)
    assert p_of(Chain(method=method, seed=1), ops) < LEAST_P


MASKED = [
    pytest.param(Chain(has_masks=True, num_tokens=3, vocab_size=5), id="standard"),
    pytest.param(Chain(has_masks=True, num_tokens=3, vocab_size=5, method="block"), id="block"),
]


@pytest.mark.parametrize("chain", MASKED)
@pytest.mark.parametrize("shift", [-1, 1])
def test_sees_masks_shifted_by_one_row(chain: Chain, shift: int, monkeypatch: pytest.MonkeyPatch):
    apply = chains.apply_token_bitmask

    def shifted(logits: torch.Tensor, bitmask: torch.Tensor, row_ids: torch.Tensor) -> None:
        apply(logits, bitmask.roll(shift, 0), row_ids)

    monkeypatch.setattr(chains, "apply_token_bitmask", shifted)
    assert p_of(chain) < LEAST_P


@pytest.mark.parametrize("chain", MASKED)
def test_sees_a_window_cut_at_a_draft_that_is_forbidden(chain: Chain):
    # To drop it and take the token of its row from p forgets the mass that q spent on it.
    def cut(
        logits: torch.Tensor, token_ids: torch.Tensor, *args: Any, **options: Any
    ) -> Verification:
        drafted = logits[:-1].gather(1, token_ids[1:, None])[:, 0]
        is_forbidden = torch.nn.functional.pad(drafted.isneginf(), (1, 0))
        # The first token of a window is no draft.
        is_forbidden[args[0][:-1].to(torch.int64)] = False
        token_ids = token_ids.masked_fill(is_forbidden, -1)
        return TWINS.verify_drafts(logits, token_ids, *args, **options)

    ops = types.SimpleNamespace(markov_step=TWINS.markov_step, verify_drafts=cut)
    assert p_of(chain, ops) < LEAST_P


def test_sees_greedy_drafts_taken_for_drawn_ones():
    def pretend(*arguments: Any, **options: Any) -> Any:
        # The draft is the argmax, and its law is reported as the softmax.
        drawn = markov_step.markov_step(*arguments, **options)
        chosen = markov_step.markov_step(*arguments[:2], None, None, None, **options)
        return chosen._replace(log_sum_exp=drawn.log_sum_exp)

    ops = types.SimpleNamespace(markov_step=pretend, verify_drafts=TWINS.verify_drafts)
    assert p_of(Chain(seed=1), ops) < LEAST_P


STEPS_PER_SECOND = (1.0, 0.5, 0.45)  # of a batch of 1, 2 and 3 tokens
FIRST_CONFIDENCE = 0.8


def appendix_a_lengths(first_drafts: torch.Tensor, *, looks_ahead: bool) -> torch.Tensor:
    """Return how many of two drafts are verified in the counterexample of DSpark's Appendix A.

    The confidence in the second draft is 0.9 after token 0 and 0 after token 1. The search stops at
    the first length that is no better, or looks at all of them.
    """
    lengths = []
    for token in (0, 1):
        survivals = [FIRST_CONFIDENCE, FIRST_CONFIDENCE * (0.9 if token == 0 else 0.0)]
        best, length, expected = STEPS_PER_SECOND[0], 0, 1.0
        for index, survival in enumerate(survivals, start=1):
            expected += survival
            rate = expected * STEPS_PER_SECOND[index]
            if rate > best:
                best, length = rate, index
            elif not looks_ahead:
                break
        lengths.append(length)
    return torch.tensor(lengths)[first_drafts]


@METHODS
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_sees_look_ahead_of_appendix_a(looks_ahead: bool, method: str):
    chain = Chain(vocab_size=2, num_tokens=1, num_drafts=2, has_head=False, method=method)
    tables = Tables(chain, CPU)
    tables.target[:] = torch.tensor([0.7, 0.3]).log()
    tables.base[:] = torch.tensor([0.5, 0.5]).log()
    run = Run(chain, tables, TWINS, NUM_SEEDS)
    active = torch.arange(NUM_SEEDS)
    # Drafts are a function of their keys: the round draws these again.
    drafts, _ = run.draft(active, run.tokens[:, 0], run.counts)
    run.round(active, lengths=appendix_a_lengths(drafts[:, 0], looks_ahead=looks_ahead))
    p = p_value_of(run.tokens[:, 1], torch.tensor([0.7, 0.3], dtype=torch.float64))
    found = float((run.tokens[:, 1] == 0).sum()) / NUM_SEEDS
    if looks_ahead:
        assert p < LEAST_P
        if method == "standard":
            assert abs(found - 0.85) < 0.01
    else:
        assert p > LEAST_P


@METHODS
def test_placeholders_shorten_a_window_and_keep_the_law(method: str):
    # Every third request holds a placeholder in place of its first or second draft.
    def with_holes(  # noqa: PLR0917 as verify_drafts
        target: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        heat: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        law: DraftLaw | None,
        **options: Any,
    ) -> Verification:
        token_ids = token_ids.clone()
        lengths = starts[1:] - starts[:-1]
        request = torch.arange(len(lengths))
        for slot, remainder in ((1, 0), (2, 1)):
            chosen = (request % 3 == remainder) & (lengths > slot)
            token_ids[starts[:-1][chosen].to(torch.int64) + slot] = -1
        found = rejection.verify_drafts(
            target, token_ids, starts, heat, seeds, positions, law, **options
        )
        assert int(found.num_accepted[request % 3 == 0].max()) == 0
        assert int(found.num_accepted[request % 3 == 1].max()) <= 1
        return found

    ops = types.SimpleNamespace(markov_step=TWINS.markov_step, verify_drafts=with_holes)
    assert p_of(Chain(method=method), ops) > LEAST_P
