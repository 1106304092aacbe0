"""Split-key attention of few new tokens: splits, padding, graphs, and no recompilation."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    LAYOUTS,
    NO_BLOCK,
    PagedCase,
    assert_matches,
    committed_edge_case,
    explicit_attention,
    far_case,
    make_case,
)
from extkv.errors import InvalidArgumentError
from extkv.kernels import decode_attention as kernel
from extkv.kernels.kv_append import kv_append
from extkv.reference import decode_attention as reference

ONE_EACH = [(1, 19), (1, 150), (1, 45), (1, 1), (1, 0), (0, 0)]
DRAFTED = [(5, 70), (16, 16), (1, 33), (2, 140)]
PLACE = torch.device("cuda", 0)


def attend(case: PagedCase, num_splits: int, **options: object) -> torch.Tensor:
    """Call the kernel with a poisoned workspace and output."""
    size = kernel.decode_workspace_size(*case.query.shape, num_splits)
    workspace = torch.full((size,), torch.nan, device=case.query.device)
    out = torch.full_like(case.query, torch.nan)
    lengths = case.query_start_loc.diff()
    options.setdefault("max_query_len", max(int(lengths.max()) if lengths.numel() else 1, 1))
    found = kernel.decode_attention(
        **case.arguments,
        num_splits=num_splits,
        workspace=workspace,
        out=out,
        **options,
    )
    assert found is out
    return out


def check(case: PagedCase, num_splits: int, **options: object) -> None:
    """Compare one call with the formula."""
    assert_matches(attend(case, num_splits, **options), explicit_attention(case, **options))


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("sliding_window", [None, 50], ids="window={}".format)
def test_one_token_each_equals_the_formula(
    sliding_window: int | None, num_splits: int, device: torch.device
):
    case = make_case(ONE_EACH, device=device, num_heads=2, num_kv_heads=1, num_padded_tokens=3)
    check(case, num_splits, sliding_window=sliding_window)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("sliding_window", [None, 30], ids="window={}".format)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_drafted_rows_equal_the_formula(
    is_causal: bool, sliding_window: int | None, num_splits: int, device: torch.device
):
    case = make_case(DRAFTED, device=device, num_heads=2, num_kv_heads=1, num_padded_tokens=2)
    check(case, num_splits, is_causal=is_causal, sliding_window=sliding_window)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_windows_in_a_graph_with_room_for_more(num_splits: int, device: torch.device):
    """A graph of 16 tokens: up to 16 sequences of up to eight tokens, most of them not there."""
    windows = [(3, 70), (1, 33), (5, 140)]
    padding = 16 - sum(length for length, _ in windows)
    case = make_case(
        [*windows, *[(0, 0)] * (16 - len(windows))],
        device=device,
        num_heads=2,
        num_kv_heads=1,
        num_padded_tokens=padding,
    )
    found = attend(case, num_splits, max_query_len=8)
    assert_matches(found, explicit_attention(case))
    assert int(found[-padding:].count_nonzero()) == 0


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 256), (80, 32), (96, 16), (128, 64), (256, 16)]
)
def test_every_head_dim_and_block_size(head_dim: int, block_size: int, device: torch.device):
    lengths = [(1, 37), (3, 270)]
    case = make_case(
        lengths,
        device=device,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
    )
    check(case, 2)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (70, 1)], ids=str)
def test_every_number_of_heads_per_kv_head(heads: tuple[int, int], device: torch.device):
    case = make_case(
        [(2, 20), (1, 33)], device=device, num_heads=heads[0], num_kv_heads=heads[1], head_dim=16
    )
    check(case, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b88_strides_come_from_the_cache(layout: str, device: torch.device):
    check(make_case([(2, 37), (1, 20)], device=device, layout=layout), 1)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf], ids=str)
def test_b96_slots_past_the_length_are_not_seen(
    fill: float, is_causal: bool, num_splits: int, device: torch.device
):
    for dtype in (torch.float32, torch.float16):
        case = make_case([(1, 19)], device=device, num_heads=2, dtype=dtype, fill=fill)
        check(case, num_splits, is_causal=is_causal)


def test_accepts_no_sequences_and_no_tokens(device: torch.device):
    for num_splits in (1, 2):
        check(make_case([], device=device, num_padded_tokens=3, num_heads=2), num_splits)
    case = make_case([], device=device)
    assert kernel.decode_attention(**case.arguments).shape == (0, 4, 64)


def test_reference_equals_the_formula(device: torch.device):
    case = make_case(DRAFTED, device=device, num_padded_tokens=2)
    found = reference.decode_attention(**case.arguments, max_query_len=16, num_splits=3)
    assert_matches(found, explicit_attention(case))


def test_splits_agree_with_one_another(device: torch.device):
    case = make_case([(1, 150), (1, 299)], device=device, num_heads=2, num_kv_heads=1)
    one = attend(case, 1)
    for num_splits in (2, 9):
        assert float((attend(case, num_splits) - one).abs().max()) < 1e-6


def test_number_of_splits_fills_the_device_and_stays_in_range():
    for choose in (kernel.choose_num_splits, reference.choose_num_splits):
        assert choose(256, 8, 4096, 132) == 1
        assert choose(1, 8, 100_000, 132) == 33
        assert choose(1, 8, 1000, 132) == 7
        assert choose(1, 1, 10**7, 132) == 128
        assert choose(0, 8, 0, 132) == 1


def test_both_modules_want_the_same_workspace():
    for num_splits in (1, 2, 128):
        sizes = [
            module.decode_workspace_size(3, 4, 64, num_splits) for module in (kernel, reference)
        ]
        assert sizes == [0 if num_splits == 1 else 3 * 4 * num_splits * 66] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_query_len": 17}, r"max_query_len must be in \[1, 16\], got 17"),
        ({"max_query_len": 0}, "got 0"),
        ({"num_splits": 129}, r"num_splits must be in \[1, 128\], got 129"),
        ({"num_splits": 2}, "at least 1056 elements for 2 splits, got 0"),
        ({"num_splits": 2, "workspace": torch.zeros(1055)}, "got 1055"),
        ({"workspace": torch.zeros(9, dtype=torch.float16)}, "workspace must be torch.float32"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be torch.int32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, object], message: str, device: torch.device
):
    case = make_case([(1, 5), (1, 9)], device=device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.decode_attention(**{**case.arguments, **moved})


GPU_ONE_EACH = [(1, 19), (1, 1500), (1, 45), (1, 1), (1, 0), (0, 0), (1, 4096)]
GPU_DRAFTED = [(5, 70), (16, 16), (1, 33), (2, 1400), (8, 900), (16, 2049)]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_gpu_bfloat16_equals_the_formula(head_dim: int, block_size: int, device: torch.device):
    case = make_case(
        GPU_ONE_EACH,
        device=device,
        num_heads=8,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        num_padded_tokens=5,
    )
    for num_splits in (1, 7):
        check(case, num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_gpu_other_dtypes_equal_the_formula(
    head_dim: int, dtype: torch.dtype, device: torch.device
):
    case = make_case(GPU_ONE_EACH, device=device, num_heads=6, head_dim=head_dim, dtype=dtype)
    for num_splits in (1, 7):
        check(case, num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 100], ids="window={}".format)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("num_heads", [8, 64])
def test_gpu_drafted_rows_equal_the_formula(
    num_heads: int, is_causal: bool, sliding_window: int | None, device: torch.device
):
    case = make_case(
        GPU_DRAFTED, device=device, num_heads=num_heads, head_dim=128, dtype=torch.bfloat16
    )
    for num_splits in (1, 5):
        check(case, num_splits, is_causal=is_causal, sliding_window=sliding_window)


@pytest.mark.gpu
def test_gpu_offsets_past_two_to_the_31_elements(device: torch.device):
    case = far_case(device, seq_len=1500, query_len=3)
    for num_splits in (1, 6):
        check(case, num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [1024, 1023, 769])
def test_gpu_reads_nothing_past_committed_memory(seq_len: int, device: torch.device):
    case = committed_edge_case(device, seq_len, query_len=2)
    for num_splits in (1, 3, 128):
        check(case, num_splits)
        check(case, num_splits, is_causal=False)


class DecodeStep:
    """KV append and attention of a batch of one token each, on persistent buffers."""

    def __init__(self, case: PagedCase, num_splits: int) -> None:
        """Take the case's tensors as the buffers."""
        num_seqs, num_heads, head_dim = case.query.shape
        self.case = case
        self.num_splits = num_splits
        num_kv_heads = case.key_cache.shape[2]
        self.key = torch.randn(num_seqs, num_kv_heads, head_dim, device=PLACE).to(case.query.dtype)
        self.value = torch.randn_like(self.key)
        self.slots = torch.full((num_seqs,), -1, dtype=torch.int64, device=PLACE)
        size = kernel.decode_workspace_size(num_seqs, num_heads, head_dim, num_splits)
        self.workspace = torch.full((size,), torch.nan, device=PLACE)
        self.out = torch.full_like(case.query, torch.nan)

    def __call__(self) -> None:
        """Run the step."""
        case = self.case
        kv_append(self.key, self.value, case.key_cache, case.value_cache, self.slots)
        kernel.decode_attention(
            **case.arguments,
            num_splits=self.num_splits,
            workspace=self.workspace,
            out=self.out,
        )


def slots_of(case: PagedCase) -> torch.Tensor:
    """Return the slot of each sequence's last token."""
    last = case.seq_lens.long() - 1
    blocks = case.block_table.gather(1, (last // 16)[:, None])[:, 0].long()
    return blocks * 16 + last % 16


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_b33_graph_replay_with_padded_rows(num_splits: int, device: torch.device):
    lengths = [(1, length) for length in (100, 33, 512, 1, 77, 16, 17, 300)]
    case = make_case(
        lengths, device=device, num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    step = DecodeStep(case, num_splits)
    step.slots.copy_(slots_of(case))
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    step.out.fill_(torch.nan)
    graph.replay()
    assert_matches(step.out, explicit_attention(case))

    num_live = 3
    live = DecodeStep(
        PagedCase(
            query=case.query[:num_live].clone(),
            key_cache=case.key_cache.clone(),
            value_cache=case.value_cache.clone(),
            query_start_loc=case.query_start_loc[: num_live + 1].clone(),
            seq_lens=case.seq_lens[:num_live].clone(),
            block_table=case.block_table[:num_live].clone(),
        ),
        num_splits,
    )
    live.key.copy_(step.key[:num_live])
    live.value.copy_(step.value[:num_live])
    live.slots.copy_(step.slots[:num_live])
    live()
    # Padded rows: slot -1, length 0, and rubbish wherever nothing may look.
    case.query[num_live:] = torch.nan
    case.seq_lens[num_live:] = 0
    case.block_table[num_live:] = NO_BLOCK
    step.key[num_live:] = torch.nan
    step.slots[num_live:] = torch.iinfo(torch.int64).min // 2
    step.out.fill_(torch.nan)
    before = case.key_cache.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(step.out[:num_live], live.out)
    assert int(step.out[num_live:].count_nonzero()) == 0
    changed = (case.key_cache != before) & ~(case.key_cache.isnan() & before.isnan())
    assert not bool(changed.any())


@pytest.mark.gpu
def test_gpu_graph_replays_after_lengths_change(device: torch.device):
    case = make_case(
        [(1, 40), (1, 700)], device=device, num_heads=8, head_dim=64, dtype=torch.bfloat16
    )
    longer = case.seq_lens.clone()
    step = DecodeStep(case, num_splits=4)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shorter in ([40, 700], [1, 699], [17, 3]):
        case.seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
        assert bool((case.seq_lens <= longer).all())
        step.out.fill_(torch.nan)
        graph.replay()
        assert_matches(step.out, explicit_attention(case))
