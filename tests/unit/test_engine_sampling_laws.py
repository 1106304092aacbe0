"""Each sampling parameter changes the distribution as vLLM says: chi-square over many draws."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from extkv.engine.sampling_slots import SlotRequest
from extkv.reference import sampling
from extkv.sampling_params import SamplingParams, request_seed
from support.sampling import (
    LOGITS,
    OUTPUT,
    PROMPT,
    VOCAB_SIZE,
    request,
    sample,
    sampler_of,
    slow_logits,
)

NUM_DRAWS = 24_000


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Do not fill up a vocabulary of 8 to a tile of 2048: the draws are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "VOCAB_TILE", 8)
        yield


def law(logits, **fields):
    """Return the probability of each token."""
    params = SamplingParams(**{k: v for k, v in fields.items() if k not in {"prompt", "output"}})
    values = slow_logits(logits, **fields) / params.temperature
    weights = np.exp(values - values.max())
    weights[weights < params.min_p * weights.max()] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[-min(params.top_k, VOCAB_SIZE)]] = 0
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0
    return weights / weights.sum()


def chi_square(counts, probabilities):
    """Return the statistic over its mean, in standard deviations; no impossible token came."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return 0.0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = possible.sum() - 1
    return (statistic - degrees) / np.sqrt(2 * degrees)


LAWS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k beyond": {"top_k": 100},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.3},
    "all cut-offs": {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
    "allowed": {"allowed_token_ids": [6, 1, 4, 1]},
    "bad token": {"bad_words_token_ids": [[3], [0]]},
    "bad word": {"bad_words_token_ids": [[3, 0, 4], [0, 1], [0], [1, 0, 6]], "output": [3, 3, 0]},
    "bias": {"logit_bias": {5: 3.0, 3: -50.0}},
    "early": {"min_tokens": 1, "stop_token_ids": [3]},
    "not early": {"min_tokens": 3, "stop_token_ids": [3], "output": OUTPUT},
    "repetition": {"repetition_penalty": 1.7, "output": OUTPUT},
    "reward": {"repetition_penalty": 0.6, "output": OUTPUT},
    "presence": {"presence_penalty": 1.1, "output": OUTPUT},
    "frequency": {"frequency_penalty": -0.6, "output": OUTPUT},
    "together": {
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {2: 1.0},
        "bad_words_token_ids": [[1]],
        "output": OUTPUT,
    },
}


def draw(fields, dtype=torch.float32):
    """Draw once for each of many seeds, in several steps."""
    num_slots = 2000
    logits = torch.tensor([LOGITS], dtype=dtype).expand(num_slots, -1)
    one = request(**fields)
    position = len(one.prompt_token_ids) + len(one.output_token_ids)
    sampler = sampler_of(*[one] * num_slots)
    tokens = []
    for step in range(NUM_DRAWS // num_slots):
        for slot in range(num_slots):
            # The state on the host does not depend on the seed.
            sampler._parameters.write(slot, replace(one, seed=step * num_slots + slot))
        tokens += sample(sampler, logits, range(num_slots), [position] * num_slots).token_ids
    return np.bincount(tokens, minlength=VOCAB_SIZE)


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_law(name):
    assert chi_square(draw(LAWS[name]), law(LOGITS, **LAWS[name])) < 4


def test_draws_of_bfloat16_logits_follow_the_law():
    logits = torch.tensor(LOGITS, dtype=torch.bfloat16).float().tolist()
    assert chi_square(draw({"top_p": 0.9}, torch.bfloat16), law(logits, top_p=0.9)) < 4


@pytest.mark.parametrize("seed", [0, 2**64 - 2])
def test_draws_at_many_positions_follow_the_law(seed):
    sampler = sampler_of(request(seed=seed, temperature=1.5))
    logits = torch.tensor([LOGITS]).expand(NUM_DRAWS, -1)
    tokens = sample(sampler, logits, [0] * NUM_DRAWS, range(3, 3 + NUM_DRAWS)).token_ids
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert chi_square(counts, law(LOGITS, temperature=1.5)) < 4


def test_top_k_1_and_then_top_p_of_four_tokens():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32)
    rows = torch.tensor(logits).expand(100_000, -1)
    for fields, expected in (
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.5}, [0.571, 0.429, 0, 0]),
    ):
        sampler = sampler_of(request(vocab_size=8, seed=1, **fields), vocab_size=4)
        tokens = sample(sampler, rows, [0] * 100_000, range(3, 100_003)).token_ids
        found = np.bincount(tokens, minlength=4) / 100_000
        assert np.abs(found - expected).max() < 0.005
        assert found[np.array(expected) == 0].sum() == 0


def test_outputs_of_one_request_are_independent():
    params = SamplingParams(seed=5, n=2)
    seeds = [request_seed(params, index=index) for index in range(2)]
    one = [SlotRequest(request().sampling, PROMPT, seed) for seed in seeds]
    sampler = sampler_of(*one)
    num = NUM_DRAWS
    logits = torch.tensor([LOGITS]).expand(2 * num, -1)
    positions = [*range(3, 3 + num)] * 2
    tokens = np.array(sample(sampler, logits, [0] * num + [1] * num, positions).token_ids)
    pairs = np.bincount(tokens[:num] * 8 + tokens[num:], minlength=64)
    joint = np.outer(law(LOGITS), law(LOGITS)).reshape(-1)
    assert chi_square(pairs, joint) < 4
