"""Markov step: the twin, the law told to verification, keys, reduced vocabularies, bad rows."""

from __future__ import annotations

from typing import Any

import extkv
import pytest
import torch
from extkv.drafting import MarkovDraw
from extkv.errors import InvalidArgumentError
from extkv.kernels import markov_step as kernel
from extkv.reference import markov_step as reference
from sampling_cases import assert_follows

NAN, INF = torch.nan, torch.inf
MODULES = pytest.mark.parametrize("module", [kernel, reference], ids=["kernel", "reference"])


def make(
    num_rows: int,
    vocab_size: int,
    rank: int,
    device: torch.device,
    *,
    base_dtype: torch.dtype = torch.float32,
    head_dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return arguments; base logits are those of one slot of three."""
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    base = torch.randn(num_rows, 3, vocab_size, generator=generator) * 2
    heat = torch.rand(num_rows, generator=generator) + 0.4
    heat[num_rows // 2] = 0
    tokens = torch.randint(-1, vocab_size, (num_rows,), generator=generator)
    arguments = {
        "base_logits": base.to(base_dtype)[:, 1],
        "projection": (torch.randn(vocab_size, rank, generator=generator) * 0.4).to(head_dtype),
        "temperature": heat,
        "seeds": torch.arange(num_rows) * 0x9E3779B97F4A7C15 % 2**63,
        "positions": torch.arange(num_rows) % 97,
        "tokens": tokens,
        "embedding": torch.randn(vocab_size, rank, generator=generator).to(head_dtype),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()} | {"slot": 1}


def check(arguments: dict[str, Any], *, num_differing: int = 0) -> MarkovDraw:
    """Compare kernel and twin; sums in another order may move a boundary past a uniform."""
    found, expected = kernel.markov_step(**arguments), reference.markov_step(**arguments)
    same = found.tokens == expected.tokens
    assert int((~same).sum()) <= num_differing
    torch.testing.assert_close(found.logits[same], expected.logits[same], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_sum_exp, expected.log_sum_exp, atol=2e-5, rtol=1e-5)
    assert torch.equal(found.flags, expected.flags)
    return found


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "rank"), [(1, 1, 1), (3, 7, 5), (5, 300, 40), (33, 129, 64)]
)
def test_equals_the_reference(num_rows, vocab_size, rank, base_dtype, device):
    check(make(num_rows, vocab_size, rank, device, base_dtype=base_dtype))


@pytest.mark.parametrize(
    "settings",
    [
        kernel.MarkovSettings(128, 16, 32, 4, 2),
        kernel.MarkovSettings(64, 64, 64, 4, 2, programs_per_processor=2),
        kernel.MarkovSettings(128, 16, 64, 4, 2, 2, programs_per_processor=1),
        kernel.MarkovSettings(64, 16, 32, 4, 2, programs_per_processor=1),
        kernel.MarkovSettings(64, 16, 32, 4, 2, is_early=True),
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_tiles_change_no_token(settings, device):
    arguments = make(37, 700, 64, device)
    expected = kernel.markov_step(**arguments)
    found = kernel.markov_step(**arguments, settings=settings)
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-5)


def test_takes_base_logits_of_any_strides(device):
    arguments = make(4, 150, 8, device)
    expected = kernel.markov_step(**arguments)
    wide = torch.full((150, 9), NAN, device=device)
    wide[:, 2:6] = arguments["base_logits"].T
    head = torch.full((150, 20), NAN, device=device)
    head[:, :8] = arguments["projection"]
    seeds = torch.stack([arguments["seeds"]] * 2, dim=1)
    found = kernel.markov_step(
        **arguments | {"base_logits": wide.T[2:6], "projection": head[:, :8], "seeds": seeds[:, 0]}
    )
    for have, want in zip(found, expected, strict=True):
        assert torch.equal(have, want)


@MODULES
def test_codes_stand_for_tokens_and_embedding(module, device):
    arguments = make(4, 150, 8, device)
    expected = module.markov_step(**arguments)
    codes = arguments["embedding"][arguments["tokens"].clamp(min=0)]
    del arguments["tokens"], arguments["embedding"]
    found = module.markov_step(**arguments, codes=codes)
    assert torch.equal(found.tokens, expected.tokens)


@MODULES
def test_no_projection_means_no_bias(module, device):
    arguments = make(4, 150, 8, device)
    for name in ("tokens", "embedding"):
        del arguments[name]
    arguments["projection"] = None
    found = module.markov_step(**arguments)
    greedy = arguments["base_logits"].argmax(1)
    assert int(found.tokens[2]) == int(greedy[2])
    lse = (arguments["base_logits"] / arguments["temperature"][:, None]).logsumexp(1)
    torch.testing.assert_close(found.log_sum_exp[[0, 1, 3]], lse[[0, 1, 3]])


@MODULES
def test_reported_law_is_the_softmax_that_was_drawn_from(module, device):
    arguments = make(6, 300, 16, device)
    found = module.markov_step(**arguments)
    logits = reference.markov_logits(
        arguments["base_logits"],
        arguments["projection"],
        tokens=arguments["tokens"],
        embedding=arguments["embedding"],
    )
    heat = arguments["temperature"]
    for row in range(6):
        if heat[row] > 0:
            q = (logits[row] / heat[row]).softmax(0)[found.tokens[row]]
            log_q = found.logits[row] / heat[row] - found.log_sum_exp[row]
            torch.testing.assert_close(log_q.exp(), q, atol=1e-5, rtol=1e-4)
        else:
            assert int(found.tokens[row]) == int(logits[row].argmax())
            assert float(found.log_sum_exp[row]) == 0


def test_draws_over_several_tiles_follow_the_law():
    base = torch.full((700,), -INF)
    chosen = [0, 127, 128, 300, 511, 699]
    base[chosen] = torch.tensor([0.3, -1.0, 1.2, -0.5, 0.0, 0.8])
    seeds = torch.arange(20_000) * 7919
    drawn = reference.markov_step(
        base.expand(20_000, -1), None, torch.ones(20_000), seeds, seeds % 31, slot=3
    )
    assert_follows(drawn.tokens, base.to(torch.float64).softmax(0))


@MODULES
def test_b40_a_rows_draft_does_not_depend_on_its_batch(module, device):
    arguments = make(6, 200, 16, device)
    together = module.markov_step(**arguments)
    for row in (0, 2, 5):
        part = slice(row, row + 1)
        per_row = ("base_logits", "temperature", "seeds", "positions", "tokens")
        alone = arguments | {name: arguments[name][part] for name in per_row}
        found = module.markov_step(**alone)
        assert torch.equal(found.tokens, together.tokens[part])


@MODULES
def test_slots_and_positions_draw_with_noise_of_their_own(module, device):
    base = torch.zeros(40, 100, device=device)
    ones = torch.ones(40, device=device)
    rows = torch.arange(40, device=device)
    drawn = [
        module.markov_step(base, None, ones, rows, rows + shift, slot=slot).tokens
        for slot, shift in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    for index, tokens in enumerate(drawn):
        assert len(tokens.unique()) > 20
        for other in drawn[:index]:
            assert int((tokens == other).sum()) < 6


@MODULES
def test_greedy_takes_the_leftmost_of_equals_in_any_tile(module, device):
    base = torch.zeros(3, 400, device=device)
    base[0, [130, 200, 399]] = 5.0
    base[1, 399] = 1.0
    found = module.markov_step(base, None, None, None, None, slot=0)
    assert found.tokens.tolist() == [130, 399, 0]
    assert found.logits.tolist() == [5, 1, 0]
    assert found.log_sum_exp.tolist() == [0, 0, 0]
    assert found.flags.tolist() == [0, 0, 0]


@MODULES
def test_b104_broken_rows_are_flagged_and_leave_the_others_alone(module, device):
    arguments = make(6, 200, 8, device)
    arguments["temperature"][:] = 1.0
    healthy = module.markov_step(**arguments)
    arguments["base_logits"][1] = -INF
    arguments["base_logits"][2, 150] = NAN
    arguments["base_logits"][4] = NAN
    found = module.markov_step(**arguments)
    assert found.flags.tolist() == [0, 2, 1, 0, 3, 0]
    kept = [0, 3, 5]
    assert found.tokens[kept].tolist() == healthy.tokens[kept].tolist()
    assert bool(((found.tokens >= 0) & (found.tokens < 200)).all())
    assert found.tokens[[1, 4]].tolist() == [0, 0]
    assert found.log_sum_exp[[1, 4]].tolist() == [-INF, -INF]


@MODULES
def test_an_infinite_logit_leaves_its_group_out(module, device):
    base = torch.zeros(3, 140, device=device)
    base[0, 65] = base[2] = INF
    rows = torch.zeros(3, dtype=torch.int64, device=device)
    for heat in (None, torch.tensor([1.0, 1.0, 0.0], device=device)):
        found = module.markov_step(base, None, heat, rows, rows, slot=0)
        assert found.tokens[0] not in range(64, 128)
        assert found.flags.tolist() == [1, 0, 3]
        assert found.logits.isnan().tolist() == [True, False, True]


@MODULES
def test_b22_a_placeholder_is_read_as_a_real_token(module, device):
    arguments = make(4, 50, 8, device)
    expected = module.markov_step(**arguments | {"tokens": torch.zeros_like(arguments["tokens"])})
    holes = torch.tensor([-1, -(2**62), -1, -5], device=device)
    found = module.markov_step(**arguments | {"tokens": holes})
    assert torch.equal(found.tokens, expected.tokens)


@MODULES
def test_b56_offsets_map_draft_ids_to_the_targets(module, device):
    base = torch.eye(3, device=device) * 90
    offsets = torch.tensor([0, 5, 9], device=device)
    rows = torch.arange(3, device=device)
    for heat in (None, torch.ones(3, device=device)):
        found = module.markov_step(base, None, heat, rows, rows, slot=0, draft_to_target=offsets)
        assert found.tokens.tolist() == [0, 6, 11]


@MODULES
def test_b56_columns_without_a_target_token_are_never_drawn(module, device):
    arguments = make(5, 300, 8, device)
    arguments["base_logits"][:, 280:] = 1000.0
    narrow = arguments | {
        "base_logits": arguments["base_logits"][:, :280],
        "projection": arguments["projection"][:280],
    }
    assert int(module.markov_step(**narrow).tokens.max()) < 280


def test_b101_rows_past_two_to_the_31_elements(device):
    row_elements = 2**30
    memory = extkv.ExtensibleTensor(3 * row_elements * 2, device, 3)
    memory.resize_per_segment_(2**21)
    rows = memory.full_view().view(torch.float16).view(3, row_elements)
    base = rows.as_strided((3, 200), (row_elements, 1))
    base.copy_(torch.randn(200, generator=torch.Generator().manual_seed(1)).to(device))
    same = torch.full((3,), 11, device=device)
    found = kernel.markov_step(base, None, torch.ones(3, device=device), same, same, slot=0)
    assert len(set(found.tokens.tolist())) == 1


@MODULES
def test_writes_columns_of_the_tensors_given(module, device):
    arguments = make(3, 150, 8, device)
    expected = module.markov_step(**arguments)
    tables = [torch.full((3, 7), -9, dtype=t.dtype, device=device) for t in expected]
    out = MarkovDraw(*(table[:, 4] for table in tables))
    size = module.markov_workspace_size(3, 150)
    workspace = torch.full((size,), NAN, device=device)
    assert module.markov_step(**arguments, workspace=workspace, out=out) is out
    for table, want in zip(tables, expected, strict=True):
        assert torch.equal(table[:, 4], want)
        assert table[:, [0, 1, 2, 3, 5, 6]].unique().tolist() == [-9]


@MODULES
def test_accepts_no_rows(module, device):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    heat = torch.zeros(0, device=device)
    found = module.markov_step(torch.zeros(0, 9, device=device), None, heat, none, none, slot=0)
    assert found.tokens.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_logits": torch.zeros(3)}, r"base_logits must have shape \[any, any\]"),
        ({"base_logits": torch.zeros(3, 0)}, "vocab_size must be in"),
        ({"slot": -1}, "slot must be in"),
        ({"projection": torch.zeros(9, 4)}, r"projection must have shape \[20, any\]"),
        ({"projection": torch.zeros(20, 4, dtype=torch.float16)}, "projection must be torch.bf"),
        ({"projection": torch.zeros(20, 0)}, "rank of the projection must be at least 1"),
        ({"projection": None}, "tokens needs a projection, got none"),
        ({"tokens": None}, "needs tokens and embedding, or codes, got embedding"),
        ({"codes": torch.zeros(3, 4)}, "got tokens and embedding and codes"),
        ({"tokens": torch.zeros(3, dtype=torch.int32)}, "tokens must be torch.int64"),
        ({"embedding": torch.zeros(20, 5)}, r"embedding must have shape \[any, 4\]"),
        ({"embedding": torch.zeros(0, 4)}, "embedding must have at least 1 row"),
        ({"temperature": torch.ones(2)}, r"temperature must have shape \[3\]"),
        ({"seeds": None}, "temperature needs seeds and positions"),
        ({"seeds": torch.zeros(3)}, "seeds must be torch.int64"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must have shape"),
        ({"draft_to_target": torch.zeros(3, dtype=torch.int32)}, "draft_to_target must have shape"),
        ({"workspace": torch.zeros(2)}, "at least 3 elements, got 2"),
        ({"out": MarkovDraw(*[torch.zeros(3)] * 4)}, "out.tokens must be torch.int64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(changes, message: str, device):
    arguments = make(3, 20, 4, device)
    for name, value in changes.items():
        moved = value.to(device) if isinstance(value, torch.Tensor) else value
        if isinstance(value, MarkovDraw):
            moved = MarkovDraw(*(tensor.to(device) for tensor in value))
        arguments[name] = moved
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.markov_step(**arguments)


def test_rejects_codes_of_another_rank(device):
    arguments = make(3, 20, 4, device) | {"tokens": None, "embedding": None}
    with pytest.raises(InvalidArgumentError, match=r"codes must have shape \[3, 4\]"):
        kernel.markov_step(**arguments, codes=torch.zeros(3, 5, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [7, 1000, 151_936, 152_064])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 256])
def test_gpu_equals_the_reference(num_rows: int, vocab_size: int, device):
    arguments = make(
        num_rows,
        vocab_size,
        256,
        device,
        base_dtype=torch.bfloat16,
        head_dtype=torch.bfloat16,
    )
    found, expected = kernel.markov_step(**arguments), reference.markov_step(**arguments)
    same = found.tokens == expected.tokens
    # bfloat16 products are summed in another order: some 1e-5 of a logit of size 10.
    assert int((~same).sum()) <= max(1, num_rows // 50)
    torch.testing.assert_close(found.logits[same], expected.logits[same], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.log_sum_exp, expected.log_sum_exp, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
def test_gpu_steps_replay_in_a_graph(device):
    arguments = make(8, 32_000, 64, device, head_dtype=torch.bfloat16)
    drafts = torch.full((8, 4), -1, device=device)
    numbers = torch.full((2, 8, 4), NAN, device=device)
    flags = torch.zeros(8, 4, dtype=torch.int32, device=device)
    workspace = torch.full((kernel.markov_workspace_size(8, 32_000),), NAN, device=device)
    anchors = arguments.pop("tokens")
    del arguments["slot"]

    def round_() -> None:
        previous = anchors
        for slot in range(4):
            out = MarkovDraw(
                drafts[:, slot], numbers[0, :, slot], numbers[1, :, slot], flags[:, slot]
            )
            kernel.markov_step(
                **arguments, tokens=previous, slot=slot, workspace=workspace, out=out
            )
            previous = drafts[:, slot]

    round_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_()
    for _ in range(3):
        arguments["positions"] += 4
        graph.replay()
        replayed = drafts.clone(), numbers.clone()
        round_()
        assert torch.equal(replayed[0], drafts)
        assert torch.equal(replayed[1], numbers)
