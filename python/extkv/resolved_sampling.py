"""Sampling parameters as they apply to one prompt on one model.

Fitting them refuses what only a model can judge, so that the scheduler, the sampler and the text
never meet a value that cannot work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.errors import parameter_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from extkv.sampling_params import SamplingParams
    from extkv.structured_outputs.compiler import Grammar
    from extkv.structured_outputs.params import StructuredOutputsParams


@dataclass(frozen=True)
class ModelLimits:
    """Hold what a request's parameters must fit.

    Attributes:
        vocab_size: Number of token ids of the model.
        max_model_len: Most tokens of prompt and output.
        eos_token_ids: Tokens that end a text, the main one first.
        encode: Turns a text into token ids, adding none; None where there is no tokenizer.
        compile_grammar: Makes a constraint ready; None where there is no tokenizer.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    encode: Callable[[str], Sequence[int]] | None = None
    compile_grammar: Callable[[StructuredOutputsParams], Grammar] | None = None


@dataclass(frozen=True)
class ResolvedSampling:
    """Hold sampling parameters as they apply to one prompt on one model.

    Attributes:
        params: As the user wrote them.
        max_tokens: Most output tokens, those that fit.
        stop: Strings that end the output.
        eos_token_id: The model's main end-of-sequence token; the scheduler judges `ignore_eos`.
        stop_token_ids: Tokens that end the output, with the model's other end-of-sequence tokens.
        late_token_ids: Tokens that must not be chosen before `min_tokens`.
        bad_sequences: Token sequences that must not appear.
        grammar: The compiled `structured_outputs`; None for any text.
    """

    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    late_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


def resolve_sampling_params(
    params: SamplingParams, limits: ModelLimits, *, num_prompt_tokens: int
) -> ResolvedSampling:
    """Fit parameters to a model and a prompt.

    Args:
        params: As the user wrote them.
        limits: The model's.
        num_prompt_tokens: Length of the prompt; less than `max_model_len`.

    Raises:
        InvalidArgumentError: If a token id is out of range, `bad_words` or `structured_outputs`
            need a tokenizer that is not there, `min_tokens` does not fit, or no token may be
            chosen.
        GrammarError: If `structured_outputs` cannot be used.
        UnsupportedRequestError: If they are of a kind that is not supported.
    """
    _check_vocabulary(params, limits.vocab_size)
    num_free = limits.max_model_len - num_prompt_tokens
    if params.min_tokens > num_free:
        expected = f"at most the {num_free} tokens that fit after the prompt"
        raise parameter_error("min_tokens", params.min_tokens, expected)
    main = limits.eos_token_ids[0] if limits.eos_token_ids else None
    stops = dict.fromkeys(params.stop_token_ids or ())
    late = stops | dict.fromkeys(limits.eos_token_ids)
    ends = stops if params.ignore_eos else stops | dict.fromkeys(limits.eos_token_ids[1:])
    resolved = ResolvedSampling(
        params=params,
        max_tokens=num_free if params.max_tokens is None else min(params.max_tokens, num_free),
        stop=tuple(params.stop or ()),
        eos_token_id=main,
        stop_token_ids=tuple(ends),
        late_token_ids=tuple(late) if params.min_tokens > 0 else (),
        bad_sequences=_bad_sequences(params, limits),
        grammar=_grammar(params, limits),
    )
    _check_candidates(resolved, limits.vocab_size)
    return resolved


def _grammar(params: SamplingParams, limits: ModelLimits) -> Grammar | None:
    if params.structured_outputs is None:
        return None
    if limits.compile_grammar is None:
        raise parameter_error("structured_outputs", "set", "none without a tokenizer")
    return limits.compile_grammar(params.structured_outputs)


def _bad_sequences(params: SamplingParams, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of `bad_words_token_ids` and of `bad_words` within and before a text.

    As in vLLM, a word is also bad with a space in front where that is as many tokens, the first of
    them another one.
    """
    sequences = [tuple(sequence) for sequence in params.bad_words_token_ids or ()]
    if params.bad_words and limits.encode is None:
        raise parameter_error("bad_words", list(params.bad_words), "none without a tokenizer")
    for word in params.bad_words or ():
        assert limits.encode is not None
        bare = tuple(limits.encode(word.lstrip()))
        spaced = tuple(limits.encode(" " + word.lstrip()))
        if not bare:
            raise parameter_error("bad_words", word, "words of at least one token")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    fields: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words_token_ids": (t for s in params.bad_words_token_ids or () for t in s),
    }
    for name, token_ids in fields.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise parameter_error(name, token_id, f"token ids below vocab_size {vocab_size}")


def _check_candidates(resolved: ResolvedSampling, vocab_size: int) -> None:
    """Refuse a request none of whose tokens may be chosen, at first or ever."""
    allowed = resolved.params.allowed_token_ids
    excluded = {sequence[0] for sequence in resolved.bad_sequences if len(sequence) == 1}
    excluded.update(resolved.late_token_ids)
    candidates: Collection[int] = range(vocab_size) if allowed is None else allowed
    if len(excluded) < len(set(candidates)):
        return
    if excluded.issuperset(candidates):
        name = "bad_words" if allowed is None else "allowed_token_ids"
        expected = "a token that is no bad word, nor a stop token before min_tokens"
        raise parameter_error(name, f"{len(candidates)} tokens, all excluded", expected)
