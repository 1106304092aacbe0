"""`extkv generate` with the real model, in the process and as a program."""

import dataclasses
import json
import re
import signal
import subprocess
import sys

import extkv
import pytest
from extkv.cli import app
from extkv.cli import generate as generate_command
from typer.testing import CliRunner

RUNNER = CliRunner()
SUMMARY = (
    r"\d+ tokens in \d+\.\d s \(\d+\.\d tokens/s\) · "
    r"KV cache: \d+\.\d MiB address space reserved, \d+\.\d MiB committed\n"
)


@pytest.fixture
def run(monkeypatch, loaded):
    monkeypatch.setattr(generate_command, "_load", lambda *_: loaded)
    return lambda *arguments: RUNNER.invoke(app, ["generate", *arguments])


def test_text_goes_to_stdout_and_the_summary_to_stderr(run):
    result = run("The capital of France is", "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout.startswith(" Paris")
    assert result.stdout.endswith("\n")
    assert re.fullmatch(SUMMARY, result.stderr)


def test_json_is_one_object_and_nothing_else(run, loaded):
    result = run("The capital of France is", "--max-tokens", "5", "--json")
    report = json.loads(result.stdout)
    assert result.stderr == ""
    assert list(report) == [
        "token_ids",
        "text",
        "finish_reason",
        "tokens_per_second",
        "reserved_bytes",
        "committed_bytes",
    ]
    assert report["text"] == loaded.tokenizer.decode(report["token_ids"])
    assert report["finish_reason"] == "length"
    assert 0 < report["committed_bytes"] < report["reserved_bytes"]


def test_chat_answers_and_stops(run):
    result = run("What is the capital of France?", "--chat", "--json")
    report = json.loads(result.stdout)
    assert report["text"] == "The capital of France is Paris."
    assert report["finish_reason"] == "stop"


def test_max_model_len_bounds_what_is_reserved(run):
    small = json.loads(run("Hi", "--max-tokens", "2", "--max-model-len", "64", "--json").stdout)
    assert small["reserved_bytes"] < 8 * 2**20


def test_too_many_tokens_end_with_the_numbers(run):
    result = run("Hi", "--max-tokens", "64", "--max-model-len", "64")
    assert result.exit_code == 1
    assert result.stderr.endswith("tokens and max_tokens 64 make 65, max_model_len is 64\n")


def test_max_model_len_above_the_context_is_an_error(run):
    result = run("Hi", "--max-model-len", "8193")
    assert result.exit_code == 1
    assert "max_model_len is 8193, expected 1 to the model's context length 8192" in result.stderr


def test_an_empty_prompt_is_an_error(run):
    result = run("")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: the prompt has 0 tokens, expected at least 1\n"


def test_chat_without_a_template_is_an_error(run, loaded, monkeypatch):
    silent = dataclasses.replace(loaded, chat_template=None)
    monkeypatch.setattr(generate_command, "_load", lambda *_: silent)
    result = run("Hi", "--chat")
    assert result.exit_code == 1
    assert result.stderr.endswith("has no chat template, run without --chat\n")


def test_out_of_memory_ends_the_line_and_exits_with_1(run):
    # One 64 KiB granule of each of the 60 segments holds five blocks, 80 tokens; the prompt has 70.
    extkv.set_host_memory_budget(60 * 65536)
    try:
        result = run("once upon a time there" * 14, "--max-tokens", "400")
    finally:
        extkv.set_host_memory_budget(None)
    assert result.exit_code == 1
    assert result.stdout.endswith("\n")
    assert len(result.stdout) > 5
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_program_reads_a_pipe_and_finds_the_default_model():
    result = subprocess.run(
        [sys.executable, "-m", "extkv", "generate", "--max-tokens", "4"],
        input="The capital of France is\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert re.fullmatch(SUMMARY, result.stderr)


def test_ctrl_c_ends_the_program_without_a_traceback():
    # A test run in the background of a shell hands down SIGINT ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from extkv.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "Once upon a time", "--max-tokens", "2000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == b"\ninterrupted\n"
