"""`extkv check-draft` on SmolLM2 and a random drafter, and what it prints of other findings."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from extkv.cli import app
from extkv.cli.check_draft import format_report
from extkv.dspark.check import check_draft
from extkv.models import find_default_model, load_model
from extkv.models.dspark import DSparkModel, drafter_config, random_drafter, save_native
from support.echo_pair import LAG, echo_drafter, echo_target, echo_texts
from typer.testing import CliRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS = ["--device", "cpu", "--max-tokens", "20"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread is faster than two that wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    path = find_default_model()
    target = load_model(path, dtype=torch.float32, device=torch.device("cpu")).model
    config = drafter_config(target.config, num_layers=1, block_size=2, markov_rank=8)
    folder = tmp_path_factory.mktemp("drafter")
    save_native(random_drafter(config, target, seed=1), folder)
    return [str(path), str(folder)]


def test_the_command_measures_and_calls_a_random_drafter_useless(draft, tmp_path):
    found = CliRunner().invoke(app, ["check-draft", *draft, *OPTIONS, "--json"])
    assert found.exit_code == 3, found.output
    values = json.loads(found.stdout)
    assert values["is_useless"]
    assert values["num_blocks"] >= 24
    assert len(values["acceptance_by_slot"]) == 2
    names = {row["name"] for row in values["neighbours"]}
    assert names >= {"taps-1", "taps+1", "fill-in", "positions-1", "norm-before", "mask-4"}
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{number} and {number} make"} for number in range(12)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    command = ["check-draft", *draft, *OPTIONS, "--prompts", str(prompts), "--temperature", "0.7"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 3, found.output
    assert "temperature 0.7" in found.stdout
    assert "No reading makes this drafter useful here" in found.stdout


def test_the_command_refuses_what_it_cannot_measure(draft):
    short = CliRunner().invoke(app, ["check-draft", *draft, "--device", "cpu", "--max-tokens", "2"])
    assert short.exit_code == 1
    assert "expected at least 24" in short.stderr
    cold = CliRunner().invoke(app, ["check-draft", *draft, "--temperature", "0"])
    assert cold.exit_code == 2
    assert "expected a positive number" in cold.output


def test_the_report_says_what_to_change():
    target = echo_target()
    texts = [(text, LAG) for text in echo_texts(target, 4, 100, seed=9)]
    right = echo_drafter(target)
    assert "Nothing is clearly better than what the file says." in format_report(
        check_draft(target, right, texts)
    )
    config = dataclasses.replace(right.config, tap_layer_ids=(2, 3))
    wrong = DSparkModel(config, right.weights, vocab_size=target.config.vocab_size)
    text = format_report(check_draft(target, wrong, texts))
    assert "Clearly better: the drafter reads the target one layer earlier" in text
    assert "Change the file: target_layer_ids: [1, 2] instead of [2, 3]. Then check again." in text
    assert "No reading" not in text
