"""Requests of a tiny vocabulary, a sampler around them, and vLLM's rules token by token."""

import numpy as np
import torch
from extkv.engine.sampler import Sampler
from extkv.engine.sampling_slots import SlotRequest
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams, request_seed

CPU = torch.device("cpu")
LOGITS = [1.2, 0.4, -0.3, 2.0, 0.9, -1.5, 0.1, 1.2]
VOCAB_SIZE = len(LOGITS)
PROMPT = [3, 3, 5]
OUTPUT = [0, 3, 0]
EOS = (7,)


def request(prompt=PROMPT, output=(), vocab_size=VOCAB_SIZE, **fields):
    """Return a request as it enters a slot."""
    fields = {"max_tokens": None} | fields
    limits = ModelLimits(vocab_size, max_model_len=10**6, eos_token_ids=EOS)
    params = SamplingParams(**fields)
    sampling = resolve_sampling_params(params, limits, num_prompt_tokens=len(prompt))
    return SlotRequest(sampling, prompt, request_seed(params, request_id="a"), output)


def sampler_of(*requests, vocab_size=VOCAB_SIZE):
    """Return a sampler with a request in each slot."""
    sampler = Sampler(vocab_size=vocab_size, num_slots=max(1, len(requests)), device=CPU)
    for slot, entering in enumerate(requests):
        sampler.enter(slot, 1, entering)
    return sampler


def sample(sampler, logits, slots, positions, **options):
    """Sample a step of requests that entered with `sampler_of`."""
    rows = torch.as_tensor(logits)
    return sampler.sample(rows, slots, [1] * len(slots), positions, **options).wait()


def slow_logits(logits, prompt=PROMPT, output=(), **fields):
    """Apply masks, bias and penalties of vLLM token by token, in double precision."""
    params = SamplingParams(**{"max_tokens": None} | fields)
    tokens = enumerate(map(float, logits))
    return np.array([_slow_logit(*token, params, prompt, list(output)) for token in tokens])


def _slow_logit(token_id, logit, params, prompt, output):
    is_out = params.allowed_token_ids is not None and token_id not in params.allowed_token_ids
    for sequence in params.bad_words_token_ids:
        before = output[len(output) - len(sequence) + 1 :]
        is_out |= sequence[-1] == token_id and before == list(sequence[:-1])
    if len(output) < params.min_tokens:
        is_out |= token_id in {*EOS, *params.stop_token_ids}
    value = -np.inf if is_out else logit + (params.logit_bias or {}).get(token_id, 0.0)
    if token_id in prompt or token_id in output:
        factor = params.repetition_penalty
        value = value / factor if value > 0 else value * factor
    value -= params.frequency_penalty * output.count(token_id)
    return value - params.presence_penalty * (token_id in output)
