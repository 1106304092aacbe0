"""Two GPUs: memory lies on the tensor's device whatever is current, and what is current stays."""

from __future__ import annotations

import threading

import extkv
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

MIB = 2**20


def free_on(index: int) -> int:
    """Return the driver's free memory on a device."""
    torch.cuda.synchronize(index)
    return torch.cuda.mem_get_info(index)[0]


def test_growth_on_device_one_from_a_thread_on_device_zero() -> None:
    """Pages lie on device 1, a kernel there may write them, the thread stays on device 0 (B73)."""
    torch.ones(1, device="cuda:0")
    torch.ones(1, device="cuda:1")
    tensor = extkv.ExtensibleTensor(512 * MIB, "cuda:1")
    free_before = [free_on(0), free_on(1)]
    currents: list[int] = []

    def grow() -> None:
        torch.cuda.set_device(0)
        tensor.resize_per_segment_(256 * MIB, zero_new=True)
        currents.append(torch.cuda.current_device())

    thread = threading.Thread(target=grow)
    thread.start()
    thread.join()
    assert currents == [0]
    assert abs(free_before[0] - free_on(0)) <= 2 * MIB
    assert abs(free_before[1] - free_on(1) - 256 * MIB) <= 4 * MIB
    assert tensor.tensor.device == torch.device("cuda", 1)
    tensor.tensor.fill_(8)
    assert bool((tensor.tensor == 8).all())
    tensor.free(strict=True)


def test_device_one_while_device_zero_is_current() -> None:
    """Growth, zeroing, shrink and views on device 1 are right and leave device 0 current (B122)."""
    torch.cuda.set_device(0)
    with extkv.ExtensibleTensor(64 * MIB, "cuda:1", 2) as tensor:
        tensor.resize_per_segment_(5 * MIB)
        tensor.segment(1).fill_(7)
        tensor.resize_per_segment_(9 * MIB, zero_new=True)
        assert bool((tensor.segment(1)[: 5 * MIB] == 7).all())
        assert not bool(tensor.segment(1)[5 * MIB :].any())
        tensor.shrink_per_segment_(MIB)
        assert torch.cuda.current_device() == 0
        assert tensor.device == torch.device("cuda", 1)


def test_tensors_of_two_devices_grow_together() -> None:
    """One transaction may span devices: each tensor's pages lie on its own."""
    torch.cuda.set_device(0)
    tensors = [extkv.ExtensibleTensor(64 * MIB, f"cuda:{index}") for index in range(2)]
    extkv.resize_together(tensors, [4 * MIB, 6 * MIB], zero_new=True)
    for index, tensor in enumerate(tensors):
        assert tensor.num_bytes == (4 + 2 * index) * MIB
        assert tensor.tensor.device == torch.device("cuda", index)
        assert not bool(tensor.tensor.any())
        tensor.free(strict=True)
    assert torch.cuda.current_device() == 0
