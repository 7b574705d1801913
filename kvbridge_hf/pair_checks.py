"""Whether a mapper was fitted for the models in hand: the source when a bridge is made, each target once."""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .errors import KVBridgeError, PairMismatchError, UnsupportedModelError
from .fingerprint import check_fingerprint
from .geometry import KVGeometry, check_pair
from .modeling_kvbridge import KVBridgeMapper
from .rotary import ContentRotary


@dataclass
class _Result:
    """The result of checking one target once."""

    rotary: ContentRotary | None = None
    error: KVBridgeError | None = None


class PairChecks:
    """The checks of one bridge. Threads may share it.

    Args:
        source_model, mapper: the bridge's.

    Raises:
        PairMismatchError, FingerprintError, UnsupportedModelError: the source is not what the mapper reads, or the
            geometries cannot work together.
    """

    def __init__(self, source_model: PreTrainedModel, mapper: KVBridgeMapper):
        config = mapper.config
        _refuse_learned_prompt(source_model)
        self._config, self._source_model = config, source_model
        geometry = _check_geometry(source_model, config.source_geometry, "source")
        check_pair(geometry, KVGeometry.from_dict(config.target_geometry)).raise_if_unfit()
        check_fingerprint(config.source_fingerprint, source_model, "source")
        #: The source's rotation.
        self.source_rotary = _checked_rotary(source_model)
        self._targets: weakref.WeakKeyDictionary[Any, _Result] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def target(self, target_model: PreTrainedModel) -> ContentRotary:
        """Check that the mapper was fitted for this target, and return the target's rotation.

        Raises:
            PairMismatchError, FingerprintError, UnsupportedModelError: what is wrong, the same each time it is asked.
        """
        _refuse_learned_prompt(target_model)  # a model may be wrapped after it was checked
        with self._lock:
            checked = self._targets.get(target_model)
            if checked is None:
                checked = _Result()
                try:
                    _check_geometry(target_model, self._config.target_geometry, "target")
                    check_pair(self._source_model, target_model).raise_if_unfit()
                    check_fingerprint(self._config.target_fingerprint, target_model, "target")
                    checked.rotary = _checked_rotary(target_model)
                except KVBridgeError as error:
                    checked.error = error
                self._targets[target_model] = checked
        if checked.error is not None:
            raise copy.copy(checked.error)  # an exception that is raised again would keep every caller's frames
        assert checked.rotary is not None
        return checked.rotary


def _refuse_learned_prompt(model: Any) -> None:
    """Prompt and prefix tuning (PEFT) put columns in front of a prompt that the other model has not read.

    While such a wrapper's `generate` runs, the model inside prepares its inputs by the wrapper's method.
    """
    owner = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    for wrapper in (model, owner):
        if getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"The model has a learned prompt ({type(wrapper.active_peft_config).__name__}), columns that no other "
                "model has read and a map would leave out. Use an adapter that changes weights (LoRA), or the model "
                "without its adapter."
            )


def _check_geometry(model: PreTrainedModel, expected: dict[str, Any], role: str) -> KVGeometry:
    geometry = KVGeometry.from_model(model)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(geometry, name) != expected[name]:
            raise PairMismatchError(
                f"The mapper's {role} has {name}={expected[name]}, this {role} model has {getattr(geometry, name)}. "
                f"Use the mapper that was fitted for it, or the {role} that this mapper was fitted for."
            )
    return geometry


def _checked_rotary(model: PreTrainedModel) -> ContentRotary:
    rotary = ContentRotary.from_model(model)
    rotary.verify(model)
    return rotary


__all__ = ["PairChecks"]
