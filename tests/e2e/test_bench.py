"""`extkv bench` on tiny models: the peer is the same model, and the result is whole."""

import json
import os
import sys

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from extkv.bench.transformers_model import transformers_model
from extkv.cli import app
from extkv.errors import MissingPackageError
from extkv.models import load_model
from support.hf_reference import ROPES, make_reference, write_tokenizer
from typer.testing import CliRunner

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10}
SIZES = ["--input-len", "5", "--output-len", "4", "--rounds", "2", "--device", "cpu"]
CASES = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-windows": (
        "Qwen3",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    **{f"llama-{rope}": ("Llama", {"rope_parameters": dict(ROPES[rope])}) for rope in ROPES},
}


@pytest.fixture
def directory(tmp_path):
    make_reference("Llama", **GROUPED).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_peer_computes_what_the_original_does(case, tmp_path):
    family, options = CASES[case]
    reference = make_reference(family, **GROUPED, **options)
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model = load_model(tmp_path).model
    peer = transformers_model(model)
    token_ids = torch.randint(300, (1, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = reference(token_ids).logits, peer(token_ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_peer_shares_the_weights(directory):
    model = load_model(directory).model
    peer = transformers_model(model)
    shared = model.weights.layers[0].qkv_proj
    assert peer.model.layers[0].self_attn.q_proj.weight.data_ptr() == shared.data_ptr()
    assert peer.lm_head.weight.data_ptr() == model.weights.lm_head.data_ptr()


def test_throughput_compares_with_transformers(directory, tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--num-prompts", "3", "--batch-size", "2", *SIZES, "--out", str(out), "--json"]
    result = CliRunner().invoke(app, ["bench", "throughput", "--model", directory, *sizes])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values == json.loads(out.read_text())
    assert values["equal_ratio"] == 1.0
    assert list(values["startup_s"]) == ["load", "profile", "capture", "size", "first token"]
    assert [row["name"] for row in values["rows"]] == ["output tokens", "prompt and output tokens"]
    assert all(len(row["extkv"]) == len(row["transformers"]) == 2 for row in values["rows"])
    assert values["settings"]["num_prompts"] == 3
    assert values["environment"]["transformers"]


def test_latency_prints_a_table_with_ratios_and_the_start_up(directory):
    result = CliRunner().invoke(app, ["bench", "latency", "--model", directory, *SIZES])
    assert result.exit_code == 0, result.output
    names = ["first token", "each next token", "whole answer", "load", "capture", "together"]
    assert all(any(line.startswith(name) for line in result.stdout.splitlines()) for name in names)
    assert "same tokens in 100% of the answers" in result.stdout
    assert result.stdout.count(" x\n") == 3


def test_latency_needs_a_second_token(directory):
    sizes = ["--output-len", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, ["bench", "latency", "--model", directory, *sizes])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: output_len is 1, expected at least 2\n"


def test_without_transformers_the_message_says_what_to_install(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match="run `pip install transformers`"):
        transformers_model(load_model(directory).model)
    result = CliRunner().invoke(app, ["bench", "latency", "--model", directory, *SIZES])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the bench compares with transformers")


@pytest.mark.parametrize("options", [["--batch-size", "0"], ["--rounds", "0"]], ids=" ".join)
def test_sizes_out_of_range_are_usage_errors(options):
    assert CliRunner().invoke(app, ["bench", "latency", *options]).exit_code == 2
