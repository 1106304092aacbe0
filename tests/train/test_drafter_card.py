"""The model card of a drafter has the numbers of its run's files and arguments, and no others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from extkv.cli.app import app
from extkv.dspark.calibration import Temperatures
from extkv.dspark.train import TextStore
from extkv.dspark.train.report import read_log
from extkv.models.dspark import load_drafter, read_drafter_config
from extkv.models.loader import load_model
from support.chat_model import write_chat_model
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
PROMPTS = ["Name three colours.", "Why?", "Write a poem about rain.", "Count to ten."]
COMMAND = "bench/drafter/smollm2.sh train cuda run --budget-seconds 1234"
HARDWARE = "one device of 56 cores"
SECONDS = 7890.0
SEED = 65
CHECK = {
    "num_rounds": 4321,
    "positions": [{"ece_after": error} for error in (0.0123, 0.0456, 0.0789)],
}
# Names of models and sets of prompts, the licence, the format of weights, both temperatures.
TEMPLATE_NUMBERS = {"2", "135", "2.0", "16", "8", "0", "1"}

pytestmark = pytest.mark.slow


def run_command(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output


def numbers_of(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,]*(?:\.\d+)?(?<!,)", text))


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A tiny run, with what was accepted afterwards and temperatures."""
    folder = tmp_path_factory.mktemp("card")
    model, out, prompts = write_chat_model(folder / "tiny"), folder / "run", folder / "four.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS))
    run_command(
        "train-drafter", "--model", model, "--device", "cpu", "--out", out,
        "--budget-seconds", 2, "--rounds", 1, "--generation-ratio", 0.9, "--max-steps", 45,
        "--max-tokens", 24, "--max-text-len", 300, "--max-num-seqs", 16, "--num-held-out", 2,
        "--batch-tokens", 512, "--batch-blocks", 32, "--num-layers", 1, "--num-drafts", 3,
        "--num-taps", 2, "--markov-rank", 12, "--draft-vocab-size", 48,
    )  # fmt: skip
    drafter = out / "drafter" / "speculators"
    run_command(
        "bench", "accept", model, drafter, "--device", "cpu", "--prompts", prompts,
        "--max-tokens", 24, "--out", out / "accept.json",
    )  # fmt: skip
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    run_command(
        "calibrate", model, drafter, "--device", "cpu", "--chat", "--prompts", questions,
        "--max-tokens", 40, "--min-rounds", 10, "--out", out / "sts.json",
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def packed(run_directory, tmp_path_factory):
    """The folder that is made of the run."""
    out = tmp_path_factory.mktemp("packed") / "drafter"
    check = out.with_name("check.json")
    check.write_text(json.dumps(CHECK))
    command = [
        *(sys.executable, "-m", "bench.drafter.card", run_directory, "--out", out),
        *("--accept", run_directory / "accept.json", "--sts", run_directory / "sts.json"),
        *("--command", COMMAND, "--hardware", HARDWARE, "--seconds", SECONDS),
        *("--check", check, "--seed", SEED),
    ]
    subprocess.run(
        list(map(str, command)), cwd=ROOT, check=True, capture_output=True, timeout=120, text=True
    )
    return out


@pytest.fixture(scope="module")
def card(packed):
    return (packed / "README.md").read_text()


def test_the_folder_is_a_drafter_with_temperatures(run_directory, packed):
    model = load_model(run_directory.parent / "tiny").model
    drafter = load_drafter(packed, model)
    assert len(Temperatures.load(packed / "sts.json").values) == drafter.config.num_drafts
    trained = run_directory / "drafter" / "speculators"
    for path in trained.iterdir():
        assert (packed / path.name).read_bytes() == path.read_bytes()


def test_the_card_says_how_it_was_trained(card):
    assert COMMAND in card
    assert HARDWARE in card
    assert f"{SECONDS:,.0f} s, seed {SEED}" in card


def test_the_card_has_the_size_of_the_run(run_directory, card):
    texts = TextStore.load(run_directory / "texts.npz")
    assert f"{texts.num_tokens:,} tokens" in card
    state = torch.load(run_directory / "checkpoint.pt", weights_only=False)
    assert f"{state['num_steps']:,} steps" in card
    (num_blocks,) = re.findall(r"([\d,]+) blocks", card)
    # The log has six figures of the blocks per second.
    assert int(num_blocks.replace(",", "")) == pytest.approx(state["num_anchors"], rel=1e-5)


def test_the_card_has_the_shape_and_bytes_of_the_drafter(packed, card):
    config = read_drafter_config(packed)
    assert f"drafts {config.num_drafts} tokens at a time" in card
    assert f"layers: {config.backbone.num_layers}" in card
    assert f"taps: {list(config.tap_layer_ids)}" in card
    assert f"of rank {config.markov_rank}" in card
    assert f"drafts {config.num_draft_tokens} of {config.backbone.vocab_size} tokens" in card
    num_bytes = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    assert f"{num_bytes:,} bytes" in card


def test_the_card_has_a_row_for_each_measurement(run_directory, card):
    rows = json.loads((run_directory / "accept.json").read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["acceptance_by_place"])
        line = f"| four | {row['temperature']:.0f} | {row['accepted_length']:.2f} | {shares} |"
        assert line in card.splitlines()


def test_the_card_has_a_row_of_errors_for_each_draft(packed, card):
    fitted = json.loads((packed / "sts.json").read_text())
    places = zip(fitted["ece_before"], fitted["ece_after"], CHECK["positions"], strict=True)
    for number, (before, after, place) in enumerate(places, start=1):
        line = f"| {number} | {before:.1%} | {after:.1%} | {place['ece_after']:.1%} |"
        assert line in card.splitlines()


def test_the_card_has_no_other_number(run_directory, packed, card):
    steps = [line for line in read_log(run_directory / "log.jsonl") if line["event"] == "train"]
    assert len(steps) > 1
    config = read_drafter_config(packed)
    texts = TextStore.load(run_directory / "texts.npz")
    accept = json.loads((run_directory / "accept.json").read_text())
    (num_blocks,) = re.findall(r"([\d,]+) blocks", card)
    known = [
        *config.tap_layer_ids,
        *(config.num_drafts, config.backbone.num_layers, config.markov_rank),
        *(config.num_draft_tokens, config.backbone.vocab_size, texts.num_tokens),
        *(steps[-1]["step"], SECONDS, SEED, accept["max_tokens"]),
        *range(1, 1 + config.num_drafts),
        sum(path.stat().st_size for path in packed.glob("*.safetensors")),
    ]
    shares = [share for row in accept["rows"] for share in row["acceptance_by_place"]]
    shares += [row["accepted_length"] for row in accept["rows"]]
    temperatures = json.loads((packed / "sts.json").read_text())
    known += [temperatures["num_samples"], CHECK["num_rounds"]]
    errors = [*temperatures["ece_before"], *temperatures["ece_after"]]
    errors += [place["ece_after"] for place in CHECK["positions"]]
    allowed = TEMPLATE_NUMBERS | numbers_of(COMMAND + HARDWARE) | {num_blocks}
    allowed |= {f"{number:,.0f}" for number in known} | {f"{share:.2f}" for share in shares}
    allowed |= {f"{100 * error:.1f}" for error in errors}
    assert numbers_of(card) <= allowed
