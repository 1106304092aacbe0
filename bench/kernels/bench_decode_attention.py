"""Time of split-key decode attention against SDPA on contiguous keys and values.

The peer gets its keys and values gathered already. Bytes counted are each key and value once, the
queries and the outputs. A copy bandwidth of the same run stands beside: decoding cannot be faster.
`--sweep` tries tile sizes and numbers of splits instead.

Run from the repository root: `python -m bench.kernels.bench_decode_attention --out FILE`.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from extkv.kernels import decode_attention as kernel
from extkv.kernels.launch.attention import AttentionCall, LaunchSettings
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.replays import DEVICE, compare, copy_gb_per_s, num_input_sets
from bench.timing import GB, Report, argument_parser

NUM_HEADS, NUM_KV_HEADS = 32, 8
PEER, OURS = "SDPA, contiguous K/V", "extkv decode_attention"
_MOST_BYTES = 24 * GB


@dataclasses.dataclass
class Decode:
    """Inputs of equal sequences, paged and contiguous; `query_len` new tokens each."""

    query: torch.Tensor
    caches: torch.Tensor
    contiguous: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    out: torch.Tensor
    workspace: torch.Tensor
    query_len: int
    num_splits: int

    def call(self) -> AttentionCall:
        """Return the kernel's arguments."""
        return AttentionCall(
            self.query,
            self.caches[0],
            self.caches[1],
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.query.shape[2] ** -0.5,
            is_causal=True,
            sliding_window=None,
        )

    def attend(self) -> torch.Tensor:
        """Run the kernels."""
        return kernel.decode_attention(
            **self.call()._asdict(),
            max_query_len=self.query_len,
            num_splits=self.num_splits,
            workspace=self.workspace,
            out=self.out,
        )

    def attend_with_sdpa(self) -> torch.Tensor:
        """Run SDPA on one new token per sequence: [num_seqs, num_heads, 1, head_dim]."""
        if self.contiguous is None:
            raise AssertionError("made without the contiguous copy")
        return scaled_dot_product_attention(
            self.query[:, :, None], self.contiguous[0], self.contiguous[1], enable_gqa=True
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that decoding must move."""
        return 2 * (self.caches.numel() + 2 * self.query.numel())


def make_decode(
    num_seqs: int,
    seq_len: int,
    head_dim: int,
    block_size: int,
    *,
    query_len: int = 1,
    num_splits: int | None = None,
    has_contiguous: bool = True,
) -> Decode:
    """Make random inputs in shuffled blocks."""
    blocks_per_seq = -(-seq_len // block_size)
    num_blocks = num_seqs * blocks_per_seq
    shape = (2, num_blocks, block_size, NUM_KV_HEADS, head_dim)
    caches = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(num_blocks, device=DEVICE).view(num_seqs, blocks_per_seq)
    contiguous = None
    if has_contiguous:
        gathered = caches[:, table].flatten(2, 3)[:, :, :seq_len]
        contiguous = gathered.transpose(2, 3).contiguous()
    num_tokens = num_seqs * query_len
    query = torch.randn((num_tokens, NUM_HEADS, head_dim), dtype=torch.bfloat16, device=DEVICE)
    if num_splits is None:
        num_processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        num_splits = kernel.choose_num_splits(num_seqs, NUM_KV_HEADS, seq_len, num_processors)
    size = kernel.decode_workspace_size(num_tokens, NUM_HEADS, head_dim, num_splits)
    return Decode(
        query=query,
        caches=caches,
        contiguous=contiguous,
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * query_len,
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=DEVICE),
        block_table=table.to(torch.int32),
        out=torch.empty_like(query),
        workspace=torch.empty(max(size, 1), dtype=torch.float32, device=DEVICE),
        query_len=query_len,
        num_splits=num_splits,
    )


def make_sets(first: Decode, **options: object) -> list[Decode]:
    """Return input sets that together pass the L2 and fit the memory."""
    num_sets = min(num_input_sets(first.num_bytes), max(1, _MOST_BYTES // (2 * first.num_bytes)))
    return [first] + [make_decode(**options) for _ in range(num_sets - 1)]


def run_case(report: Report, ceiling: float, rounds: int, **options: object) -> None:
    """Compare one shape and record the share of the copy bandwidth."""
    first = make_decode(**options)
    expected = first.attend_with_sdpa()[:, :, 0]
    difference = float((first.attend() - expected).abs().max())
    if not difference < 3e-2:
        raise AssertionError(f"differs by {difference} for {options}")
    sets = make_sets(first, **options)
    shape = "seqs={num_seqs} kv={seq_len} d={head_dim} block={block_size}".format(**options)
    rows = compare(
        report,
        shape,
        {
            PEER: [inputs.attend_with_sdpa for inputs in sets],
            OURS: [inputs.attend for inputs in sets],
        },
        num_bytes=first.num_bytes,
        rounds=rounds,
    )
    row = rows[OURS]
    if row.time_ratio is not None and row.gb_per_s is not None:
        print(f"    {first.num_splits} splits, {row.gb_per_s / ceiling:.2f} of copy bandwidth")
        report.at_most(f"{shape}, time over SDPA", row.time_ratio, 1.0)
        if first.num_bytes > GB:
            report.at_least(f"{shape}, share of copy bandwidth", row.gb_per_s / ceiling, 0.75)


def run_drafts(report: Report, rounds: int, num_seqs: int, seq_len: int) -> None:
    """Time 8 rows per sequence against 1 row on the same cache: verification should cost little."""
    shape = {"num_seqs": num_seqs, "seq_len": seq_len, "head_dim": 128, "block_size": 16}
    one = make_decode(**shape, has_contiguous=False)
    eight = make_decode(**shape, query_len=8, has_contiguous=False)
    compare(
        report,
        f"seqs={num_seqs} kv={seq_len} d=128 block=16",
        {"extkv, 1 row per sequence": [one.attend], "extkv, 8 rows": [eight.attend]},
        num_bytes=one.num_bytes,
        rounds=rounds,
    )


def sweep(report: Report, head_dim: int) -> None:
    """Time tile sizes and numbers of splits at small and large batches."""
    for num_seqs, seq_len in ((1, 4096), (8, 4096), (64, 2048), (256, 1024)):
        for block_size in (16, 64):
            shape = {"num_seqs": num_seqs, "seq_len": seq_len, "has_contiguous": False}
            first = make_decode(**shape, head_dim=head_dim, block_size=block_size)
            sets = make_sets(first, **shape, head_dim=head_dim, block_size=block_size)
            for key_tile, num_warps, num_stages in itertools.product(
                (32, 64, 128), (2, 4, 8), (3, 5)
            ):
                settings = LaunchSettings(64, key_tile, num_warps, num_stages)
                try:
                    time_settings(report, sets, settings)
                except Exception as error:  # noqa: BLE001 ends one candidate only
                    print(f"    {settings}: {type(error).__name__}: {error}")
            for num_splits in (1, 2, 4, 8, 16, 32, 64):
                some = [dataclasses.replace(s, num_splits=num_splits) for s in sets]
                size = kernel.decode_workspace_size(num_seqs, NUM_HEADS, head_dim, num_splits)
                workspace = torch.empty(max(size, 1), dtype=torch.float32, device=DEVICE)
                some = [dataclasses.replace(s, workspace=workspace) for s in some]
                settings = kernel.launch_settings(max(head_dim, 64), torch.bfloat16)
                time_settings(report, some, settings)


def time_settings(report: Report, sets: list[Decode], settings: LaunchSettings) -> None:
    """Add one row for tile sizes and a number of splits."""
    first = sets[0]
    num_seqs, seq_len = first.query.shape[0], int(first.seq_lens[0])

    def launch(inputs: Decode) -> None:
        options = kernel.SplitOptions(1, inputs.num_splits, inputs.workspace)
        kernel.launch(inputs.call(), options, inputs.out, settings)

    compare(
        report,
        f"seqs={num_seqs} kv={seq_len} block={first.caches.shape[2]}",
        {
            f"keys={settings.key_tile} warps={settings.num_warps} stages={settings.num_stages} "
            f"splits={first.num_splits}": [lambda s=s: launch(s) for s in sets]
        },
        num_bytes=first.num_bytes,
        rounds=5,
    )


def main() -> None:
    """Compare decode shapes, or sweep tile sizes and splits."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tile sizes and splits")
    arguments = parser.parse_args()
    report = Report("bench_decode_attention", arguments)
    rounds = 5 if arguments.quick else 15
    ceiling = copy_gb_per_s()
    report.environment["copy_gb_per_s"] = round(ceiling, 1)
    print(f"copy bandwidth {ceiling:.0f} GB/s")
    if arguments.sweep:
        for head_dim in (128,) if arguments.quick else (64, 128, 256):
            sweep(report, head_dim)
    else:
        batches = ((1, 1024), (1, 16_384), (8, 2048), (64, 2048), (256, 1024))
        for num_seqs, seq_len in batches:
            for block_size in (16,) if arguments.quick else (16, 64):
                run_case(
                    report,
                    ceiling,
                    rounds,
                    num_seqs=num_seqs,
                    seq_len=seq_len,
                    head_dim=128,
                    block_size=block_size,
                )
        if not arguments.quick:
            for head_dim in (64, 80, 96, 256):
                shape = {"num_seqs": 64, "seq_len": 2048, "head_dim": head_dim, "block_size": 16}
                run_case(report, ceiling, rounds, **shape)
        for num_seqs, seq_len in ((1, 4096), (64, 2048)):
            run_drafts(report, rounds, num_seqs, seq_len)
    report.finish()


if __name__ == "__main__":
    main()
