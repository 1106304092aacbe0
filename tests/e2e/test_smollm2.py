"""The real model equals transformers, from tokens to text."""

import pytest
import torch
from extkv import LLM, SamplingParams
from extkv.models import load_model
from support.plain_cache import logits_of

# Two float32 implementations of 30 layers differ by rounding only; logits are about 30 in size.
LOGITS_TOLERANCE = {torch.float32: 1e-3}

PROMPTS = {
    "gsm8k": "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and "  # noqa: RUF001
    "bakes muffins for her friends every day with four. She sells the remainder at the farmers' "
    "market daily for $2 per fresh duck egg. How much in dollars does she make every day at the "
    "farmers' market?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\nfrom typing import List\n\n\ndef has_close_elements(numbers: List[float], "
    'threshold: float) -> bool:\n    """ Check if in given list of numbers, are any two numbers '
    "closer to each other than\n    given threshold.\n    >>> has_close_elements([1.0, 2.0, 3.0], "
    '0.5)\n    False\n    """\n\n```',
    "math500": "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.  Enter "
    "your answer in the form $(r,\\theta),$ where $r > 0$ and $0 \\le \\theta < 2 \\pi.$",
    "mt-bench": "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting "
    "cultural experiences and must-see attractions.",
    "unicode": "Übersetze ins Englische: „Füße kühlen“ 🦆 日本語 →",
}


def chat_prompt(loaded, name):
    return loaded.chat_template.render([{"role": "user", "content": PROMPTS[name]}])


@pytest.fixture(scope="module")
def llm(loaded):
    return LLM(loaded, device="cpu")


def test_logits_equal_transformers(loaded, reference_model):
    token_ids = loaded.tokenizer.encode(PROMPTS["gsm8k"])[:64]
    assert len(token_ids) == 64
    with torch.no_grad():
        expected = reference_model(torch.tensor([token_ids])).logits[0]
    difference = (logits_of(loaded.model, token_ids) - expected).abs().max().item()
    assert difference <= LOGITS_TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_text_equals_transformers(name, llm, loaded, reference_model, reference_tokenizer):
    prompt = chat_prompt(loaded, name)
    token_ids = reference_tokenizer(prompt)["input_ids"]
    output = reference_model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=sorted(loaded.tokenizer.stop_token_ids),
        pad_token_id=0,
    )[0, len(token_ids) :]
    expected = reference_tokenizer.decode(
        output, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    greedy = SamplingParams(temperature=0, max_tokens=48)
    (result,) = llm.generate([loaded.tokenizer.encode(prompt)], greedy, use_tqdm=False)[0].outputs
    assert result.text == expected
    assert result.token_ids == output.tolist()
    assert len(result.token_ids) == 48 or result.finish_reason == "stop"


def test_bfloat16_logits_are_close_to_float32(loaded, model_path):
    token_ids = loaded.tokenizer.encode(PROMPTS["mt-bench"])
    narrow = load_model(model_path, dtype=torch.bfloat16)
    assert narrow.model.dtype == torch.bfloat16
    expected = logits_of(loaded.model, token_ids)
    logits = logits_of(narrow.model, token_ids).float()
    # bfloat16 has 8 significant bits: the relative error of 30 layers stays within a few percent.
    assert (logits - expected).norm() <= 0.05 * expected.norm()


def test_kv_cache_of_a_text_commits_far_less_than_it_reserves(loaded):
    llm = LLM(loaded, device="cpu")
    prompt = loaded.tokenizer.encode(PROMPTS["mt-bench"])
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=8), use_tqdm=False)
    num_tokens = len(prompt) + len(output.outputs[0].token_ids)
    stats = llm.kv_cache.stats()
    assert stats.reserved_bytes >= 8192 * 60 * 3 * 64 * 4
    # Keys and values of 30 layers, each with less than a granule of 64 KiB to spare.
    assert stats.committed_bytes <= 60 * ((num_tokens + 16) * 3 * 64 * 4 + 65536)
