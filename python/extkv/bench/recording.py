"""Records rounds of whole blocks in an engine: what the confidence head said, and what came of it.

Logits and outcome of a round pass through one object from its decision to its outcome, so a pair
cannot slip by a round; both carry the round's number all the same, and the fit checks them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from extkv.dspark.calibration import Rounds
from extkv.dspark.plans import Decision, DecisionReason
from extkv.dspark.schedule import Judgement
from extkv.errors import CalibrationError, InvalidArgumentError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from extkv.dspark.schedule import DraftRound, DraftSignals
    from extkv.engine import LLM
    from extkv.engine.core import Sequence as EngineSequence
    from extkv.sampling_params import SamplingParams

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]
    BoolArray = npt.NDArray[np.bool_]
    Progress = Callable[[str, int, int], None]

FORMAT = "extkv.rounds.v1"


@dataclass(frozen=True)
class RecordedRound:
    """One round of one request.

    Attributes:
        request_id: The request.
        logits_round: Round whose draft pass the logits are of.
        outcome_round: Round whose outcome was observed.
        logits: Logits of the confidence head, one per draft; None where nothing was drafted.
        num_verified: Drafts verified.
        num_accepted: Drafts accepted.
    """

    request_id: int
    logits_round: int
    outcome_round: int
    logits: tuple[float, ...] | None
    num_verified: int
    num_accepted: int


class RecordingSchedule:
    """Verify every draft, and keep what the head said of it with what came of it.

    Attributes:
        rounds: What was recorded, in order.
    """

    waits = True

    def __init__(self) -> None:
        """Begin without rounds."""
        self.rounds: list[RecordedRound] = []
        self._decision = Decision(
            drafts=True,
            budget=None,
            num_executed_tokens=None,
            reason=DecisionReason.STATIC,
            expected=None,
        )
        self._newest: tuple[DraftRound, Float32Array | None] | None = None
        self._running: tuple[DraftRound, Float32Array | None] | None = None

    def decide(self, draft_round: DraftRound) -> Decision:
        """Draft."""
        self._newest = (draft_round, None)
        return self._decision

    def lens(self, is_alive: BoolArray, signals: DraftSignals | None) -> Int32Array:
        """Return as many as may be verified.

        Raises:
            CalibrationError: If the drafter has no confidence head.
        """
        assert self._newest is not None
        draft_round, _ = self._newest
        logits = None if signals is None else signals.head_logits()
        if signals is not None and logits is None:
            raise CalibrationError(
                "the drafter has no confidence head: there is nothing to calibrate"
            )
        self._newest = (draft_round, None if logits is None else logits.copy())
        return np.where(is_alive, draft_round.limits, 0).astype(np.int32)

    def start(self) -> None:
        """Note that the newest round is verified."""
        self._running, self._newest = self._newest, None

    def observe(
        self, num_verified: Int32Array, num_accepted: Int32Array, measured_us: float | None
    ) -> Judgement:
        """Keep the round that was started."""
        del measured_us
        assert self._running is not None
        draft_round, logits = self._running
        self._running = None
        for row, request_id in enumerate(draft_round.request_ids.tolist()):
            self.rounds.append(
                RecordedRound(
                    request_id=request_id,
                    logits_round=draft_round.number,
                    outcome_round=draft_round.number,
                    logits=None if logits is None else tuple(logits[row].tolist()),
                    num_verified=int(num_verified[row]),
                    num_accepted=int(num_accepted[row]),
                )
            )
        return Judgement(self._decision)

    def reset(self) -> None:
        """Give up what is not observed."""
        self._newest = self._running = None


@dataclass(frozen=True)
class Recording:
    """Rounds with whole blocks verified.

    Attributes:
        num_drafts: Drafts of a round.
        rounds: The rounds.
        ends: For each round the index of an accepted end of sequence, or -1.
        num_left_out: Rounds that were cut short: near a length limit, or of requests that ended.
        source: Where they were recorded; see `provenance`.
    """

    num_drafts: int
    rounds: tuple[RecordedRound, ...]
    ends: tuple[int, ...]
    num_left_out: int = 0
    source: dict[str, str] = field(default_factory=dict)

    def to_rounds(self) -> Rounds:
        """Return the rounds as the fit takes them."""
        logits = np.array([one.logits for one in self.rounds], np.float32)
        return Rounds(
            request_ids=np.array([one.request_id for one in self.rounds], np.uint64),
            logits_steps=np.array([one.logits_round for one in self.rounds], np.uint64),
            outcome_steps=np.array([one.outcome_round for one in self.rounds], np.uint64),
            logits=logits.reshape(len(self.rounds), self.num_drafts),
            num_verified=np.array([one.num_verified for one in self.rounds], np.uint32),
            num_accepted=np.array([one.num_accepted for one in self.rounds], np.uint32),
            ends=np.array(self.ends, np.int32),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rounds as JSON, a line for each."""
        head = {
            "format": FORMAT,
            "num_drafts": self.num_drafts,
            "num_left_out": self.num_left_out,
            "source": self.source,
        }
        lines = [
            json.dumps(
                {
                    "request_id": one.request_id,
                    "logits_round": one.logits_round,
                    "outcome_round": one.outcome_round,
                    "logits": [round(logit, 5) for logit in one.logits or ()],
                    "num_verified": one.num_verified,
                    "num_accepted": one.num_accepted,
                    "end": end,
                }
            )
            for one, end in zip(self.rounds, self.ends, strict=True)
        ]
        text = "\n".join([json.dumps(head), *lines, ""])
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote.

        Raises:
            CalibrationError: If the file cannot be read, or is none of these.
        """
        try:
            head, *lines = Path(path).read_text(encoding="utf-8").splitlines()
            values: dict[str, Any] = json.loads(head)
            if values.get("format") != FORMAT:
                raise CalibrationError(
                    f"{path} has format {values.get('format')!r}, expected {FORMAT!r}"
                )
            read = [json.loads(line) for line in lines if line.strip()]
            ends = tuple(one.pop("end") for one in read)
            rounds = tuple(
                RecordedRound(**(one | {"logits": tuple(map(float, one["logits"]))}))
                for one in read
            )
            num_drafts = int(values["num_drafts"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"cannot read the rounds {path}: {error!r}") from error
        wrong = next((one for one in rounds if len(one.logits or ()) != num_drafts), None)
        if wrong is not None:
            raise CalibrationError(
                f"{path}: a round of request {wrong.request_id} has {len(wrong.logits or ())} "
                f"logits, expected {num_drafts}"
            )
        return cls(num_drafts, rounds, ends, values["num_left_out"], values["source"])


def record_rounds(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    source: dict[str, str],
    on_progress: Progress | None = None,
) -> Recording:
    """Answer prompts with every draft verified, and record all rounds.

    Args:
        llm: An engine with a drafter that has a confidence head; nothing else may run in it.
        prompts: Prompts as token ids.
        params: Sampling parameters of each. The head is trained at a temperature of 1.
        source: Where the rounds are recorded; see `provenance`.
        on_progress: Called with a phase, what is done and how much there is.

    Raises:
        InvalidArgumentError: If there is no drafter, or a prompt or its parameters cannot work.
        CalibrationError: If the drafter has no confidence head.
    """
    drafting = llm.engine.drafting
    if drafting is None:
        raise InvalidArgumentError("the engine has no drafter: there is nothing to record")
    schedule = RecordingSchedule()
    previous, drafting.schedule = drafting.schedule, schedule
    eos = llm.model.generation.eos_token_ids or tuple(sorted(llm.model.tokenizer.stop_token_ids))
    limits = ModelLimits(llm.model.config.vocab_size, llm.config.max_model_len, tuple(eos))
    sequences: list[EngineSequence] = []
    try:
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            resolved = resolve_sampling_params(param, limits, num_prompt_tokens=len(prompt))
            seed = number if param.seed is None else param.seed
            sequences.append(llm.engine.add(prompt, resolved, seed=seed))
        while llm.engine.has_unfinished:
            llm.engine.step()
            if on_progress is not None:
                done = sum(sequence.output.finished() for sequence in sequences)
                on_progress("recording rounds", done, len(sequences))
    finally:
        for sequence in sequences:
            llm.engine.abort(sequence)
        drafting.schedule = previous
    return select_rounds(schedule.rounds, sequences, drafting.num_drafts, source)


def select_rounds(
    recorded: Sequence[RecordedRound],
    sequences: Sequence[EngineSequence],
    num_drafts: int,
    source: dict[str, str],
) -> Recording:
    """Keep rounds with whole blocks verified, and find accepted ends of sequence.

    A round brings its accepted drafts and one token, the step before the first round one token. So
    where an answer that ended at a stop token has fewer tokens than its rounds brought, the end was
    among the accepted drafts of the last one, and drafts after it say nothing.
    """
    by_request: dict[int, list[RecordedRound]] = {}
    for one in recorded:
        by_request.setdefault(one.request_id, []).append(one)
    rounds: list[RecordedRound] = []
    ends: list[int] = []
    for sequence in sequences:
        found = by_request.get(sequence.sequence_id, [])
        output = sequence.output
        is_stopped = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        brought = 1 + sum(1 + one.num_accepted for one in found[:-1])
        for place, one in enumerate(found):
            end = -1
            if is_stopped and place == len(found) - 1:
                num_tokens = len(output.token_ids) - brought
                if not 1 <= num_tokens <= one.num_accepted + 1:
                    # The account does not close, as after a preemption: where it ended is unknown.
                    continue
                end = num_tokens - 1 if num_tokens <= one.num_accepted else -1
            if one.num_verified == num_drafts and one.logits is not None:
                rounds.append(one)
                ends.append(end)
    num_left_out = len(recorded) - len(rounds)
    return Recording(num_drafts, tuple(rounds), tuple(ends), num_left_out, source)
