"""The tokenizer and chat template of a Hugging Face directory.

`tokenizer.json` is read by the `tokenizers` library and says alone which tokens begin a text: as in
transformers (5.17), `add_bos_token` in `tokenizer_config.json` counts for nothing beside it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers

from extkv.errors import ModelFileError
from extkv.models.chat_template import ChatTemplate
from extkv.models.json_file import JsonObject, read_json, read_text
from extkv.models.tokenizer import Tokenizer, byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# SentencePiece's sign for a space, and its tokens for single bytes.
SPACE_SIGN = "\u2581"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read_tokenizer_config(directory: Path) -> JsonObject:
    """Read `tokenizer_config.json`; a directory without one has an empty one.

    Raises:
        ModelFileError: If it is no JSON object.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    return read_json(path) if path.exists() else JsonObject(path, {})


def read_hf_tokenizer(
    directory: Path, config: JsonObject, *, vocab_size: int, eos_token_ids: Iterable[int]
) -> Tokenizer:
    """Read the tokenizer of a directory.

    Args:
        directory: Holds `tokenizer.json`.
        config: Its `tokenizer_config.json`.
        vocab_size: Number of token ids of the model. The tokenizer may have fewer, because models
            are padded to round sizes; the ids beyond it decode to nothing.
        eos_token_ids: Tokens that end a text, beside the `eos_token` of `config`.

    Raises:
        ModelFileError: If `tokenizer.json` is missing or not valid, has more tokens than the model,
            or lacks the `eos_token` that `config` names.
    """
    path = directory / TOKENIZER_FILE
    encoder = _read_encoder(path)
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    num_tokens = max(vocabulary.values(), default=-1) + 1
    if num_tokens > vocab_size:
        msg = f"model file {path}: the tokenizer has {num_tokens} tokens, the model {vocab_size}"
        raise ModelFileError(msg)
    stop_token_ids = set(eos_token_ids)
    eos_token_id = _find_special_token(config, "eos_token", vocabulary)
    if eos_token_id is not None:
        stop_token_ids.add(eos_token_id)
    style = _find_style(path, encoder)
    return Tokenizer(
        encoder,
        _decode_vocabulary(encoder, vocabulary, vocab_size, is_byte_level=style.is_byte_level),
        stop_token_ids=frozenset(stop_token_ids),
        begins_with_space=style.begins_with_space,
    )


def read_hf_chat_template(directory: Path, config: JsonObject) -> ChatTemplate | None:
    """Read `chat_template.jinja`, or else the template in `tokenizer_config.json`.

    Raises:
        ModelFileError: If the template does not compile.
    """
    path = directory / CHAT_TEMPLATE_FILE
    source = read_text(path) if path.exists() else _find_template(config)
    if source is None:
        return None
    tokens = {name: _special_token_text(config, name) for name in SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in tokens.items() if text is not None}
    name = f"model file {path if path.exists() else config.path}: chat template"
    return ChatTemplate(source, special_tokens=special_tokens, name=name)


def _find_special_token(config: JsonObject, key: str, vocabulary: dict[str, int]) -> int | None:
    text = _special_token_text(config, key)
    if text is None:
        return None
    if text not in vocabulary:
        raise config.error(key, f"is {text!r:.80}", f"a token of {TOKENIZER_FILE}")
    return vocabulary[text]


def _special_token_text(config: JsonObject, key: str) -> str | None:
    """Return the text of a special token, written as a string or as an object with `content`."""
    if isinstance(config.values.get(key), dict):
        entry = config.find_object(key)
        return None if entry is None else entry.require("content", str)
    return config.find(key, str)


def _find_template(config: JsonObject) -> str | None:
    """Return the only template, or the one called `default` of several."""
    value = config.values.get("chat_template")
    if not isinstance(value, list):
        return config.find("chat_template", str)
    for item in value:
        if isinstance(item, dict) and item.get("name") == "default":
            return JsonObject(config.path, item, "chat_template.").require("template", str)
    raise config.error("chat_template", "is an array", "an entry named default in it")


def _read_encoder(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
    # The library raises plain Exception.
    except Exception as error:
        msg = f"model file {path}: not a valid tokenizer: {error}"
        raise ModelFileError(msg) from error
    # A file keeps the settings of whoever saved it; a prompt must never be cut or filled up.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


@dataclass(frozen=True)
class _TokenStyle:
    """Say how tokens are written: in the byte-level alphabet, or else as SentencePiece does."""

    is_byte_level: bool
    begins_with_space: bool


def _find_style(path: Path, encoder: tokenizers.Tokenizer) -> _TokenStyle:
    decoder = encoder.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    parts = {part.get("type"): part for part in [state, *state.get("decoders", [])]}
    if "ByteLevel" in parts:
        return _TokenStyle(is_byte_level=True, begins_with_space=False)
    if parts.keys().isdisjoint({"ByteFallback", "Metaspace"}):
        msg = (
            f"model file {path}: decoder is {state.get('type')}, "
            "known: ByteLevel, ByteFallback, Metaspace"
        )
        raise ModelFileError(msg)
    strips = parts.get("Strip", {}).get("start", 0) > 0
    prepends = parts.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return _TokenStyle(is_byte_level=False, begins_with_space=strips or prepends)


def _decode_vocabulary(
    encoder: tokenizers.Tokenizer,
    vocabulary: dict[str, int],
    vocab_size: int,
    *,
    is_byte_level: bool,
) -> list[bytes]:
    """Return the bytes of each token id: none for special ones, the text itself for added ones."""
    byte_of = byte_alphabet()
    added = encoder.get_added_tokens_decoder()
    decoded = [b""] * vocab_size
    for token, token_id in vocabulary.items():
        if token_id in added:
            decoded[token_id] = b"" if added[token_id].special else token.encode()
        elif not is_byte_level:
            decoded[token_id] = _sentence_piece_bytes(token)
        elif byte_of.keys() >= set(token):
            decoded[token_id] = bytes(byte_of[character] for character in token)
        else:
            # As the library's ByteLevel decoder.
            decoded[token_id] = token.encode()
    return decoded


def _sentence_piece_bytes(token: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_SIGN, " ").encode()
