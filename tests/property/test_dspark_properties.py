"""Properties of drafters: vocabularies, chunks, layouts, and files of any shape."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import torch
from extkv.errors import ModelFileError
from extkv.models.dspark import (
    ReferenceSpeculator,
    block_positions,
    load_drafter,
    predicted_positions,
    read_drafter_config,
    save_native,
    save_speculators,
)
from extkv.models.dspark.random_drafter import default_tap_layer_ids
from extkv.models.dspark.saving import native_config, speculators_config
from extkv.models.dspark.vocabulary import flags_of, offsets_of, target_ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafters import TARGET, in_float64, random_taps, tiny_config, tiny_drafter, tiny_target

MODEL = in_float64(tiny_drafter(tiny_config()))
TARGET_MODEL = tiny_target()


@given(st.sets(st.integers(0, 199), min_size=1).map(sorted))
def test_offsets_and_flags_say_the_same(token_ids):
    target_ids = torch.tensor(token_ids)
    assert target_ids_of(offsets_of(target_ids), 200).tolist() == token_ids
    assert flags_of(target_ids, 200).nonzero()[:, 0].tolist() == token_ids


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 9))
def test_chunks_do_not_matter(chunks, last):
    num_tokens = sum(chunks) + last
    taps = random_taps(MODEL.config, num_tokens, dtype=torch.float64)
    whole, parts = ReferenceSpeculator(MODEL), ReferenceSpeculator(MODEL)
    whole.append(taps)
    start = 0
    for count in (*chunks, last):
        parts.append(taps[:, start : start + count])
        start += count
    torch.testing.assert_close(parts.context.keys, whole.context.keys, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.context.values, whole.context.values, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 70), st.integers(2, 9), st.booleans(), st.integers(1, 64))
def test_a_draft_s_position_is_one_after_the_token_it_depends_on(
    anchor, block_size, samples_from_anchor, num_positions
):
    config = tiny_config(block_size=block_size, samples_from_anchor=samples_from_anchor)
    positions = block_positions(config, torch.tensor([anchor]), num_positions).tolist()
    assert len(positions) == block_size
    assert max(positions) < num_positions
    assert positions == sorted(positions)
    predicted = predicted_positions(config, torch.tensor([anchor]))[0].tolist()
    assert predicted == list(range(anchor + 1, anchor + 1 + config.num_drafts))


@given(st.integers(1, 200))
def test_default_taps_are_layers_before_the_last(num_layers):
    taps = default_tap_layer_ids(num_layers)
    assert 1 <= len(taps) <= 5
    assert list(taps) == sorted(set(taps))
    assert taps[0] >= -1
    assert taps[-1] < max(num_layers - 1, 0)


@st.composite
def configs(draw):
    rank = draw(st.sampled_from([0, 1, 5]))
    config = tiny_config(
        num_layers=draw(st.integers(1, 3)),
        tap_layer_ids=tuple(sorted(draw(st.sets(st.integers(-1, 4), min_size=1)))),
        block_size=draw(st.integers(2, 9)),
        mask_token_id=draw(st.integers(0, 28)),
        samples_from_anchor=draw(st.booleans()),
        draft_vocab_size=draw(st.sampled_from([None, 29, 1, 13])),
        markov_rank=rank,
        markov_head_type=draw(st.sampled_from(["vanilla", "gated", "rnn"])),
        has_confidence_head=draw(st.booleans()),
        confidence_reads_markov=rank > 0 and draw(st.booleans()),
        confidence_has_bias=draw(st.booleans()),
        num_target_layers=draw(st.sampled_from([None, TARGET.num_layers])),
    )
    return (
        config
        if config.has_confidence_head
        else dataclasses.replace(config, confidence_has_bias=True)
    )


@settings(max_examples=40)
@given(configs(), st.booleans(), st.booleans())
def test_any_drafter_survives_both_formats(config, is_native, has_target):
    target = TARGET_MODEL if has_target else None
    # A reduced vocabulary is that of a target.
    model = tiny_drafter(config, TARGET_MODEL if config.num_draft_tokens < 29 else target)
    with tempfile.TemporaryDirectory() as directory:
        (save_native if is_native else save_speculators)(model, directory)
        found = load_drafter(directory, TARGET_MODEL)
    expected = dataclasses.replace(config, draft_vocab_size=found.config.draft_vocab_size)
    assert found.config == expected
    assert found.config.num_draft_tokens == config.num_draft_tokens
    assert found.weights.shared == model.weights.shared
    pairs = zip(found.weights.tensors(), model.weights.tensors(), strict=True)
    for (name, tensor), (_, expected_tensor) in pairs:
        assert torch.equal(tensor, expected_tensor), name


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
def test_a_damaged_config_is_read_or_refused(data):
    make = data.draw(st.sampled_from([native_config, speculators_config]))
    values = make(tiny_config(), torch.float32)
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(JSON_VALUES)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(values))
        try:
            read_drafter_config(path)
        except ModelFileError as error:
            assert "config.json" in str(error)  # noqa: PT017 -- accepting is right too
