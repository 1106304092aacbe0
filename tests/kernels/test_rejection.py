"""Verification of drafts: the twin, ragged windows, broken rows, what a draft's law may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from extkv.drafting import Verification
from extkv.errors import InvalidArgumentError
from extkv.kernels import rejection as kernel
from extkv.reference import rejection as reference
from extkv.reference.logit_cutoff import logit_cutoff
from extkv.reference.sampling import sample_tokens
from verification_cases import GREEDY_REQUEST, HOLED_REQUEST, WINDOWS, make_windows

NAN, INF = torch.nan, torch.inf
MODULES = pytest.mark.parametrize("module", [kernel, reference], ids=["kernel", "reference"])
METHODS = pytest.mark.parametrize("method", ["standard", "block"])
FREE = torch.tensor([row > 0 for row in WINDOWS])


def check(arguments: dict[str, Any]) -> Verification:
    """Compare kernel and twin in all fields."""
    found, expected = kernel.verify_drafts(**arguments), reference.verify_drafts(**arguments)
    for name, have, want in zip(Verification._fields, found, expected, strict=True):
        assert torch.equal(have, want), (name, have, want)
    lengths = (arguments["window_starts"].diff() - 1).clamp(min=0)
    assert bool(((found.num_accepted >= 0) & (found.num_accepted <= lengths)).all())
    return found


@METHODS
@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 300, 2100])
def test_equals_the_reference(vocab_size, base_dtype, method, device):
    check(make_windows(vocab_size, device, base_dtype=base_dtype) | {"method": method})


@METHODS
def test_one_hot_drafts_equal_the_reference(method, device):
    for vocab_size in (7, 2100):
        arguments = make_windows(vocab_size, device, sharpness=3.0)
        found = check(arguments | {"draft": None, "method": method})
        if method == "standard":
            # A rejected token does not come back as the recovered one.
            starts = arguments["window_starts"].to(torch.int64)
            for request in (0, 2, 6):
                accepted = int(found.num_accepted[request])
                if accepted < WINDOWS[request] - 1:
                    rejected = arguments["token_ids"][starts[request] + accepted + 1]
                    assert int(found.next_tokens[request]) != int(rejected)


@METHODS
def test_cutoffs_apply_before_the_ratio(method, device):
    arguments = make_windows(300, device) | {"method": method}
    target, heat = arguments["target_logits"], arguments["temperature"]
    cutoff = logit_cutoff(target, heat, top_p=torch.full_like(heat, 0.6))
    for draft in (arguments["draft"], None):
        found = check(arguments | {"cutoff": cutoff, "draft": draft})
        starts = arguments["window_starts"].to(torch.int64)[:-1]
        for request in FREE.nonzero()[:, 0].tolist():
            row = starts[request] + found.num_accepted[request]
            assert float(target[row, found.next_tokens[request]]) >= float(cutoff[row])


@METHODS
def test_codes_stand_for_an_embedding(method, device):
    arguments = make_windows(150, device) | {"method": method}
    expected = check(arguments)
    draft = arguments["draft"]
    codes = torch.full((7, 3, 8), NAN, device=device)
    starts = arguments["window_starts"].to(torch.int64)
    for request, rows in enumerate(WINDOWS):
        for slot in range(rows - 1):
            token = arguments["token_ids"][starts[request] + slot].clamp(min=0)
            codes[request, slot] = draft.embedding[token]
    found = check(arguments | {"draft": draft._replace(embedding=None, codes=codes)})
    assert torch.equal(found.next_tokens, expected.next_tokens)


@METHODS
def test_draft_rows_may_lie_in_another_order_and_stride(method, device):
    arguments = make_windows(150, device) | {"method": method}
    expected = check(arguments)
    draft = arguments["draft"]
    order = torch.tensor([4, 1, 9, 0, 7, 3, 2], device=device)
    base = torch.full((10, 150, 5), NAN, device=device)
    numbers = torch.full((2, 10, 6), NAN, device=device)
    base[order, :, :3] = draft.base_logits.transpose(1, 2)
    numbers[0, order, :3], numbers[1, order, :3] = draft.logits, draft.log_sum_exp
    moved = draft._replace(
        base_logits=base.transpose(1, 2)[:, :4],
        logits=numbers[0, :, :4],
        log_sum_exp=numbers[1, :, :4],
        draft_rows=order,
    )
    found = check(arguments | {"draft": moved})
    for have, want in zip(found, expected, strict=True):
        assert torch.equal(have, want)


@METHODS
def test_reduced_draft_vocabularies_have_no_mass_elsewhere(method, device):
    arguments = make_windows(150, device) | {"method": method}
    draft, ids = arguments["draft"], torch.arange(0, 150, 3)
    drafted = torch.full((150,), -1, dtype=torch.int32)
    drafted[ids] = torch.arange(50, dtype=torch.int32)
    # Drafts are multiples of three here; their law is that of the kept columns.
    arguments["token_ids"] = torch.where(
        arguments["token_ids"] >= 0, arguments["token_ids"] // 3 * 3, -1
    )
    small = draft._replace(
        base_logits=draft.base_logits[:, :, :50],
        projection=draft.projection[:50],
        draft_ids=drafted.to(device),
    )
    check(arguments | {"draft": small})


@MODULES
@METHODS
def test_a_window_without_drafts_takes_the_token_of_sample_tokens(module, method, device):
    arguments = make_windows(2500, device, windows=(1, 1, 1, 1)) | {"method": method}
    found = module.verify_drafts(**arguments)
    expected, _ = sample_tokens(
        arguments["target_logits"],
        arguments["temperature"],
        arguments["seeds"],
        arguments["positions"],
    )
    assert torch.equal(found.next_tokens, expected)
    assert found.num_accepted.tolist() == [0] * 4


@MODULES
@METHODS
def test_b06_greedy_requests_follow_argmaxes_and_leave_others_alone(module, method, device):
    windows = (4, 1, 3, 4)
    arguments = make_windows(60, device, windows=windows) | {"method": method}
    request = torch.arange(4, device=device).repeat_interleave(torch.tensor(windows, device=device))
    heat = torch.tensor([0.0, 0.7, 0.0, 1.3], device=device)
    greedy = arguments["target_logits"].argmax(1)
    tokens = arguments["token_ids"].clone()
    tokens[1], tokens[2] = greedy[0], greedy[1]  # accepted
    tokens[3] = (greedy[2] + 1) % 60  # rejected
    tokens[6] = (greedy[5] + 1) % 60
    mixed = module.verify_drafts(**arguments | {"temperature": heat[request], "token_ids": tokens})
    assert mixed.num_accepted[[0, 2]].tolist() == [2, 0]
    assert mixed.next_tokens[[0, 2]].tolist() == [int(greedy[2]), int(greedy[5])]
    warm = module.verify_drafts(
        **arguments | {"temperature": heat[request].clamp(min=0.7), "token_ids": tokens}
    )
    for have, want in zip(mixed, warm, strict=True):
        assert have[[1, 3]].tolist() == want[[1, 3]].tolist()


@MODULES
def test_b18_each_request_reads_the_rows_of_its_window(module, device):
    # Drafts [2, 0, 3], accepted [1, 0, 3]: rows 0-1, 3, and 4-7 decide.
    arguments = make_windows(20, device, windows=(3, 1, 4))
    arguments["temperature"] = torch.zeros_like(arguments["temperature"])
    arguments["target_logits"] = torch.zeros(8, 20, device=device)
    best = [5, 6, 7, 8, 9, 10, 11, 12]
    arguments["target_logits"][range(8), best] = 9.0
    arguments["token_ids"] = torch.tensor([0, 5, 19, 0, 0, 9, 10, 11], device=device)
    found = module.verify_drafts(**arguments)
    assert found.num_accepted.tolist() == [1, 0, 3]
    assert found.next_tokens.tolist() == [6, 8, 12]


@MODULES
@METHODS
def test_b22_placeholders_and_ids_out_of_range_are_rejected(module, method, device):
    arguments = make_windows(60, device, sharpness=0.1) | {"method": method}
    starts = arguments["window_starts"].to(torch.int64)
    for token in (-1, 2**40):
        tokens = arguments["token_ids"].clone()
        tokens[starts[6] + 1] = token
        for draft in (arguments["draft"], None):
            changed = arguments | {"token_ids": tokens, "draft": draft}
            found = module.verify_drafts(**changed)
            assert int(found.num_accepted[6]) == 0
            assert int(found.num_accepted[HOLED_REQUEST]) <= 1
            assert bool(((found.next_tokens >= 0) & (found.next_tokens < 60)).all())


@MODULES
@METHODS
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_draft_whose_law_is_not_finite_counts_as_none(module, method, value, device):
    arguments = make_windows(60, device, sharpness=0.1) | {"method": method}
    draft = arguments["draft"]
    numbers = draft.log_sum_exp.clone()
    numbers[:, 1] = value
    found = module.verify_drafts(**arguments | {"draft": draft._replace(log_sum_exp=numbers)})
    sampled = [request for request in range(7) if request != GREEDY_REQUEST]
    assert int(found.num_accepted[sampled].max()) <= 1
    assert found.flags.tolist() == [0] * 7


@METHODS
def test_b10_a_broken_target_row_flags_its_request_alone(method, device):
    arguments = make_windows(60, device) | {"method": method}
    healthy = check(arguments)
    starts = arguments["window_starts"].tolist()
    broken = arguments["target_logits"].clone()
    broken[starts[0]] = -INF
    broken[starts[6], 17] = NAN
    broken[starts[GREEDY_REQUEST], 3] = NAN
    found = check(arguments | {"target_logits": broken})
    assert found.flags.tolist() == [2, 0, 0, 0, 1, 0, 1]
    assert found.num_accepted[[0, 4, 6]].tolist() == [0, 0, 0]
    for have, want in zip(found, healthy, strict=True):
        assert have[[1, 2, 3, 5]].tolist() == want[[1, 2, 3, 5]].tolist()


@MODULES
@METHODS
def test_nan_in_the_drafts_logits_has_no_mass(module, method, device):
    arguments = make_windows(60, device) | {"method": method}
    draft = arguments["draft"]
    base = draft.base_logits.clone()
    base[:, :, 5] = NAN
    found = module.verify_drafts(**arguments | {"draft": draft._replace(base_logits=base)})
    assert found.flags.tolist() == [0] * 7
    assert bool(((found.next_tokens >= 0) & (found.next_tokens < 60)).all())


@MODULES
@METHODS
def test_equal_distributions_accept_everything(module, method, device):
    arguments = make_windows(60, device, windows=(4, 4)) | {"method": method}
    law = arguments["draft"]
    arguments["draft"] = law._replace(projection=None, embedding=None)
    arguments["target_logits"] = arguments["draft"].base_logits.new_zeros(8, 60)
    heat = arguments["temperature"][[0, 4]]
    base = torch.zeros_like(law.base_logits)
    numbers = torch.full((2, 3), 60.0, device=device).log()
    arguments["draft"] = arguments["draft"]._replace(
        base_logits=base, logits=numbers * 0, log_sum_exp=numbers
    )
    assert bool((heat > 0).all())
    found = module.verify_drafts(**arguments)
    assert found.num_accepted.tolist() == [3, 3]


@MODULES
def test_b08_mass_before_the_last_tile_gives_ids_there(module, device):
    vocab_size = 8193
    arguments = make_windows(vocab_size, device, windows=(2, 1))
    arguments["target_logits"][:, 8192:] = -INF
    for draft in (arguments["draft"], None):
        found = module.verify_drafts(**arguments | {"draft": draft})
        assert bool(((found.next_tokens >= 0) & (found.next_tokens < 8192)).all())


@MODULES
def test_synthetic_rates_decide_alone(module, device):
    num_reqs = 40 if module is reference else 6
    arguments = make_windows(20, device, windows=(4,) * num_reqs) | {"method": "synthetic"}
    for rates, low, high in (
        ([1.0, 1.0, 1.0], 3, 3),
        ([0.0, 1.0, 1.0], 0, 0),
        ([1.0, 0.0, 1.0], 1, 1),
        ([0.5, 0.5, 0.5], 0, 3),
    ):
        limits = torch.tensor(rates, device=device)
        found = module.verify_drafts(**arguments | {"acceptance_rates": limits})
        accepted = found.num_accepted.clone()
        accepted[HOLED_REQUEST] = low  # its placeholder ends the window
        assert (int(accepted.min()), int(accepted.max())) == (low, high)
        assert bool(((found.next_tokens >= 0) & (found.next_tokens < 20)).all())
    check(arguments | {"acceptance_rates": torch.tensor([0.7, 0.5, 0.3], device=device)})


@METHODS
def test_b33_padding_windows_are_neutral_whatever_their_rows_hold(method, device):
    arguments = make_windows(60, device) | {"method": method}
    expected = check(arguments)
    padded = dict(arguments)
    starts = arguments["window_starts"]
    padded["window_starts"] = torch.cat([starts, starts[-1:].expand(3)])
    for name in ("target_logits", "token_ids", "temperature", "seeds", "positions"):
        tensor = arguments[name]
        rows = torch.empty((5, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        padded[name] = torch.cat([tensor, rows])  # poisoned
    draft = arguments["draft"]
    padded["draft"] = draft._replace(
        draft_rows=torch.cat([torch.arange(7), torch.zeros(3, dtype=torch.int64)]).to(device)
    )
    found = check(padded)
    for have, want in zip(found, expected, strict=True):
        assert torch.equal(have[:7], want)
        assert have[7:].tolist() == [0, 0, 0]


@MODULES
@METHODS
def test_drafts_past_the_maximum_are_left_out(module, method, device):
    arguments = make_windows(60, device, windows=(4, 4)) | {"method": method}
    short = make_windows(60, device, windows=(4, 4)) | {"method": method, "max_num_drafts": 1}
    found = module.verify_drafts(**short)
    assert int(found.num_accepted.max()) <= 1
    tokens = arguments["token_ids"].clone()
    tokens[[2, 6]] = -1
    if method == "standard":
        limited = module.verify_drafts(**arguments | {"token_ids": tokens})
        assert torch.equal(found.num_accepted, limited.num_accepted)
        assert torch.equal(found.next_tokens, limited.next_tokens)


@MODULES
def test_no_drafts_allowed_and_no_rows(module, device):
    arguments = make_windows(60, device, windows=(1, 1)) | {"max_num_drafts": 0}
    found = module.verify_drafts(**arguments)
    assert found.num_accepted.tolist() == [0, 0]
    empty = make_windows(60, device, windows=(0, 0))
    found = module.verify_drafts(**empty)
    assert [tensor.tolist() for tensor in found] == [[0, 0]] * 3


@MODULES
@METHODS
def test_writes_into_the_tensors_given(module, method, device):
    arguments = make_windows(150, device) | {"method": method}
    expected = module.verify_drafts(**arguments)
    out = Verification(*(torch.full_like(tensor, -9) for tensor in expected))
    size = module.verification_workspace_size(18, 7, 150, method=method)
    workspace = torch.full((size,), NAN, device=device)
    assert module.verify_drafts(**arguments, workspace=workspace, out=out) is out
    for have, want in zip(out, expected, strict=True):
        assert torch.equal(have, want)


def test_both_modules_need_the_same_workspace():
    for method in ("standard", "block", "synthetic"):
        sizes = [
            module.verification_workspace_size(2048, 256, 151_936, method=method)
            for module in (kernel, reference)
        ]
        assert sizes[0] == sizes[1]


def replaced(device: torch.device, **changes: Any) -> dict[str, Any]:
    """Return valid arguments, some of them or of the draft's replaced."""
    arguments = make_windows(20, device, windows=(2, 3))
    for name, value in changes.items():
        moved = value.to(device) if isinstance(value, torch.Tensor) else value
        if name.startswith("draft_"):
            field = name.removeprefix("draft_")
            arguments["draft"] = arguments["draft"]._replace(**{field: moved})
        else:
            arguments[name] = moved
    return arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": torch.zeros(5)}, "target_logits|logits must have shape"),
        ({"token_ids": torch.zeros(5, dtype=torch.int32)}, "token_ids must be torch.int64"),
        ({"window_starts": torch.zeros(3, dtype=torch.int64)}, "window_starts must be torch.int32"),
        ({"window_starts": torch.zeros(0, dtype=torch.int32)}, "at least 1 element, got 0"),
        ({"temperature": torch.ones(2)}, r"temperature must have shape \[5\]"),
        ({"seeds": torch.zeros(5)}, "seeds must be torch.int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, "positions must have shape"),
        ({"cutoff": torch.zeros(10)[::2]}, "cutoff must have stride 1"),
        ({"max_num_drafts": 32}, r"max_num_drafts must be in \[0, 31\], got 32"),
        ({"max_num_drafts": 4}, "at least 4 slots, got 3"),
        ({"method": "typical"}, "method must be one of standard, block, synthetic, got typical"),
        ({"method": "synthetic"}, "got none for synthetic"),
        ({"acceptance_rates": torch.ones(3)}, "got some for standard"),
        (
            {"method": "synthetic", "acceptance_rates": torch.ones(2)},
            r"acceptance_rates must have shape \[3\]",
        ),
        ({"draft_base_logits": torch.zeros(2, 3)}, "draft.base_logits must have shape"),
        ({"draft_base_logits": torch.zeros(2, 3, 19)}, "draft.projection must have shape"),
        ({"draft_logits": torch.zeros(2, 2)}, "draft.logits must have shape"),
        (
            {"draft_log_sum_exp": torch.zeros(2, 3, dtype=torch.float64)},
            "draft.log_sum_exp must be torch.float32",
        ),
        ({"draft_codes": torch.zeros(2, 3, 8)}, "needs embedding or codes, got both"),
        ({"draft_embedding": None}, "needs embedding or codes, got neither"),
        ({"draft_embedding": torch.zeros(20, 7)}, r"draft.embedding must have shape \[any, 8\]"),
        ({"draft_draft_rows": torch.zeros(3, dtype=torch.int64)}, r"shape \[2\], got \[3\]"),
        ({"draft_draft_ids": torch.zeros(20)}, "draft.draft_ids must be torch.int32"),
        ({"workspace": torch.zeros(8)}, "workspace must have at least"),
        ({"out": Verification(*[torch.zeros(2)] * 3)}, "out.num_accepted must be torch.int32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_rejects_arguments_that_do_not_fit(changes, message: str, device):
    arguments = replaced(device, **changes)
    if "out" in changes:
        arguments["out"] = Verification(*(tensor.to(device) for tensor in changes["out"]))
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.verify_drafts(**arguments)


def test_rejects_too_few_draft_rows_and_another_vocabulary(device):
    arguments = replaced(device, draft_projection=None, draft_embedding=None)
    draft = arguments["draft"]
    narrow = draft._replace(base_logits=draft.base_logits[:, :, :19])
    with pytest.raises(InvalidArgumentError, match="vocabulary of 20, got 19 and no draft_ids"):
        kernel.verify_drafts(**arguments | {"draft": narrow})
    few = draft._replace(
        base_logits=draft.base_logits[:1],
        logits=draft.logits[:1],
        log_sum_exp=draft.log_sum_exp[:1],
    )
    with pytest.raises(InvalidArgumentError, match="a row for each of 2 requests, got 1"):
        kernel.verify_drafts(**arguments | {"draft": few})


@pytest.mark.gpu
@METHODS
@pytest.mark.parametrize("is_one_hot", [False, True])
@pytest.mark.parametrize(
    ("num_reqs", "vocab_size"), [(1, 151_936), (16, 10_000), (64, 8193), (64, 151_936)]
)
def test_gpu_equals_the_reference(num_reqs, vocab_size, is_one_hot, method, device):
    windows = tuple(1 + (3 * index) % 8 for index in range(num_reqs))
    arguments = make_windows(
        vocab_size,
        device,
        windows=windows,
        num_drafts=7,
        rank=256,
        base_dtype=torch.bfloat16,
        head_dtype=torch.bfloat16,
    ) | {"method": method}
    if is_one_hot:
        arguments["draft"] = None
    found, expected = kernel.verify_drafts(**arguments), reference.verify_drafts(**arguments)
    # bfloat16 products are summed in another order, which moves a boundary past a uniform.
    for have, want in zip(found, expected, strict=True):
        assert int((have != want).sum()) <= max(1, num_reqs // 16)


@pytest.mark.gpu
@METHODS
def test_gpu_verification_replays_in_a_graph(method, device):
    arguments = make_windows(32_000, device, head_dtype=torch.bfloat16) | {"method": method}
    out = Verification(*(torch.zeros_like(t) for t in kernel.verify_drafts(**arguments)))
    size = kernel.verification_workspace_size(18, 7, 32_000, method=method)
    workspace = torch.full((size,), NAN, device=device)

    def step() -> None:
        kernel.verify_drafts(**arguments, workspace=workspace, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        arguments["positions"] += 8
        arguments["target_logits"].normal_()
        graph.replay()
        replayed = [tensor.clone() for tensor in out]
        step()
        for have, want in zip(replayed, out, strict=True):
            assert torch.equal(have, want)
