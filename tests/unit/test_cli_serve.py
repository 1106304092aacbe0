"""`extkv serve` before it has a model."""

from __future__ import annotations

from extkv.cli.app import app
from typer.testing import CliRunner


def run(*args: str):
    return CliRunner().invoke(app, ["serve", *args])


def test_an_address_is_needed():
    result = run()
    assert result.exit_code == 2
    assert "--data-parallel-rpc-port" in result.output


def test_a_rank_outside_the_engines_is_refused():
    result = run("--data-parallel-rpc-port", "5", "--data-parallel-rank", "2")
    assert result.exit_code == 1
    assert "--data-parallel-rank is 2, expected less than --data-parallel-size 1" in result.output


def test_an_address_that_is_none_is_refused():
    result = run("--handshake-address", "http://localhost")
    assert result.exit_code == 1
    assert "tcp://host:port or ipc://path" in result.output


def test_a_front_end_that_does_not_answer_is_given_up():
    result = run("--data-parallel-rpc-port", "1", "--handshake-timeout", "0.05")
    assert result.exit_code == 1
    assert "no INIT from the front end within 0.05 s" in result.output
