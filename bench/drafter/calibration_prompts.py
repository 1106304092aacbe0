"""Writes the prompts of calibration: two sets without a common prompt, to fit and to check.

Both take from GSM8K, HumanEval, MATH-500 and MT-Bench in turns, MT-Bench whole and the others past
the prompts whose accepted length is measured. Run from the repository root:
`python -m bench.drafter.calibration_prompts PROMPTS OUT`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# First and last line that is taken of each file.
RANGES = {"gsm8k": (100, 260), "humaneval": (80, 164), "math500": (100, 260), "mt-bench": (0, 80)}
SETS = ("calibrate-fit", "calibrate-check")


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prompts", type=Path, help="directory of the four JSON-lines files")
    parser.add_argument("out", type=Path, help="directory to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for first, name in enumerate(SETS):
        lines: list[str] = []
        for file, (begin, end) in RANGES.items():
            text = (arguments.prompts / f"{file}.jsonl").read_text(encoding="utf-8")
            lines += text.splitlines()[begin:end][first::2]
        (arguments.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
