"""Vocabularies of tokenizers as a grammar sees them: bytes, control tokens, spaces in front."""

from __future__ import annotations

import json

import numpy as np
import pytest
from extkv.errors import GrammarError
from extkv.models.hf_tokenizer import read_hf_tokenizer, read_tokenizer_config
from extkv.structured_outputs.compiler import GrammarCompiler
from extkv.structured_outputs.params import StructuredOutputsParams
from extkv.structured_outputs.vocabulary import TokenVocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "ab", "▁ab", "\u00e9"]
SIZE = 300


def sentence_piece(directory):
    """A tokenizer that puts a space in front of a text and spells what it lacks in bytes."""
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *BYTES, *WORDS])}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    encoder = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    encoder.add_special_tokens(["<s>", "</s>"])
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    config = read_tokenizer_config(directory)
    return read_hf_tokenizer(directory, config, vocab_size=SIZE, eos_token_ids=())


@pytest.fixture
def tokenizer(tmp_path):
    return sentence_piece(tmp_path)


def id_of(word: str) -> int:
    return 2 + 256 + WORDS.index(word)


def allowed_after(tokenizer, constraint: dict, token_ids=()) -> list[int]:
    compiler = GrammarCompiler(tokenizer, vocab_size=SIZE, eos_token_ids=(1,))
    matcher = compiler.compile(StructuredOutputsParams(**constraint)).matcher.deep_copy()
    assert matcher.consume_tokens(list(token_ids))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


def test_control_tokens_have_names_and_the_rest_bytes(tokenizer):
    vocabulary = TokenVocabulary(tokenizer, vocab_size=SIZE, eos_token_ids=(1,))
    assert vocabulary.special_token_ids == [0, 1]
    assert vocabulary.tokens[:3] == [b"<s>", b"</s>", b"\0"]
    assert vocabulary.tokens[id_of("▁ab")] == b" ab"
    assert vocabulary.tokens[SIZE - 1] == b""


def test_a_space_that_the_tokenizer_puts_in_front_is_none_of_the_text_s(tokenizer):
    vocabulary = TokenVocabulary(tokenizer, vocab_size=SIZE, eos_token_ids=(1,))
    assert tokenizer.encode("ab", add_special_tokens=False) == [id_of("▁ab")]
    assert vocabulary("ab") == [id_of("ab")]
    assert vocabulary(" ab") == [id_of("▁ab")]
    assert id_of("ab") in allowed_after(tokenizer, {"regex": "ab"})
    assert id_of("▁ab") not in allowed_after(tokenizer, {"regex": "ab"})


def test_bytes_spell_what_no_word_does(tokenizer):
    duck = "\U0001f986".encode()
    token_ids = []
    for byte in duck:
        assert 2 + byte in allowed_after(tokenizer, {"regex": "[^x]"}, token_ids)
        token_ids.append(2 + byte)
    assert allowed_after(tokenizer, {"regex": "[^x]"}, token_ids) == [1]


def test_control_tokens_come_by_name_only(tokenizer):
    assert 0 not in allowed_after(tokenizer, {"regex": "<s>"})
    assert allowed_after(tokenizer, {"grammar": 'start: <s> "a"'}) == [0]
    assert id_of("a") in allowed_after(tokenizer, {"grammar": 'start: <s> "a"'}, [0])
    with pytest.raises(GrammarError, match=r'unknown special token: "<t>"'):
        allowed_after(tokenizer, {"grammar": "start: <t>"})
