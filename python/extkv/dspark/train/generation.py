"""The target's own answers, through the engine: to prompts from templates and to its own questions.

Half of the answers take the likeliest tokens, half are drawn at temperature 1, so that a drafter
meets both. A part of the prompts is drawn from the target itself: it is given the chat template up
to where a user speaks, and goes on. Some answers are followed by another question.
"""

from __future__ import annotations

import collections
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extkv.dspark.train.prompts import build_prompt, follow_up
from extkv.dspark.train.texts import Text
from extkv.errors import InvalidArgumentError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from extkv.engine.core import Sequence as EngineSequence
    from extkv.engine.llm import LLM
    from extkv.models import ChatTemplate, LoadedModel

# Stands where the user's words go while the template is taken apart.
_MARK = "\u241fuser\u241f"
_LEAST_QUESTION_LEN = 5
# Answers that were cut off by the clock are kept from this length on.
_LEAST_ANSWER_LEN = 16


@dataclass(frozen=True)
class GenerationSettings:
    """Say what is generated.

    Attributes:
        max_tokens: Most tokens of an answer.
        max_question_tokens: Most tokens of a question of the target's own.
        max_text_len: Most tokens of prompt and answer.
        own_ratio: Share of prompts that are the target's own questions.
        follow_up_ratio: Share of answers that are followed by another question.
        greedy_ratio: Share of answers of likeliest tokens; the rest is drawn at temperature 1.
        seed: Seed of prompts and draws.

    Raises:
        InvalidArgumentError: If a share is not in [0, 1] or a number not positive.
    """

    max_tokens: int = 448
    max_question_tokens: int = 96
    max_text_len: int = 1024
    own_ratio: float = 0.35
    follow_up_ratio: float = 0.15
    greedy_ratio: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("own_ratio", "follow_up_ratio", "greedy_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                msg = f"{name} is {getattr(self, name)}, expected a number in [0, 1]"
                raise InvalidArgumentError(msg)
        for name in ("max_tokens", "max_question_tokens", "max_text_len"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class TurnTokens:
    """The chat template around what a user says, as tokens.

    Attributes:
        before: Up to the first user's words.
        between: From the end of an answer to the next user's words; the answer's last token, which
            ends it, is not among them.
        after: From the user's words to where the answer begins; the first token ends their words.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]


def turn_tokens(model: LoadedModel) -> TurnTokens:
    """Take the chat template of a model apart.

    Raises:
        InvalidArgumentError: If it has none, or one that does not show a user's words once.
    """
    template = _template(model)
    once = template.render([{"role": "user", "content": _MARK}])
    said = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    twice = template.render([*said, {"role": "user", "content": _MARK}])
    parts = twice.split(_MARK)
    if once.count(_MARK) != 1 or len(parts) != 4:  # noqa: PLR2004
        raise InvalidArgumentError(f"{model.path}: its chat template changes a user's words")

    def encode(text: str) -> tuple[int, ...]:
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    return TurnTokens(encode(parts[0]), encode(parts[2])[1:], encode(parts[3]))


def _template(model: LoadedModel) -> ChatTemplate:
    if model.chat_template is None:
        raise InvalidArgumentError(f"{model.path} has no chat template to ask questions with")
    return model.chat_template


@dataclass
class _Job:
    """One sequence in the engine.

    Attributes:
        number: Number of its prompt.
        prompt: Its tokens.
        temperature: How its tokens are chosen.
        is_question: Whether it is a question that is wanted, not an answer.
        is_first: Whether another question may follow the answer.
    """

    number: int
    prompt: list[int]
    temperature: float
    is_question: bool = False
    is_first: bool = True


class TextGenerator:
    """Let a model answer prompts without end; what is unfinished waits for the next call."""

    def __init__(
        self,
        llm: LLM,
        settings: GenerationSettings,
        *,
        prompts: Iterable[Sequence[int]] | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Begin.

        Args:
            llm: The engine around the target.
            settings: What is generated.
            prompts: Prompts to answer instead of templates and own questions, as tokens.
            share: Which of how many generators this is; each takes other prompts.

        Raises:
            InvalidArgumentError: If prompts are to be made and the model has no chat template.
        """
        self._llm, self._settings = llm, settings
        self._turns = None if prompts is not None else turn_tokens(llm.model)
        self._numbers = itertools.count(*share)
        eos = llm.model.generation.eos_token_ids
        self._ends = frozenset(eos or llm.model.tokenizer.stop_token_ids)
        self._limits = ModelLimits(
            vocab_size=llm.model.config.vocab_size,
            max_model_len=min(llm.config.max_model_len, settings.max_text_len),
            eos_token_ids=tuple(sorted(self._ends)),
        )
        self._waiting: collections.deque[_Job] = collections.deque()
        self._running: dict[int, tuple[_Job, EngineSequence]] = {}
        self._fresh = self._jobs(prompts)

    def run(
        self, *, until: Callable[[int, int], bool] | None = None, deadline: float | None = None
    ) -> Iterator[list[Text]]:
        """Answer prompts, and yield the texts that are done after steps that ended some.

        Args:
            until: Told the texts and tokens so far; stops where it says yes.
            deadline: Stops at this `time.perf_counter`; what runs then is cut off and kept.
        """
        num_texts = num_tokens = 0
        while True:
            self._refill()
            if not self._running:
                return
            done = [text for text in map(self._finish, self._llm.engine.step()) if text is not None]
            num_texts += len(done)
            num_tokens += sum(len(text.token_ids) for text in done)
            if done:
                yield done
            is_late = deadline is not None and time.perf_counter() > deadline
            if is_late or (until is not None and until(num_texts, num_tokens)):
                yield self._cut_off()
                return

    def _jobs(self, prompts: Iterable[Sequence[int]] | None) -> Iterator[_Job]:
        if prompts is not None:
            for number, prompt in enumerate(prompts):
                yield _Job(number, list(prompt), self._temperature(number), is_first=False)
            return
        for number in self._numbers:
            yield self._new_job(number)

    def _new_job(self, number: int) -> _Job:
        turns, settings = self._turns, self._settings
        assert turns is not None
        temperature = self._temperature(number)
        if _share(number, "own") < settings.own_ratio:
            return _Job(number, list(turns.before), temperature, is_question=True)
        words = self._encode(build_prompt(settings.seed, number))
        return _Job(number, [*turns.before, *words, *turns.after], temperature)

    def _temperature(self, number: int) -> float:
        return 0.0 if _share(number, "greedy") < self._settings.greedy_ratio else 1.0

    def _encode(self, text: str) -> list[int]:
        return list(self._llm.model.tokenizer.encode(text, add_special_tokens=False))

    def _refill(self) -> None:
        # A few more than fit, so that a place is taken again in the same step.
        wanted = self._llm.config.max_num_seqs + 16
        while len(self._running) < wanted:
            job = self._waiting.popleft() if self._waiting else next(self._fresh, None)
            if job is None:
                return
            if len(job.prompt) + _LEAST_ANSWER_LEN <= self._limits.max_model_len:
                self._start(job)

    def _start(self, job: _Job) -> None:
        settings = self._settings
        # A question is drawn whatever its answer will be.
        params = SamplingParams(
            temperature=1.0 if job.is_question else job.temperature,
            max_tokens=settings.max_question_tokens if job.is_question else settings.max_tokens,
            detokenize=False,
        )
        sampling = resolve_sampling_params(params, self._limits, num_prompt_tokens=len(job.prompt))
        seed = hash((settings.seed, job.number, len(job.prompt))) & 0x7FFF_FFFF_FFFF_FFFF
        sequence = self._llm.engine.add(job.prompt, sampling, seed=seed)
        self._running[sequence.sequence_id] = (job, sequence)

    def _finish(self, sequence: EngineSequence) -> Text | None:
        """Take what ended; return it if it is an answer."""
        if not sequence.output.finished():
            return None
        job, _ = self._running.pop(sequence.sequence_id)
        tokens = list(sequence.token_ids)
        if sequence.output.finish_reason == "error" or not tokens:
            return None
        is_whole = tokens[-1] in self._ends
        if job.is_question:
            if is_whole and len(tokens) > _LEAST_QUESTION_LEN and self._turns is not None:
                prompt = [*job.prompt, *tokens, *self._turns.after[1:]]
                self._waiting.append(_Job(job.number, prompt, job.temperature))
            return None
        text = [*job.prompt, *tokens]
        is_followed = _share(job.number, "follow") < self._settings.follow_up_ratio
        if is_whole and job.is_first and is_followed and self._turns is not None:
            words = self._encode(follow_up(self._settings.seed, job.number))
            prompt = [*text, *self._turns.between, *words, *self._turns.after]
            self._waiting.append(_Job(job.number, prompt, job.temperature, is_first=False))
        return Text(text, len(job.prompt), job.temperature, is_whole)

    def _cut_off(self) -> list[Text]:
        """Stop what runs and return the answers among it that are long enough."""
        texts = []
        for job, sequence in self._running.values():
            tokens = list(sequence.token_ids)
            self._llm.engine.abort(sequence)
            if not job.is_question and len(tokens) >= _LEAST_ANSWER_LEN:
                prompt = job.prompt
                texts.append(Text([*prompt, *tokens], len(prompt), job.temperature, False))
        self._running.clear()
        self._waiting.clear()
        return texts


def _share(number: int, salt: str) -> float:
    """Return a number in [0, 1) that follows from another, as if drawn."""
    return random.Random(f"{salt}-{number}").random()  # noqa: S311, no cryptography
