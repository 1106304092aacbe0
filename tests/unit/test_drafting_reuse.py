"""What a step takes from the one before, or from its own inputs, is what it would upload anew."""

import numpy as np
import pytest
import torch
from extkv import SamplingParams
from extkv.dspark.verification import Verifier
from extkv.engine.sampling_slots import KeptUpload, SlotParameters, SlotRequest
from extkv.resolved_sampling import ResolvedSampling
from support.drafted_engines import drafted_engine

CPU = torch.device("cpu")


def written(parameters, slot, temperature, seed):
    sampling = ResolvedSampling(SamplingParams(temperature=temperature), max_tokens=1)
    parameters.write(slot, SlotRequest(sampling, [1], seed))


def test_parameters_of_the_same_slots_are_the_same_tensors_until_one_is_written():
    parameters = SlotParameters(4, CPU)
    for slot in range(4):
        written(parameters, slot, 0.1 * (slot + 1), 10 + slot)
    first = parameters.of([2, 0])
    assert parameters.of([2, 0])["temperature"] is first["temperature"]
    assert parameters.of([0, 2])["seed"].tolist() == [10, 12]
    assert first["seed"].tolist() == [12, 10]
    written(parameters, 3, 1.0, 99)
    again = parameters.of([2, 0])
    assert again["temperature"] is not first["temperature"]
    assert again["seed"].tolist() == [12, 10]
    written(parameters, 0, 0.7, 50)
    assert parameters.of([2, 0])["seed"].tolist() == [12, 50]
    assert parameters.of([2, 0])["temperature"].tolist() == pytest.approx([0.3, 0.7])
    assert first["seed"].tolist() == [12, 10]


def test_any_number_of_lists_of_slots_can_be_asked_for():
    parameters = SlotParameters(16, CPU)
    for slot in range(16):
        written(parameters, slot, 1.0, slot)
    for _ in range(2):
        for first in range(15):
            assert parameters.of([first, first + 1])["seed"].tolist() == [first, first + 1]


def test_positions_are_uploaded_or_passed_on():
    parameters = SlotParameters(2, CPU)
    assert parameters.rows([1, 1], [5, 6]).positions.tolist() == [5, 6]
    given = torch.tensor([7, 8])
    assert parameters.rows([1, 1], given).positions is given


def test_an_array_is_uploaded_once_while_it_stays():
    kept = KeptUpload(CPU)
    array = np.array([3, 1], np.int32)
    first = kept(array)
    assert kept(np.array([3, 1], np.int32)) is first
    array[0] = 4
    assert kept(array).tolist() == [4, 1]
    assert kept(np.array([4], np.int32)).tolist() == [4]
    for _ in range(2):
        assert kept(np.zeros(0, np.int32)).tolist() == []


def answers(llm, requests):
    prompts = [[1, 2, 3 + number] for number in range(len(requests))]
    found = llm.generate(prompts, list(requests), use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def params(temperature, seed, **options):
    options = {"max_tokens": 24, "ignore_eos": True} | options
    return SamplingParams(temperature=temperature, seed=seed, **options)


MIXED = [params(0.0, 1), params(1.0, 2), params(0.6, 3), params(1.0, 4, top_k=5)]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_a_request_does_not_draft_with_the_parameters_of_the_one_before(method, max_num_seqs):
    """One engine after the other's requests, and an engine of its own, write the same."""
    options = {
        "max_num_seqs": max_num_seqs,
        "speculative": {"rejection_sample_method": method},
        "enable_prefix_caching": False,
    }
    llm = drafted_engine(**options)
    used = [answers(llm, MIXED[shift:] + MIXED[:shift]) for shift in range(len(MIXED))]
    for shift, found in enumerate(used):
        fresh = drafted_engine(**options)
        assert found == answers(fresh, MIXED[shift:] + MIXED[:shift])
        assert llm.draft_counts.num_rounds > fresh.draft_counts.num_rounds > 0


@pytest.mark.parametrize(
    "speculative",
    [{}, {"rejection_sample_method": "block"}, {"draft_sample_method": "greedy"}],
    ids=["standard", "block", "chosen"],
)
def test_rows_of_the_step_are_those_that_would_be_uploaded(monkeypatch, speculative):
    """Prompts of other lengths, log-probabilities and penalties among them."""
    requests = [*MIXED, params(1.0, 5, logprobs=2), params(0.0, 6, presence_penalty=0.5)]
    found = answers(drafted_engine(speculative=speculative), requests)
    verify, placed = Verifier.verify, []

    def without(self, logits, windows, law, rows=None):
        if rows is not None:
            placed.append(len(windows))
            starts = np.cumsum([0, *(1 + len(window.drafts) for window in windows)])
            tokens = [t for w in windows for t in (w.last_token, *w.drafts)]
            positions = [w.position + k for w in windows for k in range(1 + len(w.drafts))]
            assert rows.window_starts.tolist() == starts.tolist()
            assert rows.token_ids.tolist() == tokens
            assert rows.positions.tolist() == positions
        return verify(self, logits, windows, law)

    monkeypatch.setattr(Verifier, "verify", without)
    assert answers(drafted_engine(speculative=speculative), requests) == found
    assert max(placed) == 4
