"""The sampler: seeds, penalties, masks, broken rows, log-probabilities, what it does not run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extkv.engine.sampler import Sampler
from extkv.engine.sampling_slots import SlotRequest
from extkv.errors import InvalidArgumentError
from extkv.resolved_sampling import ModelLimits, resolve_sampling_params
from extkv.sampling_params import SamplingParams
from hypothesis import assume, given
from hypothesis import strategies as st
from support.sampling import (
    CPU,
    EOS,
    LOGITS,
    PROMPT,
    VOCAB_SIZE,
    request,
    sample,
    sampler_of,
    slow_logits,
)


def sample_one(logits, position=None, **fields):
    """Sample one row of one request."""
    entering = request(vocab_size=len(logits), **fields)
    sampler = sampler_of(entering, vocab_size=len(logits))
    if position is None:
        position = len(entering.prompt_token_ids) + len(entering.output_token_ids)
    return sample(sampler, [logits], [0], [position])


def toy_logits(token_id, position):
    generator = torch.Generator().manual_seed(1000 * position + token_id)
    return torch.randn(VOCAB_SIZE, generator=generator)


def generate(num_slots=1, slot=0, num_others=0, *, interrupts=False, preempted_at=None, **fields):
    """Generate ten tokens with a toy model, in a batch with others."""
    sampler = Sampler(vocab_size=VOCAB_SIZE, num_slots=num_slots, device=CPU)
    others = [other for other in range(num_slots) if other != slot][:num_others]
    for other in others:
        sampler.enter(other, 9, request(temperature=0.7, top_k=2, logprobs=1, seed=other))
    entering = request(temperature=2.0, **fields)
    sampler.enter(slot, 4, entering)
    output = []
    for step in range(10):
        if step == preempted_at:
            again = SlotRequest(entering.sampling, PROMPT, entering.seed, output)
            sampler.enter(slot, 5, again)
        if interrupts:
            torch.rand(7)
        generation = 4 if preempted_at is None or step < preempted_at else 5
        position = len(PROMPT) + len(output)
        rows = [toy_logits(other, 99) for other in others]
        rows.insert(step % (num_others + 1), toy_logits([*PROMPT, *output][-1], position))
        slots, generations = list(others), [9] * num_others
        slots.insert(step % (num_others + 1), slot)
        generations.insert(step % (num_others + 1), generation)
        positions = [position if one == slot else 50 + step for one in slots]
        found = sampler.sample(torch.stack(rows), slots, generations, positions).wait()
        output.append(found.token_ids[step % (num_others + 1)])
        sampler.append(slot, output[-1:])
    return output


@pytest.mark.parametrize(
    "fields",
    [{"seed": 42}, {}, {"seed": 42, "frequency_penalty": 0.5, "repetition_penalty": 1.2}],
    ids=["seed", "engine seed", "penalties"],
)
def test_tokens_depend_on_the_request_alone(fields):
    alone = generate(**fields)
    assert len(set(alone)) > 1
    assert generate(**fields) == alone
    assert generate(**fields, interrupts=True) == alone
    assert generate(5, 3, 3, **fields) == alone
    assert generate(2, 0, 1, **fields) == alone
    assert generate(3, 2, 2, preempted_at=4, **fields) == alone


def test_other_seeds_give_other_tokens():
    assert generate(seed=1) != generate(seed=2)


def test_greedy_rows_of_a_mixed_batch_equal_those_alone_and_the_others_too():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB_SIZE, generator=generator)
    temperatures = [0, 0.7, 0, 1.3]
    requests = [request(temperature=t, seed=s) for s, t in enumerate(temperatures)]
    together = sample(sampler_of(*requests), logits, range(4), [3] * 4).token_ids
    for row, entering in enumerate(requests):
        alone = sample(sampler_of(entering), logits[row : row + 1], [0], [3]).token_ids
        assert alone == together[row : row + 1]
    assert together[0] == logits[0].argmax()
    assert together[2] == logits[2].argmax()


NUMBER = st.floats(-4, 4, width=32)
TOKEN = st.integers(0, VOCAB_SIZE - 1)
TOKENS = st.lists(TOKEN, max_size=6)
CHANGES = st.fixed_dictionaries(
    {
        "prompt": st.lists(TOKEN, min_size=1, max_size=6),
        "output": TOKENS,
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.5]),
        "presence_penalty": st.sampled_from([0.0, -1.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.25, 2.0]),
        "logit_bias": st.dictionaries(TOKEN, NUMBER, max_size=3),
        "bad_words_token_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=2),
        "allowed_token_ids": st.none() | st.just([0, 1, 2, 3, 6]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(TOKEN, max_size=2),
    }
)


@given(
    changes=st.lists(CHANGES, min_size=1, max_size=3),
    logits=st.lists(NUMBER, min_size=24, max_size=24),
    may_overwrite=st.booleans(),
)
def test_logits_are_changed_as_a_direct_computation_does(changes, logits, may_overwrite):
    rows = torch.tensor(logits).view(3, -1)[: len(changes)]
    # Without anything to change, the logits are taken as they are.
    seen = {"logits": rows}

    def choose(changed, *_, out, **__):
        seen["logits"] = changed.clone()
        for tensor in out:
            tensor.zero_()

    requests = []
    for fields in changes:
        fields["temperature"] = 0
        params = {k: v for k, v in fields.items() if k not in {"prompt", "output"}}
        sampling = resolve_or_skip(params, fields)
        requests.append(SlotRequest(sampling, fields["prompt"], 0, fields["output"]))
    sampler = sampler_of(*requests)
    argmax_tokens = sampler._sampling.argmax_tokens
    sampler._sampling = SimpleNamespace(argmax_tokens=argmax_tokens, sample_tokens=choose)
    before = rows.clone()
    positions = [len(fields["prompt"]) + len(fields["output"]) for fields in changes]
    sample(sampler, rows, range(len(changes)), positions, may_overwrite=may_overwrite)
    expected = np.stack(
        [slow_logits(row, **fields) for row, fields in zip(before, changes, strict=True)]
    )
    np.testing.assert_allclose(seen["logits"].numpy(), expected, rtol=1e-5, atol=1e-5)
    if not may_overwrite:
        assert torch.equal(rows, before)


def resolve_or_skip(params, fields):
    limits = ModelLimits(VOCAB_SIZE, max_model_len=10**6, eos_token_ids=EOS)
    try:
        return resolve_sampling_params(
            SamplingParams(max_tokens=None, **params),
            limits,
            num_prompt_tokens=len(fields["prompt"]),
        )
    except InvalidArgumentError:
        assume(False)


def test_allowed_tokens_are_distinct_and_ascending_as_the_kernel_wants_them():
    sampler = sampler_of(request(vocab_size=1000, allowed_token_ids=[900, 5, 70, 5]))
    assert sampler._states[0].allowed.tolist() == [[5, 70, 900]]


@pytest.mark.parametrize("chunks", [[[7, 7, 9]], [[7], [7], [9]], [[7, 7], [], [9]]], ids=str)
def test_a_block_of_accepted_tokens_counts_token_by_token(chunks):
    sampler = sampler_of(request([1], vocab_size=10, presence_penalty=1), vocab_size=10)
    for chunk in chunks:
        sampler.append(0, chunk)
    counts = sampler._states[0].counts(4)
    assert dict(counts.T.tolist()) == {7: 2, 9: 1}


def test_counts_grow_past_their_first_size():
    output = list(range(100)) * 3
    sampler = sampler_of(request([5], vocab_size=100, frequency_penalty=1), vocab_size=100)
    for token_id in output:
        sampler.append(0, [token_id])
    counts = sampler._states[0].counts(301)
    assert dict(counts.T.tolist()) == dict.fromkeys(range(100), 3)


def test_tokens_that_were_not_appended_are_noticed():
    fields = {"temperature": 0, "frequency_penalty": 1.0}
    with pytest.raises(InvalidArgumentError, match="position is 4, expected 3"):
        sample_one(LOGITS, position=4, **fields)
    with pytest.raises(InvalidArgumentError, match="position is 4, expected 3"):
        sample_one(LOGITS, position=4, bad_words_token_ids=[[1, 2]])


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_stops_are_masked_up_to_min_tokens(min_tokens):
    wants_eos = [0.0, 1.0, 0.0, 0.0, 0.0, 4.0, 0.0, 5.0]
    fields = {"temperature": 0, "stop_token_ids": [5], "min_tokens": min_tokens}
    sampler = sampler_of(request(**fields))
    found = [
        sample(sampler, [wants_eos], [0], [len(PROMPT) + index]).token_ids[0] for index in range(6)
    ]
    assert found == [1] * min_tokens + [7] * (6 - min_tokens)


def test_verified_rows_are_masked_by_their_own_place_in_the_output():
    wants_eos = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0]]).expand(3, -1)
    for min_tokens, expected in ((4, [1, 1, 7]), (0, [7, 7, 7])):
        sampler = sampler_of(request(temperature=0, min_tokens=min_tokens, output=[1, 1]))
        assert sample(sampler, wants_eos, [0] * 3, [5, 6, 7]).token_ids == expected


def test_late_rows_with_min_tokens_are_not_copied():
    sampler = sampler_of(request(temperature=0, min_tokens=1))
    assert sampler._states[0].needs_at(3) != 0
    assert sampler._states[0].needs_at(4) == 0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_broken_rows_fail_alone(temperature):
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, 2.0], [nan, 9.0], [-inf, -inf], [nan, nan], [2.0, 1.0]])
    entering = request([1], seed=42, temperature=temperature, logprobs=1)
    sampler = sampler_of(*[entering] * 5, vocab_size=2)
    found = sample(sampler, rows, range(5), [7] * 5)
    healthy = sample(sampler, rows[[0, 4]], [0, 4], [7] * 2)
    assert found.token_ids[1:4] == [None] * 3
    assert [found.token_ids[0], found.token_ids[4]] == healthy.token_ids
    assert None not in healthy.token_ids
    assert found.failures == {
        1: "the logits hold NaN",
        2: "no token can be chosen: every logit is -inf",
        3: "the logits hold NaN",
    }
    assert sorted(found.logprobs) == [0, 4]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_under_a_mask_is_found(temperature):
    fields = {"prompt": [1], "temperature": temperature}
    logits = [float("nan"), 1.0, 2.0]
    for mask in ({"allowed_token_ids": [1]}, {"bad_words_token_ids": [[0]]}):
        found = sample_one(logits, **fields, **mask)
        assert (found.token_ids, found.failures) == ([None], {0: "the logits hold NaN"})


def test_a_row_whose_masks_leave_nothing_fails():
    found = sample_one([-float("inf"), 1.0, 2.0, 3.0], allowed_token_ids=[0], prompt=[1], output=())
    assert found.token_ids == [None]
    assert list(found.failures) == [0]


@pytest.mark.parametrize("seed", range(40))
def test_the_only_finite_logit_is_always_chosen(seed):
    inf = float("inf")
    sampler = sampler_of(request([1], vocab_size=8, seed=seed), vocab_size=4)
    found = sample(sampler, [[-inf, 0.0, -inf, -inf]] * 50, [0] * 50, range(1, 51))
    assert found.token_ids == [1] * 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", [{}, {"logit_bias": {0: 0.0}}], ids=["plain", "changed"])
def test_greedy_ties_go_to_the_leftmost(dtype, fields):
    rows = torch.tensor([[1.0, 5.0, 5.0], [5.0, 5.0, 5.0], [0.0, 0.0, 5.0]], dtype=dtype)
    sampler = sampler_of(request([1], temperature=0, **fields), vocab_size=3)
    assert sample(sampler, rows, [0] * 3, [1] * 3).token_ids == [1, 0, 2]


def test_a_tie_beyond_a_tile_goes_to_the_leftmost():
    logits = torch.zeros(1, 5000)
    logits[0, [2100, 4999]] = 3.0
    sampler = sampler_of(request([1], temperature=0, vocab_size=5000), vocab_size=5000)
    assert sample(sampler, logits, [0], [1]).token_ids == [2100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_those_of_the_logits_as_they_are(dtype):
    generator = torch.Generator().manual_seed(3)
    rows = (3 * torch.randn(70, 50, generator=generator)).to(dtype)
    rows[:, 7:] -= 1
    fields = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 2.0, "logit_bias": {4: 9.0}}
    entering = request([1], vocab_size=50, logprobs=5, **fields)
    sampler = sampler_of(*[entering] * 70, vocab_size=50)
    found = sample(sampler, rows, range(70), [1] * 70)
    expected = rows.float().log_softmax(1)
    assert sorted(found.logprobs) == list(range(70))
    for row, logprobs in found.logprobs.items():
        token_id = found.token_ids[row]
        chosen = expected[row, token_id]
        assert logprobs.token_id == token_id
        assert logprobs.logprob == pytest.approx(float(chosen), abs=1e-6)
        assert logprobs.rank == int((expected[row] > chosen).sum()) + 1
        assert logprobs.top_logprobs == pytest.approx(expected[row].topk(5).values.tolist())
        values = expected[row, logprobs.top_token_ids]
        assert values.tolist() == pytest.approx(logprobs.top_logprobs)
        assert len(set(logprobs.top_token_ids)) == 5


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    wanted = [None, 0, 3, None, 20]
    sampler = sampler_of(*(request(temperature=0, logprobs=count) for count in wanted))
    found = sample(sampler, [LOGITS] * 5, range(5), [3] * 5)
    assert {row: len(one.top_token_ids) for row, one in found.logprobs.items()} == {
        1: 0,
        2: 3,
        4: 8,
    }
    assert found.logprobs[2].top_token_ids[0] == 3
    assert found.logprobs[1].logprob == found.logprobs[4].top_logprobs[0]


def test_asking_for_logprobs_changes_no_token():
    without = generate(seed=3, top_p=0.9)
    assert generate(seed=3, top_p=0.9, logprobs=5) == without


def test_the_logits_are_left_alone_unless_they_may_be_overwritten():
    rows = torch.tensor([LOGITS])
    sampler = sampler_of(request(temperature=0, allowed_token_ids=[1]))
    assert sample(sampler, rows, [0], [3]).token_ids == [1]
    assert rows.tolist() == torch.tensor([LOGITS]).tolist()
    sample(sampler, rows, [0], [3], may_overwrite=True)
    assert rows[0, 0] == -torch.inf


def test_logprobs_come_from_the_logits_before_they_were_overwritten():
    sampler = sampler_of(request(temperature=0, allowed_token_ids=[1], logprobs=1))
    found = sample(sampler, [LOGITS], [0], [3], may_overwrite=True)
    expected = torch.tensor(LOGITS).log_softmax(0)
    assert found.logprobs[0].logprob == pytest.approx(float(expected[1]))
    assert found.logprobs[0].top_token_ids == [3]


@pytest.mark.parametrize("num_rows", [0, 1, 130])
def test_prompt_logprobs_are_those_of_the_next_tokens(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 50, generator=generator)
    token_ids = torch.randint(50, (num_rows,), generator=generator).tolist()
    found = sampler_of(vocab_size=50).prompt_logprobs(rows, token_ids, 2).wait()
    expected = rows.log_softmax(1)
    assert [one.token_id for one in found] == token_ids
    for row, one in enumerate(found):
        chosen = expected[row, one.token_id]
        assert one.logprob == pytest.approx(float(chosen), abs=1e-6)
        assert one.rank == int((expected[row] > chosen).sum()) + 1
        assert one.top_token_ids == expected[row].topk(2).indices.tolist()


def test_a_greedy_batch_runs_one_op():
    sampler = sampler_of(request(temperature=0))
    ops = sampler._sampling
    sampler._sampling = SimpleNamespace(argmax_tokens=ops.argmax_tokens)
    sampler._penalties = sampler._cutoff = sampler._parameters = None
    assert sample(sampler, [LOGITS], [0], [3]).token_ids == [3]


def test_only_cut_offs_that_a_row_needs_are_searched():
    requests = [request(top_k=2), request(temperature=0, top_p=0.5)]
    sampler = sampler_of(*requests)
    logit_cutoff = sampler._cutoff.logit_cutoff
    seen = {}

    def search(*args, **options):
        seen.update(options)
        return logit_cutoff(*args, **options)

    sampler._cutoff = SimpleNamespace(logit_cutoff=search)
    sample(sampler, [LOGITS] * 2, range(2), [3] * 2)
    assert {name for name, tensor in seen.items() if tensor is not None} == {"top_k"}


def test_a_new_occupant_brings_its_own_parameters():
    sampler = sampler_of(request(allowed_token_ids=[1]), request(temperature=0))
    assert sample(sampler, [LOGITS] * 2, range(2), [3] * 2).token_ids == [1, 3]
    sampler.enter(0, 2, request(top_k=1))
    rows = torch.tensor([LOGITS])
    assert sampler.sample(rows, [0], [2], [3]).wait().token_ids == [3]
    with pytest.raises(InvalidArgumentError, match="slot 0 has generation 2, expected 1"):
        sampler.sample(rows, [0], [1], [3])


def test_an_empty_slot_is_refused():
    sampler = Sampler(vocab_size=8, num_slots=2, device=CPU)
    with pytest.raises(InvalidArgumentError, match="slot 1 has generation none, expected 1"):
        sample(sampler, [LOGITS], [1], [3])


def test_logits_of_another_shape_are_refused():
    sampler = sampler_of(request())
    with pytest.raises(InvalidArgumentError, match=r"logits have \[2, 8\], expected \[1, 8\]"):
        sample(sampler, [LOGITS] * 2, [0], [3])


def test_an_empty_step_gives_nothing():
    found = sample(sampler_of(request()), torch.zeros(0, VOCAB_SIZE), [], [])
    assert (found.token_ids, found.failures, found.logprobs) == ([], {}, {})


def test_a_step_may_have_more_rows_than_slots():
    sampler = sampler_of(request(temperature=0))
    assert sample(sampler, [LOGITS] * 9, [0] * 9, range(3, 12)).token_ids == [3] * 9


def test_the_tokens_stay_on_the_device_for_the_next_step():
    pending = sampler_of(request(temperature=0)).sample(torch.tensor([LOGITS]), [0], [1], [3])
    assert pending.token_ids.dtype == torch.int64
    assert pending.token_ids.tolist() == [3]


def test_profiling_needs_no_slot():
    sampler = sampler_of(request(temperature=0))
    sampler.profile(torch.randn(3, VOCAB_SIZE), num_history_tokens=100)
    assert sample(sampler, [LOGITS], [0], [3]).token_ids == [3]
