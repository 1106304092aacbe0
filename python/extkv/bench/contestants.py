"""The two that a bench compares: each continues the same prompts, greedily, by a fixed length."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import torch

from extkv import LLM, SamplingParams
from extkv.bench.transformers_model import transformers_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extkv.models import DecoderModel

Prompts = list[list[int]]


class Contestant(Protocol):
    """Continue prompts of one length."""

    def run(self, prompts: Prompts, output_len: int) -> Prompts:
        """Return `output_len` tokens for each prompt, once they are on the host."""


class Engine:
    """extkv's engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, prompts: Prompts, output_len: int) -> Prompts:
        """Return the answers of one batch."""
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """`generate` of transformers with its default cache and attention.

    Args:
        model: Its weights are shared.
        batch_size: Most prompts of one call.

    Raises:
        MissingPackageError: If transformers is not installed.
    """

    def __init__(self, model: DecoderModel, batch_size: int) -> None:
        self._model = transformers_model(model)
        self._device = model.device
        self._batch_size = batch_size

    @torch.inference_mode()
    def run(self, prompts: Prompts, output_len: int) -> Prompts:
        """Return the answers, batch by batch."""
        answers: Prompts = []
        for start in range(0, len(prompts), self._batch_size):
            batch = torch.tensor(prompts[start : start + self._batch_size], device=self._device)
            output = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
            )
            answers += output[:, batch.shape[1] :].tolist()
        return answers


def random_prompts(num_prompts: int, input_len: int, vocab_size: int, seed: int) -> Prompts:
    """Return prompts of random tokens; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_prompts, input_len), generator=generator).tolist()


def timed(contestant: Contestant, prompts: Prompts, output_len: int) -> tuple[float, Prompts]:
    """Return the seconds of a run and its answers."""
    start = time.perf_counter()
    answers = contestant.run(prompts, output_len)
    return time.perf_counter() - start, answers


def share_of_equal(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Return the share of answers that are the same, token by token."""
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)
