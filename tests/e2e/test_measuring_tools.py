"""`extkv profile`, `calibrate` and `bench schedule` on tiny models on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from extkv.cli import app
from extkv.dspark.calibration import Temperatures
from extkv.dspark.cost import CostTable, StepCost
from extkv.models import load_model
from extkv.models.dspark import drafter_config, random_drafter, save_native
from support.drafters import scramble
from support.hf_reference import make_reference, write_tokenizer
from typer.testing import CliRunner

RUNNER = CliRunner()
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
# Times of a busy machine: what is refused is tested where times are given.
NO_LIMITS = ["--max-spread", "1e9", "--max-residual", "1e9"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    make_reference("Qwen3", max_position_embeddings=1024, **GROUPED).save_pretrained(directory)
    write_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafter")
    model = load_model(target).model
    config = drafter_config(model.config, num_layers=1, block_size=3, markov_rank=8)
    drafter = random_drafter(config, model)
    scramble(drafter, seed=3)
    save_native(drafter, directory)
    return str(directory)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"text {number}"} for number in range(6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def run(*arguments: str):
    result = RUNNER.invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_profile_writes_a_table_that_an_engine_reads(target, drafter, tmp_path):
    out, steps = tmp_path / "cost.json", tmp_path / "steps.json"
    shapes = [
        "--num-requests",
        "1",
        "--num-requests",
        "2",
        "--verify-len",
        "0",
        "--verify-len",
        "1",
    ]
    result = run(
        *("profile", target, "--draft", drafter, "--device", "cpu", "--max-num-seqs", "2"),
        *("--context-len", "4", "--quick", "--json", "--out", str(out), *shapes, *NO_LIMITS),
        *("--steps", str(steps)),
    )
    assert len(json.loads(steps.read_text())["samples"]) == 6
    if result.exit_code == 1:
        # Even without limits on noise: a curve that falls or stays flat is refused, with a reason.
        assert result.stderr.startswith("error: ")
        assert any(word in result.stderr for word in ("flat", "noisy", "off by"))
        assert not out.exists()
        return
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values == json.loads(out.read_text())
    assert values["format"] == "extkv.step_cost.v1"
    source = values["source"]
    assert source["num_drafts"] == "3"
    assert source["command"].startswith(("extkv ", "pytest", "pytest "))
    assert {"device", "driver", "model", "draft", "commit", "dtype", "date"} <= set(source)
    assert len(values["samples"]) == 6
    assert StepCost.load(out).step_us(num_requests=1) > 0


def test_profile_makes_a_table_of_recorded_steps(tmp_path):
    steps = Path(__file__).parents[2] / "bench" / "results" / "sched" / "h200_steps.json"
    out = tmp_path / "cost.json"
    result = run("profile", "--from-steps", str(steps), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "the table is off by 1." in result.stdout
    source = CostTable.load(out).source
    assert source["device"] == "NVIDIA H200"
    assert {"command", "commit", "fit_command", "fit_commit", "fit_date"} <= set(source)
    result = run("profile", "--from-steps", str(steps), "--steps", str(out))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing is measured, but --steps is given" in result.stderr
    # A table's file holds its steps too.
    result = run("profile", "--from-steps", str(out), "--json")
    assert json.loads(result.stdout)["token_us"] == json.loads(out.read_text())["token_us"]


def test_profile_takes_a_shape_with_random_weights(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["profile", str(tmp_path), "--random-weights", "--device", "cpu", "--quick"]
    shapes = ["--num-requests", "1", "--num-requests", "3", "--max-num-seqs", "3"]
    result = run(*arguments, *shapes, "--context-len", "4", *NO_LIMITS)
    if result.exit_code == 0:
        assert "step ms" in result.stdout
    else:
        assert any(word in result.stderr for word in ("flat", "noisy", "off by"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "d", "--random-drafter"], "give the drafter d or a random one, not both"),
        (["--draft", "d", "--random-weights"], "beside random weights take a random one"),
    ],
    ids=["two-drafters", "trained-beside-random"],
)
def test_pairs_that_cannot_be_are_refused(target, arguments, words):
    result = run("profile", target, "--device", "cpu", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr


def test_random_weights_need_a_shape():
    result = run("profile", "--random-weights", "--device", "cpu")
    assert result.exit_code == 1
    assert "random weights need a shape" in result.stderr


def test_calibrate_records_fits_and_draws(target, drafter, prompts, tmp_path):
    rounds, out, plot = (tmp_path / name for name in ("rounds.jsonl", "sts.json", "sts.png"))
    common = ["--min-rounds", "20", "--out", str(out), "--plot", str(plot), "--json"]
    result = run(
        *("calibrate", target, drafter, "--prompts", prompts, "--device", "cpu"),
        *("--max-tokens", "24", "--record", str(rounds), *common),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_rounds"] >= 20
    assert [set(row) >= {"ece_before", "ece_after"} for row in report["positions"]] == [True] * 3
    assert all(row["ece_after"] <= row["ece_before"] + 1e-9 for row in report["positions"][:1])
    values = json.loads(out.read_text())
    assert values["temperatures"] == values["sts_temperatures"]
    assert values["source"]["num_prompts"] == "6"
    assert len(Temperatures.load(out).values) == 3
    assert plot.read_bytes().startswith(b"\x89PNG")

    again = run("calibrate", "--rounds", str(rounds), *common)
    assert again.exit_code == 0, again.output
    again_rows = json.loads(again.stdout)["positions"]
    for row, expected in zip(again_rows, report["positions"], strict=True):
        assert row == pytest.approx(expected, abs=1e-3)

    table = run("calibrate", "--rounds", str(rounds), "--min-rounds", "20")
    assert "ECE before" in table.stdout
    assert len(table.stdout.splitlines()) == 2 + 3

    measured = run("calibrate", "--rounds", str(rounds), "--temperatures", str(out), "--json")
    assert measured.exit_code == 0, measured.output
    for row, expected in zip(json.loads(measured.stdout)["positions"], again_rows, strict=True):
        assert row == pytest.approx(expected, abs=5e-3)


def test_calibrate_refuses_too_few_rounds(target, drafter, prompts):
    result = run(
        *("calibrate", target, drafter, "--prompts", prompts, "--device", "cpu"),
        *("--max-tokens", "6"),
    )
    assert result.exit_code == 1
    assert "1000" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give TARGET, DRAFT and --prompts, or --rounds"),
        (["--rounds", "FILE", "--record", "x"], "--record cannot be given too"),
        (["--rounds", "FILE"], "cannot read the rounds"),
        (["--rounds", "FILE", "--temperatures", "FILE", "--out", "x"], "x cannot be written"),
    ],
    ids=["nothing", "both", "no-rounds", "nothing-fitted"],
)
def test_calibrate_says_what_it_needs(tmp_path, arguments, words):
    path = tmp_path / "rounds.jsonl"
    path.write_text("no rounds\n")
    result = run("calibrate", *(str(path) if part == "FILE" else part for part in arguments))
    assert result.exit_code == 1
    assert words in result.stderr


def test_schedules_are_compared_drawn_and_shown_again(target, drafter, tmp_path):
    cost, out, plot = (tmp_path / name for name in ("cost.json", "schedule.json", "schedule.png"))
    cost.write_text(
        '{"format": "extkv.step_cost.v1", "token_us": [[1, 100.0], [16, 200.0]], '
        '"draft_us": [[1, 20.0]]}'
    )
    result = run(
        *("bench", "schedule", target, "--draft", drafter, "--device", "cpu"),
        *("--acceptance", "0.9,0.5", "--step-cost", str(cost), "--num-requests", "2"),
        *("--fixed", "3", "--steps", "3", "--rounds", "1", "--input-len", "4", "--json"),
        *("--out", str(out), "--plot", str(plot)),
    )
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values == json.loads(out.read_text())
    assert [point["schedule"] for point in values["points"]] == [
        "no drafts",
        "fixed 3",
        "scheduled",
    ]
    assert values["acceptance_rates"] == [0.9, 0.5]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = run("bench", "schedule", "--result", str(out), "--plot", str(plot))
    assert "synthetic acceptance: not lossless" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --draft or --random-drafter"),
        (["--random-drafter", "--acceptance", "much"], "acceptance is 'much'"),
        (["--random-drafter", "--acceptance", "1.5"], r"expected numbers in [0, 1]"),
    ],
    ids=["no-drafter", "no-numbers", "out-of-range"],
)
def test_schedules_that_cannot_be_are_refused(target, arguments, words):
    result = run("bench", "schedule", target, "--device", "cpu", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr
