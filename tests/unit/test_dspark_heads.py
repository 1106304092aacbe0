"""The sequential heads against their formulas, and drafting with them for one sequence."""

import dataclasses
import math

import pytest
import torch
from extkv.errors import InvalidArgumentError
from extkv.models.dspark import ReferenceSpeculator, teacher_forced
from extkv.models.dspark.heads import markov_codes, markov_embedding
from support.drafters import (
    HEADS,
    config_with_head,
    in_float64,
    random_taps,
    random_tokens,
    tiny_config,
    tiny_drafter,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}
RANK = 6


def sigmoid(value):
    return 1 / (1 + math.exp(-float(value)))


def hidden_rows(num_rows, *, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 16, generator=generator).double()


def explicit_codes(weights, previous_token_ids, hidden):
    """Codes of the drafts of one block, one number at a time."""
    state, codes = [0.0] * RANK, []
    for token_id, h in zip(previous_token_ids, hidden, strict=True):
        e = weights.markov_w1[token_id]
        if weights.gate_proj is not None:
            gates = weights.gate_proj @ torch.cat((h, e)) + weights.gate_bias
            codes.append([sigmoid(gate) * float(x) for gate, x in zip(gates, e, strict=True)])
        elif weights.joint_proj is not None:
            z = torch.cat((torch.tensor(state, dtype=torch.float64), e, h))
            joint = (weights.joint_proj @ z + weights.joint_bias).tolist()
            gates, candidates, outputs = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            codes.append([math.tanh(output) for output in outputs])
            state = [
                sigmoid(gate) * old + (1 - sigmoid(gate)) * math.tanh(candidate)
                for gate, old, candidate in zip(gates, state, candidates, strict=True)
            ]
        else:
            codes.append(e.tolist())
    return torch.tensor(codes, dtype=torch.float64)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_codes_are_the_formula(head):
    model = in_float64(tiny_drafter(config_with_head(head)))
    blocks = [hidden_rows(4, seed=seed) for seed in (4, 5)]
    tokens = torch.tensor([[3, 28, 0, 3], [11, 11, 2, 7]])
    expected = [
        explicit_codes(model.weights, row.tolist(), hidden)
        for row, hidden in zip(tokens, blocks, strict=True)
    ]
    state = model.initial_state(2)
    for step in range(4):
        hidden = torch.stack([block[step] for block in blocks])
        codes, state = model.codes(tokens[:, step], hidden, state)
        torch.testing.assert_close(codes, torch.stack([e[step] for e in expected]), **EXACT)


@pytest.mark.parametrize(
    ("head", "has_state"), [("vanilla", False), ("gated", False), ("rnn", True)]
)
def test_only_the_rnn_head_has_a_state(head, has_state):
    model = tiny_drafter(config_with_head(head))
    state = model.initial_state(3)
    assert (state is not None) is has_state
    if state is not None:
        assert torch.equal(state, torch.zeros(3, RANK))
    _, after = model.codes(torch.tensor([1, 2, 3]), hidden_rows(3).float(), state)
    assert (after is not None) is has_state


def test_an_rnn_head_refuses_to_run_without_its_state():
    model = tiny_drafter(config_with_head("rnn"))
    with pytest.raises(InvalidArgumentError, match="no state of its Markov head here"):
        model.codes(torch.tensor([1]), hidden_rows(1).float())


def test_a_drafter_without_a_markov_head_has_no_codes():
    model = tiny_drafter(config_with_head("none"))
    assert model.markov_weight is None
    assert model.initial_state(2) is None
    with pytest.raises(InvalidArgumentError, match="the drafter has no Markov head"):
        model.codes(torch.tensor([1]), hidden_rows(1).float())


@pytest.mark.parametrize("reads_markov", [False, True], ids=["hidden", "markov"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_confidence_is_the_formula(reads_markov, has_bias):
    config = tiny_config(confidence_reads_markov=reads_markov, confidence_has_bias=has_bias)
    model = in_float64(tiny_drafter(config))
    hidden, tokens = hidden_rows(3), torch.tensor([5, 0, 28])
    found = model.confidence_logits(hidden, tokens)
    weight = model.weights.confidence_proj[0]
    assert weight.shape == (22 if reads_markov else 16,)
    for row, token_id in enumerate(tokens.tolist()):
        features = hidden[row].tolist()
        if reads_markov:
            features += model.weights.markov_w1[token_id].tolist()
        expected = sum(a * b for a, b in zip(features, weight.tolist(), strict=True))
        expected += float(model.weights.confidence_bias) if has_bias else 0.0
        assert float(found[row]) == pytest.approx(expected, rel=1e-12)


def test_confidence_of_bfloat16_weights_is_summed_in_float32():
    model = tiny_drafter(tiny_config(), dtype=torch.bfloat16)
    hidden, tokens = hidden_rows(3).bfloat16(), torch.tensor([5, 0, 28])
    found = model.confidence_logits(hidden, tokens)
    exact = in_float64(model).confidence_logits(hidden.double(), tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_drafter_without_a_confidence_head_refuses():
    model = tiny_drafter(tiny_config(has_confidence_head=False))
    with pytest.raises(InvalidArgumentError, match="the drafter has no confidence head"):
        model.confidence_logits(hidden_rows(1).float(), torch.tensor([1]))


# Bug case B22, where a row's drafts do not exist yet.
def test_placeholders_never_index_the_markov_table():
    model = tiny_drafter(tiny_config())
    embedded = markov_embedding(model.weights, torch.tensor([-1, 4]))
    assert torch.equal(embedded, model.weights.markov_w1[[0, 4]])
    codes, _ = markov_codes(model.weights, embedded, hidden_rows(2).float(), None)
    assert bool(codes.isfinite().all())


# Bug case B55.
@pytest.mark.parametrize("head", ["none", "vanilla", "gated"])
def test_changing_one_hidden_row_changes_its_own_base_logits_only(head):
    model = tiny_drafter(config_with_head(head))
    hidden = hidden_rows(4).float()
    before = model.base_logits(hidden)
    hidden[0] += 1
    changed = (model.base_logits(hidden) != before).any(dim=1)
    assert changed.tolist() == [True, False, False, False]


def explicit_draft(model, speculator, anchor, choose):
    """Drafts by the formula; `choose` picks a draft token from the logits of a step."""
    hidden = speculator.hidden(anchor)
    previous, chosen, rows = [anchor], [], []
    for step in range(model.config.num_drafts):
        logits = model.weights.backbone.lm_head @ hidden[step]
        if model.weights.markov_w1 is not None:
            codes = explicit_codes(model.weights, previous, hidden[: step + 1])
            logits = logits + model.weights.markov_w2 @ codes[step]
        draft_id = choose(step, logits)
        target_ids = model.weights.target_ids
        chosen.append(draft_id if target_ids is None else int(target_ids[draft_id]))
        previous.append(chosen[-1])
        rows.append(logits)
    return chosen, torch.stack(rows)


@pytest.mark.parametrize("samples_from_anchor", [True, False], ids=["anchor", "fill-in"])
@pytest.mark.parametrize("head", HEADS)
def test_greedy_drafts_are_the_formula(head, samples_from_anchor):
    config = config_with_head(head, samples_from_anchor=samples_from_anchor)
    model = in_float64(tiny_drafter(config))
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(config, 6, dtype=torch.float64))
    draft = speculator.draft(13)
    chosen, logits = explicit_draft(model, speculator, 13, lambda _, row: int(row.argmax()))
    assert draft.token_ids.tolist() == chosen
    torch.testing.assert_close(draft.logits, logits, **EXACT)
    expected = torch.nn.functional.one_hot(draft.token_ids, 29).double()
    assert torch.equal(draft.probabilities, expected)


@pytest.mark.parametrize("head", HEADS)
def test_sampled_drafts_keep_the_law_they_were_drawn_from(head):
    model = in_float64(tiny_drafter(config_with_head(head)))
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 6, dtype=torch.float64))
    draft = speculator.draft(13, temperature=0.7, generator=torch.Generator().manual_seed(8))
    drawn = draft.token_ids.tolist()
    _, logits = explicit_draft(model, speculator, 13, lambda step, _: drawn[step])
    torch.testing.assert_close(draft.logits, logits, **EXACT)
    torch.testing.assert_close(draft.probabilities, torch.softmax(logits / 0.7, -1), **EXACT)
    torch.testing.assert_close(draft.probabilities.sum(-1), torch.ones(4).double(), **EXACT)


def test_sampling_follows_the_law():
    model = tiny_drafter(tiny_config())
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 3))
    generator = torch.Generator().manual_seed(5)
    law = speculator.draft(2, temperature=1.0, generator=generator).probabilities[0].double()
    hidden = speculator.hidden(2)
    speculator.hidden = lambda _: hidden
    num_draws = 1000
    counts = torch.zeros(29)
    for _ in range(num_draws):
        draft = speculator.draft(2, temperature=1.0, generator=generator, num_drafts=1)
        counts[draft.token_ids] += 1
    common = law * num_draws > 5
    expected = law[common] * num_draws
    chi_square = float(((counts[common] - expected) ** 2 / expected).sum())
    freedom = int(common.sum()) - 1
    # Six standard deviations of the statistic.
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)


def test_a_draft_reports_the_confidence_of_each_token():
    model = in_float64(tiny_drafter(tiny_config()))
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 3, dtype=torch.float64))
    draft = speculator.draft(2)
    before = torch.cat((torch.tensor([2]), draft.token_ids[:-1]))
    expected = model.confidence_logits(speculator.hidden(2), before)
    assert torch.equal(draft.confidence_logits, expected)
    silent = tiny_drafter(tiny_config(has_confidence_head=False))
    assert ReferenceSpeculator(silent).draft(2).confidence_logits is None


def test_fewer_drafts_are_a_prefix():
    model = tiny_drafter(tiny_config())
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 3))
    whole = speculator.draft(2)
    part = speculator.draft(2, num_drafts=2)
    assert torch.equal(part.token_ids, whole.token_ids[:2])
    assert torch.equal(part.logits, whole.logits[:2])
    assert part.confidence_logits.shape == (2,)


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_rejects_a_number_of_drafts_out_of_range(num_drafts):
    speculator = ReferenceSpeculator(tiny_drafter(tiny_config()))
    with pytest.raises(InvalidArgumentError, match=f"num_drafts is {num_drafts}, expected 1 to 4"):
        speculator.draft(0, num_drafts=num_drafts)


@pytest.mark.parametrize("token_id", [-1, 29])
def test_rejects_an_anchor_out_of_range(token_id):
    speculator = ReferenceSpeculator(tiny_drafter(tiny_config()))
    with pytest.raises(InvalidArgumentError, match=f"anchor token is {token_id}, out of range"):
        speculator.draft(token_id)


def test_the_context_ends_where_positions_end():
    model = tiny_drafter(tiny_config(), max_model_len=10)
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(model.config, 9))
    # The block reaches past the end: its last slots stay at the last position.
    assert speculator.draft(3).token_ids.shape == (4,)
    with pytest.raises(InvalidArgumentError, match="would have 11 tokens, the drafter has 10"):
        speculator.append(random_taps(model.config, 2))


def test_cropping_and_appending_again_gives_the_same_draft():
    model = tiny_drafter(tiny_config())
    taps = random_taps(model.config, 8)
    speculator = ReferenceSpeculator(model)
    speculator.append(taps)
    expected = speculator.draft(3)
    speculator.append(random_taps(model.config, 4, seed=7))
    speculator.context.crop(8)
    found = speculator.draft(3)
    assert speculator.context.num_tokens == 8
    assert torch.equal(found.logits, expected.logits)


def test_a_reduced_vocabulary_drafts_target_tokens():
    target_ids = torch.tensor([1, 4, 9, 16, 25])
    config = tiny_config(draft_vocab_size=5)
    reduced = tiny_drafter(config)
    weights = dataclasses.replace(in_float64(reduced).weights, target_ids=target_ids)
    model = type(reduced)(config, weights, vocab_size=29)
    speculator = ReferenceSpeculator(model)
    speculator.append(random_taps(config, 6, dtype=torch.float64))
    draft = speculator.draft(13, temperature=1.0, generator=torch.Generator().manual_seed(1))
    assert set(draft.token_ids.tolist()) <= set(target_ids.tolist())
    assert draft.probabilities.shape == (4, 29)
    torch.testing.assert_close(
        draft.probabilities[:, target_ids], torch.softmax(draft.logits, -1), **EXACT
    )
    outside = torch.ones(29, dtype=torch.bool)
    outside[target_ids] = False
    assert not bool(draft.probabilities[:, outside].any())
    # The next draft is conditioned on the target token, not on the draft token.
    greedy = speculator.draft(13)
    chosen, logits = explicit_draft(model, speculator, 13, lambda _, row: int(row.argmax()))
    assert greedy.token_ids.tolist() == chosen
    torch.testing.assert_close(greedy.logits, logits, **EXACT)


# Bug case B56 (b).
def test_padding_of_the_vocabulary_is_never_drafted():
    model = tiny_drafter(tiny_config())
    lm_head = model.weights.backbone.lm_head.clone()
    lm_head[27:] = 1e6 * model.weights.backbone.final_norm
    backbone = dataclasses.replace(model.weights.backbone, lm_head=lm_head)
    weights = dataclasses.replace(model.weights, backbone=backbone)
    padded = type(model)(model.config, weights, vocab_size=27)
    hidden = hidden_rows(3).float()
    assert padded.base_logits(hidden).shape == (3, 27)
    assert padded.markov_weight.shape == (27, RANK)
    assert padded.target_ids is None
    assert torch.equal(padded.to_target_ids(torch.arange(27)), torch.arange(27))
    assert int(ReferenceSpeculator(padded).draft(1).token_ids.max()) < 27


def test_teacher_forced_drafts_of_a_greedy_draft_are_that_draft():
    model = in_float64(tiny_drafter(config_with_head("rnn")))
    taps, tokens = random_taps(model.config, 11, dtype=torch.float64), random_tokens(11)
    speculator = ReferenceSpeculator(model)
    speculator.append(taps[:, :6])
    draft = speculator.draft(int(tokens[6]))
    tokens[7:11] = draft.token_ids
    found = teacher_forced(model, taps, tokens, torch.tensor([6]))
    torch.testing.assert_close(found.logits[0], draft.logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.logits[0].argmax(-1), draft.token_ids)
