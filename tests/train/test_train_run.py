"""A whole run on the host: it improves a tiny drafter, and the engine accepts what was measured."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from extkv.bench.acceptance import AcceptanceSettings, measure_acceptance, table
from extkv.cli.app import app
from extkv.cli.generate import drafter_path
from extkv.cli.train_drafter import read_variant
from extkv.dspark.train import TextStore
from extkv.dspark.train.acceptance import AcceptedLengths, TextAcceptance, measure
from extkv.dspark.train.draft_vocabulary import count_answer_tokens
from extkv.dspark.train.generation import GenerationSettings, TextGenerator
from extkv.dspark.train.report import plot_log, read_log
from extkv.dspark.train.shapes import student_of
from extkv.dspark.train.texts import Text
from extkv.engine.llm import LLM
from extkv.errors import InvalidArgumentError
from extkv.models import find_default_drafter
from extkv.models.dspark import load_drafter, save_speculators
from extkv.models.loader import load_model
from extkv.prompt_files import read_turns
from support.chat_model import write_chat_model
from support.training import tiny_trainer
from typer import BadParameter
from typer.testing import CliRunner

FEW_TOKENS = "few:draft_vocab_size=48"
PROMPTS = ["Name three colours.", "Why?", "Write a poem about rain.", "Count to ten."]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "four.jsonl"
    lines = [{"turns": [PROMPTS[0], "And more?"]}, *({"turns": [text]} for text in PROMPTS[1:])]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def run_command(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def trained(model_path, prompts_path, tmp_path_factory):
    """Train for some steps through the command line, with a log, a checkpoint and drafters."""
    out = tmp_path_factory.mktemp("run") / "out"
    shape = ("--num-layers", 1, "--num-drafts", 3, "--num-taps", 1, "--markov-rank", 32)
    printed = run_command(
        "train-drafter", "--model", model_path, "--device", "cpu", "--out", out,
        "--budget-seconds", 4, "--rounds", 1, "--generation-ratio", 0.9, "--max-steps", 60,
        "--max-tokens", 24, "--max-text-len", 300, "--max-num-seqs", 16, "--num-held-out", 4,
        "--batch-tokens", 1024, "--batch-blocks", 64, "--lr", 5e-3, "--evaluate", prompts_path,
        "--variant", "plain:head=none", "--variant", FEW_TOKENS, *shape,
    )  # fmt: skip
    return out, json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_a_run_makes_a_tiny_drafter_accepted(trained):
    out, results = trained
    # Nothing learnt would be 1 token a round.
    assert results["drafter"]["held-out T=0"]["accepted_length"] > 1.5
    assert results["drafter"]["four T=1"]["accepted_length"] > 1.3
    lines = read_log(out / "log.jsonl")
    steps = [line for line in lines if line["event"] == "train"]
    losses = [line["loss"] for line in steps if line["student"] == "drafter"]
    assert losses[-1] < losses[0]
    assert {line["event"] for line in lines} == {"generated", "train", "evaluation"}
    assert len(TextStore.load(out / "texts.npz")) > 4
    assert json.loads((out / "results.json").read_text())["results"] == results


@pytest.mark.slow
def test_the_engine_accepts_what_was_measured_at_temperature_0(trained, model_path, prompts_path):
    out, results = trained
    text = run_command(
        "bench", "accept", model_path, out / "drafter" / "speculators", "--prompts", prompts_path,
        "--temperature", 0, "--max-tokens", 24, "--device", "cpu", "--json", "--compare",
    )  # fmt: skip
    found = json.loads(text)
    (row,) = found["rows"]
    assert {"commit", "command", "date", "torch"} <= found["environment"].keys()
    assert found["rejection_sample_method"] == "standard"
    assert row["equal_ratio"] == 1.0
    assert row["num_answers"] == 5
    # The engine answers the second turn too, and counts the last round of an answer in full.
    measured = results["drafter"]["four T=0"]["accepted_length"]
    assert row["accepted_length"] == pytest.approx(measured, rel=0.2)


@pytest.mark.slow
def test_acceptance_of_block_verification_can_be_measured(trained, model_path, prompts_path):
    out, _ = trained
    text = run_command(
        "bench", "accept", model_path, out / "drafter" / "speculators", "--prompts", prompts_path,
        "--max-tokens", 24, "--device", "cpu", "--json", "--rejection-sample-method", "block",
    )  # fmt: skip
    found = json.loads(text)
    assert found["rejection_sample_method"] == "block"
    assert all(row["accepted_length"] > 1.3 for row in found["rows"])


def test_the_name_default_stands_for_the_shipped_drafter(tmp_path):
    assert drafter_path(Path("default")) == find_default_drafter()
    assert drafter_path(tmp_path) == tmp_path
    arguments = ["bench", "accept", "default", "nowhere", "--prompts", __file__]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert "nowhere/config.json" in result.output


@pytest.mark.slow
def test_a_baseline_fills_masks_in_without_a_head(trained, model_path, tmp_path):
    out, _ = trained
    run_command(
        "train-drafter", "--model", model_path, "--device", "cpu", "--out", tmp_path / "out",
        "--head", "none", "--layout", "fill-in", "--texts", out / "texts.npz", "--max-steps", 2,
        "--max-tokens", 24, "--num-held-out", 4, "--max-text-len", 300, "--max-num-seqs", 16,
        "--batch-tokens", 1024, "--batch-blocks", 64, "--num-layers", 1, "--num-drafts", 3,
        "--num-taps", 1, "--bigram-steps", 5,
    )  # fmt: skip
    target = load_model(model_path).model
    config = load_drafter(tmp_path / "out" / "drafter" / "speculators", target).config
    assert (config.markov_rank, config.samples_from_anchor, config.num_drafts) == (0, False, 3)


@pytest.mark.slow
def test_a_reduced_vocabulary_is_chosen_from_the_first_texts(trained, model_path):
    out, results = trained
    counts = np.load(out / "token_counts.npy")
    loaded = load_model(model_path)
    drafter = load_drafter(out / "few" / "speculators", loaded.model)
    chosen = drafter.weights.target_ids.tolist()
    assert len(chosen) == 48
    least = min(counts[token] for token in chosen if token not in loaded.tokenizer.stop_token_ids)
    others = np.delete(counts, chosen)
    assert least >= others.max()
    assert results["few"]["held-out T=0"]["accepted_length"] > 1.1


@pytest.mark.slow
def test_counts_that_cannot_be_read_are_refused(trained, model_path, tmp_path):
    out, _ = trained
    (tmp_path / "token_counts.npy").write_bytes(b"no counts")
    result = CliRunner().invoke(
        app,
        ["train-drafter", "--model", str(model_path), "--device", "cpu", "--out", str(tmp_path),
         "--resume", "--texts", str(out / "texts.npz"), "--num-held-out", "1",
         "--max-tokens", "4", "--draft-vocab-size", "48"],
    )  # fmt: skip
    assert result.exit_code != 0
    assert "token_counts.npy cannot be read" in result.output


@pytest.mark.slow
def test_a_run_goes_on_from_its_directory(trained, model_path):
    out, _ = trained
    before = len(read_log(out / "log.jsonl"))
    run_command(
        "train-drafter", "--model", model_path, "--device", "cpu", "--out", out, "--resume",
        "--texts", out / "texts.npz", "--max-steps", 62, "--max-tokens", 24, "--num-held-out", 4,
        "--max-text-len", 300, "--max-num-seqs", 16, "--batch-tokens", 1024, "--batch-blocks", 64,
        "--num-layers", 1, "--num-drafts", 3, "--num-taps", 1, "--markov-rank", 32,
        "--lr", 5e-3, "--variant", "plain:head=none", "--variant", FEW_TOKENS,
    )  # fmt: skip
    added = read_log(out / "log.jsonl")[before:]
    assert {line["step"] for line in added} == {62}


@pytest.mark.slow
def test_a_run_begins_as_the_drafter_of_another(trained, model_path, prompts_path, tmp_path):
    out, results = trained
    few = out / "few" / "speculators"
    printed = run_command(
        "train-drafter", "--model", model_path, "--device", "cpu", "--out", tmp_path / "out",
        "--initial", few, "--texts", out / "texts.npz", "--max-steps", 2, "--max-tokens", 24,
        "--num-held-out", 4, "--max-text-len", 300, "--max-num-seqs", 16, "--batch-tokens", 1024,
        "--batch-blocks", 64, "--num-layers", 1, "--num-drafts", 3, "--num-taps", 1,
        "--markov-rank", 32, "--draft-vocab-size", 48, "--lr", 1e-6, "--evaluate", prompts_path,
    )  # fmt: skip
    found = json.loads(printed.splitlines()[-1])["drafter"]["four T=0"]["accepted_length"]
    assert found == pytest.approx(results["few"]["four T=0"]["accepted_length"], rel=0.01)
    assert not (tmp_path / "out" / "token_counts.npy").exists()
    target = load_model(model_path).model
    ids = [
        load_drafter(path, target).weights.target_ids.tolist()
        for path in (few, tmp_path / "out" / "drafter" / "speculators")
    ]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_processes_of_torchrun_train_one_drafter(model_path, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "extkv", "train-drafter", "--model", model_path, "--device", "cpu",
        "--out", tmp_path, "--budget-seconds", 2, "--rounds", 1, "--generation-ratio", 0.9,
        "--max-steps", 3, "--max-tokens", 12, "--max-text-len", 200, "--max-num-seqs", 4,
        "--num-held-out", 1, "--batch-tokens", 256, "--batch-blocks", 16, "--num-layers", 1,
        "--num-drafts", 2, "--num-taps", 1, "--markov-rank", 8, "--bigram-steps", 2,
        "--draft-vocab-size", 40,
    ]  # fmt: skip
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = [
        subprocess.Popen(
            list(map(str, command)),
            env=os.environ | group | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [process.communicate(timeout=250) for process in running]
    errors = "\n".join(end for _, end in ends)
    assert [process.returncode for process in running] == [0, 0], errors
    # Each has texts of its own; the drafter and its vocabulary are of both.
    stores = [TextStore.load(tmp_path / name) for name in ("texts.npz", "texts.npz.1")]
    assert stores[0].token_ids.tolist() != stores[1].token_ids.tolist()
    counts = sum(count_answer_tokens(store, 4096) for store in stores)
    written = np.load(tmp_path / "token_counts.npy")
    assert written.tolist() == counts[: len(written)].tolist()
    load_drafter(tmp_path / "drafter" / "speculators", load_model(model_path).model)


@pytest.mark.parametrize(
    ("head", "draft_vocab_size"), [("vanilla", 0), ("rnn", 0), ("none", 0), ("vanilla", 64)]
)
def test_rounds_on_a_text_are_those_of_the_engine(model_path, tmp_path, head, draft_vocab_size):
    loaded = load_model(model_path)
    shape = {"num_layers": 1, "num_drafts": 3, "num_taps": 2, "markov_rank": 8}
    settings = student_of("x", loaded.config, head=head, draft_vocab_size=draft_vocab_size, **shape)
    if draft_vocab_size:
        tokens = tuple(range(0, 2 * draft_vocab_size, 2))
        settings = dataclasses.replace(settings, draft_token_ids=tokens)
    trainer = tiny_trainer(settings, target=loaded.model)
    (student,) = trainer.students
    save_speculators(student.model(loaded.model.dtype), tmp_path)
    llm = LLM(loaded, load_drafter(tmp_path, loaded.model), device="cpu", max_num_seqs=4)
    tokens = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    generation = GenerationSettings(max_tokens=30, max_text_len=200, greedy_ratio=1.0)
    store = TextStore()
    for texts in TextGenerator(llm, generation, prompts=tokens).run():
        store.extend(texts)
    counts = llm.draft_counts
    (found,) = measure([student], loaded.model, store, trainer.tap_layer_ids)
    llm.close()
    assert found.num_rounds == pytest.approx(counts.num_rounds, abs=len(PROMPTS))
    # Rounds that reach past the end of an answer are counted otherwise.
    assert found.num_accepted[0] == pytest.approx(counts.num_accepted[0], abs=len(PROMPTS))


def test_rounds_follow_each_other_by_the_chances():
    text = Text(range(10), 1, 0.0, True)
    rows = [[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]
    chances = np.array(rows, np.float32)
    acceptance = TextAcceptance(text, 1, chances, None)
    assert list(acceptance.rounds(np.random.default_rng(0))) == [(0, 2), (3, 1), (5, 3)]


def test_accepted_length_counts_the_token_after_the_drafts():
    lengths = AcceptedLengths()
    lengths.add(3, 2, 3)
    lengths.add(3, 0, 1)
    lengths.add(1, 1, 1)
    assert lengths.accepted_length == pytest.approx(5 / 3)
    assert lengths.to_dict()["acceptance_by_slot"] == [0.6667, 0.5, 0.0]


def test_drawn_rounds_have_the_law_of_the_chances():
    chances = np.full((4000, 2), [0.6, 0.5], np.float32)
    acceptance = TextAcceptance(Text(range(5), 1, 1.0, True), 1, chances, None)
    counts = np.bincount([hits for _, hits in acceptance.rounds(np.random.default_rng(0))])
    assert counts / counts.sum() == pytest.approx([0.4, 0.3, 0.3], abs=0.04)


def test_variants_change_what_they_name():
    base = {"num_layers": 3, "lr": 1e-3, "head": "vanilla", "confidence": True}
    name, values = read_variant("small:num_layers=1,lr=0.01,confidence=false", base)
    assert (name, values) == (
        "small", {"num_layers": 1, "lr": 0.01, "head": "vanilla", "confidence": False},
    )  # fmt: skip
    for text in (":lr=1", "a:depth=1", "a:num_layers=x", "a:confidence=1", "a/b:lr=1"):
        with pytest.raises(BadParameter):
            read_variant(text, base)


def test_prompt_files_without_turns_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    for text, message in (
        ("", "has no prompt"),
        ('{"prompt": "x"}', "line 1: expected an object with turns"),
        ('{"turns": []}', "line 1: turns are"),
        ('{"turns": [1]}', "line 1: turns are"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=message):
            read_turns(path)


def test_an_engine_without_a_drafter_is_refused(model_path, prompts_path):
    llm = LLM(model_path, device="cpu", max_num_seqs=2, max_model_len=64)
    with pytest.raises(InvalidArgumentError, match="has no drafter"):
        measure_acceptance(llm, AcceptanceSettings((prompts_path,)))
    llm.close()
    assert table([]).startswith("prompts")


def test_a_plot_needs_matplotlib_only_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text(
        '{"event": "train", "step": 1, "loss": 2, "student": "x"}\n'
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not plot_log(tmp_path / "log.jsonl", tmp_path / "log.png")
    assert not (tmp_path / "log.png").exists()
