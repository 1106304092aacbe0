"""Steps of training: one pass of the target per batch, and every drafter learns from it."""

from __future__ import annotations

import collections
import pickle
import time
from typing import TYPE_CHECKING, Any

import torch

from extkv.dspark.train.batches import draw_batch
from extkv.dspark.train.bigrams import learn_bigrams
from extkv.dspark.train.distributed import Ranks
from extkv.dspark.train.student import Student
from extkv.dspark.train.target_pass import run_target
from extkv.dspark.train.texts import BatchOrder
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.whole_file import whole_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from extkv.dspark.train.batches import Batch
    from extkv.dspark.train.settings import BatchSettings, StudentSettings
    from extkv.dspark.train.texts import TextStore
    from extkv.models.decoder import DecoderModel


class Trainer:
    """Train drafters side by side on one stream of batches.

    Attributes:
        students: The drafters.
        tap_layer_ids: Layers of the target that any of them taps.
        num_steps: Steps done.
        trained_s: Seconds that they took.
        num_anchors: Blocks that each drafter has learnt from, on this device.
    """

    def __init__(
        self,
        target: DecoderModel,
        students: Sequence[StudentSettings],
        settings: BatchSettings,
        *,
        ranks: Ranks | None = None,
        has_own_texts: bool = False,
    ) -> None:
        """Begin.

        Args:
            target: The target; frozen.
            students: The drafters, of different names.
            settings: What a step reads.
            ranks: Processes that train together.
            has_own_texts: Whether each of them has texts of its own and reads all of them, instead
                of its share of the same texts.

        Raises:
            InvalidArgumentError: If there is no drafter, or two have one name.
        """
        names = [student.name for student in students]
        if not names or len(set(names)) < len(names):
            raise InvalidArgumentError(f"drafters are called {names}, expected different names")
        self.target, self.settings = target, settings
        taps = {tap for student in students for tap in student.config.tap_layer_ids}
        self.tap_layer_ids = tuple(sorted(taps))
        self.students = [
            Student(student, target, tap_layer_ids=self.tap_layer_ids) for student in students
        ]
        self.ranks = Ranks() if ranks is None else ranks
        rank, num_ranks = (0, 1) if has_own_texts else (self.ranks.rank, self.ranks.size)
        self._order = BatchOrder(
            batch_tokens=settings.batch_tokens, seed=settings.seed, rank=rank, num_ranks=num_ranks
        )
        self._generator = torch.Generator().manual_seed(settings.seed + 7919 * self.ranks.rank)
        self._num_drafts = {student.num_drafts for student in self.students}
        self.num_steps = self.num_anchors = 0
        self.trained_s = 0.0
        self._pending: collections.deque[torch.cuda.Event] = collections.deque()

    def train(
        self,
        store: TextStore,
        *,
        progress: Callable[[], float],
        until: Callable[[], bool],
        after_step: Callable[[], None] | None = None,
    ) -> None:
        """Take steps until told to stop.

        Args:
            store: The texts; a larger store than at the last call starts a new pass.
            progress: Returns the share of the run that is done, which sets the learning rate.
            until: Asked before each step whether to stop.
            after_step: Called after each step.

        Raises:
            InvalidArgumentError: If the store is empty.
        """
        if len(store) == 0:
            raise InvalidArgumentError("there are no texts to train on")
        batches = self._order.iterate(store.lengths)
        while not self.ranks.agree(until()):
            start = time.perf_counter()
            drawn = [
                draw_batch(
                    store, next(batches).tolist(), self.settings, self._num_drafts, self._generator
                )
                for _ in range(self.settings.num_micro_batches)
            ]
            self.step(drawn, self.ranks.first(progress()))
            self._wait()
            self.trained_s += time.perf_counter() - start
            if after_step is not None:
                after_step()

    def learn_bigrams(self, store: TextStore) -> dict[str, list[float]]:
        """Let the drafters that shall learn pairs of tokens first do so.

        Returns:
            Cross-entropy of each step, by the drafter's name.
        """
        return {
            student.settings.name: learn_bigrams(
                student,
                store,
                student.settings.bigram_steps,
                ranks=self.ranks,
                seed=self.settings.seed,
            )
            for student in self.students
            if student.settings.bigram_steps
        }

    def start_pass(self) -> None:
        """Begin a new pass over the texts, as after adding some."""
        if self._order.place:
            self._order.epoch, self._order.place = self._order.epoch + 1, 0

    def step(self, drawn: Sequence[Batch], progress: float) -> None:
        """Take one step on some batches together.

        Args:
            drawn: The batches, on the host.
            progress: Share of the run that is done.
        """
        batches = [batch.to(self.target.device) for batch in drawn]
        totals = torch.stack(
            [
                torch.stack([student.total_weight(batch) for batch in batches]).sum()
                for student in self.students
            ]
        )
        self.ranks.add(totals)
        for batch in batches:
            output = run_target(self.target, batch, self.tap_layer_ids)
            for student, total in zip(self.students, totals, strict=True):
                student.backward(
                    batch,
                    output.taps,
                    output.logits,
                    total,
                    chunk_bytes=self.settings.chunk_bytes,
                )
            self.num_anchors += int(batch.is_real.shape[0] * batch.is_real.shape[1])
        for student in self.students:
            self.ranks.add_gradients(student.parameters.values())
            student.sums["gradient_norm"] = student.sums.get(
                "gradient_norm", torch.zeros((), device=self.target.device)
            ) + student.optimizer.step(progress)
        self.num_steps += 1

    def _wait(self) -> None:
        """Wait for the step before the last one, so that the clock means what it says."""
        if self.target.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending.append(event)
            if len(self._pending) > 1:
                self._pending.popleft().synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, but for the texts."""
        return {
            "names": [student.settings.name for student in self.students],
            "students": [student.state_dict() for student in self.students],
            "order": (self._order.epoch, self._order.place),
            "generator": self._generator.get_state(),
            "num_steps": self.num_steps,
            "num_anchors": self.num_anchors,
            "trained_s": self.trained_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            InvalidArgumentError: If it is of other drafters.
        """
        names = [student.settings.name for student in self.students]
        if state["names"] != names:
            msg = f"the checkpoint has drafters {state['names']}, expected {names}"
            raise InvalidArgumentError(msg)
        for student, found in zip(self.students, state["students"], strict=True):
            student.load_state_dict(found)
        self._order.epoch, self._order.place = state["order"]
        self._generator.set_state(state["generator"].cpu())
        self.num_steps, self.num_anchors = state["num_steps"], state["num_anchors"]
        self.trained_s = state["trained_s"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, which appears under its name when it is whole."""
        with whole_file(path) as file:
            torch.save(self.state_dict(), file)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint.

        Raises:
            ModelFileError: If the file cannot be read.
            InvalidArgumentError: If it is of other drafters.
        """
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ModelFileError(f"checkpoint {path} cannot be read: {error}") from error
        self.load_state_dict(state)
