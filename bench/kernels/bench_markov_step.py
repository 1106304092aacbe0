"""Time of a round of Markov steps against GEMM, sum and Gumbel arg-max, and against the byte floor.

A round is 7 steps of a Qwen3 vocabulary and rank 256 in one CUDA graph, each with the tokens that
the step before drew. The peer is what vLLM's loop does: bias by a matrix product, sum with the base
logits in float32, division by the temperature, exponential noise per logit, arg-max. The floor is
the time that the bytes of the projection and of the base logits take at the bandwidth of a device
copy, measured in the same run. `--sweep` tries tiles instead.

Run from the repository root: `python -m bench.kernels.bench_markov_step --out FILE`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch
from extkv.drafting import MarkovDraw
from extkv.kernels.markov_step import MarkovSettings, markov_step, markov_workspace_size
from extkv.reference.markov_step import markov_step as torch_markov_step

from bench.kernels.replays import DEVICE, Replayed, compare, copy_gb_per_s
from bench.timing import Report, alternate, argument_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE, RANK, NUM_DRAFTS = 151_936, 256, 7
PEER, OURS = "GEMM, sum, Gumbel arg-max", "extkv markov_step"
# Batch, most time over the floor, least speed-up over the peer.
TARGETS = {1: (1.4, 2.0), 4: (1.4, None), 16: (1.4, None), 64: (2.0, None), 256: (2.5, 4.0)}
MOST_GREEDY = 1.3


@dataclasses.dataclass
class Round:
    """Inputs of a round; two heads and base logits in turn, so that a replay starts cold."""

    base_logits: torch.Tensor  # [num_rows, NUM_DRAFTS, VOCAB_SIZE]
    projection: torch.Tensor
    embedding: torch.Tensor
    anchors: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    workspace: torch.Tensor
    tokens: torch.Tensor  # [num_rows, NUM_DRAFTS]
    numbers: torch.Tensor
    flags: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that a round reads at least."""
        head = self.projection.numel() * self.projection.element_size() * NUM_DRAFTS
        return head + self.base_logits.numel() * self.base_logits.element_size()

    def ours(self, *, is_greedy: bool = False, settings: MarkovSettings | None = None) -> None:
        """Run the steps with the fused kernels."""
        previous = self.anchors
        for slot in range(NUM_DRAFTS):
            out = MarkovDraw(
                self.tokens[:, slot],
                self.numbers[0, :, slot],
                self.numbers[1, :, slot],
                self.flags[:, slot],
            )
            markov_step(
                self.base_logits[:, slot],
                self.projection,
                None if is_greedy else self.temperature,
                self.seeds,
                self.seeds,
                slot=slot,
                tokens=previous,
                embedding=self.embedding,
                workspace=self.workspace,
                out=out,
                settings=settings,
            )
            previous = self.tokens[:, slot]

    def theirs(self, *, is_greedy: bool = False) -> None:
        """Run the steps with torch."""
        previous = self.anchors
        for slot in range(NUM_DRAFTS):
            logits = torch.mm(self.embedding[previous], self.projection.T).float()
            logits += self.base_logits[:, slot]
            if not is_greedy:
                logits /= self.temperature[:, None]
                logits -= torch.empty_like(logits).exponential_().log_()
            previous = logits.argmax(-1)
            self.tokens[:, slot] = previous


def make_round(num_rows: int) -> Round:
    """Return random inputs."""
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    return Round(
        torch.randn(num_rows, NUM_DRAFTS, VOCAB_SIZE, **options),
        torch.randn(VOCAB_SIZE, RANK, **options) * 0.1,
        torch.randn(VOCAB_SIZE, RANK, **options),
        torch.randint(0, VOCAB_SIZE, (num_rows,), device=DEVICE),
        torch.arange(num_rows, device=DEVICE) * 977,
        torch.full((num_rows,), 0.8, device=DEVICE),
        torch.empty(markov_workspace_size(num_rows, VOCAB_SIZE), device=DEVICE),
        torch.zeros(num_rows, NUM_DRAFTS, dtype=torch.int64, device=DEVICE),
        torch.zeros(2, num_rows, NUM_DRAFTS, device=DEVICE),
        torch.zeros(num_rows, NUM_DRAFTS, dtype=torch.int32, device=DEVICE),
    )


def check(inputs: Round) -> None:
    """Compare a greedy step with the twin."""
    arguments = (inputs.base_logits[:, 0], inputs.projection, None, None, None)
    head = {"tokens": inputs.anchors, "embedding": inputs.embedding, "slot": 0}
    found = markov_step(*arguments, **head)
    expected = torch_markov_step(*arguments, **head)
    # Equal but for ties within the rounding of a sum of products.
    if float((found.logits - expected.logits).abs().max()) > 1e-2:
        raise AssertionError("markov_step disagrees with its reference")


def run_case(report: Report, num_rows: int, floor_gb_per_s: float, rounds: int) -> None:
    """Compare one batch size, sampled and greedy."""
    sets = [make_round(num_rows) for _ in range(2)]
    check(sets[0])
    floor_us = sets[0].num_bytes / floor_gb_per_s / 1e3
    most, least = TARGETS[num_rows]
    for is_greedy in (False, True):
        kind = "greedy" if is_greedy else "T=0.8"
        shape = f"rows={num_rows} vocab={VOCAB_SIZE} rank={RANK} steps={NUM_DRAFTS} bf16 {kind}"
        rows = compare(
            report,
            shape,
            {
                PEER: [lambda s=s, g=is_greedy: s.theirs(is_greedy=g) for s in sets],
                OURS: [lambda s=s, g=is_greedy: s.ours(is_greedy=g) for s in sets],
            },
            num_bytes=sets[0].num_bytes,
            rounds=rounds,
        )
        over_floor = rows[OURS].summary.median_us / floor_us
        print(f"    floor {floor_us:.1f} us, time over floor {over_floor:.2f}", flush=True)
        limit = MOST_GREEDY if is_greedy else most
        report.at_most(f"{shape}: time over the byte floor", over_floor, limit)
        ratio = rows[OURS].time_ratio
        if least is not None and not is_greedy and ratio is not None:
            report.at_least(f"{shape}: times faster than {PEER}", 1 / ratio, least)


def candidates(num_rows: int) -> Iterator[MarkovSettings]:
    """Yield tiles to try for a batch size."""
    row_tiles = [tile for tile in (16, 32, 64, 128, 256) if tile < 2 * max(num_rows, 9)][-2:]
    for vocab_tile, row_tile, num_warps in itertools.product((64, 128), row_tiles, (4, 8)):
        for depth_tile, num_stages in itertools.product((32, 64, 128), (2, 3, 4)):
            yield MarkovSettings(vocab_tile, row_tile, depth_tile, num_warps, num_stages)
        for num_tile_stages, programs in itertools.product((1, 2), (1, 2, 3)):
            yield MarkovSettings(
                vocab_tile, row_tile, RANK, num_warps, 2, num_tile_stages, programs
            )


def sweep(report: Report, rounds: int) -> None:
    """Time tiles for each batch size."""
    for num_rows in TARGETS:
        sets = [make_round(num_rows) for _ in range(2)]
        for settings in candidates(num_rows):
            try:
                replayed = Replayed([lambda s=s, t=settings: s.ours(settings=t) for s in sets])
            except Exception as error:  # noqa: BLE001 ends one candidate only
                print(f"    {settings}: {type(error).__name__}")
                continue
            samples = alternate({OURS: replayed}, rounds, warmup_rounds=2)
            report.add(f"rows={num_rows}", str(tuple(settings)), samples[OURS])


def main() -> None:
    """Compare batch sizes, or sweep tiles."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tiles")
    arguments = parser.parse_args()
    report = Report("bench_markov_step", arguments)
    rounds = 5 if arguments.quick else 15
    if arguments.sweep:
        sweep(report, 5)
    else:
        gb_per_s = copy_gb_per_s()
        print(f"copy bandwidth {gb_per_s:.0f} GB/s, bytes read plus bytes written")
        report.environment["copy_gb_per_s"] = gb_per_s
        for num_rows in (1, 256) if arguments.quick else TARGETS:
            run_case(report, num_rows, gb_per_s, rounds)
    report.finish()


if __name__ == "__main__":
    main()
