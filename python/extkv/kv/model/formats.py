"""The dtypes of a model: what its file says, and what that makes of weights and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extkv import _extkv
from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.kv.model.weight import WeightFormat
from extkv.kv.spec import dtype_size_bytes

if TYPE_CHECKING:
    from extkv.kv.model.config_file import ConfigFile

# vLLM's NemotronHForCausalLMConfig (model_executor/models/config.py at 0144dd5 and later).
FLOAT32_STATE_ARCHITECTURES = ("NemotronHForCausalLM",)
NUM_BLOCK_DIMS = 2


def model_dtype(config: ConfigFile, asked: str | None) -> str:
    """Return torch's name of the model's dtype: the one asked for, or that of the file.

    Raises:
        InvalidArgumentError: If the name is not known, or none is given anywhere.
    """
    name = asked or config.text("dtype") or config.text("torch_dtype")
    if name is None:
        raise InvalidArgumentError(f"model file {config.path} names no dtype: give one")
    return _extkv.dtype_of(name)[0]


def state_dtype(config: ConfigFile, architecture: str) -> str | None:
    """Return the dtype of recurrent state that a file or its architecture asks for, if any.

    Raises:
        InvalidArgumentError: If the name is not known.
    """
    name = config.text("mamba_ssm_cache_dtype") or config.text("mamba_ssm_dtype")
    if name is None and architecture in FLOAT32_STATE_ARCHITECTURES:
        name = "float32"
    return None if name is None else _extkv.dtype_of(name)[0]


def weight_format(config: ConfigFile, dtype: str) -> WeightFormat:
    """Return how weights are stored. FP8 keeps embedding, router, norms and output head in `dtype`.

    Raises:
        ModelFileError: If the file asks for a quantisation that is not known.
    """
    item_bytes = dtype_size_bytes(dtype)
    quantization = config.section("quantization_config")
    if quantization is None:
        return WeightFormat(item_bytes)
    method = quantization.text("quant_method")
    if method != "fp8":
        raise ModelFileError(
            f"model file {config.path}: quantisation is {method!r:.80}, known: 'fp8'; give the "
            "size of the weights instead"
        )
    block = quantization.counts("weight_block_size")
    if not block:
        return WeightFormat(item_bytes, quantized_item_bytes=1)
    if len(block) != NUM_BLOCK_DIMS or 0 in block:
        raise quantization.error("weight_block_size", f"is {block!r:.80}", "two positive numbers")
    return WeightFormat(item_bytes, quantized_item_bytes=1, scale_block=(block[0], block[1]))
