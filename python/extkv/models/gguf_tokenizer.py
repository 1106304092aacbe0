"""Byte-level BPE tokenizer built from the vocabulary and merges in a GGUF file."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from extkv.errors import ModelFileError
from extkv.models.generation import GenerationDefaults
from extkv.models.tokenizer import Tokenizer, byte_alphabet

if TYPE_CHECKING:
    from extkv.models.gguf_metadata import GGUFMetadata

KNOWN_TOKENIZERS = ("gpt2",)


# How Qwen2's and Qwen3's own tokenizers split a text.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


# `smollm` splits off every number first, so "\n\n1" is "\n\n" and "1". transformers' GGUF path
# ignores the key and differs after two or more white-space characters, and for " ½".
PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [_byte_level()],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _byte_level()],
    "qwen2": [
        pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
        _byte_level(use_regex=False),
    ],
}
NORMALIZERS: dict[str, normalizers.Normalizer] = {"qwen2": normalizers.NFC()}


class TokenType(IntEnum):
    """Name the token types of GGUF that need other treatment than normal text."""

    CONTROL = 3
    USER_DEFINED = 4


def read_gguf_tokenizer(metadata: GGUFMetadata) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelFileError: If the tokenizer or its pre-tokenizer is not known, or vocabulary, merges or
            special token ids are missing or contradict each other.
    """
    _require_known(metadata, "tokenizer.ggml.model", KNOWN_TOKENIZERS)
    tokens = metadata.require_list("tokenizer.ggml.tokens", str)
    types = metadata.require_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        msg = f"model file {metadata.path}: {len(tokens)} tokens have {len(types)} token types"
        raise ModelFileError(msg)
    encoder = _build_encoder(metadata, tokens, types)
    bos_token_id = _token_id(metadata, "bos", len(tokens))
    if bos_token_id is not None and metadata.find("tokenizer.ggml.add_bos_token", bool):
        encoder.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"],
            pair=["bos", "$A", "$B:1"],
            special_tokens=[{"id": "bos", "ids": [bos_token_id], "tokens": ["bos"]}],
        )
    return Tokenizer(
        encoder,
        _decode_vocabulary(metadata, tokens, types),
        stop_token_ids=frozenset(read_gguf_generation_defaults(metadata).eos_token_ids),
    )


def read_gguf_generation_defaults(metadata: GGUFMetadata) -> GenerationDefaults:
    """Read the special tokens of a GGUF file; it has no sampling parameters.

    Raises:
        ModelFileError: If a token id is out of range.
    """
    vocab_size = len(metadata.require_list("tokenizer.ggml.tokens", str))
    ends = (_token_id(metadata, name, vocab_size) for name in ("eos", "eot"))
    return GenerationDefaults(
        eos_token_ids=tuple(token_id for token_id in ends if token_id is not None),
        bos_token_id=_token_id(metadata, "bos", vocab_size),
        pad_token_id=_token_id(metadata, "padding", vocab_size),
    )


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
    if pre_tokenizer in NORMALIZERS:
        encoder.normalizer = NORMALIZERS[pre_tokenizer]
    encoder.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre_tokenizer])
    encoder.decoder = decoders.ByteLevel()
    _add_tokens(encoder, tokens, types)
    return encoder


def _add_tokens(encoder: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Let the names of control and user-defined tokens in a text count as these tokens."""
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            encoder.add_special_tokens([tokenizers.AddedToken(token, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            encoder.add_tokens([tokenizers.AddedToken(token, normalized=False)])


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


def _require_known(metadata: GGUFMetadata, key: str, known: tuple[str, ...]) -> str:
    value = metadata.require(key, str)
    if value not in known:
        msg = f"model file {metadata.path}: {key} is {value!r:.80}, known: {', '.join(known)}"
        raise ModelFileError(msg)
    return value
