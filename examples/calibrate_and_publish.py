"""Fit a mapper, calibrate its gates, judge it, and push it to the Hub; then find and load it there.

python examples/calibrate_and_publish.py                            # stops before the Hub
python examples/calibrate_and_publish.py --repo-id you/s-to-m       # needs `hf auth login`
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import FitConfig, KVBridgeMapper, bundled, fit_mapper
from kvbridge_hf.demo import read_texts
from kvbridge_hf.evaluation import judge_handoff, load_questions
from kvbridge_hf.guard import calibrate_gates
from kvbridge_hf.hub.publishing import search_mappers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo-id", help="repository to push to")
    parser.add_argument("--sequences", type=int, default=200, help="texts to fit on")
    parser.add_argument("--gate-sequences", type=int, default=100, help="other texts to calibrate the gates on")
    parser.add_argument("--questions", type=int, default=120, help="questions to judge on")
    args = parser.parse_args()

    source_path, target_path = bundled.model_path("s"), bundled.model_path("m")
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    source = AutoModelForCausalLM.from_pretrained(source_path, dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()

    def batches(name: str, limit: int) -> list[torch.Tensor]:
        return [
            tokenizer(text, return_tensors="pt")["input_ids"] for text in read_texts(bundled.text_path(name), limit)
        ]

    # "fast" takes one pass over the data; "default" adds a second one for sensitivity weights.
    mapper = fit_mapper(
        source,
        target,
        batches("train", args.sequences),
        FitConfig.preset("fast"),
        tokenizer=tokenizer,
        dataset="tinytown/train",
    )
    # Thresholds come from text that the fit has not seen.
    calibrate_gates(source, target, mapper, batches("validation", args.gate_sequences))
    questions = load_questions(bundled.questions_path("test"), limit=args.questions)
    # The map itself is judged, without gates: a fallback would be scored in its place.
    report = judge_handoff(source, target, mapper, questions=questions, tokenizer=tokenizer)
    mapper.config.evaluation = {name: report[name] for name in ("headline", "conditions", "cost", "data", "bootstrap")}
    print("accuracy:", {name: entry["accuracy"]["estimate"] for name, entry in report["conditions"].items()})

    with tempfile.TemporaryDirectory() as folder:
        mapper.save_pretrained(folder)  # config, weights, card, manifest
        print("saved; digest", mapper.artifact_digest)
    if args.repo_id is None:
        return
    commit = mapper.push_to_hub(args.repo_id, commit_message="First fit")
    loaded = KVBridgeMapper.from_pretrained(args.repo_id, revision=commit.oid)  # pinned to this commit
    assert torch.equal(loaded.key_weight, mapper.key_weight)
    print("pushed, and loaded again from", commit.oid)
    print("mappers on the Hub:", [model.id for model in search_mappers()])


if __name__ == "__main__":
    main()
