"""How well each gate separates good handoffs from bad ones, on handoffs with damage of graded strength.

    python scripts/measure_gates.py --pair s-to-m [--output gates.json]

Documents of the bundled test text are handed over, undamaged and with: noise on the mapped keys and values, target
layers that got their neighbour's, columns of another prompt, the source cache of another prompt, the mapper of
another pair (blended in), and text that is none of Tinytown's. A handoff is bad where KL(own prefill || handoff),
averaged over the last prompt token and the 15 after it, exceeds a bound. Printed are each gate's AUROC and its miss
rate at 1 % false alarms for several bounds, and for each damage what the gates at the mapper's thresholds (calibrated
here on the bundled text for gates, if it carries none) would have done; last, what they do to the undamaged handoffs
of the test questions. People, fillers and half of the templates of test texts are in no other text of the family.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache

from kvbridge_hf import HandoffPolicy, HandoffReport, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.errors import HandoffRejected
from kvbridge_hf.evaluation import load_questions
from kvbridge_hf.guard import Gates, calibrate_gates
from kvbridge_hf.guard.defaults import GateDefaults
from kvbridge_hf.guard.gates import HandoffGate, mapped_norms, suffix_scores
from kvbridge_hf.guard.likelihood import divergence
from kvbridge_hf.guard.peek import peek, run_columns
from kvbridge_hf.guard.tuning import auroc, miss_rate_at
from kvbridge_hf.handoff_repair import apply_native_parts
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.prompt_reading import read_columns
from kvbridge_hf.session import share_cache

CONTINUATION = 16
BATCH = 16
STATISTICS = ("magnitude", "nll", "excess", "divergence", "reverse_divergence", "drift", "score")
BOUNDS = (0.1, 0.2, 0.5, 0.7, 1.0, 2.0)


def groups(token_lists: list[list[int]], longest: int) -> Iterator[torch.Tensor]:
    """Rows of similar length, cut to the shortest of a group: `(rows, columns)` without padding."""
    usable = sorted((row[:longest] for row in token_lists if len(row) >= 56), key=len)
    for start in range(0, len(usable), BATCH):
        rows = usable[start : start + BATCH]
        if len(rows) > 1:
            yield torch.tensor([row[: len(rows[0])] for row in rows])


def foreign_texts(tokenizer: Any, texts: list[list[int]], rng: random.Random) -> dict[str, list[list[int]]]:
    """Token lists that the mapper has not been made for."""
    prose = [doc for module in (argparse, json, inspect, random) for _, doc in _docs(module) if len(doc) > 200]
    vocab = len(tokenizer)
    return {
        "words in random order": [row[:1] + rng.sample(row[1:], len(row) - 1) for row in texts],
        "random tokens": [row[:1] + [rng.randrange(7, vocab) for _ in row[1:]] for row in texts],
        "documentation in English": [tokenizer(doc)["input_ids"] for doc in prose],
    }


def _docs(module: Any) -> Iterator[tuple[str, str]]:
    for name, thing in sorted(vars(module).items()):
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield name, inspect.getdoc(thing) or ""


class Measurement:
    """Hands rows over, damages them, and keeps what the gates and the KL say."""

    def __init__(self, source: Any, target: Any, mapper: KVBridgeMapper):
        self.source, self.target, self.mapper = source, target, mapper
        self.policy = HandoffPolicy(gates=Gates.off())
        self.defaults = GateDefaults.from_config(mapper.config)
        self.rows: list[dict[str, Any]] = []
        self._known: tuple[Any, Any, Any] = (None, None, None)

    def _alone(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What no damage changes: the target's own log-probabilities, and the source's cache of the prompt."""
        if self._known[0] is not ids:
            mask, positions = torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1]).expand_as(ids)
            own = run_columns(self.target, DynamicCache(), ids, mask, positions, CONTINUATION)
            prompt = slice(0, 1 - CONTINUATION)
            self._known = (ids, own, read_columns(self.source, ids[:, prompt], mask[:, prompt]))
        return self._known[1:]

    @torch.no_grad()
    def run(
        self,
        ids: torch.Tensor,
        damage: str,
        strength: Any,
        spoil: Callable[[Any], None] | None = None,
        mapper: KVBridgeMapper | None = None,
        roll_source: bool = False,
    ) -> None:
        prompt = ids[:, : -CONTINUATION + 1]
        mask = torch.ones_like(prompt)
        report = HandoffReport()
        gate = HandoffGate(Gates(), self.mapper.config, report)
        bridge = KVBridge(self.source, self.mapper if mapper is None else mapper, self.policy)
        own, source_cache = self._alone(ids)
        if roll_source:
            source_cache = share_cache(source_cache)
            source_cache.batch_select_indices(torch.arange(len(ids)).roll(1))
        cache, handed = bridge.prepare(self.target, prompt, mask, source_cache, None, None, self.policy, gate)
        assert handed is not None
        cache.map_all()
        if spoil is not None:
            spoil(cache)
        apply_native_parts(cache, handed, self.source, self.target, self.mapper, self.policy, report)
        _, outside = mapped_norms(cache, handed, self.defaults.magnitude, report.native_layers)
        scores = suffix_scores(self.target, self.source, cache, handed, keep_columns=False)
        assert scores is not None
        score = gate.suffix_score(scores)
        assert score is not None
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        everything = torch.ones_like(ids, dtype=torch.bool)
        columns = slice(handed.stop, None)
        handed_over = run_columns(
            self.target, peek((cache, handed.stop)), ids[:, columns], everything, positions[:, columns], CONTINUATION
        )
        kl = divergence(own, handed_over).mean(1)
        for row in range(len(ids)):
            self.rows.append(
                {
                    "damage": damage,
                    "strength": strength,
                    "kl": float(kl[row]),
                    "magnitude": float(outside[:, row].max()),
                    "nll": float(scores.nll[row]),
                    "excess": float(scores.excess[row]),
                    "divergence": float(scores.divergence[row]),
                    "reverse_divergence": float(scores.reverse_divergence[row]),
                    "drift": 0.0 if scores.drift is None else float(scores.drift[row]),
                    "score": float(score[row]),
                }
            )


def noise(strength: float, generator: torch.Generator) -> Callable[[Any], None]:
    def spoil(cache: Any) -> None:
        for layer in cache.layers:
            for kind in ("keys", "values"):
                states = getattr(layer, kind)
                setattr(layer, kind, states + strength * states.std() * torch.randn(states.shape, generator=generator))

    return spoil


def wrong_layers(count: int, rng: random.Random) -> Callable[[Any], None]:
    def spoil(cache: Any) -> None:
        states = [(layer.keys, layer.values) for layer in cache.layers]
        for index in rng.sample(range(len(states)), count):
            cache.layers[index].keys, cache.layers[index].values = states[(index + 1) % len(states)]

    return spoil


def other_columns(share: float) -> Callable[[Any], None]:
    """The last part of the mapped columns comes from the next row."""

    def spoil(cache: Any) -> None:
        for layer in cache.layers:
            start = round(layer.keys.shape[2] * (1 - share))
            for kind in ("keys", "values"):
                states = getattr(layer, kind).clone()
                states[:, :, start:] = states.roll(1, 0)[:, :, start:]
                setattr(layer, kind, states)

    return spoil


def blended(mapper: KVBridgeMapper, other: KVBridgeMapper, share: float) -> KVBridgeMapper:
    """A mapper whose features stay the first one's and whose weights move towards the other's."""
    mixed = type(mapper)(mapper.config).eval()
    states = mapper.state_dict()
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            if tensor.is_floating_point():
                states[name] = (1 - share) * states[name] + share * tensor
    mixed.load_state_dict(states)
    return mixed


def table(rows: list[dict[str, Any]], defaults: GateDefaults) -> tuple[str, dict[str, Any]]:
    lines, facts = [], {"bounds": {}, "damages": []}
    lines += ["| KL bound | good | bad | " + " | ".join(f"{name}: AUROC, missed at 1 %" for name in STATISTICS) + " |"]
    lines += ["|---" * (3 + len(STATISTICS)) + "|"]
    for bound in BOUNDS:
        good, bad = ([row for row in rows if (row["kl"] > bound) == is_bad] for is_bad in (False, True))
        if not good or not bad:
            continue
        found = {}
        for name in STATISTICS:
            sides = [[row[name] for row in part] for part in (good, bad)]
            found[name] = {"auroc": auroc(*sides), "miss_rate": miss_rate_at(*sides, 0.01)}
        facts["bounds"][bound] = {"good": len(good), "bad": len(bad), **found}
        cells = " | ".join(f"{found[name]['auroc']:.3f}, {found[name]['miss_rate']:.0%}" for name in STATISTICS)
        lines.append(f"| {bound} | {len(good)} | {len(bad)} | {cells} |")
    limits = {"magnitude": defaults.magnitude.max_outside}
    if defaults.suffix_likelihood is not None:
        limits["score"] = defaults.suffix_likelihood.max_score
    lines += ["", "| damage | strength | handoffs | median KL | rejected by magnitude | by likelihood | by either |"]
    lines += ["|---" * 7 + "|"]
    for damage, strength in dict.fromkeys((row["damage"], row["strength"]) for row in rows):
        part = [row for row in rows if (row["damage"], row["strength"]) == (damage, strength)]
        shares = [sum(row[name] > limit for row in part) / len(part) for name, limit in limits.items()]
        either = sum(any(row[name] > limit for name, limit in limits.items()) for row in part) / len(part)
        middle = median(row["kl"] for row in part)
        facts["damages"].append([damage, strength, len(part), middle, *shares, either])
        cells = " | ".join(f"{share:.0%}" for share in (*shares, either))
        lines.append(f"| {damage} | {strength} | {len(part)} | {middle:.3f} | {cells} |")
    return "\n".join(lines), facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="s-to-m", help="pair of the bundled family")
    parser.add_argument("--source", help="another source model, with --target (a folder; the mapper is fitted)")
    parser.add_argument("--target")
    parser.add_argument("--fit", action="store_true", help="fit the mapper instead of loading the bundled one")
    parser.add_argument("--preset", default="default", help="preset of the fit")
    parser.add_argument("--fit-texts", type=int, help="texts for a fit; all by default")
    parser.add_argument("--texts", type=Path, help="JSONL of other documents instead of the bundled test text")
    parser.add_argument("--documents", type=int, help="test documents; all by default")
    parser.add_argument("--no-other-pair", action="store_true", help="leave out the damage that needs a second fit")
    parser.add_argument("--longest", type=int, default=256, help="cut documents to this many tokens")
    parser.add_argument("--output", type=Path, help="write rows and tables as JSON")
    args = parser.parse_args()
    names = (
        (args.source, args.target) if args.source else tuple(map(bundled.model_path, bundled.split_pair(args.pair)))
    )
    source, target = (load_model(name) for name in names)
    tokenizer = AutoTokenizer.from_pretrained(str(names[1]))
    fit = args.fit or args.source
    mapper = (
        fit_on_texts(source, target, tokenizer, FitConfig.preset(args.preset), args.fit_texts)
        if fit
        else KVBridgeMapper.from_pretrained(str(bundled.mapper_path(args.pair)), dtype=torch.float32)
    )
    if not mapper.config.gates:
        texts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in read_texts(bundled.text_path("gates"))]
        calibrate_gates(source, target, mapper, texts)
    measured = measure(source, target, mapper, tokenizer, args)
    defaults = GateDefaults.from_config(mapper.config)
    assert defaults is not None
    text, facts = table(measured.rows, defaults)
    print(f"{names[0]} -> {names[1]}, native suffix {mapper.config.num_native_suffix}, {len(measured.rows)} handoffs")
    print(f"calibrated: {json.dumps({**defaults.to_dict(), 'magnitude': defaults.magnitude.max_outside})}\n")
    print(text)
    alarms = false_alarms_on_questions(source, target, mapper, tokenizer, args.documents)
    print(
        f"\nUndamaged handoffs of test questions: {alarms['prompts']}; rejected by magnitude "
        f"{alarms['magnitude']:.1%}, by likelihood {alarms['suffix_likelihood']:.1%}"
    )
    if args.output:
        args.output.write_text(json.dumps({**facts, "questions": alarms, "rows": measured.rows}))


def false_alarms_on_questions(
    source: Any, target: Any, mapper: KVBridgeMapper, tokenizer: Any, limit: int | None
) -> dict[str, Any]:
    """What the gates reject of the test questions, one question of each context, each gate alone."""
    contexts = {question.context: question for question in load_questions(bundled.questions_path("test"))}
    prompts = [f"{context} {question.question}" for context, question in list(contexts.items())[:limit]]
    counts: dict[str, Any] = {"prompts": len(prompts)}
    for gate in ("magnitude", "suffix_likelihood"):
        others = {name: False for name in ("magnitude", "suffix_likelihood") if name != gate}
        bridge = KVBridge(source, mapper, HandoffPolicy(on_rejection="error", gates=Gates(**others)))
        rejected = 0
        for prompt in prompts:
            try:
                bridge.handoff(tokenizer(prompt, return_tensors="pt")["input_ids"], target_model=target)
            except HandoffRejected:
                rejected += 1
        counts[gate] = rejected / len(prompts)
    return counts


def measure(source: Any, target: Any, mapper: KVBridgeMapper, tokenizer: Any, args: argparse.Namespace) -> Measurement:
    """All damages on the test text."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    path = args.texts or bundled.text_path("test")
    texts = [tokenizer(text)["input_ids"] for text in read_texts(path, args.documents)]
    measured = Measurement(source, target, mapper)
    other = None if args.no_other_pair else mapper_of_another_pair(source, target, mapper, tokenizer, args.fit_texts)
    num_layers = int(mapper.config.target_geometry["num_layers"])
    for ids in groups(texts, args.longest):
        measured.run(ids, "none", 0)
        for strength in (0.1, 0.2, 0.4, 0.8):
            measured.run(ids, "noise (of a layer's spread)", strength, noise(strength, generator))
        for count in (1, 2, num_layers):
            measured.run(ids, "layers with their neighbour's", count, wrong_layers(count, rng))
        for share in (0.1, 0.3, 1.0):
            measured.run(ids, "columns of another prompt", share, other_columns(share))
        measured.run(ids, "source cache of another prompt", 1, roll_source=True)
        for share in () if other is None else (0.1, 0.3, 1.0):
            measured.run(ids, "mapper of another pair", share, mapper=blended(mapper, other, share))
    for kind, rows in foreign_texts(tokenizer, texts, rng).items():
        for ids in groups(rows, args.longest):
            measured.run(ids, f"text: {kind}", 1)
    return measured


def fit_on_texts(source: Any, target: Any, tokenizer: Any, config: FitConfig, limit: int | None) -> KVBridgeMapper:
    """Fit on the bundled calibration texts, or the first of them."""
    texts = read_texts(bundled.text_path("train"), limit)
    batches = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    return fit_mapper(source, target, batches, config, tokenizer=tokenizer, progress=False)


def mapper_of_another_pair(
    source: Any, target: Any, mapper: KVBridgeMapper, tokenizer: Any, limit: int | None
) -> KVBridgeMapper:
    """Of a source of the same architecture with other weights: the source's own with their columns permuted."""
    stranger = type(source)(source.config).eval()
    states = source.state_dict()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in states.items():
            if tensor.ndim == 2:
                states[name] = tensor[:, torch.randperm(tensor.shape[1], generator=generator)]
    stranger.load_state_dict(states)
    config = FitConfig(top_k=mapper.config.top_k, support=mapper.config.support, num_sinks=mapper.config.num_sinks)
    return fit_on_texts(stranger, target, tokenizer, config, limit)


if __name__ == "__main__":
    main()
