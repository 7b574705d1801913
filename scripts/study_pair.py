"""A pair of the family in study_methods.py: its data, its mappers, and one row's result."""

from __future__ import annotations

import hashlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lookup_texts import FAMILY, genre_texts, lookup_texts
from study_rows import ALL_TEXTS, Case, cases
from transformers import AutoTokenizer

from kvbridge_hf import HandoffPolicy, KVBridge, KVBridgeMapper, bundled, fit_mapper
from kvbridge_hf.calibration.driver import (
    collect_metrics,
    collect_sensitivity,
    collect_statistics,
    fit_from_statistics,
)
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report, load_questions, split_documents
from kvbridge_hf.evaluation.bootstrap import PairedBootstrap
from kvbridge_hf.fingerprint import model_fingerprint
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.mappers.shared_space import fit_shared_space
from kvbridge_hf.segment_boundaries import boundary_tokens

CONTINUATION = 32
LONG_DOCUMENTS = 24
# Groups whose rows differ in nothing that shapes the statistics, so that one pass over the data serves them all.
SHARED_STATISTICS = ("k", "lambda")


@dataclass(frozen=True)
class Settings:
    """What a run is judged on and fitted with; part of every result's name."""

    models: Path
    split: str
    questions: int | None
    documents: int | None
    texts: int
    resamples: int
    quick: bool


class Pair:
    """The two models of a pair, what they are judged on, and the mappers fitted so far."""

    def __init__(self, name: str, settings: Settings):
        self.name, self.settings = name, settings
        source, target = bundled.split_pair(name)
        folders = [settings.models / f"tinytown-{part.removeprefix('tinytown-')}" for part in (source, target)]
        self.source, self.target = (load_model(folder) for folder in folders)
        self.tokenizer = AutoTokenizer.from_pretrained(str(folders[1]))
        self.diary = target.endswith("m-diary")
        layers = self.source.config.num_hidden_layers, self.target.config.num_hidden_layers
        self.cases = cases(*layers, settings.quick)
        self.texts = read_texts(FAMILY / "texts" / "train.jsonl")
        self._mappers: dict[str, tuple[KVBridgeMapper, float]] = {}
        self._statistics: dict[str, Any] = {}
        self._judges: dict[str, Judge] = {}
        self._facts = [model_fingerprint(model)["kv_projections"] for model in (self.source, self.target)]

    # ---- data -------------------------------------------------------------------------------------------------------

    def judge(self, data: str) -> Judge:
        """The judge of one set of questions and documents.

        `"main"`: the split's; `"long"`: questions about long texts; `"prefix-N"`: texts joined, N tokens before what
        is scored; `"diary"`: texts of that genre alone; `"shuffled words"`: the split's, their prefix in disorder.
        """
        if data not in self._judges:
            given: dict[str, Any] = {}
            if data in ("main", "long"):
                given["questions"] = load_questions(self._questions(data), self.settings.questions)
            if data != "long":
                given["documents"] = self._documents(data)
            self._judges[data] = Judge(
                self.source, self.target, **given, tokenizer=self.tokenizer, batch_size=48, keep_bytes=1 << 29
            )
        return self._judges[data]

    def _questions(self, data: str) -> Path:
        name = "test_long" if data == "long" else self.settings.split
        if name == "test" and self.diary:
            name = "test_diary"
        return FAMILY / "questions" / f"{name}.jsonl"

    def _documents(self, data: str) -> list[Any]:
        split, count = self.settings.split, self.settings.documents
        texts = [self.tokenizer(text)["input_ids"] for text in read_texts(FAMILY / "texts" / f"{split}.jsonl")]
        prefix = None
        rng = random.Random(0)
        if data.startswith("prefix-"):
            prefix, count = int(data.removeprefix("prefix-")), LONG_DOCUMENTS
            joined = [sum(texts[start:] + texts[:start], [])[: prefix + CONTINUATION] for start in range(len(texts))]
            texts = joined
        elif data == "shuffled words":
            for ids in texts:
                told = ids[:-CONTINUATION]
                rng.shuffle(told)
                ids[:-CONTINUATION] = told
        elif data == "diary":
            texts = [self.tokenizer(text)["input_ids"] for text in genre_texts("diary", split, len(texts), rng)]
        return split_documents(texts, continuation_tokens=CONTINUATION, prefix_tokens=prefix, limit=count)

    def batches(self, case: Case, seed: int) -> list[torch.Tensor]:
        """Calibration texts, drawn anew for every seed."""
        count = self.settings.texts if case.texts is None else min(case.texts, ALL_TEXTS)
        rng = random.Random(seed)
        texts = rng.sample(self.texts, count) if case.genre is None else genre_texts(case.genre, "train", count, rng)
        return [self.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]

    # ---- mappers ----------------------------------------------------------------------------------------------------

    def mapper(self, case: Case, seed: int) -> tuple[KVBridgeMapper, float]:
        """The fitted mapper and the seconds that the fit took."""
        facts = [case.fit, case.texts, case.genre, case.fleet, seed, case.lookups, case.shared_width]
        key = json.dumps(facts, sort_keys=True, default=list)
        if key not in self._mappers:
            batches = self.batches(case, seed)
            config = FitConfig.from_dict(case.fit).replace(seed=seed)
            started = time.perf_counter()
            mapper = self._fit(case, config, batches)
            self._mappers[key] = mapper, time.perf_counter() - started
        return self._mappers[key]

    def _fit(self, case: Case, config: FitConfig, batches: list[torch.Tensor]) -> KVBridgeMapper:
        if case.shared_width is not None:
            models = {"source": self.source, "target": self.target, **(self._others() if case.fleet else {})}
            natives = {"num_sinks": config.num_sinks, "num_native_suffix": config.num_native_suffix}
            space = fit_shared_space(models, batches, case.shared_width, tokenizer=self.tokenizer, **natives)
            mapper = space.mapper("source", "target")
            mapper.config.boundary_tokens = boundary_tokens(self.tokenizer)
            return mapper
        told = {"tokenizer": self.tokenizer, "dataset": "tinytown/train"}
        if case.group in SHARED_STATISTICS:
            return self._fit_from_shared(config, batches, told)
        lookups = lookup_texts(self.tokenizer, case.lookups, config.seed) if case.lookups else None
        return fit_mapper(self.source, self.target, batches, config, lookups=lookups, **told)

    def _others(self) -> dict[str, Any]:
        """The family's models that are not of this pair."""
        names = {part.removeprefix("tinytown-") for part in bundled.split_pair(self.name)}
        folders = {folder.name.removeprefix("tinytown-"): folder for folder in self.settings.models.glob("tinytown-*")}
        return {name: load_model(folder) for name, folder in sorted(folders.items()) if name not in names}

    def _fit_from_shared(self, config: FitConfig, batches: list[torch.Tensor], told: dict[str, Any]) -> KVBridgeMapper:
        pair, key = (self.source, self.target, batches), str([config.num_sinks, config.seed, len(batches)])
        if key not in self._statistics:
            full = FitConfig(num_sinks=config.num_sinks, seed=config.seed, top_k=1)
            self._statistics[key] = collect_statistics(*pair, full, **told)
        statistics, more = self._statistics[key], {}
        if config.weighting == "sensitivity":
            more["sensitivity"] = collect_sensitivity(*pair, statistics, config)
        if config.metric == "query":
            more["metrics"] = collect_metrics(*pair, config)
        return fit_from_statistics(statistics, config, **more)

    # ---- results ----------------------------------------------------------------------------------------------------

    def key(self, case: Case, seed: int) -> str:
        """Digest of all that a result depends on but the code."""
        s = self.settings
        counts = [s.split, s.questions, s.documents, s.texts, s.resamples, s.quick]
        parts = [self.name, self._facts, counts, case.data, changed(case.fit), case.policy, case.controls, seed]
        parts += [
            case.texts,
            *([case.genre] if case.genre else []),
            *(["fleet"] if case.fleet else []),
            case.lookups,
            case.shared_width,
            case.group,
            case.name,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=list).encode()).hexdigest()[:16]

    def run(self, case: Case, seed: int) -> dict[str, Any]:
        """Fit, hand over, judge."""
        mapper, seconds = self.mapper(case, seed)
        bridge = KVBridge(self.source, mapper, HandoffPolicy(gates=Gates.off(), **case.policy))
        judge = self.judge(case.data)
        started = time.perf_counter()
        judgement = judge.judge(BridgeHandoff(bridge, self.target), controls=case.controls)
        report = build_report(judgement, num_resamples=self.settings.resamples, include_items=True)
        distillation = mapper.config.fit.get("distillation") or {}
        entry = {
            "pair": self.name,
            "group": case.group,
            "name": case.name,
            "seed": seed,
            "split": self.settings.split,
            "settings": changed(case.fit),
            "policy": case.policy,
            "calibration_tokens": mapper.config.fit.get("tokens"),
            "distillation": {k: v for k, v in distillation.items() if k in ("start_kl", "kl", "objective")},
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in mapper.parameters()),
            "fit_seconds": round(seconds, 1),
            "judge_seconds": round(time.perf_counter() - started, 1),
            "report": _compact(report, judge),
            "digest": _digest(report["items"]),
        }
        if case.group == "preset":
            entry["items"] = _items(report["items"], judge)
        return entry


def changed(fit: dict[str, Any]) -> dict[str, Any]:
    """The settings of a fit that are not the defaults."""
    plain = FitConfig().to_dict()
    return {name: value for name, value in fit.items() if value != plain[name]}


def _items(items: dict[str, Any], judge: Judge) -> dict[str, Any]:
    """What paired comparisons between rows need."""
    numbers: dict[Any, int] = {}
    return {
        "contexts": [numbers.setdefault(question.context, len(numbers)) for question in judge.questions],
        "correct": [int(value) for value in items["questions"]["handoff"]["correct"]],
        "kl": [round(value, 6) for value in items["documents"]["handoff"]["kl"]],
        "tokens": [int(value) for value in items["documents"]["handoff"]["tokens"]],
    }


def _digest(items: dict[str, Any]) -> str:
    """Of every answer and every KL: a row that is run again has to give it again."""
    told = [
        [round(value, 5) for value in items[suite]["handoff"][column]]
        for suite, column in (("questions", "correct"), ("documents", "kl"))
        if suite in items
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _compact(report: dict[str, Any], judge: Judge) -> dict[str, Any]:
    """What tables and plots need of a report; the intervals of the handoff alone."""
    headline = {
        name: {key: found.get(key) for key in ("estimate", "low", "high")}
        for name in ("gap_recovered", "retention", "floor_normalised_retention")
        if (found := report["headline"].get(name))
    }
    conditions: dict[str, dict[str, Any]] = {}
    for name, metrics in report["conditions"].items():
        wanted = ("estimate", "low", "high") if name == "handoff" else ("estimate",)
        kept = {m: {key: e.get(key) for key in wanted} for m, e in metrics.items() if e and "estimate" in e}
        if name == "handoff" and metrics.get("attention_cosine"):
            kept["attention_cosine"] = {key: metrics["attention_cosine"][key] for key in ("mean", "min")}
        conditions[name] = kept
    if judge.questions:
        right = [report["items"]["questions"][name]["correct"] for name in ("target", "source")]
        contexts = [question.context for question in judge.questions]
        sampler = PairedBootstrap(len(contexts), contexts, report["bootstrap"]["num_resamples"])
        between = sampler.difference_interval(*right, None)
        headline["gap"] = {key: getattr(between, key) for key in ("estimate", "low", "high")}
    compact = {"data": report["data"], "bootstrap": report["bootstrap"], "conditions": conditions}
    return _rounded({**compact, "headline": headline, "cost": report["cost"]})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return round(value, 6) if isinstance(value, float) else value
