"""Thousands of varied prompts from templates and words, for a target to answer.

They cover what people ask: questions, explanations, lists, writing, rewriting, summaries, dialogue,
word problems with random numbers, small Python functions, and mathematics. Every prompt follows
from a seed and its number. Nothing here stems from an evaluation set.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from extkv.dspark.train import prompt_words as words
from extkv.dspark.train.code_prompts import code_prompt
from extkv.dspark.train.math_prompts import algebra_prompt, word_problem

if TYPE_CHECKING:
    from collections.abc import Callable

_REASONING = (
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nThink step by step.",
    " Show your work.",
    " Explain how you found the answer.",
    "",
)


def build_prompt(seed: int, number: int) -> str:
    """Return one prompt; equal arguments give equal prompts.

    Args:
        seed: Seed of the run.
        number: Number of the prompt.
    """
    rng = random.Random(f"{seed}-{number}")  # noqa: S311, no cryptography
    (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
    return kind(rng)


def follow_up(seed: int, number: int) -> str:
    """Return what a user says after an answer."""
    rng = random.Random(f"follow-{seed}-{number}")  # noqa: S311, no cryptography
    return _filled(rng, rng.choice(words.FOLLOW_UPS))


def _filled(rng: random.Random, template: str) -> str:
    topic, other = rng.sample(words.TOPICS, 2)
    name, friend = rng.sample(words.NAMES, 2)
    text = template.format(
        topic=topic,
        other=other,
        name=name,
        friend=friend,
        place=rng.choice(words.PLACES),
        items=rng.choice(words.ITEMS),
        audience=rng.choice(words.AUDIENCES),
        style=rng.choice(words.STYLES),
        count=rng.randint(2, 12),
    )
    return text[0].upper() + text[1:]


def _from(templates: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: _filled(rng, rng.choice(templates))


def _rewriting(rng: random.Random) -> str:
    count = rng.randint(1, 4)
    text = " ".join(_filled(rng, template) for template in rng.sample(words.SENTENCES, count))
    return f"{_filled(rng, rng.choice(words.REWRITES))}\n\n{text}"


def _word_problem(rng: random.Random) -> str:
    return word_problem(rng) + rng.choice(_REASONING)


def _algebra(rng: random.Random) -> str:
    return algebra_prompt(rng) + rng.choice(_REASONING)


_KINDS: dict[Callable[[random.Random], str], float] = {
    _from(words.QUESTIONS): 1.0,
    _from(words.EXPLANATIONS): 1.0,
    _from(words.LISTS): 0.8,
    _from(words.WRITING): 1.2,
    _rewriting: 0.8,
    _word_problem: 2.0,
    _algebra: 1.0,
    code_prompt: 2.0,
}
