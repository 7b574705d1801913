"""Fit and judge a mapper for every pair of the Tinytown family; prints the table that stands in the README.

python scripts/evaluate_family.py                     # loads the bundled mappers
python scripts/evaluate_family.py --fit --save        # fits them anew and replaces the bundled ones
python scripts/evaluate_family.py --fit --preset quality    # other settings; some minutes a pair
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from lookup_texts import LOOKUPS, lookup_texts
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from kvbridge_hf import Gates, HandoffPolicy, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.calibration.parts import learns_choice
from kvbridge_hf.demo import fit_bundled, load_model, read_texts
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report, load_questions, split_documents
from kvbridge_hf.mappers.config import FitConfig

PAIRS = ("s-to-m", "m-to-l", "l-to-s", "w-to-m", "m-to-m-diary")
CONDITIONS = {
    "target": "target alone",
    "handoff": "**handoff**",
    "source": "source alone",
    "unmapped": "unmapped",
    "mismatched": "other prompt's",
    "native_only": "native parts only",
    "no_context": "no context",
}


def judge_pair(pair: str, fit: bool, preset: str, save: bool) -> dict:
    """Report of one pair, with the time that its fit took."""
    source_name, target_name = bundled.split_pair(pair)
    source, target = load_model(bundled.model_path(source_name)), load_model(bundled.model_path(target_name))
    tokenizer = AutoTokenizer.from_pretrained(str(bundled.model_path(target_name)))
    started = time.perf_counter()
    if fit:
        lookups = lookup_texts(tokenizer, LOOKUPS) if learns_choice(FitConfig.preset(preset)) else None
        mapper = fit_bundled(source, target, tokenizer, preset, lookups)
    else:
        mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path(pair)), dtype=torch.float32)
    seconds = time.perf_counter() - started
    mapper = mapper.to(target.device)
    questions = load_questions(bundled.questions_path("test_diary" if target_name == "m-diary" else "test"))
    documents = split_documents(
        [tokenizer(text)["input_ids"] for text in read_texts(bundled.text_path("test"))], continuation_tokens=32
    )
    judge = Judge(source, target, questions=questions, documents=documents, tokenizer=tokenizer)
    # Without gates: a fallback would be judged as a handoff that went well.
    policy = HandoffPolicy(gates=Gates.off())
    handoff = BridgeHandoff(KVBridge(source, mapper, policy, tokenizer=tokenizer), target)
    report = build_report(judge.judge(handoff))
    report["fit_seconds"] = seconds if fit else None
    report["mapper_parameters"] = sum(parameter.numel() for parameter in mapper.parameters())
    if save:
        folder = bundled.family_folder() / "mappers" / pair
        shutil.rmtree(folder, ignore_errors=True)
        mapper.config.evaluation = _for_card(report, pair)
        mapper.save_pretrained(folder)
    return report


def _for_card(report: dict, pair: str) -> dict:
    """What of a report goes into the artifact."""
    kept = {name: report[name] for name in ("headline", "conditions", "cost", "data", "bootstrap")}
    return {"dataset": "Tinytown", "split": "test", "command": f"python scripts/evaluate_family.py {pair}", **kept}


def _cell(report: dict, condition: str, metric: str, percent: bool) -> str:
    entry = report["conditions"].get(condition, {}).get(metric)
    if entry is None:
        return "-"
    return f"{entry['estimate']:.1%}" if percent else f"{entry['estimate']:.3f}"


def table(reports: dict[str, dict]) -> str:
    """KL and accuracy of every condition of every pair, as Markdown."""
    lines = ["| pair | measure | " + " | ".join(CONDITIONS.values()) + " | gap recovered | share of prefill |"]
    lines.append("| --- | --- |" + " ---: |" * (len(CONDITIONS) + 2))
    for pair, report in reports.items():
        gap = report["headline"]["gap_recovered"]
        share = report["cost"]["share_of_prefill"]
        recovered = "-"
        if gap["estimate"] is not None:
            recovered = f"{gap['estimate']:.0%}"
            if gap["low"] is not None:
                recovered += f" [{gap['low']:.0%}, {gap['high']:.0%}]"
        for metric, label, percent in (("accuracy", "answers right", True), ("kl", "KL (nats/token)", False)):
            cells = [_cell(report, condition, metric, percent) for condition in CONDITIONS]
            tail = [recovered, "-" if share is None else f"{share:.1%}"] if percent else ["", ""]
            lines.append(f"| {pair if percent else ''} | {label} | " + " | ".join(cells + tail) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=list(PAIRS), metavar="PAIR")
    parser.add_argument("--fit", action="store_true", help="fit mappers now instead of loading the bundled ones")
    parser.add_argument("--preset", default="default", help="settings of the fit")
    parser.add_argument("--save", action="store_true", help="replace the bundled mappers by these")
    parser.add_argument("--json", type=Path, help="also write the reports to this file")
    args = parser.parse_args()
    reports = {}
    for pair in tqdm(args.pairs, desc="pairs", disable=None):
        reports[pair] = judge_pair(pair, args.fit, args.preset, args.save)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1))
    print(table(reports))


if __name__ == "__main__":
    main()
