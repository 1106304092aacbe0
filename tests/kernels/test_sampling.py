"""Greedy and random tokens: the law, the key alone decides, and broken rows are flagged."""

from __future__ import annotations

import extkv
import pytest
import torch
import triton
import triton.language as tl
from extkv.errors import InvalidArgumentError
from extkv.kernels import logit_cutoff as cutoff_kernel
from extkv.kernels import sampling as kernel
from extkv.kernels.sampling import pick
from extkv.reference import logit_cutoff as cutoff_reference
from extkv.reference import sampling as reference
from placement import with_strides
from sampling_cases import assert_follows, filtered_probabilities

NAN, INF = torch.nan, torch.inf
MODULES = pytest.mark.parametrize("sampling", [kernel, reference], ids=["kernel", "reference"])
NUM_DRAWS = 100_000


def keys(num_rows: int, device: torch.device, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return different seeds and positions for each row."""
    rows = torch.arange(num_rows, device=device)
    return rows * 0x9E3779B97F4A7C15 % 2**63 + seed, rows % 997


def draws(
    logits: torch.Tensor, temperature: float, num_rows: int, **filters: float
) -> torch.Tensor:
    """Return tokens of the twin for one row of logits under many keys."""
    device = logits.device
    rows = logits.expand(num_rows, -1)
    heat = torch.full((num_rows,), temperature, device=device)
    parameters = {
        name: torch.full((num_rows,), value, device=device) for name, value in filters.items()
    }
    cutoff = cutoff_reference.logit_cutoff(
        rows[:1], heat[:1], **{name: value[:1] for name, value in parameters.items()}
    )
    tokens, flags = reference.sample_tokens(
        rows, heat, *keys(num_rows, device), cutoff=cutoff.expand(num_rows)
    )
    assert int(flags.count_nonzero()) == 0
    return tokens


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_draws_follow_the_law_of_the_parameters(parameters: dict[str, float]):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[4] = -INF
    tokens = draws(logits, num_rows=NUM_DRAWS, **parameters)
    assert_follows(tokens, filtered_probabilities(logits, **parameters))


def test_draws_over_several_tiles_follow_the_law():
    logits = torch.full((5000,), -INF)
    chosen = [0, 1, 2047, 2048, 4095, 4096, 4999]
    logits[chosen] = torch.tensor([0.3, -1.0, 0.1, 1.2, -0.5, 0.0, 0.8])
    tokens = draws(logits, 1.0, 3000)
    assert_follows(tokens, logits.to(torch.float64).softmax(0))


def test_b15_top_k_of_one_and_top_p_of_a_half():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert int(draws(logits, 1.0, NUM_DRAWS, top_k=1).count_nonzero()) == 0
    counts = torch.bincount(draws(logits, 1.0, NUM_DRAWS, top_p=0.5), minlength=4)
    assert counts[2:].tolist() == [0, 0]
    assert abs(int(counts[0]) / NUM_DRAWS - 0.571) <= 0.005


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 5000])
def test_b106_kernel_draws_the_token_of_the_reference(vocab_size: int, device: torch.device):
    num_rows = 7
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn((num_rows, vocab_size), generator=generator) * 2).to(device)
    temperature = torch.rand(num_rows, generator=generator).to(device) + 0.3
    temperature[5] = 0
    cutoff = cutoff_reference.logit_cutoff(
        logits, temperature, top_p=torch.full((num_rows,), 0.7, device=device)
    )
    for stream, limit in ((kernel.Stream.BONUS, None), (kernel.Stream.DRAFT, cutoff)):
        arguments = (logits, temperature, *keys(num_rows, device))
        found = kernel.sample_tokens(*arguments, cutoff=limit, stream=stream)
        expected = reference.sample_tokens(*arguments, cutoff=limit, stream=stream)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@MODULES
def test_b16_only_the_key_decides(sampling, device: torch.device):
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn((10, 300), generator=generator).to(device)
    other = torch.randn((3, 300), generator=generator).to(device)
    positions = torch.arange(10, device=device)
    seeds = torch.full((10,), 42, device=device)
    heat = torch.full((10,), 2.0, device=device)

    def one_by_one() -> list[int]:
        tokens = []
        for step in range(10):
            row = slice(step, step + 1)
            found = sampling.sample_tokens(steps[row], heat[row], seeds[row], positions[row])
            tokens.append(int(found[0]))
            torch.rand(7, device=device)
        return tokens

    alone = one_by_one()
    assert len(set(alone)) > 5
    assert one_by_one() == alone
    # All steps as rows of one batch, in another order, behind rows of another request.
    order = torch.randperm(10, generator=generator).to(device)
    tokens, _ = sampling.sample_tokens(
        torch.cat([other, steps[order]]),
        torch.cat([heat[:3] * 0.25, heat]),
        torch.cat([seeds[:3] + 1, seeds]),
        torch.cat([positions[:3], positions[order]]),
    )
    assert tokens[3:].tolist() == [alone[step] for step in order.tolist()]


def test_streams_and_positions_give_independent_draws():
    logits = torch.zeros(1000, 500)
    seeds, positions = torch.full((1000,), 5), torch.arange(1000)
    heat = torch.ones(1000)
    columns = [
        reference.sample_tokens(logits, heat, seeds, positions, stream=stream)[0]
        for stream in reference.Stream
    ]
    for index, column in enumerate(columns):
        assert len(column.unique()) > 300
        for other in columns[:index]:
            assert int((column == other).sum()) < 15


@MODULES
def test_b104_nan_ties_and_infinite_rows_are_greedy_alike(sampling, device: torch.device):
    for row, token, flag in (
        ([NAN, 6.0, 8.0], 2, 1),
        ([NAN, NAN, NAN], 0, 3),
        ([-INF, -INF], 0, 2),
        ([5.0, 5.0], 0, 0),
        ([1.0, INF, INF], 1, 0),
        ([-3.0], 0, 0),
    ):
        logits = torch.tensor([row], device=device)
        tokens, flags = sampling.argmax_tokens(logits)
        assert (int(tokens), int(flags)) == (token, flag), row


@MODULES
def test_b10_a_broken_row_is_flagged_and_leaves_the_others_alone(sampling, device: torch.device):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(device)
    seeds = torch.tensor([1, 42, 3, 4], device=device)
    positions = torch.full((4,), 7, device=device)
    heat = torch.ones(4, device=device)
    healthy = sampling.sample_tokens(logits, heat, seeds, positions)[0]
    logits[1] = -INF
    logits[2, 17] = NAN
    tokens, flags = sampling.sample_tokens(logits, heat, seeds, positions)
    assert flags.tolist() == [0, sampling.RowFlag.NO_CANDIDATE, sampling.RowFlag.HAS_NAN, 0]
    assert tokens[[0, 3]].tolist() == healthy[[0, 3]].tolist()
    assert bool(((tokens >= 0) & (tokens < 50)).all())


@triton.jit
def _pick_kernel(index_ptr, weights_ptr, uniform_ptr):
    row = tl.program_id(0)
    weights = tl.load(weights_ptr + row * 4 + tl.arange(0, 4))
    tl.store(index_ptr + row, pick(weights, tl.load(uniform_ptr + row), 4))


def picked(weights: torch.Tensor, uniforms: torch.Tensor, device: torch.device) -> list[int]:
    """Return what the kernel's pick chooses in each row of four weights."""
    index = torch.zeros(weights.shape[0], dtype=torch.int32, device=device)
    _pick_kernel[(weights.shape[0],)](index, weights.to(device), uniforms.to(device))
    return index.tolist()


@pytest.mark.parametrize("uniform", [0.0, 2**-24, 0.5, 1 - 2**-24, 1.0])
def test_b11_the_only_candidate_wins_for_every_uniform(uniform: float, device: torch.device):
    weights = torch.eye(4)
    uniforms = torch.full((4,), uniform)
    assert reference.pick(weights, uniforms).tolist() == [0, 1, 2, 3]
    assert picked(weights, uniforms, device) == [0, 1, 2, 3]


def test_tokens_of_weight_zero_are_never_picked(device: torch.device):
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(5, 4).contiguous()
    uniforms = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert reference.pick(weights, uniforms).tolist() == [1, 1, 3, 3, 3]
    assert picked(weights, uniforms, device) == [1, 1, 3, 3, 3]


@MODULES
def test_b11_only_finite_logits_are_drawn(sampling, device: torch.device):
    for column in range(4):
        logits = torch.full((4, 4), -INF, device=device)
        logits[:, column] = 0
        tokens, flags = sampling.sample_tokens(
            logits, torch.ones(4, device=device), *keys(4, device)
        )
        assert tokens.tolist() == [column] * 4
        assert int(flags.count_nonzero()) == 0


@MODULES
def test_greedy_rows_share_a_batch_with_random_ones(sampling, device: torch.device):
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(2)).to(device)
    heat = torch.tensor([0.0, 1.0, 0.0, 5.0, 1e-6, 1.0], device=device)
    tokens, _ = sampling.sample_tokens(logits, heat, *keys(6, device))
    greedy, _ = sampling.argmax_tokens(logits)
    assert tokens[[0, 2, 4]].tolist() == greedy[[0, 2, 4]].tolist()


@MODULES
def test_b103_strided_logits_and_parameters(sampling, device: torch.device):
    wide = torch.randn(4, 3000, device=device)
    seeds = torch.arange(12, device=device).view(4, 3)
    heat = torch.full((4, 3), 0.9, device=device)
    found = sampling.sample_tokens(wide[:, :2900], heat[:, 1], seeds[:, 2], seeds[:, 0])
    expected = reference.sample_tokens(
        wide[:, :2900].contiguous(),
        heat[:, 1].contiguous(),
        seeds[:, 2].contiguous(),
        seeds[:, 0].contiguous(),
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(
        sampling.argmax_tokens(wide[:, :2900])[0], wide[:, :2900].contiguous().argmax(1)
    )


def test_b101_rows_past_two_to_the_31_elements(device: torch.device):
    # Three rows 2^30 elements apart; memory is committed at the start of each.
    row_elements = 2**30
    memory = extkv.ExtensibleTensor(3 * row_elements * 2, device, 3)
    memory.resize_per_segment_(2**21)
    rows = memory.full_view().view(torch.float16).view(3, row_elements)
    logits = rows.as_strided((3, 700), (row_elements, 1))
    logits.copy_(torch.randn(700, generator=torch.Generator().manual_seed(1)).to(device))
    heat = torch.ones(3, device=device)
    same = torch.full((3,), 11, device=device)
    assert len(set(kernel.sample_tokens(logits, heat, same, same)[0].tolist())) == 1
    assert len(set(kernel.argmax_tokens(logits)[0].tolist())) == 1
    cutoff = cutoff_kernel.logit_cutoff(logits, heat, top_k=torch.full_like(same, 5))
    assert len(set(cutoff.tolist())) == 1


@MODULES
def test_writes_into_the_tensors_given(sampling, device: torch.device):
    logits = torch.randn(3, 40, device=device)
    out = (
        torch.full((3,), -5, device=device),
        torch.full((3,), -5, dtype=torch.int32, device=device),
    )
    workspace = torch.full((sampling.sampling_workspace_size(3, 40),), NAN, device=device)
    found = sampling.sample_tokens(
        logits, torch.ones(3, device=device), *keys(3, device), workspace=workspace, out=out
    )
    assert found[0] is out[0]
    assert int(out[0].min()) >= 0
    assert out[1].tolist() == [0, 0, 0]
    empty = sampling.sample_tokens(logits[:0], torch.ones(0, device=device), *keys(0, device))
    assert empty[0].shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, "any, any"),
        ({"temperature": torch.zeros(2, dtype=torch.float16)}, "temperature must be"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds must be torch.int64"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"shape \[2\]"),
        ({"cutoff": torch.zeros(4)[::2]}, "cutoff must have stride 1"),
        ({"workspace": torch.zeros(7)}, "at least 8 elements, got 7"),
        ({"out": (torch.zeros(2), torch.zeros(2))}, "tokens must be torch.int64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(
    changes: dict[str, object], message: str, device: torch.device
):
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    arguments = {
        "logits": torch.zeros(2, 5, device=device),
        "temperature": torch.ones(2, device=device),
        "seeds": zeros,
        "positions": zeros,
    }
    moved = {
        k: with_strides(v, device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()
    }
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.sample_tokens(**{**arguments, **moved})


def gpu_draws(logits: torch.Tensor, num_rows: int, **filters: float) -> torch.Tensor:
    """Return the kernels' tokens for one row of logits under many keys."""
    device = logits.device
    rows = logits.expand(num_rows, -1)
    heat = torch.full((num_rows,), filters.pop("temperature"), device=device)
    parameters = {
        name: torch.full((num_rows,), value, device=device) for name, value in filters.items()
    }
    cutoff = cutoff_kernel.logit_cutoff(rows, heat, **parameters)
    tokens, flags = kernel.sample_tokens(rows, heat, *keys(num_rows, device), cutoff=cutoff)
    assert int(flags.count_nonzero()) == 0
    return tokens


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.4, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.85},
        {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()),
)
def test_gpu_draws_follow_the_law(parameters: dict[str, float], device: torch.device):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 2
    logits[::7] = -INF
    tokens = gpu_draws(logits.to(device), 200_000, **parameters)
    assert_follows(tokens, filtered_probabilities(logits, **parameters))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 32_000, 151_936, 262_145])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_b106_agrees_with_the_reference(
    dtype: torch.dtype, vocab_size: int, device: torch.device
):
    num_rows = 64
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn((num_rows, vocab_size), generator=generator) * 2).to(dtype)
    seeds, positions = keys(num_rows, torch.device("cpu"))
    heat = torch.full((num_rows,), 0.8)
    found, flags = kernel.sample_tokens(
        logits.to(device), heat.to(device), seeds.to(device), positions.to(device)
    )
    expected, _ = reference.sample_tokens(logits, heat, seeds, positions)
    # Float32 sums in another order move a boundary past a uniform once in some thousand rows.
    assert int((found.cpu() != expected).sum()) <= 2
    assert int(flags.count_nonzero()) == 0
    greedy, _ = kernel.argmax_tokens(logits.to(device))
    assert torch.equal(greedy.cpu(), reference.argmax_tokens(logits)[0])


@pytest.mark.gpu
def test_gpu_b101_full_vocabulary_rows(device: torch.device):
    num_rows, vocab_size = 14_136, 151_936
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5)).to(
        device, torch.bfloat16
    )
    logits = torch.zeros((num_rows, vocab_size), dtype=torch.bfloat16, device=device)
    same = [0, 14_134, 14_135]
    logits[same] = row
    seeds = torch.full((num_rows,), 3, device=device)
    tokens, _ = kernel.sample_tokens(logits, torch.ones(num_rows, device=device), seeds, seeds)
    assert len(set(tokens[same].tolist())) == 1
    assert kernel.argmax_tokens(logits)[0][same].tolist() == [int(row.argmax())] * 3


@pytest.mark.gpu
def test_gpu_sampling_replays_in_a_graph(device: torch.device):
    logits = torch.randn(8, 32_000, device=device)
    heat = torch.full((8,), 0.7, device=device)
    seeds, positions = keys(8, device)
    workspace = torch.full((kernel.sampling_workspace_size(8, 32_000),), NAN, device=device)
    out = (
        torch.full((8,), -1, device=device),
        torch.full((8,), -1, dtype=torch.int32, device=device),
    )
    top_p = torch.full((8,), 0.9, device=device)
    cutoff = torch.full((8,), NAN, device=device)

    def step() -> None:
        cutoff_kernel.logit_cutoff(logits, heat, top_p=top_p, out=cutoff)
        kernel.sample_tokens(
            logits, heat, seeds, positions, cutoff=cutoff, workspace=workspace, out=out
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        positions += 1
        logits.copy_(torch.randn(8, 32_000, device=device))
        graph.replay()
        found = out[0].clone()
        step()
        assert torch.equal(found, out[0])
