"""Views own the memory: it goes back with the last of tensor and views, in any order and thread."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import TYPE_CHECKING

import extkv
import pytest
import torch
from extkv import errors

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Check = Callable[[Callable[[], object]], None]

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20
K_DLCUDA = 2


def new_tensor(num_bytes: int = 64 * MIB) -> extkv.ExtensibleTensor:
    """Return a fully committed tensor."""
    tensor = extkv.ExtensibleTensor(num_bytes, DEVICE)
    tensor.resize_per_segment_(num_bytes)
    return tensor


def test_from_dlpack_shows_the_committed_bytes() -> None:
    """torch.from_dlpack gives a uint8 view of the committed prefix at the base pointer."""
    with extkv.ExtensibleTensor(8 * MIB, DEVICE) as tensor:
        tensor.resize_(3 * MIB + 1)
        view = torch.from_dlpack(tensor)
        assert (view.dtype, view.shape) == (torch.uint8, (3 * MIB + 1,))
        assert (view.device, view.data_ptr()) == (torch.device(DEVICE), tensor.base_ptr)
        view.fill_(7)
        assert bool((tensor.tensor == 7).all())
        assert tensor.__dlpack_device__() == (K_DLCUDA, 0)
        del view


def test_view_outlives_the_tensor(free_bytes: Callable[[], int]) -> None:
    """A view is right after its tensor is collected; deleting it returns the memory."""
    torch.from_dlpack(new_tensor()).fill_(1)
    before = free_bytes()
    tensor = new_tensor()
    view = torch.from_dlpack(tensor)
    view.fill_(7)
    del tensor
    assert before - free_bytes() > 32 * MIB
    assert bool((view == 7).all())
    view.add_(1)
    assert bool((view == 8).all())
    del view
    assert abs(before - free_bytes()) <= 2 * MIB


def test_view_outlives_free(free_bytes: Callable[[], int]) -> None:
    """Freeing with a live view defers: the view stays right, the tensor is closed, stats say so."""
    torch.from_dlpack(new_tensor()).fill_(1)
    before = free_bytes()
    tensor = new_tensor()
    view = tensor.tensor
    view.fill_(3)
    tensor.free()
    stats = tensor.stats()
    assert (tensor.closed, stats.is_freed, stats.has_deferred_free) == (True, True, True)
    with pytest.raises(errors.FreedError):
        tensor.resize_per_segment_(64 * MIB)
    assert bool((view == 3).all())
    del view
    assert abs(before - free_bytes()) <= 2 * MIB
    assert not tensor.stats().has_deferred_free


def test_strict_free_counts_live_views() -> None:
    """Strict free raises with the number of views and changes nothing; then it works."""
    tensor = new_tensor()
    views = [tensor.tensor, tensor.full_view(), torch.from_dlpack(tensor)]
    views[0].fill_(4)
    with pytest.raises(errors.LiveViewsError) as caught:
        tensor.free(strict=True)
    assert caught.value.num_views == 3
    assert not tensor.closed
    assert bool((tensor.tensor == 4).all())
    views.clear()
    tensor.free(strict=True)
    assert tensor.closed


def test_slice_keeps_the_memory() -> None:
    """A slice of a view counts as the view."""
    tensor = new_tensor()
    part = tensor.tensor[5:10]
    with pytest.raises(errors.LiveViewsError):
        tensor.free(strict=True)
    part.fill_(1)
    del part
    tensor.free(strict=True)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_collection_in_any_order(order: tuple[int, ...], assert_returns_memory: Check) -> None:
    """Tensor and two views can be dropped in any order; the memory goes back with the last."""

    def use() -> None:
        tensor = new_tensor()
        owners: list[object] = [tensor, tensor.full_view(), torch.from_dlpack(tensor)]
        del tensor
        for index in order:
            owners[index] = None
            gc.collect()

    assert_returns_memory(use)


def test_reference_cycle_is_collected(assert_returns_memory: Check) -> None:
    """A view that is part of a reference cycle with its tensor goes with it."""

    def use() -> None:
        tensor = new_tensor()
        cycle: list[object] = [tensor, tensor.tensor]
        cycle.append(cycle)

    assert_returns_memory(use)


@pytest.mark.parametrize("is_owner_deleted_first", [True, False])
def test_last_view_released_in_another_thread(
    *, is_owner_deleted_first: bool, free_bytes: Callable[[], int]
) -> None:
    """A thread that never used CUDA may drop the last view (B120)."""
    torch.from_dlpack(new_tensor()).fill_(1)
    before = free_bytes()
    tensor = new_tensor()
    box = [torch.from_dlpack(tensor)]
    box[0].fill_(2)
    torch.cuda.synchronize()
    if is_owner_deleted_first:
        del tensor
        gc.collect()
    else:
        tensor.free()
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert abs(before - free_bytes()) <= 2 * MIB


def test_view_alive_at_exit(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """An interpreter may end with a live tensor and live views (B120)."""
    done = run_python(
        "import extkv, torch\n"
        "tensor = extkv.ExtensibleTensor(8 << 20, 'cuda:0')\n"
        "view = tensor.resize_(4 << 20)\n"
        "view.fill_(1)\n"
        "orphan = extkv.ExtensibleTensor(8 << 20, 'cuda:0').full_view()\n"
        "print(int(view.sum()))\n"
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(4 * MIB)]), done.stderr
    assert "panicked" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_free_twice_and_use_after_free() -> None:
    """Freeing again is harmless; each use after it is a typed error."""
    tensor = new_tensor()
    tensor.free()
    tensor.free()
    uses: list[Callable[[], object]] = [
        lambda: tensor.tensor,
        tensor.full_view,
        lambda: tensor.resize_per_segment_(1),
        lambda: tensor.shrink_per_segment_(0),
        lambda: torch.from_dlpack(tensor),
    ]
    for use in uses:
        with pytest.raises(errors.FreedError):
            use()
