"""The cards in `hub_cards/`: what their command writes, valid for the Hub, and with snippets that run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_repos import card_errors
from hub_server import LoopbackHub
from huggingface_hub import DatasetCard, ModelCard

from kvbridge_hf import bundled

ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "hub_cards"
sys.path.insert(0, str(ROOT / "scripts"))

import write_cards  # noqa: E402

MODEL_CARDS = sorted([*CARDS.glob("models/*.md"), *CARDS.glob("mappers/*.md")])
# What the Hub knows, as far as these cards use it.
LICENSES = ("apache-2.0",)
TASKS = ("question-answering", "text-generation")
SIZES = ("n<1K", "1K<n<10K")


def test_committed_cards_are_those_the_command_writes():
    written = write_cards.write_cards()
    committed = {path.relative_to(CARDS).as_posix() for path in CARDS.rglob("*") if path.suffix in (".md", ".yaml")}
    assert committed - {"README.md"} == set(written)
    for path, text in written.items():
        assert (CARDS / path).read_text(encoding="utf-8") == text, f"{path}: run python scripts/write_cards.py"


@pytest.mark.parametrize("pair", write_cards.pairs())
def test_bundled_artifacts_carry_todays_card_and_generate_file(pair):
    assert not write_cards.refresh_artifact(pair, check=True), "run python scripts/write_cards.py"


def test_command_finds_and_mends_what_differs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write_cards, "refresh_artifact", lambda pair, check=False: False)
    run = ["write_cards.py", "--output", str(tmp_path), "--namespace", "you"]
    monkeypatch.setattr(sys, "argv", run)
    assert write_cards.main() == 0
    (tmp_path / "models" / "old.md").write_text("of a model that is gone")
    (tmp_path / "collection.yaml").write_text("title: another")
    monkeypatch.setattr(sys, "argv", [*run, "--check"])
    assert write_cards.main() == 1
    assert {"collection.yaml", "models/old.md (no longer there)"} <= set(capsys.readouterr().out.splitlines())
    monkeypatch.setattr(sys, "argv", run)
    assert write_cards.main() == 0
    assert not (tmp_path / "models" / "old.md").exists()
    text = (tmp_path / "mappers" / "tinytown-s-to-m.md").read_text()
    assert "you/tinytown-s-to-m" in text and "kvbridge-hf/" not in text


@pytest.mark.parametrize("path", MODEL_CARDS, ids=lambda path: path.stem)
def test_model_cards_are_valid(path):
    text = path.read_text(encoding="utf-8")
    data = ModelCard(text).data  # strict: a model-index that does not parse is an error
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert card_errors(metadata) == []
    assert data.license in LICENSES and data.library_name in ("transformers", "kvbridge_hf")
    results = data.eval_results or []
    assert results, "a bundled model or mapper was measured"
    for result in results:
        assert result.dataset_type == "kvbridge-hf/tinytown" and result.dataset_split
        assert isinstance(result.metric_value, float)
    # Once more through the Hub's own order of fields loses nothing.
    again = ModelCard(f"---\n{data.to_yaml()}\n---\n").data
    assert again.to_dict() == data.to_dict()
    if path.parent.name == "mappers":
        ends = bundled.split_pair(path.stem.removeprefix("tinytown-"))
        assert data.base_model == [f"kvbridge-hf/tinytown-{end}" for end in ends]
        assert data.kvbridge["source"] == data.base_model[0]
    assert "{{" not in text and "None" not in text and "not named" not in text


def test_dataset_card_is_valid_and_names_files_that_exist():
    text = (CARDS / "datasets" / "tinytown.md").read_text(encoding="utf-8")
    data = DatasetCard(text).data
    assert data.license in LICENSES and set(data.task_categories) <= set(TASKS) and data.language == ["en"]
    assert set(data.size_categories) <= set(SIZES)
    rows = dict(re.findall(r"^\| (\w+ \| \w+) \| ([\d,]+) \|", text, re.MULTILINE))
    for configuration in data.configs:
        for file in configuration["data_files"]:
            lines = (bundled.family_folder() / file["path"]).read_text(encoding="utf-8").splitlines()
            assert rows[f"{configuration['config_name']} | {file['split']}"] == f"{len(lines):,}"
    assert sum(bool(configuration.get("default")) for configuration in data.configs) == 1


def test_collection_fits_the_hubs_limits_and_names_every_card():
    collection = yaml.safe_load((CARDS / "collection.yaml").read_text(encoding="utf-8"))
    assert len(collection["title"]) <= 60 and len(collection["description"]) <= 150
    assert all(len(item["note"]) <= 500 and item["type"] in ("model", "dataset") for item in collection["items"])
    named = {item["id"].split("/")[1] for item in collection["items"]}
    assert named == {path.stem for path in CARDS.glob("*/*.md")}


RUN_SNIPPETS = """
import pathlib, re, sys
for path in sys.argv[1:]:
    for code in re.findall(r"^```python\\n(.*?)^```", pathlib.Path(path).read_text(), re.MULTILINE | re.DOTALL):
        print("#", path, flush=True)
        exec(compile(code, path, "exec"), {"__name__": "snippet"})
"""


def test_snippets_of_all_cards_run_against_a_hub(tmp_path):
    """As somebody would who found the card: a fresh process, an empty cache, everything from the Hub."""
    family = bundled.family_folder()
    with LoopbackHub() as hub:
        for path in CARDS.glob("models/*.md"):
            hub.put(f"kvbridge-hf/{path.stem}", family / "models" / path.stem, card=path.read_text())
        for path in CARDS.glob("mappers/*.md"):
            # The artifact as it is: its card is part of what its manifest seals.
            hub.put(f"kvbridge-hf/{path.stem}", family / "mappers" / path.stem.removeprefix("tinytown-"))
        corpus = tmp_path / "corpus"
        for name in ("questions", "texts"):
            (corpus / name).mkdir(parents=True)
            for file in (family / name).glob("*.jsonl"):
                (corpus / name / file.name).write_bytes(file.read_bytes())
        card = CARDS / "datasets" / "tinytown.md"
        hub.put("kvbridge-hf/tinytown", corpus, "dataset", card=card.read_text())
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", RUN_SNIPPETS, *map(str, [*MODEL_CARDS, card])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    printed = [line for line in done.stdout.splitlines() if line and not line.startswith("#")]
    assert done.stdout.count("# ") == 5 + 2 * 5 + 1
    assert any("The drum is with Mark" in line for line in printed), printed
