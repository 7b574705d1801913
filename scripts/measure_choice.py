"""What a choice of the tokens to repair is worth: accuracy and cost on the questions alone, as a Markdown table.

python scripts/measure_choice.py --split validation        # what settings are chosen by
python scripts/measure_choice.py --split test              # what is reported

The study (`study_methods.py`) counts the cost of questions and documents together; here it is that of the questions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lookup_texts import FAMILY, lookup_texts
from transformers import AutoTokenizer

from kvbridge_hf import HandoffPolicy, KVBridge, KVBridgeMapper, bundled, fit_mapper
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report, load_questions
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers.config import FitConfig


def row(judge: Judge, bridge: KVBridge, name: str) -> str:
    """One line of the table."""
    report = build_report(judge.judge(BridgeHandoff(bridge, judge.target_model), controls=()))
    accuracy = report["conditions"]["handoff"]["accuracy"]
    gap, cost = report["headline"]["gap_recovered"], report["cost"]
    parts = " + ".join(f"{cost[part]:.1%}" for part in ("map_share", "native_share", "repair_share", "choice_share"))
    return (
        f"| {name} | {accuracy['estimate']:.1%} [{accuracy['low']:.1%}, {accuracy['high']:.1%}] | "
        f"{gap['estimate']:.1%} [{gap['low']:.1%}, {gap['high']:.1%}] | {cost['share_of_prefill']:.1%} | {parts} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="s-to-m")
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--questions", type=int, help="at most so many")
    parser.add_argument("--texts", type=int, default=200, help="calibration texts")
    parser.add_argument("--lookups", type=int, default=1200, help="texts with questions that the scorer learns from")
    parser.add_argument("--mapper", type=Path, help="a mapper with a scorer, instead of fitting some")
    parser.add_argument("--top-k", nargs="+", type=int, default=[2])
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.07, 0.1, 0.15])
    parser.add_argument("--choices", nargs="+", default=["question", "question+source_attention", "learned"])
    args = parser.parse_args()
    folders = [bundled.model_path(part) for part in bundled.split_pair(args.pair)]
    source, target = (load_model(folder) for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(str(folders[1]))
    questions = load_questions(Path(FAMILY) / "questions" / f"{args.split}.jsonl", args.questions)
    judge = Judge(source, target, questions=questions, tokenizer=tokenizer, attention=False)
    batches: list[torch.Tensor] = []
    if args.mapper is None:
        texts = read_texts(bundled.text_path("train"), args.texts)
        batches = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    print("| choice | accuracy | gap recovered | cost | map + native + repair + choice |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for top_k in args.top_k if args.mapper is None else [None]:
        mapper: Any
        if args.mapper is None:
            config = FitConfig.preset("default", top_k=top_k, repair="learned")
            lookups = lookup_texts(tokenizer, args.lookups)
            mapper = fit_mapper(source, target, batches, config, tokenizer=tokenizer, lookups=lookups, progress=False)
        else:
            mapper = KVBridgeMapper.from_pretrained(args.mapper)
        for choice in args.choices:
            for fraction in args.fractions:
                policy = HandoffPolicy(native_fraction=fraction, repair=choice, gates=Gates.off())
                print(
                    row(judge, KVBridge(source, mapper, policy), f"{choice}, {fraction:g}, k={mapper.config.top_k}"),
                    flush=True,
                )


if __name__ == "__main__":
    main()
