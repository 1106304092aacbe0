"""Two GPUs whose ranks commit together or not at all, over NCCL."""

from __future__ import annotations

import os
import socket
import traceback

import extkv
import pytest
import torch
import torch.multiprocessing as mp
from extkv.kv import FullAttentionSpec, KVCache, RankGroup

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SPEC = FullAttentionSpec(16, 8, 128, "bfloat16")


def rank_main(rank: int, port: int, answers) -> None:
    import torch.distributed as dist

    try:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        ranks = RankGroup.connect(timeout_s=30)
        cache = KVCache.reserve({"a": SPEC}, max_bytes=200 << 30, device=f"cuda:{rank}")
        blocks = ranks.minimum_blocks([1000, 700][rank])
        ranks.commit(cache, blocks)
        before = torch.cuda.mem_get_info(rank)[0], cache.num_blocks
        hog = None
        if rank == 1:
            free = torch.cuda.mem_get_info(rank)[0]
            hog = torch.empty(free - (2 << 30), dtype=torch.uint8, device="cuda:1")
        try:
            ranks.commit(cache, (40 << 30) // cache.bytes_per_block)
            message = "no error"
        except extkv.RankError as error:
            message = str(error)
        del hog
        torch.cuda.empty_cache()
        after = torch.cuda.mem_get_info(rank)[0], cache.num_blocks
        answers.put((rank, blocks, message, abs(before[0] - after[0]) <= 64 << 20, after[1]))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 the parent shows it
        answers.put((rank, traceback.format_exc(), "", False, -1))


def test_two_gpus_agree_and_roll_back_together():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=rank_main, args=(r, port, answers)) for r in range(2)]
    for process in processes:
        process.start()
    results = sorted(answers.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    assert [result[1] for result in results] == [700, 700], results
    assert results[0][2] == results[1][2]
    assert "rank 1 failed: cannot commit" in results[0][2]
    assert all(result[3] for result in results)
    assert [result[4] for result in results] == [700, 700]
