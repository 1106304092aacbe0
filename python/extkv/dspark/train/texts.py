"""Texts as token ids, the one thing that is stored, and the order in which steps read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from extkv.errors import ModelFileError
from extkv.whole_file import whole_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    BoolArray = npt.NDArray[np.bool_]
    Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Text:
    """One prompt with the target's answer.

    Attributes:
        token_ids: Prompt and answer.
        answer_start: Index of the answer's first token.
        temperature: Temperature that the answer was drawn at; 0 for the likeliest tokens.
        is_whole: Whether the answer ended by itself.
    """

    token_ids: Sequence[int]
    answer_start: int
    temperature: float
    is_whole: bool


class TextStore:
    """Texts, one after the other in one array.

    Attributes:
        token_ids (int32, [num_tokens]): All tokens.
        starts (int64, [num_texts + 1]): First token of each text, and the end.
        answer_starts (int64, [num_texts]): First token of each answer, within its text.
        temperatures (float32, [num_texts]): See `Text`.
        is_whole (bool, [num_texts]): See `Text`.
    """

    def __init__(self) -> None:
        """Begin with no text."""
        self.token_ids = np.zeros(0, np.int32)
        self.starts = np.zeros(1, np.int64)
        self.answer_starts = np.zeros(0, np.int64)
        self.temperatures = np.zeros(0, np.float32)
        self.is_whole = np.zeros(0, bool)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.answer_starts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return len(self.token_ids)

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each text (int64, [num_texts])."""
        return np.diff(self.starts)

    @property
    def is_answer(self) -> BoolArray:
        """Which tokens are of answers (bool, [num_tokens])."""
        of_text = np.repeat(self.starts[:-1] + self.answer_starts, self.lengths)
        found: BoolArray = np.arange(self.num_tokens) >= of_text
        return found

    def text(self, index: int) -> Text:
        """Return one text."""
        return Text(
            self.token_ids[self.starts[index] : self.starts[index + 1]].tolist(),
            int(self.answer_starts[index]),
            float(self.temperatures[index]),
            bool(self.is_whole[index]),
        )

    def extend(self, texts: Sequence[Text]) -> None:
        """Add texts."""
        if not texts:
            return
        parts = [np.asarray(text.token_ids, np.int32) for text in texts]
        self.token_ids = np.concatenate([self.token_ids, *parts])
        ends = self.starts[-1] + np.cumsum([len(part) for part in parts])
        self.starts = np.concatenate([self.starts, ends])
        added = [text.answer_start for text in texts]
        self.answer_starts = np.concatenate([self.answer_starts, np.asarray(added, np.int64)])
        heats = np.asarray([text.temperature for text in texts], np.float32)
        self.temperatures = np.concatenate([self.temperatures, heats])
        self.is_whole = np.concatenate([self.is_whole, [text.is_whole for text in texts]])

    def subset(self, indices: Sequence[int]) -> TextStore:
        """Return a store of some of the texts."""
        found = TextStore()
        found.extend([self.text(index) for index in indices])
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a compressed `.npz` file, which appears when it is whole."""
        with whole_file(path) as file:
            np.savez_compressed(
                file,
                token_ids=self.token_ids,
                starts=self.starts,
                answer_starts=self.answer_starts,
                temperatures=self.temperatures,
                is_whole=self.is_whole,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TextStore:
        """Read what `save` wrote.

        Raises:
            ModelFileError: If the file is missing or holds something else.
        """
        store = cls()
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for name in vars(store):
                    setattr(store, name, arrays[name])
        except (OSError, KeyError, ValueError) as error:
            raise ModelFileError(f"texts {path} cannot be read: {error}") from error
        return store


class BatchOrder:
    """The order in which batches read texts: every text once in an epoch, like lengths together.

    Batches follow from seed, epoch and texts alone, so the place is two numbers.

    Attributes:
        epoch: Passes over the texts that are done.
        place: Batches of this pass that are done.
    """

    def __init__(self, *, batch_tokens: int, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Begin before the first text.

        Args:
            batch_tokens: Most tokens of a batch, padding included.
            seed: Seed of the order.
            rank: Which share of the batches is read here.
            num_ranks: Number of shares.
        """
        self.epoch, self.place = 0, 0
        self._batch_tokens, self._seed = batch_tokens, seed
        self._rank, self._num_ranks = rank, num_ranks

    def batches(self, lengths: Int64Array) -> list[Int64Array]:
        """Return the batches of this epoch, each the indices of its texts."""
        random = np.random.default_rng((self._seed, self.epoch))
        # Noise of a sixteenth mixes neighbours anew in every epoch.
        keys = lengths * (1 + random.random(len(lengths)) / 16)
        order = np.argsort(keys, kind="stable")
        found: list[Int64Array] = []
        begin = 0
        while begin < len(order):
            end = begin + 1
            longest = padded_len(int(lengths[order[begin]]))
            while end < len(order):
                longest = max(longest, padded_len(int(lengths[order[end]])))
                if longest * (end + 1 - begin) > self._batch_tokens:
                    break
                end += 1
            found.append(order[begin:end])
            begin = end
        shuffled = [found[index] for index in random.permutation(len(found))]
        # Every rank has as many batches.
        num_whole = max(len(shuffled) // self._num_ranks, 1) * self._num_ranks
        padded = [shuffled[index % len(shuffled)] for index in range(num_whole)]
        return padded[self._rank :: self._num_ranks]

    def iterate(self, lengths: Int64Array) -> Iterator[Int64Array]:
        """Yield batches without end, from where it stands; moves on before each is used."""
        while True:
            batches = self.batches(lengths)
            while self.place < len(batches):
                self.place += 1
                yield batches[self.place - 1]
            self.epoch, self.place = self.epoch + 1, 0


def padded_len(num_tokens: int) -> int:
    """Return the length that a text is padded to: few different ones, so that memory is reused."""
    step = 64 if num_tokens > 64 else 8  # noqa: PLR2004
    return -(-num_tokens // step) * step
