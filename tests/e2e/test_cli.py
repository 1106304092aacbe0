"""`extkv generate` with the real model, in the process and as a program."""

import dataclasses
import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from extkv.cli import app
from extkv.cli import generate as generate_command
from extkv.engine import LLM
from typer.testing import CliRunner

RUNNER = CliRunner()
SUMMARY = (
    r"\d+ tokens in \d+\.\d s \(\d+\.\d tokens/s\) · "
    r"KV cache: \d+\.\d MiB address space reserved, (\d+\.\d) MiB committed\n"
)
CAPITAL = "The capital of France is"
PROGRAM = [sys.executable, "-m", "extkv", "generate"]


def answer_with(monkeypatch, loaded):
    def load(_model, **options):
        kept = {"max_num_seqs", "gpu_memory_utilization", "enable_extensible_kv_cache"}
        return LLM(loaded, **{name: options[name] for name in kept})

    monkeypatch.setattr(generate_command, "load", load)


@pytest.fixture(scope="module")
def shared_llm(loaded):
    return LLM(loaded, device="cpu")


@pytest.fixture
def run(monkeypatch, shared_llm):
    """Runs the command with one engine for all tests."""
    monkeypatch.setattr(shared_llm, "close", lambda: None)

    def invoke(*arguments):
        monkeypatch.setattr(generate_command, "load", lambda *_, **__: shared_llm)
        return RUNNER.invoke(app, ["generate", *arguments])

    return invoke


@pytest.fixture
def run_afresh(monkeypatch, loaded):
    """Runs the command with an engine of its own each time."""

    def invoke(*arguments):
        answer_with(monkeypatch, loaded)
        return RUNNER.invoke(app, ["generate", *arguments])

    return invoke


@pytest.fixture
def prompt_file(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return ["--prompts", str(path)]

    return write


def answers(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_text_goes_to_stdout_plan_and_summary_to_stderr(run):
    result = run(CAPITAL, "--max-tokens", "5")
    assert result.exit_code == 0
    assert result.stdout.startswith(" Paris")
    assert result.stdout.endswith("\n")
    plan, summary = result.stderr.split("\n\n")[:-1], result.stderr.splitlines(keepends=True)[-1]
    assert plan[0].startswith("other processes")
    assert "46,080 bytes per token" in plan[1]
    assert re.fullmatch(SUMMARY, summary)


def test_committed_memory_fits_the_text(run_afresh):
    for max_tokens in (1, 60):
        result = run_afresh(CAPITAL, "--max-tokens", str(max_tokens))
        committed = float(re.search(SUMMARY, result.stderr)[1])
        # Two blocks of warm-up, then 45 KiB a token and less than 64 KiB a segment to spare.
        assert committed <= 3.8 + max_tokens * 0.045 + 3.8


def test_json_is_one_object_per_prompt_and_nothing_else(run, loaded):
    capital, sky = answers(run(CAPITAL, "The sky is", "--max-tokens", "5", "--json"))
    assert capital["text"] == loaded.tokenizer.decode(capital["token_ids"])
    assert capital["text"].startswith(" Paris")
    assert (capital["id"], sky["id"]) == (0, 1)
    assert capital["finish_reason"] == "length"
    assert capital["num_prompt_tokens"] == 5
    assert capital["prefill_s"] > 0
    assert capital["decode_s"] > 0


def test_chat_answers_and_stops(run):
    (report,) = answers(run("What is the capital of France?", "--chat", "--json"))
    assert report["text"] == "The capital of France is Paris."
    assert report["finish_reason"] == "stop"


def test_each_prompt_of_a_batch_is_answered_as_it_is_alone(run):
    prompts = [CAPITAL, "Once upon a time", "def fibonacci(n):"]
    batch = answers(run(*prompts, "--max-tokens", "12", "--json"))
    for prompt, report in zip(prompts, batch, strict=True):
        (alone,) = answers(run(prompt, "--max-tokens", "12", "--json"))
        assert alone["token_ids"] == report["token_ids"]


def test_a_file_gives_prompts_messages_and_turns(run, prompt_file):
    question = "What is the capital of France?"
    lines = [
        {"prompt": CAPITAL, "id": "raw", "max_tokens": 3},
        {"messages": [{"role": "user", "content": question}]},
        {"turns": [question, "And of Italy?"]},
    ]
    reports = answers(run(*prompt_file(*lines), "--max-tokens", "16", "--json"))
    assert [(r["id"], r["turn"]) for r in reports] == [("raw", 0), (1, 0), (2, 0), (2, 1)]
    assert len(reports[0]["token_ids"]) == 3
    assert reports[1]["text"] == reports[2]["text"] == "The capital of France is Paris."
    assert reports[3]["num_cached_tokens"] > 0


def test_a_file_as_text_has_titles(run, prompt_file):
    lines = [{"prompt": CAPITAL, "id": "x"}, {"prompt": "The sky is"}]
    result = run(*prompt_file(*lines), "--max-tokens", "3")
    first, second, rest = result.stdout.split("\n\n")
    assert first.startswith(f"[x] {CAPITAL}\n Paris")
    assert second.lstrip("\n").startswith("[1] The sky is\n")
    assert rest == "" or rest.isspace()


def test_seeds_repeat_and_differ(run):
    options = [CAPITAL, "--temperature", "1.5", "--max-tokens", "8", "--json", "--seed"]
    first, again, other = (answers(run(*options, seed))[0] for seed in ("1", "1", "2"))
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


@pytest.mark.parametrize("options", [["--no-extensible"], ["--max-num-seqs", "1"]], ids=" ".join)
def test_the_memory_path_changes_no_token(run, run_afresh, options):
    arguments = [CAPITAL, "Once upon", "--max-tokens", "6", "--json"]
    other = answers(run_afresh(*arguments, *options))
    plain = answers(run(*arguments))
    assert [r["token_ids"] for r in plain] == [r["token_ids"] for r in other]


def test_an_empty_prompt_is_an_error(run):
    result = run("")
    assert (result.exit_code, result.stdout) == (1, "")
    message = r"error: request \d+ has an empty prompt: at least 1 token is needed"
    assert re.fullmatch(message, result.stderr.splitlines()[-1])


def test_chat_without_a_template_is_an_error(loaded, monkeypatch):
    answer_with(monkeypatch, dataclasses.replace(loaded, chat_template=None))
    result = RUNNER.invoke(app, ["generate", "Hi", "--chat"])
    assert result.exit_code == 1
    assert result.stderr.endswith("has no chat template\n")


def test_out_of_memory_ends_the_line_and_exits_with_1(monkeypatch, loaded, host_budget):
    def load(*_, **__):
        llm = LLM(loaded, device="cpu")
        # A 64 KiB granule of each of the 60 segments holds four blocks, 64 tokens; the prompt: 45.
        host_budget(60 * 65536)
        return llm

    monkeypatch.setattr(generate_command, "load", load)
    prompt = "once upon a time there" * 9
    result = RUNNER.invoke(app, ["generate", prompt, "--max-tokens", "400"])
    assert result.exit_code == 1
    assert result.stdout.endswith("\n")
    assert len(result.stdout) > 5
    assert result.stderr.splitlines()[-1].startswith("error: cannot commit")


def test_logits_without_a_token_are_an_error_after_the_text(monkeypatch, loaded):
    llm = LLM(loaded, device="cpu")
    run_step, num_steps = llm.engine.runner.run, 0

    def poisoned(*arguments, **options):
        nonlocal num_steps
        num_steps += 1
        logits = run_step(*arguments, **options)
        return logits if num_steps < 4 else torch.full_like(logits, torch.nan)

    monkeypatch.setattr(llm.engine.runner, "run", poisoned)
    monkeypatch.setattr(generate_command, "load", lambda *_, **__: llm)
    result = RUNNER.invoke(app, ["generate", CAPITAL])
    assert result.exit_code == 1
    assert result.stdout.startswith(" Paris")
    message = "error: 1 of 1 answers broke off: the logits hold NaN\n"
    assert result.stderr.endswith(message)


def test_program_reads_a_pipe_and_finds_the_default_model():
    result = subprocess.run(
        [*PROGRAM, "--max-tokens", "4"],
        input=f"{CAPITAL}\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert re.search(SUMMARY, result.stderr)
    assert "loading" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "8193"], "max_model_len is 8193, expected 1 to 8192"),
        (["--device", "gpu"], "device must be a cpu or cuda device, got 'gpu'"),
        (["--model", "pyproject.toml"], "model file pyproject.toml"),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization is 0.0, expected (0, 1]"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_engine_refuses_is_one_line(options, message):
    result = RUNNER.invoke(app, ["generate", "Hi", *options])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_prints_what_is_there_and_exits_with_130():
    # A test run in the background of a shell hands down SIGINT ignored.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from extkv.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "generate", "Once upon a time", "Two", "--json"]
    text = [*command[:-2], "--max-tokens", "2000"]
    for arguments, is_json in ((text, False), ([*command, "--max-tokens", "2000"], True)):
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
            if not is_json:
                assert process.stdout.read(1)
            else:
                while not process.stderr.readline().startswith(b"not more blocks"):
                    pass
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 130
        lines = stderr.decode().splitlines(keepends=True)
        assert lines[-1] == "interrupted\n"
        assert "Traceback" not in stderr.decode()
        if is_json:
            reports = [json.loads(line) for line in stdout.splitlines()]
            assert {report["finish_reason"] for report in reports} <= {"abort"}
        else:
            assert stdout.endswith(b"\n")
            assert any(re.fullmatch(SUMMARY, line) for line in lines)


def test_a_closed_pipe_is_no_traceback():
    process = subprocess.Popen(
        [*PROGRAM, "Once upon a time", "--max-tokens", "500"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read().decode()
        assert process.wait(timeout=120) == 1
    assert "Traceback" not in stderr
    assert "Error" not in stderr


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(given, expected, run_python):
    """OpenMP reads the variable when PyTorch is loaded, so it must be set before."""
    result = run_python(f"""
        import os, sys
        os.environ.pop("OMP_WAIT_POLICY", None)
        if {given!r}:
            os.environ["OMP_WAIT_POLICY"] = {given!r}
        from extkv.cli import app, main
        app.__class__.__call__ = lambda *_: print(
            os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules
        )
        main()
    """)
    assert result.stdout.split() == [expected, "False"], result.stderr
