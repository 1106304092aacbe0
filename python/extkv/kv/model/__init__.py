"""The shape of a model from its `config.json` alone: layers, weights, what each layer caches."""

from extkv.kv.model.config_file import ConfigFile, read_config_file
from extkv.kv.model.families import FAMILIES, read_model_shape
from extkv.kv.model.shape import DecoderLayer, ModelShape
from extkv.kv.model.weight import PartSize, Weight, WeightFormat, sum_by_part

__all__ = [
    "FAMILIES",
    "ConfigFile",
    "DecoderLayer",
    "ModelShape",
    "PartSize",
    "Weight",
    "WeightFormat",
    "read_config_file",
    "read_model_shape",
    "sum_by_part",
]
