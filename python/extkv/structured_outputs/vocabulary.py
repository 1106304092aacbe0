"""A tokenizer's vocabulary as llguidance takes it: bytes of each token, control tokens apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import llguidance

    from extkv.models.tokenizer import Tokenizer


class TokenVocabulary:
    """The attributes that `llguidance.LLTokenizer` reads.

    Control tokens and those that end a text have no bytes that a grammar could spell; a grammar may
    name them, as in ``<|im_start|>``.

    Attributes:
        tokens: Bytes of each token; the name of a control token; empty for ids that no token has.
        special_token_ids: Control tokens.
        eos_token_id: The main token that ends a text.
        bos_token_id: None: nothing begins a text here.
        is_tokenizer_wrapper: True; what llguidance knows such an object by.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Read every token once.

        Args:
            tokenizer: The tokenizer; its ids beyond `vocab_size` are left out.
            vocab_size: Token ids of the model.
            eos_token_ids: Tokens that end a text, the main one first.
        """
        self._tokenizer = tokenizer
        self._id_of: dict[bytes, int] = {}
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        num_tokens = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_tokens)]
        self.tokens += [b""] * (vocab_size - num_tokens)
        self.special_token_ids: list[int] = []
        for token_id in range(num_tokens):
            if token_id in eos_token_ids or not self.tokens[token_id]:
                name = tokenizer.token_name(token_id)
                self.tokens[token_id] = name.encode()
                if name:
                    self.special_token_ids.append(token_id)
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are a text: the tokenizer's, or else the longest at each place.

        A tokenizer may put a space in front, normalise, or take a text for the name of a control
        token; a grammar must get what it spells.
        """
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        is_text = self._special.isdisjoint(token_ids)
        if is_text and b"".join(self.tokens[token_id] for token_id in token_ids) == data:
            return token_ids
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Spell bytes token by token, as far as the vocabulary can."""
        if not self._id_of:
            for token_id, spelt in enumerate(self.tokens):
                if spelt and token_id not in self._special:
                    # Of equal ones the last: SentencePiece has tokens for bytes before words.
                    self._id_of[spelt] = token_id
        longest = max(map(len, self._id_of), default=0)
        token_ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._id_of), None)
            if end is None:
                break
            token_ids.append(self._id_of[data[start:end]])
            start = end
        return token_ids


def read_vocabulary(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Build llguidance's tokenizer, a trie of the vocabulary; some 0.2 s for 50,000 tokens."""
    import llguidance

    vocabulary = TokenVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return llguidance.LLTokenizer(
        vocabulary,  # type: ignore[arg-type]
        n_vocab=vocab_size,
        eos_token=list(eos_token_ids),
    )
