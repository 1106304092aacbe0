"""`extkv plan`: the page's outputs and sums, JSON, sizes as users write them, refusals."""

from __future__ import annotations

import ast
import json
import operator
import re
import subprocess
import sys
from pathlib import Path

import extkv
import pytest
from extkv.cli import app
from extkv.cli.plan import parse_bytes
from extkv.kv import DeviceSize, EngineSettings, estimate_model
from typer.testing import CliRunner

RUNNER = CliRunner()
CONFIGS = Path(__file__).parent / "data/configs"
PAGE = (Path(__file__).parents[2] / "docs/kv-layouts.md").read_text()
PLANS = re.findall(r"<!-- plan: (\S+) (.*?) -->\n```text\n(.*?)```", PAGE, re.DOTALL)
SUMS = [
    line
    for block in re.findall(r"<!-- sums -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def plan(name: str, *options: str):
    return RUNNER.invoke(app, ["plan", str(CONFIGS / name), *options])


def plan_json(name: str, *options: str) -> dict:
    result = plan(name, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def value(node: ast.AST) -> int:
    """Compute whole numbers and the four operations; nothing else is a sum."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant), ast.dump(node)
    assert isinstance(node.value, int)
    return node.value


def computed(text: str) -> int:
    plain = text.translate({ord(","): "", 0xB7: "*", 0x2212: "-", ord("/"): "//"})
    return value(ast.parse(plain.strip(), mode="eval").body)


@pytest.mark.parametrize(("name", "options", "printed"), PLANS, ids=[name for name, *_ in PLANS])
def test_the_page_shows_what_the_command_prints(name: str, options: str, printed: str):
    result = plan(name, *options.split())
    assert result.exit_code == 0, result.stderr
    assert result.stdout == printed


@pytest.mark.parametrize("line", SUMS)
def test_the_sums_of_the_page_are_right(line: str):
    _, text, found = line.split(" = ")
    expected = computed(text)
    assert found.startswith(f"{expected:,}"), expected
    assert found == f"{expected:,}" or found.startswith(f"{expected:,}, and")


def test_the_page_has_three_plans_and_their_results_are_among_its_sums():
    assert [name for name, *_ in PLANS] == ["qwen3-8b", "deepseek-v3", "hybrid"]
    assert len(SUMS) > 40
    results = {line.split(" = ")[-1].partition(", and")[0] for line in SUMS}
    for name, options, _ in PLANS:
        found = plan_json(name, *options.split())
        numbers = [found[key] for key in ("weight_bytes", "bytes_per_block", "bytes_per_token")]
        numbers += [found[key] for key in ("num_blocks", "num_tokens", "blocks_per_request")]
        numbers += [part["num_parameters"] for part in found["weights"]]
        assert {f"{number:,}" for number in numbers} <= results


def test_json_has_every_number():
    found = plan_json("qwen3-8b", "--gpu-memory", "141GB")
    assert sum(found["parts"].values()) == found["device_total_bytes"] == 141_000_000_000
    assert found["parts"]["weights_bytes"] == found["weight_bytes"] == 16_381_470_720
    assert sum(part["num_bytes"] for part in found["weights"]) == found["weight_bytes"]
    assert sum(part["num_parameters"] for part in found["weights"]) == found["num_parameters"]
    assert found["bytes_per_token"] == 147_456
    assert (found["bytes_per_block"], found["block_size"]) == (2_359_296, 16)
    assert (found["num_blocks"], found["num_tokens"]) == (51_277, 820_432)
    assert found["concurrency"] == 51_277 / 2_560
    assert found["caches"] == [
        {
            "kind": "full attention",
            "num_layers": 36,
            "bytes_per_block": 65_536,
            "unpadded_bytes": 65_536,
        }
    ]
    assert (found["num_buffers"], found["num_segments"]) == (36, 72)
    assert (found["limit"], found["warnings"]) == ("free_memory", [])
    assert found["assumptions"]["reserve_bytes"] == 256 << 20
    assert found["all_sequences_fit"] is True


def test_json_is_the_table_in_numbers():
    estimate = estimate_model(CONFIGS / "hybrid", DeviceSize(200 * 10**9))
    found = plan_json("hybrid", "--gpu-memory", "200GB")
    assert found == json.loads(json.dumps(estimate.as_dict()))
    assert f"{found['num_blocks']:,} blocks" in estimate.table


def test_options_reach_the_plan():
    base = plan_json("qwen3-8b", "--gpu-memory", "80GiB")
    fp8 = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--kv-cache-dtype", "fp8")
    assert fp8["bytes_per_token"] * 2 == base["bytes_per_token"]
    wide = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--dtype", "float32")
    assert wide["weight_bytes"] == 2 * base["weight_bytes"]
    assert (wide["dtype"], wide["bytes_per_token"]) == ("float32", 2 * base["bytes_per_token"])
    blocks = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--block-size", "32")
    assert (blocks["block_size"], blocks["bytes_per_token"]) == (32, base["bytes_per_token"])
    short = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--max-model-len", "1000")
    assert (short["max_model_len"], short["blocks_per_request"]) == (1000, 63)
    many = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--max-num-seqs", "1000")
    assert (many["max_num_seqs"], many["all_sequences_fit"]) == (1000, False)
    half = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--gpu-memory-utilization", "0.5")
    assert (half["limit"], half["num_blocks"] < base["num_blocks"]) == ("utilization", True)
    ranks = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--tensor-parallel-size", "2")
    assert ranks["bytes_per_token"] * 2 == base["bytes_per_token"]
    assert ranks["tensor_parallel_size"] == 2


def test_packed_latents_have_656_bytes_per_token():
    options = ("--gpu-memory", "141GB", "--tensor-parallel-size", "8")
    packed = plan_json("deepseek-v3", *options, "--kv-cache-dtype", "fp8_ds_mla")
    assert packed["bytes_per_token"] == 61 * 656
    latent = plan_json("deepseek-v3", *options, "--kv-cache-dtype", "fp8")
    assert latent["bytes_per_token"] == 61 * 576


def test_a_step_of_sliding_windows_is_an_option(tmp_path):
    values = json.loads((CONFIGS / "qwen3-8b/config.json").read_text())
    values |= {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4096,
        "use_sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    needs = []
    for step in ("512", "8192"):
        options = ["--json", "--gpu-memory", "80GiB", "--max-num-batched-tokens", step]
        result = RUNNER.invoke(app, ["plan", str(tmp_path), *options])
        needs.append(json.loads(result.stdout)["blocks_per_request"])
    assert needs == [-(-(4095 + 512) // 16) + 1, -(-(4095 + 8192) // 16) + 1]


def test_weights_of_a_known_size_are_not_counted():
    result = plan("qwen3-8b", "--gpu-memory", "80GiB", "--weight-memory", "5.5GB")
    assert result.exit_code == 0
    assert re.search(r"^together +not counted +5,500,000,000$", result.stdout, re.MULTILINE)
    found = plan_json("qwen3-8b", "--gpu-memory", "80GiB", "--weight-memory", "5.5GB")
    assert (found["weights"], found["weight_bytes"]) == ([], 5_500_000_000)


def test_without_a_size_the_memory_of_the_device_counts(host_budget):
    host_budget(80 << 30)
    found = plan_json("qwen3-8b", "--device", "cpu")
    assert found["device_total_bytes"] == 80 << 30
    # The host has granules of 64 KiB.
    assert found["parts"]["rounding_bytes"] == 72 * (64 << 10)
    if not extkv.cuda_is_available():
        assert plan_json("qwen3-8b") == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("141GB", 141 * 10**9),
        ("141 gb", 141 * 10**9),
        ("80GiB", 80 << 30),
        ("1.5GiB", 3 << 29),
        ("500MB", 500 * 10**6),
        ("1024MiB", 1 << 30),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
        ("4kB", 4000),
        ("4KiB", 4096),
        ("17B", 17),
        (" 1073741824 ", 1 << 30),
        ("0", 0),
    ],
)
def test_sizes_are_read_as_users_write_them(text: str, expected: int):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1e9", "141 G B", "141XB", "1_000", "nan", "1.GB", "٣GB", "9" * 31]
)
def test_refuses_text_that_is_no_size(text: str):
    with pytest.raises(extkv.InvalidArgumentError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0.5", "1.0001KiB", "9999999TB"])
def test_refuses_sizes_that_are_no_whole_number_of_bytes(text: str):
    with pytest.raises(extkv.InvalidArgumentError, match="no whole number of bytes up to"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3-8b", ["--gpu-memory", "lots"], "error: 'lots' is no size"),
        ("qwen3-8b", ["--gpu-memory", "1GB", "--device", "cpu"], "not both"),
        ("qwen3-8b", ["--device", "tpu"], "device must be a cpu or cuda device"),
        ("qwen3-8b", ["--gpu-memory", "8GB"], "the model needs"),
        ("qwen3-8b", ["--gpu-memory", "20GiB", "--max-model-len", "999999"], "lower max_model_len"),
        ("qwen3-8b", ["--gpu-memory", "0"], "the device has 0 bytes"),
        (
            "qwen3-8b",
            ["--gpu-memory", "80GB", "--gpu-memory-utilization", "1.5"],
            "gpu_memory_utilization is 1.5; it must be above 0 and at most 1",
        ),
        ("qwen3-8b", ["--gpu-memory", "80GB", "--dtype", "float7"], "unknown dtype"),
        ("qwen3-8b", ["--gpu-memory", "80GB", "--tensor-parallel-size", "3"], "does not divide"),
        ("qwen3-8b", ["--gpu-memory", "80GB", "--kv-cache-dtype", "fp8_ds_mla"], "has none"),
        ("no-such-model", ["--gpu-memory", "80GB"], "config.json: cannot be opened"),
    ],
)
def test_refusals_are_one_line_and_exit_code_1(name: str, options: list[str], message: str):
    result = plan(name, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    result = RUNNER.invoke(app, ["plan", str(tmp_path), "--gpu-memory", "80GB"])
    assert result.exit_code == 1
    assert "architecture is 'FooForCausalLM', known: BambaForCausalLM" in result.stderr
    assert "Qwen3NextForCausalLM" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--block-size", "0"],
        ["--max-num-seqs", "0"],
        ["--kv-cache-dtype", "int4"],
        ["--gpu", "1"],
    ],
)
def test_wrong_usage_ends_with_exit_code_2(options: list[str]):
    arguments = ["plan", *([str(CONFIGS / "qwen3-8b"), *options] if options else [])]
    assert RUNNER.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceSize(-1), "total_bytes"),
        (lambda: DeviceSize(1, granule_bytes=-1), "granule_bytes"),
        (lambda: DeviceSize(1, gpu_memory_utilization=0.0), "above 0 and at most 1"),
        (
            lambda: DeviceSize(1, gpu_memory_utilization=float("nan")),
            "gpu_memory_utilization is nan",
        ),
        (lambda: EngineSettings(max_num_seqs=-1), "max_num_seqs"),
        (lambda: EngineSettings(max_num_batched_tokens=-1), "max_num_batched_tokens"),
        (lambda: EngineSettings(weight_bytes=-1), "weight_bytes"),
        (
            lambda: estimate_model(
                CONFIGS / "qwen3-8b", DeviceSize(80 << 30), EngineSettings(max_model_len=0)
            ),
            "max_model_len must be at least 1",
        ),
    ],
)
def test_refuses_settings_out_of_range(make, message):
    with pytest.raises(extkv.InvalidArgumentError, match=message):
        make()


def test_the_command_runs_without_torch():
    program = (
        "import sys; from extkv.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    arguments = ["plan", str(CONFIGS / "deepseek-v3"), "--gpu-memory", "800GB"]
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("DeepseekV3ForCausalLM: 671,026,404,352 parameters, 61 layers")


def test_the_module_is_a_command():
    arguments = ["plan", str(CONFIGS / "qwen3-8b"), "--gpu-memory", "141GB", "--json"]
    command = [sys.executable, "-m", "extkv", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["num_tokens"] == 820_432
