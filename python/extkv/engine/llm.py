"""`LLM`: load a model, size its cache, answer prompts. Names and meanings are vLLM's."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from extkv.device import resolve_device
from extkv.engine.config import DEFAULT_BLOCK_SIZE, EngineConfig
from extkv.engine.core import EngineCore
from extkv.engine.runner import ModelRunner
from extkv.engine.sampler import Sampler
from extkv.errors import InvalidArgumentError
from extkv.models import find_default_model, kernel_ops, load_model
from extkv.models.host_decoder import HostDecoder
from extkv.models.loader import check_device, resolve_dtype
from extkv.outputs import RequestOutput
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams, request_seed
from extkv.structured_outputs.compiler import GrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

    import torch

    from extkv.dspark.step_reports import SpeculationReport
    from extkv.dspark.verification import DraftCounts
    from extkv.engine.core import Sequence as EngineSequence
    from extkv.kv import KVCache, SizingPlan
    from extkv.models import LoadedModel
    from extkv.models.dspark import DSparkModel

    Prompt = str | Sequence[int]
    Progress = Callable[[str, int, int], None]


class LLM:
    """A model that answers many prompts at once.

    Args:
        model: A GGUF file or a Hugging Face directory; None for the installed SmolLM2. A model that
            is loaded already can be passed too.
        draft: Directory of a DSpark drafter for the model, or a drafter that is loaded already.
        speculative_config: How to draft and verify, with vLLM's keys; see
            `extkv.dspark.options.SpeculativeOptions`.
        device: ``"cuda"``, ``"cpu"`` or a torch.device; None for CUDA where there is a device.
        dtype: ``"auto"`` is bfloat16 on CUDA and float32 on the host.
        max_model_len: Most tokens of a sequence; None for the model's context length.
        max_num_seqs: Most sequences that run at once; None for 256 on CUDA and 16 on the host.
        max_num_batched_tokens: Most tokens of a step; None for 8192 on CUDA and 512 on the host.
        block_size: Tokens per block.
        gpu_memory_utilization: Share of the device to use.
        enable_extensible_kv_cache: Size the cache after graphs are captured.
        kv_cache_memory_bytes: Size of a fixed cache, only without the extensible one.
        num_gpu_blocks_override: Commit this many blocks at start-up instead of all that fit.
        enable_prefix_caching: Reuse blocks of equal prefixes.
        enforce_eager: Capture no graphs.
        async_scheduling: Do the host's work on a step's tokens while the device computes the next
            step; None for yes on CUDA.
        seed: Seeds requests without a seed of their own.
        on_progress: Called with a phase, what is done and how much there is.

    Attributes:
        config: Limits.
        model: The model with its tokenizer.
        grammars: Makes constraints of `structured_outputs` ready for its vocabulary.
        startup_s: Seconds that each phase of the start took: load, profile, capture, size, and step
            cost where that is measured.

    Raises:
        ModelFileError: If the model cannot be read.
        CacheTooSmallError: If the cache would not hold one sequence of `max_model_len`.
        InvalidArgumentError: If limits contradict each other, or the device is of another kind.
        DriverUnavailableError: If it is a CUDA device and there is none.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel | None = None,
        draft: str | os.PathLike[str] | DSparkModel | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        gpu_memory_utilization: float = 1.0,
        enable_extensible_kv_cache: bool = True,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        seed: int = 0,
        on_progress: Progress | None = None,
    ) -> None:
        kind, ordinal = resolve_device(device)
        where = check_device(kind if kind == "cpu" else f"{kind}:{ordinal}")
        start = time.perf_counter()
        loaded = _loaded(model, where, dtype, max_model_len, on_progress)
        load_s = time.perf_counter() - start
        is_cuda = loaded.model.device.type == "cuda"
        num_seqs = (256 if is_cuda else 16) if max_num_seqs is None else max_num_seqs
        length = loaded.model.num_positions
        self.config = EngineConfig(
            max_model_len=length,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(num_seqs, 8192 if is_cuda else 512)
            if max_num_batched_tokens is None
            else max_num_batched_tokens,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_extensible_kv_cache=enable_extensible_kv_cache,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            seed=seed,
        )
        self.model = loaded
        speculator = drafting = None
        if draft is not None or speculative_config is not None:
            # Imported late: it imports parts of the engine.
            from extkv.dspark.pairing import make_drafting, make_speculator

            speculator, options = make_speculator(
                loaded.model, draft, speculative_config, self.config, on_progress
            )
        sampler = Sampler(
            vocab_size=loaded.config.vocab_size, num_slots=num_seqs, device=loaded.model.device
        )
        runner = ModelRunner(
            HostDecoder.of(loaded.model),
            self.config,
            lambda logits: sampler.profile(logits, num_history_tokens=length),
            on_progress,
            speculator,
        )
        runner.start()
        tokenizer = loaded.tokenizer
        if speculator is not None:
            drafting = make_drafting(speculator, sampler, options, runner)
        self.startup_s = {"load": load_s, **runner.startup_s}
        self.engine = EngineCore(runner, sampler, self.config, tokenizer, drafting)
        eos = loaded.generation.eos_token_ids or tuple(sorted(tokenizer.stop_token_ids))
        self.grammars = GrammarCompiler(
            tokenizer, vocab_size=loaded.config.vocab_size, eos_token_ids=tuple(eos)
        )
        self._limits = ModelLimits(
            vocab_size=loaded.config.vocab_size,
            max_model_len=length,
            eos_token_ids=tuple(eos),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            compile_grammar=self.grammars.compile,
        )
        self._num_requests = itertools.count()

    @property
    def kv_cache(self) -> KVCache:
        """The cache."""
        return self.engine.runner.cache

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Drafts verified and accepted so far; None without a drafter."""
        drafting = self.engine.drafting
        return None if drafting is None else drafting.counts

    @property
    def step_reports(self) -> Sequence[SpeculationReport]:
        """What became of the drafts of each of the last steps; empty without a drafter."""
        drafting = self.engine.drafting
        return [] if drafting is None else list(drafting.rounds.reports)

    @property
    def sizing_plan(self) -> SizingPlan:
        """Where every byte of the device goes, and how many blocks that leaves."""
        return self.engine.runner.sizing_plan

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch as far as memory goes.

        Args:
            prompts: Texts or token ids, one or many.
            sampling_params: For all prompts, or one for each; None for vLLM's defaults.
            use_tqdm: Show a progress bar.
            priority: One rank per prompt, lower first.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidArgumentError: If parameters cannot work.
            InvalidRequestError: If a prompt is empty, too long, or out of the vocabulary. Nothing
                of the batch is left in the engine.
        """
        items = _as_list(prompts)
        outputs: dict[int, RequestOutput] = {}
        with (
            tqdm(total=len(items), desc="Processed prompts", disable=not use_tqdm) as bar,
            closing(self._serve(items, sampling_params, priority)) as steps,
        ):
            for request in itertools.chain.from_iterable(steps):
                if request.is_finished:
                    outputs[request.index] = request.output()
                    bar.update(1)
        return [outputs[index] for index in range(len(items))]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt and yield what is there after each token.

        Closing the iterator aborts the request.
        """
        with closing(self.stream_many([prompt], sampling_params)) as stream:
            for _, output in stream:
                yield output

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Answer prompts in one batch; after each step yield index and output of each with news.

        Arguments and errors are those of `generate`. Closing the iterator aborts what still runs.
        """
        with closing(self._serve(prompts, sampling_params, priority)) as steps:
            for request in itertools.chain.from_iterable(steps):
                yield request.index, request.output()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template.

        Raises:
            InvalidArgumentError: If the model has no chat template.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        prompts = [self.chat_prompt(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins.

        Raises:
            InvalidArgumentError: If the model has no chat template.
        """
        template = self.model.chat_template
        if template is None:
            raise InvalidArgumentError(f"{self.model.path} has no chat template")
        rendered = template.render([dict(message) for message in messages])
        return self.model.tokenizer.encode(rendered, add_special_tokens=False)

    def close(self) -> None:
        """Give the cache back; a call that needs it raises FreedError from then on."""
        self.engine.runner.close()

    def _serve(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> Generator[Collection[_Request]]:
        """Run requests to their end; after each step, yield those that changed."""
        params = _params_for(prompts, sampling_params)
        ranks = [0] * len(prompts) if priority is None else priority
        requests: list[_Request] = []
        try:
            for index, prompt in enumerate(prompts):
                requests.append(self._add(prompt, params[index], ranks[index], index))
            owners = {s.sequence_id: request for request in requests for s in request.sequences}
            while not all(request.is_finished for request in requests):
                changed = (owners.get(s.sequence_id) for s in self.engine.step())
                yield dict.fromkeys(request for request in changed if request is not None)
        finally:
            for request in requests:
                for sequence in request.sequences:
                    self.engine.abort(sequence)

    def _add(
        self, prompt: Prompt, params: SamplingParams, priority: int, index: int = 0
    ) -> _Request:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        number = str(next(self._num_requests))
        sampling = resolve_sampling_params(
            params, self._limits, num_prompt_tokens=min(len(token_ids), self.config.max_model_len)
        )
        request = _Request(index, number, text, token_ids)
        try:
            for place in range(params.n):
                seed = request_seed(
                    params, index=place, engine_seed=self.config.seed, request_id=number
                )
                request.sequences.append(
                    self.engine.add(token_ids, sampling, seed=seed, index=place, priority=priority)
                )
        except BaseException:
            for sequence in request.sequences:
                self.engine.abort(sequence)
            raise
        return request


class _Request:
    """One prompt with its `n` sequences."""

    def __init__(
        self, index: int, request_id: str, prompt: str | None, token_ids: list[int]
    ) -> None:
        self.index = index
        self._request_id = request_id
        self._prompt = prompt
        self._token_ids = token_ids
        self.sequences: list[EngineSequence] = []

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.output.finished() for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Return what is there so far."""
        first = self.sequences[0]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._token_ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=[sequence.output for sequence in self.sequences],
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens,
            metrics=first.metrics,
        )


def _loaded(
    model: str | os.PathLike[str] | LoadedModel | None,
    device: torch.device,
    dtype: str | torch.dtype,
    max_model_len: int | None,
    on_progress: Progress | None,
) -> LoadedModel:
    if model is not None and not isinstance(model, (str, os.PathLike)):
        return model
    path = find_default_model() if model is None else Path(model)
    report = None
    if on_progress is not None:
        notify = on_progress

        def report(done: int, total: int) -> None:
            notify(f"loading {path.name}", done, total)

    return load_model(
        path,
        dtype=resolve_dtype(dtype, device),
        device=device,
        max_model_len=max_model_len,
        ops=kernel_ops() if device.type == "cuda" else None,
        on_progress=report,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidArgumentError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
    return list(params)
