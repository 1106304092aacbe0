"""Generation by drafts on a toy model, many seeds at once, and the exact law of what it must emit.

The target's logits depend on the position and on the token before; the draft's on the position and
token of its anchor, on the slot, and through a Markov head on the token before. So a row that is
one off, a token of another slot, or noise used twice changes the law of the output. Rounds follow
each other until every seed has its tokens: noise of one round that comes back in the next shows.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from extkv.drafting import DraftLaw
from extkv.reference.logit_cutoff import logit_cutoff
from extkv.reference.token_bitmask import apply_token_bitmask

if TYPE_CHECKING:
    from collections.abc import Callable

EOS = 0
START = 1


@dataclasses.dataclass(frozen=True)
class Chain:
    """A toy model and how it is sampled; `num_tokens` are emitted after the token START.

    `penalty` is a presence penalty that counts START, `bad` has pairs of tokens of which the second
    may not follow the first, `stops` ends a sequence at EOS, and `is_mixed` makes every other seed
    greedy. `dtype` is that of the draft's base logits and of its Markov head.
    """

    vocab_size: int = 4
    num_tokens: int = 2
    num_drafts: int = 2
    temperature: float = 1.0
    filters: tuple[tuple[str, float], ...] = ()
    min_tokens: int = 0
    penalty: float = 0.0
    has_masks: bool = False
    repetition: float = 1.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    bad: tuple[tuple[int, int], ...] = ()
    stops: bool = False
    is_mixed: bool = False
    method: str = "standard"
    is_one_hot: bool = False
    dtype: torch.dtype = torch.float32
    has_head: bool = True
    has_codes: bool = False
    num_draft_ids: int | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """What differs from the default."""
        parts = [
            f"{field.name}={str(getattr(self, field.name)).removeprefix('torch.')}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(parts) or "default"


class Tables:
    """Logits of a chain's models."""

    def __init__(self, chain: Chain, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(chain.seed)
        size, length = chain.vocab_size, chain.num_tokens + chain.num_drafts + 1

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        num_draft_ids = chain.num_draft_ids or size
        self.target = normal(length, size, size).to(device) * 1.2
        self.target[: chain.min_tokens, :, EOS] = -torch.inf
        # Which token may follow which, at each place; the last one may always, so that one can.
        self.may_follow = torch.ones(length, size, size, dtype=torch.bool)
        if chain.has_masks:
            self.may_follow = normal(length, size, size) > 0
            self.may_follow[:, :, size - 1] = True
        base = normal(length, size, chain.num_drafts, num_draft_ids) * 1.2
        self.base = base.to(device, chain.dtype)
        self.projection = self.embedding = None
        if chain.has_head:
            self.projection = (normal(num_draft_ids, 5) * 0.6).to(device, chain.dtype)
            self.embedding = (normal(size, 5) * 0.6).to(device, chain.dtype)
        # Drafts name the odd tokens first, so that ids and offsets differ.
        order = [*range(1, size, 2), *range(0, size, 2)][:num_draft_ids]
        ids = torch.tensor(sorted(order))
        self.offsets = self.draft_ids = None
        if chain.num_draft_ids is not None:
            self.offsets = (ids - torch.arange(num_draft_ids)).to(device)
            self.draft_ids = torch.full((size,), -1, dtype=torch.int32)
            self.draft_ids[ids] = torch.arange(num_draft_ids, dtype=torch.int32)
            self.draft_ids = self.draft_ids.to(device)


def exact_law(chain: Chain, tables: Tables) -> torch.Tensor:
    """Return the probability of each sequence of `num_tokens`, [vocab_size ** num_tokens]."""
    target = tables.target.cpu().to(torch.float64)
    law = []
    for tokens in itertools.product(range(chain.vocab_size), repeat=chain.num_tokens):
        probability, sequence = 1.0, [START, *tokens]
        for step, token in enumerate(tokens):
            if chain.stops and EOS in tokens[:step]:
                # What follows the end is written as EOS.
                probability *= float(token == EOS)
                continue
            logits = target[step, sequence[step]].clone()
            logits[~tables.may_follow[step, sequence[step]]] = -torch.inf
            logits = changed(logits, sequence[: step + 1], chain)
            probability *= float(filtered(logits, chain)[token])
        law.append(probability)
    return torch.tensor(law, dtype=torch.float64)


def changed(logits: torch.Tensor, before: list[int], chain: Chain) -> torch.Tensor:
    """Return one row as the request wants it: masks, biases, penalties, in vLLM's order."""
    logits = logits.clone()
    if chain.allowed:
        hidden = [token for token in range(chain.vocab_size) if token not in chain.allowed]
        logits[hidden] = -torch.inf
    for first, second in chain.bad:
        if before[-1] == first:
            logits[second] = -torch.inf
    for token, value in chain.bias:
        logits[token] += value
    for token in set(before):
        value = logits[token]
        logits[token] = value / chain.repetition if value > 0 else value * chain.repetition
        logits[token] -= chain.penalty
    for token in before[1:]:
        logits[token] -= chain.frequency
    return logits


def filtered(logits: torch.Tensor, chain: Chain) -> torch.Tensor:
    """Return the distribution of one row: min-p, then top-k, then top-p."""
    if chain.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), chain.vocab_size).to(torch.float64)
    filters = dict(chain.filters)
    scaled = logits / chain.temperature
    probabilities = scaled.softmax(0)
    kept = probabilities >= filters.get("min_p", 0.0) * probabilities.max()
    scaled = scaled.masked_fill(~kept, -torch.inf)
    if filters.get("top_k", 0) > 0:
        kth = scaled.sort(descending=True).values[int(filters["top_k"]) - 1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if filters.get("top_p", 1.0) < 1:
        ordered = scaled.softmax(0).sort(descending=True).values
        above = ordered.cumsum(0) - ordered
        smallest = ordered[above < filters["top_p"]].min()
        scaled = scaled.masked_fill(scaled.softmax(0) < smallest, -torch.inf)
    return scaled.softmax(0)


class Run:
    """The state of all seeds while they generate."""

    def __init__(self, chain: Chain, tables: Tables, ops: Any, num_seeds: int) -> None:
        self.chain, self.tables, self.ops = chain, tables, ops
        self.device = tables.target.device
        self.seeds = torch.arange(num_seeds, device=self.device) * 0x9E3779B97F4A7C15 % 2**63
        width = chain.num_tokens + chain.num_drafts + 2
        self.tokens = torch.full((num_seeds, width), -1, device=self.device)
        self.tokens[:, 0] = START
        self.counts = torch.zeros(num_seeds, dtype=torch.int64, device=self.device)
        self.heat = torch.full((num_seeds,), chain.temperature, device=self.device)
        if chain.is_mixed:
            self.heat[1::2] = 0.0
        self.num_accepted = self.num_drafted = 0

    def round(self, active: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Draft and verify once for the seeds named, with at most `lengths` drafts each."""
        chain, counts = self.chain, self.counts[active]
        anchors = self.tokens[active, counts]
        drafts, law = self.draft(active, anchors, counts)
        if lengths is None:
            # Windows of different sizes, the first one full; the choice knows the past only.
            lengths = chain.num_drafts - (counts + anchors - START) % 2
        lengths = lengths.clamp(0, chain.num_drafts)
        starts = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0))
        request = torch.arange(len(active), device=self.device).repeat_interleave(lengths + 1)
        index = torch.arange(len(request), device=self.device) - starts[request]
        window = torch.cat([anchors[:, None], drafts], dim=1)
        token_ids = window[request, index]
        logits, cutoff = self.target_rows(active[request], counts[request], index, window[request])
        heat = self.heat[active][request]
        found = self.ops.verify_drafts(
            logits,
            token_ids,
            starts.to(torch.int32),
            heat,
            self.seeds[active][request],
            counts[request] + index + 1,
            law,
            max_num_drafts=chain.num_drafts,
            method=chain.method,
            cutoff=cutoff,
        )
        assert int(found.flags.count_nonzero()) == 0
        accepted = found.num_accepted.to(torch.int64)
        assert bool(((accepted >= 0) & (accepted <= lengths)).all())
        self.num_accepted += int(accepted.sum())
        self.num_drafted += int(lengths.sum())
        slots = torch.arange(chain.num_drafts, device=self.device)
        for slot in slots:
            kept = slot < accepted
            self.tokens[active[kept], counts[kept] + 1 + slot] = drafts[kept, slot]
        self.tokens[active, counts + accepted + 1] = found.next_tokens
        self.counts[active] += accepted + 1

    def draft(
        self, active: torch.Tensor, anchors: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, DraftLaw | None]:
        """Return drafts [num_active, num_drafts] and their law."""
        chain, tables = self.chain, self.tables
        base = tables.base[counts, anchors]
        shape = (len(active), chain.num_drafts)
        drafts = torch.full(shape, -1, device=self.device)
        values = torch.full((2, *shape), torch.nan, device=self.device)
        heat = self.heat[active]
        codes = []
        previous = anchors
        for slot in range(chain.num_drafts):
            head: dict[str, Any] = {}
            if tables.embedding is not None:
                head = {"tokens": previous, "embedding": tables.embedding}
            if tables.embedding is not None and chain.has_codes:
                head = {"codes": tables.embedding[previous].tanh()}
                codes.append(head["codes"])
            drawn = self.ops.markov_step(
                base[:, slot],
                tables.projection,
                None if chain.is_one_hot else heat,
                self.seeds[active],
                counts + slot + 1,
                slot=slot,
                draft_to_target=tables.offsets,
                **head,
            )
            previous = drawn.tokens
            drafts[:, slot] = previous
            values[0, :, slot], values[1, :, slot] = drawn.logits, drawn.log_sum_exp
        if chain.is_one_hot:
            return drafts, None
        law = DraftLaw(
            base,
            values[0],
            values[1],
            projection=tables.projection,
            embedding=None if chain.has_codes else tables.embedding,
            codes=torch.stack(codes, dim=1) if codes else None,
            draft_ids=tables.draft_ids,
        )
        return drafts, law

    def target_rows(
        self,
        owner: torch.Tensor,
        counts: torch.Tensor,
        index: torch.Tensor,
        window: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits of all rows, changed by penalties and masks of each, and their cut-offs."""
        chain = self.chain
        rows = torch.arange(len(owner), device=self.device)
        last = window[rows, index]
        logits = self._changed(self.tables.target[counts + index, last], last)
        if chain.penalty or chain.repetition != 1 or chain.frequency:
            # How often each token stands before the row, START included.
            seen = torch.zeros_like(logits)
            for position in range(self.tokens.shape[1]):
                is_before = position <= counts
                token = self.tokens[owner, position]
                seen[rows[is_before], token[is_before]] += 1.0
            for slot in range(1, window.shape[1]):
                is_before = slot <= index
                seen[rows[is_before], window[is_before, slot]] += 1.0
            is_seen = (seen > 0).to(logits.dtype)
            factor = torch.where(logits > 0, 1 / chain.repetition, chain.repetition)
            logits = torch.where(seen > 0, logits * factor, logits) - chain.penalty * is_seen
            output = seen.clone()
            output[:, START] -= 1.0
            logits = logits - chain.frequency * output
        if chain.has_masks:
            words = packed(self.tables.may_follow[(counts + index).cpu(), last.cpu()])
            apply_token_bitmask(logits, words.to(self.device), rows)
        if not chain.filters:
            return logits, None
        parameters = {
            name: torch.full(
                (len(rows),),
                int(value) if name == "top_k" else value,
                device=self.device,
            )
            for name, value in chain.filters
        }
        return logits, logit_cutoff(logits, self.heat[owner], **parameters)

    def _changed(self, logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return rows with masks and biases; `last` is the token before each."""
        chain = self.chain
        if chain.allowed:
            is_allowed = torch.zeros(chain.vocab_size, dtype=torch.bool, device=self.device)
            is_allowed[list(chain.allowed)] = True
            logits = torch.where(is_allowed, logits, -torch.inf)
        if chain.bad:
            logits = logits.clone()
            for first, second in chain.bad:
                logits[last == first, second] = -torch.inf
        for token, value in chain.bias:
            logits = logits.clone()
            logits[:, token] += value
        return logits

    @property
    def is_active(self) -> torch.Tensor:
        """Seeds that have not all their tokens."""
        is_short = self.counts < self.chain.num_tokens
        if self.chain.stops:
            is_short &= (self.tokens[:, 1 : self.chain.num_tokens + 1] != EOS).all(1)
        return is_short

    def emitted(self) -> torch.Tensor:
        """Return the tokens of each seed ([num_seeds, num_tokens]), EOS after the end."""
        tokens = self.tokens[:, 1 : self.chain.num_tokens + 1]
        if not self.chain.stops:
            return tokens
        has_ended = ((tokens == EOS).cumsum(1) - (tokens == EOS).to(torch.int64)) > 0
        return torch.where(has_ended, EOS, tokens)


def packed(may_follow: torch.Tensor) -> torch.Tensor:
    """Return a word (int32, [num_rows, 1]) per row of booleans, the first in the lowest bit."""
    weights = 2 ** torch.arange(may_follow.shape[1])
    return (may_follow * weights).sum(1, keepdim=True).to(torch.int32)


def generate(chain: Chain, ops: Any, device: torch.device, num_seeds: int) -> Run:
    """Run all seeds until each has `num_tokens`."""
    run = Run(chain, Tables(chain, device), ops, num_seeds)
    while True:
        active = run.is_active.nonzero()[:, 0]
        if active.numel() == 0:
            return run
        run.round(active)


def p_value(run: Run, law: torch.Tensor) -> float:
    """Return the chi-square p-value of the emitted sequences."""
    chain, tokens = run.chain, run.emitted()
    if chain.is_mixed:
        tokens = tokens[::2]
    cells = torch.zeros(len(tokens), dtype=torch.int64, device=run.device)
    for step in range(chain.num_tokens):
        cells = cells * chain.vocab_size + tokens[:, step]
    return p_value_of(cells, law)


def p_value_of(cells: torch.Tensor, law: torch.Tensor) -> float:
    """Return the chi-square p-value of observed cells; 0 if one of probability 0 was seen."""
    counts = torch.bincount(cells.cpu(), minlength=len(law)).to(torch.float64)
    expected = law * len(cells)
    if int(counts[expected == 0].sum()) > 0:
        return 0.0
    # Rare cells are one cell, so that every cell expects at least ten.
    is_rare = expected < 10
    found, wanted = counts[~is_rare], expected[~is_rare]
    if float(expected[is_rare].sum()) >= 1:
        found = torch.cat([found, counts[is_rare].sum()[None]])
        wanted = torch.cat([wanted, expected[is_rare].sum()[None]])
    statistic = ((found - wanted) ** 2 / wanted).sum()
    half_degrees = torch.tensor(max(len(wanted) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))


def check_law(
    chain: Chain,
    ops: Any,
    device: torch.device,
    num_seeds: int,
    law_of: Callable[[Chain, Tables], torch.Tensor] = exact_law,
) -> float:
    """Generate and return the p-value of the output under the target's law."""
    run = generate(chain, ops, device, num_seeds)
    return p_value(run, law_of(chain, run.tables))
