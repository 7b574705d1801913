"""Fits every method on every pair of a family, judges the handoffs, and writes docs/methods.md with its plots.

python scripts/study_methods.py --quick               # minutes: one seed, fewer questions, short training
python scripts/study_methods.py                       # about an hour on two cores
python scripts/study_methods.py --render              # tables and plots from the results that are there

A result is stored as soon as it is there, under a name that holds what it depends on; a second call goes on with what
is missing. Settings were chosen on the validation questions (`--split validation`); the tables report the test set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import study_report
import torch
from transformers import AutoTokenizer

from kvbridge_hf import HandoffPolicy, KVBridge, KVBridgeMapper, bundled, fit_mapper
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report, load_questions, split_documents
from kvbridge_hf.fingerprint import model_fingerprint
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers.config import DistillationConfig, FitConfig
from kvbridge_hf.mappers.shared_space import fit_shared_space
from kvbridge_hf.segment_boundaries import boundary_tokens

PAIRS = ("s-to-m", "m-to-l", "l-to-s", "w-to-m", "m-to-m-diary")
ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "examples" / "tinytown"
FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
QUICK_FRACTIONS = (0.05, 0.1, 0.15, 0.3, 1.0)
CHOICES = ("question", "source_attention", "question+source_attention", "target_attention", "surprise", "sensitivity")
CHOICES += ("recency", "random")
LOOKUPS, QUICK_LOOKUPS = 1200, 400  # texts with questions from which a scorer learns what to repair
LEARNED_FRACTIONS = (0.05, 0.1, 0.15, 0.3)
DISTILLATION_FIELDS = {entry.name for entry in fields(DistillationConfig)}


@dataclass(frozen=True)
class Case:
    """One row: how the mapper is fitted (cases with equal `fit` share it) and how it hands over."""

    group: str
    name: str
    fit: dict[str, Any]
    policy: dict[str, Any] = field(default_factory=dict)
    texts: int | None = None  # calibration texts; None: all of the run's
    controls: tuple[str, ...] = ()
    lookups: int = 0  # texts with questions from train worlds, for a training on lookups or a learned choice
    shared_width: int | None = None  # of a space that the two models share, instead of a fit of their own


def preset(name: str, source_layers: int, quick: bool) -> dict[str, Any]:
    """A preset as settings for a source of so many layers; training is shortened in a quick run, and said to be."""
    config = FitConfig.preset(name)
    if config.top_k is not None:
        config = config.replace(top_k=min(config.top_k, source_layers))
    if quick and config.distillation is not None:
        short = DistillationConfig(steps=40, learning_rate=1e-3, precondition=True, validation_sequences=16)
        config = config.replace(distillation=short)
    return config.to_dict()


def cases(source_layers: int, target_layers: int, quick: bool) -> list[Case]:
    """All rows of one pair."""

    def fitted(name: str = "fast", **changes: Any) -> dict[str, Any]:
        return FitConfig.from_dict({**preset(name, source_layers, quick), **changes}).to_dict()

    two = {"top_k": min(2, source_layers)}
    lookups = QUICK_LOOKUPS if quick else LOOKUPS
    base = fitted("default", **two, native_fraction=0.0)
    rows = [Case("fraction", "0", base, {"native_fraction": 0.0}, controls=("native_only",))]
    for fraction in QUICK_FRACTIONS if quick else FRACTIONS:
        policy = {"native_fraction": fraction, "repair": "question"}
        rows.append(Case("fraction", f"{fraction:g}", base, policy, controls=("native_only",)))
    for choice in CHOICES:
        rows.append(Case("choice", choice, base, {"native_fraction": 0.1, "repair": choice}))
    for top_k in range(1, two["top_k"] + 1):
        learned = fitted("default", top_k=top_k, repair="learned")
        for fraction in LEARNED_FRACTIONS:
            name = f"{fraction:g}, k={top_k}"
            rows.append(Case("learned", name, learned, {"native_fraction": fraction}, lookups=lookups))
    main = ("unmapped", "mismatched", "native_only")
    rows += [
        Case("preset", name, fit, controls=main, lookups=lookups if fit["repair"] == "learned" else 0)
        for name in ("paper", "cachebridge", "fast", "default", "kvlrelay", "quality")
        for fit in (preset(name, source_layers, quick),)
    ]
    for layers in range(1, target_layers):
        rows.append(Case("layers", f"lowest {layers} native", base, {"native_layers": layers, "native_fraction": 0.0}))
    for suffix in (1, 8, 16, 32):
        rows.append(Case("suffix", str(suffix), base, {"num_native_suffix": suffix, "native_fraction": 0.0}))
    rows += method_cases(fitted, quick)
    if quick:
        return rows
    for sinks in (0, 1, 4, 8):
        rows.append(Case("sinks", str(sinks), fitted(num_sinks=sinks)))
    for k in range(1, min(source_layers, 8) + 1):
        rows.append(Case("k", f"full-head, k={k}", fitted(top_k=k)))
        local = {"support": "head_local", "top_k": k}
        rows.append(Case("k", f"head-local by number, k={k}", fitted(**local)))
        rows.append(Case("k", f"head-local fitted, k={k}", fitted(**local, head_assignment="fitted")))
    for penalty in (1e-4, 0.01, 1.0, 100.0):
        rows.append(Case("lambda", f"{penalty:g}", fitted(ridge_lambda=penalty)))
    rows.append(Case("lambda", "searched", fitted(lambda_search=True)))
    for texts in (15, 50, 150):
        rows.append(Case("calibration", str(texts), fitted(), texts=texts))
    variants: dict[str, dict[str, Any]] = {
        "sensitivity": {"weighting": "sensitivity"},
        "query metric": {"metric": "query"},
        "both": {"weighting": "sensitivity", "metric": "query"},
        "greedy layers": {"selection": "greedy", "top_k": min(2, source_layers)},
        "low rank, half the weights": {"method": "low_rank", "rank_budget": 0.5},
        "MLP residual": {"method": "mlp", "mlp_hidden": (256,), "mlp_epochs": 5},
    }
    rows += [Case("variant", name, fitted(**changes)) for name, changes in variants.items()]
    return rows


def method_cases(fitted: Callable[..., dict[str, Any]], quick: bool) -> list[Case]:
    """Every method alone and with the repair of `"default"`, all with two source layers at most and the same texts.

    Trainings are short, of equal steps and with a fixed rate; half of the lookups' steps are on running text where the
    row does not say otherwise.
    """
    two = {"top_k": 2, "weighting": "uniform", "native_fraction": 0.0}
    steps, count = (120, 400) if quick else (1500, 4000)
    training = {"steps": steps, "learning_rate": 1e-3, "evaluations": 3, "validation_sequences": 24}

    def trained(method: str = "ridge", **changes: Any) -> dict[str, Any]:
        own = {name: changes.pop(name) for name in tuple(changes) if name in DISTILLATION_FIELDS}
        config = {**training, "lookup_fraction": 0.75, "precondition": method != "fuser", **own}
        return fitted(**{**two, "method": method, "weighting": "sensitivity", **changes}, distillation=config)

    both = {"method": "anchored", "anchors": ["layer0", "embedding"]}
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "linear": (fitted(**two), {}),
        "linear, sensitivity": (fitted(**{**two, "weighting": "sensitivity"}), {}),
        "anchors: layer 0": (fitted(**two, method="anchored"), {}),
        "anchors: embedding": (fitted(**two, method="anchored", anchors=["embedding"]), {}),
        "anchors: both": (fitted(**{**two, **both}), {}),
        "anchors: both, sensitivity": (fitted(**{**two, **both, "weighting": "sensitivity"}), {}),
        "linear, trained on text": (trained(lookup_fraction=0.0), {}),
        "linear, trained on lookups": (trained(), {"lookups": count}),
        "linear, trained on lookups with repair": (trained(native_fraction=0.15), {"lookups": count}),
        "anchors: both, trained on lookups": (trained(**both), {"lookups": count}),
        "anchors: both, trained in plain coordinates": (trained(**both, precondition=False), {"lookups": count}),
        "causal layer, trained on lookups": (trained("causal"), {"lookups": count}),
        "fuser (pays the prefill)": (
            trained("fuser", weighting="uniform", kl_weight=0.0, nll_weight=1.0, lookup_fraction=1.0),
            {"lookups": count},
        ),
        "low rank, half the weights": (fitted(**two, method="low_rank", rank_budget=0.5), {}),
        "MLP residual, 256": (fitted(**two, method="mlp", mlp_hidden=(256,), mlp_epochs=5), {}),
        "MLP plain, 256": (fitted(**two, method="mlp", mlp_hidden=(256,), mlp_epochs=5, mlp_residual=False), {}),
        "shared space, width 128": (fitted(**two), {"shared_width": 128}),
    }
    policies = {"": {"native_fraction": 0.0}, ", repair": {"native_fraction": 0.15, "repair": "question"}}
    return [
        Case("methods", f"{name}{suffix}", fit, policy, **more)
        for name, (fit, more) in rows.items()
        for suffix, policy in policies.items()
    ]


def lookup_texts(tokenizer: Any, count: int, seed: int = 0, questions: int = 6) -> list[dict[str, Any]]:
    """Texts of train worlds with questions about them and their answers, as `distill(lookups=...)` takes them."""
    sys.path.insert(0, str(FAMILY))
    from world import Writer

    rng = random.Random(seed)
    texts: list[dict[str, Any]] = []
    while len(texts) < count:
        length = rng.choice((96, 160, 224))
        writer = Writer(rng, "train", 3, rng.randint(4, min(9, 3 + length // 40)))
        writer.tell(length)
        told = len(writer.segments)
        for _ in range(questions):
            writer.ask()
        ids = tokenizer(" ".join(text for text, _ in writer.segments[:told]))["input_ids"]
        boundary, answers = len(ids), [False] * len(ids)
        for text, is_answer in writer.segments[told:]:
            more = tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
            ids, answers = ids + more, answers + [is_answer] * len(more)
        if len(ids) > boundary:
            texts.append({"input_ids": ids, "boundary": boundary, "answers": answers})
    return texts


class Pair:
    """The two models of a pair, what they are judged on, and the mappers fitted so far."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args = name, args
        source, target = bundled.split_pair(name)
        folders = [args.models / f"tinytown-{part.removeprefix('tinytown-')}" for part in (source, target)]
        self.source, self.target = (load_model(folder) for folder in folders)
        self.tokenizer = AutoTokenizer.from_pretrained(str(folders[1]))
        diary = target.endswith("m-diary") and args.split == "test"
        asked = FAMILY / "questions" / ("test_diary.jsonl" if diary else f"{args.split}.jsonl")
        questions = load_questions(asked, args.questions)
        texts = read_texts(FAMILY / "texts" / f"{args.split}.jsonl", args.documents)
        documents = split_documents([self.tokenizer(text)["input_ids"] for text in texts], continuation_tokens=32)
        self.judge = Judge(
            self.source, self.target, questions=questions, documents=documents, tokenizer=self.tokenizer, batch_size=48
        )
        self.texts = read_texts(FAMILY / "texts" / "train.jsonl", args.texts)
        self._mappers: dict[str, tuple[KVBridgeMapper, float]] = {}
        self.facts = [model_fingerprint(model)["kv_projections"] for model in (self.source, self.target)]

    @property
    def layers(self) -> tuple[int, int]:
        return self.source.config.num_hidden_layers, self.target.config.num_hidden_layers

    def key(self, case: Case, seed: int) -> str:
        """Digest of all that a result depends on but the code."""
        data = [self.args.split, len(self.judge.questions), len(self.judge.documents), len(self.texts), case.texts]
        parts = [self.facts, data, case.fit, case.policy, case.controls, seed]
        parts += [case.lookups, case.shared_width] if case.lookups or case.shared_width else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:16]

    def mapper(self, case: Case, seed: int) -> tuple[KVBridgeMapper, float]:
        """The fitted mapper and the seconds that the fit took."""
        key = json.dumps([case.fit, case.texts, seed, case.lookups, case.shared_width], sort_keys=True, default=list)
        if key not in self._mappers:
            texts = self.texts[: case.texts]
            batches = [self.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
            config = FitConfig.from_dict(case.fit).replace(seed=seed)
            started = time.perf_counter()
            mapper = self._fit(case, config, batches)
            self._mappers[key] = mapper, time.perf_counter() - started
        return self._mappers[key]

    def _fit(self, case: Case, config: FitConfig, batches: list[torch.Tensor]) -> KVBridgeMapper:
        if case.shared_width is not None:
            models = {"source": self.source, "target": self.target}
            natives = {"num_sinks": config.num_sinks, "num_native_suffix": config.num_native_suffix}
            space = fit_shared_space(models, batches, case.shared_width, tokenizer=self.tokenizer, **natives)
            mapper = space.mapper("source", "target")
            mapper.config.boundary_tokens = boundary_tokens(self.tokenizer)
            return mapper
        lookups = lookup_texts(self.tokenizer, case.lookups, config.seed) if case.lookups else None
        return fit_mapper(
            self.source,
            self.target,
            batches,
            config,
            tokenizer=self.tokenizer,
            dataset="tinytown/train",
            lookups=lookups,
        )

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        """Fit, hand over, judge."""
        mapper, seconds = self.mapper(case, seed)
        bridge = KVBridge(self.source, mapper, HandoffPolicy(gates=Gates.off(), **case.policy))
        started = time.perf_counter()
        judgement = self.judge.judge(BridgeHandoff(bridge, self.target), controls=case.controls)
        report = build_report(judgement, num_resamples=self.args.resamples, include_items=True)
        items = report.pop("items")
        for name in ("kinds", "answers", "latency", "pair"):
            if name != "kinds" or case.group != "preset":
                report.pop(name)
        return {
            "pair": self.name,
            "group": case.group,
            "name": case.name,
            "seed": seed,
            "split": self.args.split,
            "policy": case.policy,
            "fit": case.fit,
            "calibration_tokens": mapper.config.fit.get("tokens"),
            "distillation": {
                name: value
                for name, value in (mapper.config.fit.get("distillation") or {}).items()
                if name in ("start_kl", "kl", "objective")
            },
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in mapper.parameters()),
            "fit_seconds": round(seconds, 1),
            "judge_seconds": round(time.perf_counter() - started, 1),
            "report": report,
            "items": {
                "correct": [int(value) for value in items["questions"]["handoff"]["correct"]],
                "answer_kl": [round(value, 5) for value in items["questions"]["handoff"]["kl"]],
                "kl": [round(value, 6) for value in items["documents"]["handoff"]["kl"]],
            },
        }


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace the results file as a whole, so that an interruption leaves the old one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=None, separators=(",", ":"), sort_keys=True) + "\n")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true", help="only write the tables and plots")
    parser.add_argument("--models", type=Path, help="folder of the models (the bundled ones by default)")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--groups", nargs="+", help="only these groups of rows")
    parser.add_argument("--rows", nargs="+", help="only rows whose names start with one of these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--questions", type=int, help="at most so many")
    parser.add_argument("--documents", type=int, help="at most so many")
    parser.add_argument("--texts", type=int, help="calibration texts, at most")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="start no further row after so many minutes")
    parser.add_argument("--output", type=Path, default=ROOT / "docs")
    args = parser.parse_args()
    if args.quick:
        args.questions, args.documents, args.texts = args.questions or 96, args.documents or 16, args.texts or 150
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / ("methods_quick.json" if args.quick else "methods.json")
    results = json.loads(path.read_text()) if path.exists() else {"results": {}}
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    if not args.render:
        args.models = args.models or FAMILY / "models"
        torch.manual_seed(0)
        for name in args.pairs:
            if not all((args.models / f"tinytown-{part}" / "config.json").exists() for part in name.split("-to-")):
                print(f"{name}: a model is missing in {args.models.name}, left out")
                continue
            pair = Pair(name, args)
            for seed in args.seeds:
                for case in cases(*pair.layers, args.quick):
                    key = pair.key(case, seed)
                    if key in results["results"] or (args.groups and case.group not in args.groups):
                        continue
                    if args.rows and not case.name.startswith(tuple(args.rows)):
                        continue
                    if deadline is not None and time.monotonic() > deadline:
                        continue
                    entry = pair.run(case, seed)
                    results["results"][key] = entry
                    save(path, results)
                    print(study_report.line(entry), flush=True)
    study_report.write(results["results"].values(), args.output, quick=args.quick)


if __name__ == "__main__":
    main()
