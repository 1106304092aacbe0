"""Deciding whether a model directory is a DSpark drafter, and in which format."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from extkv.errors import ModelFileError, UnsupportedDrafterError
from extkv.models.qwen3 import QWEN3

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from extkv.models.json_file import JsonObject

METHOD = "dspark"
NATIVE_ARCHITECTURE = "Qwen3DSparkModel"
# What speculators and some native checkpoints call the same model.
GENERIC_ARCHITECTURE = "DSparkDraftModel"
SPECULATORS_KEY = "speculators_model_type"

# Marks of drafters that are known and not run yet, with what to call them.
_GEMMA4 = "Gemma4"
_DEEPSEEK_V4_KEYS = ("dspark_block_size", "dspark_markov_rank", "hc_mult")


class DrafterFormat(Enum):
    """Layout of a drafter's `config.json`."""

    NATIVE = "DeepSpec"
    SPECULATORS = "speculators"


def is_dspark(
    method: str | None,
    draft_path: str | os.PathLike[str] | None,
    architectures: Collection[str] = (),
) -> bool:
    """Return whether a request for speculative decoding means DSpark.

    Args:
        method: The method that was asked for by name, None where none was.
        draft_path: Path of the drafter, None without a separate one.
        architectures: `architectures` of the drafter's `config.json`.

    Returns:
        True where DSpark was asked for, or no other method was and the path contains `dspark` or
        the architecture is DSpark's own.
    """
    if method is not None:
        return method == METHOD
    is_named = draft_path is not None and METHOD in str(draft_path).lower()
    return is_named or NATIVE_ARCHITECTURE in architectures


def require_draft_path(draft_path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Return the path of a separate drafter.

    Raises:
        UnsupportedDrafterError: If there is none: then the drafter is inside the target's
            checkpoint, as DeepSeek-V4's is.
    """
    if draft_path is None:
        raise UnsupportedDrafterError(
            "no path of a drafter is given: a drafter inside the target's checkpoint "
            "(mtp.* tensors of DeepSeek-V4) is not supported yet"
        )
    return draft_path


def find_format(values: JsonObject) -> DrafterFormat:
    """Return the format of a drafter's `config.json`.

    Raises:
        UnsupportedDrafterError: If it is a drafter of DeepSeek-V4 or Gemma4.
        ModelFileError: If it is no DSpark drafter.
    """
    architectures = values.find_list("architectures", str) or []
    model_type = values.find("model_type", str) or ""
    _refuse_known(values, architectures, model_type)
    kind = values.find(SPECULATORS_KEY, str)
    if kind is not None:
        if kind != METHOD:
            raise values.error(SPECULATORS_KEY, f"is {kind!r:.80}", repr(METHOD))
        return DrafterFormat.SPECULATORS
    if NATIVE_ARCHITECTURE in architectures:
        return DrafterFormat.NATIVE
    is_generic = not architectures or GENERIC_ARCHITECTURE in architectures
    if is_generic and model_type == QWEN3.model_type:
        return DrafterFormat.NATIVE
    found = ", ".join(architectures) or "missing"
    msg = (
        f"model file {values.path}: architecture is {found} with model type {model_type!r:.80}, "
        f"known drafters: {NATIVE_ARCHITECTURE}, {GENERIC_ARCHITECTURE} of qwen3, and "
        f"{SPECULATORS_KEY} {METHOD}"
    )
    raise ModelFileError(msg)


def _refuse_known(values: JsonObject, architectures: list[str], model_type: str) -> None:
    names = [*architectures, model_type]
    is_qwen3 = NATIVE_ARCHITECTURE in architectures
    # A speculators drafter of a Gemma4 target is a Qwen3 decoder all the same.
    is_gemma = any(name.lower().startswith(_GEMMA4.lower()) for name in names)
    is_deepseek = any("deepseek" in name.lower() for name in names) or (
        not is_qwen3 and any(key in values.values for key in _DEEPSEEK_V4_KEYS)
    )
    for is_known, what in ((is_gemma, _GEMMA4), (is_deepseek, "DeepSeek-V4")):
        if is_known:
            found = ", ".join(architectures) or f"model type {model_type}"
            msg = (
                f"model file {values.path}: drafters of {what} ({found}) are not supported yet, "
                f"known: {NATIVE_ARCHITECTURE}"
            )
            raise UnsupportedDrafterError(msg)
