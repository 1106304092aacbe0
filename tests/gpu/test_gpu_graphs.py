"""Captured CUDA graphs stay valid, and growth neither waits for kernels nor disturbs them."""

from __future__ import annotations

import os
import threading

import extkv
import pytest
import torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MIB = 2**20
BLOCK_BYTES = 65_536
NUM_BLOCKS = 1024
NUM_WRITTEN = 8
# About half a second of one busy thread block.
SLEEP_CYCLES = 1_000_000_000


class BlockWriter:
    """A captured graph that writes rows into blocks of a full view and reads them back."""

    def __init__(self, tensor: extkv.ExtensibleTensor) -> None:
        """Capture the graph; the block ids must name committed blocks only when it is replayed."""
        self.cache = tensor.view(torch.int32, (NUM_BLOCKS, BLOCK_BYTES // 4), full=True)
        self.block_ids = torch.arange(NUM_WRITTEN, device=DEVICE)
        self.rows = torch.zeros(NUM_WRITTEN, BLOCK_BYTES // 4, dtype=torch.int32, device=DEVICE)
        self.read_back = torch.zeros_like(self.rows)
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()

    def replay(self, block_ids: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Write the rows into the blocks by replaying the graph; return what it read back."""
        self.block_ids.copy_(torch.tensor(block_ids))
        self.rows.copy_(rows)
        self._graph.replay()
        torch.cuda.synchronize()
        return self.read_back.clone()

    def _step(self) -> None:
        self.cache.index_copy_(0, self.block_ids, self.rows * 3 + 1)
        torch.index_select(self.cache, 0, self.block_ids, out=self.read_back)


def random_rows(seed: int) -> torch.Tensor:
    """Return random rows for `NUM_WRITTEN` blocks."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(
        -1000,
        1000,
        (NUM_WRITTEN, BLOCK_BYTES // 4),
        dtype=torch.int32,
        device=DEVICE,
        generator=generator,
    )


def test_graph_captured_before_growth_replays_after_it() -> None:
    """The replay gives the same bits after growth, and works on the new blocks."""
    with extkv.ExtensibleTensor(NUM_BLOCKS * BLOCK_BYTES, DEVICE) as tensor:
        tensor.resize_(NUM_WRITTEN * BLOCK_BYTES)
        writer = BlockWriter(tensor)
        base_ptr, old_blocks = tensor.base_ptr, list(range(NUM_WRITTEN))
        rows = random_rows(seed=1)
        before = writer.replay(old_blocks, rows)
        tensor.resize_per_segment_(NUM_BLOCKS * BLOCK_BYTES, zero_new=True)
        assert tensor.base_ptr == base_ptr
        assert torch.equal(writer.replay(old_blocks, rows), before)
        new_blocks = [NUM_BLOCKS - 1 - 37 * i for i in range(NUM_WRITTEN)]
        new_rows = random_rows(seed=2)
        assert torch.equal(writer.replay(new_blocks, new_rows), new_rows * 3 + 1)
        assert torch.equal(writer.cache[new_blocks], new_rows * 3 + 1)
        assert torch.equal(writer.cache[old_blocks], before)
        untouched = sorted(set(range(NUM_BLOCKS)) - set(old_blocks) - set(new_blocks))
        assert not bool(writer.cache[untouched].any())
        del writer


def test_graph_survives_shrink_and_growth() -> None:
    """A graph works again after its blocks were given back and grown again."""
    with extkv.ExtensibleTensor(NUM_BLOCKS * BLOCK_BYTES, DEVICE) as tensor:
        tensor.resize_per_segment_(NUM_BLOCKS * BLOCK_BYTES)
        writer = BlockWriter(tensor)
        blocks = [NUM_BLOCKS - NUM_WRITTEN + i for i in range(NUM_WRITTEN)]
        rows = random_rows(seed=3)
        expected = writer.replay(blocks, rows)
        tensor.shrink_per_segment_(NUM_WRITTEN * BLOCK_BYTES)
        tensor.resize_per_segment_(NUM_BLOCKS * BLOCK_BYTES, zero_new=True)
        assert not bool(writer.cache[blocks].any())
        assert torch.equal(writer.replay(blocks, rows), expected)
        del writer


def test_growth_while_kernels_run_keeps_their_results() -> None:
    """Five hundred kernels queued on a side stream compute the same sums while the tensor grows."""
    side = torch.cuda.Stream(DEVICE)
    with extkv.ExtensibleTensor(512 * MIB, DEVICE) as tensor:
        view = tensor.resize_(64 * MIB).view(torch.int32)
        view.zero_()
        torch.cuda.synchronize()
        for step in range(1, 9):
            with torch.cuda.stream(side):
                for _ in range(60):
                    view.add_(step)
            tensor.resize_per_segment_((64 + 56 * step) * MIB, zero_new=True)
        side.synchronize()
        assert bool((view == 60 * sum(range(1, 9))).all())
        assert not bool(tensor.tensor[64 * MIB :].any())
        del view


@pytest.mark.skipif(
    os.environ.get("EXTKV_SANITIZER") == "1", reason="compute-sanitizer may serialise kernels"
)
@pytest.mark.parametrize("stream_name", ["side", "default"])
@pytest.mark.parametrize("zero_new", [False, True], ids=["no-zeroing", "zero-new"])
def test_growth_returns_before_a_running_kernel_ends(*, zero_new: bool, stream_name: str) -> None:
    """Growth in another thread does not wait for a long kernel."""
    streams = {"side": torch.cuda.Stream(DEVICE), "default": torch.cuda.default_stream(DEVICE)}
    stream = streams[stream_name]
    with extkv.ExtensibleTensor(1024 * MIB, DEVICE) as tensor:
        # Loading a kernel for the first time may wait for the device: do it before.
        tensor.resize_per_segment_(2 * MIB, zero_new=True)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP_CYCLES)
            ended = stream.record_event()
        failures: list[BaseException] = []

        def grow() -> None:
            try:
                for num_bytes in range(64 * MIB, 1024 * MIB + 1, 64 * MIB):
                    tensor.resize_per_segment_(num_bytes, zero_new=zero_new)
            except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
                failures.append(error)

        thread = threading.Thread(target=grow)
        thread.start()
        thread.join()
        is_still_running = not ended.query()
        torch.cuda.synchronize()
        assert failures == []
        assert is_still_running
        assert tensor.num_bytes == 1024 * MIB


def test_two_threads_grow_two_tensors() -> None:
    """Concurrent growths of different tensors do not mix up."""
    tensors = [extkv.ExtensibleTensor(256 * MIB, DEVICE) for _ in range(2)]
    failures: list[BaseException] = []

    def grow(index: int) -> None:
        try:
            for num_bytes in range(4 * MIB, 256 * MIB + 1, 4 * MIB):
                tensors[index].resize_per_segment_(num_bytes, zero_new=True)
                tensors[index].segment(0)[num_bytes - MIB :].fill_(index + 1)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=grow, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert failures == []
    for index, tensor in enumerate(tensors):
        grid = tensor.tensor.view(64, 4 * MIB)
        assert bool((grid[:, 3 * MIB :] == index + 1).all())
        assert not bool(grid[:, : 3 * MIB].any())
        del grid
        tensor.free(strict=True)
