"""The Python of README and docs runs on the bundled family, their commands exist, their links lead somewhere, and the
examples do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import LoopbackHub
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.main import get_command

from kvbridge_hf import KVBridgeMapper, bundled
from kvbridge_hf.cli import app
from kvbridge_hf.demo import read_texts

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")

# Numbers of a page that make a snippet slow, and those with which it runs here.
SHORTER = {"fitting.md": [("steps=200", "steps=2, learning_rate=1e-4"), ("seeds=(0, 1, 2)", "seeds=(0,)")]}


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def model(name: str):
    return AutoModelForCausalLM.from_pretrained(bundled.model_path(name), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.model_path("m"))


@pytest.fixture(scope="module")
def models():
    return {name: model(name) for name in ("s", "m", "l")}


def token_batches(tokenizer, name: str) -> list[torch.Tensor]:
    """Three batches of eight sequences of 64 tokens."""
    tokens = [token for text in read_texts(bundled.text_path(name), 40) for token in tokenizer(text)["input_ids"]]
    return list(torch.tensor(tokens[: 3 * 8 * 64]).reshape(3, 8, 64))


@pytest.fixture
def names(models, tokenizer):
    """What the pages take as given."""
    prompt = (
        "Alice lives in Rome. Bob has a friend named Carl. Carl owns the lamp. Where does Alice live? Alice lives in"
    )
    return {
        "source": models["s"],
        "target": models["m"],
        "tokenizer": tokenizer,
        "mapper": KVBridgeMapper.from_pretrained(str(bundled.mapper_path("s-to-m")), dtype=torch.float32),
        "inputs": tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
        "batches": token_batches(tokenizer, "train"),
        "other_batches": token_batches(tokenizer, "validation"),
        "small": models["s"],
        "middle": models["m"],
        "large": models["l"],
    }


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_snippets_run(page, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # the README names folders of the checkout
    text = "\n".join(blocks(page, "python"))
    for long, short in SHORTER.get(page.name, []):
        assert long in text
        text = text.replace(long, short)
    namespace = {"__name__": page.stem} | ({} if page.name == "README.md" else names)
    exec(compile(text, str(page), "exec"), namespace)


def command_lines(page: Path) -> list[str]:
    return [line.strip() for code in blocks(page, "bash") for line in code.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    commands = get_command(app).commands
    inline = re.findall(r"`((?:kvbridge|python) [^`]+)`", page.read_text(encoding="utf-8"))
    for line in [*command_lines(page), *inline]:
        for script in re.findall(r"\b((?:scripts|examples)/[\w/]+\.(?:py|sh))", line):
            assert (ROOT / script).is_file(), line
        if match := re.match(r"kvbridge ([a-z-]+)", line):
            assert match[1] in commands, line
            known = {option for parameter in commands[match[1]].params for option in parameter.opts}
            used = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", line))
            assert used - {"--help"} <= known, f"{line}: no option {sorted(used - known)}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for path, anchor in LINK.findall(prose):
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {path}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name} links to #{anchor} of {linked.name}"


def run_example(name: str, monkeypatch, capsys, *arguments: str) -> str:
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    capsys.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


def test_quick_start(monkeypatch, capsys):
    lines = run_example("quick_start", monkeypatch, capsys).splitlines()
    native, handed, cached = (line.partition(":")[2].strip() for line in lines[:3])
    assert native and handed == cached
    assert re.fullmatch(r"ok: [1-9]\d* tokens mapped, [1-9]\d* read by the target itself", lines[3])


def test_escalate_mid_conversation(monkeypatch, capsys):
    output = run_example("escalate_mid_conversation", monkeypatch, capsys)
    (switch,) = [line for line in output.splitlines() if line.startswith("large:")]
    assert int(re.search(r"(\d+) mapped", switch)[1]) > 50
    assert "origin='small'" in output


def test_route_by_retention(monkeypatch, capsys):
    output = run_example("route_by_retention", monkeypatch, capsys, "--questions", "6", "--min-retention", "0")
    assert sum(int(count) for count in re.findall(r" of (\d+) right", output)) == 6
    native = run_example("route_by_retention", monkeypatch, capsys, "--questions", "6", "--min-retention", "9")
    assert "(ok)" not in native  # no mapper is that good, so the large model reads for itself


def test_calibrate_and_publish(tmp_path):
    with LoopbackHub() as hub:
        arguments = ["--sequences", "24", "--gate-sequences", "24", "--questions", "8", "--repo-id", "tester/s-to-m"]
        process = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "calibrate_and_publish.py"), *arguments],
            env={**os.environ, **hub.environment(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert process.returncode == 0, process.stderr
        assert "mappers on the Hub: ['tester/s-to-m']" in process.stdout
        pushed = hub.files("tester/s-to-m")
    assert {"config.json", "model.safetensors", "README.md", "kvbridge_manifest.json"} <= set(pushed)
    assert b"gap_recovered" in pushed["config.json"]


def test_evaluate_with_lm_eval(monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="the harness is optional")
    output = run_example("evaluate_with_lm_eval", monkeypatch, capsys, "--limit", "4")
    scores = dict(re.findall(r"^(target alone|source alone|handoff) +([01]\.\d+)", output, re.MULTILINE))
    assert len(scores) == 3
    assert "'ok': 4" in output


def test_lm_eval_example_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["evaluate_with_lm_eval.py"])
    with pytest.raises(SystemExit, match="kvbridge_hf\\[eval\\]"):
        runpy.run_path(str(ROOT / "examples" / "evaluate_with_lm_eval.py"), run_name="__main__")
