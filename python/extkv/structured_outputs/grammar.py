"""Constraints in the words of llguidance: one text per constraint, not yet checked by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from extkv.errors import GrammarError, UnsupportedRequestError
from extkv.structured_outputs.params import MAX_CONSTRAINT_BYTES

if TYPE_CHECKING:
    from extkv.structured_outputs.params import StructuredOutputsParams

# Keys of a schema whose values are data and no schemas.
_DATA_KEYS = frozenset({"const", "enum", "default", "examples"})


def to_grammar(params: StructuredOutputsParams) -> str:
    """Return the text of a constraint that llguidance takes.

    Raises:
        GrammarError: If a schema is no JSON, too long or nested too deeply, or a grammar is neither
            Lark nor GBNF.
        UnsupportedRequestError: If it is a structural tag.
    """
    import llguidance

    if params.structural_tag is not None:
        raise UnsupportedRequestError(
            "structural_tag is not supported by extkv, expected one of json, regex, choice, "
            "grammar and json_object"
        )
    if params.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # A string of Lark is one of JSON.
        texts = " | ".join(json.dumps(text) for text in params.choice)
        return llguidance.LLMatcher.grammar_from_lark(f"start: {texts}")
    if params.grammar is not None:
        try:
            return llguidance.grammar_from("grammar", params.grammar)
        except ValueError as error:
            raise GrammarError(f"grammar is neither Lark nor GBNF: {error}") from error
    schema = {"type": "object"} if params.json is None else _read_schema(params.json)
    try:
        return _json_grammar(params, schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json is no JSON schema: {error}") from error


def _json_grammar(params: StructuredOutputsParams, schema: dict[str, Any]) -> str:
    import llguidance

    closed = _closed(schema) if params.disable_additional_properties else schema
    text = json.dumps(closed, allow_nan=False)
    if len(text) > MAX_CONSTRAINT_BYTES:
        msg = f"json has {len(text)} bytes, expected at most {MAX_CONSTRAINT_BYTES}"
        raise GrammarError(msg)
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]


def _read_schema(schema: object) -> dict[str, Any]:
    """Return a schema as a Python object; true is the schema without conditions."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"json is no JSON: {error}") from error
    else:
        schema = dict(schema)  # type: ignore[call-overload]
    if schema is True:
        return {}
    if schema is False:
        raise GrammarError("json is false, which no text satisfies")
    if not isinstance(schema, dict):
        raise GrammarError(f"json is {schema!r:.100}, expected an object or a boolean")
    return schema


def _closed(schema: object) -> object:
    """Forbid properties without a name in objects that name some and do not say."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in _DATA_KEYS else _closed(value) for key, value in schema.items()}
    if {"properties", "patternProperties"} & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed
