"""In how many of the target's lowest layers repaired tokens have to be recomputed.

What a lookup needs is made in the lower layers: there the tokens of a sentence tell each other who stands before whom.
Once those keys and values are the target's own, the ones above may stay mapped, and repair costs what the lower layers
cost. How many they are shows where the lowest n layers are the target's own for *all* tokens: the KL to the target's
predictions falls steeply at the layer that completes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..errors import CalibrationError
from ..modeling_kvbridge import KVBridgeMapper
from .traces import TracedModel, read_batches

# Of the map's KL: what may be left of it with the lowest layers native.
KEPT_KL = 0.5


def choose_repair_layers(
    mapper: KVBridgeMapper,
    source_model: Any,
    target_model: Any,
    token_batches: Iterable[Any],
    *,
    heldout_fraction: float = 0.1,
    seed: int = 0,
    kept_kl: float = KEPT_KL,
    max_sequences: int = 48,
) -> tuple[int, list[float]]:
    """The least number of lowest layers which, native for all tokens, leave at most a share of the map's KL.

    Args:
        mapper: the mapper.
        source_model, target_model: the pair.
        token_batches: as in [`fit_mapper`].
        heldout_fraction, seed: of the fit; measured is on the sequences that it held out, or on all where there are
            none.
        kept_kl: that share.
        max_sequences: at most so many sequences.

    Returns:
        The number (all layers leave nothing, so there is one), and the KL in nats a token with 0, 1, ... of them.

    Raises:
        CalibrationError: there are no sequences of two tokens or more.
    """
    # Below, because the mappers' modules import this package.
    from ..mappers.distillation_config import DistillationConfig
    from ..mappers.distillation_data import sequences_of, validation_batches
    from ..mappers.functional import FunctionalHandoff, mean_kl

    source, target = TracedModel(source_model, "source"), TracedModel(target_model, "target")
    vocab_size = min(source.geometry.vocab_size, target.geometry.vocab_size)
    training, held = sequences_of(read_batches(token_batches, vocab_size), heldout_fraction, seed)
    if not (held or training):
        raise CalibrationError(
            "repair_layers='auto' is measured on sequences of two tokens or more, and there are none."
        )
    settings = DistillationConfig(validation_sequences=max_sequences)
    batches = list(validation_batches(held or training, settings, seed))
    config, measured = mapper.config, []
    for native in range(target.geometry.num_layers):
        handoff = FunctionalHandoff(source, target, config.num_sinks, config.num_native_suffix, native)
        measured.append(mean_kl(batches, partial(handoff.continuation_kl, mapper)))
        if native > 0 and measured[-1] <= kept_kl * measured[0]:
            return native, measured
    return target.geometry.num_layers, measured


__all__ = ["choose_repair_layers"]
