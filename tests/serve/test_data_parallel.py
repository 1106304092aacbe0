"""Several engines behind one front end, with a coordinator in pyzmq: loads, waves, losses.

As with vLLM's engines of dense models, each works alone: it tells its load and nothing of waves.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from extkv.engine.llm import LLM
from extkv.serve import EngineService
from extkv.serve.ready import ready_response
from extkv.transport import CoordinatorAddresses, EngineClient, EngineConnection
from support.core_requests import core_request
from support.waiting import LONG_S, eventually
from support.zmq_coordinator import CoordinatorPeer
from support.zmq_peers import LENGTH, START_DP_WAVE, pack, request_fields, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_ENGINES = 2
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Engines:
    """Services in threads."""

    def __init__(self, model: Any, address: str) -> None:
        self.llms = [
            LLM(model, device="cpu", max_num_seqs=4, max_num_batched_tokens=64)
            for _ in range(NUM_ENGINES)
        ]
        self.services: list[EngineService] = []
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(address, rank)) for rank in range(NUM_ENGINES)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, rank: int) -> None:
        llm = self.llms[rank]
        try:
            connection = EngineConnection(address, rank, reconnect_for_s=0.1)
            service = EngineService(llm, connection)
            self.services.append(service)
            connection.start(
                ready_response(llm, profile="0.32", rank=rank, num_engines=NUM_ENGINES)
            )
            service.run()
        except BaseException as error:  # noqa: BLE001, the test looks at it
            self.errors.append(error)

    def stop(self) -> None:
        """End all of them."""
        for service in self.services:
            service.stop()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        for llm in self.llms:
            llm.close()


@pytest.fixture(params=[False, True], ids=["dense", "waves"])
def deployment(request, tiny_model) -> Iterator[tuple[EngineClient, CoordinatorPeer, Engines]]:
    """A front end, a coordinator that knows no waves or does, and two engines."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(CoordinatorPeer(NUM_ENGINES, has_waves=request.param))
        addresses = CoordinatorAddresses(*coordinator.addresses)
        client = stack.enter_context(EngineClient(num_engines=NUM_ENGINES, coordinator=addresses))
        engines = Engines(tiny_model, client.handshake_address)
        stack.callback(engines.stop)
        client.wait_ready(LONG_S)
        yield client, coordinator, engines
        assert engines.errors == []


def finish(client: EngineClient, names: list[str], num_tokens: int) -> dict[str, list[int]]:
    """Run requests on whichever engine and return their tokens."""
    streams = {name: client.submit(request_of(name, num_tokens)) for name in names}
    return {
        name: [token for output in stream for token in output.new_token_ids]
        for name, stream in streams.items()
    }


def request_of(name: str, num_tokens: int) -> Any:
    from extkv import protocol

    params = protocol.SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return core_request(name, sampling_params=params)


def test_requests_run_on_both_engines_whose_loads_reach_the_coordinator_and_no_wave(deployment):
    client, coordinator, _ = deployment
    tokens = finish(client, [f"r{number}" for number in range(12)], 20)
    assert {len(found) for found in tokens.values()} == {20}
    eventually(lambda: [counts[:2] for counts in coordinator.counts] == [[0, 0], [0, 0]])
    assert {engine for engine, *_ in coordinator.all_counts} == {0, 1}
    most = max(waiting + running for _, waiting, running in coordinator.all_counts)
    assert most > 4, "more than run at once"
    assert any(running == 4 for _, _, running in coordinator.all_counts)
    # Nothing that only engines in lockstep can say.
    assert coordinator.wave_messages == []
    assert coordinator.out_of_order == []
    assert (coordinator.wave, coordinator.is_running) == (0, False)
    if coordinator.has_waves:
        assert coordinator.num_started_waves > 0, "front ends asked for them"
        assert {len(t) for t in finish(client, ["again"], 5).values()} == {5}


def test_a_coordinator_that_goes_away_leaves_engines_and_streams_alone(deployment, caplog):
    client, coordinator, engines = deployment
    # Loads come only from engines that have the coordinator's marker.
    finish(client, [f"r{number}" for number in range(8)], 4)
    eventually(lambda: {engine for engine, *_ in coordinator.all_counts} == {0, 1})
    coordinator.close()
    coordinator.close = lambda: None
    eventually(lambda: caplog.text.count("the coordinator is gone") == NUM_ENGINES)
    tokens = finish(client, ["a", "b", "c"], 8)
    assert {len(found) for found in tokens.values()} == {8}
    assert all(service.num_requests == 0 for service in engines.services)


def test_the_load_is_told_before_a_step_and_after_it(serve, tiny_llm):
    with serve(tiny_llm, coordinator=True) as (front, _):
        front.add(request_fields("r", PROMPT, max_tokens=3, temperature=0.0))
        batches = [unpack(front.puller.recv())]
        while batches[-1][2]["num_running_reqs"] + batches[-1][2]["num_waiting_reqs"] > 0:
            batches.append(unpack(front.puller.recv()))
    loads = [(b[2]["num_waiting_reqs"], b[2]["num_running_reqs"]) for b in batches]
    assert loads == [(1, 0), (0, 1), (0, 0)]
    assert batches[1][2]["kv_cache_usage"] > 0
    assert batches[-1][2]["kv_cache_usage"] == 0
    for batch in batches:
        # Engines that are not in lockstep leave step and wave alone.
        assert (batch[2]["step_counter"], batch[2]["current_wave"]) == (0, 0)
        assert (batch[1], batch[6], batch[7]) == ([], None, None)


@pytest.mark.parametrize("wave", [0, 3])
def test_waves_that_a_coordinator_starts_change_nothing(serve, tiny_llm, wave):
    with serve(tiny_llm, coordinator=True) as (front, served):
        for excluded in (None, 0, 1, b"\x00\x00"):
            front.publisher.send_multipart([START_DP_WAVE, pack([wave, excluded])])
        fields = request_fields("r", PROMPT, max_tokens=2, temperature=0.0)
        fields[12] = 1
        front.add(fields)
        while front.next_output()[5] != LENGTH:
            pass
        assert served.service.num_requests == 0
        while (batch := unpack(front.puller.recv()))[2]["num_running_reqs"] != 0:
            assert (batch[6], batch[7]) == (None, None)
