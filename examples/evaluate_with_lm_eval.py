"""Score a handoff with EleutherAI's lm-evaluation-harness, beside the target and the source alone.

    pip install "kvbridge_hf[eval]"
    python examples/evaluate_with_lm_eval.py --limit 100

The task is the bundled question set, read from its file, so nothing is downloaded. With models of your own give the
harness's names, such as tasks=["arc_easy", "hellaswag"].
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import Gates, HandoffPolicy, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.evaluation.lm_eval_adapter import HandoffLM


def tinytown_task() -> dict:
    """The bundled questions as a task of the harness."""
    return {
        "task": "tinytown",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(bundled.questions_path("test"))}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}} {{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=100, help="questions")
    args = parser.parse_args()
    try:
        import lm_eval
    except ImportError:
        sys.exit('lm_eval is missing: pip install "kvbridge_hf[eval]"')

    source = AutoModelForCausalLM.from_pretrained(bundled.model_path("s"), dtype=torch.float32).eval()
    target = AutoModelForCausalLM.from_pretrained(bundled.model_path("m"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(bundled.model_path("m"))
    mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path("s-to-m")), dtype=torch.float32)

    for name, bridge, model in (
        ("target alone", None, target),
        ("source alone", None, source),
        # Without gates: a fallback would be judged as a handoff that went well.
        ("handoff", KVBridge(source, mapper, HandoffPolicy(gates=Gates.off()), tokenizer=tokenizer), target),
    ):
        adapter = HandoffLM(bridge, model, tokenizer, progress=False)
        results = lm_eval.simple_evaluate(
            model=adapter, tasks=[tinytown_task()], limit=args.limit, bootstrap_iters=0, verbosity="ERROR"
        )
        print(f"{name:13} {results['results']['tinytown']['acc,none']:.3f}  {adapter.statuses}")


if __name__ == "__main__":
    main()
