"""A hand on an engine's drafts: none, a fixed number of each request, or what the schedule says."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.engine import LLM


class VerifyPin:
    """Set how many drafts an engine verifies, between two of its steps.

    Attributes:
        llm: The engine.
        num_drafts: Most drafts of a request; 0 without a drafter.
    """

    def __init__(self, llm: LLM) -> None:
        """Take an engine as it is."""
        self.llm = llm
        drafting = llm.engine.drafting
        self.num_drafts = 0 if drafting is None else drafting.num_drafts

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots of a request past its tokens."""
        drafting = self.llm.engine.drafting
        return 1 if drafting is None else 1 + drafting.num_lookahead_tokens

    @property
    def tiers(self) -> tuple[int, ...]:
        """Numbers of tokens with a captured graph, ascending; none on the host."""
        return tuple(self.llm.engine.runner.graph_sizes)

    def set(self, verify_len: int | None) -> None:
        """Verify so many drafts of each request from now on; None drafts nothing.

        Raises:
            InvalidArgumentError: If the drafter makes fewer.
        """
        if verify_len is not None and not 0 <= verify_len <= self.num_drafts:
            raise InvalidArgumentError(
                f"{verify_len} drafts to verify, expected 0 to {self.num_drafts}"
            )

    def release(self) -> None:
        """Hand the drafts back to the engine."""

    def num_executed_tokens(self, num_tokens: int) -> int:
        """Return the tokens that run for so many: those of the next captured graph."""
        tiers = self.tiers
        index = bisect.bisect_left(tiers, num_tokens)
        return tiers[index] if index < len(tiers) else num_tokens

    def fits(self, num_requests: int, num_tokens: int) -> bool:
        """Tell whether the cache holds so many requests of so many tokens each."""
        config = self.llm.config
        num_blocks = -(-num_tokens // config.block_size)
        return num_requests * num_blocks <= self.llm.engine.scheduler.num_blocks
