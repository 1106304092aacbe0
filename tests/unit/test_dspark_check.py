"""`check_draft` measures acceptance, and names what a drafter's file says wrongly."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from extkv.dspark.check import check_draft, neighbours_of, read_file_keys, read_text
from extkv.dspark.check.report import LEAST_BLOCKS
from extkv.errors import DrafterMismatchError, InvalidArgumentError
from extkv.models.dspark import (
    DSparkModel,
    ReferenceSpeculator,
    load_drafter,
    random_drafter,
    save_native,
    save_speculators,
)
from support.drafters import tiny_config, tiny_drafter, tiny_target
from support.echo_pair import (
    CONFIG,
    LAG,
    MASK,
    OUTPUT,
    TAPS,
    VOCAB_SIZE,
    echo_drafter,
    echo_target,
    echo_texts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: one thread is faster than two that wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(one_thread):  # noqa: ARG001 comes first
    return echo_target()


@pytest.fixture(scope="module")
def texts(target):
    return [(text, LAG) for text in echo_texts(target, 6, 100, seed=9)]


@pytest.fixture(scope="module")
def right(target):
    return echo_drafter(target)


def changed(drafter: DSparkModel, **fields) -> DSparkModel:
    """The same weights under a configuration that says something else."""
    config = dataclasses.replace(drafter.config, **fields)
    return DSparkModel(config, drafter.weights, vocab_size=VOCAB_SIZE)


def with_own(drafter: DSparkModel, **tensors) -> DSparkModel:
    """The same drafter with an embedding or a head of its own."""
    weights = drafter.weights
    backbone = dataclasses.replace(weights.backbone, **tensors)
    names = {"embedding": "embed_tokens.weight", "lm_head": "lm_head.weight"}
    shared = weights.shared - {names[name] for name in tensors}
    weights = dataclasses.replace(weights, backbone=backbone, shared=frozenset(shared))
    return DSparkModel(drafter.config, weights, vocab_size=VOCAB_SIZE)


def scrambled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(1))]


FAULTS = {
    # Which reading must be named for a file that says something else than it was trained with.
    "taps-1": lambda target: changed(echo_drafter(target), tap_layer_ids=(2, 3)),
    "taps+1": lambda target: changed(echo_drafter(target), tap_layer_ids=(0, 1)),
    "anchor-first": lambda target: changed(
        echo_drafter(target, word_distance=LAG - 1), samples_from_anchor=False
    ),
    "fill-in": lambda target: changed(
        echo_drafter(target, samples_from_anchor=False, distance=LAG), samples_from_anchor=True
    ),
    "positions+1": lambda target: echo_drafter(target, distance=LAG, word_distance=LAG),
    "positions-1": lambda target: echo_drafter(target, distance=LAG - 2, word_distance=LAG - 2),
    "norm-before": lambda target: echo_drafter(target, context_norm="before"),
    "norm-none": lambda target: echo_drafter(target, context_norm="none"),
    f"mask-{MASK}": lambda target: changed(echo_drafter(target), mask_token_id=MASK + 1),
    "target-embedding": lambda target: with_own(
        echo_drafter(target), embedding=target.weights.embedding.flip(1).contiguous()
    ),
    "target-head": lambda target: with_own(
        echo_drafter(target), lm_head=scrambled(target.weights.lm_head)
    ),
}
NEEDS_TRAINING = {"positions+1", "positions-1", "norm-before", "norm-none"}


@pytest.mark.parametrize("save", [save_native, save_speculators], ids=["native", "speculators"])
def test_a_right_file_has_no_better_neighbour(target, texts, right, save, tmp_path):
    save(right, tmp_path)
    report = check_draft(
        target, load_drafter(tmp_path, target), texts, keys=read_file_keys(tmp_path)
    )
    assert report.better == []
    assert not report.is_useless
    assert report.acceptance.accepted_tokens > 1.6
    assert report.acceptance.greedy_accepted_tokens > 1.6
    assert len(report.comparisons) >= 11


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("save", [save_native, save_speculators], ids=["native", "speculators"])
def test_a_fault_is_named_first(target, texts, save, name, tmp_path):
    save(FAULTS[name](target), tmp_path)
    report = check_draft(
        target, load_drafter(tmp_path, target), texts, keys=read_file_keys(tmp_path)
    )
    assert [found.neighbour.name for found in report.better][:1] == [name]
    best = report.better[0]
    assert best.gain > 4 * best.standard_error
    assert best.acceptance.accepted_tokens > report.acceptance.accepted_tokens + 0.5
    assert ("no key" in best.neighbour.change) == (name in NEEDS_TRAINING)
    assert not report.is_useless


def test_a_head_that_should_be_the_embedding_is_named(target, texts):
    # The drafter's embedding with the target's head in the dimensions that only the head reads.
    embedding = target.weights.embedding.clone()
    embedding[:, OUTPUT] += target.weights.lm_head[:, OUTPUT] * 0.3
    drafter = echo_drafter(target)
    layer = drafter.weights.backbone.layers[0]
    layer.o_proj.mul_(8.0)
    wrong = with_own(drafter, embedding=embedding, lm_head=scrambled(embedding))
    report = check_draft(target, wrong, texts)
    assert "tied-head" in [found.neighbour.name for found in report.better]


@pytest.mark.parametrize(
    ("save", "name", "words"),
    [
        (save_native, "taps-1", ["target_layer_ids: [1, 2] instead of [2, 3]", "does not"]),
        (save_native, "taps+1", ["target_layer_ids: [1, 2] instead of [0, 1]"]),
        (
            save_speculators,
            "taps+1",
            ["aux_hidden_state_layer_ids: [2, 3] instead of [1, 2]", "and these ids do not"],
        ),
        (save_native, "anchor-first", ["sample_from_anchor: true", "token after its own"]),
        (save_native, "fill-in", ["sample_from_anchor: false", "its own position"]),
        (save_native, f"mask-{MASK}", [f"mask_token_id: {MASK} instead of {MASK + 1}"]),
        (save_native, "target-embedding", ["leave embed_tokens.weight out"]),
        (save_native, "target-head", ["leave lm_head.weight out"]),
    ],
)
def test_advice_names_the_key_and_its_value(  # noqa: PLR0917 fixtures
    target, texts, save, name, words, tmp_path
):
    save(FAULTS[name](target), tmp_path)
    drafter = load_drafter(tmp_path, target)
    report = check_draft(target, drafter, texts, keys=read_file_keys(tmp_path))
    neighbour = report.better[0].neighbour
    for word in words:
        assert word in f"{neighbour.fault}; {neighbour.change}"


def test_advice_that_is_followed_makes_the_file_right(target, texts, tmp_path):
    save_native(FAULTS["taps-1"](target), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["target_layer_ids"] = list(TAPS)
    path.write_text(json.dumps(values))
    assert check_draft(target, load_drafter(tmp_path, target), texts).better == []


def test_a_drafter_of_another_target_is_useless_however_it_is_read(target, texts):
    stranger = random_drafter(echo_drafter(target).config, target, seed=8)
    report = check_draft(target, stranger, texts)
    assert report.is_useless
    assert report.acceptance.accepted_tokens < 0.5


def test_greedy_acceptance_is_that_of_real_rounds(target, right):
    """On greedy text, the count of one block is what a round of a speculator accepts."""
    (prompt,) = echo_texts(target, 1, 40, seed=2)
    text = list(prompt)
    while len(text) < 90:
        hidden = read_text(target, text, len(prompt), TAPS).hidden
        text.append(int(target.compute_logits(hidden[-1:]).argmax()))
    report = check_draft(target, right, [(text, len(prompt))] * 3, temperature=0.3)
    read = read_text(target, text, len(prompt), TAPS)
    taps = torch.stack([read.taps[layer_id] for layer_id in TAPS])
    accepted = []
    for anchor in range(len(prompt) - 1, len(text) - 4, 5):
        speculator = ReferenceSpeculator(right)
        speculator.append(taps[:, :anchor])
        drafts = speculator.draft(text[anchor]).token_ids.tolist()
        matches = [a == b for a, b in zip(drafts, text[anchor + 1 :], strict=False)]
        accepted.append(matches.index(False) if False in matches else 4)
    assert report.acceptance.num_blocks == 3 * len(accepted)
    assert report.acceptance.greedy_accepted_tokens == pytest.approx(sum(accepted) / len(accepted))


def test_overlap_is_the_sum_of_minima_over_a_reduced_vocabulary():
    target = tiny_target()
    ids = [1, 4, 5, 9, 12, 20, 28]
    config = tiny_config(draft_vocab_size=len(ids), markov_head_type="rnn")
    drafter = tiny_drafter(config, target, target_token_ids=ids)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(29, (60,), generator=generator).tolist()
    report = check_draft(target, drafter, [(text, 1)] * 3, temperature=1.7)
    read = read_text(target, text, 1, config.tap_layer_ids)
    taps = torch.stack([read.taps[layer_id] for layer_id in config.tap_layer_ids])
    expected = []
    for anchor in range(0, 60 - config.num_drafts, config.num_drafts + 1):
        speculator = ReferenceSpeculator(drafter)
        speculator.append(taps[:, :anchor])
        hidden = speculator.hidden(text[anchor])
        state, sums = drafter.initial_state(1), []
        for slot in range(config.num_drafts):
            row = hidden[slot : slot + 1]
            codes, state = drafter.codes(torch.tensor([text[anchor + slot]]), row, state)
            logits = drafter.base_logits(row) + codes @ drafter.markov_weight.T
            q = torch.zeros(29)
            q[ids] = (logits[0] / 1.7).softmax(0)
            p = (target.compute_logits(read.hidden[anchor + slot]) / 1.7).softmax(0)
            sums.append(float(torch.minimum(p, q).sum()))
        expected.append(sums)
    wanted = torch.tensor(expected)
    torch.testing.assert_close(report.acceptance.overlap, wanted.repeat(3, 1), rtol=1e-4, atol=1e-5)
    assert report.acceptance.accepted_tokens == pytest.approx(
        float(wanted.cumprod(1).sum(1).mean()), rel=1e-4
    )


def test_progress_ends_with_all_blocks_and_the_report_is_plain_data(target, texts, right):
    seen = []
    report = check_draft(target, right, texts, on_progress=lambda *args: seen.append(args))
    assert seen[-1] == (report.acceptance.num_blocks, report.acceptance.num_blocks)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["num_blocks"] == report.acceptance.num_blocks
    assert len(values["acceptance_by_slot"]) == right.config.num_drafts
    assert {row["name"] for row in values["neighbours"]} >= {"taps-1", "fill-in", "norm-none"}
    assert not any(row["is_better"] for row in values["neighbours"])


def test_taps_that_do_not_exist_are_not_tried(target):
    drafter = echo_drafter(target)
    lowest = changed(drafter, tap_layer_ids=(-1, 2), num_target_layers=None)
    names = {neighbour.name for neighbour in neighbours_of(lowest, target)}
    assert "taps-1" not in names
    assert "taps+1" in names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"texts": []}, f"have 0 blocks of 4 drafts, expected at least {LEAST_BLOCKS}"),
        ({"texts": [([1, 2, 3], 1)]}, "have 0 blocks"),
        ({"texts": [([1] * 60, 1)]}, "have 12 blocks"),
        ({"texts": [([1] * 100 + [VOCAB_SIZE] * 60, 1)]}, "is out of range for vocab_size 16"),
        ({"temperature": 0.0}, "temperature is 0.0, expected a positive number"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_measured_is_refused(target, texts, right, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        check_draft(target, right, **({"texts": texts} | options))


def test_a_text_must_fit_the_target(target):
    with pytest.raises(InvalidArgumentError, match="has 0 tokens, expected 1 to 160"):
        read_text(target, [], 0, TAPS)
    with pytest.raises(InvalidArgumentError, match="has 161 tokens"):
        read_text(target, [1] * 161, 0, TAPS)
    assert CONFIG.context_length == 160


def test_a_drafter_of_another_width_is_refused(target, texts):
    with pytest.raises(DrafterMismatchError, match="hidden_size of the drafter is 16"):
        check_draft(target, tiny_drafter(tiny_config()), texts)
