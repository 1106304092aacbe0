"""Stored texts, the order of batches, prompts, and texts that an engine generates."""

import ast
import collections
import itertools
import math

import numpy as np
import pytest
from extkv.dspark.train import Text, TextStore
from extkv.dspark.train.generation import GenerationSettings, TextGenerator, turn_tokens
from extkv.dspark.train.prompts import build_prompt, follow_up
from extkv.dspark.train.session import held_out_prompts
from extkv.dspark.train.texts import BatchOrder, padded_len
from extkv.dspark.train.workers import WorkerSource
from extkv.engine.llm import LLM
from extkv.errors import ExtkvError, InvalidArgumentError, ModelFileError
from extkv.models.loader import load_model
from support.chat_model import write_chat_model
from support.training import random_texts


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model_path):
    engine = LLM(model_path, device="cpu", max_num_seqs=4, max_model_len=400)
    yield engine
    engine.close()


def test_stored_texts_come_back(tmp_path):
    store = random_texts(7)
    store.extend([Text([1, 2, 3], 1, 0.0, False)])
    store.save(tmp_path / "texts.npz")
    again = TextStore.load(tmp_path / "texts.npz")
    assert len(again) == 8
    assert [again.text(index) for index in range(8)] != []
    for index in range(8):
        assert vars(again.text(index)) == vars(store.text(index))
    assert vars(store.subset([7]).text(0)) == vars(store.text(7))
    assert again.num_tokens == int(again.lengths.sum())


def test_files_that_hold_no_texts_are_refused(tmp_path):
    (tmp_path / "texts.npz").write_bytes(b"no archive")
    np.savez(tmp_path / "other.npz", something=np.zeros(1))
    for name in ("texts.npz", "other.npz", "missing.npz"):
        with pytest.raises(ModelFileError, match=f"{name} cannot be read"):
            TextStore.load(tmp_path / name)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_epoch_reads_every_text_in_batches_of_the_budget(num_ranks):
    lengths = np.random.default_rng(0).integers(5, 300, 500)
    orders = [
        BatchOrder(batch_tokens=2000, seed=3, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    shares = [order.batches(lengths) for order in orders]
    assert len({len(share) for share in shares}) == 1
    batches = [batch.tolist() for share in shares for batch in share]
    read = collections.Counter(text for batch in batches for text in batch)
    assert max(read.values()) == 1
    assert len(read) == 500 or num_ranks > 1
    for batch in batches:
        assert padded_len(int(lengths[batch].max())) * len(batch) <= 2000


def test_order_follows_from_seed_epoch_and_place():
    lengths = np.random.default_rng(0).integers(5, 60, 50)
    first = BatchOrder(batch_tokens=300, seed=1).iterate(lengths)
    found = [next(first).tolist() for _ in range(40)]
    order = BatchOrder(batch_tokens=300, seed=1)
    again = order.iterate(lengths)
    for _ in range(25):
        next(again)
    resumed = BatchOrder(batch_tokens=300, seed=1)
    resumed.epoch, resumed.place = order.epoch, order.place
    assert order.epoch > 0
    rest = resumed.iterate(lengths)
    assert [next(rest).tolist() for _ in range(15)] == found[25:]


def test_prompts_are_many_and_follow_from_their_number():
    prompts = [build_prompt(0, number) for number in range(4000)]
    assert prompts[17] == build_prompt(0, 17)
    assert len(set(prompts)) > 3500
    # Prompts are equal by chance only, as among each other.
    assert len(set(held_out_prompts(0, 200)) & set(prompts)) < 20
    assert all("{" not in prompt or "}" in prompt for prompt in prompts)
    assert len({follow_up(0, number) for number in range(200)}) > 40


def test_examples_of_functions_hold():
    namespace = {
        "sum": sum, "len": len, "list": list, "sorted": sorted,
    }  # fmt: skip
    checked = 0
    for number in range(3000):
        prompt = build_prompt(5, number)
        lines = prompt.splitlines()
        for line, result in itertools.pairwise(lines):
            if line.startswith("    >>> count_words("):
                given = ast.literal_eval(line.split("(", 1)[1][:-1])
                expected = dict(collections.Counter(given.split()))
                assert ast.literal_eval(result.strip()) == expected
                checked += 1
            for name in ("even_sum(", "positive_sum(", "sorted_sum("):
                if line.startswith(f"    >>> {name}"):
                    given = ast.literal_eval(line.split("(", 1)[1][:-1])
                    if name == "even_sum(":
                        given = [value for value in given if value % 2 == 0]
                    elif name == "positive_sum(":
                        given = [value for value in given if value > 0]
                    assert int(result) == namespace["sum"](given)
                    checked += 1
    assert checked > 10


def test_template_is_taken_apart_as_it_is_rendered(model_path):
    model = load_model(model_path)
    turns = turn_tokens(model)
    encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    said = [{"role": "user", "content": "Hi you"}]
    rendered = encode(model.chat_template.render(said))
    assert [*turns.before, *encode("Hi you"), *turns.after] == rendered
    answer = [*encode("Yes"), 256]
    said += [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": "And?"}]
    both = [*rendered, *answer, *turns.between, *encode("And?"), *turns.after]
    assert both == encode(model.chat_template.render(said))


def test_answers_are_the_models_own(llm):
    settings = GenerationSettings(max_tokens=24, max_question_tokens=30, own_ratio=0.4, seed=2)
    generator = TextGenerator(llm, settings)
    texts = [
        text
        for found in generator.run(until=lambda num_texts, _: num_texts >= 24)
        for text in found
    ]
    assert len(texts) >= 24
    assert {text.temperature for text in texts} == {0.0, 1.0}
    assert not llm.engine.has_unfinished
    turns = turn_tokens(llm.model)
    start = tuple(turns.before)
    for text in texts:
        assert tuple(text.token_ids[: len(start)]) == start
        assert text.is_whole == (text.token_ids[-1] == 256)
        assert 0 < len(text.token_ids) - text.answer_start <= 24
    greedy = [text for text in texts if text.temperature == 0.0 and text.is_whole][:3]
    prompts = [list(text.token_ids[: text.answer_start]) for text in greedy]
    from extkv import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
    for text, output in zip(greedy, outputs, strict=True):
        assert list(text.token_ids[text.answer_start :]) == list(output.outputs[0].token_ids)


def test_given_prompts_are_answered_once_each(llm):
    settings = GenerationSettings(max_tokens=5, greedy_ratio=1.0)
    prompts = [[1 + number, 5, 6] for number in range(9)]
    generator = TextGenerator(llm, settings, prompts=prompts)
    texts = [text for found in generator.run() for text in found]
    assert sorted(list(text.token_ids[:3]) for text in texts) == prompts
    assert {text.answer_start for text in texts} == {3}


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"own_ratio is 1\.5"):
        GenerationSettings(own_ratio=1.5)
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0"):
        GenerationSettings(max_tokens=0)


@pytest.mark.slow
def test_workers_answer_and_report_what_fails(model_path):
    engine = {"model": str(model_path), "device": "cpu", "max_num_seqs": 2, "max_model_len": 200}
    settings = GenerationSettings(max_tokens=6, max_text_len=200)
    source = WorkerSource(2, engine, settings, (0, 1))
    try:
        texts = source.answer([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0.0)
        assert sorted(text.token_ids[0] for text in texts) == [1, 4, 7]
        assert math.isclose(texts[0].temperature, 0.0)
    finally:
        source.close()
    broken = WorkerSource(1, engine | {"model": "/nowhere"}, settings, (0, 1))
    try:
        with pytest.raises(ExtkvError, match="failed: ModelFileError"):
            broken.generate(0.1)
    finally:
        broken.close()
