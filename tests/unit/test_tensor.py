"""ExtensibleTensor on the host: sizes, views, lifetime, bad input."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import extkv
import numpy as np
import pytest
import torch
from extkv import ExtensibleTensor, resize_together, shrink_together

GRANULE = 64 << 10
MIB = 1 << 20


def host(num_bytes: int, num_segments: int = 1, **options: object) -> ExtensibleTensor:
    return ExtensibleTensor(num_bytes, "cpu", num_segments, **options)


def test_names_and_sizes_of_vllm():
    tensor = host(3 * MIB, num_segments=3)
    assert tensor.num_segments == 3
    assert tensor.segment_capacity_bytes == MIB
    assert tensor.capacity_bytes == 3 * MIB
    assert tensor.device == torch.device("cpu")
    tensor.resize_per_segment_(1000)
    assert (tensor.bytes_per_segment, tensor.num_bytes) == (1000, 3000)
    assert tensor.full_view().shape == (3 * MIB,)
    assert tensor.full_view().data_ptr() == tensor.base_ptr
    assert tensor.segment(2).data_ptr() == tensor.base_ptr + 2 * MIB
    assert tensor.physical_bytes == 3 * GRANULE


def test_capacity_is_rounded_up_to_granules():
    tensor = host(100)
    assert tensor.capacity_bytes == GRANULE == tensor.granularity
    assert tensor.segment_capacity_bytes == 100


def test_resize_and_append_return_the_committed_prefix():
    tensor = host(MIB)
    assert tensor.tensor.shape == (0,)
    assert tensor.resize_(10).fill_(1).shape == (10,)
    grown = tensor.append(5)
    assert grown.shape == (15,)
    assert grown[:10].tolist() == [1] * 10
    assert grown.dtype == torch.uint8


def test_base_pointer_never_changes_and_data_survives():
    tensor = host(64 * MIB, num_segments=2)
    base = tensor.base_ptr
    tensor.resize_per_segment_(100)
    for segment in range(2):
        tensor.segment(segment).copy_(torch.arange(100, dtype=torch.uint8) + segment)
    for size in (GRANULE - 1, GRANULE, 3 * GRANULE + 7, 32 * MIB):
        tensor.resize_per_segment_(size)
        assert tensor.base_ptr == base
        for segment in range(2):
            expected = torch.arange(100, dtype=torch.uint8) + segment
            assert torch.equal(tensor.segment(segment)[:100], expected)


def test_zero_new_zeroes_new_bytes_only_also_on_recycled_pages():
    tensor = host(8 * GRANULE, num_segments=2, growth="exact")
    tensor.resize_per_segment_(GRANULE + GRANULE // 2)
    for segment in range(2):
        tensor.segment(segment).fill_(0xAB)
    tensor.shrink_per_segment_(10)
    tensor.resize_per_segment_(GRANULE, zero_new=True)
    for segment in range(2):
        values = tensor.segment(segment)
        assert (values[:10] == 0xAB).all()
        assert not values[10:].any()


def test_old_views_see_what_growth_leaves_alone():
    tensor = host(MIB)
    old = tensor.resize_(4)
    old.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    new = tensor.resize_(MIB)
    new[0] = 9
    assert old.tolist() == [9, 2, 3, 4]


def test_views_have_dtype_and_shape():
    tensor = host(2 * MIB, num_segments=2)
    tensor.resize_per_segment_(96)
    view = tensor.view(torch.bfloat16, (4, -1), segment=1)
    assert (view.shape, view.dtype) == ((4, 12), torch.bfloat16)
    assert view.data_ptr() == tensor.base_ptr + MIB
    assert tensor.view(torch.float32).shape == (24,)
    full = tensor.view(torch.float16, (512, 1024), full=True)
    full[0, :48] = 1
    assert tensor.view(torch.float16).tolist() == [1] * 48
    assert tensor.view(torch.int64, (0, 12)[1:]).shape == (12,)


def test_append_counts_every_byte_of_every_thread():
    tensor = host(16 * MIB)
    failures = []

    def work() -> None:
        try:
            for _ in range(200):
                assert tensor.append(10).numel() >= 10
                assert tensor.tensor.numel() >= 10
                assert tensor.stats().logical_bytes > 0
        except Exception as error:  # noqa: BLE001 a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tensor.num_bytes == 8 * 200 * 10


def test_reading_while_another_thread_grows():
    tensor = host(256 * MIB)
    tensor.resize_(GRANULE).fill_(5)
    done = threading.Event()

    def grow() -> None:
        for size in range(2 * GRANULE, 64 * MIB, GRANULE):
            tensor.resize_(size)
        done.set()

    thread = threading.Thread(target=grow)
    thread.start()
    while not done.is_set():
        assert int(tensor.tensor[:GRANULE].sum(dtype=torch.int64)) == 5 * GRANULE
    thread.join()


def test_shrink_gives_memory_back_and_growth_works_again():
    free = extkv.memory_info("cpu").free
    tensor = host(64 * MIB, max_chunk_bytes=MIB)
    tensor.resize_(32 * MIB)
    assert extkv.memory_info("cpu").free == free - 32 * MIB
    assert tensor.shrink_per_segment_(5 * MIB + 1) == 26 * MIB
    assert tensor.num_bytes == 5 * MIB + 1
    assert tensor.stats().committed_bytes == 6 * MIB
    tensor.resize_(64 * MIB)
    tensor.free()
    assert extkv.memory_info("cpu").free == free


def test_free_waits_for_the_last_view():
    tensor = host(MIB)
    view = tensor.resize_(100)
    view.fill_(3)
    with pytest.raises(extkv.LiveViewsError, match="1 view") as raised:
        tensor.free(strict=True)
    assert raised.value.num_views == 1
    assert not tensor.closed
    tensor.free()
    stats = tensor.stats()
    assert stats.is_freed
    assert stats.has_deferred_free
    assert (stats.num_views, stats.committed_bytes) == (1, GRANULE)
    assert view.sum() == 300
    del view
    stats = tensor.stats()
    assert not stats.has_deferred_free
    assert (stats.committed_bytes, stats.reserved_bytes) == (0, 0)
    tensor.free()
    tensor.free(strict=True)


def test_view_outlives_its_tensor():
    tensor = host(MIB)
    view = tensor.resize_(10).fill_(8)
    free = extkv.memory_info("cpu").free
    del tensor
    gc.collect()
    assert view.tolist() == [8] * 10
    del view
    assert extkv.memory_info("cpu").free == free + GRANULE


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_any_order_of_deaths_is_safe(order: tuple[int, ...]):
    free = extkv.memory_info("cpu").free
    tensor = host(MIB)
    first = tensor.resize_(100).fill_(1)
    owners = [tensor, first, tensor.full_view()]
    del tensor, first
    for index in order:
        owners[index] = None
        gc.collect()
        assert all(int(o[:100].sum()) == 100 for o in owners if isinstance(o, torch.Tensor))
    assert extkv.memory_info("cpu").free == free


def test_reference_cycles_are_collected():
    free = extkv.memory_info("cpu").free
    tensor = host(MIB)
    tensor.resize_(1)
    tensor.cycle = [tensor]
    dead = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert dead() is None
    assert extkv.memory_info("cpu").free == free


def test_last_view_may_die_in_another_thread():
    free = extkv.memory_info("cpu").free
    views = [host(MIB).resize_(10)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert extkv.memory_info("cpu").free == free


def test_context_manager_frees():
    with host(MIB) as tensor:
        tensor.resize_(10)
    assert tensor.closed
    assert "freed" in repr(tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.tensor,
        lambda t: t.full_view(),
        lambda t: t.segment(0),
        lambda t: t.resize_(200),
        lambda t: t.append(1),
        lambda t: t.resize_per_segment_(200),
        lambda t: t.shrink_per_segment_(1),
        lambda t: t.view(torch.uint8),
        lambda t: t.__dlpack__(),
        lambda t: resize_together([t], [200]),
    ],
)
def test_use_after_free_is_an_error(use):
    tensor = host(MIB)
    tensor.resize_(100)
    tensor.free()
    with pytest.raises(extkv.FreedError, match="freed"):
        use(tensor)
    assert (tensor.num_bytes, tensor.closed) == (0, True)


def test_dlpack_into_numpy_and_torch_shares_memory():
    tensor = host(MIB)
    tensor.resize_(6).copy_(torch.arange(6, dtype=torch.uint8))
    array = np.from_dlpack(tensor)
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    other = torch.from_dlpack(tensor)
    other[0] = 77
    assert array[0] == 77
    assert tensor.__dlpack_device__() == (1, 0)
    assert tensor.stats().num_views == 2
    del array, other
    gc.collect()
    assert tensor.stats().num_views == 0


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1)])
def test_unused_capsules_release_their_view(max_version):
    tensor = host(MIB)
    tensor.resize_(6)
    capsule = tensor.__dlpack__(max_version=max_version)
    expected = "dltensor_versioned" if max_version and max_version[0] >= 1 else "dltensor"
    assert f'"{expected}"' in repr(capsule)
    assert tensor.stats().num_views == 1
    del capsule
    assert tensor.stats().num_views == 0


def test_dlpack_refuses_copies_and_other_devices():
    tensor = host(MIB)
    with pytest.raises(BufferError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    assert tensor.__dlpack__(dl_device=(1, 0), copy=False) is not None


def test_together_is_all_or_nothing(host_budget):
    host_budget(extkv.memory_info("cpu").total)
    tensors = [host(MIB, growth="exact"), host(2 * MIB, num_segments=2, growth="exact")]
    resize_together(tensors, [100, 200])
    used = extkv.memory_info("cpu").total - extkv.memory_info("cpu").free
    host_budget(used + 10 * GRANULE)
    before = [t.stats().num_handles for t in tensors]
    with pytest.raises(extkv.OutOfMemoryError, match="create") as raised:
        resize_together(tensors, [MIB, MIB], zero_new=True)
    assert isinstance(raised.value, MemoryError)
    assert raised.value.requested == (15 + 30) * GRANULE
    assert raised.value.available == 10 * GRANULE
    assert [t.bytes_per_segment for t in tensors] == [100, 200]
    assert [t.stats().num_handles for t in tensors] == before
    resize_together(tensors, [3 * GRANULE, 3 * GRANULE])
    assert shrink_together(tensors, [0, 0]) == 9 * GRANULE


def test_budget_can_be_raised_and_restored(host_budget):
    host_budget(MIB)
    assert extkv.memory_info("cpu").total == MIB
    host_budget(None)
    assert extkv.memory_info("cpu").total > 64 * MIB


def test_geometric_growth_keeps_few_handles_and_exact_keeps_none_spare():
    geometric, exact = host(256 * MIB), host(256 * MIB, growth="exact")
    for size in range(GRANULE, 256 * MIB + 1, GRANULE):
        geometric.resize_per_segment_(size)
        exact.resize_per_segment_(size)
    assert exact.stats().num_handles == 4096
    assert exact.stats().rounding_bytes == 0
    assert geometric.stats().num_handles < 450


def test_sixteen_tebibytes_can_be_reserved():
    tensor = host(16 << 40)
    tensor.resize_(10).fill_(1)
    view = tensor.full_view()
    assert view.numel() == 16 << 40
    assert view[:10].sum() == 10


def test_statistics_name_every_driver_call():
    tensor = host(MIB)
    tensor.resize_(10)
    calls = tensor.stats().driver_calls
    assert set(calls) == {
        "reserve", "free_address", "create", "release", "map", "set_access", "unmap", "fill",
        "memory_info", "synchronize",
    }  # fmt: skip
    assert calls["create"].count == 1
    assert calls["create"].total_us >= calls["create"].max_us > 0


BAD_CALLS = [
    (lambda: host(-1), ValueError, "-1"),
    (lambda: host(0), ValueError, "0 bytes"),
    (lambda: host(2**64), ValueError, "2\\*\\*64"),
    (lambda: host(2**63), extkv.OutOfMemoryError, "address space"),
    (lambda: host(2**50), extkv.OutOfMemoryError, "1 PiB"),
    (lambda: host(10, num_segments=0), ValueError, "num_segments"),
    (lambda: host(10, num_segments=-1), ValueError, "-1"),
    (lambda: host(10, num_segments=3), ValueError, "10 .*divisible.* 3"),
    (lambda: host(10, growth="double"), ValueError, "double"),
    (lambda: host(10, granularity=1000), ValueError, "1000"),
    (lambda: host(10, granularity=-4096), ValueError, "-4096"),
    (lambda: host(10, max_chunk_bytes=-1), ValueError, "max_chunk_bytes"),
    (lambda: host(10, shareable="fabric"), ValueError, "fabric"),
    (lambda: host(10, shareable="posix_fd"), extkv.DriverUnavailableError, "host memory"),
    (lambda: host(10, gpu_direct_rdma="on"), extkv.DriverUnavailableError, "RDMA"),
    (lambda: ExtensibleTensor(10, "cpu:1"), extkv.NoSuchDeviceError, "cpu:1"),
    (lambda: ExtensibleTensor(10, "meta"), ValueError, "meta"),
    (lambda: ExtensibleTensor(10, "cpu:x"), ValueError, "cpu:x"),
    (lambda: ExtensibleTensor(10, -1), ValueError, "-1"),
    (lambda: host(float("nan")), TypeError, "float"),
    (lambda: host("10"), TypeError, "str"),
    (lambda: host(100).resize_(101), ValueError, "exceeds the segment capacity 100"),
    (lambda: host(100).append(101), extkv.CapacityError, "exceeds the segment capacity"),
    (lambda: host(100).append(2**64 - 1), extkv.CapacityError, "exceeds"),
    (lambda: host(100).append(-1), ValueError, "-1"),
    (lambda: host(100).resize_(-1), ValueError, "-1"),
    (lambda: host(100).resize_(2**63), ValueError, "exceeds"),
    (lambda: host(100).resize_(1.5), TypeError, "float"),
    (lambda: host(100).shrink_per_segment_(1), ValueError, "up to 1"),
    (lambda: host(100, 2).resize_(1), ValueError, "num_segments=1"),
    (lambda: host(100, 2).append(1), ValueError, "num_segments=1"),
    (lambda: host(100, 2).tensor, ValueError, "num_segments=1"),
    (lambda: host(100, 2).__dlpack__(), ValueError, "num_segments=1"),
    (lambda: host(100, 2).segment(2), ValueError, "segment 2 .* 2"),
    (lambda: host(100, 2).segment(-1), ValueError, "-1"),
    (lambda: host(101).view(torch.float32, full=True), ValueError, "101 bytes.*4 bytes"),
    (lambda: host(10, 2).view(torch.int16, segment=1), ValueError, "aligned"),
    (lambda: host(64).view(torch.int16, (5, 7), full=True), ValueError, r"\[5, 7\].*32"),
    (lambda: host(64).view(torch.int16, (-1, -1), full=True), ValueError, "32 items"),
    (lambda: host(64).view(torch.int16, (-2, -16), full=True), ValueError, "32 items"),
    (lambda: resize_together([host(10)], [1, 2]), ValueError, "1 tensors but 2"),
    (lambda: extkv.set_host_memory_budget(-5), ValueError, "-5"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD_CALLS)
def test_b119_bad_input_is_a_typed_error_with_values(call, error, words):
    with pytest.raises(error, match=words) as raised:
        call()
    assert isinstance(raised.value, (extkv.ExtkvError, TypeError))
    assert "panic" not in str(raised.value).lower()


def test_shrinking_through_resize_is_grow_only():
    tensor = host(100)
    tensor.resize_(50)
    with pytest.raises(ValueError, match="grow-only") as raised:
        tensor.resize_(49)
    assert "50" in str(raised.value)
    assert "49" in str(raised.value)
    assert tensor.num_bytes == 50
    tensor.resize_(50)


def test_the_same_tensor_twice_is_refused():
    tensor = host(100)
    with pytest.raises(extkv.InvalidArgumentError, match="twice"):
        resize_together([tensor, tensor], [1, 1])


def test_uncommitted_bytes_fault(run_python):
    program = """
        import extkv
        tensor = extkv.ExtensibleTensor(1 << 20, "cpu", growth="exact")
        tensor.resize_(1)
        view = tensor.full_view()
        assert int(view[65535]) == 0  # the rest of the granule is mapped
        print("committed", flush=True)
        print(int(view[65536]), flush=True)
    """
    result = run_python(program)
    assert result.stdout == "committed\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


def test_b76_last_block_is_usable_and_the_one_behind_faults(run_python):
    program = """
        import extkv
        block, blocks = 65536, 48
        tensor = extkv.ExtensibleTensor(block * 100, "cpu", growth="exact")
        tensor.resize_(block)
        tensor.resize_(block * blocks)
        view = tensor.full_view()
        view[block * blocks - 1] = 1
        print("last", flush=True)
        view[block * blocks] = 1
    """
    result = run_python(program)
    assert result.stdout == "last\n", result.stderr
    assert result.returncode == -signal.SIGSEGV


def test_exhausted_mappings_have_their_own_error(run_python):
    program = """
        import extkv
        granule = 4096
        # Segments of 64 granules that commit one granule each: no two mappings can merge.
        tensor = extkv.ExtensibleTensor(
            granule * 64 * 40000, "cpu", 40000, granularity=granule, growth="exact")
        before = extkv.memory_info("cpu")
        try:
            tensor.resize_per_segment_(granule)
        except extkv.MappingLimitError as error:
            assert isinstance(error, MemoryError)
            assert "vm.max_map_count" in str(error), error
        else:
            raise SystemExit("no error")
        assert tensor.num_bytes == 0
        assert extkv.memory_info("cpu") == before
        small = extkv.ExtensibleTensor(granule, "cpu", granularity=granule)
        small.resize_(1).fill_(1)
        print("ok")
    """
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 70_000:
        pytest.skip(f"vm.max_map_count is {limit}: too many mappings to make")
    result = run_python(program)
    assert result.stdout == "ok\n", result.stderr


FORK = """
    import os, sys
    import extkv, torch
    tensor = extkv.ExtensibleTensor(1 << 20, "cpu")
    view = tensor.resize_(10).fill_(4)
    child = os.fork()
    if child == 0:
        code = 0
        for use in (lambda: tensor.resize_(20), lambda: tensor.num_bytes, lambda: tensor.stats(),
                    lambda: tensor.free(), lambda: tensor.tensor, lambda: tensor.closed):
            try:
                use()
                code = 1
            except extkv.ForkedProcessError as error:
                if "spawn" not in str(error):
                    code = 2
        own = extkv.ExtensibleTensor(1 << 20, "cpu")
        if int(own.resize_(10).fill_(1).sum()) != 10:
            code = 3
        del tensor, view, own
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
    assert view.tolist() == [4] * 10
    tensor.resize_(20)
    print("ok")
"""


def test_b118_forked_child_gets_an_error_and_cannot_harm_its_parent(run_python):
    result = run_python(FORK)
    assert result.stdout == "ok\n", result.stderr


def test_b118_spawned_child_works(run_python):
    result = run_python(
        """
        import multiprocessing, subprocess, sys
        import extkv
        tensor = extkv.ExtensibleTensor(1 << 20, "cpu")
        tensor.resize_(10)
        program = "import extkv; extkv.ExtensibleTensor(1 << 20, 'cpu').resize_(10); print('ok')"
        command = [sys.executable, "-c", program]
        print(subprocess.run(command, capture_output=True, text=True).stdout)
        """
    )
    assert result.stdout.strip() == "ok", result.stderr


def test_b120_views_alive_at_exit_are_harmless(run_python):
    result = run_python(
        """
        import extkv
        tensor = extkv.ExtensibleTensor(1 << 20, "cpu")
        view = tensor.resize_(10)
        import builtins
        builtins.keep = view
        tensor.free()
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_b123_other_python_threads_run_during_driver_calls():
    tensor = host(8 << 30)
    has_begun = threading.Event()
    is_asked = was_asked = False

    def grow_until_asked() -> None:
        nonlocal was_asked
        until = time.monotonic() + 60
        has_begun.set()
        while not is_asked and time.monotonic() < until:
            tensor.resize_per_segment_(4 << 30)
            tensor.shrink_per_segment_(0)
        was_asked = is_asked

    thread = threading.Thread(target=grow_until_asked)
    interval = sys.getswitchinterval()
    try:
        # Python takes its lock from no thread now: only the calls let this one go on.
        sys.setswitchinterval(1000)
        thread.start()
        has_begun.wait()
        is_asked = True
        thread.join(timeout=100)
    finally:
        sys.setswitchinterval(interval)
    assert not thread.is_alive()
    assert was_asked


def test_shape_with_one_free_dimension_of_zero_items():
    tensor = host(64)
    assert tensor.view(torch.uint8, (0,)).shape == (0,)
    assert math.prod(tensor.view(torch.int32, (0, 5)).shape) == 0
