"""Models in plain PyTorch: configuration, weights, tokenizer and forward pass.

A model takes packed tokens with their positions and leaves attention to a cache object, so the same
model code serves one growing sequence or a batch of paged ones. One decoder runs every known
architecture; `config.py` says what can differ.
"""

from extkv.models.chat_template import ChatTemplate
from extkv.models.config import LlamaConfig, ModelConfig
from extkv.models.decoder import AttentionCache, DecoderModel
from extkv.models.default_model import find_default_drafter, find_default_model
from extkv.models.facts import ModelFacts, model_facts
from extkv.models.generation import GenerationDefaults, SamplingDefaults
from extkv.models.llama import LlamaLayerWeights, LlamaModel, LlamaWeights
from extkv.models.loader import LoadedModel, load_model
from extkv.models.ops import DecoderOps, kernel_ops
from extkv.models.random_model import QWEN3_8B, random_model
from extkv.models.tokenizer import IncrementalDetokenizer, Tokenizer
from extkv.models.weights import LayerWeights, ModelWeights

__all__ = [
    "QWEN3_8B",
    "AttentionCache",
    "ChatTemplate",
    "DecoderModel",
    "DecoderOps",
    "GenerationDefaults",
    "IncrementalDetokenizer",
    "LayerWeights",
    "LlamaConfig",
    "LlamaLayerWeights",
    "LlamaModel",
    "LlamaWeights",
    "LoadedModel",
    "ModelConfig",
    "ModelFacts",
    "ModelWeights",
    "SamplingDefaults",
    "Tokenizer",
    "find_default_drafter",
    "find_default_model",
    "kernel_ops",
    "load_model",
    "model_facts",
    "random_model",
]
