"""What a request asks of its text's structure: vLLM's names and meanings, checked once.

What can be judged without a vocabulary is refused here; `GrammarCompiler` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from extkv.errors import InvalidArgumentError, parameter_error

# Longest constraint. With it, the stack of the compiler's thread bounds how deep one can nest.
MAX_CONSTRAINT_BYTES = 128 * 1024
_TEXTS = ("regex", "grammar", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Say what structure a text must have. Exactly one of the first six is set.

    Attributes:
        json: A JSON schema, as text or as a mapping; the text is JSON that it describes.
        regex: The text as a whole matches this expression, in the syntax of Rust's `regex`.
        choice: The text is one of these.
        grammar: The text is derived from this grammar: Lark, with the rule `start`, or GBNF, with
            the rule `root`.
        json_object: True; the text is any JSON object.
        structural_tag: Constraints between tags; known so that it can be refused by name.
        disable_any_whitespace: Whether JSON has no white space between its tokens.
        disable_additional_properties: Whether objects have only properties that the schema names,
            where it does not say otherwise.
        whitespace_pattern: An expression for the white space between tokens of JSON; None for
            llguidance's own.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            InvalidArgumentError: If none or several constraints are set, or one is of a kind or
                length that can never work.
        """
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            msg = f"structured_outputs has {' and '.join(given) or 'no constraint'}"
            raise InvalidArgumentError(f"{msg}, expected exactly one of {', '.join(names)}")
        for name in (*_TEXTS, "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        self._check_json()
        if self.choice is not None:
            self._check_choice(self.choice)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Return the parameters of a mapping, such as a line of JSON or a decoded message.

        Names that begin with an underscore are passed over: they are a front end's own.

        Raises:
            InvalidArgumentError: If a name is not known, or as the class does.
        """
        known = [field.name for field in fields(cls)]
        given = {name: value for name, value in values.items() if not name.startswith("_")}
        if unknown := sorted(set(given) - set(known)):
            raise InvalidArgumentError(
                f"{unknown[0]!r} is no field of structured_outputs, known: {', '.join(known)}"
            )
        return cls(**given)

    def _check_json(self) -> None:
        if isinstance(self.json, str):
            _check_text("json", self.json)
        elif self.json is not None and not isinstance(self.json, Mapping):
            raise parameter_error("json", self.json, "a JSON schema, as text or as a mapping")
        if self.json_object is not None and self.json_object is not True:
            raise parameter_error("json_object", self.json_object, "True, or None")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise parameter_error(name, getattr(self, name), "True or False")

    def _check_choice(self, choice: object) -> None:
        if not isinstance(choice, (list, tuple)) or not choice:
            raise parameter_error("choice", choice, "a list of at least one text")
        for text in choice:
            if not isinstance(text, str):
                raise parameter_error("choice", text, "texts")
        object.__setattr__(self, "choice", tuple(choice))
        _check_text("choice", "".join(choice), may_be_empty=True)


def _check_text(name: str, text: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(text, str) or not (text or may_be_empty):
        raise parameter_error(name, text, "a text that is not empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        expected = f"valid Unicode, found a lone surrogate U+{code:04X} at {error.start}"
        raise parameter_error(name, text, expected) from error
    if size > MAX_CONSTRAINT_BYTES:
        msg = f"{name} has {size} bytes, expected at most {MAX_CONSTRAINT_BYTES}"
        raise InvalidArgumentError(msg)
