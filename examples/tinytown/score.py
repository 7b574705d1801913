"""Answer accuracy of the Tinytown models with and without the context, overall and by kind of question.

python examples/tinytown/score.py examples/tinytown/models --questions examples/tinytown/questions/test.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict], with_context: bool, batch_size: int = 32) -> dict[str, float]:
    """Share of questions whose right choice is the most likely of the choices, by kind and over all."""
    prompts = [f"{row['context']} {row['question']}" if with_context else row["question"] for row in rows]
    right = defaultdict(list)
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    for start in range(0, len(rows), batch_size):
        chunk = order[start : start + batch_size]
        texts = [prompts[i] for i in chunk]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        logits = model(**inputs, position_ids=positions, logits_to_keep=1).logits[:, -1]
        for row, i in zip(logits, chunk, strict=True):
            ids = [tokenizer.encode(choice, add_special_tokens=False)[0] for choice in rows[i]["choices"]]
            hit = int(row[ids].argmax()) == rows[i]["answer"]
            right[rows[i]["kind"]].append(hit)
            right["all"].append(hit)
    return {kind: sum(hits) / len(hits) for kind, hits in sorted(right.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="a model's folder, or a folder of models")
    parser.add_argument("--questions", type=Path, required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.questions.open(encoding="utf-8")]
    folders = [args.models] if (args.models / "config.json").exists() else sorted(args.models.glob("*/"))
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        seen, unseen = (accuracy(model, tokenizer, rows, with_context) for with_context in (True, False))
        chance = sum(1 / len(row["choices"]) for row in rows) / len(rows)
        print(
            json.dumps(
                {
                    "model": folder.name,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "with_context": round(seen.pop("all"), 4),
                    "without_context": round(unseen["all"], 4),
                    "chance": round(chance, 4),
                    "by_kind": {kind: round(value, 3) for kind, value in seen.items()},
                }
            )
        )


if __name__ == "__main__":
    main()
