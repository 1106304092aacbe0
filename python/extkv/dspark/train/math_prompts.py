"""Word problems and exercises with random numbers and situations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from extkv.dspark.train import prompt_words as words

if TYPE_CHECKING:
    import random

_STARTS = (
    "{name} has {a} {items}.",
    "{name} buys {a} {items} for ${p} each.",
    "At {place}, {a} {items} are sold every day for ${p} each.",
    "{name} makes {a} {items} per hour and works {b} hours a day.",
    "A box holds {a} {items}, and {name} has {b} boxes.",
    "{name} saved ${p} a week for {b} weeks.",
    "{name} drives {a} miles at {c} miles per hour.",
    "There are {a} {items} in {place}, and {b} times as many {others}.",
    "{name} is {b} years older than {friend}, who is {c} years old.",
    "A train leaves at {b} o'clock and travels {c} miles every hour.",
    "{name} reads {a} pages on Monday and twice as many on Tuesday.",
    "{place} has {a} visitors on a normal day and {c} percent more on Sundays.",
)
_MIDDLES = (
    "{friend} gives {name} {b} more.",
    "Then {name} gives a third of them to {friend}.",
    "Half of them are broken.",
    "{name} sells {b} of them for ${q} each.",
    "The next day {name} gets {c} more than the day before.",
    "{friend} has twice as many.",
    "After that, {c} percent of them are lost.",
    "{name} spends ${q} on lunch.",
    "{friend} takes {b} away every day for {d} days.",
    "{name} divides the rest equally among {d} friends.",
    "Shipping costs ${q} for every {d} {items}.",
    "The price goes up by {c} percent.",
)
_ENDS = (
    "How many {items} does {name} have left?",
    "How much money does {name} have in the end?",
    "How many are there in total?",
    "How much does {name} pay altogether?",
    "How many more does {name} have than {friend}?",
    "How long does it take?",
    "How much does {name} earn in a week?",
    "How many does each of them get?",
    "What is the total cost in dollars?",
    "What is the difference between the two?",
)


def word_problem(rng: random.Random) -> str:
    """Return a problem of two to five sentences; it need not have an answer."""
    name, friend = rng.sample(words.NAMES, 2)
    items, others = rng.sample(words.ITEMS, 2)
    parts = [
        rng.choice(_STARTS),
        *rng.sample(_MIDDLES, rng.randint(0, 3)),
        rng.choice(_ENDS),
    ]
    text = " ".join(parts).format(
        name=name,
        friend=friend,
        items=items,
        others=others,
        place=rng.choice(words.PLACES),
        a=rng.choice((rng.randint(4, 40), rng.randint(40, 600))),
        b=rng.randint(2, 12),
        c=rng.choice((10, 20, 25, 30, 40, 50, 60, 75)),
        d=rng.randint(2, 7),
        p=rng.randint(1, 30),
        q=rng.randint(2, 20),
    )
    return text[0].upper() + text[1:]


def algebra_prompt(rng: random.Random) -> str:
    """Return an exercise in arithmetic, algebra, geometry or number theory."""
    a, b, c = (rng.randint(2, 19) for _ in range(3))
    x = rng.choice("xyzn")
    big, less = rng.randint(20, 999), rng.randint(3, 60)
    choices = (
        f"Solve for ${x}$: ${a}{x} + {b} = {a * c + b}$.",
        f"Find all real solutions of ${x}^2 - {a + b}{x} + {a * b} = 0$.",
        f"What is ${big} \\times {less}$?",
        f"What is the remainder when {big} is divided by {a}?",
        f"Compute $\\frac{{{a}}}{{{b}}} + \\frac{{{c}}}{{{a}}}$ and simplify.",
        f"What is the greatest common divisor of {a * c * 2} and {b * c * 3}?",
        f"A rectangle is {a} cm wide and {b} cm long. What are its area and its perimeter?",
        f"A circle has radius {a}. What is its area?",
        f"The legs of a right triangle are {3 * a} and {4 * a}. How long is the hypotenuse?",
        f"How many ways are there to choose {min(a, 4)} people out of {b + 4}?",
        f"Two dice are rolled. What is the probability that the sum is {a % 11 + 2}?",
        f"If $f({x}) = {a}{x}^2 - {b}{x} + {c}$, what is $f({rng.randint(-4, 6)})$?",
        f"Factor the polynomial ${x}^2 + {a + b}{x} + {a * b}$.",
        f"The average of {a}, {b} and {c} and a fourth number is {a + b}. Find that number.",
        f"What is {c * 5} percent of {big}?",
        f"Simplify $\\sqrt{{{a * a * b}}}$.",
        f"Evaluate $\\log_2 {2 ** rng.randint(2, 10)}$.",
        f"What is the {b}th term of the sequence {a}, {a + c}, {a + 2 * c}, ...?",
        f"Convert {big} from base 10 to base {rng.choice((2, 3, 5, 8))}.",
        f"Let ${x} + y = {a + b}$ and ${x} - y = {a - b}$. Find ${x}$ and $y$.",
        f"How many positive divisors does {math.lcm(a, b)} have?",
        f"Differentiate $f({x}) = {a}{x}^{b} + {c}{x}$.",
    )
    return rng.choice(choices)
