"""`extkv plan`: how large a KV cache a device has room for beside a model, before it is loaded."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from enum import Enum
from pathlib import Path  # noqa: TC003, typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from extkv.errors import InvalidArgumentError

if TYPE_CHECKING:
    from extkv.kv.estimate import DeviceSize, ModelEstimate

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MAX_BYTES = 2**63


class KvCacheDtypeName(str, Enum):
    """Name the dtypes of a KV cache."""

    AUTO = "auto"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"


def plan(
    *,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Model directory; its config.json is enough.")
    ],
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device: 141GB, 80GiB, a number of bytes, ...."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Take the memory of this device instead; cuda or cpu by default."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the model; that of its config.json by default.")
    ] = None,
    kv_cache_dtype: Annotated[
        KvCacheDtypeName, typer.Option(help="Dtype of the KV cache; auto is the model's.")
    ] = KvCacheDtypeName.AUTO,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per block: 16 by default, 64 for MLA, more where a recurrent state needs "
            "it.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the longest request; the model's longest by default."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step; sliding windows keep them.")
    ] = 8192,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="Devices that share each layer; the plan is of one of them.")
    ] = 1,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the device that the engine may use.")
    ] = 1.0,
    weight_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the weights on one device, instead of counting them."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show what a model takes of a device and how many tokens of KV cache fit beside it.

    Weights are counted from the shape of the model; nothing is loaded. What only a run can measure
    is assumed and printed.
    """
    # Imported late: `extkv --help` must not pay for the native module.
    from extkv.kv.estimate import EngineSettings, estimate_model

    settings = EngineSettings(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype.value,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        weight_bytes=None if weight_memory is None else parse_bytes(weight_memory),
    )
    size = _device_size(gpu_memory, device, gpu_memory_utilization)
    estimate = estimate_model(directory, size, settings)
    if as_json:
        typer.echo(json.dumps(estimate.as_dict()))
    else:
        typer.echo(format_estimate(estimate), nl=False)


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``141GB`` (10^9), ``80 GiB`` (2^30) or ``1073741824``.

    Raises:
        InvalidArgumentError: If it is something else, no whole number of bytes, or above 2^63.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = None if match is None else UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise InvalidArgumentError(
            f"{text!r:.80} is no size; write bytes or a number with kB, MB, GB, TB, KiB, MiB, GiB "
            "or TiB"
        )
    size = Decimal(match[1]) * unit
    if size != int(size) or size > MAX_BYTES:
        raise InvalidArgumentError(f"{text!r:.80} is no whole number of bytes up to 2**63")
    return int(size)


def format_estimate(estimate: ModelEstimate) -> str:
    """Return the weights by part, the cached layers by kind, and the table of the device."""
    ranks = estimate.tensor_parallel_size
    title = (
        f"{estimate.architecture}: {estimate.num_parameters:,} parameters, "
        f"{estimate.num_layers} layers, {estimate.dtype}"
    )
    if ranks > 1:
        title += f"; on each of {ranks} devices:"
    parts = [title, "", *_weight_lines(estimate), "", *_cache_lines(estimate), "", estimate.table]
    return "\n".join(parts)


def _weight_lines(estimate: ModelEstimate) -> list[str]:
    total = "not counted"
    if estimate.weights:
        total = f"{sum(part.num_parameters for part in estimate.weights):,}"
    return [
        f"{'weights':<16}{'parameters':>20}{'bytes':>20}",
        *(f"{p.part:<16}{p.num_parameters:>20,}{p.num_bytes:>20,}" for p in estimate.weights),
        f"{'together':<16}{total:>20}{estimate.weight_bytes:>20,}",
    ]


def _cache_lines(estimate: ModelEstimate) -> list[str]:
    lines = [f"{'cached by':<30}{'layers':>10}{'bytes per block':>20}"]
    for kind in estimate.caches:
        padding = kind.bytes_per_block - kind.unpadded_bytes
        note = f" ({padding:,} of them padding)" if padding else ""
        lines.append(f"{kind.kind:<30}{kind.num_layers:>10}{kind.bytes_per_block:>20,}{note}")
    per_block = estimate.sizes["plan"]["cache"]["bytes_per_block"]
    shared = sum(kind.num_layers for kind in estimate.caches) > estimate.num_buffers
    name = "buffers, shared by layers" if shared else "buffers"
    return [*lines, f"{name:<30}{estimate.num_buffers:>10}{per_block:>20,}"]


def _device_size(
    gpu_memory: str | None, device: str | None, gpu_memory_utilization: float
) -> DeviceSize:
    from extkv.device import open_device, resolve_device
    from extkv.kv.estimate import CUDA_GRANULE_BYTES, DeviceSize

    if gpu_memory is not None:
        if device is not None:
            raise InvalidArgumentError("give --gpu-memory or --device, not both")
        total, granule = parse_bytes(gpu_memory), CUDA_GRANULE_BYTES
    else:
        native = open_device(*resolve_device(device))
        total, granule = native.memory_info()[1], native.granularity
    return DeviceSize(total, granule, gpu_memory_utilization)
