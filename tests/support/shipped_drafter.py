"""The shipped drafter: hashes of its files, and what becomes of its drafts on eight prompts.

The prompts are answered in one batch by one thread, so that no product has another shape or is
split elsewhere on a machine with more cores.
"""

from __future__ import annotations

import dataclasses
import hashlib
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from extkv.dspark.schedule import FixedSchedule
from extkv.engine.llm import LLM
from extkv.models import find_default_model, load_model
from extkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from extkv.models import LoadedModel
    from extkv.models.dspark import DSparkModel

# Each is one chat message. The first answer ends before the limit, so its last token is drafted.
PROMPTS = {
    "one-word": "Which colour is fresh snow? Answer with one word.",
    "advice": "My bicycle chain squeaks when it rains. What should I do about it?",
    "explanation": "Why do bakers let dough rest before it goes into the oven?",
    "letter": "Write a short note to a neighbour who watered my plants while I was away.",
    "tram": "A tram has 14 rows of 4 seats. At the harbour 37 seats are taken, and 9 people get "
    "off there. How many seats are free when the tram leaves?",
    "jam": "Olga cooks 18 jars of jam. She keeps a third of them and sells the others at 6 euros "
    "each. How much money does she get?",
    "shelf-label": "Complete this Python function.\n\n"
    "def shelf_label(row, column):\n"
    '    """Return a label such as \'C-07\' for row 2 and column 7; rows are counted from 0."""\n',
    "minutes-between": "Complete this Python function.\n\n"
    "def minutes_between(start, end):\n"
    '    """Return the minutes from start to end, both written like \'08:45\'."""\n',
}
MAX_TOKENS = 48
MAX_MODEL_LEN = 192
# Of 16 tokens, for all prompts at once: committing all that fit takes longer than the answers.
NUM_BLOCKS = 128
HASHED_FILES = ("*.safetensors", "config.json", "sts.json")


@dataclasses.dataclass(frozen=True)
class DraftedAnswer:
    """What one prompt gave.

    Attributes:
        name: Name of the prompt.
        num_rounds: Rounds with drafts; 0 without a drafter.
        num_accepted: Drafts accepted, by place in the block; the last round counts in full.
        token_ids: Tokens of the answer.
    """

    name: str
    num_rounds: int
    num_accepted: list[int]
    token_ids: list[int]

    def to_dict(self) -> dict[str, Any]:
        """Return what is recorded."""
        return dataclasses.asdict(self)


class CountingSchedule(FixedSchedule):
    """Verify every draft, and keep how many each request's rounds accept.

    Attributes:
        accepted: Drafts accepted in each round, by request.
    """

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.accepted: dict[int, list[int]] = {}
        self._newest_ids: list[int] = []
        self._running_ids: list[int] = []

    def decide(self, draft_round):
        self._newest_ids = draft_round.request_ids.tolist()
        return super().decide(draft_round)

    def start(self):
        super().start()
        self._running_ids = self._newest_ids

    def observe(self, num_verified, num_accepted, measured_us):
        found = zip(self._running_ids, num_verified.tolist(), num_accepted.tolist(), strict=True)
        for request_id, verified, accepted in found:
            if verified:
                self.accepted.setdefault(request_id, []).append(accepted)
        return super().observe(num_verified, num_accepted, measured_us)


def file_hashes(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of weights, configuration and temperatures, by file name."""
    paths = sorted(path for pattern in HASHED_FILES for path in directory.glob(pattern))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def load_target() -> LoadedModel:
    """Return SmolLM2 in float32, for sequences as short as those of the prompts."""
    return load_model(find_default_model(), dtype=torch.float32, max_model_len=MAX_MODEL_LEN)


def answer(
    target: LoadedModel,
    drafter: DSparkModel | None = None,
    *,
    num_threads: int = 1,
    max_num_seqs: int = len(PROMPTS),
) -> list[DraftedAnswer]:
    """Answer the prompts greedily, none from the prefix cache."""
    with threads(num_threads):
        llm = LLM(
            target,
            drafter,
            device="cpu",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=NUM_BLOCKS,
            enable_prefix_caching=False,
        )
        with closing(llm):
            return _answer(llm)


def _answer(llm: LLM) -> list[DraftedAnswer]:
    drafting = llm.engine.drafting
    num_drafts = 0 if drafting is None else drafting.num_drafts
    schedule = CountingSchedule(num_drafts)
    if drafting is not None:
        drafting.schedule = schedule
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS.values()]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    # Ids of requests ascend in the order of the prompts.
    rounds = [schedule.accepted[request_id] for request_id in sorted(schedule.accepted)]
    if drafting is None:
        rounds = [[] for _ in prompts]
    else:
        assert drafting.counts.num_rounds == sum(map(len, rounds))
    return [
        DraftedAnswer(
            name,
            len(accepted),
            [sum(count > place for count in accepted) for place in range(num_drafts)],
            list(output.outputs[0].token_ids),
        )
        for name, accepted, output in zip(PROMPTS, rounds, outputs, strict=True)
    ]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
