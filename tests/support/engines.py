"""What end-to-end tests of the batching engine share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from extkv.engine.llm import LLM
    from extkv.outputs import RequestOutput


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """Return the tokens of each request's first output."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Check that nothing is left of any request."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    assert scheduler.step_in_flight is None
    assert not llm.engine.has_unfinished


@contextmanager
def resizing(llm: LLM, sizes: Mapping[int, int]) -> Iterator[None]:
    """Resize the cache before some steps; afterwards it has the last size."""
    step: Callable[[], object] = llm.engine.step
    count = 0

    def resized() -> object:
        nonlocal count
        count += 1
        if count in sizes:
            llm.engine.resize_cache(sizes[count])
            llm.engine.scheduler.check_integrity()
        return step()

    llm.engine.step = resized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        llm.engine.step = step  # type: ignore[method-assign, assignment]
    assert count > max(sizes)
    assert llm.kv_cache.num_blocks == llm.engine.scheduler.num_blocks == sizes[max(sizes)]
