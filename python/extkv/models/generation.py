"""What a model file says about generating with it: special tokens and sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.models.json_file import JsonObject, read_json

if TYPE_CHECKING:
    from pathlib import Path

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class SamplingDefaults:
    """Hold the sampling parameters a model is published with; None where it names none.

    Attributes:
        do_sample: Whether to sample at all.
        temperature: Divisor of the logits.
        top_k: Number of tokens to choose from.
        top_p: Probability mass to choose from.
        min_p: Least probability relative to the likeliest token.
        repetition_penalty: Divisor of the logits of tokens already there.
        max_new_tokens: Most tokens to generate.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class GenerationDefaults:
    """Hold what a model file says about generating with it.

    Attributes:
        eos_token_ids: Tokens that end a text, in the order of the file.
        bos_token_id: Token that begins a text, or None.
        pad_token_id: Token that fills up batches, or None.
        sampling: Sampling parameters.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()


def read_generation_defaults(
    directory: Path, config: JsonObject, vocab_size: int
) -> GenerationDefaults:
    """Read `generation_config.json`; what it lacks, or a missing file, comes from `config.json`.

    Args:
        directory: The model's directory.
        config: Its `config.json`.
        vocab_size: Number of token ids of the model.

    Raises:
        ModelFileError: If a value has another type, or a token id is out of range.
    """
    path = directory / GENERATION_FILE
    own = read_json(path) if path.exists() else JsonObject(path, {})
    sources = (own, config)
    return GenerationDefaults(
        eos_token_ids=_first_ids(sources, "eos_token_id", vocab_size),
        bos_token_id=_first_id(sources, "bos_token_id", vocab_size),
        pad_token_id=_first_id(sources, "pad_token_id", vocab_size),
        sampling=SamplingDefaults(
            do_sample=own.find("do_sample", bool),
            temperature=own.find("temperature", float),
            top_k=own.find("top_k", int),
            top_p=own.find("top_p", float),
            min_p=own.find("min_p", float),
            repetition_penalty=own.find("repetition_penalty", float),
            max_new_tokens=own.find("max_new_tokens", int),
        ),
    )


def _first_id(sources: tuple[JsonObject, ...], key: str, vocab_size: int) -> int | None:
    for source in sources:
        token_id = source.find(key, int)
        if token_id is not None:
            return _checked(source, key, token_id, vocab_size)
    return None


def _first_ids(sources: tuple[JsonObject, ...], key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the first source that has the key, which is one id or an array."""
    for source in sources:
        value = source.values.get(key)
        if value is not None:
            is_list = isinstance(value, list)
            token_ids = source.find_list(key, int) if is_list else [source.require(key, int)]
            return tuple(
                _checked(source, key, token_id, vocab_size) for token_id in token_ids or ()
            )
    return ()


def _checked(source: JsonObject, key: str, token_id: int, vocab_size: int) -> int:
    if not 0 <= token_id < vocab_size:
        raise source.error(key, f"is {token_id}", f"less than vocab_size {vocab_size}")
    return token_id
