"""A random drafter beside SmolLM2: saved, loaded by name, and the answers stay as they are."""

from __future__ import annotations

import json
import re

import pytest
import torch
from extkv import LLM, SamplingParams
from extkv.cli import app
from extkv.models import find_default_model, load_model
from extkv.models.dspark import drafter_config, random_drafter, save_native, save_speculators
from typer.testing import CliRunner

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May.",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def loaded():
    return load_model(find_default_model(), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def drafters(loaded, tmp_path_factory):
    """One drafter in both file formats."""
    config = drafter_config(loaded.config, num_layers=1, block_size=4, markov_rank=8)
    drafter = random_drafter(config, loaded.model, seed=1)
    folder = tmp_path_factory.mktemp("drafters")
    save_native(drafter, folder / "dspark_native")
    save_speculators(drafter, folder / "speculators")
    return folder


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_answers_with_drafts_are_those_without(loaded, drafters):
    options = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
    expected = answers(LLM(loaded, **options))
    for name in ("dspark_native", "speculators"):
        llm = LLM(loaded, drafters / name, **options)
        assert answers(llm) == expected
        assert llm.draft_counts.num_rounds > 0
        llm.close()


def test_the_command_line_says_what_became_of_drafts(drafters):
    command = ["generate", "--raw", "--device", "cpu", "--max-tokens", "4", PROMPTS[0]]
    plain = CliRunner().invoke(app, command)
    drafted = CliRunner().invoke(app, [*command, "--draft", str(drafters / "dspark_native")])
    assert plain.exit_code == drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert "tokens per step in" in drafted.stderr
    assert re.search(r"drafting \d+\.\d\d ms, verifying \d+\.\d\d ms a step", drafted.stderr)
    assert "tokens per step in" not in plain.stderr
    options = ["--draft", str(drafters / "dspark_native"), "--json"]
    as_json = CliRunner().invoke(app, [*command, *options])
    answer, found = map(json.loads, as_json.stdout.splitlines())
    assert len(answer["token_ids"]) == 4
    drafts = found["drafts"]
    assert drafts["num_drafted"][0] == drafts["num_rounds"] > 0
    assert drafts["num_draft_rounds"] >= drafts["num_verifications"] > 0
    assert drafts["draft_s"] > 0
    assert drafts["verify_s"] > 0
    assert drafts["accepted_length"] >= 1
    refused = CliRunner().invoke(app, [*command, "--num-speculative-tokens", "3"])
    assert refused.exit_code == 2
    assert "--draft" in refused.output
