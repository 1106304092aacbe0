"""Greedy decoding of one prompt: prefill in chunks, then one token at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from extkv.engine.growing_cache import GrowingKVCache
from extkv.errors import CapacityError, ExtkvError, InvalidArgumentError
from extkv.models.tokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from extkv.models.llama import LlamaModel
    from extkv.models.loader import LoadedModel
    from extkv.models.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]

# Bounds the memory of one forward pass, and how long Ctrl-C waits.
PREFILL_CHUNK_TOKENS = 512


class NonFiniteLogitsError(ExtkvError, ArithmeticError):
    """The model's largest logit is NaN or infinite, so no token can be chosen."""


@dataclass(frozen=True)
class GenerationResult:
    """Describe one finished generation.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        token_ids: Generated tokens, with the stop token if there was one.
        text: Their text, without control tokens.
        finish_reason: `stop` after a stop token, `length` after `max_tokens`.
        prefill_s: Seconds until the first token.
        decode_s: Seconds from the first token to the last.
        reserved_bytes: Address space of the KV cache.
        committed_bytes: Physical memory of the KV cache at the end, when it is largest.
    """

    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prefill_s: float
    decode_s: float
    reserved_bytes: int
    committed_bytes: int

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of the prefill to the last token."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of `elapsed_s`."""
        return len(self.token_ids) / self.elapsed_s


def generate(
    loaded: LoadedModel,
    prompt_token_ids: Sequence[int],
    *,
    max_tokens: int = 128,
    max_model_len: int | None = None,
    on_text: Callable[[str], None] | None = None,
) -> GenerationResult:
    """Continue a prompt with the most likely token at each step.

    Args:
        loaded: Model and tokenizer.
        prompt_token_ids: The prompt, at least one token.
        max_tokens: Most tokens to generate.
        max_model_len: Most tokens of prompt and output, at most the model's context length (the
            default).
        on_text: Called with each piece of text as it is ready, always whole characters.

    Raises:
        InvalidArgumentError: If the prompt is empty, a token id is out of range, `max_tokens` is
            not positive, or `max_model_len` is out of range.
        CapacityError: If prompt and `max_tokens` together exceed `max_model_len`.
        OutOfMemoryError: If the KV cache cannot grow.
        NonFiniteLogitsError: If the model computes no usable logits.
    """
    length = loaded.config.context_length if max_model_len is None else max_model_len
    stop_token_ids = loaded.tokenizer.stop_token_ids
    text = _TextStream(loaded.tokenizer, on_text)
    token_ids: list[int] = []
    times = [time.perf_counter()]
    with GrowingKVCache(loaded.config, max_model_len=length, dtype=loaded.model.dtype) as cache:
        stream = stream_token_ids(
            loaded.model,
            cache,
            prompt_token_ids,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        for token_id in stream:
            times.append(time.perf_counter())
            token_ids.append(token_id)
            text.push(token_id)
        return GenerationResult(
            num_prompt_tokens=len(prompt_token_ids),
            token_ids=tuple(token_ids),
            text=text.finish(),
            finish_reason="stop" if token_ids[-1] in stop_token_ids else "length",
            prefill_s=times[1] - times[0],
            decode_s=times[-1] - times[1],
            reserved_bytes=cache.reserved_bytes,
            committed_bytes=cache.committed_bytes,
        )


class _TextStream:
    """Turn tokens into text, handing each piece on as soon as it is whole."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], None] | None) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._on_text = on_text
        self._pieces: list[str] = []

    def push(self, token_id: int) -> None:
        self._emit(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """Hand on what is left and return the whole text."""
        self._emit(self._detokenizer.finish())
        return "".join(self._pieces)

    def _emit(self, piece: str) -> None:
        self._pieces.append(piece)
        if piece and self._on_text is not None:
            self._on_text(piece)


def stream_token_ids(
    model: LlamaModel,
    cache: GrowingKVCache,
    prompt_token_ids: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> Iterator[int]:
    """Check the arguments, then return an iterator over the generated tokens.

    Args:
        model: The model.
        cache: Empty cache of the model's layers; it grows as tokens are drawn from the iterator.
        prompt_token_ids: The prompt, at least one token.
        max_tokens: Most tokens to generate.
        stop_token_ids: Tokens after which the iterator ends; the token itself is returned.

    Raises:
        InvalidArgumentError: If the prompt is empty, a token id is out of range, or `max_tokens` is
            not positive.
        CapacityError: If prompt and `max_tokens` together exceed the cache's `max_model_len`.
    """
    _check_request(prompt_token_ids, max_tokens, model.config.vocab_size, cache.max_model_len)
    return _decode(model, cache, prompt_token_ids, max_tokens, stop_token_ids)


def _check_request(
    prompt_token_ids: Sequence[int], max_tokens: int, vocab_size: int, max_model_len: int
) -> None:
    if not prompt_token_ids:
        msg = "the prompt has 0 tokens, expected at least 1"
        raise InvalidArgumentError(msg)
    if max_tokens < 1:
        msg = f"max_tokens is {max_tokens}, expected at least 1"
        raise InvalidArgumentError(msg)
    for index, token_id in enumerate(prompt_token_ids):
        if not 0 <= token_id < vocab_size:
            msg = f"prompt token {index} is {token_id}, out of range for {vocab_size} tokens"
            raise InvalidArgumentError(msg)
    num_tokens = len(prompt_token_ids) + max_tokens
    if num_tokens > max_model_len:
        msg = (
            f"prompt of {len(prompt_token_ids)} tokens and max_tokens {max_tokens} make "
            f"{num_tokens}, max_model_len is {max_model_len}"
        )
        raise CapacityError(msg)


def _decode(
    model: LlamaModel,
    cache: GrowingKVCache,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int],
) -> Iterator[int]:
    for start in range(0, len(prompt_token_ids), PREFILL_CHUNK_TOKENS):
        hidden = _forward(model, cache, prompt_token_ids[start : start + PREFILL_CHUNK_TOKENS])
    for num_left in reversed(range(max_tokens)):
        token_id = choose_token(model.compute_logits(hidden[-1]), cache.num_tokens)
        yield token_id
        if token_id in stop_token_ids or num_left == 0:
            return
        hidden = _forward(model, cache, [token_id])


def _forward(model: LlamaModel, cache: GrowingKVCache, token_ids: Sequence[int]) -> torch.Tensor:
    start = cache.num_tokens
    cache.extend(len(token_ids))
    positions = torch.arange(start, cache.num_tokens)
    return model.forward(torch.tensor(token_ids), positions, cache)


def choose_token(logits: torch.Tensor, position: int) -> int:
    """Return the id of the largest logit, the smallest id among equals.

    Args:
        logits (float, [vocab_size]): Logits of one position.
        position: Where the token will stand, for the error.

    Raises:
        NonFiniteLogitsError: If a logit is NaN or the largest one is infinite.
    """
    token_id = int(logits.argmax())
    largest = float(logits[token_id])
    if not math.isfinite(largest):
        num_nan = int(logits.isnan().sum())
        msg = (
            f"cannot choose a token at position {position}: the largest logit is {largest}, "
            f"{num_nan} of {logits.numel()} are NaN"
        )
        raise NonFiniteLogitsError(msg)
    return token_id
