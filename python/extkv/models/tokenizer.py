"""Byte-level BPE tokenizer built from the vocabulary and merges in a GGUF file.

Encoding is done by the `tokenizers` library. Decoding is done here from the bytes of each token,
because a stream must hold back the first bytes of a character until the rest has come.
"""

from __future__ import annotations

import codecs
from enum import IntEnum
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from extkv.errors import InvalidArgumentError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extkv.models.gguf_metadata import GGUFMetadata

KNOWN_TOKENIZERS = ("gpt2",)


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# `smollm` splits off every number first, so "\n\n1" is "\n\n" and "1". transformers' GGUF path
# ignores the key and differs after two or more white-space characters, and for " ½".
PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [_byte_level()],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _byte_level()],
}


class TokenType(IntEnum):
    """Name the token types of GGUF that need other treatment than normal text."""

    CONTROL = 3
    USER_DEFINED = 4


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
        bos_token_id: int | None,
    ) -> None:
        """Take a ready encoder.

        Args:
            encoder: Adds no token of its own.
            token_bytes: UTF-8 bytes of each token id, empty for control tokens.
            stop_token_ids: Ids that end a text.
            bos_token_id: Put in front of every text, or None.
        """
        self.vocab_size = len(token_bytes)
        self.stop_token_ids = stop_token_ids
        self._encoder = encoder
        self._token_bytes = token_bytes
        self._prefix = [] if bos_token_id is None else [bos_token_id]

    @classmethod
    def from_metadata(cls, metadata: GGUFMetadata) -> Tokenizer:
        """Build the tokenizer of a GGUF file.

        Raises:
            ModelFileError: If the tokenizer or its pre-tokenizer is not known, or vocabulary,
                merges or special token ids are missing or contradict each other.
        """
        _require_known(metadata, "tokenizer.ggml.model", KNOWN_TOKENIZERS)
        tokens = metadata.require_list("tokenizer.ggml.tokens", str)
        types = metadata.require_list("tokenizer.ggml.token_type", int)
        if len(types) != len(tokens):
            msg = f"model file {metadata.path}: {len(tokens)} tokens have {len(types)} token types"
            raise ModelFileError(msg)
        bos_token_id = _token_id(metadata, "bos", len(tokens))
        stop_token_ids = {_token_id(metadata, name, len(tokens)) for name in ("eos", "eot")}
        return cls(
            _build_encoder(metadata, tokens, types),
            _decode_vocabulary(metadata, tokens, types),
            stop_token_ids=frozenset(
                token_id for token_id in stop_token_ids if token_id is not None
            ),
            bos_token_id=bos_token_id if _adds_bos(metadata) else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; names of special tokens in it count as these tokens.

        Args:
            text: The text.
            add_special_tokens: Whether to begin with the BOS token, where the file asks for it. A
                chat template writes its own.

        Raises:
            InvalidArgumentError: If the text holds a lone surrogate, which UTF-8 cannot express.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            msg = f"text has a lone surrogate U+{code:04X} at character {error.start}"
            raise InvalidArgumentError(msg) from error
        token_ids = self._encoder.encode(text).ids
        return self._prefix + token_ids if add_special_tokens else token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, without control tokens.

        Bytes that are no valid UTF-8 become U+FFFD.

        Raises:
            InvalidArgumentError: If an id is out of range.
        """
        stream = IncrementalDetokenizer(self)
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes a token stands for, empty for a control token.

        Raises:
            InvalidArgumentError: If the id is out of range.
        """
        if not 0 <= token_id < self.vocab_size:
            msg = f"token id {token_id} is out of range for {self.vocab_size} tokens"
            raise InvalidArgumentError(msg)
        return self._token_bytes[token_id]


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


def _build_encoder(
    metadata: GGUFMetadata, tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    pre_tokenizer = _require_known(metadata, "tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        msg = (
            f"model file {metadata.path}: {len(tokens)} tokens have only {len(vocabulary)} "
            "different texts"
        )
        raise ModelFileError(msg)
    merges = [
        _split_merge(metadata, m) for m in metadata.require_list("tokenizer.ggml.merges", str)
    ]
    unknown_id = _token_id(metadata, "unknown", len(tokens))
    unknown = None if unknown_id is None else tokens[unknown_id]
    try:
        encoder = tokenizers.Tokenizer(
            models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True)
        )
    # The library raises plain Exception.
    except Exception as error:
        msg = f"model file {metadata.path}: vocabulary and merges do not fit: {error}"
        raise ModelFileError(msg) from error
    encoder.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre_tokenizer])
    encoder.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            encoder.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            encoder.add_tokens([tokenizers.AddedToken(token, normalized=False)])
    return encoder


def _decode_vocabulary(metadata: GGUFMetadata, tokens: list[str], types: list[int]) -> list[bytes]:
    byte_of = byte_alphabet()
    decoded = []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == TokenType.CONTROL:
            decoded.append(b"")
        elif kind == TokenType.USER_DEFINED:
            decoded.append(token.encode())
        else:
            try:
                decoded.append(bytes(byte_of[character] for character in token))
            except KeyError as error:
                msg = (
                    f"model file {metadata.path}: token {token_id} {token!r} has the character "
                    f"{error}, which stands for no byte"
                )
                raise ModelFileError(msg) from error
    return decoded


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are the characters
    from U+0100 on (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    shifted = {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _split_merge(metadata: GGUFMetadata, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        msg = f"model file {metadata.path}: merge {merge!r} is not two tokens with a space between"
        raise ModelFileError(msg)
    return left, right


def _token_id(metadata: GGUFMetadata, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.find(key, int)
    if token_id is not None and not 0 <= token_id < vocab_size:
        msg = (
            f"model file {metadata.path}: {key} is {token_id}, out of range for {vocab_size} tokens"
        )
        raise ModelFileError(msg)
    return token_id


def _adds_bos(metadata: GGUFMetadata) -> bool:
    return metadata.find("tokenizer.ggml.add_bos_token", bool) or False


def _require_known(metadata: GGUFMetadata, key: str, known: tuple[str, ...]) -> str:
    value = metadata.require(key, str)
    if value not in known:
        msg = f"model file {metadata.path}: {key} is {value!r:.80}, known: {', '.join(known)}"
        raise ModelFileError(msg)
    return value
