"""Text to token ids and back.

Encoding is done by the `tokenizers` library. Decoding is done here from the bytes of each token,
because a stream must hold back the first bytes of a character until the rest has come.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import tokenizers


class Tokenizer:
    """Turn text into token ids and back.

    Attributes:
        vocab_size: Number of token ids.
        stop_token_ids: Ids that end a text.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        token_bytes: list[bytes],
        *,
        stop_token_ids: frozenset[int],
        begins_with_space: bool = False,
    ) -> None:
        """Take a ready encoder.

        Args:
            encoder: Its post-processor adds the tokens that begin or end a text.
            token_bytes: UTF-8 bytes of each token id, empty for control tokens and for ids that no
                token has.
            stop_token_ids: Ids that end a text.
            begins_with_space: Whether encoding puts a space in front of a text.
        """
        self.vocab_size = len(token_bytes)
        self.stop_token_ids = stop_token_ids
        self._encoder = encoder
        self._token_bytes = token_bytes
        self._begins_with_space = begins_with_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; names of special tokens in it count as these tokens.

        Args:
            text: The text.
            add_special_tokens: Whether to add the tokens that begin a text, where the file asks for
                them. A chat template writes its own.

        Raises:
            InvalidArgumentError: If the text holds a lone surrogate, which UTF-8 cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            msg = f"text has a lone surrogate U+{code:04X} at character {error.start}"
            raise InvalidArgumentError(msg) from error
        token_ids: list[int] = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, without control tokens.

        Bytes that are no valid UTF-8 become U+FFFD. The space that encoding put in front of a text
        is taken away again; `IncrementalDetokenizer` keeps it, because it continues a text.

        Raises:
            InvalidArgumentError: If an id is out of range.
        """
        stream = IncrementalDetokenizer(self)
        text = "".join([*map(stream.push, token_ids), stream.finish()])
        return text.removeprefix(" ") if self._begins_with_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes a token stands for, empty for a control token.

        Raises:
            InvalidArgumentError: If the id is out of range.
        """
        if not 0 <= token_id < self.vocab_size:
            msg = f"token id {token_id} is out of range for {self.vocab_size} tokens"
            raise InvalidArgumentError(msg)
        return self._token_bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """Return how the vocabulary writes a token, empty for an id that no token has."""
        name: str | None = self._encoder.id_to_token(token_id)
        return name or ""


class IncrementalDetokenizer:
    """Turn token ids into text as they come, never printing half a character.

    Example:
        >>> stream = IncrementalDetokenizer(tokenizer)  # doctest: +SKIP
        >>> text = "".join(stream.push(token_id) for token_id in token_ids) + stream.finish()
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start at the beginning of a text."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes, possibly none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what is left at the end of the text: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are the characters
    from U+0100 on (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    shifted = {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
