"""Makes smollm2_greedy.json: greedy tokens of transformers for ten chat prompts, in float32.

Run from the repository root: `python tests/e2e/data/make_smollm2_greedy.py PROMPTS`, where PROMPTS
is a folder with gsm8k.jsonl, humaneval.jsonl, math500.jsonl and mt-bench.jsonl, one JSON object
with `turns` a line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from extkv.models import find_default_model, load_model

LINES = {"gsm8k": (1, 3, 33), "humaneval": (23,), "math500": (3, 16, 31), "mt-bench": (0, 30, 36)}
MAX_TOKENS = 64


def main() -> None:
    """Answer each prompt alone and write tokens of prompts and answers, a stop token included."""
    path = find_default_model()
    loaded = load_model(path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    cases = []
    for name, lines in LINES.items():
        texts = (Path(sys.argv[1]) / f"{name}.jsonl").read_text().splitlines()
        for line in lines:
            turn = json.loads(texts[line])["turns"][0]
            prompt = loaded.chat_template.render([{"role": "user", "content": turn}])
            token_ids = torch.tensor([loaded.tokenizer.encode(prompt, add_special_tokens=False)])
            output = reference.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=MAX_TOKENS,
                eos_token_id=sorted(loaded.tokenizer.stop_token_ids),
                do_sample=False,
                pad_token_id=0,
            )[0, token_ids.shape[1] :]
            cases.append(
                {
                    "name": f"{name}-{line}",
                    "prompt_token_ids": token_ids[0].tolist(),
                    "token_ids": output.tolist(),
                }
            )
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = {"made_with": made_with, "cases": cases}
    target = Path(__file__).with_name("smollm2_greedy.json")
    target.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
