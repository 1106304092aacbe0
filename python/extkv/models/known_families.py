"""The families that the decoder runs. A new one is an entry here."""

from __future__ import annotations

from extkv.models.llama import LLAMA, MISTRAL
from extkv.models.qwen3 import QWEN3

FAMILIES = (LLAMA, QWEN3, MISTRAL)
