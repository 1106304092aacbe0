"""Compiles constraints for one vocabulary, and keeps the last ones.

llguidance compiles recursively, so a chain of thousands of rules overflows the usual stack and ends
the process (1.9.1). So compilation has a thread of its own with a stack that the longest constraint
cannot fill, and a time limit, after which the request is refused and the thread left alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from extkv.errors import GrammarError
from extkv.structured_outputs.grammar import to_grammar
from extkv.structured_outputs.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    import llguidance

    from extkv.models.tokenizer import Tokenizer
    from extkv.structured_outputs.params import StructuredOutputsParams

# 4 KiB per byte of the longest constraint; the deepest that was found takes some 400 bytes each.
_STACK_BYTES = 512 * 1024 * 1024
_TIME_LIMIT_S = 5.0
_MOST_KEPT = 64
_REASON_LEN = 400


class Grammar(NamedTuple):
    """A compiled constraint.

    Attributes:
        matcher: At the beginning of a text; copied for each output and never moved.
        eos_token_ids: Tokens that end a text of the model, the main one first.
    """

    matcher: llguidance.LLMatcher
    eos_token_ids: tuple[int, ...]


class GrammarCompiler:
    """Compile constraints for the vocabulary of a model.

    The vocabulary is read with the first constraint.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Token ids of the model.
        eos_token_ids: Tokens that end a text, the main one first.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return a constraint, ready to be followed. Blocks up to 5 s; most take milliseconds.

        Raises:
            GrammarError: If it is malformed, uses what llguidance lacks, allows no text of this
                vocabulary, or takes too long; the message has the reason.
            UnsupportedRequestError: If it is of a kind that is not supported.
        """
        if not self._eos_token_ids:
            raise GrammarError("structured_outputs need a model with an end-of-sequence token")
        text = to_grammar(params)
        kept = self._kept.get(text)
        if kept is not None:
            self._kept.move_to_end(text)
            return kept
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(
                self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
        grammar = Grammar(_compiled(self._vocabulary, text), self._eos_token_ids)
        self._kept[text] = grammar
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return grammar


def reason_of(matcher: llguidance.LLMatcher) -> str | None:
    """Return why a matcher cannot go on, in one line; None if it can."""
    if not matcher.is_error():
        return None
    reason = _in_one_line(matcher.get_error().removesuffix("<non-verbose/>"))
    return "no token of the vocabulary can follow" if reason == "NoExtensionBias" else reason


def guarded(call: Callable[[], object]) -> str | None:
    """Call llguidance; return why it failed, in one line, or None.

    A panic in its Rust is no `Exception`, and must end a request and not the engine.
    """
    try:
        call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001, see above
        return _in_one_line(f"{type(error).__name__}: {error}")
    return None


def _compiled(vocabulary: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """Compile on a thread of its own, and look at the first mask: an empty one is a failure."""
    import llguidance

    found: list[llguidance.LLMatcher] = []
    failures: list[str | None] = []

    def work() -> None:
        # Without its state, which repeats the grammar.
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            failures.append(reason_of(first))
        failures.append(reason_of(matcher))
        found.append(matcher)

    thread = threading.Thread(target=lambda: failures.append(guarded(work)), daemon=True)
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    except RuntimeError as error:
        msg = f"no thread with a stack of {_STACK_BYTES} bytes to compile a grammar: {error}"
        raise GrammarError(msg) from error
    finally:
        threading.stack_size(before)
    thread.join(_TIME_LIMIT_S)
    if thread.is_alive():
        msg = f"the constraint takes more than {_TIME_LIMIT_S:g} s to compile"
        raise GrammarError(msg)
    reason = next((reason for reason in failures if reason is not None), None)
    if reason is not None:
        raise GrammarError(f"the constraint cannot be used: {reason}")
    return found[0]


def _in_one_line(text: str) -> str:
    """Return a message without line breaks, and without the middle of a long one."""
    line = " ".join(text.split())
    if len(line) <= _REASON_LEN:
        return line
    half = _REASON_LEN // 2
    return f"{line[:half]} … {line[-half:]}"
