"""A load that stays as it is: so many requests that decode, and none that ends by itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from extkv.engine import LLM
    from extkv.engine.core import Sequence


class SteadyLoad:
    """Requests driven step by step.

    Attributes:
        llm: The engine; nothing else may run in it.
        context_len: Tokens of each prompt, or of the longest.
    """

    def __init__(
        self,
        llm: LLM,
        context_len: int,
        *,
        prompts: TypingSequence[list[int]] | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Begin without requests.

        Args:
            llm: The engine.
            context_len: Tokens of each prompt, if they are random.
            prompts: Prompts to take in turns instead.
            temperature: Of all requests.

        Raises:
            InvalidArgumentError: If prompts are empty, or leave no room to decode.
        """
        if prompts is not None:
            context_len = max(map(len, prompts), default=0)
        room = llm.config.max_model_len - context_len
        if context_len < 1 or room < 1:
            raise InvalidArgumentError(
                f"prompts of {context_len} tokens leave {room} of max_model_len = "
                f"{llm.config.max_model_len}, expected at least 1 token each"
            )
        self.llm = llm
        self.context_len = context_len
        self._prompts = prompts
        self._params = SamplingParams(
            temperature=temperature, max_tokens=room, ignore_eos=True, detokenize=False
        )
        config = llm.model.config
        self._vocab_size = config.vocab_size
        self._limits = ModelLimits(config.vocab_size, llm.config.max_model_len)
        self._sequences: list[Sequence] = []
        self._num_added = 0

    @property
    def num_requests(self) -> int:
        """Requests that decode."""
        return len(self._sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens decoded by the present requests."""
        return sum(len(sequence.token_ids) for sequence in self._sequences)

    @property
    def num_context_tokens(self) -> int:
        """Prompts and outputs of all requests together."""
        num_prompt_tokens = sum(len(sequence.prompt_token_ids) for sequence in self._sequences)
        return num_prompt_tokens + self.num_tokens

    @property
    def room(self) -> int:
        """Tokens that each request may still get."""
        longest = max((len(sequence.token_ids) for sequence in self._sequences), default=0)
        return self.llm.config.max_model_len - self.context_len - longest

    def resize(self, num_requests: int) -> None:
        """Add or end requests, and run until all of them decode.

        Raises:
            InvalidArgumentError: If the engine runs fewer at once.
        """
        limit = self.llm.config.max_num_seqs
        if num_requests > limit:
            raise InvalidArgumentError(f"{num_requests} requests, the engine runs {limit} at once")
        engine = self.llm.engine
        while self.num_requests > num_requests:
            engine.abort(self._sequences.pop())
        resolved = resolve_sampling_params(
            self._params, self._limits, num_prompt_tokens=self.context_len
        )
        while self.num_requests < num_requests:
            self._num_added += 1
            self._sequences.append(engine.add(self._prompt(), resolved, seed=self._num_added))
        while any(not sequence.token_ids for sequence in self._sequences):
            engine.step()

    def _prompt(self) -> list[int]:
        if self._prompts is not None:
            return self._prompts[(self._num_added - 1) % len(self._prompts)]
        generator = torch.Generator().manual_seed(self._num_added)
        shape = (self.context_len,)
        tokens: list[int] = torch.randint(self._vocab_size, shape, generator=generator).tolist()
        return tokens

    def step_us(self) -> float:
        """Run a step; return its time on the host clock in microseconds.

        Where the host works ahead of the device, the time of one step is not that of its tokens,
        but the median of many is.
        """
        start = time.perf_counter_ns()
        self.llm.engine.step()
        return (time.perf_counter_ns() - start) / 1e3

    def close(self) -> None:
        """End all requests."""
        self.resize(0)
        if self.llm.model.model.device.type == "cuda":
            torch.cuda.synchronize()
