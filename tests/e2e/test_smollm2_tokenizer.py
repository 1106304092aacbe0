"""The tokenizer and chat template of the real model equal those of transformers."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "a\tb\r\nc\n\n\nd \n e",
    "it's we'll they'd I'm you've 'S DON'T",
    "0 1 12 123 1234567890 3.14159 1e-5 x² 一",
    "def f(x):\n    return {'a': x ** 2, \"b\": [x, 1]}  # 7\n\tif x:\n\t\tpass",
    "Übergröße naïve Ærøskøbing Łódź Ελλάδα Москва עברית العربية हिन्दी ไทย 日本語 한국어",
    "👍🏽 👩‍👩‍👧 🇩🇪 e\u0301 \u200b \ufeff \u00a0 \u2028 \U000e0001",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start <repo_name>",
    "http://example.com/a?b=c&d=%20#e",
    "\x00\x01\x04\x06\x1f\x7f\x13\x14 control",
    "a" * 300 + " " * 300 + "!" * 300,
    "1. one\n2. two\n\n   indented",
]


@pytest.fixture(scope="module")
def smollm_tokenizer(reference_tokenizer):
    """transformers' tokenizer with the digit splitting that the file asks for.

    `tokenizer.ggml.pre` is `smollm`; transformers' GGUF path uses plain byte-level splitting.
    """
    backend = reference_tokenizer.backend_tokenizer
    plain = backend.pre_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    yield reference_tokenizer
    backend.pre_tokenizer = plain


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_transformers(text, loaded, reference_tokenizer):
    assert loaded.tokenizer.encode(text) == reference_tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("x  1", ["x", "  ", "1"]),
        ("\n\n12. one", ["\n\n", "1", "2", ".", " one"]),
        ("    42,", ["    ", "4", "2", ","]),
        ("a ½", ["a", " ", "½"]),
    ],
)
def test_every_number_is_a_token_of_its_own(text, pieces, loaded, smollm_tokenizer):
    token_ids = loaded.tokenizer.encode(text)
    assert [loaded.tokenizer.decode([token_id]) for token_id in token_ids] == pieces
    assert token_ids == smollm_tokenizer(text)["input_ids"]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=60))
def test_any_text_is_encoded_like_transformers(text, loaded, smollm_tokenizer):
    assert loaded.tokenizer.encode(text) == smollm_tokenizer(text)["input_ids"]


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_are_decoded_like_transformers(token_ids, loaded, reference_tokenizer):
    expected = reference_tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert loaded.tokenizer.decode(token_ids) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_restores_the_text(text, loaded):
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>")
    expected = text
    for token in special:
        expected = expected.replace(token, "")
    missing = set("\x04\x06\x13\x14")  # bytes for which the vocabulary has no token
    expected = "".join(character for character in expected if character not in missing)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n there "}],
        [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "<b>{{ sure }}</b>"},
        ],
    ],
    ids=["user", "system", "three-turns"],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_equals_transformers(
    messages, add_generation_prompt, loaded, reference_tokenizer
):
    expected = reference_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    rendered = loaded.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
    assert rendered == expected


def test_text_ends_at_the_end_of_turn_token(loaded):
    assert loaded.tokenizer.stop_token_ids == {2}
