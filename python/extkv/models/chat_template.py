"""Rendering a conversation with the template stored in a model file.

A template is a program from an untrusted file, so it runs in jinja2's sandbox. Whitespace control
and the extra names are those that Hugging Face templates are written for.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extkv.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extkv.models.gguf_metadata import GGUFMetadata


class ChatTemplate:
    """Turn messages into the prompt text a chat model was trained on.

    Example:
        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source)
        >>> template.render([{"role": "user", "content": "Hi"}])
        '<user>Hi'
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "chat template",
    ) -> None:
        """Compile a template.

        Args:
            source: The jinja2 text.
            special_tokens: Names such as `bos_token` that the template may use.
            name: What errors call it.

        Raises:
            ModelFileError: If the text is not a valid template.
        """
        self._name = name
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _make_environment().from_string(source)
        except jinja2.TemplateError as error:
            msg = f"{name} does not compile: {error}"
            raise ModelFileError(msg) from error

    @classmethod
    def from_metadata(cls, metadata: GGUFMetadata) -> ChatTemplate | None:
        """Return the template of a GGUF file, or None where it has none.

        Raises:
            ModelFileError: If the template does not compile.
        """
        source = metadata.find("tokenizer.chat_template", str)
        if source is None:
            return None
        tokens = metadata.require_list("tokenizer.ggml.tokens", str)
        special_tokens = {}
        for name in ("bos", "eos"):
            token_id = metadata.find(f"tokenizer.ggml.{name}_token_id", int)
            if token_id is not None and 0 <= token_id < len(tokens):
                special_tokens[f"{name}_token"] = tokens[token_id]
        name = f"model file {metadata.path}: chat template"
        return cls(source, special_tokens=special_tokens, name=name)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: Turns with the keys `role` and `content`, oldest first.
            add_generation_prompt: Whether to end with the opening of the assistant's turn.

        Raises:
            ModelFileError: If the template refuses the messages or fails.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template from a file can fail in any way Python can.
        except Exception as error:
            msg = f"{self._name} failed on {len(messages)} messages: {error}"
            raise ModelFileError(msg) from error


def _make_environment() -> ImmutableSandboxedEnvironment:
    # Same settings as transformers' chat_template_utils, which templates are written against.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which a model never saw.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().astimezone().strftime(date_format)
