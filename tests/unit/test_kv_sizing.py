"""The flow reserve, capture, measure, commit: what is counted, refused and replayed."""

from __future__ import annotations

import json

import extkv
import pytest
import torch
from extkv.kv import FullAttentionSpec, KVCache, Layer, MemoryReading, SizeAfterCapture, SizingPlan

GIB = 1 << 30
MIB = 1 << 20
# 36 layers of 8 KV heads of 128, as in case B78: 2,359,296 bytes per block.
SPEC = FullAttentionSpec(16, 8, 128, "bfloat16")
LAYERS = [Layer(f"layers.{index}", SPEC) for index in range(36)]
SMALL = [Layer("layers.0", FullAttentionSpec(16, 2, 64, "float16"))]


class FakeDevice:
    """A device whose memory a test moves by hand; torch's allocator holds what it is told."""

    def __init__(self, total: int) -> None:
        self.size = total
        self.used = 0
        self.allocated = 0
        self.reserved = 0
        self.peak = 0
        self.foreign = 0
        self.cache: KVCache | None = None

    def take(self, num_bytes: int, *, cached: int = 0) -> None:
        self.allocated += num_bytes
        self.reserved += num_bytes + cached
        self.used += num_bytes + cached
        self.peak = max(self.peak, self.allocated)

    def transient(self, num_bytes: int) -> None:
        self.peak = max(self.peak, self.allocated + num_bytes)
        grow = max(0, self.allocated + num_bytes - self.reserved)
        self.reserved += grow
        self.used += grow

    def total(self) -> int:
        return self.size

    def read(self) -> MemoryReading:
        committed = 0 if self.cache is None else self.cache.stats().committed_bytes
        free = self.size - self.used - self.foreign - committed
        return MemoryReading(free, self.allocated, self.reserved, self.peak)

    def empty_caches(self) -> None:
        self.used -= self.reserved - self.allocated
        self.reserved = self.allocated

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def foreign_bytes(self) -> int:
        return self.foreign


def measured(device: FakeDevice, layers=LAYERS, *, graphs: int = 0, peak: int = 0, **options):
    options = {"max_model_len": 4096, "reserve_bytes": 150 * MIB, **options}
    sizer = SizeAfterCapture(layers, device="cpu", probe=device, **options)
    sizer.weights_loaded(lambda: device.take(16 * GIB))
    sizer.profile(lambda: device.transient(peak))
    device.cache = sizer.reserve()
    device.empty_caches()
    sizer.capture(lambda: device.take(graphs))
    sizer.measure(lambda: device.transient(peak))
    return sizer


def test_plan_explains_every_byte():
    device = FakeDevice(80 * GIB)
    plan = measured(device, graphs=int(1.37 * GIB), peak=2 * GIB).plan()
    assert sum(plan.parts.values()) == 80 * GIB
    assert plan.parts["weights_bytes"] == 16 * GIB
    assert plan.parts["graphs_bytes"] == int(1.37 * GIB)
    assert plan.parts["reserve_bytes"] == 150 * MIB
    assert plan.parts["kv_bytes"] == plan.num_blocks * 2_359_296
    assert plan.num_tokens == plan.num_blocks * 16
    assert plan.concurrency == plan.num_blocks / 256
    for word in ("weights", "graphs", "KV cache", "16.0 GiB"):
        assert word in plan.table
    assert f"{plan.num_blocks:,} blocks" in plan.sentence
    assert str(plan) == plan.table


def test_weights_that_were_loaded_before_are_weights_and_no_workspace():
    device = FakeDevice(140 * GIB)
    device.take(16 * GIB)
    options = {"max_model_len": 4096, "loaded_weight_bytes": 15 * GIB}
    sizer = SizeAfterCapture(LAYERS, device="cpu", probe=device, **options)
    sizer.weights_loaded()
    device.cache = sizer.reserve()
    sizer.measure(lambda: None)
    plan = sizer.plan()
    assert plan.parts["weights_bytes"] == 15 * GIB
    assert plan.parts["workspace_bytes"] == GIB
    assert not plan.warnings


def test_more_free_memory_never_gives_fewer_blocks():
    sizes = [measured(FakeDevice(total * GIB)).plan().num_blocks for total in (24, 40, 80, 141)]
    assert sizes == sorted(sizes)


def test_plan_is_replayed_from_json_without_a_device():
    plan = measured(FakeDevice(80 * GIB), graphs=GIB, peak=GIB).plan()
    again = SizingPlan.from_json(plan.to_json())
    assert again == plan
    record = json.loads(plan.to_json())
    assert SizingPlan.from_trace(record["trace"]) == plan


def test_a_record_that_was_edited_is_refused():
    record = json.loads(measured(FakeDevice(80 * GIB)).plan().to_json())
    record["plan"]["blocks"] += 1
    with pytest.raises(extkv.InvalidArgumentError):
        SizingPlan.from_json(json.dumps(record))
    with pytest.raises(extkv.InvalidArgumentError):
        SizingPlan.from_json("{}")
    with pytest.raises(extkv.InvalidArgumentError):
        SizingPlan.from_json("not json")


def test_b80_a_capture_that_needs_much_for_a_moment_costs_what_it_keeps():
    def capture(device: FakeDevice) -> None:
        device.transient(3 * GIB)
        device.take(300 * MIB)

    def size(capturing) -> int:
        device = FakeDevice(80 * GIB)
        sizer = SizeAfterCapture(LAYERS, device="cpu", probe=device, max_model_len=4096)
        device.cache = sizer.reserve()
        sizer.capture(lambda: capturing(device))
        sizer.measure(lambda: None)
        return sizer.plan().num_blocks

    lost = size(lambda _: None) - size(capture)
    assert lost == pytest.approx(300 * MIB / 2_359_296, abs=1)


def test_negative_graph_memory_is_not_added():
    device = FakeDevice(80 * GIB)
    device.take(2 * GIB)

    def capture() -> None:
        device.allocated -= GIB
        device.reserved -= GIB
        device.used -= GIB

    sizer = SizeAfterCapture(LAYERS, device="cpu", probe=device, max_model_len=4096)
    device.cache = sizer.reserve()
    sizer.capture(capture)
    sizer.measure(lambda: None)
    plan = sizer.plan()
    assert plan.parts["graphs_bytes"] == 0
    assert sum(plan.parts.values()) == 80 * GIB


def test_other_processes_are_counted_and_explained():
    alone, shared = FakeDevice(80 * GIB), FakeDevice(80 * GIB)
    shared.foreign = 20 * GIB
    difference = measured(alone).plan().num_blocks - measured(shared).plan().num_blocks
    assert difference == pytest.approx(20 * GIB / 2_359_296, abs=1)
    assert measured(FakeDevice(80 * GIB)).plan().parts["foreign_bytes"] == 0
    shared = FakeDevice(80 * GIB)
    shared.foreign = 20 * GIB
    assert measured(shared).plan().parts["foreign_bytes"] == 20 * GIB


def test_cached_allocator_memory_is_counted_once():
    device = FakeDevice(80 * GIB)
    plan = measured(device, peak=4 * GIB).plan()
    # The measured step left its 4 GiB in the allocator's cache: they are not free any more and are
    # not taken off again.
    assert plan.parts["transient_bytes"] == 0
    assert plan.parts["workspace_bytes"] == pytest.approx(4 * GIB, abs=64 * MIB)


def test_b76_the_size_never_exceeds_the_reservation():
    plan = measured(FakeDevice(80 * GIB), max_blocks=6483).plan()
    assert plan.num_blocks == 6483
    assert plan.limit == "reservation"


def test_utilization_bounds_the_size():
    full = measured(FakeDevice(80 * GIB)).plan()
    half = measured(FakeDevice(80 * GIB), gpu_memory_utilization=0.5).plan()
    assert half.limit == "utilization"
    assert half.num_blocks < full.num_blocks
    assert half.parts["kv_bytes"] <= 24 * GIB


def test_too_little_for_one_request_says_what_fits_and_what_to_change():
    device = FakeDevice(17 * GIB)
    sizer = measured(device, max_model_len=131_072)
    with pytest.raises(extkv.CacheTooSmallError, match="131072") as raised:
        sizer.plan()
    assert isinstance(raised.value, extkv.SizingError)
    longest = raised.value.longest_len
    assert longest is not None
    assert 0 < longest < 131_072
    assert str(longest) in str(raised.value)
    assert measured(FakeDevice(17 * GIB), max_model_len=longest).plan().num_blocks > 0


def test_b85_a_manual_size_and_the_extensible_cache_exclude_each_other():
    with pytest.raises(extkv.SizingError, match=r"1000.*extensible=False"):
        SizeAfterCapture(LAYERS, device="cpu", max_model_len=16, kv_cache_memory_bytes=1000)


def fixed(device: FakeDevice, manual: int | None) -> SizeAfterCapture:
    sizer = SizeAfterCapture(
        SMALL,
        device="cpu",
        probe=device,
        max_model_len=160,
        reserve_bytes=0,
        kv_cache_memory_bytes=manual,
        extensible=False,
    )
    sizer.capture(lambda: device.take(MIB))
    sizer.measure(lambda: None)
    return sizer


def test_a_fixed_cache_commits_once_and_refuses_growth():
    sizer = fixed(FakeDevice(8 * MIB), None)
    plan = sizer.plan()
    cache = sizer.commit()
    assert cache.num_blocks == plan.num_blocks == cache.capacity_blocks
    with pytest.raises(extkv.CapacityError):
        cache.commit(plan.num_blocks + 1)


def test_a_manual_size_is_taken_or_refused_but_never_clamped():
    assert fixed(FakeDevice(8 * MIB), 4 * MIB).plan().num_blocks == 512
    with pytest.raises(extkv.SizingError, match="MiB"):
        fixed(FakeDevice(8 * MIB), 8 * MIB).plan()


@pytest.mark.parametrize("change", [GIB // 2, -10 * GIB])
def test_b82_free_memory_that_moves_between_phases_is_no_reason_to_stop(change: int):
    device = FakeDevice(188 * GIB)
    sizer = SizeAfterCapture(LAYERS, device="cpu", probe=device, max_model_len=4096)
    sizer.weights_loaded(lambda: device.take(16 * GIB))
    device.foreign = 12 * GIB
    sizer.profile(lambda: None)
    device.foreign -= change
    device.cache = sizer.reserve()
    sizer.capture(lambda: device.take(GIB))
    sizer.measure(lambda: None)
    plan = sizer.plan()
    assert sum(plan.parts.values()) == 188 * GIB
    assert plan.warnings


def test_memory_that_is_gone_at_commit_gives_fewer_blocks():
    budget = 64 * MIB
    extkv.set_host_memory_budget(extkv.memory_info("cpu").total)
    device = FakeDevice(budget)
    sizer = SizeAfterCapture(SMALL, device="cpu", probe=device, max_model_len=160, reserve_bytes=0)
    device.cache = sizer.reserve()
    sizer.capture(lambda: None)
    sizer.measure(lambda: None)
    plan = sizer.plan()
    device.foreign = 16 * MIB
    cache = sizer.commit()
    assert plan.num_blocks - cache.num_blocks == pytest.approx(16 * MIB / 8192, abs=20)


def test_encoder_caches_are_held_while_profiling():
    held = []
    device = FakeDevice(64 * MIB)
    sizer = SizeAfterCapture(
        SMALL,
        device="cpu",
        probe=device,
        max_model_len=160,
        reserve_bytes=0,
        encoder_cache=(1000, 64, torch.float16),
    )
    sizer.profile(lambda: held.append(sizer.encoder_cache))
    assert held[0].shape == (1000, 64)
    assert sizer.encoder_cache is held[0]
    device.cache = sizer.reserve()
    sizer.capture(lambda: None)
    sizer.measure(lambda: None)
    assert sizer.trace()["encoder_cache_bytes"] == 128_000
    empty = SizeAfterCapture(
        SMALL,
        device="cpu",
        probe=FakeDevice(64 * MIB),
        max_model_len=160,
        encoder_cache=(0, 64, torch.float16),
    )
    empty.profile(lambda: None)
    assert empty.encoder_cache is None


def test_a_negative_encoder_cache_is_refused():
    sizer = SizeAfterCapture(
        SMALL,
        device="cpu",
        probe=FakeDevice(64 * MIB),
        max_model_len=160,
        encoder_cache=(-1, 64, torch.float16),
    )
    with pytest.raises(extkv.InvalidArgumentError, match="-1"):
        sizer.profile(lambda: None)


def test_steps_out_of_order_are_refused():
    device = FakeDevice(64 * MIB)
    sizer = SizeAfterCapture(SMALL, device="cpu", probe=device, max_model_len=160)
    with pytest.raises(extkv.SizingOrderError, match="measure"):
        sizer.plan()
    device.cache = sizer.reserve()
    with pytest.raises(extkv.SizingOrderError, match="profiled cannot come after reserved"):
        sizer.profile(lambda: None)
    fixed_sizer = SizeAfterCapture(
        SMALL, device="cpu", probe=device, max_model_len=160, extensible=False
    )
    with pytest.raises(extkv.SizingOrderError, match="extensible=True"):
        fixed_sizer.reserve()


def test_the_whole_flow_on_host_memory(host_budget):
    host_budget(256 * MIB)
    free = extkv.memory_info("cpu").free
    sizer = SizeAfterCapture(SMALL, device="cpu", max_model_len=1024, reserve_bytes=16 * MIB)
    cache = sizer.reserve(num_warmup_blocks=4)
    tensor = cache.tensors()["layers.0"]
    tensor[:, 0] = 3
    sizer.capture(lambda: tensor[:, 1].copy_(tensor[:, 0]))
    sizer.measure(lambda: None)
    plan = sizer.plan()
    assert sizer.commit() is cache
    assert cache.num_blocks == plan.num_blocks
    assert extkv.memory_info("cpu").free >= 16 * MIB
    assert extkv.memory_info("cpu").free <= 16 * MIB + 3 * (64 << 10)
    assert free > extkv.memory_info("cpu").free
    assert (tensor[:, :2] == 3).all()
    assert not tensor[:, 4 : plan.num_blocks].any()
