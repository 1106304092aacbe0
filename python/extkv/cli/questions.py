"""What `extkv generate` is asked: prompts from arguments, standard input, or a JSON-lines file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from extkv.sampling_params import SamplingParams

    Messages = Sequence[Mapping[str, Any]]

# Sampling parameters whose results the output does not show.
_NOT_SHOWN = {"n", "logprobs", "prompt_logprobs", "detokenize"}
_TITLE_LEN = 70
_CONTENTS = ("prompt", "messages", "turns")


@dataclass(frozen=True)
class Question:
    """Hold one prompt, or a conversation up to where an answer is wanted.

    Attributes:
        question_id: The line's `id`, else its number, counted from 0.
        sampling: How its answer is chosen.
        prompt: Text or token ids to continue; None for a conversation.
        messages: The conversation.
        later_turns: What the user says after the answer, one answer each.
        turn: Number of the answer within the conversation, counted from 0.
    """

    question_id: str | int
    sampling: SamplingParams
    prompt: str | list[int] | None = None
    messages: Messages = ()
    later_turns: tuple[str, ...] = ()
    turn: int = 0

    @property
    def title(self) -> str:
        """What was asked, on one short line."""
        asked = self.prompt if self.messages == () else self.messages[-1].get("content", "")
        line = " ".join(str(asked).split())
        if len(line) > _TITLE_LEN:
            line = line[: _TITLE_LEN - 1] + "…"
        return f"[{self.question_id}] {line}"

    def next_turn(self, answer: str) -> Question | None:
        """Return the question that follows an answer; None if there is none."""
        if not self.later_turns:
            return None
        said = [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self.later_turns[0]},
        ]
        messages, later = [*self.messages, *said], self.later_turns[1:]
        return replace(self, messages=messages, later_turns=later, turn=self.turn + 1)


def read_questions(
    prompts: Sequence[str], path: Path | None, sampling: Mapping[str, Any], *, chat: bool | None
) -> list[Question]:
    """Return what was asked; prompts of `-` alone, or none at all, are standard input.

    Args:
        prompts: Texts of the command line.
        path: A JSON-lines file instead of them; `-` is standard input.
        sampling: Sampling parameters of the command line; a line's own ones go before them.
        chat: Whether prompts are sent as chat messages; None for those of the file that are some.

    Raises:
        InvalidArgumentError: If a parameter cannot work, a text is not UTF-8, or a line of the file
            is no question; names the line.
    """
    # Imported late: `extkv --help` must not pay for PyTorch.
    from extkv.sampling_params import SamplingParams

    own = SamplingParams(**sampling)
    if path is None:
        # Bytes of arguments that are not UTF-8 come as surrogates.
        given = (decode_utf8(os.fsencode(text), "the prompt") for text in prompts)
        texts = [read_stdin()] if list(prompts) in ([], ["-"]) else given
        return [_question(number, own, text, chat=bool(chat)) for number, text in enumerate(texts)]
    text = read_stdin() if str(path) == "-" else decode_utf8(path.read_bytes(), str(path))
    questions: list[Question] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            questions.append(_read_line(line, len(questions), sampling, chat=chat))
        except (ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise InvalidArgumentError(f"{path} has no prompt")
    return questions


def read_stdin() -> str:
    """Return standard input without the newline that a shell adds.

    Raises:
        InvalidArgumentError: If it is not UTF-8.
    """
    return decode_utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def decode_utf8(data: bytes, name: str) -> str:
    """Decode bytes.

    Raises:
        InvalidArgumentError: If they are not UTF-8; says where.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        msg = f"{name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        raise InvalidArgumentError(msg) from error


def _read_line(
    line: str, number: int, sampling: Mapping[str, Any], *, chat: bool | None
) -> Question:
    from extkv.sampling_params import SamplingParams
    from extkv.structured_outputs.params import StructuredOutputsParams

    value = json.loads(line)
    # Half a surrogate pair is legal JSON but no text.
    json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"{line!r:.80} is no JSON object")
    question_id = value.pop("id", number)
    if not isinstance(question_id, (str, int)):
        raise InvalidArgumentError(f"id is {question_id!r:.80}, expected a string or a number")
    given = [name for name in _CONTENTS if name in value]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise InvalidArgumentError(f"expected one of {', '.join(_CONTENTS)}, found {found}")
    content = value.pop(given[0])
    known = set(SamplingParams.__dataclass_fields__) - _NOT_SHOWN
    if unknown := sorted(set(value) - known):
        msg = f"{unknown[0]!r} is no field, known: id, {', '.join(_CONTENTS)}, "
        raise InvalidArgumentError(msg + ", ".join(sorted(known)))
    if isinstance(value.get("structured_outputs"), dict):
        own_structure = StructuredOutputsParams.from_fields(value["structured_outputs"])
        value["structured_outputs"] = own_structure
    own = SamplingParams(**{**sampling, **value})
    if given[0] == "prompt":
        return _question(question_id, own, _checked_prompt(content), chat=bool(chat))
    if chat is False:
        raise InvalidArgumentError(f"{given[0]} is a conversation, which --raw does not send")
    if given[0] == "messages":
        return Question(question_id, own, messages=_checked_messages(content))
    first, *later = _checked_turns(content)
    return Question(question_id, own, messages=[_user(first)], later_turns=tuple(later))


def _question(
    question_id: str | int, sampling: SamplingParams, prompt: str | list[int], *, chat: bool
) -> Question:
    if not chat:
        return Question(question_id, sampling, prompt)
    if not isinstance(prompt, str):
        raise InvalidArgumentError("prompt has token ids, which --chat does not send")
    return Question(question_id, sampling, messages=[_user(prompt)])


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _checked_prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return value
    raise InvalidArgumentError(f"prompt is {value!r:.80}, expected a text or a list of token ids")


def _checked_messages(value: object) -> list[dict[str, Any]]:
    expected = "expected a list of objects with a role and a content"
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(f"messages is {value!r:.80}, {expected}")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise InvalidArgumentError(f"messages holds {message!r:.80}, {expected}")
    return value


def _checked_turns(value: object) -> Iterator[str]:
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return iter(value)
    raise InvalidArgumentError(f"turns is {value!r:.80}, expected a list of texts")
