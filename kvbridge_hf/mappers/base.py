"""What a fit method is: statistics and settings in, a mapper out."""

from __future__ import annotations

import importlib
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..calibration.selection import Selection
from ..calibration.statistics import CalibrationStatistics
from ..calibration.weighting import SensitivityMoments
from ..configuration_kvbridge import KVBridgeConfig
from ..errors import FitConfigError
from ..modeling_kvbridge import KVBridgeMapper
from ..repair_choice import without_learned
from .config import FitConfig

if TYPE_CHECKING:
    from ..calibration.metrics import OutputMetrics

LIBRARIES = ("torch", "transformers", "kvbridge_hf")


@dataclass
class FitData:
    """The pair itself and its data, for methods that statistics are not enough for.

    Attributes:
        source_model, target_model: The pair.
        token_batches: Re-iterable, as in [`fit_mapper`].
        progress (`bool`): Whether to show bars.
        lookups: Texts with questions about them, for a distillation; see [`~mappers.distillation.distill`].
    """

    source_model: Any
    target_model: Any
    token_batches: Iterable[Any]
    progress: bool = True
    lookups: Iterable[Any] | None = None


@dataclass
class FitContext:
    """All that a method may fit from.

    Attributes:
        statistics (`CalibrationStatistics`): Moments of the pair and their provenance.
        config (`FitConfig`): Settings, with `top_k` as a number.
        selection (`Selection`): Layers and heads of each target layer.
        sensitivity (`SensitivityMoments`, *optional*): Weighted moments of the selected features.
        metrics (`OutputMetrics`, *optional*): Of target keys and values, with `metric="query"`.
        data (`FitData`, *optional*): The pair and its data, where the fit is not from statistics alone.
    """

    statistics: CalibrationStatistics
    config: FitConfig
    selection: Selection
    sensitivity: SensitivityMoments | None = None
    metrics: OutputMetrics | None = None
    data: FitData | None = None


class FitMethod(ABC):
    """One way to fit a mapper. A method is a subclass in a file of its own, registered under its name."""

    name: ClassVar[str]
    #: Whether `fit` reads the data again, and so needs `FitContext.data`.
    needs_data: ClassVar[bool] = False

    @abstractmethod
    def fit(self, context: FitContext) -> KVBridgeMapper:
        """Make the mapper."""

    def mapper_config(
        self,
        context: FitContext,
        *,
        runtime: str | None = None,
        method_config: dict[str, Any] | None = None,
        **facts: Any,
    ) -> KVBridgeConfig:
        """The config of a mapper fitted from this context.

        Args:
            context: Of the fit.
            runtime: The [`MapperMethod`] that runs the mapper; that of the fit's name by default.
            method_config: Of the runtime.
            facts: More entries of `config.fit`.
        """
        info, config, selection = context.statistics.info, context.config, context.selection
        assert config.top_k is not None
        provenance = {
            **config.to_dict(),
            "method": self.name,
            "tokens": context.statistics.train.tokens,
            "heldout_tokens": context.statistics.heldout.tokens,
            "selection_scored_on": selection.scored_on,
            "libraries": library_versions(),
            **{name: info[name] for name in PROVENANCE if name in info},
            **facts,
        }
        return KVBridgeConfig(
            source_geometry=info["source_geometry"],
            target_geometry=info["target_geometry"],
            source_fingerprint=info["source_fingerprint"],
            target_fingerprint=info["target_fingerprint"],
            tokenizer_fingerprint=info.get("tokenizer_fingerprint"),
            method=self.name if runtime is None else runtime,
            method_config=method_config or {},
            support=config.support,
            top_k=config.top_k,
            selected_layers=selection.layers,
            head_assignment=selection.heads,
            num_sinks=config.num_sinks,
            num_native_suffix=config.num_native_suffix,
            native_fraction=config.native_fraction,
            repair=without_learned(config.repair),  # until its scorer has been fitted
            native_layers=config.native_layers,
            # "auto" is measured later.
            repair_layers=config.repair_layers if isinstance(config.repair_layers, int) else None,
            boundary_tokens=info.get("boundary_tokens", []),
            max_calibrated_positions=info.get("max_positions"),
            fit=provenance,
        )


# Entries of the statistics' info that go into a mapper's provenance.
PROVENANCE = ("sequences", "heldout_sequences", "skipped_sequences", "input_tokens", "dataset")

_METHODS: dict[str, Callable[[], FitMethod]] = {}


def register_fit(method: type[FitMethod]) -> type[FitMethod]:
    """Class decorator that makes a method known under its `name`, the value of `FitConfig.method`."""
    _METHODS[method.name] = method
    return method


def registered_fits() -> list[str]:
    """Names of the methods that are known so far."""
    return sorted(_METHODS)


def get_fit(name: str) -> FitMethod:
    """The method registered under `name`."""
    importlib.import_module("kvbridge_hf.mappers")  # where the library's own methods register themselves
    if name not in _METHODS:
        raise FitConfigError(f"Unknown fit method {name!r}; there are {sorted(_METHODS)}.")
    return _METHODS[name]()


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that shape a fit."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            from .. import __version__

            versions[name] = __version__
    return versions


__all__ = ["FitContext", "FitData", "FitMethod", "get_fit", "library_versions", "register_fit", "registered_fits"]
