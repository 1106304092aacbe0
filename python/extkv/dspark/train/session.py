"""Put a run together: the target, its engine, drafters, held-out texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from extkv.device import resolve_device
from extkv.dspark.train.distributed import process_group
from extkv.dspark.train.draft_vocabulary import count_answer_tokens, most_frequent_tokens
from extkv.dspark.train.generation import GenerationSettings, turn_tokens
from extkv.dspark.train.prompts import build_prompt
from extkv.dspark.train.run import Run, generate_timed
from extkv.dspark.train.settings import BatchSettings, RunSettings
from extkv.dspark.train.texts import TextStore
from extkv.dspark.train.trainer import Trainer
from extkv.dspark.train.workers import LocalSource, WorkerSource
from extkv.errors import ModelFileError
from extkv.models import find_default_model, kernel_ops, load_model
from extkv.models.model_source import read_model_config
from extkv.prompt_files import read_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from extkv.dspark.train.distributed import Ranks
    from extkv.dspark.train.run import TimedTexts
    from extkv.dspark.train.settings import StudentSettings
    from extkv.dspark.train.texts import Text
    from extkv.dspark.train.workers import TextSource
    from extkv.models import LoadedModel

    Int64Array = npt.NDArray[np.int64]
    Progress = Callable[[str, int, int], None]
    # Makes the drafters, once the target's shape is known.
    MakeStudents = Callable[[LoadedModel], Sequence[StudentSettings]]

# Name of the held-out prompts that decide which drafter is best.
HELD_OUT = "held-out"
CUDA_WORKERS = 3
# Logits that stay in the host's caches while the loss goes over them.
HOST_CHUNK_BYTES = 8 << 20
COUNTS_FILE = "token_counts.npy"


@dataclass(frozen=True)
class SessionSettings:
    """Say what is trained on what.

    Attributes:
        model: The target: GGUF file or directory; None for the installed SmolLM2.
        directory: Where everything is written.
        device: As for `LLM`.
        run: How long.
        batches: What a step reads.
        generation: What is generated.
        texts: Texts of an earlier run, as `.npz`; nothing is generated to train on then.
        evaluate: JSON-lines files of prompts (`turns`, first turns count), never trained on.
        num_held_out: Prompts of each held-out set.
        num_workers: Processes that generate, 0 for this one; None for three on CUDA, else 0.
        max_num_seqs: Texts that each of them generates at once; None for the engine's default.
        is_resumed: Whether to go on from the directory's checkpoint.
        verifier: Name of the target in the drafters' files; by default that of its file.
        writes_drafters: Whether drafters and a checkpoint are written, or measured only.
    """

    model: Path | None = None
    directory: Path = Path("drafter")
    device: str | None = None
    run: RunSettings = field(default_factory=RunSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    texts: Path | None = None
    evaluate: tuple[Path, ...] = ()
    num_held_out: int = 32
    num_workers: int | None = None
    max_num_seqs: int | None = None
    is_resumed: bool = False
    verifier: str | None = None
    writes_drafters: bool = True


def train_drafters(
    settings: SessionSettings,
    make_students: MakeStudents,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Train drafters within a budget.

    Args:
        settings: What is trained on what.
        make_students: Returns the drafters for a target.
        on_progress: Told a phase, what is done and how much there is.

    Returns:
        Accepted length and its like of every drafter, by its name and that of the texts.

    Raises:
        ModelFileError: If a file cannot be read.
        InvalidArgumentError: If settings contradict each other or the target.
        ExtkvError: If a process that generates fails.
    """
    path = find_default_model() if settings.model is None else settings.model
    kind, ordinal = resolve_device(settings.device)
    is_cuda = kind == "cuda"
    settings = _fitted(settings, path, is_cuda=is_cuda)
    device = torch.device(kind, ordinal) if is_cuda else torch.device("cpu")
    with process_group(device) as ranks:
        source: TextSource | None = None
        num_workers = settings.num_workers
        if num_workers is None:
            num_workers = CUDA_WORKERS if is_cuda else 0
        if num_workers:
            # They load while this process does.
            source = _workers(settings, num_workers, path, str(device), ranks)
        try:
            loaded = load_model(
                path,
                dtype=torch.bfloat16 if is_cuda else torch.float32,
                device=device,
                ops=kernel_ops() if is_cuda else None,
            )
            if source is None:
                source = _local(settings, loaded, ranks)
            run = _run_of(settings, loaded, source, ranks, make_students, on_progress)
            try:
                return run.go()
            finally:
                if settings.writes_drafters:
                    run.checkpoint()
        finally:
            if source is not None:
                source.close()


def _run_of(  # noqa: PLR0917, all that a run is made of
    settings: SessionSettings,
    loaded: LoadedModel,
    source: TextSource,
    ranks: Ranks,
    make_students: MakeStudents,
    on_progress: Progress | None,
) -> Run:
    """Put the run together; texts that come before it are generated here."""
    held_out = held_out_texts(settings, loaded, source, ranks)
    store = None if settings.texts is None else TextStore.load(settings.texts)
    students, first_texts = make_students(loaded), None
    if any(student.lacks_vocabulary for student in students):
        # Which tokens they draft follows from the first texts.
        if store is None and not settings.is_resumed:
            first_texts = generate_timed(source, settings.run.generation_s)
        counts = _token_counts(settings, loaded, ranks, store, first_texts)
        students = [with_vocabulary(student, counts, loaded) for student in students]
    run = Run(
        Trainer(loaded.model, students, settings.batches, ranks=ranks, has_own_texts=store is None),
        settings.run,
        settings.directory,
        source=None if store is not None else source,
        texts=store,
        first_texts=first_texts,
        held_out=held_out,
        verifier=settings.verifier or loaded.path.stem,
        writes_drafters=settings.writes_drafters,
        on_progress=on_progress,
    )
    if settings.is_resumed:
        run.resume()
    return run


def _fitted(settings: SessionSettings, path: Path, *, is_cuda: bool) -> SessionSettings:
    """Return settings that fit the target's context and the device."""
    length = min(settings.generation.max_text_len, read_model_config(path).context_length)
    generation = dataclasses.replace(settings.generation, max_text_len=length)
    most = settings.batches.chunk_bytes
    chunk_bytes = most if is_cuda else min(most, HOST_CHUNK_BYTES)
    batches = dataclasses.replace(settings.batches, chunk_bytes=chunk_bytes)
    return dataclasses.replace(settings, generation=generation, batches=batches)


def _token_counts(
    settings: SessionSettings,
    loaded: LoadedModel,
    ranks: Ranks,
    store: TextStore | None,
    first_texts: TimedTexts | None,
) -> Int64Array:
    """Count the tokens of answers, of all processes together; a run that goes on has the counts."""
    path = settings.directory / COUNTS_FILE
    if settings.is_resumed:
        try:
            found: Int64Array = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"token counts {path} cannot be read: {error}") from error
        return found
    if store is None:
        assert first_texts is not None
        store = store_of(first_texts.texts)
    counts = torch.from_numpy(count_answer_tokens(store, loaded.config.vocab_size))
    counts = counts.to(loaded.model.device)
    ranks.add(counts)
    total: Int64Array = counts.cpu().numpy()
    if ranks.rank == 0:
        np.save(path, total)
    return total


def with_vocabulary(
    student: StudentSettings, counts: Int64Array, loaded: LoadedModel
) -> StudentSettings:
    """Choose the tokens that a drafter of a reduced vocabulary drafts."""
    if not student.lacks_vocabulary:
        return student
    ends = loaded.generation.eos_token_ids or loaded.tokenizer.stop_token_ids
    tokens = most_frequent_tokens(counts, student.config.num_draft_tokens, always=ends)
    return dataclasses.replace(student, draft_token_ids=tokens)


def held_out_texts(
    settings: SessionSettings, loaded: LoadedModel, source: TextSource, ranks: Ranks
) -> dict[str, TextStore]:
    """Let the target answer the held-out prompts, at temperature 0 and 1.

    Each process has its own answers, and the first writes them. Those of an earlier run in the
    directory are used again where it is resumed.
    """
    folder = settings.directory / "held_out"
    folder.mkdir(parents=True, exist_ok=True)
    turns = turn_tokens(loaded)
    sets = {HELD_OUT: held_out_prompts(settings.generation.seed, settings.num_held_out)}
    for file in settings.evaluate:
        first_turns = [turns[0] for turns in read_turns(file)]
        sets[file.stem] = first_turns[: settings.num_held_out]
    name_of = {
        (
            *turns.before,
            *loaded.tokenizer.encode(text, add_special_tokens=False),
            *turns.after,
        ): name
        for name, prompts in sets.items()
        for text in prompts
    }
    files = {
        (name, heat): folder / f"{name}-{heat:.0f}.npz" for name in sets for heat in (0.0, 1.0)
    }
    if settings.is_resumed and all(file.exists() for file in files.values()):
        found = {key: TextStore.load(file) for key, file in files.items()}
    else:
        found = {}
        for heat in (0.0, 1.0):
            # All sets together: a batch takes as long as its longest answer.
            texts = source.answer(list(name_of), heat)
            texts.sort(key=lambda text: list(text.token_ids))
            of_set: dict[str, list[Text]] = {name: [] for name in sets}
            for text in texts:
                of_set[name_of[tuple(text.token_ids[: text.answer_start])]].append(text)
            found |= {(name, heat): store_of(own) for name, own in of_set.items()}
        if ranks.rank == 0:
            for key, store in found.items():
                store.save(files[key])
    return {f"{name} T={heat:.0f}": found[name, heat] for name, heat in files}


def store_of(texts: Sequence[Text]) -> TextStore:
    """Return a store of some texts."""
    store = TextStore()
    store.extend(texts)
    return store


def held_out_prompts(seed: int, count: int) -> list[str]:
    """Return prompts of the templates that no run with this seed trains on."""
    return [build_prompt(-1 - seed, number) for number in range(count)]


def _engine_options(settings: SessionSettings, *, is_cuda: bool) -> dict[str, Any]:
    """Return arguments of `LLM` that all engines of a run have."""
    length = settings.generation.max_text_len
    options: dict[str, Any] = {"max_model_len": length}
    if settings.max_num_seqs is not None:
        options["max_num_seqs"] = settings.max_num_seqs
    if is_cuda:
        # What the texts can use; the rest is for training.
        num_seqs = settings.max_num_seqs or 256
        options["num_gpu_blocks_override"] = num_seqs * (length // 16 + 1)
    return options


def _local(settings: SessionSettings, loaded: LoadedModel, ranks: Ranks) -> LocalSource:
    from extkv.engine.llm import LLM

    options = _engine_options(settings, is_cuda=loaded.model.device.type == "cuda")
    # The model is loaded, with as many positions as it has.
    del options["max_model_len"]
    return LocalSource(
        lambda: LLM(loaded, device=str(loaded.model.device), **options),
        settings.generation,
        (ranks.rank, ranks.size),
    )


def _workers(
    settings: SessionSettings, num_workers: int, path: Path, device: str, ranks: Ranks
) -> WorkerSource:
    options = _engine_options(settings, is_cuda=device != "cpu")
    options |= {"model": str(path), "device": device}
    return WorkerSource(num_workers, options, settings.generation, (ranks.rank, ranks.size))
