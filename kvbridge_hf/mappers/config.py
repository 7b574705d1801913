"""Settings of a calibration and a fit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..errors import FitConfigError
from .distillation_config import DistillationConfig

OWN_METHODS = ("ridge", "low_rank", "mlp", "anchored", "causal", "fuser")
ANCHORS = (("layer0",), ("embedding",), ("layer0", "embedding"))
_CHOICES: dict[str, tuple[str, ...]] = {
    "metric": ("identity", "query"),
    "support": ("full_head", "head_local"),
    "selection": ("r2", "r2_layer", "greedy"),
    "selection_data": ("heldout", "train"),
    "weighting": ("uniform", "sensitivity"),
    "head_assignment": ("identity", "fitted"),
    "dtype": ("float32", "bfloat16", "float16"),
    "moments_dtype": ("float64", "float32"),
    "short_sequences": ("error", "skip"),
}

# What published systems and this library do. `None` as top_k means min(8, source layers).
_PRESETS: dict[str, dict[str, Any]] = {
    # One pass over the data, closed form, with native sinks and suffix.
    # Greedy selection leaves less error than single-layer R^2 at the same size, wherever not all layers are taken.
    "fast": {"top_k": None, "selection": "greedy"},
    # A second pass for the sensitivity weights; 15 % of the tokens, chosen by the question, recomputed natively, as no
    # fit keeps what a lookup needs (docs/methods.md).
    "default": {"top_k": None, "selection": "greedy", "weighting": "sensitivity", "native_fraction": 0.15},
    # And training on the target's predictions; given lookups, fewer tokens are recomputed, better chosen.
    "quality": {
        "top_k": None,
        "selection": "greedy",
        "weighting": "sensitivity",
        "native_fraction": 0.1,
        "repair": "learned",
        "distillation": DistillationConfig(steps=400),
    },
    # Heo et al., arXiv:2608.03893: full-head ridge, k = 8, lambda = 0.01 on summed moments, layers by in-sample R^2.
    "paper": {
        "top_k": 8,
        "ridge_lambda": 0.01,
        "selection": "r2",
        "selection_data": "train",
        "num_sinks": 0,
        "num_native_suffix": 1,
    },
    # Qu et al. (CacheBridge), arXiv:2609.00891: matched heads only, receiver-sensitivity weights.
    "cachebridge": {
        "support": "head_local",
        "top_k": 8,
        "ridge_lambda": 0.01,
        "weighting": "sensitivity",
        "selection": "r2",
        "selection_data": "train",
        "num_sinks": 0,
        "num_native_suffix": 1,
    },
    # KVLRelay: a head-wise closed form from one source layer, then 100 steps of KL with both models frozen, the
    # learning rate searched for by validation KL.
    "kvlrelay": {
        "support": "head_local",
        "top_k": 1,
        "ridge_lambda": 0.01,
        "selection": "r2",
        "num_sinks": 0,
        "num_native_suffix": 1,
        "distillation": DistillationConfig(steps=100),
    },
}


@dataclass(frozen=True)
class FitConfig:
    """How to calibrate and fit a mapper.

    Args:
        method (`str`): The mapper method: `"ridge"`, `"low_rank"`, `"mlp"`, `"anchored"`, `"causal"`, `"fuser"`, or a
            name given to [`register_fit`].
        support (`str`): `"full_head"` (all heads of the selected source layers feed every target head) or
            `"head_local"` (a target head reads its matched source heads only; 1/source_heads of the weights).
        top_k (`int`, *optional*): Source layers per target layer. None takes min(8, source layers).
        ridge_lambda (`float`): Penalty on the squared weights, added to the *summed* centred moments.
        ridge_relative (`bool`): Multiply the penalty with the mean diagonal of the moments it is added to. With both
            anchors take this and 1e-4: a token that the calibration has not shown is mapped at random else.
        selection (`str`): How source layers are chosen. `"r2"`: R^2 of one source layer at a time from matched heads.
            `"r2_layer"`: the same from all heads of the layer. `"greedy"`: forward selection, each step the layer that
            raises the joint R^2 most.
        selection_data (`str`): Which moments score a selection, `"heldout"` (`"train"` where nothing was held out) or
            `"train"`. In-sample R^2 says nothing once the features outnumber the tokens.
        greedy_candidates (`int`, *optional*): Only so many source layers, the best by single-layer R^2, enter the
            greedy selection. None: `max(16, 2 * top_k)`.
        weighting (`str`): `"uniform"`, or `"sensitivity"`: tokens weighted by how much the target's attention output
            reacts to an error in them (a second pass over the data). Weights change coefficients only.
        ess_per_feature (`float`): Sensitivity weights are shrunk towards uniform until the Kish effective sample size
            reaches this many samples per feature.
        num_sinks (`int`): First tokens of each sequence that are kept out of fit, weights and R^2; the target reads
            them itself in a handoff.
        num_native_suffix (`int`): Last tokens of a prompt that the target should run itself; stored as the mapper's
            recommendation, does not change the fit.
        native_fraction (`float`), repair (`str`), native_layers (`int`): What a handoff should recompute natively on
            top of the map, see [`HandoffPolicy`]; stored as the mapper's recommendation, do not change the fit.
            `repair="learned"` fits a scorer afterwards and needs lookups (without them: by the question).
        repair_layers (`int` or `"auto"`, *optional*): In how many of the lowest layers a handoff recomputes the tokens
            that it repairs; None: in all. `"auto"` measures on held-out sequences how many there have to be (see
            [`~calibration.repair_depth.choose_repair_layers`]) and needs both models.
        token_stride (`int`): Use every so-manieth position after the sinks.
        heldout_fraction (`float`): Share of the sequences kept out of the fit, chosen by a hash of their tokens.
        head_assignment (`str`): Which source heads a target head is matched with. `"identity"`: by number
            (head h reads floor(h * source_heads / target_heads), or its group of source heads where the source has
            more). `"fitted"`: by R^2 from the data, for each pair of layers.
        seed (`int`): Chooses the held-out sequences.
        dtype (`str`): In which the mapper is stored.
        moments_dtype (`str`): In which products of features are taken. `"float64"` makes a fit independent of how the
            tokens were split, to rounding; `"float32"` is faster on GPUs with little float64 throughput. Sums and
            solves are float64 in both.
        head_block (`int`, *optional*): With head-local support, how many source heads of a layer feed a target head,
            from 1 to all of them. None takes as many as make every source head be read.
        layer_budget (`float`, *optional*): Source layers per target layer on average, under one budget for the whole
            mapper: each target layer takes between 1 and `top_k` of them, those that lower the held-out error most,
            and none that raises it. None gives every target layer `top_k`.
        lambda_search (`bool`): Choose the penalty of each target layer, head and kind on held-out moments, from
            `ridge_lambda` up to the mean diagonal of the moments in powers of ten.
        metric (`str`): In which errors are measured, `"identity"`, or `"query"`: a key error `e` costs
            `e' E[qq'] e` over the queries that the target asks (in content space, in the key's own frame), a value
            error what the attention's output projection makes of it. A penalty then becomes one per direction, and
            low-rank maps keep the directions that are looked along.
        rank (`int`, *optional*): Of `method="low_rank"`, per target layer and kind (per head with head-local support).
        rank_energy (`float`, *optional*): Instead of `rank`: the least rank that keeps this share of what the full map
            explains, in the metric.
        rank_budget (`float`, *optional*): Instead of both: weights as a share of the full map's; one budget for the
            whole mapper, spent where it explains most.
        mlp_hidden (`tuple[int, ...]`): Widths of the hidden layers of `method="mlp"`.
        mlp_residual (`bool`): Add the network to the linear map, instead of putting it in its place.
        mlp_epochs, mlp_learning_rate, mlp_batch_size: Of its training with Adam; the best epoch on held-out tokens is
            kept.
        anchors (`tuple[str, ...]`): Exact parts of the target that `method="anchored"` reads beside the source's:
            `"layer0"` (keys and values of its layer 0), `"embedding"`, or both in this order.
        causal_width, causal_heads (`int`): Of the attention layer that `method="causal"` runs over the source's
            features, on top of the linear map. It starts at nothing and is trained by `distillation`.
        fuser_width (`int`): Hidden width of `method="fuser"`, likewise.
        max_samples (`int`): Tokens that a method which trains on samples keeps, drawn at random.
        distillation (`DistillationConfig`, *optional*): Train on the target's predictions afterwards.
        short_sequences (`str`): What to do with a sequence that has no token left after the sinks, `"error"` or
            `"skip"` (they are counted).

    Raises:
        FitConfigError: a value is out of range.
    """

    method: str = "ridge"
    support: str = "full_head"
    top_k: int | None = 8
    ridge_lambda: float = 0.01
    ridge_relative: bool = False
    selection: str = "r2"
    selection_data: str = "heldout"
    greedy_candidates: int | None = None
    weighting: str = "uniform"
    ess_per_feature: float = 4.0
    num_sinks: int = 4
    num_native_suffix: int = 8
    native_fraction: float = 0.0
    repair: str = "question"
    native_layers: int = 0
    repair_layers: int | str | None = None
    token_stride: int = 1
    heldout_fraction: float = 0.1
    head_assignment: str = "identity"
    seed: int = 0
    dtype: str = "float32"
    moments_dtype: str = "float64"
    short_sequences: str = "error"
    head_block: int | None = None
    layer_budget: float | None = None
    lambda_search: bool = False
    metric: str = "identity"
    rank: int | None = None
    rank_energy: float | None = None
    rank_budget: float | None = None
    mlp_hidden: tuple[int, ...] = (1024, 1024)
    mlp_residual: bool = True
    mlp_epochs: int = 20
    mlp_learning_rate: float = 1e-3
    mlp_batch_size: int = 4096
    anchors: tuple[str, ...] = ("layer0",)
    causal_width: int = 64
    causal_heads: int = 4
    fuser_width: int = 64
    max_samples: int = 200_000
    distillation: DistillationConfig | None = None

    def __post_init__(self):
        if isinstance(self.distillation, dict):
            object.__setattr__(self, "distillation", DistillationConfig.from_dict(self.distillation))
        for name in ("mlp_hidden", "anchors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_method(self.method)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise FitConfigError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        for name, least in (
            ("num_sinks", 0),
            ("num_native_suffix", 0),
            ("native_layers", 0),
            ("token_stride", 1),
            ("seed", 0),
        ):
            _check_int(name, getattr(self, name), least)
        for name in ("mlp_epochs", "mlp_batch_size", "max_samples", "causal_width", "causal_heads", "fuser_width"):
            _check_int(name, getattr(self, name), 1)
        for width in self.mlp_hidden:
            _check_int("mlp_hidden", width, 1)
        for name in ("layer_budget", "rank_energy", "rank_budget"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name), None if name == "layer_budget" else 1.0)
        _check_positive("mlp_learning_rate", self.mlp_learning_rate, None)
        if sum(getattr(self, name) is not None for name in ("rank", "rank_energy", "rank_budget")) > 1:
            raise FitConfigError("Give one of rank, rank_energy and rank_budget.")
        if self.anchors not in ANCHORS:
            raise FitConfigError(f"anchors must be one of {ANCHORS}, got {self.anchors!r}.")
        if self.causal_width % (2 * self.causal_heads):
            raise FitConfigError(
                f"causal_width={self.causal_width} must be causal_heads={self.causal_heads} times an even number."
            )
        if self.head_block is not None and self.support != "head_local":
            raise FitConfigError(f"head_block={self.head_block!r} belongs to support='head_local'.")
        if self.layer_budget is not None and self.method != "ridge":
            raise FitConfigError(
                f"layer_budget belongs to method='ridge'; method is {self.method!r} (a low-rank map has rank_budget)."
            )
        for name in ("top_k", "greedy_candidates", "head_block", "rank"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        for name in ("ridge_lambda", "ess_per_feature", "heldout_fraction"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise FitConfigError(f"{name} must be a finite number >= 0, got {value!r}.")
        if self.repair_layers not in (None, "auto"):
            _check_int("repair_layers", self.repair_layers, 1)
        if not isinstance(self.native_fraction, (int, float)) or not 0 <= self.native_fraction <= 1:
            raise FitConfigError(f"native_fraction must lie between 0 and 1, got {self.native_fraction!r}.")
        if self.heldout_fraction >= 1:
            raise FitConfigError(
                f"heldout_fraction must be below 1, got {self.heldout_fraction!r}; 0.1 keeps a tenth of the sequences."
            )
        for name in ("ridge_relative", "lambda_search", "mlp_residual"):
            if not isinstance(getattr(self, name), bool):
                raise FitConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> FitConfig:
        """Settings of a published system or of this library, by name.

        Args:
            name: `"paper"` (Heo et al. 2608.03893), `"cachebridge"` (Qu et al. 2609.00891), `"kvlrelay"`, or ours:
                `"fast"` (one pass, closed form), `"default"` (two passes, closed form with sensitivity weights),
                `"quality"` (and training on the target's predictions; wants lookups).
            overrides: Fields to change.
        """
        if name not in _PRESETS:
            raise FitConfigError(f"Unknown preset {name!r}; there are {', '.join(sorted(_PRESETS))}.")
        return cls.from_dict({**_PRESETS[name], **overrides})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FitConfig:
        """Inverse of `to_dict`.

        Raises:
            FitConfigError: names the fields that do not exist.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise FitConfigError(f"Unknown fit settings {unknown}; there are {sorted(known)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = {**asdict(self), "mlp_hidden": list(self.mlp_hidden), "anchors": list(self.anchors)}
        if self.distillation is not None:
            values["distillation"] = self.distillation.to_dict()
        return values

    def replace(self, **overrides: Any) -> FitConfig:
        """A copy with some fields changed, checked again."""
        return self.from_dict({**self.to_dict(), **overrides})

    def resolve_top_k(self, source_layers: int) -> FitConfig:
        """The same settings with `top_k` as a number that fits the source.

        Raises:
            FitConfigError: `top_k` is larger than the number of source layers.
        """
        if self.top_k is None:
            return replace(self, top_k=min(8, source_layers))
        if self.top_k > source_layers:
            raise FitConfigError(
                f"top_k={self.top_k} source layers asked for, but the source has {source_layers}; use top_k <= "
                f"{source_layers}, or top_k=None for min(8, source layers)."
            )
        return self


def _check_method(name: Any) -> None:
    if name in OWN_METHODS:
        return
    from .base import registered_fits  # methods of the user's own; `base` imports this module

    known = sorted({*OWN_METHODS, *registered_fits()})
    if name not in known:
        raise FitConfigError(f"method must be one of {known} or one registered with register_fit, got {name!r}.")


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FitConfigError(f"{name} must be an integer >= {least}, got {value!r}.")


def _check_positive(name: str, value: Any, most: float | None) -> None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not fine or (most is not None and value > most):
        raise FitConfigError(f"{name} must be above 0{'' if most is None else f' and at most {most}'}, got {value!r}.")


__all__ = ["DistillationConfig", "FitConfig"]
