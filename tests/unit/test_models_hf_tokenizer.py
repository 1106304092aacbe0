"""Tokenizer, chat template and generation defaults of a Hugging Face directory."""

import json

import pytest
from extkv.errors import ModelFileError
from extkv.models import SamplingDefaults
from extkv.models.generation import read_generation_defaults
from extkv.models.hf_tokenizer import (
    read_hf_chat_template,
    read_hf_tokenizer,
    read_tokenizer_config,
)
from extkv.models.json_file import read_json
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def make_encoder():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    encoder = Tokenizer(models.BPE(vocabulary, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<end>", "<begin>"])
    encoder.add_tokens([AddedToken("<think>", special=False)])
    return encoder


def write_json(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@pytest.fixture
def directory(tmp_path):
    make_encoder().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path, "config.json", {"eos_token_id": 256})
    return tmp_path


def save(directory, encoder):
    encoder.save(str(directory / "tokenizer.json"))
    return directory


def read_defaults(directory):
    return read_generation_defaults(directory, read_json(directory / "config.json"), 300)


def read_tokenizer(directory):
    return read_hf_tokenizer(
        directory,
        read_tokenizer_config(directory),
        vocab_size=300,
        eos_token_ids=read_defaults(directory).eos_token_ids,
    )


def read_chat_template(directory):
    return read_hf_chat_template(directory, read_tokenizer_config(directory))


def test_text_survives_the_tokenizer(directory):
    tokenizer = read_tokenizer(directory)
    text = "Füße 🦆\n<think> 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<end>") == [256]
    assert tokenizer.decode([256, 257]) == ""


def test_ids_beyond_the_tokenizer_have_no_text(directory):
    tokenizer = read_tokenizer(directory)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([299]) == ""


def test_tokens_have_the_names_that_the_vocabulary_gives_them(directory):
    tokenizer = read_tokenizer(directory)
    assert [tokenizer.token_name(token_id) for token_id in (256, 258, 299)] == [
        "<end>",
        "<think>",
        "",
    ]


def test_rejects_a_tokenizer_larger_than_the_model(directory):
    encoder = make_encoder()
    encoder.add_tokens([f"<{number}>" for number in range(100)])
    message = "tokenizer.json: the tokenizer has 359 tokens, the model 300"
    with pytest.raises(ModelFileError, match=message):
        read_tokenizer(save(directory, encoder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a valid tokenizer: "),
        ("{", "not a valid tokenizer: "),
        (None, "cannot be opened: No such file"),
    ],
)
def test_rejects_a_broken_tokenizer(directory, content, message):
    (directory / "tokenizer.json").unlink()
    if content is not None:
        (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=f"tokenizer.json: {message}"):
        read_tokenizer(directory)


def test_rejects_a_tokenizer_of_another_kind(directory):
    encoder = make_encoder()
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="decoder is WordPiece, known: ByteLevel, ByteFall"):
        read_tokenizer(save(directory, encoder))


def test_a_prompt_is_never_cut_or_filled_up(directory):
    encoder = make_encoder()
    encoder.enable_truncation(4)
    encoder.enable_padding(length=50)
    tokenizer = read_tokenizer(save(directory, encoder))
    assert len(tokenizer.encode("a longer text")) == 13


BEGIN = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 257)])
END = {"__type": "AddedToken", "content": "<end>", "special": True}
WITH_BOS = {"bos_token": "<begin>", "eos_token": END}


@pytest.mark.parametrize(
    ("post_processor", "config", "first"),
    [
        (None, {}, []),
        (BEGIN, {}, [257]),
        (BEGIN, WITH_BOS | {"add_bos_token": False}, [257]),
        (None, WITH_BOS | {"add_bos_token": True}, []),
    ],
)
def test_a_text_begins_as_with_transformers(directory, post_processor, config, first):
    from transformers import AutoTokenizer

    encoder = make_encoder()
    if post_processor is not None:
        encoder.post_processor = post_processor
    path = save(directory, encoder)
    write_json(path, "tokenizer_config.json", config)
    tokenizer = read_tokenizer(path)
    token_ids = tokenizer.encode("ab")
    assert token_ids == first + tokenizer.encode("ab", add_special_tokens=False)
    assert token_ids == AutoTokenizer.from_pretrained(path)("ab")["input_ids"]


def test_rejects_a_special_token_that_the_tokenizer_lacks(directory):
    write_json(directory, "tokenizer_config.json", {"eos_token": "<stop>"})
    message = "tokenizer_config.json: key eos_token is '<stop>', expected a token of tokenizer.json"
    with pytest.raises(ModelFileError, match=message):
        read_tokenizer(directory)


SENTENCE_PIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


@pytest.mark.parametrize("decoder", [SENTENCE_PIECE, decoders.Metaspace()], ids=["strip", "meta"])
def test_sentence_piece_tokens_are_decoded_as_the_library_does(directory, decoder):
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "▁a", "é"]
    vocabulary = {name: index for index, name in enumerate(names)}
    encoder = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)  # noqa: S106
    )
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.decoder = decoder
    tokenizer = read_tokenizer(save(directory, encoder))
    token_ids = tokenizer.encode("a aaé a")
    assert tokenizer.decode(token_ids) == encoder.decode(token_ids) == "a aaé a"
    assert tokenizer.token_bytes(1 + 0xC3) == b"\xc3"


def test_stop_tokens_are_those_of_all_files(directory):
    assert read_tokenizer(directory).stop_token_ids == {256}
    write_json(directory, "generation_config.json", {"eos_token_id": [258, 257]})
    assert read_tokenizer(directory).stop_token_ids == {257, 258}
    write_json(directory, "tokenizer_config.json", {"eos_token": "<end>"})
    assert read_tokenizer(directory).stop_token_ids == {256, 257, 258}


def test_generation_defaults_are_given_as_data(directory):
    values = {
        "bos_token_id": 257,
        "eos_token_id": [258, 256],
        "pad_token_id": 256,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    write_json(directory, "generation_config.json", values)
    defaults = read_defaults(directory)
    assert defaults.eos_token_ids == (258, 256)
    assert (defaults.bos_token_id, defaults.pad_token_id) == (257, 256)
    assert defaults.sampling == SamplingDefaults(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95
    )


def test_without_a_generation_config_the_config_serves(directory):
    defaults = read_defaults(directory)
    assert defaults.eos_token_ids == (256,)
    assert defaults.sampling == SamplingDefaults()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token_id": [3, 300]}, "key eos_token_id is 300, expected less than vocab_size 300"),
        ({"eos_token_id": "2"}, "key eos_token_id is '2', expected int"),
        ({"bos_token_id": -1}, "key bos_token_id is -1, expected less than vocab_size 300"),
        ({"temperature": "hot"}, "key temperature is 'hot', expected float"),
    ],
)
def test_rejects_a_broken_generation_config(directory, values, message):
    write_json(directory, "generation_config.json", values)
    with pytest.raises(ModelFileError, match=f"generation_config.json: {message}"):
        read_defaults(directory)


TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "file"),
    [
        (TEMPLATE, None),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}], None),
        ("unused", TEMPLATE),
        (None, TEMPLATE),
    ],
    ids=["config", "named", "both", "file"],
)
def test_the_chat_template_is_found(directory, template, file):
    write_json(directory, "tokenizer_config.json", WITH_BOS | {"chat_template": template})
    if file is not None:
        (directory / "chat_template.jinja").write_text(file)
    chat_template = read_chat_template(directory)
    assert chat_template.render([{"role": "user", "content": "Hi"}]) == "<begin>Hi"


def test_a_directory_without_a_chat_template_has_none(directory):
    assert read_chat_template(directory) is None


def test_rejects_templates_without_a_default(directory):
    templates = [{"name": "tool_use", "template": "x"}, 3]
    write_json(directory, "tokenizer_config.json", {"chat_template": templates})
    with pytest.raises(ModelFileError, match="chat_template is an array, expected an entry named"):
        read_chat_template(directory)


def test_rejects_a_chat_template_that_does_not_compile(directory):
    (directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(
        ModelFileError, match=r"chat_template.jinja: chat template does not compile"
    ):
        read_chat_template(directory)
