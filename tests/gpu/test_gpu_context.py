"""Contexts, threads and devices: no call changes what is current, each mistake has its error."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import extkv
import pytest
import torch
from extkv import errors

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20


def current_context() -> int | None:
    """Return the address of this thread's current context, None when there is none."""
    lib = ctypes.CDLL("libcuda.so.1")
    get_current = lib.cuCtxGetCurrent
    get_current.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    get_current.restype = ctypes.c_int
    context = ctypes.c_void_p()
    assert get_current(ctypes.byref(context)) == 0
    return context.value


def run_in_thread(operation: Callable[[], object]) -> None:
    """Run the operation in a fresh thread and raise here what it raised."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            operation()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def driver_only_calls(tensor: extkv.ExtensibleTensor) -> list[Callable[[], object]]:
    """Return calls that use the driver but make no torch tensor, in an order that works."""
    return [
        lambda: tensor.resize_per_segment_(3 * MIB),
        lambda: tensor.resize_per_segment_(5 * MIB, zero_new=True),
        lambda: extkv.resize_together([tensor], [7 * MIB]),
        tensor.stats,
        lambda: tensor.shrink_per_segment_(MIB),
        lambda: extkv.memory_info(DEVICE),
        lambda: extkv.probe(DEVICE),
        lambda: extkv.ExtensibleTensor(4 * MIB, DEVICE).free(),
        tensor.free,
    ]


def test_context_and_device_stay_current() -> None:
    """Each call leaves the current context and torch's current device as they were."""
    torch.ones(1, device=DEVICE)
    context, device = current_context(), torch.cuda.current_device()
    assert context is not None
    tensor = extkv.ExtensibleTensor(8 * MIB, DEVICE)
    for call in driver_only_calls(tensor):
        call()
        assert (current_context(), torch.cuda.current_device()) == (context, device)


def test_views_leave_the_context_current() -> None:
    """Making and dropping views leaves the current context as it was."""
    torch.ones(1, device=DEVICE)
    context = current_context()
    with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
        for view in (tensor.resize_(MIB), tensor.full_view(), tensor.segment(0)):
            assert view.data_ptr() == tensor.base_ptr
            assert current_context() == context
    assert current_context() == context


def test_thread_without_a_context_gets_none() -> None:
    """A fresh thread has no current context before and after each call."""
    torch.ones(1, device=DEVICE)
    tensor = extkv.ExtensibleTensor(8 * MIB, DEVICE)

    def use() -> None:
        assert current_context() is None
        for call in driver_only_calls(tensor):
            call()
            assert current_context() is None

    run_in_thread(use)


def test_fresh_thread_can_create_grow_and_write() -> None:
    """All of a tensor's life can happen in a thread that never used CUDA."""

    def use() -> None:
        with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
            tensor.resize_(5 * MIB).fill_(6)
            tensor.resize_per_segment_(8 * MIB, zero_new=True)
            assert bool((tensor.tensor[: 5 * MIB] == 6).all())
            assert not bool(tensor.tensor[5 * MIB :].any())

    run_in_thread(use)


def test_tensor_made_in_a_thread_is_used_in_another() -> None:
    """The maker's thread may be gone when the tensor grows."""
    made: list[extkv.ExtensibleTensor] = []
    run_in_thread(lambda: made.append(extkv.ExtensibleTensor(8 * MIB, DEVICE)))
    made[0].resize_(8 * MIB).fill_(2)
    assert bool((made[0].tensor == 2).all())
    run_in_thread(made[0].free)
    assert made[0].closed


BEFORE_TORCH = """
import extkv
tensor = extkv.ExtensibleTensor(8 << 20, "cuda:0")
tensor.resize_per_segment_(4 << 20, zero_new=True)
import torch
"""
AFTER_TORCH = """
import torch
early = torch.ones(1000, device="cuda:0")
import extkv
tensor = extkv.ExtensibleTensor(8 << 20, "cuda:0")
tensor.resize_per_segment_(4 << 20, zero_new=True)
"""
USE = """
view = tensor.tensor
view.fill_(3)
other = torch.full((4 << 20,), 4, dtype=torch.uint8, device="cuda:0")
other.copy_(view + other)
tensor.resize_per_segment_(8 << 20, zero_new=True)
print(int(other.sum()) == 7 * (4 << 20), int(tensor.tensor.sum()) == 3 * (4 << 20))
"""


@pytest.mark.parametrize("start", [BEFORE_TORCH, AFTER_TORCH], ids=["before-torch", "after-torch"])
def test_use_before_and_after_torch_starts_cuda(
    start: str, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Torch's kernels work on the memory whoever starts CUDA first (B125)."""
    done = run_python(start + USE)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


FOREIGN_CONTEXT = """
import ctypes
import extkv
from extkv import errors
lib = ctypes.CDLL("libcuda.so.1")
lib.cuCtxCreate_v2.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int)
lib.cuCtxGetCurrent.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
mine, current = ctypes.c_void_p(), ctypes.c_void_p()
assert lib.cuInit(0) == 0
assert lib.cuCtxCreate_v2(ctypes.byref(mine), 0, 0) == 0
try:
    extkv.ExtensibleTensor(8 << 20, "cuda:0")
except errors.DriverUnavailableError as error:
    print("primary" in str(error))
assert lib.cuCtxGetCurrent(ctypes.byref(current)) == 0
print(current.value == mine.value)
"""


def test_context_that_is_not_primary_is_refused(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """With a context of its own current, a caller gets an error that says so; its context stays."""
    done = run_python(FOREIGN_CONTEXT)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


def test_device_that_does_not_exist() -> None:
    """A device index past the last is a typed error, and the next tensor works."""
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(errors.NoSuchDeviceError, match="does not exist"):
        extkv.ExtensibleTensor(8 * MIB, missing)
    report = extkv.probe(missing)
    assert not report.is_available
    assert report.reason is not None
    extkv.ExtensibleTensor(8 * MIB, DEVICE).free()


def test_reserving_too_much_then_nothing_then_enough() -> None:
    """2^50 bytes is an out-of-memory error, 0 a value error, and a normal size works (B70)."""
    with pytest.raises(errors.OutOfMemoryError):
        extkv.ExtensibleTensor(2**50, DEVICE)
    with pytest.raises(errors.InvalidArgumentError):
        extkv.ExtensibleTensor(0, DEVICE)
    with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
        tensor.resize_(8 * MIB).fill_(1)
        assert bool((tensor.tensor == 1).all())


def test_no_device_means_the_current_one() -> None:
    """Without a device argument the tensor lies on torch's current CUDA device."""
    with extkv.ExtensibleTensor(8 * MIB) as tensor:
        assert tensor.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(
    "device",
    ["cuda", "cuda:0", 0, torch.device("cuda", 0)],
    ids=["type", "type-and-index", "index", "torch-device"],
)
def test_ways_to_name_the_device(device: torch.device | str | int) -> None:
    """Strings, indices and torch devices name the same device."""
    with extkv.ExtensibleTensor(8 * MIB, device) as tensor:
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.resize_(1).device == torch.device("cuda", 0)
