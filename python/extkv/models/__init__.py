"""Models in plain PyTorch: configuration, weights, tokenizer and forward pass.

A model takes packed tokens with their positions and leaves attention to a cache object, so the same
model code serves one growing sequence or a batch of paged ones.
"""

from extkv.models.chat_template import ChatTemplate
from extkv.models.config import LlamaConfig
from extkv.models.default_model import find_default_model
from extkv.models.llama import AttentionCache, LlamaLayerWeights, LlamaModel, LlamaWeights
from extkv.models.loader import LoadedModel, load_model
from extkv.models.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = [
    "AttentionCache",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "LlamaConfig",
    "LlamaLayerWeights",
    "LlamaModel",
    "LlamaWeights",
    "LoadedModel",
    "Tokenizer",
    "find_default_model",
    "load_model",
]
