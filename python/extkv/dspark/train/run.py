"""A whole run within a budget: generate, train, evaluate, write; in rounds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from extkv.dspark.train.acceptance import measure
from extkv.dspark.train.report import RunLog, plot_log
from extkv.dspark.train.texts import TextStore
from extkv.models.dspark import save_native, save_speculators

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extkv.dspark.train.settings import RunSettings
    from extkv.dspark.train.texts import Text
    from extkv.dspark.train.trainer import Trainer
    from extkv.dspark.train.workers import TextSource

    Progress = Callable[[str, int, int], None]

CHECKPOINT_FILE = "checkpoint.pt"
TEXTS_FILE = "texts.npz"
LOG_FILE = "log.jsonl"
RESULTS_FILE = "results.json"
# Bytes of a file of weights, so that no file is too large for a repository.
SHARD_BYTES = 15 << 20


class TimedTexts(NamedTuple):
    """Texts, and the seconds that they took."""

    texts: list[Text]
    seconds: float


def generate_timed(source: TextSource, seconds: float) -> TimedTexts:
    """Let a source generate for some seconds."""
    start = time.perf_counter()
    texts = source.generate(seconds)
    return TimedTexts(texts, time.perf_counter() - start)


class Run:
    """One run of a trainer.

    Attributes:
        trainer: The trainer.
        store: Its texts.
        directory: Where everything is written.
        best: Best accepted length of each drafter so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: RunSettings,
        directory: str | Path,
        *,
        source: TextSource | None = None,
        texts: TextStore | None = None,
        first_texts: TimedTexts | None = None,
        held_out: Mapping[str, TextStore] | None = None,
        verifier: str | None = None,
        writes_drafters: bool = True,
        on_progress: Progress | None = None,
    ) -> None:
        """Prepare.

        Args:
            trainer: The trainer.
            settings: How long, and what is written when.
            directory: Where checkpoint, texts, log and drafters go.
            source: Generates texts; None to train on those that are there.
            texts: Texts to train on, also when the run is resumed; None for those of the directory
                then, and for those that are generated.
            first_texts: Texts of the first round, where they were generated before.
            held_out: Texts to evaluate on, by name; the first decides which drafter is best.
            verifier: Name of the target in the drafters' files.
            writes_drafters: Whether drafters are written, or measured only.
            on_progress: Told a phase, what is done and how much there is.
        """
        self.trainer, self.settings = trainer, settings
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.store = TextStore() if texts is None else texts
        self._has_given_texts = texts is not None
        self.best: dict[str, float] = {}
        self._source, self._held_out = source, dict(held_out or {})
        self._first_texts = first_texts
        self._verifier, self._on_progress = verifier, on_progress
        self._writes_drafters = writes_drafters
        self._is_first = trainer.ranks.rank == 0
        suffix = "" if self._is_first else f".{trainer.ranks.rank}"
        self._log = RunLog(self.directory / f"{LOG_FILE}{suffix}")
        self._texts_path = self.directory / f"{TEXTS_FILE}{suffix}"
        self._start = time.perf_counter() - (0.0 if first_texts is None else first_texts.seconds)
        self._generated_s = self._still_to_generate_s = 0.0
        self._logged_step, self._logged_at, self._logged_anchors = 0, self._start, 0
        self._evaluated_at = self._saved_at = self._start

    def resume(self) -> None:
        """Go on from the checkpoint of an earlier run in the directory.

        Its texts are read as well, unless the run was given texts.

        Raises:
            ModelFileError: If one of them cannot be read.
        """
        if not self._has_given_texts:
            self.store = TextStore.load(self._texts_path)
        self.trainer.load(self.directory / CHECKPOINT_FILE)
        self._logged_step = self.trainer.num_steps
        self._logged_anchors = self.trainer.num_anchors

    def go(self) -> dict[str, Any]:
        """Generate and train until the budget is spent, and evaluate.

        Returns:
            The last evaluation of every drafter, by its name and that of the texts.
        """
        settings = self.settings
        num_rounds = settings.num_rounds if self._source is not None else 1
        share = settings.budget_s / num_rounds
        of_round = settings.generation_s if self._source is not None else 0.0
        for number in range(num_rounds):
            self._still_to_generate_s = of_round * (num_rounds - 1 - number)
            if self._source is not None:
                self._generate(of_round)
            if self.trainer.num_steps == 0:
                self._learn_bigrams()
            end = self._start + share * (number + 1)
            self.trainer.train(
                self.store,
                progress=self._progress,
                until=lambda end=end: self._is_over(end),  # type: ignore[misc]
                after_step=self._after_step,
            )
        self._log_steps()
        results = self.evaluate()
        self.write(results)
        return results

    def evaluate(self) -> dict[str, Any]:
        """Measure accepted lengths on the held-out texts; write the drafters that are better."""
        trainer = self.trainer
        found: dict[str, Any] = {student.settings.name: {} for student in trainer.students}
        for texts_name, store in self._held_out.items():
            lengths = measure(trainer.students, trainer.target, store, trainer.tap_layer_ids)
            for student, counted in zip(trainer.students, lengths, strict=True):
                name = student.settings.name
                found[name][texts_name] = counted.to_dict()
                self._log.write(
                    "evaluation",
                    step=trainer.num_steps,
                    student=name,
                    texts=texts_name,
                    **counted.to_dict(),
                )
        return found

    def write(self, results: dict[str, Any]) -> None:
        """Write drafters in both formats, the results and the plot."""
        if not self._is_first:
            return
        deciding = next(iter(self._held_out), None)
        for student in self.trainer.students:
            name = student.settings.name
            length = results[name][deciding]["accepted_length"] if deciding else 0.0
            if name in self.best and length < self.best[name]:
                continue
            self.best[name] = length
            if not self._writes_drafters:
                continue
            model = student.model(self.trainer.target.dtype)
            folder = self.directory / name
            save_speculators(
                model, folder / "speculators", verifier=self._verifier, max_shard_bytes=SHARD_BYTES
            )
            save_native(model, folder / "native", has_shared=False, max_shard_bytes=SHARD_BYTES)
        text = json.dumps({"step": self.trainer.num_steps, "results": results}, indent=1)
        (self.directory / RESULTS_FILE).write_text(text + "\n", encoding="utf-8")
        plot_log(self._log.path, self.directory / "log.png")

    def checkpoint(self) -> None:
        """Write the checkpoint."""
        if self._is_first:
            self.trainer.save(self.directory / CHECKPOINT_FILE)

    def _generate(self, seconds: float) -> None:
        """Let the source generate, and keep the texts."""
        assert self._source is not None
        generated, self._first_texts = self._first_texts, None
        if generated is None:
            generated = generate_timed(self._source, seconds)
        texts, elapsed = generated
        self.store.extend(texts)
        self.store.save(self._texts_path)
        self.trainer.start_pass()
        self._generated_s += elapsed
        num_tokens = sum(len(text.token_ids) for text in texts)
        num_answer = num_tokens - sum(text.answer_start for text in texts)
        self._log.write(
            "generated",
            num_texts=len(texts),
            num_tokens=num_tokens,
            answer_tokens_per_s=num_answer / elapsed,
            mean_answer_len=num_answer / max(len(texts), 1),
            whole_ratio=sum(text.is_whole for text in texts) / max(len(texts), 1),
            total_tokens=self.store.num_tokens,
        )
        self._logged_at = time.perf_counter()

    def _learn_bigrams(self) -> None:
        for name, losses in self.trainer.learn_bigrams(self.store).items():
            last = losses[-max(len(losses) // 10, 1) :]
            self._log.write(
                "bigrams",
                student=name,
                num_steps=len(losses),
                first_cross_entropy=losses[0],
                last_cross_entropy=sum(last) / len(last),
            )
        self._logged_at = time.perf_counter()

    def _progress(self) -> float:
        if self.settings.max_steps is not None:
            return self.trainer.num_steps / self.settings.max_steps
        spent = time.perf_counter() - self._start - self._generated_s
        total = self.settings.budget_s - self._generated_s - self._still_to_generate_s
        return spent / max(total, 1e-3)

    def _is_over(self, end: float) -> bool:
        if self.settings.max_steps is not None:
            return self.trainer.num_steps >= self.settings.max_steps
        return time.perf_counter() >= end

    def _after_step(self) -> None:
        settings, now = self.settings, time.perf_counter()
        if self.trainer.num_steps - self._logged_step >= settings.log_every_steps:
            self._log_steps()
        if now - self._saved_at >= settings.checkpoint_every_s:
            self.checkpoint()
            self._saved_at = time.perf_counter()
        if now - self._evaluated_at >= settings.evaluate_every_s:
            self.write(self.evaluate())
            self._evaluated_at = self._logged_at = time.perf_counter()
        if self._on_progress is not None:
            self._on_progress("training", min(int(1000 * self._progress()), 1000), 1000)

    def _log_steps(self) -> None:
        trainer = self.trainer
        num_steps = trainer.num_steps - self._logged_step
        if num_steps == 0:
            return
        figures = [student.figures(num_steps) for student in trainer.students]
        now = time.perf_counter()
        seconds = now - self._logged_at
        num_blocks = trainer.num_anchors - self._logged_anchors
        for student, found in zip(trainer.students, figures, strict=True):
            self._log.write(
                "train",
                step=trainer.num_steps,
                student=student.settings.name,
                progress=self._progress(),
                blocks_per_s=num_blocks / seconds,
                steps_per_s=num_steps / seconds,
                drafted_tokens_per_s=num_blocks * student.num_drafts / seconds,
                **found,
            )
        self._logged_step, self._logged_at = trainer.num_steps, now
        self._logged_anchors = trainer.num_anchors
