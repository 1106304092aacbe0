"""Capture first, size after: a decode step over a cache of one block, then the cache grows.

Run `python examples/growable_cache.py`; without a GPU the step runs eagerly on host memory.
"""

import extkv
import torch
from extkv.kv import FullAttentionSpec, Layer, SizeAfterCapture

device = "cuda" if extkv.cuda_is_available() else "cpu"
extkv.set_host_memory_budget(1 << 30)  # how large the "device" is when it is the host

spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
sizer = SizeAfterCapture([Layer("layers.0", spec)], device=device, max_model_len=4096)
cache = sizer.reserve()  # address space for the whole device, memory for one block
keys, values = cache.tensors()["layers.0"].unbind(0)  # final shapes, final addresses
block = torch.zeros(1, dtype=torch.int64, device=device)


def step() -> None:
    """Write into the block that `block` names, as a decode step would."""
    keys.index_fill_(0, block, 1.0)
    values.index_fill_(0, block, 2.0)


replay = step
if device == "cuda":
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay = graph.replay
sizer.capture(replay)
sizer.measure(replay)
print(sizer.plan())  # what takes which bytes, and what is left for blocks
sizer.commit()
block.fill_(cache.num_blocks - 1)  # the last block did not exist when the graph was captured
replay()
print(f"block {cache.num_blocks - 1} of {cache.num_blocks} holds {keys[block].mean():.0f}")
