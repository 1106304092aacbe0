"""Sampling parameters as they come over the wire, fitted to extkv's engine.

Front ends look for stop strings and make text; an engine gets token ids only. So `stop`,
`bad_words` and `ignore_eos` are not read here: what they mean is in `_eos_token_id`,
`_all_stop_token_ids` and `_bad_words_token_ids`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from extkv.errors import UnsupportedRequestError
from extkv.resolved_sampling import ModelLimits, ResolvedSampling, resolve_sampling_params
from extkv.sampling_params import MAX_LOGPROBS, SamplingParams
from extkv.structured_outputs.params import StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Mapping

# Fields of the same name and meaning on both sides.
_EQUAL_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
)
# Fields that change what is computed, and that this engine does not know.
_UNSUPPORTED_FIELDS = (
    "thinking_token_budget",
    "repetition_detection",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "trace_decode_token_ids",
)


def fit_sampling(
    wire: Mapping[str, Any], limits: ModelLimits, *, num_prompt_tokens: int
) -> ResolvedSampling:
    """Return the engine's parameters for a request.

    Args:
        wire: Fields of vLLM's `SamplingParams` that do not have their default.
        limits: The model's.
        num_prompt_tokens: Length of the prompt.

    Raises:
        UnsupportedRequestError: If a field asks for what this engine cannot do.
        InvalidArgumentError: If a value cannot work.
    """
    _check_supported(wire)
    same = {name: wire[name] for name in _EQUAL_FIELDS if name in wire}
    structured = wire.get("structured_outputs")
    params = SamplingParams(
        **same,
        structured_outputs=None
        if structured is None
        else StructuredOutputsParams.from_fields(structured),
        detokenize=False,
        bad_words_token_ids=wire.get("_bad_words_token_ids"),
    )
    eos_token_id = wire.get("_eos_token_id")
    own = replace(limits, eos_token_ids=() if eos_token_id is None else (eos_token_id,))
    resolved = resolve_sampling_params(params, own, num_prompt_tokens=num_prompt_tokens)
    if params.min_tokens == 0:
        return resolved
    late = dict.fromkeys((*resolved.late_token_ids, *wire.get("_all_stop_token_ids", ())))
    return replace(resolved, late_token_ids=tuple(late))


def _check_supported(wire: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED_FIELDS:
        if wire.get(name):
            raise UnsupportedRequestError(f"{name} is not supported by extkv")
    if wire.get("n", 1) != 1:
        raise UnsupportedRequestError(
            f"n is {wire['n']}, expected 1: front ends send one request per output"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if wire.get(name) == -1:
            raise UnsupportedRequestError(
                f"{name} is -1, which asks for the whole vocabulary; the limit is {MAX_LOGPROBS}"
            )
