"""Time of verification against a plain torch rejection sampler, and against the byte floor.

Requests have 7 drafts each, so 8 rows. The floor is the time that the bytes it must read take at
the bandwidth of a device copy measured in the same run: all target logits; for the residual of one
row per request its target and base logits again; and the head's projection once. Block verification
needs a residual for every draft, so all base logits and the target's twice. The peer makes float32
softmax of both models' logits, with the drafts' bias by a matrix product, as vLLM's PyTorch
sampler does. `--sweep` tries tiles of the residual masses instead.

Run from the repository root: `python -m bench.kernels.bench_rejection --out FILE`.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from extkv.drafting import DraftLaw, Verification
from extkv.kernels.rejection import ResidualSettings, verification_workspace_size, verify_drafts
from extkv.reference.markov_step import markov_step as torch_markov_step

from bench.kernels.replays import DEVICE, Replayed, compare, copy_gb_per_s
from bench.timing import Report, alternate, argument_parser

VOCAB_SIZE, RANK, NUM_DRAFTS = 151_936, 256, 7
PEER, OURS = "torch softmax of p and q, ratio, residual", "extkv verify_drafts"
MOST_OVER_FLOOR = 1.5


@dataclasses.dataclass
class Verify:
    """Inputs of a verification with drafts of full windows."""

    target: torch.Tensor  # [num_reqs * 8, VOCAB_SIZE] float32
    token_ids: torch.Tensor
    starts: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    draft: DraftLaw
    out: Verification

    def num_bytes(self, method: str) -> int:
        """Bytes to read at least."""
        num_reqs = self.out.flags.shape[0]
        row = VOCAB_SIZE * self.target.element_size()
        base = VOCAB_SIZE * self.draft.base_logits.element_size()
        num_residuals = num_reqs * (NUM_DRAFTS if method == "block" else 1)
        projection = VOCAB_SIZE * RANK * 2
        return self.target.shape[0] * row + num_residuals * (row + base) + projection

    def ours(
        self, method: str, workspace: torch.Tensor, settings: ResidualSettings | None = None
    ) -> None:
        """Verify with the kernels."""
        verify_drafts(
            self.target,
            self.token_ids,
            self.starts,
            self.temperature,
            self.seeds,
            self.positions,
            self.draft,
            max_num_drafts=NUM_DRAFTS,
            method=method,
            workspace=workspace,
            out=self.out,
            settings=settings,
        )

    def theirs(self) -> torch.Tensor:
        """Verify with torch, one request after the other in a batch of full tensors."""
        num_reqs = self.out.flags.shape[0]
        law = self.draft
        windows = self.token_ids.view(num_reqs, NUM_DRAFTS + 1)
        bias = law.embedding[windows[:, :-1]] @ law.projection.T
        heat = self.temperature[:num_reqs, None, None]
        q = ((law.base_logits.float() + bias) / heat).softmax(-1)
        p = (self.target.view(num_reqs, NUM_DRAFTS + 1, -1) / heat).softmax(-1)
        drafts = windows[:, 1:, None]
        ratios = (p[:, :-1].gather(2, drafts) / q.gather(2, drafts))[:, :, 0]
        accepts = torch.rand_like(ratios) < ratios
        accepted = accepts.long().cumprod(1).sum(1)
        residual = torch.cat([(p[:, :-1] - q).clamp_(min=0), p[:, -1:]], dim=1)
        rows = residual.gather(1, accepted[:, None, None].expand(-1, 1, residual.shape[2]))[:, 0]
        return rows.div_(torch.empty_like(rows).exponential_()).argmax(-1)


def make_inputs(num_reqs: int) -> Verify:
    """Return drafts drawn from their law, and a target that resembles it."""
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    base = torch.randn(num_reqs, NUM_DRAFTS, VOCAB_SIZE, **options)
    projection = torch.randn(VOCAB_SIZE, RANK, **options) * 0.05
    embedding = torch.randn(VOCAB_SIZE, RANK, **options)
    heat = torch.full((num_reqs,), 0.8, device=DEVICE)
    seeds = torch.arange(num_reqs, device=DEVICE) * 977
    tokens = [torch.randint(0, VOCAB_SIZE, (num_reqs,), device=DEVICE)]
    numbers = torch.zeros(2, num_reqs, NUM_DRAFTS, device=DEVICE)
    target = torch.randn(num_reqs, NUM_DRAFTS + 1, VOCAB_SIZE, device=DEVICE) * 0.3
    for slot in range(NUM_DRAFTS):
        drawn = torch_markov_step(
            base[:, slot],
            projection,
            heat,
            seeds,
            seeds * 0 + slot,
            slot=slot,
            tokens=tokens[-1],
            embedding=embedding,
        )
        target[:, slot] += base[:, slot] + embedding[tokens[-1]] @ projection.T
        numbers[0, :, slot], numbers[1, :, slot] = drawn.logits, drawn.log_sum_exp
        tokens.append(drawn.tokens)
    num_rows = num_reqs * (NUM_DRAFTS + 1)
    rows = torch.arange(num_rows, device=DEVICE)
    return Verify(
        target.view(num_rows, VOCAB_SIZE),
        torch.stack(tokens, dim=1).flatten(),
        torch.arange(0, num_rows + 1, NUM_DRAFTS + 1, dtype=torch.int32, device=DEVICE),
        torch.full((num_rows,), 0.8, device=DEVICE),
        seeds.repeat_interleave(NUM_DRAFTS + 1),
        rows % (NUM_DRAFTS + 1),
        DraftLaw(base, numbers[0], numbers[1], projection, embedding),
        Verification(
            torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE),
            torch.zeros(num_reqs, dtype=torch.int64, device=DEVICE),
            torch.zeros(num_reqs, dtype=torch.int32, device=DEVICE),
        ),
    )


def make_workspace(num_reqs: int, method: str) -> torch.Tensor:
    """Return a workspace that fits."""
    num_rows = num_reqs * (NUM_DRAFTS + 1)
    size = verification_workspace_size(num_rows, num_reqs, VOCAB_SIZE, method=method)
    return torch.empty(size, dtype=torch.float32, device=DEVICE)


def run_case(report: Report, num_reqs: int, floor_gb_per_s: float, rounds: int) -> None:
    """Compare one batch size by each method."""
    inputs = make_inputs(num_reqs)
    for method in ("standard", "block"):
        workspace = make_workspace(num_reqs, method)
        shape = f"reqs={num_reqs} rows=8 vocab={VOCAB_SIZE} fp32 target bf16 draft {method}"
        num_bytes = inputs.num_bytes(method)
        peers = {}
        # The peer holds several float32 copies of all draft logits.
        if num_reqs <= 64 and method == "standard":
            peers[PEER] = [inputs.theirs]
        peers[OURS] = [lambda m=method, w=workspace: inputs.ours(m, w)]
        rows = compare(report, shape, peers, num_bytes=num_bytes, rounds=rounds)
        accepted = float(inputs.out.num_accepted.float().mean())
        floor_us = num_bytes / floor_gb_per_s / 1e3
        over_floor = rows[OURS].summary.median_us / floor_us
        print(
            f"    floor {floor_us:.1f} us, time over floor {over_floor:.2f}, "
            f"accepted {accepted:.2f} of {NUM_DRAFTS}",
            flush=True,
        )
        if method == "standard" and num_reqs == 256:
            report.at_most(f"{shape}: time over the byte floor", over_floor, MOST_OVER_FLOOR)


def sweep(report: Report, rounds: int) -> None:
    """Time tiles of the residual masses."""
    for num_reqs in (1, 64, 256):
        inputs, workspace = make_inputs(num_reqs), make_workspace(num_reqs, "standard")
        for row_tile, depth_tile, num_warps, num_stages in itertools.product(
            (16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
        ):
            settings = ResidualSettings(row_tile, depth_tile, num_warps, num_stages)
            try:
                replayed = Replayed(
                    [lambda i=inputs, w=workspace, t=settings: i.ours("standard", w, t)]
                )
            except Exception as error:  # noqa: BLE001 ends one candidate only
                print(f"    {settings}: {type(error).__name__}")
                continue
            samples = alternate({OURS: replayed}, rounds, warmup_rounds=2)
            report.add(f"reqs={num_reqs} standard", str(tuple(settings)), samples[OURS])


def main() -> None:
    """Compare batch sizes, or sweep tiles."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tiles of the residual masses")
    arguments = parser.parse_args()
    report = Report("bench_rejection", arguments)
    if arguments.sweep:
        sweep(report, 5)
    else:
        gb_per_s = copy_gb_per_s()
        print(f"copy bandwidth {gb_per_s:.0f} GB/s, bytes read plus bytes written")
        report.environment["copy_gb_per_s"] = gb_per_s
        for num_reqs in (1, 256) if arguments.quick else (1, 16, 64, 256):
            run_case(report, num_reqs, gb_per_s, 5 if arguments.quick else 15)
    report.finish()


if __name__ == "__main__":
    main()
