"""Tiny engines with a drafter, for tests of what drives them."""

from __future__ import annotations

from pathlib import Path

from extkv.bench.verify_pin import VerifyPin
from extkv.dspark.cost import CostTable, StepCost
from extkv.engine.llm import LLM
from extkv.models import GenerationDefaults, LoadedModel
from support.drafters import TARGET, tiny_config, tiny_drafter, tiny_target
from support.letter_tokenizer import LetterTokenizer

NUM_DRAFTS = 4
# Instead of times of a busy machine.
STEP_COST = StepCost(CostTable(token_us=((1, 100.0), (20, 300.0)), draft_us=((1, 20.0),)))


def loaded_target(**changes) -> LoadedModel:
    """A target of random weights with a context of 512 tokens."""
    target = tiny_target(**({"context_length": 512} | changes))
    tokenizer = LetterTokenizer(TARGET.vocab_size)
    return LoadedModel(Path("tiny"), target, tokenizer, None, GenerationDefaults())


def drafted_engine(*, drafter: dict | None = None, speculative: dict | None = None, **options):
    """An engine of up to four requests with four drafts each."""
    loaded = loaded_target()
    speculative = {"method": "dspark", **(speculative or {})}
    if speculative.get("verification") == "scheduled":
        speculative.setdefault("step_cost", STEP_COST)
    config = tiny_config(loaded.config, **(drafter or {}))
    return LLM(
        loaded,
        tiny_drafter(config, loaded.model),
        speculative_config=speculative,
        **({"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 128} | options),
    )


def pinned_engine(**options) -> VerifyPin:
    """The same with acceptance pinned at none."""
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * 4}
    return VerifyPin(drafted_engine(speculative=rates, enable_prefix_caching=False, **options))
