"""Loading a llama model from a GGUF file.

Every tensor the model needs is read with its expected shape. A tensor the model would not use is
refused: it means that the file asks for something the forward pass does not do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from extkv.errors import InvalidArgumentError, ModelFileError
from extkv.models.chat_template import ChatTemplate
from extkv.models.config import LlamaConfig
from extkv.models.gguf_file import GGUFFile
from extkv.models.llama import LlamaLayerWeights, LlamaModel, LlamaWeights
from extkv.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16)

EMBEDDING = "token_embd.weight"
FINAL_NORM = "output_norm.weight"
LM_HEAD = "output.weight"


@dataclass(frozen=True)
class LoadedModel:
    """Hold a model with what is needed to talk to it.

    Attributes:
        path: The file.
        model: Weights and forward pass.
        tokenizer: Text to token ids and back.
        chat_template: The file's template, or None.
    """

    path: Path
    model: LlamaModel
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def config(self) -> LlamaConfig:
        """Configuration of the model."""
        return self.model.config


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Read a GGUF file and dequantise its weights to the CPU.

    Args:
        path: The file.
        dtype: Dtype of weights and activations, float32 or bfloat16.
        on_progress: Called with (tensors read, tensors in all) after each tensor.

    Raises:
        ModelFileError: If the file is missing, truncated or corrupt, its architecture or tokenizer
            is not known, or a tensor is missing, of another shape, or unexpected.
        InvalidArgumentError: If `dtype` is not supported.
    """
    if dtype not in SUPPORTED_DTYPES:
        msg = f"dtype is {dtype}, supported: {', '.join(map(str, SUPPORTED_DTYPES))}"
        raise InvalidArgumentError(msg)
    file = GGUFFile(Path(path))
    config = LlamaConfig.from_metadata(file.metadata)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    if tokenizer.vocab_size != config.vocab_size:
        msg = (
            f"model file {file.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model {config.vocab_size}"
        )
        raise ModelFileError(msg)
    chat_template = ChatTemplate.from_metadata(file.metadata)
    weights = _WeightReader(file, config, dtype, on_progress).read()
    return LoadedModel(file.path, LlamaModel(config, weights), tokenizer, chat_template)


class _WeightReader:
    """Read the tensors of one file and report each."""

    def __init__(
        self,
        file: GGUFFile,
        config: LlamaConfig,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._file = file
        self._config = config
        self._dtype = dtype
        self._on_progress = on_progress
        self._unread = set(file.tensor_names)
        self._num_tensors = len(self._unread)

    def read(self) -> LlamaWeights:
        """Return the weights; no tensor may be left over."""
        config = self._config
        table_shape = (config.vocab_size, config.hidden_size)
        embedding = self._take(EMBEDDING, table_shape)
        weights = LlamaWeights(
            embedding=embedding,
            layers=tuple(self._read_layer(layer_id) for layer_id in range(config.num_layers)),
            final_norm=self._take(FINAL_NORM, (config.hidden_size,)),
            lm_head=self._take(LM_HEAD, table_shape) if LM_HEAD in self._unread else embedding,
        )
        if self._unread:
            msg = (
                f"model file {self._file.path}: {len(self._unread)} tensors have no use in a plain "
                f"llama model of {config.num_layers} layers, first: {min(self._unread)}"
            )
            raise ModelFileError(msg)
        return weights

    def _read_layer(self, layer_id: int) -> LlamaLayerWeights:
        config = self._config
        hidden, mlp = config.hidden_size, config.intermediate_size
        q_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim

        def take(name: str, *shape: int) -> torch.Tensor:
            return self._take(f"blk.{layer_id}.{name}.weight", shape)

        return LlamaLayerWeights(
            input_norm=take("attn_norm", hidden),
            q_proj=unpermute(take("attn_q", q_rows, hidden), config.num_heads),
            k_proj=unpermute(take("attn_k", kv_rows, hidden), config.num_kv_heads),
            v_proj=take("attn_v", kv_rows, hidden),
            o_proj=take("attn_output", hidden, q_rows),
            post_attention_norm=take("ffn_norm", hidden),
            gate_proj=take("ffn_gate", mlp, hidden),
            up_proj=take("ffn_up", mlp, hidden),
            down_proj=take("ffn_down", hidden, mlp),
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._file.read_tensor(name, shape).to(self._dtype)
        self._unread.discard(name)
        if self._on_progress is not None:
            self._on_progress(self._num_tensors - len(self._unread), self._num_tensors)
        return tensor


def unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return query or key rows in Hugging Face order.

    GGUF stores the rows of a head interleaved (0, half, 1, half + 1, ...), so that neighbours
    rotate together. Row `head * head_dim + half_id * head_dim / 2 + pair_id` of the result is row
    `head * head_dim + 2 * pair_id + half_id` of `weight`.

    Args:
        weight (float, [num_heads * head_dim, hidden_size]): Rows as stored.
        num_heads: Number of heads in the rows.
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
