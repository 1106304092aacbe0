"""What sets one model family apart: its names, the defaults of its files, and its options.

The decoder itself knows no families; each difference ends in a field of `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Describe one architecture.

    Attributes:
        architecture: Entry of `architectures` in a `config.json`.
        model_type: Entry `model_type` in a `config.json`.
        gguf_architecture: `general.architecture` of a GGUF file, or None where no such file is
            read.
        qk_norm: Whether query and key heads are normalised.
        biases: Keys that may ask for biases, `attention_bias` and `mlp_bias`.
        default_num_kv_heads: Where the `config.json` gives none; None means `num_heads`.
        default_head_dim: Where the `config.json` gives none; None means
            `hidden_size / num_heads`.
        window: Whether a `sliding_window` is refused (`never`), counts only with
            `use_sliding_window` (`flag`), or counts in every layer (`always`).
        default_window: `sliding_window` where the `config.json` has no such key.
        gguf_interleaves_heads: Whether a GGUF file stores query and key rows interleaved.
    """

    architecture: str
    model_type: str
    gguf_architecture: str | None = None
    qk_norm: bool = False
    biases: frozenset[str] = frozenset()
    default_num_kv_heads: int | None = None
    default_head_dim: int | None = None
    window: Literal["never", "flag", "always"] = "never"
    default_window: int | None = None
    gguf_interleaves_heads: bool = False
