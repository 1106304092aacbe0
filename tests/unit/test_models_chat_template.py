"""Chat templates run sandboxed and fail with a typed error."""

from pathlib import Path

import pytest
from extkv.errors import ModelFileError
from extkv.models.chat_template import ChatTemplate
from extkv.models.gguf_metadata import GGUFMetadata

MESSAGES = [{"role": "user", "content": "Hi <b>"}]


def read(source):
    values = {
        "tokenizer.chat_template": source,
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return ChatTemplate.from_metadata(GGUFMetadata(Path("tiny.gguf"), values))


def test_renders_messages_and_the_generation_prompt():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert template.render(MESSAGES) == "user: Hi <b>\nassistant:"
    assert template.render(MESSAGES, add_generation_prompt=False) == "user: Hi <b>\n"


def test_blocks_leave_no_white_space():
    assert ChatTemplate("{% if true %}\n  {% if true %}\nx{% endif %}{% endif %}").render([]) == "x"


def test_special_tokens_of_the_file_are_known():
    assert read("{{ bos_token }}{{ eos_token }}").render([]) == "<s></s>"


def test_a_file_without_a_template_has_none():
    assert ChatTemplate.from_metadata(GGUFMetadata(Path("tiny.gguf"), {})) is None


def test_json_is_not_escaped_for_html():
    source = "{{ messages[0] | tojson }}"
    assert ChatTemplate(source).render(MESSAGES) == '{"role": "user", "content": "Hi <b>"}'


def test_loop_controls_are_known():
    assert ChatTemplate("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}").render([]) == "1"


def test_the_date_is_known():
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).isdigit()


def test_rejects_a_template_that_does_not_compile():
    with pytest.raises(ModelFileError, match=r"tiny.gguf: chat template does not compile: "):
        read("{% for %}")


def test_a_refusal_of_the_template_is_a_typed_error():
    with pytest.raises(ModelFileError, match="failed on 1 messages: roles must alternate"):
        read("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ nothing.x }}"],
)
def test_a_failing_template_is_a_typed_error(source):
    with pytest.raises(ModelFileError, match="chat template failed on 1 messages"):
        ChatTemplate(source).render(MESSAGES)
