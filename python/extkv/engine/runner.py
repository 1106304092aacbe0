"""Runs steps: uploads a plan, runs the model, returns logits; and sizes the cache at start-up."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from extkv.attention.host_cache import HostPagedCache
from extkv.attention.paged_cache import NullCache, PagedCache, cache_layers
from extkv.engine.batch import InputBuffers
from extkv.engine.config import HOST_CACHE_BYTES
from extkv.engine.graphs import DecodeGraphs
from extkv.errors import FreedError
from extkv.kv import SizeAfterCapture, plan_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.dspark.speculator import Speculator
    from extkv.engine.batch import StepInputs
    from extkv.engine.config import EngineConfig
    from extkv.kv import KVCache, SizingPlan
    from extkv.models.decoder import DecoderModel
    from extkv.sched import StepPlan

    # Called with a step's largest logits, so that its memory is measured.
    ProfileSampler = Callable[[torch.Tensor], object]


class ModelRunner:
    """A model, its cache and its graphs.

    Args:
        model: The model, on its device.
        config: Limits of the engine.
        sample_for_profile: Runs the most expensive sampling over logits; its memory counts in the
            size of the cache.
        on_progress: Called with a phase, what is done and how much there is.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: EngineConfig,
        sample_for_profile: ProfileSampler,
        on_progress: Callable[[str, int, int], None] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.speculator = speculator
        self._query_len = 1 if speculator is None else 1 + speculator.num_drafts
        self._sample_for_profile = sample_for_profile
        self._on_progress = on_progress
        self._buffers = InputBuffers(config, model.device, max_query_len=self._query_len)
        # By the most tokens of a sequence: 1, and with drafts also 1 and the drafts.
        self._graphs = {length: DecodeGraphs() for length in (1, self._query_len)}
        self._views: dict[tuple[int, int], StepInputs] = {}
        self._paged: PagedCache | HostPagedCache | None = None
        self.inputs: StepInputs
        self.cache: KVCache
        self.sizing_plan: SizingPlan
        self.num_blocks = 0
        self.startup_s: dict[str, float] = {}

    def start(self) -> None:
        """Profile, reserve, capture, measure, commit.

        Steps may use `num_blocks` blocks. On CUDA all of them are committed now. On the host, which
        other programs need too, the cache starts small: `back` commits blocks as steps use them.

        Raises:
            CacheTooSmallError: If the cache would not hold one request of `max_model_len`.
            OutOfMemoryError: If memory is gone meanwhile.
        """
        config = self.config
        self._since = time.perf_counter()
        layers = cache_layers(self.model.config, config.block_size, self.model.dtype)
        weight_bytes = self.model.weights.num_bytes
        if self.speculator is not None:
            layers += self.speculator.layers()
            weight_bytes += self.speculator.model.num_bytes
        bytes_per_block = plan_cache(layers, max_blocks=1).bytes_per_block
        max_blocks = self._most_blocks(bytes_per_block)
        fixed_bytes = config.kv_cache_memory_bytes
        if fixed_bytes is None and max_blocks is not None and not config.enable_extensible_kv_cache:
            fixed_bytes = max_blocks * bytes_per_block
        sizer = SizeAfterCapture(
            layers,
            device=str(self.model.device),
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            kv_cache_memory_bytes=fixed_bytes,
            extensible=config.enable_extensible_kv_cache,
            max_blocks=max_blocks,
            loaded_weight_bytes=weight_bytes,
        )
        sizer.weights_loaded()
        sizer.profile(lambda: self._worst_step(NullCache()))
        self._note("profile")
        if config.enable_extensible_kv_cache:
            self._attach(sizer.reserve(num_warmup_blocks=2))
            sizer.capture(self._capture)
            self._note("capture")
            sizer.measure(lambda: self._worst_step(self._paged or NullCache()))
            self.sizing_plan = sizer.plan()
            self._commit(sizer)
            self._note("size")
        else:
            sizer.measure(lambda: self._worst_step(NullCache()))
            self.sizing_plan = sizer.plan()
            self._attach(sizer.commit())
            self.num_blocks = self.cache.num_blocks
            self._note("size")
            self._capture()
            self._note("capture")

    def back(self, plan: StepPlan) -> None:
        """Commit the blocks of a plan that are not committed yet; see `start`.

        The scheduler hands out new blocks by ascending ids before it reuses old ones, so what is
        committed fits the text so far.

        Raises:
            OutOfMemoryError: If the device is too full; nothing changed.
        """
        num_committed = self.cache.num_blocks
        if num_committed < self.num_blocks:
            num_blocks = 1 + int(plan.block_tables.max(initial=0))
            if num_blocks > num_committed:
                self.cache.commit(num_blocks)

    def close(self) -> None:
        """Give the cache back, with the graphs and views that hold it."""
        self._graphs = {length: DecodeGraphs() for length in self._graphs}
        self._views, self._paged = {}, None
        if self.speculator is not None:
            self.speculator.detach()
        self.cache.close()

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes of captured decode graphs."""
        return self._graphs[1].sizes

    @property
    def graph_token_sizes(self) -> list[int]:
        """Numbers of tokens of captured graphs of steps with drafts; none without a drafter."""
        return self._graphs[self._query_len].sizes if self._query_len > 1 else []

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        prompt_logits: bool = False,
        place_drafts: Callable[[StepPlan, StepInputs], None] | None = None,
    ) -> torch.Tensor:
        """Run a step and return logits of its sampled rows.

        Args:
            plan: The step.
            prompt_logits: Return logits of every token instead.
            place_drafts: Puts drafts where the plan has placeholders, on the device.

        Returns:
            Tensor (model dtype, [num_rows, vocab_size], device), overwritten by the next step.

        Raises:
            FreedError: If the runner was closed or never started.
        """
        num_tokens = len(plan.input_token_ids)
        length = 1 if num_tokens == len(plan.seq_lens) else self._query_len
        graphs = self._graphs[length]
        size = graphs.size_for(num_tokens) if plan.is_pure_decode else None
        if size is not None and not prompt_logits:
            self.inputs = self._buffers.fill_decode(plan, size, length)
            if place_drafts is not None:
                place_drafts(plan, self.inputs)
            return graphs.replay(size)[: len(plan.sample_rows)]
        self.inputs = inputs = self._buffers.fill(plan)
        if place_drafts is not None:
            place_drafts(plan, inputs)
        hidden = self._forward(inputs, self._bound(inputs))
        if prompt_logits:
            return self.model.compute_logits(hidden)
        return self.model.compute_logits(hidden.index_select(0, inputs.sample_rows))

    @torch.inference_mode()
    def run_blank(self, num_tokens: int, max_query_len: int) -> None:
        """Run a decode step that touches no cache, as its graph where there is one.

        For the time it takes, before the first step. Arguments are those of `fill_decode`.
        """
        graphs = self._graphs[max_query_len]
        if num_tokens in graphs.sizes:
            graphs.replay(num_tokens)
            return
        inputs = self._buffers.decode_views(num_tokens, max_query_len)
        self.model.compute_logits(self._forward(inputs, self._bound(inputs)))

    def _forward(
        self, inputs: StepInputs, cache: NullCache | PagedCache | HostPagedCache
    ) -> torch.Tensor:
        """Run the model, and leave the drafter's context beside its keys and values."""
        if self.speculator is None:
            return self.model.forward(inputs.token_ids, inputs.positions, cache)
        hidden, taps = self.model.forward(
            inputs.token_ids, inputs.positions, cache, taps=self.speculator.tap_layer_ids
        )
        self.speculator.store_context(taps, inputs)
        return hidden

    def _note(self, phase: str) -> None:
        """Note how long a phase of the start took."""
        now = time.perf_counter()
        self.startup_s[phase], self._since = now - self._since, now

    def _commit(self, sizer: SizeAfterCapture) -> None:
        planned, override = self.sizing_plan.num_blocks, self.config.num_gpu_blocks_override
        num_blocks = planned if override is None else min(planned, override)
        self.num_blocks = max(num_blocks, self.cache.num_blocks)
        if self.model.device.type == "cuda":
            if num_blocks < planned:
                self.cache.commit(self.num_blocks)
            else:
                self.num_blocks = sizer.commit().num_blocks

    def _most_blocks(self, bytes_per_block: int) -> int | None:
        """Bound the cache on the host, where memory is not its alone."""
        if self.model.device.type == "cuda":
            return None
        useful = self.config.max_num_seqs * (self.config.max_blocks_per_seq + 1)
        least = self.config.max_blocks_per_seq + 1
        return max(least, min(useful, HOST_CACHE_BYTES // bytes_per_block))

    def _attach(self, cache: KVCache) -> None:
        self.cache = cache
        if self.speculator is not None:
            self.speculator.attach(cache)
        if cache.device.type == "cpu":
            self._paged = HostPagedCache(cache, self.model.config)
            return
        self._paged = PagedCache(
            cache,
            self.model.config,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            max_query_len=self._query_len,
        )

    def _bound(self, inputs: StepInputs) -> PagedCache | HostPagedCache:
        if self._paged is None:
            raise FreedError("the runner has no cache: it was closed or never started")
        self._paged.bind(inputs)
        return self._paged

    def _capture(self) -> None:
        if self.model.device.type != "cuda" or self.config.enforce_eager:
            return
        on_progress = self._on_progress
        sizes = {1: self.config.graph_batch_sizes()}
        if self._query_len > 1:
            sizes[self._query_len] = self.config.graph_token_sizes(self._query_len)
        # One for all graphs: outputs of their own would all stay in memory.
        shape = (max(map(max, sizes.values())), self.model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        report = None
        if on_progress is not None:
            notify = on_progress

            def report(done: int, total: int) -> None:
                notify("capturing graphs", done, total)

        pool = None
        for length in sorted(sizes, reverse=True):
            graphs, graphs.pool = self._graphs[length], pool
            for size in sizes[length]:
                self._views[length, size] = self._buffers.decode_views(size, length)
            graphs.capture(sizes[length], partial(self._decode_forward, length), report)
            pool = graphs.pool
        if self.speculator is not None:
            self.speculator.capture(sizes[1], report)

    @torch.inference_mode()
    def _decode_forward(self, length: int, size: int) -> torch.Tensor:
        inputs = self._views[length, size]
        hidden = self._forward(inputs, self._bound(inputs))
        return self.model.compute_logits(hidden, out=self._logits[: hidden.shape[0]])

    @torch.inference_mode()
    def _worst_step(self, cache: NullCache | PagedCache | HostPagedCache) -> None:
        """Run the most tokens a step can have, and sample the most rows."""
        inputs = self._buffers.worst_case()
        if not isinstance(cache, NullCache):
            cache.bind(inputs)
        hidden = self._forward(inputs, cache)
        num_rows = inputs.sample_rows.shape[0]
        self._sample_for_profile(self.model.compute_logits(hidden[:num_rows]))
        if self.speculator is not None:
            self.speculator.profile(self.config.max_num_seqs)
