"""What a mapper needs for repair, measured and learned once its map is there."""

from __future__ import annotations

import logging

from ..mappers.base import FitData
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .parts import learns_choice

logger = logging.getLogger(__name__)


def fit_repair(mapper: KVBridgeMapper, config: FitConfig, data: FitData | None) -> KVBridgeMapper:
    """Measure in how many layers to repair, and fit what chooses the tokens, where the settings ask for it.

    Args:
        mapper: Changed in place.
        config: Settings.
        data: The pair, its data and the lookups; without lookups no choice is learned, which is said.
    """
    if config.repair_layers == "auto":
        from .repair_depth import choose_repair_layers

        assert data is not None
        number, measured = choose_repair_layers(
            mapper,
            data.source_model,
            data.target_model,
            data.token_batches,
            heldout_fraction=config.heldout_fraction,
            seed=config.seed,
        )
        mapper.config.repair_layers = number
        mapper.config.fit["repair_layers_kl"] = measured
    return _fit_choice(mapper, config, data)


def _fit_choice(mapper: KVBridgeMapper, config: FitConfig, data: FitData | None) -> KVBridgeMapper:
    if not learns_choice(config):
        return mapper
    if data is None or data.lookups is None:
        logger.warning(
            "repair=%r needs lookups= (texts with questions about them) and got none, so this mapper chooses what to "
            "repair by %r.",
            config.repair,
            mapper.config.repair,
        )
        return mapper
    from .repair_scorer import fit_repair_scorer

    fit_repair_scorer(mapper, data.source_model, data.target_model, data.lookups, seed=config.seed)
    mapper.config.repair = config.repair
    return mapper


__all__ = ["fit_repair"]
