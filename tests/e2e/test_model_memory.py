"""Loading takes the memory of the weights and a little more: there is no second copy."""

import json
import subprocess
import sys

import pytest
import torch
from extkv.models import ModelConfig, find_default_model, model_facts
from extkv.models.weights import count_parameters, weight_slots
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MIB = 1024 * 1024
ALLOWANCE = 64 * MIB

# 54 million weights: 206 MiB in float32, 103 MiB in bfloat16.
CONFIG = ModelConfig(
    vocab_size=20_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=1,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    context_length=2048,
)

# The libraries are warmed up before, so that only the model counts.
PROGRAM = """
import re, sys
from pathlib import Path
import torch
from extkv import models
torch.set_num_threads(1)
torch.aminmax(torch.ones(8, dtype=torch.bfloat16).float())

def peak():
    # ru_maxrss would begin with that of the parent process.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
loaded = models.load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
print(peak() - before)
"""


def as_json(config):
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
    }


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def directory(request, tmp_path_factory):
    """A model in two shards, stored in one dtype."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(as_json(CONFIG)))
    vocabulary = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    encoder = Tokenizer(models.BPE(vocabulary, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.save(str(path / "tokenizer.json"))
    slots = list(weight_slots(CONFIG))
    weight_map = {}
    for number, part in enumerate((slots[::2], slots[1::2])):
        name = f"model-{number}.safetensors"
        save_file({s.name: torch.ones(s.shape, dtype=request.param) for s in part}, path / name)
        weight_map |= {slot.name: name for slot in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def measure_peak(path, dtype):
    """Return how many bytes the peak of resident memory rose while a model was loaded."""
    command = [sys.executable, "-c", PROGRAM, str(path), dtype]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def least_peak(path, dtype, limit):
    """Measure up to three times: what the kernel does by itself only ever adds to a peak.

    Mapped file pages count as resident until it takes them back; a second copy is always there.
    """
    peaks = []
    for _ in range(3):
        peaks.append(measure_peak(path, dtype))
        if peaks[-1] <= limit:
            break
    return min(peaks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_shards_takes_no_second_copy(directory, dtype):
    weights = count_parameters(CONFIG) * getattr(torch, dtype).itemsize
    peak = least_peak(directory, dtype, weights + ALLOWANCE)
    assert peak <= weights + ALLOWANCE
    # The measurement sees the weights at all.
    assert peak >= 0.9 * weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_gguf_takes_no_second_copy(dtype):
    path = find_default_model()
    weights = model_facts(path).weight_bytes(getattr(torch, dtype))
    # Vocabulary and merges of 49,152 tokens.
    parsed = 32 * MIB
    limit = weights + ALLOWANCE + parsed
    assert least_peak(path, dtype, limit) <= limit
