"""How one request wants its tokens chosen: vLLM's names, meanings and defaults, checked once.

What can be judged without a model is refused here; `resolved_sampling` does the rest.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.errors import parameter_error
from extkv.structured_outputs.params import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below it a request is greedy (vLLM's limit).
LEAST_TEMPERATURE = 1e-5
# Most alternatives that `logprobs` and `prompt_logprobs` may ask for (vLLM's default).
MAX_LOGPROBS = 20
_LARGEST_FLOAT32 = 3.4028234663852886e38
_SEED_RANGE = (-(2**63), 2**64 - 1)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Say how the tokens of one request are chosen and where its output ends.

    Attributes:
        n: Number of outputs for the prompt.
        presence_penalty: Subtracted from logits of tokens in the output; in [-2, 2].
        frequency_penalty: Subtracted once per occurrence in the output; in [-2, 2].
        repetition_penalty: Divides positive and multiplies other logits of tokens in prompt or
            output; positive, 1 for none.
        temperature: Divisor of the logits; below 1e-5 the likeliest token is taken.
        top_p: Share of the probability to choose from; in (0, 1].
        top_k: Number of tokens to choose from; 0 or -1 for all.
        min_p: Least probability as a share of the largest one; in [0, 1].
        seed: With it, outputs depend on nothing but the request; None or -1 for the engine's seed.
        stop: Strings that end the output; one string stands for itself.
        stop_token_ids: Tokens that end the output.
        ignore_eos: Whether the model's end-of-sequence tokens are ordinary ones.
        max_tokens: Most output tokens; None for as many as fit.
        min_tokens: Output tokens before which nothing but a length limit ends the output.
        logprobs: Number of likeliest tokens to report beside each output token, at most 20; None
            for no report.
        prompt_logprobs: The same for the prompt's tokens.
        detokenize: Whether to make text at all.
        skip_special_tokens: Whether control tokens have no text.
        include_stop_str_in_output: Whether the text keeps what ended it.
        bad_words: Texts that must not appear.
        bad_words_token_ids: The same as token sequences.
        logit_bias: Added to the logits of some tokens.
        allowed_token_ids: The only tokens that may appear; None for all.
        structured_outputs: What structure the text must have; None for any. A text that a length
            limit or a stop string cuts is the beginning of one. Once nothing can follow in it,
            only tokens that end the output are chosen, `min_tokens` or not; with `ignore_eos` or
            before `min_tokens` they follow each other.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Make sequences tuples and check every value.

        Raises:
            InvalidArgumentError: If a value can never work or two values contradict each other.
        """
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            self._set(name, (texts,) if isinstance(texts, str) else _as_tuple(name, texts))
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise parameter_error(name, text, "non-empty strings")
        self._set("seed", None if self.seed == -1 else self.seed)
        self._check_numbers()
        self._check_flags()
        self._check_tokens()
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature < LEAST_TEMPERATURE

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        limit = _LARGEST_FLOAT32
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, limit, excludes_least=True)
        _check_float("temperature", self.temperature, 0.0, limit)
        _check_float("top_p", self.top_p, 0.0, 1.0, excludes_least=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("n", self.n, 1)
        _check_int("top_k", self.top_k, -1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, *_SEED_RANGE)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_flags(self) -> None:
        flags = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise parameter_error(name, getattr(self, name), "True or False")
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, StructuredOutputsParams):
            raise parameter_error("structured_outputs", asked, "StructuredOutputsParams")

    def _check_tokens(self) -> None:
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        name = "bad_words_token_ids"
        sequences = _as_tuple(name, self.bad_words_token_ids)
        self._set(name, tuple(_token_ids(name, sequence) for sequence in sequences))
        if () in (self.bad_words_token_ids or ()):
            raise parameter_error(name, sequences, "at least one token in each sequence")
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            self._set("allowed_token_ids", allowed)
            if not allowed:
                raise parameter_error("allowed_token_ids", (), "at least one token, or None")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise parameter_error("logit_bias", self.logit_bias, "a mapping of token ids")
            _token_ids("logit_bias", self.logit_bias)
            self._set("logit_bias", dict(self.logit_bias))
            for token_id, bias in self.logit_bias.items():
                _check_float(f"logit_bias[{token_id}]", bias, -_LARGEST_FLOAT32, _LARGEST_FLOAT32)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise parameter_error(
                "min_tokens", self.min_tokens, f"at most max_tokens {self.max_tokens}"
            )
        if self.n > 1 and self.is_greedy:
            raise parameter_error("n", self.n, f"1 with greedy temperature {self.temperature}")
        if self.stop and not self.detokenize:
            raise parameter_error("stop", list(self.stop), "no stop strings with detokenize False")


def request_seed(
    params: SamplingParams, *, index: int = 0, engine_seed: int = 0, request_id: str = ""
) -> int:
    """Return the 64-bit random key of output `index` of a request, as a signed number.

    It is `seed + index`, as in vLLM; without a seed, a hash of engine seed, request and index.
    """
    if params.seed is None:
        text = f"{engine_seed}/{index}/{request_id}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return (params.seed + index + 2**63) % 2**64 - 2**63


def _token_ids(name: str, token_ids: object) -> tuple[int, ...]:
    values = _as_tuple(name, token_ids)
    for token_id in values:
        _check_int(name, token_id, 0)
    return tuple(int(token_id) for token_id in values)  # type: ignore[call-overload]


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise parameter_error(name, value, "a sequence") from None


def _check_int(name: str, value: object, least: int, limit: int | None = None) -> None:
    expected = f"an integer of at least {least}"
    if limit is not None:
        expected = f"an integer from {least} to {limit}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise parameter_error(name, value, expected)
    if int(value) < least or (limit is not None and int(value) > limit):
        raise parameter_error(name, value, expected)


def _check_float(
    name: str, value: object, least: float, limit: float, *, excludes_least: bool = False
) -> None:
    low = f"more than {least:g}" if excludes_least else f"at least {least:g}"
    expected = f"a finite number, {low} and at most {limit:g}"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise parameter_error(name, value, expected)
    number = float(value)
    is_low = number <= least if excludes_least else number < least
    if not math.isfinite(number) or is_low or number > limit:
        raise parameter_error(name, value, expected)
