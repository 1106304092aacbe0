"""How many blocks a model leaves room for, from its `config.json` and the size of a device.

The same arithmetic as sizing after capture, on assumed numbers where only a run can measure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from extkv import _extkv
from extkv.device import checked_size
from extkv.errors import InvalidArgumentError
from extkv.kv.layout import plan_cache
from extkv.kv.model.config_file import read_config_file
from extkv.kv.model.families import read_model_shape
from extkv.kv.model.formats import model_dtype, state_dtype, weight_format
from extkv.kv.model.weight import PartSize, sum_by_part
from extkv.kv.model_layers import CacheKind, CacheSettings, cache_kinds, cache_layers

if TYPE_CHECKING:
    import os

    from extkv.kv.layout import CachePlan
    from extkv.kv.model.config_file import ConfigFile
    from extkv.kv.model.shape import ModelShape

# Granules of physical memory on CUDA devices.
CUDA_GRANULE_BYTES = 2 << 20


@dataclass(frozen=True)
class DeviceSize:
    """The device that one rank has.

    Attributes:
        total_bytes: Its memory.
        granule_bytes: Granularity of its physical memory.
        gpu_memory_utilization: Share of it that the engine may use.

    Raises:
        InvalidArgumentError: If a size is negative, or the share not above 0 and at most 1.
    """

    total_bytes: int
    granule_bytes: int = CUDA_GRANULE_BYTES
    gpu_memory_utilization: float = 1.0

    def __post_init__(self) -> None:
        """Check every number."""
        checked_size("total_bytes", self.total_bytes)
        checked_size("granule_bytes", self.granule_bytes)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidArgumentError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and "
                "at most 1"
            )


@dataclass(frozen=True)
class EngineSettings:
    """What an engine would be started with; None for what the model's file says.

    Attributes:
        max_model_len: Tokens of the longest request.
        max_num_seqs: Requests at once.
        max_num_batched_tokens: Tokens of one step; sliding windows keep them beside the window.
        dtype: Dtype of the model.
        kv_cache_dtype: ``"auto"`` for that dtype, ``"fp8"``, or ``"fp8_ds_mla"`` for MLA.
        block_size: Tokens per block; None for 16, or 64 with latent attention.
        tensor_parallel_size: Ranks that share each layer.
        weight_bytes: Bytes of the weights on one rank; None to count them.

    Raises:
        InvalidArgumentError: If a number is negative.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel_size: int = 1
    weight_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers that nobody below checks."""
        checked_size("max_num_seqs", self.max_num_seqs)
        checked_size("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.weight_bytes is not None:
            checked_size("weight_bytes", self.weight_bytes)


@dataclass(frozen=True)
class ModelEstimate:
    """What a model takes on one rank, and what that leaves for its cache.

    Attributes:
        architecture: Name of the architecture.
        num_parameters: Parameters of the whole model.
        num_layers: Layers of the whole model.
        tensor_parallel_size: Ranks that share each layer.
        dtype: Dtype of the model.
        weights: Weights on one rank by part; empty if their size was given.
        weight_bytes: Bytes of the weights on one rank.
        caches: Cached layers on one rank by kind.
        num_buffers: Buffers that hold them.
        num_segments: Segments of the buffers.
        sizes: The core's estimate: ``plan``, ``summary``, ``assumptions``, ``max_num_seqs``.
        table: The same as a table.
    """

    architecture: str
    num_parameters: int
    num_layers: int
    tensor_parallel_size: int
    dtype: str
    weights: tuple[PartSize, ...]
    weight_bytes: int
    caches: tuple[CacheKind, ...]
    num_buffers: int
    num_segments: int
    sizes: dict[str, Any]
    table: str

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the table, ready for JSON."""
        values = asdict(self)
        sizes = values.pop("sizes")
        del values["table"]
        plan, summary = sizes["plan"], sizes["summary"]
        return {
            **values,
            "block_size": plan["cache"]["block_size"],
            "bytes_per_block": plan["cache"]["bytes_per_block"],
            "bytes_per_token": summary["bytes_per_token"],
            "num_blocks": plan["blocks"],
            "num_tokens": plan["num_tokens"],
            "max_model_len": plan["max_model_len"],
            "blocks_per_request": plan["blocks_per_request"],
            "concurrency": summary["concurrency"],
            "max_num_seqs": sizes["max_num_seqs"],
            "all_sequences_fit": summary["all_sequences_fit"],
            "device_total_bytes": plan["device_total_bytes"],
            "parts": plan["parts"],
            "limit": plan["limit"],
            "warnings": plan["warnings"],
            "assumptions": sizes["assumptions"],
        }


def estimate_model(
    directory: str | os.PathLike[str],
    device: DeviceSize,
    engine: EngineSettings | None = None,
) -> ModelEstimate:
    """Estimate how many blocks fit beside a model, without loading it.

    Args:
        directory: A model directory; its `config.json` is enough.
        device: The device of one rank.
        engine: What an engine would be started with.

    Raises:
        ModelFileError: If the configuration is missing, damaged, or of a model or a quantisation
            that is not known.
        InvalidArgumentError: If a setting does not suit the model.
        CacheTooSmallError: If one request of the longest length does not fit.
        SizingError: If the model does not fit.
    """
    engine = engine or EngineSettings()
    config = read_config_file(directory)
    shape = read_model_shape(config)
    settings = _cache_settings(config, shape, engine)
    layers = cache_layers(shape, settings)
    plan = plan_cache(layers, max_blocks=1)
    weights = _weights(config, shape, settings.dtype, engine)
    weight_bytes = engine.weight_bytes
    if weight_bytes is None:
        weight_bytes = sum(part.num_bytes for part in weights)
    facts = _facts(plan, device, engine, settings.max_model_len, weight_bytes)
    sizes, table = _extkv.estimate(json.dumps(facts), "{}")
    return ModelEstimate(
        architecture=shape.architecture,
        num_parameters=shape.num_parameters,
        num_layers=len(shape.layers),
        tensor_parallel_size=settings.tensor_parallel_size,
        dtype=settings.dtype,
        weights=weights,
        weight_bytes=weight_bytes,
        caches=cache_kinds(layers),
        num_buffers=len(plan.buffers()),
        num_segments=plan.num_segments,
        sizes=json.loads(sizes),
        table=table,
    )


def _cache_settings(config: ConfigFile, shape: ModelShape, engine: EngineSettings) -> CacheSettings:
    max_model_len = engine.max_model_len
    if max_model_len is None:
        max_model_len = config.size("max_position_embeddings")
    return CacheSettings(
        dtype=model_dtype(config, engine.dtype),
        max_model_len=max_model_len,
        state_dtype=state_dtype(config, shape.architecture),
        kv_cache_dtype=engine.kv_cache_dtype,
        block_size=engine.block_size,
        tensor_parallel_size=engine.tensor_parallel_size,
    )


def _weights(
    config: ConfigFile, shape: ModelShape, dtype: str, engine: EngineSettings
) -> tuple[PartSize, ...]:
    if engine.weight_bytes is not None:
        return ()
    stored = weight_format(config, dtype)
    return tuple(sum_by_part(shape.weights(), engine.tensor_parallel_size, stored))


def _facts(
    plan: CachePlan,
    device: DeviceSize,
    engine: EngineSettings,
    max_model_len: int,
    weight_bytes: int,
) -> dict[str, Any]:
    """Return the core's `ModelFacts`."""
    return {
        "device_total_bytes": device.total_bytes,
        "parameter_bytes": weight_bytes,
        "cache": json.loads(plan.facts_json(max_model_len, engine.max_num_batched_tokens)),
        "granule_bytes": device.granule_bytes,
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "gpu_memory_utilization": device.gpu_memory_utilization,
    }
