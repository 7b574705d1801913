"""Copy trained models into the repository, each scored and with a model card.

    python examples/tinytown/export.py runs/tinytown examples/tinytown/models

The card's numbers are measured here, on the bundled test questions.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from family import FAMILY
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from score import accuracy
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
# Two models were trained while the curriculum was being found.
FOUND_ON_THE_WAY = (
    " The lessons were changed while this model was trained, so part of its tokens come from earlier versions of "
    "them,\nand the script does not give exactly these weights again."
)
NOTES = {
    "tinytown-m": FOUND_ON_THE_WAY,
    "tinytown-l": f"{FOUND_ON_THE_WAY} The learning rate was raised again for lessons that were added late.",
}
QUESTION_SETS = ("test", "test_long", "test_diary")
CARD = """---
{card_data}
---

# {name}

A {architecture} language model of the Tinytown family with {parameters:,} parameters: {layers} layers, width
{hidden}, {kv_heads} KV heads of {head_dim}. It was made to measure KV-cache handoffs between models that share a
tokenizer and were trained apart. It knows nothing but Tinytown: short English about a simulated world, where every
question is answered by the text before it.

## Data and budget

Trained on {tokens:,} tokens (padding not counted) that `examples/tinytown/corpus.py` generates from a seed; no
outside data. {origin} {steps:,} steps of about 2,048 tokens, AdamW, peak learning rate {peak_lr:g}, {minutes:.0f}
minutes on one core of a shared two-core machine.{note}

## Scores

Share of right answers among {choices} choices, on test worlds (people, fillers and half of the question templates
are not in the training data). Questions sit behind contexts of 100 to 320 tokens (`test`), 512 to 1,400
(`test_long`), or in the diary genre (`test_diary`).

| set | questions | with context | without context | chance |
| --- | ---: | ---: | ---: | ---: |
{rows}

By kind of question (`test`, with context): {kinds}.

Measured by `python examples/tinytown/score.py` in float32.

## Limits

A toy: outside Tinytown its output means nothing. Apache-2.0.
"""


def measure(folder: Path) -> dict[str, dict]:
    """Accuracy on each question set with and without the context."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = {}
    for name in QUESTION_SETS:
        rows = [json.loads(line) for line in (HERE / "questions" / f"{name}.jsonl").open(encoding="utf-8")]
        scores[name] = {
            "questions": len(rows),
            "with": accuracy(model, tokenizer, rows, True),
            "without": accuracy(model, tokenizer, rows, False)["all"],
            "chance": sum(1 / len(row["choices"]) for row in rows) / len(rows),
        }
    return scores


def write_card(name: str, folder: Path) -> None:
    member, scores = FAMILY[name], measure(folder)
    training = json.loads((folder / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="tinytown",
            dataset_name=f"Tinytown questions ({name_of_set})",
            metric_type="accuracy",
            metric_name=f"accuracy {condition} context",
            metric_value=round(score["with"]["all"] if condition == "with" else score["without"], 4),
        )
        for name_of_set, score in scores.items()
        for condition in ("with", "without")
    ]
    data = ModelCardData(
        language="en",
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tinytown", "kvbridge_hf"],
        model_name=name,
        eval_results=results,
    )
    rows = "\n".join(
        f"| {name_of_set} | {s['questions']} | {s['with']['all']:.1%} | {s['without']:.1%} | {s['chance']:.1%} |"
        for name_of_set, s in scores.items()
    )
    kinds = {kind: value for kind, value in scores["test"]["with"].items() if kind != "all"}
    if member.starts_from:
        origin = f"Fine-tuned from {member.starts_from} on the {member.genre} genre."
    else:
        origin = "Trained from scratch."
    card = CARD.format(
        card_data=data.to_yaml(),
        name=name,
        architecture=type(model).__name__,
        parameters=model.num_parameters(),
        layers=member.layers,
        hidden=member.hidden,
        kv_heads=member.kv_heads,
        head_dim=member.head_dim,
        tokens=training["tokens"],
        steps=training["step"],
        peak_lr=member.peak_lr,
        minutes=training["seconds"] / 60,
        origin=origin,
        note=NOTES.get(name, ""),
        choices=8,
        rows=rows,
        kinds=", ".join(f"{kind} {value:.0%}" for kind, value in kinds.items()),
    )
    ModelCard(card).save(folder / "README.md")
    print(name, {set_name: round(s["with"]["all"], 4) for set_name, s in scores.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", nargs="*", default=list(FAMILY), help="names of models")
    args = parser.parse_args()
    for name in args.only:
        trained = args.runs / name / "model"
        if not trained.is_dir():
            print(f"{name}: not trained yet")
            continue
        folder = args.models / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained, folder)
        write_card(name, folder)


if __name__ == "__main__":
    main()
