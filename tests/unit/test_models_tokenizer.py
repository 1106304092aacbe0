"""Tokenizer built from metadata: round trips, streaming and each refusal."""

from pathlib import Path

import pytest
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.gguf_metadata import GGUFMetadata
from extkv.models.gguf_tokenizer import read_gguf_generation_defaults, read_gguf_tokenizer
from extkv.models.tokenizer import IncrementalDetokenizer, byte_alphabet
from hypothesis import given
from hypothesis import strategies as st

LETTERS = sorted(byte_alphabet(), key=byte_alphabet().get)
TOKENS = ["<|endoftext|>", "<|im_end|>", *LETTERS, "Ġt", "he", "ĠĠ", "<user>"]
END = 1
VALUES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * 256, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġ Ġ"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": END,
}


def metadata(**changes):
    values = VALUES | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    present = {key: value for key, value in values.items() if value is not None}
    return GGUFMetadata(Path("tiny.gguf"), present)


def build(**changes):
    return read_gguf_tokenizer(metadata(**changes))


TOKENIZER = build()


def pieces(text):
    return [TOKENS[token_id] for token_id in TOKENIZER.encode(text)]


def test_merges_are_applied():
    assert pieces("the the") == ["t", "he", "Ġt", "he"]


def test_numbers_are_split_before_white_space_is_given_away():
    assert pieces("a  12") == ["a", "ĠĠ", "1", "2"]


def test_gpt_2_splitting_gives_a_number_its_space():
    token_ids = build(pre="gpt-2").encode("a  12")
    assert [TOKENS[token_id] for token_id in token_ids] == ["a", "Ġ", "Ġ", "1", "2"]


def test_qwen2_splitting_composes_characters_and_cuts_off_numbers():
    tokenizer = build(pre="qwen2")
    token_ids = tokenizer.encode("a  12 e\u0301")
    assert tokenizer.decode(token_ids) == "a  12 \u00e9"
    assert [TOKENS[token_id] for token_id in token_ids[:5]] == ["a", "Ġ", "Ġ", "1", "2"]


def test_names_of_special_tokens_become_these_tokens():
    assert pieces("h<|im_end|><user>") == ["h", "<|im_end|>", "<user>"]


def test_control_tokens_have_no_text_and_user_defined_ones_do():
    assert TOKENIZER.decode(TOKENIZER.encode("h<|im_end|><user>")) == "h<user>"


def test_begins_with_bos_only_where_the_file_asks_for_it():
    with_bos = build(add_bos_token=True)
    assert with_bos.encode("h")[0] == 0
    assert with_bos.encode("h", add_special_tokens=False) == TOKENIZER.encode("h")


def test_special_tokens_of_the_file_are_given():
    defaults = read_gguf_generation_defaults(metadata(eot_token_id=0, padding_token_id=5))
    assert defaults.eos_token_ids == (END, 0)
    assert (defaults.bos_token_id, defaults.pad_token_id) == (0, 5)
    assert defaults.sampling.temperature is None


def test_stop_tokens_are_eos_and_end_of_turn():
    assert build(eot_token_id=0).stop_token_ids == {0, END}
    assert build(eos_token_id=None).stop_token_ids == frozenset()


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_restores_any_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text.replace("<|im_end|>", "")


@given(data=st.binary(max_size=40))
def test_any_bytes_decode_as_utf_8_with_replacement(data):
    token_ids = [2 + byte for byte in data]
    assert TOKENIZER.decode(token_ids) == data.decode(errors="replace")


def test_stream_holds_back_half_a_character():
    stream = IncrementalDetokenizer(TOKENIZER)
    assert [stream.push(2 + byte) for byte in "é🦆x".encode()] == ["", "é", "", "", "", "🦆", "x"]
    assert stream.finish() == ""


def test_stream_ends_an_incomplete_character_with_a_replacement():
    stream = IncrementalDetokenizer(TOKENIZER)
    assert stream.push(2 + 0xF0) == ""
    assert stream.finish() == "\ufffd"


def test_rejects_text_with_a_lone_surrogate():
    with pytest.raises(InvalidArgumentError, match=r"lone surrogate U\+DCFF at character 2"):
        TOKENIZER.encode("ab\udcff")


@pytest.mark.parametrize("token_id", [-1, len(TOKENS)])
def test_rejects_decoding_an_id_out_of_range(token_id):
    with pytest.raises(InvalidArgumentError, match=f"token id {token_id} is out of range"):
        TOKENIZER.decode([token_id])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', known: gpt2"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe', known: gpt-2, smollm, qwen2"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing, expected an array of str"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc', expected an array of str"),
        ({"token_type": [1, 2]}, "262 tokens have 2 token types"),
        ({"merges": ["the"]}, "merge 'the' is not two tokens with a space between"),
        ({"merges": ["h z z"]}, "vocabulary and merges do not fit"),
        ({"tokens": [*TOKENS[:-1], "he"]}, "262 tokens have only 261 different texts"),
        ({"eos_token_id": 262}, "eos_token_id is 262, out of range for 262 tokens"),
        ({"bos_token_id": -1}, "bos_token_id is -1, out of range"),
        (
            {"tokens": [*TOKENS[:-2], "→", "<user>"], "merges": []},
            "token 260 '→' has the character",
        ),
    ],
)
def test_rejects_a_broken_tokenizer(changes, message):
    with pytest.raises(ModelFileError, match=f"model file tiny.gguf: .*{message}"):
        build(**changes)
