"""`extkv generate`: arguments, prompts and errors, without a model."""

import io
import subprocess
import sys

import pytest
from extkv.cli import app
from extkv.cli import generate as generate_command
from extkv.engine import GenerationResult
from extkv.errors import InvalidArgumentError, ModelFileError
from typer.testing import CliRunner

RUNNER = CliRunner()


def run(*arguments, **options):
    return RUNNER.invoke(app, list(arguments), **options)


@pytest.fixture
def seen_prompts(monkeypatch):
    """Ends each run after its prompt is read, and keeps the prompt."""
    prompts = []

    def encode(_loaded, text, *, chat):
        prompts.append((text, chat))
        message = "stop here"
        raise InvalidArgumentError(message)

    monkeypatch.setattr(generate_command, "_load", lambda *_: None)
    monkeypatch.setattr(generate_command, "_encode", encode)
    return prompts


def test_prompt_comes_from_the_argument(seen_prompts):
    run("generate", "Hello there")
    assert seen_prompts == [("Hello there", False)]


@pytest.mark.parametrize("arguments", [[], ["-"]], ids=["nothing", "dash"])
def test_prompt_comes_from_standard_input_without_its_last_newline(seen_prompts, arguments):
    run("generate", *arguments, "--chat", input="two\nlines\n\n")
    assert seen_prompts == [("two\nlines\n", True)]


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
        generate_command._read_prompt(None)
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
    def fail(*_):
        raise error

    monkeypatch.setattr(generate_command, "_load", fail)
    result = run("generate", "Hi")
    assert (result.exit_code, result.stderr) == (1, f"error: {error}\n")


def test_an_error_outside_the_family_is_not_hidden(monkeypatch):
    def fail(*_):
        message = "a bug"
        raise ZeroDivisionError(message)

    monkeypatch.setattr(generate_command, "_load", fail)
    assert isinstance(run("generate", "Hi").exception, ZeroDivisionError)


def test_an_interrupt_ends_with_exit_code_130(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "_load", interrupt)
    result = run("generate", "Hi")
    assert (result.exit_code, result.stderr) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Hi", "--max-tokens", "0"],
        ["generate", "Hi", "--max-tokens", "many"],
        ["generate", "Hi", "--max-model-len", "0"],
        ["generate", "Hi", "--dtype", "int8"],
        ["generate", "Hi", "twice"],
        ["generate", "--no-such-option"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_summary_states_speed_address_space_and_memory():
    result = GenerationResult(
        num_prompt_tokens=3,
        token_ids=tuple(range(48)),
        text="",
        finish_reason="length",
        prefill_s=0.6,
        decode_s=2.5,
        reserved_bytes=377 * 2**20 + 2**19,
        committed_bytes=4 * 2**20 + 2**18,
    )
    assert generate_command.format_summary(result) == (
        "48 tokens in 3.1 s (15.5 tokens/s) · "
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
    assert "doctor" in result.stdout


def test_version_is_that_of_the_package():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("extkv ")
