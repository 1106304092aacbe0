"""Small Python functions to write: random steps over lists and texts, with examples that hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from extkv.dspark.train import prompt_words as words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence


class _Step(NamedTuple):
    """One step of a function: how it is called in a name and in a sentence, and what it does."""

    name: str
    sentence: str
    apply: Callable[[list[int]], list[int]]


class _Result(NamedTuple):
    """The last step: name, sentence, type of the result, and what it does."""

    name: str
    sentence: str
    type_name: str
    apply: Callable[[list[int]], object]


def _running(values: list[int]) -> list[int]:
    return [sum(values[: index + 1]) for index in range(len(values))]


def _divisible(values: list[int], divisor: int) -> list[int]:
    return [value for value in values if value % divisor == 0]


def _counts(parts: Sequence[str]) -> dict[str, int]:
    return {part: list(parts).count(part) for part in dict.fromkeys(parts)}


_STEPS = (
    _Step("even", "keep the even numbers", lambda v: [x for x in v if x % 2 == 0]),
    _Step("odd", "keep the odd numbers", lambda v: [x for x in v if x % 2]),
    _Step("positive", "drop negative numbers and zeros", lambda v: [x for x in v if x > 0]),
    _Step("squared", "square every number", lambda v: [x * x for x in v]),
    _Step("doubled", "double every number", lambda v: [2 * x for x in v]),
    _Step("sorted", "sort the numbers", sorted),
    _Step("reversed", "reverse their order", lambda v: v[::-1]),
    _Step("unique", "remove duplicates, keeping the first of each", lambda v: [*dict.fromkeys(v)]),
    _Step("absolute", "replace numbers by their absolute values", lambda v: [abs(x) for x in v]),
    _Step("every_other", "keep every other number, beginning with the first", lambda v: v[::2]),
    _Step("shifted", "add one to every number", lambda v: [x + 1 for x in v]),
    _Step("running", "replace each number by the sum up to it", _running),
    _Step("by_three", "keep numbers that can be divided by three", lambda v: _divisible(v, 3)),
)
_RESULTS = (
    _Result("sum", "return their sum", "int", sum),
    _Result("count", "return how many there are", "int", len),
    _Result("list", "return the list", "List[int]", list),
    _Result(
        "largest", "return the largest, or None", "Optional[int]", lambda v: max(v, default=None)
    ),
    _Result(
        "smallest", "return the smallest, or None", "Optional[int]", lambda v: min(v, default=None)
    ),
    _Result(
        "mean", "return their mean, 0.0 for none", "float", lambda v: sum(v) / len(v) if v else 0.0
    ),
    _Result("text", "join them with commas", "str", lambda v: ",".join(map(str, v))),
    _Result("last", "return the last two", "List[int]", lambda v: v[-2:]),
    _Result("is_any", "return whether there is any", "bool", bool),
)
_TEXT_TASKS = (
    ("count_vowels", "the number of vowels in it", "int", lambda t: sum(c in "aeiou" for c in t)),
    ("reverse_words", "its words in reverse order", "str", lambda t: " ".join(t.split()[::-1])),
    ("is_palindrome", "whether it reads the same backwards", "bool", lambda t: t == t[::-1]),
    ("longest_word", "its longest word", "str", lambda t: max(t.split(), key=len)),
    ("capitalize_words", "the text with every word capitalized", "str", str.title),
    ("count_words", "how often each word occurs", "Dict[str, int]", lambda t: _counts(t.split())),
    (
        "remove_vowels",
        "the text without vowels",
        "str",
        lambda t: "".join(c for c in t if c not in "aeiou"),
    ),
    (
        "first_letters",
        "the first letter of every word",
        "str",
        lambda t: "".join(w[0] for w in t.split()),
    ),
    (
        "count_letters",
        "how often each letter occurs",
        "Dict[str, int]",
        lambda t: _counts(t.replace(" ", "")),
    ),
    ("swap_case", "the text with upper and lower case swapped", "str", str.swapcase),
)
_TASKS = (
    "Write a Python function that computes the {n}th {thing}.",
    "Write a Python class for {place} with methods to add, remove and list {items}.",
    "Write a Python script that reads a file with {items} and prints the {n} most frequent ones.",
    "Explain what a {structure} is and implement one in Python.",
    "Write a function in Python that checks if a number is a {thing}.",
    "Implement {algorithm} in Python and explain its complexity.",
    "Write a SQL query that lists the {n} most expensive {items} of {place}.",
    "Write a small web page in HTML about {topic}.",
    "Write a C++ program that asks for {n} numbers and prints the largest.",
    "Write a JavaScript function that returns a random element of an array of {items}.",
    "What does this Python code print?\n```python\nfor i in range({n}):\n    print(i * {m})\n```",
    "Find the bug:\n```python\ndef mean(values):\n    return sum(values) / {m}\n```",
)
_THINGS = ("prime number", "Fibonacci number", "perfect square", "triangular number", "palindrome")
_STRUCTURES = ("stack", "queue", "linked list", "binary search tree", "hash table", "heap", "graph")
_ALGORITHMS = (
    "binary search", "bubble sort", "merge sort", "quicksort", "breadth-first search",
    "Euclid's algorithm", "the sieve of Eratosthenes", "Dijkstra's algorithm", "insertion sort",
)  # fmt: skip
_OPENINGS = (
    "Write a solution to the following problem and make sure that it passes the tests:",
    "Complete this Python function:",
    "Implement the following function.",
    "Finish the code below.",
)


def code_prompt(rng: random.Random) -> str:
    """Return a programming task; half of them are functions with examples that hold."""
    kind = rng.random()
    if kind < 0.45:  # noqa: PLR2004
        return _stub(rng, *_list_function(rng))
    if kind < 0.6:  # noqa: PLR2004
        return _stub(rng, *_text_function(rng))
    return rng.choice(_TASKS).format(
        n=rng.randint(3, 20),
        m=rng.randint(1, 9),
        thing=rng.choice(_THINGS),
        items=rng.choice(words.ITEMS),
        place=rng.choice(words.PLACES),
        topic=rng.choice(words.TOPICS),
        structure=rng.choice(_STRUCTURES),
        algorithm=rng.choice(_ALGORITHMS),
    )


def _list_function(rng: random.Random) -> tuple[str, str, str, list[tuple[object, object]]]:
    steps: Sequence[_Step] = rng.sample(_STEPS, rng.randint(1, 3))
    result = rng.choice(_RESULTS)
    name = "_".join([*(step.name for step in steps), result.name])
    sentences = [*(step.sentence for step in steps), result.sentence]
    text = ", then ".join(sentences)
    examples: list[tuple[object, object]] = []
    for _ in range(rng.randint(1, 3)):
        values = [rng.randint(-9, 20) for _ in range(rng.randint(1, 7))]
        found = values
        for step in steps:
            found = step.apply(found)
        examples.append((values, result.apply(found)))
    head = f"def {name}(numbers: List[int]) -> {result.type_name}:"
    return head, f"From a list of numbers, {text}.", name, examples


def _text_function(rng: random.Random) -> tuple[str, str, str, list[tuple[object, object]]]:
    name, what, type_name, apply = rng.choice(_TEXT_TASKS)
    examples: list[tuple[object, object]] = []
    for _ in range(rng.randint(1, 3)):
        text = " ".join(rng.sample(words.ITEMS, rng.randint(1, 4)))
        examples.append((text, apply(text)))
    return f"def {name}(text: str) -> {type_name}:", f"Return {what}.", name, examples


def _stub(
    rng: random.Random, head: str, sentence: str, name: str, examples: list[tuple[object, object]]
) -> str:
    shown = "".join(f"    >>> {name}({given!r})\n    {found!r}\n" for given, found in examples)
    code = f'{head}\n    """ {sentence}\n{shown}    """\n'
    if "List" in head or "Dict" in head or "Optional" in head:
        code = f"from typing import Dict, List, Optional\n\n\n{code}"
    return f"{rng.choice(_OPENINGS)}\n```python\n{code}\n```"
