"""Settings of a distillation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import FitConfigError


@dataclass(frozen=True)
class DistillationConfig:
    """How to train a mapper on the target's predictions, after its closed form.

    Args:
        steps (`int`): Optimizer steps of a run; 0 only measures.
        learning_rate (`float`, *optional*): Peak of Adam's rate. None searches for it.
        learning_rates (`tuple[float, ...]`): Rates that the search tries, ascending, by a constant factor.
        search_steps (`int`, *optional*): Steps of a run of the search; None takes a quarter of `steps`.
        max_extensions (`int`): How often the search may go on past the edge of `learning_rates` where the best one
            lies there.
        seeds (`tuple[int, ...]`): One run each from the same start; the best on validation is kept, and mean and
            standard error over the seeds are reported.
        batch_size (`int`): Sequences in a step.
        warmup_fraction (`float`): Share of the steps over which the rate rises; it falls as a cosine after.
        max_grad_norm (`float`): Clipping of the gradient.
        precondition (`bool`): Train a linear map in coordinates in which its features are white, as its features'
            directions differ in size by orders of magnitude.
        min_prefix, min_continuation, max_continuation (`int`): Columns; where a prefix ends is drawn at random for
            each step, and so is the length of the continuation.
        lookup_fraction (`float`): Share of the steps (and of the validation batches) whose continuations are questions
            about the prefix with their answers, from the `lookups` of [`distill`]; the others take running text.
        native_fraction (`float`): Share of the mapped tokens that the target has recomputed in every second step (and
            validation batch), chosen by the question as a handoff chooses them: the map learns what repair leaves, and
            to do without.
        kl_weight, reconstruction_weight, attention_weight, nll_weight (`float`): Of the losses: KL(target alone ||
            target on the mapped cache) on the continuation's tokens; squared error of mapped keys and values over
            their variance; squared error of what the continuation's heads read over its power; and the loss of the
            continuation's own tokens, for a method that may do better than the target. With it, validation is on
            `kl_weight * KL + nll_weight * NLL`.
        evaluations (`int`): How often a run is measured on the validation sequences; the best state is kept, the
            start among them.
        validation_sequences (`int`): At most so many of the held-out sequences.
    """

    steps: int = 200
    learning_rate: float | None = None
    learning_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    search_steps: int | None = None
    max_extensions: int = 3
    seeds: tuple[int, ...] = (0,)
    batch_size: int = 8
    warmup_fraction: float = 0.05
    max_grad_norm: float = 1.0
    precondition: bool = False
    min_prefix: int = 32
    min_continuation: int = 8
    max_continuation: int = 64
    lookup_fraction: float = 0.0
    native_fraction: float = 0.0
    kl_weight: float = 1.0
    reconstruction_weight: float = 0.0
    attention_weight: float = 0.0
    nll_weight: float = 0.0
    evaluations: int = 5
    validation_sequences: int = 64

    def __post_init__(self):
        # A config that went through JSON has lists.
        for name in ("learning_rates", "seeds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        least = {"steps": 0, "max_extensions": 0, "batch_size": 1, "min_prefix": 1, "min_continuation": 1}
        least |= {"max_continuation": 1, "evaluations": 1, "validation_sequences": 1}
        for name, bound in least.items():
            _check(isinstance(getattr(self, name), int) and getattr(self, name) >= bound, name, self, f">= {bound}")
        _check(self.search_steps is None or self.search_steps >= 1, "search_steps", self, "None or >= 1")
        for name in ("warmup_fraction", "kl_weight", "reconstruction_weight", "attention_weight", "nll_weight"):
            _check(_is_number(getattr(self, name)) and getattr(self, name) >= 0, name, self, "finite and >= 0")
        for name in ("lookup_fraction", "native_fraction"):
            value = getattr(self, name)
            _check(_is_number(value) and 0 <= value <= 1, name, self, "between 0 and 1")
        rates = (*self.learning_rates, *(() if self.learning_rate is None else (self.learning_rate,)))
        _check(all(_is_number(rate) and rate > 0 for rate in rates), "learning_rates", self, "above 0")
        _check(
            len(self.learning_rates) > 0 and list(self.learning_rates) == sorted(set(self.learning_rates)),
            "learning_rates",
            self,
            "ascending",
        )
        _check(self.max_grad_norm > 0, "max_grad_norm", self, "above 0")
        _check(len(self.seeds) > 0 and len(set(self.seeds)) == len(self.seeds), "seeds", self, "different numbers")
        _check(
            self.kl_weight + self.reconstruction_weight + self.attention_weight + self.nll_weight > 0,
            "kl_weight",
            self,
            "or another above 0",
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DistillationConfig:
        """Inverse of `to_dict`."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise FitConfigError(f"Unknown distillation settings {unknown}; see DistillationConfig.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "learning_rates": list(self.learning_rates), "seeds": list(self.seeds)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(holds: bool, name: str, config: DistillationConfig, wanted: str) -> None:
    if not holds:
        raise FitConfigError(f"distillation: {name} must be {wanted}, got {getattr(config, name)!r}.")


__all__ = ["DistillationConfig"]
