"""Peak memory of one engine that answers a batch of SmolLM2 on the host, in a process of its own.

Run from the repository root: `python -m bench.engine.cpu_memory extkv` (or `transformers`). Prints
one JSON line. The cache is as large as the batch needs, so that every byte planned is used.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from extkv.models import find_default_model

NUM_SEQS, PROMPT_TOKENS, MAX_TOKENS = 16, 64, 64
BLOCK_SIZE = 16
VOCAB_SIZE = 49_152


def peak_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def prompts(num_seqs: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Return random token ids (int64, [num_seqs, num_tokens])."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, VOCAB_SIZE, (num_seqs, num_tokens), generator=generator)


def run_extkv() -> dict[str, int]:
    """Answer the batch with extkv."""
    from extkv.engine.llm import LLM
    from extkv.sampling_params import SamplingParams

    libraries = peak_bytes()
    num_blocks = NUM_SEQS * (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE
    llm = LLM(device="cpu", max_model_len=1024, num_gpu_blocks_override=num_blocks)
    loaded = peak_bytes()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    ids = prompts(NUM_SEQS, PROMPT_TOKENS, 0).tolist()
    outputs = llm.generate(ids, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == MAX_TOKENS for output in outputs)
    parameters = {id(w): w.nbytes for w in all_weights(llm)}
    return {
        "libraries": libraries,
        "started": loaded,
        "peak": peak_bytes(),
        "weights": sum(parameters.values()),
        "kv": llm.kv_cache.num_blocks * llm.sizing_plan.bytes_per_block,
    }


def all_weights(llm: object) -> list[torch.Tensor]:
    """Return every weight of an engine's model; a tied head comes twice."""
    weights = llm.model.model.weights  # type: ignore[attr-defined]
    found = [weights.embedding, weights.lm_head, weights.final_norm]
    for layer in weights.layers:
        found += [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return found


def run_transformers() -> dict[str, int]:
    """Answer the batch with transformers."""
    from transformers import AutoModelForCausalLM

    libraries = peak_bytes()
    path = find_default_model()
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    loaded = peak_bytes()
    ids = prompts(NUM_SEQS, PROMPT_TOKENS, 0)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        min_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return {"libraries": libraries, "started": loaded, "peak": peak_bytes()}


if __name__ == "__main__":
    torch.set_num_threads(2)
    engine = {"extkv": run_extkv, "transformers": run_transformers}[sys.argv[1]]
    print(json.dumps(engine()))
