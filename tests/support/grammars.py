"""Constraints over a vocabulary of single characters, and the masks of an output in plain lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extkv.resolved_sampling import ModelLimits, ResolvedSampling, resolve_sampling_params
from extkv.sampling_params import SamplingParams
from extkv.structured_outputs.compiler import GrammarCompiler
from extkv.structured_outputs.masks import TokenMasks, fill_masks
from extkv.structured_outputs.matcher import TokenMatcher
from extkv.structured_outputs.params import StructuredOutputsParams
from support.letter_tokenizer import LetterTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

# All printable characters, and after them the end of a text.
VOCAB_SIZE = 95
EOS = 94
COMPILER = GrammarCompiler(
    LetterTokenizer(VOCAB_SIZE),  # type: ignore[arg-type]
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
)


def ids(text: str) -> list[int]:
    """Return the tokens of a printable text."""
    return [ord(character) - 32 for character in text]


def text_of(token_ids: Sequence[int]) -> str:
    """Return the characters of tokens, `¶` for the end-of-sequence token."""
    return "".join("¶" if token == EOS else chr(32 + token) for token in token_ids)


def resolved(constraint: dict[str, Any], **fields: Any) -> ResolvedSampling:
    """Return a request's parameters."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **fields)
    limits = ModelLimits(VOCAB_SIZE, 1000, (EOS,), compile_grammar=COMPILER.compile)
    return resolve_sampling_params(params, limits, num_prompt_tokens=1)


def matcher_of(constraint: dict[str, Any], output: str = "", **fields: Any) -> TokenMatcher:
    """Return the place of an output in its constraint."""
    sampling = resolved(constraint, **fields)
    assert sampling.grammar is not None
    matcher = TokenMatcher(sampling.grammar, sampling)
    matcher.append(ids(output))
    return matcher


def masks_of(matcher: TokenMatcher, drafts: Sequence[int] = ()) -> TokenMasks:
    """Return the masks of an output and of each place of its drafts."""
    rows = [(matcher, list(drafts[:place])) for place in range(1 + len(drafts))]
    return fill_masks(rows, VOCAB_SIZE)


def allowed(masks: TokenMasks, place: int = 0) -> str:
    """Return the tokens that a mask allows, as text."""
    words = masks.words[place].tolist()
    tokens = [t for t in range(VOCAB_SIZE) if words[t // 32] % 2**32 >> t % 32 & 1]
    return text_of(tokens)
