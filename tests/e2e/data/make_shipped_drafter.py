"""Makes shipped_drafter.json: hashes of the shipped drafter's files, and its drafts on prompts.

Run it by hand, from the repository root, whenever the weights change:
`PYTHONPATH=tests python tests/e2e/data/make_shipped_drafter.py`. It records nothing if answers
differ without drafts, or drafts with two threads or prompts one by one: then a prompt has a near
tie, and another must take its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from extkv.models import find_default_drafter
from extkv.models.dspark import load_drafter
from support.shipped_drafter import answer, file_hashes, load_target

# Sums are rounded in another order in each.
OTHER_WAYS = {"a second thread": {"num_threads": 2}, "a smaller batch": {"max_num_seqs": 1}}


def main() -> None:
    """Answer the prompts in several ways, compare, and write what all agree on."""
    directory = find_default_drafter()
    target = load_target()
    drafter = load_drafter(directory, target.model)
    answers = answer(target, drafter)
    plain = answer(target)
    for drafted, without in zip(answers, plain, strict=True):
        if drafted.token_ids != without.token_ids:
            sys.exit(f"{drafted.name}: drafts change the answer")
    for words, changes in OTHER_WAYS.items():
        for drafted, other in zip(answers, answer(target, drafter, **changes), strict=True):
            if drafted != other:
                sys.exit(f"{drafted.name}: {words} changes what is accepted")
    made_with = {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    content = {
        "made_with": made_with,
        "files": file_hashes(directory),
        "answers": [found.to_dict() for found in answers],
    }
    path = Path(__file__).with_name("shipped_drafter.json")
    path.write_text(json.dumps(content) + "\n")
    num_rounds = sum(found.num_rounds for found in answers)
    num_accepted = sum(sum(found.num_accepted) for found in answers)
    print(f"accepted length {1 + num_accepted / num_rounds:.3f} in {num_rounds} rounds")  # noqa: T201


if __name__ == "__main__":
    main()
