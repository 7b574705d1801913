"""A router that asks what a handoff is worth before it escalates.

    python examples/route_by_retention.py

The small model answers; where it is unsure, the large model takes over. Whether that happens by a handoff or by a
prefill of its own depends on what was measured for this mapper and stands in its config: the retention, and the share
of the gap between the two models that a handoff recovers.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import HandoffPolicy, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.evaluation import load_questions
from kvbridge_hf.evaluation.lm_eval_adapter import HandoffLM


class RetentionRouter:
    """Small model first; the large one by the way that is good enough.

    Args:
        source, target, mapper, tokenizer: the pair.
        min_retention: below it the large model reads the prompt itself.
        min_margin: difference in log-probability between the small model's two best answers from which it is sure.
    """

    def __init__(self, source, target, mapper, tokenizer, *, min_retention: float = 0.9, min_margin: float = 1.0):
        self.min_margin = min_margin
        headline = mapper.config.evaluation.get("headline", {})
        self.retention = (headline.get("retention") or {}).get("estimate")
        self.gap_recovered = (headline.get("gap_recovered") or {}).get("estimate")
        # No measurement is no licence to hand over, and a gate's no leads to the target's own prefill.
        bridge = None
        if self.retention is not None and self.retention >= min_retention:
            bridge = KVBridge(source, mapper, HandoffPolicy(on_failure="prefill"), tokenizer=tokenizer)
        self.small = HandoffLM(None, source, tokenizer, progress=False)
        self.large = HandoffLM(bridge, target, tokenizer, progress=False)

    def answer(self, prompt: str, choices: list[str]) -> tuple[int, str]:
        """The number of the chosen answer, and who chose it: `small`, or `large (STATUS OF THE HANDOFF)`."""
        scores = self._score(self.small, prompt, choices)
        best, second = sorted(scores, reverse=True)[:2]
        if best - second >= self.min_margin:
            return scores.index(best), "small"
        before = dict(self.large.statuses)
        scores = self._score(self.large, prompt, choices)
        status = next(name for name, count in self.large.statuses.items() if count != before.get(name, 0))
        return scores.index(max(scores)), f"large ({status})"

    @staticmethod
    def _score(model: HandoffLM, prompt: str, choices: list[str]) -> list[float]:
        return [score for score, _ in model.loglikelihood([_Request(prompt, choice) for choice in choices])]


class _Request:
    """A prompt and what may follow it, as `HandoffLM` takes it."""

    def __init__(self, prompt: str, continuation: str):
        self.args = (prompt, continuation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--min-retention", type=float, default=0.9)
    args = parser.parse_args()
    source = AutoModelForCausalLM.from_pretrained(bundled.model_path("s"), dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(bundled.model_path("m"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(bundled.model_path("m"))
    mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path("s-to-m")), dtype=torch.float32)
    router = RetentionRouter(source, target, mapper, tokenizer, min_retention=args.min_retention)
    print(f"measured for this mapper: retention {router.retention}, gap recovered {router.gap_recovered}")

    questions = load_questions(bundled.questions_path("test"), limit=args.questions)
    right: dict[str, list[bool]] = {}
    for question in questions:
        choice, who = router.answer(f"{question.context} {question.question}", list(question.choices))
        right.setdefault(who, []).append(choice == question.answer)
    for who, answers in sorted(right.items()):
        print(f"{who:18} {sum(answers)} of {len(answers)} right")


if __name__ == "__main__":
    main()
