"""The drafter of the package: its files, what is accepted of its drafts, and its temperatures.

`data/make_shipped_drafter.py` recorded hashes and acceptance. What is accepted depends on the
weights, the prompts, and the order in which float32 sums are rounded: on PyTorch's release and on
the processor's vector instructions, but not on the number of threads, which is one. Where two
tokens are almost equally likely, another order can choose the other one.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import extkv
import pytest
from extkv.dspark.calibration import Temperatures
from extkv.engine.llm import LLM
from extkv.errors import ModelFileError
from extkv.models import find_default_drafter
from extkv.models.dspark import load_drafter, read_drafter_config
from extkv.sampling_params import SamplingParams
from support.drafted_engines import STEP_COST
from support.engines import tokens_of
from support.shipped_drafter import MAX_TOKENS, PROMPTS, answer, file_hashes, load_target, threads

RECORD = Path(__file__).parent / "data" / "shipped_drafter.json"
FOLDER = Path(extkv.__file__).parent / "drafters" / "smollm2-135m-instruct"
TEMPERATURES = FOLDER / "sts.json"
MEGABYTE = 1_000_000


def shards() -> list[Path]:
    found = sorted(FOLDER.glob("*.safetensors"))
    assert found
    return found


def recorded_answer(recorded, name: str) -> dict:
    (values,) = [values for values in recorded["answers"] if values["name"] == name]
    return values


@pytest.fixture(scope="module")
def recorded():
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def target():
    return load_target()


@pytest.fixture(scope="module")
def drafter(target):
    return load_drafter(FOLDER, target.model)


@pytest.fixture(scope="module")
def drafted_answers(target, drafter):
    return {found.name: found for found in answer(target, drafter)}


@pytest.fixture(scope="module")
def plain_answers(target):
    return {found.name: found for found in answer(target)}


def test_it_is_the_default_drafter():
    assert find_default_drafter() == FOLDER


def test_its_files_are_those_recorded(recorded):
    assert file_hashes(FOLDER) == recorded["files"]


def test_its_weights_are_small_enough_for_a_repository():
    sizes = [path.stat().st_size for path in shards()]
    assert max(sizes) <= 16 * MEGABYTE
    assert sum(sizes) <= 40 * MEGABYTE


def test_every_prompt_is_recorded(recorded):
    assert [values["name"] for values in recorded["answers"]] == list(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_as_many_drafts_are_accepted_as_recorded(recorded, drafted_answers, name):
    assert drafted_answers[name].to_dict() == recorded_answer(recorded, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_answers_are_those_without_drafts(drafted_answers, plain_answers, name):
    assert drafted_answers[name].token_ids == plain_answers[name].token_ids


def test_its_vocabulary_has_the_tokens_that_end_a_text(target, drafter):
    ends = target.tokenizer.stop_token_ids | set(target.generation.eos_token_ids)
    assert ends
    assert ends <= set(drafter.weights.target_ids.tolist())


@pytest.mark.parametrize("words", ["Apache-2.0", "smollm2.sh train", "ECE"])
def test_the_model_card_names(words):
    assert words in (FOLDER / "README.md").read_text()


def test_the_model_card_names_the_accepted_length():
    assert "accepted length" in (FOLDER / "README.md").read_text().lower()


def test_there_is_a_temperature_for_each_draft():
    num_drafts = read_drafter_config(FOLDER).num_drafts
    assert len(Temperatures.load(TEMPERATURES).values) == num_drafts


def test_confidences_are_calibrated_at_every_place():
    errors = json.loads(TEMPERATURES.read_text())["ece_after"]
    assert len(errors) == read_drafter_config(FOLDER).num_drafts
    assert max(errors) <= 0.03


@pytest.mark.slow
def test_the_engine_schedules_by_the_temperatures(target, drafter, recorded):
    speculative = {
        "verification": "scheduled",
        "step_cost": STEP_COST,
        "confidence": "head",
        "confidence_temperatures": TEMPERATURES,
    }
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 16}
    with threads(1):
        llm = LLM(target, drafter, device="cpu", speculative_config=speculative, **options)
        prompt = llm.chat_prompt([{"role": "user", "content": PROMPTS["jam"]}])
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs = llm.generate([prompt], params, use_tqdm=False)
        llm.close()
    assert tokens_of(outputs) == [recorded_answer(recorded, "jam")["token_ids"]]


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99], ids=["empty", "half", "nearly-whole"])
def test_a_truncated_shard_is_refused(target, tmp_path, kept):
    names = [path.name for path in shards()]
    shutil.copytree(FOLDER, tmp_path / "damaged")
    for name in names:
        path = tmp_path / "damaged" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: int(kept * len(whole))])
        with pytest.raises(ModelFileError, match=re.escape(name)):
            load_drafter(tmp_path / "damaged", target.model)
        path.write_bytes(whole)
