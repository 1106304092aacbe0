"""Time of prefill attention over a paged cache against SDPA on contiguous keys and values.

The peer gets its keys and values gathered already: it does not pay for paging. Operations counted
are those of visible pairs only. `--sweep` tries tile sizes instead.

Run from the repository root: `python -m bench.kernels.bench_paged_attention --out FILE`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch
from extkv.kernels import paged_attention as kernel
from extkv.kernels.launch.attention import AttentionCall, LaunchSettings
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.replays import DEVICE, compare, num_input_sets
from bench.timing import Report, argument_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_HEADS, NUM_KV_HEADS = 32, 8
PEER, OURS = "SDPA flash, contiguous K/V", "extkv paged_attention"


@dataclasses.dataclass
class Prefill:
    """Inputs of equal sequences, paged and contiguous.

    Attributes:
        query: [num_seqs * query_len, num_heads, head_dim].
        caches: [2, num_blocks, block_size, num_kv_heads, head_dim].
        contiguous: [2, num_seqs, num_kv_heads, seq_len, head_dim].
        query_start_loc: [num_seqs + 1].
        seq_lens: [num_seqs].
        block_table: [num_seqs, blocks_per_seq].
        out: Shape of the query.
    """

    query: torch.Tensor
    caches: torch.Tensor
    contiguous: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    out: torch.Tensor

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
        """Run the kernel."""
        call = self.call()._asdict()
        return kernel.paged_attention(**call, out=self.out)

    def attend_with_sdpa(self) -> torch.Tensor:
        """Run SDPA's flash kernel; the result is [num_seqs, num_heads, query_len, head_dim]."""
        num_seqs, query_len, seq_len = self.sizes()
        query = self.query.unflatten(0, (num_seqs, query_len)).transpose(1, 2)
        is_square = query_len == seq_len
        mask = None if is_square else causal_lower_right(query_len, seq_len)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(
                query,
                self.contiguous[0],
                self.contiguous[1],
                attn_mask=mask,
                is_causal=is_square,
                enable_gqa=True,
            )

    def sizes(self) -> tuple[int, int, int]:
        """Return number of sequences, new tokens and all tokens of each."""
        num_seqs = self.seq_lens.shape[0]
        return num_seqs, self.query.shape[0] // num_seqs, self.contiguous.shape[3]


def make_prefill(
    num_seqs: int, query_len: int, seq_len: int, head_dim: int, block_size: int
) -> Prefill:
    """Make random inputs in shuffled blocks."""
    blocks_per_seq = -(-seq_len // block_size)
    num_blocks = num_seqs * blocks_per_seq
    shape = (2, num_blocks, block_size, NUM_KV_HEADS, head_dim)
    caches = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(num_blocks, device=DEVICE).view(num_seqs, blocks_per_seq)
    gathered = caches[:, table].flatten(2, 3)[:, :, :seq_len]  # [2, num_seqs, seq_len, heads, dim]
    num_tokens = num_seqs * query_len
    query = torch.randn((num_tokens, NUM_HEADS, head_dim), dtype=torch.bfloat16, device=DEVICE)
    return Prefill(
        query=query,
        caches=caches,
        contiguous=gathered.transpose(2, 3).contiguous(),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * query_len,
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=DEVICE),
        block_table=table.to(torch.int32),
        out=torch.empty_like(query),
    )


def check(inputs: Prefill) -> None:
    """Fail unless both agree."""
    num_seqs, query_len, _ = inputs.sizes()
    expected = inputs.attend_with_sdpa().transpose(1, 2).flatten(0, 1)
    difference = float((inputs.attend() - expected).abs().max())
    if not difference < 3e-2:
        raise AssertionError(f"differs by {difference} for {num_seqs} x {query_len}")


def run_case(report: Report, shape: tuple[int, int, int, int], rounds: int) -> None:
    """Compare one shape (sequences, new tokens, all tokens, head size) at two block sizes."""
    num_seqs, query_len, seq_len, head_dim = shape
    for block_size in (16, 64):
        first = make_prefill(num_seqs, query_len, seq_len, head_dim, block_size)
        check(first)
        cached = first.caches.numel() * 2
        num_bytes = cached + 2 * first.query.numel() * 2
        num_sets = min(4, num_input_sets(num_bytes))
        sets = [first] + [
            make_prefill(num_seqs, query_len, seq_len, head_dim, block_size)
            for _ in range(num_sets - 1)
        ]
        pairs = num_seqs * query_len * (2 * seq_len - query_len + 1) // 2
        rows = compare(
            report,
            f"seqs={num_seqs} q={query_len} kv={seq_len} d={head_dim} block={block_size}",
            {
                PEER: [inputs.attend_with_sdpa for inputs in sets],
                OURS: [inputs.attend for inputs in sets],
            },
            num_bytes=num_bytes,
            rounds=rounds,
            num_flops=4 * pairs * NUM_HEADS * head_dim,
        )
        ratio = rows[OURS].time_ratio
        if ratio is not None:
            report.at_most(f"{rows[OURS].shape}, time over SDPA", ratio, 1.5)


def settings_of(head_dim: int) -> Iterator[LaunchSettings]:
    """Yield the tile sizes to try."""
    row_tiles = (64, 128)
    key_tiles = (32, 64, 128) if head_dim <= 128 else (32, 64)
    for row_tile, key_tile, num_warps, num_stages in itertools.product(
        row_tiles, key_tiles, (4, 8), (2, 3, 5)
    ):
        if row_tile * key_tile <= 128 * 128 and not (row_tile == 64 and num_warps == 8):
            yield LaunchSettings(row_tile, key_tile, num_warps, num_stages)


def sweep(report: Report, head_dim: int) -> None:
    """Time every tile size on one long and one chunked prefill."""
    for num_seqs, query_len, seq_len in ((4, 2048, 2048), (1, 512, 8192)):
        inputs = make_prefill(num_seqs, query_len, seq_len, head_dim, block_size=16)
        for settings in settings_of(head_dim):

            def launch(inputs: Prefill = inputs, settings: LaunchSettings = settings) -> None:
                kernel.launch(inputs.call(), inputs.out, settings)

            name = "rows={} keys={} warps={} stages={}".format(*settings)
            try:
                compare(
                    report,
                    f"q={query_len} kv={seq_len} d={head_dim}",
                    {name: [launch]},
                    num_bytes=inputs.caches.numel() * 2,
                    rounds=5,
                )
            except Exception as error:  # noqa: BLE001 too much shared memory ends one candidate only
                print(f"    {name}: {type(error).__name__}: {error}")


def main() -> None:
    """Compare prefill shapes, or sweep tile sizes."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="time tile sizes")
    arguments = parser.parse_args()
    report = Report("bench_paged_attention", arguments)
    rounds = 5 if arguments.quick else 15
    if arguments.sweep:
        for head_dim in (128,) if arguments.quick else (64, 128, 256):
            sweep(report, head_dim)
    else:
        shapes = [(4, 2048, 2048, 128), (1, 512, 8192, 128)]
        if not arguments.quick:
            shapes += [(1, 8192, 8192, 128), (16, 512, 512, 128), (4, 2048, 2048, 64)]
            shapes += [(4, 2048, 2048, 256), (64, 16, 4096, 128)]
        for shape in shapes:
            run_case(report, shape, rounds)
    report.finish()


if __name__ == "__main__":
    main()
