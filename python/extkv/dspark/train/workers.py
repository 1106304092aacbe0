"""Processes that generate texts beside the trainer: the engine's host work is one core's."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from extkv.dspark.train.generation import GenerationSettings, TextGenerator
from extkv.errors import ExtkvError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from extkv.dspark.train.texts import Text
    from extkv.engine.llm import LLM

_START_TIMEOUT_S = 180.0
# What a worker may take past its deadline: a step, and sending its texts.
_GRACE_S = 30.0


class TextSource(Protocol):
    """Something that generates texts for a while."""

    def generate(self, seconds: float) -> list[Text]:
        """Return the texts of some seconds."""
        ...

    def answer(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[Text]:
        """Return the answers to prompts that are short enough, in any order."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class LocalSource:
    """An engine in this process."""

    def __init__(
        self, make_engine: Callable[[], LLM], settings: GenerationSettings, share: tuple[int, int]
    ) -> None:
        """Start the engine.

        Args:
            make_engine: Returns the engine.
            settings: What is generated.
            share: Which of how many generators this is.
        """
        self._llm, self._settings = make_engine(), settings
        self._generator = TextGenerator(self._llm, settings, share=share)

    def generate(self, seconds: float) -> list[Text]:
        """See `TextSource.generate`."""
        deadline = time.perf_counter() + seconds
        return [text for texts in self._generator.run(deadline=deadline) for text in texts]

    def answer(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[Text]:
        """See `TextSource.answer`."""
        settings = replace(self._settings, greedy_ratio=0.0 if temperature > 0 else 1.0)
        generator = TextGenerator(self._llm, settings, prompts=prompts)
        return [text for texts in generator.run() for text in texts]

    def close(self) -> None:
        """Close the engine."""
        self._llm.close()


class WorkerSource:
    """Engines in processes of their own, all on one device.

    Their texts are those of the clock: how many there are differs from run to run.
    """

    def __init__(
        self,
        num_workers: int,
        engine: dict[str, Any],
        settings: GenerationSettings,
        share: tuple[int, int],
    ) -> None:
        """Start the processes; they load while the caller goes on.

        Args:
            num_workers: How many.
            engine: Arguments of `LLM`, which can be sent to another process.
            settings: What is generated.
            share: Which of how many groups of workers this is.
        """
        context = multiprocessing.get_context("spawn")
        self._workers = []
        for index in range(num_workers):
            ours, theirs = context.Pipe()
            number = (share[0] * num_workers + index, share[1] * num_workers)
            process = context.Process(
                target=_serve, args=(theirs, engine, settings, number), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._is_ready = False

    def generate(self, seconds: float) -> list[Text]:
        """See `TextSource.generate`; the time to load is not counted.

        Raises:
            ExtkvError: If a worker failed or does not answer.
        """
        return self._ask([(seconds,)] * len(self._workers), seconds + _GRACE_S)

    def answer(self, prompts: Sequence[Sequence[int]], temperature: float) -> list[Text]:
        """See `TextSource.answer`; raises what `generate` does."""
        count = len(self._workers)
        questions = [(prompts[index::count], temperature) for index in range(count)]
        return self._ask(questions, _START_TIMEOUT_S)

    def _ask(self, questions: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Text]:
        if not self._is_ready:
            for _, connection in self._workers:
                _receive(connection, _START_TIMEOUT_S)
            self._is_ready = True
        for (_, connection), question in zip(self._workers, questions, strict=True):
            connection.send(question)
        found: list[Text] = []
        for _, connection in self._workers:
            found += _receive(connection, timeout_s)
        return found

    def close(self) -> None:
        """End the processes."""
        for _, connection in self._workers:
            with suppress(OSError):
                connection.send(None)
        for process, connection in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()


def _receive(connection: Connection, timeout_s: float) -> list[Text]:
    try:
        answer = connection.recv() if connection.poll(timeout_s) else None
    except EOFError as error:
        raise ExtkvError("a process that generates texts died") from error
    if answer is None:
        raise ExtkvError(f"a process that generates texts did not answer in {timeout_s:.0f} s")
    if isinstance(answer, str):
        raise ExtkvError(f"a process that generates texts failed: {answer}")
    texts: list[Text] = answer
    return texts


def _serve(
    connection: Connection,
    engine: dict[str, Any],
    settings: GenerationSettings,
    share: tuple[int, int],
) -> None:
    """Answer a number of seconds, or prompts and a temperature, with texts, until told to end."""
    # Imported here: the parent of a spawned process imports this module too.
    from extkv.engine.llm import LLM

    try:
        torch.set_num_threads(1)
        source = LocalSource(lambda: LLM(**engine), settings, share)
        connection.send([])
        while (question := connection.recv()) is not None:
            is_timed = len(question) == 1
            texts = source.generate(*question) if is_timed else source.answer(*question)
            connection.send(texts)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:  # noqa: BLE001, the parent says what went wrong
        with suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
