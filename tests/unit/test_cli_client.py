"""`extkv client` against an engine in pyzmq."""

from __future__ import annotations

import threading

from extkv.cli.app import app
from extkv.models import find_default_model
from extkv.models.model_source import open_model
from support.waiting import LONG_S
from support.zmq_peers import ADD, LENGTH, EnginePeer
from typer.testing import CliRunner


def test_a_prompt_is_sent_as_tokens_and_its_text_printed(tmp_path):
    address = f"ipc://{tmp_path}/handshake"
    tokenizer = open_model(find_default_model()).tokenizer
    found = []
    is_done = threading.Event()

    def answer() -> None:
        with EnginePeer(address) as peer:
            peer.start()
            kind, fields = peer.receive()
            assert kind == ADD
            found.append(fields)
            for place, token_id in enumerate(tokenizer.encode(" Paris, of course")):
                peer.send_tokens(fields[0], [token_id], LENGTH if place == 3 else None)
            is_done.wait(LONG_S)

    thread = threading.Thread(target=answer)
    thread.start()
    command = ["client", "The capital of France is", "--address", address, "--max-tokens", "4"]
    result = CliRunner().invoke(app, command)
    is_done.set()
    thread.join(LONG_S)
    assert result.exit_code == 0, result.output
    assert " Paris, of course" in result.output
    assert "4 tokens in" in result.output
    assert "ended by length" in result.output
    assert found[0][1] == tokenizer.encode("The capital of France is")
    assert found[0][3]["_eos_token_id"] in found[0][3]["_all_stop_token_ids"]


def test_engines_that_do_not_come_are_given_up():
    command = ["client", "x", "--address", "tcp://127.0.0.1:0", "--timeout", "0.05"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "ready response of engines [0] within 0.05 s" in result.output
