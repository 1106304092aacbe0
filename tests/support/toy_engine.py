"""An engine in miniature over the scheduler: its model computes sums, its cache holds token ids.

The next token depends on every token before it, read back through block tables. So a wrong slot, a
lost block or a stale prefix changes the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from extkv.sched import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.sched import FinishReason, RequestOutput, StepPlan

VOCAB_SIZE = 97
BLOCK_SIZE = 4


def make_scheduler(**limits: Any) -> Scheduler:
    """Make a scheduler with room for everything, but for the limits given."""
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK_SIZE,
        "num_blocks": 32,
    }
    return Scheduler(**(defaults | limits))


def next_token(sequence: Sequence[int]) -> int:
    """Tell what the toy model continues a sequence with."""
    return (sum((index + 1) * token for index, token in enumerate(sequence)) + 5) % VOCAB_SIZE


def expected_text(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Compute the toy model's text without any cache."""
    sequence = list(prompt)
    for _ in range(num_tokens):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class ToyEngine:
    """Runs steps, and collects the text and the end of each request."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = make_scheduler(**limits)
        self.cache = np.full(self.scheduler.num_blocks * BLOCK_SIZE, -1)
        self.texts: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, FinishReason] = {}

    def run_step(self) -> tuple[StepPlan, list[RequestOutput]]:
        plan = self.scheduler.schedule()
        outputs = [] if plan.is_empty else self._report(plan)
        self.scheduler.check_integrity()
        return plan, outputs

    def run(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_unfinished_requests():
            plan, _ = self.run_step()
            assert not plan.is_empty, "somebody always advances"
            plans.append(plan)
        return plans

    def _report(self, plan: StepPlan) -> list[RequestOutput]:
        self.cache[plan.slot_mapping] = plan.input_token_ids
        token_ids: list[int] = []
        token_offsets = [0]
        for row in range(plan.num_requests):
            token_ids += self._sampled(plan, row)
            token_offsets.append(len(token_ids))
        outputs = self.scheduler.update(plan.request_ids, token_offsets, token_ids).requests()
        for output in outputs:
            self.texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        return outputs

    def _sampled(self, plan: StepPlan, row: int) -> list[int]:
        """Accept the row's drafts while the model agrees, then add its own token."""
        start, end = plan.sample_start_loc[row : row + 2].tolist()
        sampled: list[int] = []
        for index in plan.sample_rows[start:end].tolist():
            sampled.append(next_token(self._cached(plan, row, int(plan.positions[index]) + 1)))
            is_last = index + 1 == plan.query_start_loc[row + 1]
            if is_last or plan.input_token_ids[index + 1] != sampled[-1]:
                break
        return sampled

    def _cached(self, plan: StepPlan, row: int, num_tokens: int) -> list[int]:
        positions = np.arange(num_tokens)
        blocks = plan.block_tables[row, positions // BLOCK_SIZE]
        token_ids: list[int] = self.cache[blocks * BLOCK_SIZE + positions % BLOCK_SIZE].tolist()
        return token_ids
