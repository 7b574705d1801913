"""Write the cards of the bundled family: models, mappers, the Tinytown corpus, and a collection of all of them.

python scripts/write_cards.py                      # hub_cards/, and the files beside the weights of bundled mappers
python scripts/write_cards.py --check              # changes nothing; exit code 1 where something would change
python scripts/write_cards.py --namespace you --output cards      # for publishing under another name

Run it after a bundled model or mapper has changed. No number is written here: they come from the models' own cards
(measured by examples/tinytown/export.py), the mappers' configs and the files of the corpus.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from kvbridge_hf import bundled
from kvbridge_hf.hub.artifact import current_generate_file, read_config
from kvbridge_hf.hub.inspection import inspect_artifact
from kvbridge_hf.hub.integrity import CARD_NAME, GENERATE_NAME, write_manifest
from kvbridge_hf.hub.model_card import create_model_card, template_path

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "kvbridge-hf"
EXAMPLE = "Karen owns the violin. Karen lives in Oslo. Mark has the drum. Who has the drum? The drum is with"
LICENSE = "apache-2.0"
# configuration of the dataset -> its splits, each a file
CONFIGURATIONS = {
    "questions": {
        "validation": "questions/validation.jsonl",
        "test": "questions/test.jsonl",
        "test_long": "questions/test_long.jsonl",
        "test_diary": "questions/test_diary.jsonl",
    },
    "conversations": {"test": "questions/conversations.jsonl"},
    "texts": {name: f"texts/{name}.jsonl" for name in ("train", "gates", "validation", "test")},
}
COLLECTION = "collection.yaml"


def models() -> list[str]:
    """Names of the bundled models."""
    return sorted(path.name for path in (bundled.family_folder() / "models").iterdir() if path.is_dir())


def pairs() -> list[str]:
    """Names of the bundled mappers."""
    return sorted(path.name for path in (bundled.family_folder() / "mappers").iterdir() if path.is_dir())


def write_cards(namespace: str = NAMESPACE) -> dict[str, str]:
    """All cards for a namespace: path below `hub_cards/` -> text."""
    cards = {f"models/{name}.md": str(model_card(name, namespace)) for name in models()}
    cards |= {f"mappers/tinytown-{pair}.md": str(mapper_card(pair, namespace)) for pair in pairs()}
    cards["datasets/tinytown.md"] = str(dataset_card(namespace))
    cards[COLLECTION] = collection(namespace)
    return {path: text.rstrip("\n") + "\n" for path, text in cards.items()}


def model_card(name: str, namespace: str) -> ModelCard:
    """The measured card of a bundled model, with its place in the family and how to load it."""
    measured = ModelCard.load(bundled.model_path(name) / CARD_NAME)
    # Each row of the table of scores: set, questions, with context, without, chance.
    rows = re.findall(r"^\| (test\w*) \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|", measured.text, re.MULTILINE)
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=f"{namespace}/tinytown",
            dataset_name=f"Tinytown questions, {split}",
            dataset_config="questions",
            dataset_split=split,
            metric_type="accuracy",
            metric_name=f"accuracy {condition} the context",
            metric_value=round(float(percent) / 100, 4),
            metric_args={"num_items": int(count)},
        )
        for split, count, *percents in rows
        for condition, percent in zip(("with", "without"), percents, strict=True)
    ]
    parent = re.search(r"Fine-tuned from (tinytown-\w+)", measured.text)
    data = ModelCardData(
        language="en",
        license=LICENSE,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tinytown", "kvbridge_hf"],
        datasets=[f"{namespace}/tinytown"],
        base_model=f"{namespace}/{parent[1]}" if parent else None,
        base_model_relation="finetune" if parent else None,
        model_name=name,
        eval_results=results,
    )
    before, _, after = measured.text.strip().partition("## Data and budget")
    short = name.removeprefix("tinytown-")
    own = [pair for pair in pairs() if short in bundled.split_pair(pair)]
    links = [f"[{pair}](https://huggingface.co/{namespace}/tinytown-{pair})" for pair in own]
    return ModelCard.from_template(
        data,
        template_path=str(_template("family_model_card.md.jinja")),
        repo_id=f"{namespace}/{name}",
        example=EXAMPLE,
        before_data=before.strip(),
        from_data="## Data and budget" + after,
        mappers="the mappers " + ", ".join(links) if links else "the mappers of the family",
    )


def mapper_card(pair: str, namespace: str) -> ModelCard:
    """The card of a bundled mapper with Hub ids, as `push_to_hub` makes it."""
    folder = bundled.mapper_path(pair)
    source, target = bundled.split_pair(pair)
    config, facts = read_config(folder), inspect_artifact(folder)
    if config.evaluation:
        config.evaluation["dataset_id"] = f"{namespace}/tinytown"
    return create_model_card(
        config,
        repo_id=f"{namespace}/tinytown-{pair}",
        source_id=f"{namespace}/tinytown-{source}",
        target_id=f"{namespace}/tinytown-{target}",
        has_custom_generate=(folder / GENERATE_NAME).is_file(),
        license=LICENSE,
        tags=["tinytown"],
        example=EXAMPLE,
        **_sizes(folder, facts),
    )


def dataset_card(namespace: str) -> DatasetCard:
    """The card of the corpus: question sets, conversations and texts."""
    family = bundled.family_folder()
    splits, kinds = [], Counter()
    for config, files in CONFIGURATIONS.items():
        for split, name in files.items():
            lines = (family / name).read_text(encoding="utf-8").splitlines()
            lengths = [len(str(row.get("context") or row.get("text") or row)) for row in map(json.loads, lines)]
            median = round(statistics.median(lengths))
            splits.append({"config": config, "split": split, "rows": len(lines), "characters": median})
            if (config, split) == ("questions", "test"):
                kinds.update(json.loads(line)["kind"] for line in lines)
    total = sum(row["rows"] for row in splits)
    data = DatasetCardData(
        pretty_name="Tinytown",
        language=["en"],
        license=LICENSE,
        annotations_creators=["machine-generated"],
        language_creators=["machine-generated"],
        multilinguality=["monolingual"],
        source_datasets=["original"],
        size_categories=["1K<n<10K" if total >= 1000 else "n<1K"],
        task_categories=["question-answering", "text-generation"],
        tags=["synthetic", "tinytown", "kv-cache", "kvbridge_hf"],
        configs=[
            {
                "config_name": config,
                "data_files": [{"split": split, "path": name} for split, name in files.items()],
                **({"default": True} if config == "questions" else {}),
            }
            for config, files in CONFIGURATIONS.items()
        ],
    )
    return DatasetCard.from_template(
        data,
        template_path=str(_template("dataset_card.md.jinja")),
        repo_id=f"{namespace}/tinytown",
        model_ids=[f"{namespace}/{name}" for name in models()],
        training_tokens={f"{namespace}/{name}": _training(name)["tokens"] for name in models()},
        splits=splits,
        kinds=", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),
    )


def collection(namespace: str) -> str:
    """Title, description and items of the Hub collection, as YAML; the Hub takes 60, 150 and 500 characters."""
    items: list[dict[str, str]] = [
        {"type": "dataset", "id": f"{namespace}/tinytown", "note": "What the models read: questions and texts."}
    ]
    for name in models():
        config = json.loads((bundled.model_path(name) / "config.json").read_text(encoding="utf-8"))
        shape = f"{config['model_type']}, {config['num_hidden_layers']} layers, width {config['hidden_size']}."
        items.append({"type": "model", "id": f"{namespace}/{name}", "note": shape})
    for pair in pairs():
        source, target = bundled.split_pair(pair)
        note = f"Maps the KV cache of tinytown-{source} to that of tinytown-{target}."
        items.append({"type": "model", "id": f"{namespace}/tinytown-{pair}", "note": note})
    content: dict[str, Any] = {
        "title": "Tinytown: KV-cache handoffs",
        "namespace": namespace,
        "description": "Small models that share a tokenizer, mappers between their KV caches (kvbridge_hf), and the "
        "corpus that judges them.",
        "items": items,
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)


def refresh_artifact(pair: str, check: bool = False) -> bool:
    """Bring a bundled mapper's card and `generate.py` up to what `save_pretrained` writes today; True if changed.

    Config and weights stay as they are.
    """
    folder = bundled.mapper_path(pair)
    config, has_generate = read_config(folder), (folder / GENERATE_NAME).is_file()
    sizes = _sizes(folder, inspect_artifact(folder))
    wanted = {CARD_NAME: str(create_model_card(config, has_custom_generate=has_generate, **sizes)).encode()}
    if has_generate:
        wanted[GENERATE_NAME] = current_generate_file()
    stale = {name: data for name, data in wanted.items() if (folder / name).read_bytes() != data}
    if stale and not check:
        for name, data in stale.items():
            (folder / name).write_bytes(data)
        write_manifest(folder)
    return bool(stale)


def _sizes(folder: Path, facts: dict[str, Any]) -> dict[str, int]:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"num_parameters": facts["parameters"], "num_bytes": weights}


def _training(name: str) -> dict[str, Any]:
    return json.loads((bundled.model_path(name) / "training.json").read_text(encoding="utf-8"))


def _template(name: str) -> Path:
    return template_path().parent / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default=NAMESPACE, help="user or organisation of the Hub")
    parser.add_argument("--output", type=Path, default=ROOT / "hub_cards", help="folder to write to")
    parser.add_argument("--check", action="store_true", help="change nothing; say what would change")
    args = parser.parse_args()
    # First the artifacts: a card says whether one carries generate.py.
    changed = [f"mappers/{pair}" for pair in pairs() if refresh_artifact(pair, args.check)]
    cards = write_cards(args.namespace)
    for path, text in cards.items():
        place = args.output / path
        if not place.is_file() or place.read_text(encoding="utf-8") != text:
            changed.append(path)
            if not args.check:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8", newline="\n")
    gone = [
        path
        for path in args.output.rglob("*")
        if path.parent != args.output and path.suffix == ".md"
        if path.relative_to(args.output).as_posix() not in cards
    ]
    for path in gone:
        changed.append(f"{path.relative_to(args.output)} (no longer there)")
        if not args.check:
            path.unlink()
    print("\n".join(changed) or "Everything is as it should be.")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
