"""Drafts for a batch: context beside the target's, one block per request, one graph per size.

The drafter's layers are layers of the target's cache: same blocks, same slots. So a cached prefix,
a preempted request, a grown cache are complete for both. Each row of a target step leaves the
drafter's keys and values at its slot, also rows that are rejected afterwards: their slots are
written again before anything reads them. A draft block stores its own keys and values at the slots
after the anchor's, where the next step's rows come to lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from extkv.attention.host_cache import HostPagedCache
from extkv.attention.paged_cache import NullCache, PagedCache, cache_layers
from extkv.drafting import DraftBlock, DraftLaw, MarkovDraw
from extkv.engine.batch import StepInputs
from extkv.engine.graphs import DecodeGraphs
from extkv.op_modules import op_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from extkv.drafting import DraftRequests
    from extkv.dspark.options import SpeculativeOptions
    from extkv.engine.config import EngineConfig
    from extkv.kv import KVCache, Layer
    from extkv.models.dspark.model import DSparkModel

LAYER_PREFIX = "draft.layers"
# Sizes of rounds whose views of the block are kept.
MAX_NUM_BLOCKS = 256


class Speculator:
    """Draft for every request of a step.

    Attributes:
        num_drafts: Drafts per request.
        tap_layer_ids: Layers of the target whose output is the drafter's context.
        max_position: First position that cannot be drafted at, by the engine's limit or the
            drafter's.
    """

    def __init__(
        self,
        model: DSparkModel,
        options: SpeculativeOptions,
        config: EngineConfig,
        *,
        vocab_size: int,
    ) -> None:
        """Allocate everything that a captured graph reads or writes.

        Args:
            model: The drafter, on the target's device.
            options: How to draft.
            config: Limits of the engine.
            vocab_size: Columns of the target's logits.

        Raises:
            InvalidArgumentError: If more drafts are asked for than the drafter makes.
        """
        drafter = model.config
        self.model = model
        self.num_drafts = options.num_drafts(drafter.num_drafts)
        self.tap_layer_ids = drafter.tap_layer_ids
        self._options = options
        self._config = config
        self._num_slots = drafter.num_drafts
        self._num_queries = drafter.block_size
        self.max_position = min(config.max_model_len, model.num_positions)
        self._inputs_op = op_module(model.device, "draft_block_inputs")
        self._markov = op_module(model.device, "markov_step")
        source = options.confidence_source(has_head=drafter.has_confidence_head)
        self._has_logits = source in {"head", "both"}
        self._has_margins = source in {"margin", "both"}
        self._graphs = DecodeGraphs()
        self._paged: PagedCache | HostPagedCache | None = None
        # The tensors that temperatures and seeds of the round are copies of.
        self._parameters: tuple[torch.Tensor, torch.Tensor] | None = None
        self._blocks: dict[tuple[int, int], DraftBlock] = {}
        self._allocate(config.max_num_seqs, vocab_size)

    @property
    def tokens(self) -> torch.Tensor:
        """Drafts of the last round (int64, [max_num_seqs, num_slots], device)."""
        return self._tokens

    @property
    def confidence_logits(self) -> torch.Tensor | None:
        """Of the confidence head in the last round, if a schedule wants them.

        (float32, [max_num_seqs, num_drafts], device.)
        """
        return self._confidence_logits

    @property
    def margins(self) -> torch.Tensor | None:
        """Largest minus second largest base logit in the last round, if a schedule wants them.

        (float32, [max_num_seqs, num_drafts], device.)
        """
        return self._margins

    def layers(self) -> list[Layer]:
        """Return what the drafter caches, to go beside the target's layers."""
        config = self.model.decoder.config
        return cache_layers(config, self._config.block_size, self.model.dtype, prefix=LAYER_PREFIX)

    def attach(self, cache: KVCache) -> None:
        """Use the drafter's layers of a cache."""
        if cache.device.type == "cpu":
            self._paged = HostPagedCache(
                cache, self.model.decoder.config, prefix=LAYER_PREFIX, is_causal=False
            )
            return
        self._paged = PagedCache(
            cache,
            self.model.decoder.config,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._config.max_model_len,
            max_query_len=self._num_queries,
            prefix=LAYER_PREFIX,
            is_causal=False,
        )

    def detach(self) -> None:
        """Let go of the cache, and of the graphs that read it."""
        self._paged, self._graphs = None, DecodeGraphs()

    def store_context(self, taps: torch.Tensor, inputs: StepInputs) -> None:
        """Store the context of a target step's rows.

        Args:
            taps (model dtype, [num_taps, num_tokens, hidden_size], device): Of the rows.
            inputs: The step.
        """
        positions = inputs.positions.clamp(max=self.model.num_positions - 1)
        keys, values = self.model.context(taps, positions)
        if self._paged is not None:
            self._paged.append(keys, values, inputs.slot_mapping)

    def capture(
        self, sizes: list[int], on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture a draft round for each batch size."""
        self._fill_blank()
        self._graphs.capture(sizes, self._draft, on_progress)

    @torch.inference_mode()
    def propose(self, inputs: StepInputs, requests: DraftRequests) -> torch.Tensor:
        """Draft after a step.

        Args:
            inputs: The step that was verified.
            requests: What came of it, one entry per request of the step.

        Returns:
            Tensor (int64, [num_reqs, num_drafts], device): Drafts; not to be used for requests that
            draft nothing. Overwritten by the next round.
        """
        num_reqs = requests.anchors.shape[0]
        size = self._graphs.size_for(num_reqs)
        count = num_reqs if size is None else size
        self._copy_parameters(requests)
        self._anchors[:num_reqs].copy_(requests.anchors)
        self._num_rejected[:num_reqs].copy_(requests.num_rejected)
        self._block_table[:num_reqs].copy_(inputs.block_table[:num_reqs])
        # Requests of the graph past the step's have no rows.
        starts = self._starts[: count + 1]
        starts[: num_reqs + 1].copy_(inputs.query_start_loc[: num_reqs + 1])
        if num_reqs < count:
            starts[num_reqs + 1 :] = inputs.query_start_loc[num_reqs]
        block = self._block_of(count, inputs.positions.shape[0])
        self._inputs_op.draft_block_inputs(
            self._anchors[:count],
            inputs.positions,
            starts,
            self._num_rejected[:count],
            self._block_table[:count],
            block_size=self._config.block_size,
            num_drafts=self._num_slots,
            mask_token_id=self.model.config.mask_token_id,
            vocab_size=self.model.decoder.config.vocab_size,
            max_position=self.max_position,
            sample_from_anchor=self.model.config.samples_from_anchor,
            out=block,
        )
        if size is None:
            self._draft(num_reqs)
        else:
            self._graphs.replay(size)
        return self._tokens[:num_reqs, : self.num_drafts]

    def law(self, draft_rows: torch.Tensor) -> DraftLaw | None:
        """Return the law of the last round's drafts, as `verify_drafts` takes it.

        Args:
            draft_rows (int64, [num_reqs], device): Row of each request in that round.

        Returns:
            The law; None where drafts are chosen and not drawn.
        """
        if self._options.draft_sample_method == "greedy":
            return None
        if self._draft_logits is not None:
            return DraftLaw(
                self._draft_logits,
                self._logits,
                self._log_sum_exp,
                draft_rows=draft_rows,
                draft_ids=self._draft_ids,
            )
        weights = self.model.weights
        is_vanilla = self._codes is None
        return DraftLaw(
            base_logits=self._base_logits,
            logits=self._logits,
            log_sum_exp=self._log_sum_exp,
            projection=self.model.markov_weight,
            embedding=weights.markov_w1 if is_vanilla else None,
            codes=self._codes,
            draft_rows=draft_rows,
            draft_ids=self._draft_ids,
        )

    @torch.inference_mode()
    def run_blank(self, num_reqs: int) -> None:
        """Run a round of requests without rows, as its graph where there is one.

        For the time it takes, before the first step.
        """
        if num_reqs in self._graphs.sizes:
            self._graphs.replay(num_reqs)
        else:
            self._fill_blank()
            self._draft(num_reqs)

    def profile(self, num_reqs: int) -> None:
        """Run the largest round without a cache, so that its memory can be measured."""
        paged, self._paged = self._paged, None
        try:
            self._fill_blank()
            self._draft(num_reqs)
        finally:
            self._paged = paged

    @torch.inference_mode()
    def _draft(self, num_reqs: int) -> torch.Tensor:
        """Backbone, base logits and Markov steps over the persistent buffers."""
        model = self.model
        num_rows = num_reqs * self._num_queries
        cache: NullCache | PagedCache | HostPagedCache = NullCache()
        if self._paged is not None:
            cache = self._paged
            cache.bind(
                StepInputs(
                    token_ids=self._block.token_ids[:num_reqs].flatten(),
                    positions=self._block.positions[:num_reqs].flatten(),
                    slot_mapping=self._block.slots[:num_reqs].flatten(),
                    query_start_loc=self._block_starts[: num_reqs + 1],
                    seq_lens=self._block.seq_lens[:num_reqs],
                    block_table=self._block_table[:num_reqs],
                    sample_rows=self._block.sample_rows[:num_reqs].flatten(),
                    max_query_len=self._num_queries,
                )
            )
        hidden = model.block_forward(
            self._block.token_ids.flatten()[:num_rows],
            self._block.positions.flatten()[:num_rows],
            cache,
        )
        rows = hidden.view(num_reqs, self._num_queries, -1)[:, -self._num_slots :]
        # Slots past the drafts that are wanted were there to be seen.
        rows = rows[:, : self.num_drafts]
        base = self._base_logits[:num_reqs]
        model.base_logits(rows.flatten(0, 1), out=base.flatten(0, 1))
        self._markov_steps(num_reqs, rows, base)
        self._note_signals(num_reqs, rows, base)
        return self._tokens[:num_reqs]

    def _note_signals(self, num_reqs: int, rows: torch.Tensor, base: torch.Tensor) -> None:
        """Keep what schedules look at: functions of the drafts before each draft, not of itself."""
        count = self.num_drafts
        if self._confidence_logits is not None:
            drafts = self._tokens[:num_reqs, : count - 1]
            previous = torch.cat((self._anchors[:num_reqs, None], drafts), dim=1)
            logits = self.model.confidence_logits(rows[:, :count], previous)
            self._confidence_logits[:num_reqs].copy_(logits)
        if self._margins is not None:
            # Two passes instead of a top-2, which sorts; the largest is put back where it was.
            largest, place = base.max(dim=-1, keepdim=True)
            base.scatter_(-1, place, -torch.inf)
            margins = largest.squeeze(-1).float() - base.amax(dim=-1).float()
            base.scatter_(-1, place, largest)
            self._margins[:num_reqs].copy_(margins[:, :count])

    def _markov_steps(self, num_reqs: int, rows: torch.Tensor, base: torch.Tensor) -> None:
        model = self.model
        is_drawn = self._options.draft_sample_method == "probabilistic"
        temperature = self._temperature[:num_reqs] if is_drawn else None
        seeds = self._seeds[:num_reqs] if is_drawn else None
        previous = self._anchors[:num_reqs]
        state = model.initial_state(num_reqs)
        for slot in range(self.num_drafts):
            source: dict[str, torch.Tensor | None] = {}
            if self._codes is not None:
                codes, state = model.codes(previous, rows[:, slot], state)
                self._codes[:num_reqs, slot].copy_(codes)
                source = {"codes": self._codes[:num_reqs, slot]}
            elif model.markov_weight is not None:
                source = {"tokens": previous, "embedding": model.weights.markov_w1}
            logits, weight = base[:, slot], model.markov_weight
            if self._draft_logits is not None:
                logits = self._draft_logits[:num_reqs, slot]
                logits.copy_(self._markov.markov_logits(base[:, slot], weight, **source))
                source, weight = {}, None
            self._markov.markov_step(
                logits,
                weight,
                temperature,
                seeds,
                self._block.sample_positions[:num_reqs, slot] if is_drawn else None,
                slot=slot,
                **source,
                draft_to_target=self._draft_to_target,
                workspace=self._workspace,
                out=MarkovDraw(
                    self._tokens[:num_reqs, slot],
                    self._logits[:num_reqs, slot],
                    self._log_sum_exp[:num_reqs, slot],
                    self._flags[:num_reqs, slot],
                ),
            )
            previous = self._tokens[:num_reqs, slot]

    def _allocate(self, num_seqs: int, target_vocab_size: int) -> None:
        model, device = self.model, self.model.device
        num_slots, num_queries = self._num_slots, self._num_queries

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        int64, int32, float32 = torch.int64, torch.int32, torch.float32
        num_tokens = self._config.max_num_batched_tokens
        self._block = DraftBlock(
            token_ids=zeros(num_seqs, num_queries, dtype=int64),
            positions=zeros(num_seqs, num_queries, dtype=int64),
            slots=zeros(num_seqs, num_queries, dtype=int64),
            sample_rows=zeros(num_seqs, num_slots, dtype=int64),
            sample_positions=zeros(num_seqs, num_slots, dtype=int64),
            anchor_positions=zeros(num_seqs, dtype=int64),
            seq_lens=zeros(num_seqs, dtype=int32),
            context_positions=zeros(num_tokens, dtype=int64),
            context_slots=zeros(num_tokens, dtype=int64),
        )
        self._anchors = zeros(num_seqs, dtype=int64)
        self._num_rejected = zeros(num_seqs, dtype=int32)
        self._temperature = zeros(num_seqs, dtype=float32)
        self._seeds = zeros(num_seqs, dtype=int64)
        self._block_table = zeros(num_seqs, self._config.max_blocks_per_seq, dtype=int32)
        self._starts = zeros(num_seqs + 1, dtype=int32)
        self._block_starts = torch.arange(num_seqs + 1, dtype=int32, device=device) * num_queries
        vocab_size = model.lm_head.shape[0]
        # The law of the drafts must outlive the target's next step.
        shape = (num_seqs, self.num_drafts, vocab_size)
        self._base_logits = zeros(*shape, dtype=model.dtype)
        self._tokens = zeros(num_seqs, num_slots, dtype=int64)
        self._logits = zeros(num_seqs, num_slots, dtype=float32)
        self._log_sum_exp = zeros(num_seqs, num_slots, dtype=float32)
        self._flags = zeros(num_seqs, num_slots, dtype=int32)
        signals = (num_seqs, self.num_drafts)
        self._confidence_logits = zeros(*signals, dtype=float32) if self._has_logits else None
        self._margins = zeros(*signals, dtype=float32) if self._has_margins else None
        self._codes: torch.Tensor | None = None
        weight = model.markov_weight
        # On the host, reading the head once more costs more than keeping what was drawn from.
        self._draft_logits: torch.Tensor | None = None
        if device.type == "cpu" and weight is not None:
            self._draft_logits = zeros(*shape, dtype=float32)
        if weight is not None and model.config.markov_head_type != "vanilla":
            self._codes = zeros(num_seqs, num_slots, weight.shape[1], dtype=weight.dtype)
        size = self._markov.markov_workspace_size(num_seqs, vocab_size)
        self._workspace = torch.empty(size, dtype=float32, device=device)
        self._draft_to_target: torch.Tensor | None = None
        self._draft_ids: torch.Tensor | None = None
        if model.target_ids is not None:
            drafts = torch.arange(vocab_size, dtype=int64, device=device)
            targets = model.target_ids[:vocab_size]
            self._draft_to_target = targets - drafts
            self._draft_ids = torch.full((target_vocab_size,), -1, dtype=int32, device=device)
            self._draft_ids[targets] = drafts.to(int32)

    def _copy_parameters(self, requests: DraftRequests) -> None:
        """Copy temperatures and seeds, but for those that are there from the round before."""
        temperature, seeds = requests.temperature, requests.seeds
        known = self._parameters
        if known is None or known[0] is not temperature or known[1] is not seeds:
            self._temperature[: len(temperature)].copy_(temperature)
            self._seeds[: len(seeds)].copy_(seeds)
            # Holding them keeps their ids from being given to others.
            self._parameters = (temperature, seeds)

    def _block_of(self, num_reqs: int, num_rows: int) -> DraftBlock:
        """Return views of the block; those of sizes that come often are kept."""
        found = self._blocks.get((num_reqs, num_rows))
        if found is None:
            *requests, positions, slots = self._block
            tensors = [tensor[:num_reqs] for tensor in requests]
            found = DraftBlock._make([*tensors, positions[:num_rows], slots[:num_rows]])
            if len(self._blocks) == MAX_NUM_BLOCKS:
                self._blocks.clear()
            self._blocks[num_reqs, num_rows] = found
        return found

    def _fill_blank(self) -> None:
        """Set the buffers to requests without rows: they store nothing and read nothing."""
        for tensor in (self._block.token_ids, self._block.positions, self._block.seq_lens):
            tensor.zero_()
        self._block.slots.fill_(-1)
        self._temperature.zero_()
        self._parameters = None
