"""The rows of study_methods.py: what is fitted on a pair, how it hands over, and what it is judged on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from lookup_texts import LOOKUPS

from kvbridge_hf.mappers.config import DistillationConfig, FitConfig

FRACTIONS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
QUICK_FRACTIONS = (0.05, 0.1, 0.15, 0.3, 1.0)
LEARNED_FRACTIONS = (0.05, 0.07, 0.1, 0.15)
# Methods that are judged with the repair of `"default"` too.
REPAIRED = ("linear", "linear, trained on lookups", "linear, trained on lookups with repair", "anchors: embedding")
CHOICES = ("question", "source_attention", "question+source_attention", "target_attention", "surprise", "sensitivity")
CHOICES += ("recency", "random")
QUICK_LOOKUPS = 400
LENGTHS = (128, 256, 512, 1024, 1536)  # tokens of a prefix; the calibration texts have at most about 400
DOMAINS = ("diary", "shuffled words")
PRESETS = ("paper", "cachebridge", "kvlrelay", "fast", "default", "quality")
ALL_TEXTS = 480
DISTILLATION_FIELDS = {entry.name for entry in fields(DistillationConfig)}
# What a worker does in one go, the most important first.
CHUNKS = (
    ("preset",),
    ("fraction", "choice", "learned", "cheaper", "depth", "layers", "suffix"),
    ("sinks", "k", "lambda", "calibration", "variant", "length", "domain"),
    ("methods",),
)


@dataclass(frozen=True)
class Case:
    """One row: how the mapper is fitted (cases with equal `fit` share it) and how it hands over."""

    group: str
    name: str
    fit: dict[str, Any]
    policy: dict[str, Any] = field(default_factory=dict)
    texts: int | None = None  # calibration texts; None: those of the run
    controls: tuple[str, ...] = ()
    lookups: int = 0  # texts with questions from train worlds, for a training on lookups or a learned choice
    shared_width: int | None = None  # of a space that the two models share, instead of a fit of their own
    fleet: bool = False  # the space is shared by the whole family
    genre: str | None = None  # of the calibration texts; None: all genres
    data: str = "main"  # what it is judged on, see `study_pair.Pair.judge`
    repeated: bool = False  # for every seed of the run; else for the first one
    late: bool = False  # after all others, as it takes minutes


def preset(name: str, source_layers: int, quick: bool) -> dict[str, Any]:
    """A preset as settings for a source of so many layers; training is shortened in a quick run, and said to be."""
    config = FitConfig.preset(name)
    if config.top_k is not None:
        config = config.replace(top_k=min(config.top_k, source_layers))
    if quick and config.distillation is not None:
        short = config.distillation.to_dict() | {"steps": 40, "learning_rate": 1e-3, "validation_sequences": 16}
        config = config.replace(distillation=DistillationConfig.from_dict(short))
    return config.to_dict()


def cases(source_layers: int, target_layers: int, quick: bool) -> list[Case]:
    """All rows of one pair."""

    def fitted(name: str = "fast", **changes: Any) -> dict[str, Any]:
        return FitConfig.from_dict({**preset(name, source_layers, quick), **changes}).to_dict()

    lookups = QUICK_LOOKUPS if quick else LOOKUPS
    rows = _preset_cases(fitted, lookups, trainings=not quick and source_layers <= 3)
    base = fitted("default", native_fraction=0.0)
    rows.append(Case("fraction", "0", base, {"native_fraction": 0.0}, controls=("native_only",)))
    for fraction in QUICK_FRACTIONS if quick else FRACTIONS:
        policy = {"native_fraction": fraction, "repair": "question"}
        rows.append(Case("fraction", f"{fraction:g}", base, policy, controls=("native_only",)))
    for choice in CHOICES:
        rows.append(Case("choice", choice, base, {"native_fraction": 0.1, "repair": choice}))
    learned = fitted("default", repair="learned")
    for fraction in LEARNED_FRACTIONS:
        rows.append(Case("learned", f"{fraction:g}", learned, {"native_fraction": fraction}, lookups=lookups))
    for k in range(1, min(2, source_layers - 1) + 1):
        cheaper = fitted("default", repair="learned", top_k=k, repair_layers="auto")
        for fraction in LEARNED_FRACTIONS[1:]:
            name = f"{fraction:g}, k={k}"
            rows.append(Case("cheaper", name, cheaper, {"native_fraction": fraction}, lookups=lookups))
    for layers in range(1, target_layers + 1):
        policy = {"native_fraction": 0.15, "repair": "question", "repair_layers": layers}
        rows.append(Case("depth", str(layers), base, policy))
    for layers in range(1, target_layers):
        rows.append(Case("layers", f"lowest {layers} native", base, {"native_layers": layers, "native_fraction": 0.0}))
    for suffix in (1, 4, 8, 16, 32):
        rows.append(Case("suffix", str(suffix), base, {"num_native_suffix": suffix, "native_fraction": 0.0}))
    rows += _method_cases(fitted, quick)
    if target_layers <= 2 and not quick:
        # A network of the published size takes a quarter of an hour for this few layers.
        fit = fitted(top_k=min(2, source_layers), method="mlp", mlp_hidden=(1024, 1024), mlp_epochs=20)
        rows.append(Case("methods", "MLP residual, 2 x 1,024, 20 epochs", fit, {"native_fraction": 0.0}, late=True))
    return rows if quick else rows + _curve_cases(fitted, source_layers)


def _preset_cases(fitted: Callable[..., dict[str, Any]], lookups: int, trainings: bool) -> list[Case]:
    """The published systems and ours, with every control; and what training does, where that is asked for."""
    main = ("unmapped", "mismatched", "native_only")
    rows = []
    for name in PRESETS:
        fit, late = fitted(name), name == "quality"
        texts = lookups if fit["repair"] == "learned" else 0
        rows.append(Case("preset", name, fit, controls=main, lookups=texts, repeated=not late, late=late))
    if trainings:
        asking = {**fitted("quality")["distillation"], "lookup_fraction": 0.75}
        variants: dict[str, dict[str, Any]] = {
            "quality, closed form": {"distillation": None},
            "quality, trained on lookups": {"distillation": asking},
            "quality, 15 % in the lowest layers": {"native_fraction": 0.15, "repair_layers": "auto"},
        }
        for name, changes in variants.items():
            rows.append(Case("preset", name, fitted("quality", **changes), controls=main, lookups=lookups, late=True))
    return rows


def _curve_cases(fitted: Callable[..., dict[str, Any]], source_layers: int) -> list[Case]:
    """What a single setting does, all else being that of `"fast"`."""
    rows = []
    for sinks in (0, 1, 4, 8):
        rows.append(Case("sinks", str(sinks), fitted(num_sinks=sinks)))
    for k in range(1, min(source_layers, 8) + 1):
        rows.append(Case("k", f"full-head, k={k}", fitted(top_k=k)))
        local = {"support": "head_local", "top_k": k}
        rows.append(Case("k", f"head-local by number, k={k}", fitted(**local)))
        rows.append(Case("k", f"head-local fitted, k={k}", fitted(**local, head_assignment="fitted")))
    for penalty in (1e-4, 0.01, 1.0, 100.0, 1e4):
        rows.append(Case("lambda", f"{penalty:g}", fitted(ridge_lambda=penalty)))
    rows.append(Case("lambda", "searched", fitted(lambda_search=True)))
    for texts in (15, 50, 150, ALL_TEXTS):
        rows.append(Case("calibration", str(texts), fitted(), texts=texts))
    variants: dict[str, dict[str, Any]] = {
        "sensitivity": {"weighting": "sensitivity"},
        "query metric": {"metric": "query"},
        "both": {"weighting": "sensitivity", "metric": "query"},
        "layers by R^2 in-sample, k=2": {"selection": "r2", "selection_data": "train", "top_k": min(2, source_layers)},
        "layers by R^2 held out, k=2": {"selection": "r2", "top_k": min(2, source_layers)},
        "layers greedy, k=2": {"selection": "greedy", "top_k": min(2, source_layers)},
        "layers under a budget of 2": {"layer_budget": min(2.0, source_layers)},
    }
    rows += [Case("variant", name, fitted(**changes)) for name, changes in variants.items()]
    for name in ("paper", "fast", "default"):
        for length in LENGTHS:
            rows.append(Case("length", f"{name}, {length} tokens", fitted(name), data=f"prefix-{length}"))
        rows.append(Case("length", f"{name}, long questions", fitted(name), data="long"))
        for domain in DOMAINS:
            rows.append(Case("domain", f"{name}, judged on {domain}", fitted(name), data=domain))
        for genre in ("diary", "story"):
            rows.append(Case("domain", f"{name}, fitted on {genre} alone", fitted(name), genre=genre))
    return rows


def _method_cases(fitted: Callable[..., dict[str, Any]], quick: bool) -> list[Case]:
    """Every method alone, some with the repair of `"default"` too; two source layers at most and the same texts.

    Trainings are short, of equal steps and with a fixed rate; a quarter of the lookups' steps are on running text
    where the row does not say otherwise.
    """
    two = {"top_k": min(2, fitted("paper")["top_k"]), "weighting": "uniform", "native_fraction": 0.0}
    steps, count = (40, 400) if quick else (120, 400)
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
        # Layer 0 follows from the embedding: directions that no calibration token shows are held by the penalty alone.
        "anchors: both, penalty 1e-4 of the diagonal": (
            fitted(**{**two, **both, "ridge_lambda": 1e-4, "ridge_relative": True}),
            {},
        ),
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
        "low rank, half the weights, query metric": (
            fitted(**two, method="low_rank", rank_budget=0.5, metric="query"),
            {},
        ),
        "MLP residual, 256": (fitted(**two, method="mlp", mlp_hidden=(256,), mlp_epochs=5), {}),
        "MLP plain, 256": (fitted(**two, method="mlp", mlp_hidden=(256,), mlp_epochs=5, mlp_residual=False), {}),
        "shared space, width 128": (fitted(**two), {"shared_width": 128}),
        "shared space of five models, width 128": (fitted(**two), {"shared_width": 128, "fleet": True}),
        "shared space of five models, width 256": (fitted(**two), {"shared_width": 256, "fleet": True}),
    }
    policies = {"": {"native_fraction": 0.0}, ", repair": {"native_fraction": 0.15, "repair": "question"}}
    return [
        Case("methods", f"{name}{suffix}", fit, policy, **more)
        for name, (fit, more) in rows.items()
        for suffix, policy in policies.items()
        if not suffix or name in REPAIRED
    ]
