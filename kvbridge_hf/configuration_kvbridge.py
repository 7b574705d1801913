"""Configuration of a mapper: which pair it is for, what it reads, how it was fitted and what it was measured to do."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

from .errors import ArtifactError

SUPPORTS = ("full_head", "head_local")


class KVBridgeConfig(PreTrainedConfig):
    """What a [`KVBridgeMapper`] is and where it comes from; the whole of an artifact's `config.json`.

    Args:
        source_geometry, target_geometry (`dict`):
            [`KVGeometry.to_dict`] of both models. A mapper reads only `num_layers`, `num_kv_heads` and `head_dim`.
        source_fingerprint, target_fingerprint (`dict`):
            [`model_fingerprint`] of both checkpoints.
        tokenizer_fingerprint (`str`, *optional*):
            [`tokenizer_fingerprint`] of the tokenizer that both models share.
        method (`str`, defaults to `"ridge"`):
            The mapper method, a name registered with [`register_method`].
        method_config (`dict`):
            The method's own settings.
        support (`str`, defaults to `"full_head"`):
            `"full_head"`: all heads of the selected source layers feed every target head. `"head_local"`: a target
            head reads only the source heads assigned to it.
        top_k (`int`, defaults to 1):
            Source layers per target layer.
        selected_layers (`list[list[int]]`):
            `(target_layers, top_k)`: source layers of each target layer, best first. The order is the feature order.
        head_assignment (`list`, *optional*):
            `(target_layers, top_k, target_heads, block)` source heads, for `support="head_local"` only. `block` is the
            number of source heads that one target head reads in one source layer.
        num_sinks (`int`, defaults to 4):
            First tokens of a sequence that were kept out of the fit and that the target should read itself.
        num_native_suffix (`int`, defaults to 1):
            Last tokens of a prompt that the fit recommends to leave to the target.
        native_fraction (`float`, defaults to 0.0), repair (`str`), native_layers (`int`, defaults to 0), repair_layers
        (`int`, *optional*):
            What a handoff with this mapper should recompute natively, and how it chooses; see [`HandoffPolicy`].
        repair_scorer (`dict`):
            Layers, heads and rank of the scorer behind `repair="learned"`, and how it was fitted; empty without one.
        boundary_tokens (`list[int]`):
            Ids of the tokens that end a sentence or a line, so that repair takes whole ones; empty where the fit did
            not know the tokenizer.
        max_calibrated_positions (`int`, *optional*):
            One more than the largest position seen in calibration.
        fit, gates, evaluation (`dict`):
            Provenance of the fit, gate thresholds, and measured results. Cards show what stands here and nothing else.
        weight_hashes (`dict[str, str]`):
            SHA-256 of each weight file, written by [`KVBridgeMapper.save_pretrained`].
    """

    model_type = "kvbridge"

    # Transformers builds a config without arguments to find the defaults, so everything has a default here and is
    # checked where a mapper is made (`check`).
    source_geometry: dict[str, Any] = field(default_factory=dict)
    target_geometry: dict[str, Any] = field(default_factory=dict)
    source_fingerprint: dict[str, Any] = field(default_factory=dict)
    target_fingerprint: dict[str, Any] = field(default_factory=dict)
    tokenizer_fingerprint: str | None = None
    method: str = "ridge"
    method_config: dict[str, Any] = field(default_factory=dict)
    support: str = "full_head"
    top_k: int = 1
    selected_layers: list[list[int]] = field(default_factory=list)
    head_assignment: list[list[list[list[int]]]] | None = None
    num_sinks: int = 4
    num_native_suffix: int = 1
    native_fraction: float = 0.0
    repair: str = "question"
    native_layers: int = 0
    repair_layers: int | None = None
    repair_scorer: dict[str, Any] = field(default_factory=dict)
    boundary_tokens: list[int] = field(default_factory=list)
    max_calibrated_positions: int | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    gates: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    weight_hashes: dict[str, str] = field(default_factory=dict)

    @property
    def head_block(self) -> int:
        """Source heads that one target head reads in one source layer."""
        if self.support == "full_head":
            return int(self.source_geometry["num_kv_heads"])
        assert self.head_assignment is not None
        return len(self.head_assignment[0][0][0])

    @property
    def num_features(self) -> int:
        """Input features of one target head: `top_k * head_block * source head_dim`."""
        return self.top_k * self.head_block * int(self.source_geometry["head_dim"])

    def check(self) -> None:
        """Check that the fields agree with each other.

        Raises:
            ArtifactError: names the first field that is missing, malformed or out of range.
        """
        for role, geometry in (("source", self.source_geometry), ("target", self.target_geometry)):
            for name in ("num_layers", "num_kv_heads", "head_dim"):
                value: Any = geometry.get(name)
                if not _is_int(value) or value < 1:
                    raise ArtifactError(
                        f"{role}_geometry[{name!r}] must be a positive integer, got {value!r}. Build it with "
                        "KVGeometry.from_config(model.config).to_dict()."
                    )
        if self.support not in SUPPORTS:
            raise ArtifactError(f"support must be one of {SUPPORTS}, got {self.support!r}.")
        if not _is_int(self.top_k) or self.top_k < 1:
            raise ArtifactError(f"top_k must be a positive integer, got {self.top_k!r}.")
        for name in ("num_sinks", "num_native_suffix", "native_layers"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise ArtifactError(f"{name} must be a non-negative integer, got {getattr(self, name)!r}.")
        if self.repair_layers is not None and (not _is_int(self.repair_layers) or self.repair_layers < 1):
            raise ArtifactError(f"repair_layers must be a positive integer or null, got {self.repair_layers!r}.")
        if not isinstance(self.native_fraction, (int, float)) or not 0 <= self.native_fraction <= 1:
            raise ArtifactError(f"native_fraction must lie between 0 and 1, got {self.native_fraction!r}.")
        self._check_selected_layers()
        self._check_head_assignment()

    def _check_selected_layers(self) -> None:
        target_layers, source_layers = self.target_geometry["num_layers"], self.source_geometry["num_layers"]
        if len(self.selected_layers) != target_layers:
            raise ArtifactError(
                f"selected_layers must have one row for each of the {target_layers} target layers, got "
                f"{len(self.selected_layers)} rows."
            )
        for layer, row in enumerate(self.selected_layers):
            if len(row) != self.top_k or len(set(row)) != len(row):
                raise ArtifactError(
                    f"selected_layers[{layer}] must name top_k={self.top_k} different source layers, got {row}."
                )
            if any(not _is_int(index) or not 0 <= index < source_layers for index in row):
                raise ArtifactError(
                    f"selected_layers[{layer}] = {row} leaves the source's layers 0 to {source_layers - 1}."
                )

    def _check_head_assignment(self) -> None:
        if self.support == "full_head":
            if self.head_assignment is not None:
                raise ArtifactError("head_assignment belongs to support='head_local'; support is 'full_head'.")
            return
        source_heads, target_heads = self.source_geometry["num_kv_heads"], self.target_geometry["num_kv_heads"]
        expected = (
            f"(target_layers={len(self.selected_layers)}, top_k={self.top_k}, target_heads={target_heads}, block)"
        )
        assignment = self.head_assignment
        if assignment is None or len(assignment) != len(self.selected_layers):
            raise ArtifactError(f"support='head_local' needs a head_assignment of shape {expected}.")
        blocks = set()
        for layer, rows in enumerate(assignment):
            if len(rows) != self.top_k or any(len(heads) != target_heads for heads in rows):
                raise ArtifactError(f"head_assignment[{layer}] does not have the shape {expected}.")
            for block in (block for heads in rows for block in heads):
                blocks.add(len(block))
                if any(not _is_int(head) or not 0 <= head < source_heads for head in block):
                    raise ArtifactError(
                        f"head_assignment[{layer}] names heads {block}; the source has heads 0 to {source_heads - 1}."
                    )
        if len(blocks) != 1 or 0 in blocks:
            raise ArtifactError(
                f"head_assignment must give every target head the same number (at least one) of source heads, got "
                f"{sorted(blocks)}."
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = ["KVBridgeConfig"]
