"""`extkv generate`: arguments, prompts and errors, without a model."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from extkv.cli import app
from extkv.cli import generate as generate_command
from extkv.cli.answers import format_summary
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.structured_outputs.params import StructuredOutputsParams
from typer.testing import CliRunner

RUNNER = CliRunner()


def run(*arguments, **options):
    return RUNNER.invoke(app, list(arguments), **options)


@pytest.fixture
def seen(monkeypatch):
    """Ends each run before a model is loaded, and keeps what it was asked."""
    calls = []

    def load(model, **options):
        calls.append((model, options))
        message = "stop here"
        raise InvalidArgumentError(message)

    monkeypatch.setattr(generate_command, "load", load)
    return calls


def test_options_reach_the_engine(seen):
    arguments = "--model m --device cpu --dtype bfloat16 --max-model-len 64 --max-num-seqs 3"
    more = "--gpu-memory-utilization 0.5 --no-extensible"
    result = run("generate", "Hi", *arguments.split(), *more.split())
    assert result.stderr == "error: stop here\n"
    options = {
        "draft": None,
        "speculative_config": None,
        "device": "cpu",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 3,
        "gpu_memory_utilization": 0.5,
        "enable_extensible_kv_cache": False,
    }
    assert seen == [(Path("m"), options)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0, expected a finite number, at least 0"),
        (["--top-p", "0"], "top_p is 0.0, expected a finite number, more than 0"),
        (["--top-k", "-2"], "top_k is -2, expected an integer of at least -1"),
        (["--min-p", "1.5"], "min_p is 1.5, expected a finite number"),
        (["--seed", str(2**64)], f"seed is {2**64}, expected an integer from"),
        (["--regex", "a", "--json-object"], "structured_outputs has regex and json_object"),
        (["--regex", ""], "regex is '', expected a text that is not empty"),
        (["--json-schema", __file__, "--choice", "a"], "structured_outputs has json and choice"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_sampling_options_are_checked_before_the_model_is_loaded(seen, arguments, words):
    result = run("generate", "Hi", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {words}")
    assert result.stderr.count("\n") == 1
    assert seen == []


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--json-schema", "{file}"], {"json": "text"}),
        (["--grammar", "{file}"], {"grammar": "text"}),
        (["--regex", "[0-9]+"], {"regex": "[0-9]+"}),
        (["--choice", "a", "--choice", "b"], {"choice": ("a", "b")}),
        (["--json-object"], {"json_object": True}),
        ([], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_options_of_structured_outputs_reach_the_question(tmp_path, monkeypatch, arguments, fields):
    file, asked = tmp_path / "constraint", []
    file.write_text("text")
    llm = SimpleNamespace(sizing_plan=SimpleNamespace(table=""), close=lambda: None)
    monkeypatch.setattr(generate_command, "load", lambda *_, **__: llm)
    monkeypatch.setattr(
        generate_command, "answer", lambda _llm, questions, **_: asked.extend(questions)
    )
    result = run("generate", "Hi", *(a.format(file=file) for a in arguments))
    assert result.exit_code == 0, result.stderr
    expected = None if fields is None else StructuredOutputsParams(**fields)
    assert asked[0].sampling.structured_outputs == expected


def test_a_constraint_that_is_not_utf_8_is_an_error(tmp_path, seen):
    file = tmp_path / "schema"
    file.write_bytes(b"\xff")
    result = run("generate", "Hi", "--json-schema", str(file))
    assert (result.exit_code, seen) == (1, [])
    assert "is not UTF-8: byte 0xff at offset 0" in result.stderr


def test_standard_input_that_is_not_utf_8_is_an_error():
    result = run("generate", input=b"ab\xff")
    assert result.exit_code == 1
    assert result.stderr == "error: standard input is not UTF-8: byte 0xff at offset 2\n"


def test_no_prompt_on_a_terminal_is_a_usage_error(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(Exception, match="give a prompt, or pipe one in") as caught:
        generate_command._check_sources([], None)
    assert caught.value.exit_code == 2


def test_a_missing_model_file_is_one_line_and_exit_code_1(tmp_path):
    path = tmp_path / "none.gguf"
    result = run("generate", "Hi", "--model", str(path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: model file {path}: cannot be opened: No such file")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [ModelFileError("x is 1, expected 2"), InvalidArgumentError("y")])
def test_typed_errors_end_with_their_text(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(generate_command, "load", fail)
    result = run("generate", "Hi")
    assert (result.exit_code, result.stderr) == (1, f"error: {error}\n")


def test_an_error_outside_the_family_is_not_hidden(monkeypatch):
    def fail(*_, **__):
        message = "a bug"
        raise ZeroDivisionError(message)

    monkeypatch.setattr(generate_command, "load", fail)
    assert isinstance(run("generate", "Hi").exception, ZeroDivisionError)


def test_an_interrupt_ends_with_exit_code_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "load", interrupt)
    result = run("generate", "Hi")
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Hi", "--max-tokens", "0"],
        ["generate", "Hi", "--max-tokens", "many"],
        ["generate", "Hi", "--max-model-len", "0"],
        ["generate", "Hi", "--dtype", "int8"],
        ["generate", "--prompts", "no-such-file"],
        ["generate", "Hi", "--prompts", "pyproject.toml"],
        ["generate", "Hi", "--max-num-seqs", "0"],
        ["generate", "--no-such-option"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize(("num_answers", "start"), [(1, "48 tokens"), (3, "3 answers, 48 tokens")])
def test_summary_states_speed_address_space_and_memory(num_answers, start):
    stats = SimpleNamespace(reserved_bytes=377 * 2**20 + 2**19, committed_bytes=4 * 2**20 + 2**18)
    cache = SimpleNamespace(stats=lambda: stats)
    assert format_summary(num_answers, 48, 3.1, cache) == (
        f"{start} in 3.1 s (15.5 tokens/s) · "
        "KV cache: 377.5 MiB address space reserved, 4.2 MiB committed"
    )


def test_help_lists_the_commands_without_importing_pytorch():
    code = (
        "import sys; from typer.testing import CliRunner; from extkv.cli import app; "
        "print(CliRunner().invoke(app, ['--help']).stdout); assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "generate" in result.stdout
    assert "bench" in result.stdout
    assert "doctor" in result.stdout


def test_version_is_that_of_the_package():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("extkv ")
