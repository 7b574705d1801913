"""Traces: what both models wrote into their caches for the same tokens, in content space.

A trace lives for one batch. Positions come from the attention mask; padding, the sinks and the positions outside the
stride are dropped before anything else sees them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cache_argument import output_cache
from ..errors import CalibrationError
from ..geometry import KVGeometry
from ..rotary import ContentRotary, positions_from_mask


class NonFiniteError(CalibrationError):
    """A model gave NaN or Inf for some sequences of a batch.

    Attributes:
        rows (`torch.Tensor`): Bool, which rows of the batch.
    """

    def __init__(self, message: str, rows: torch.Tensor):
        super().__init__(message)
        self.rows = rows


@dataclass
class Batch:
    """Checked tokens of some sequences.

    Attributes:
        input_ids, attention_mask (`(B, T)`): Long and bool; padded columns hold token 0.
        numbers (`(B,)`): Number of each sequence in the calibration data.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    numbers: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return self.attention_mask.sum(dim=1)

    def sequence_hashes(self, seed: int) -> list[float]:
        """A number in [0, 1) for each sequence that depends on its tokens and the seed, and on nothing around it."""
        hashes = []
        for ids, mask in zip(self.input_ids, self.attention_mask, strict=True):
            digest = hashlib.sha256(str(seed).encode())
            digest.update(ids[mask].to("cpu", torch.int64).numpy().astype("<i8").tobytes())
            hashes.append(int.from_bytes(digest.digest()[:8], "little") / 2**64)
        return hashes

    def select(self, rows: torch.Tensor) -> Batch:
        return Batch(self.input_ids[rows], self.attention_mask[rows], self.numbers[rows])


def read_batches(token_batches: Iterable[Any], vocab_size: int) -> Iterator[Batch]:
    """Check the calibration data batch by batch.

    Args:
        token_batches: `input_ids` tensors (`(B, T)` or `(T,)`), lists of token ids, or mappings with `input_ids` and
            `attention_mask`.
        vocab_size: Token ids must be below it.

    Raises:
        CalibrationError: a batch is none of these, or holds a token outside the vocabulary; says which sequence.
    """
    first = 0
    for number, item in enumerate(token_batches):
        batch = _as_batch(item, number, first)
        outside = batch.attention_mask & ((batch.input_ids < 0) | (batch.input_ids >= vocab_size))
        if bool(outside.any()):
            row, column = (int(place) for place in outside.nonzero()[0])
            raise CalibrationError(
                f"Sequence {first + row} holds token {int(batch.input_ids[row, column])} at column {column}; the "
                f"models' shared vocabulary has {vocab_size} tokens. Tokenize the data with the models' own tokenizer "
                "and mask padding with attention_mask=0."
            )
        batch.input_ids = batch.input_ids.masked_fill(~batch.attention_mask, 0)
        first += len(batch.input_ids)
        yield batch


def _as_batch(item: Any, number: int, first: int) -> Batch:
    mask = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise CalibrationError(f"Batch {number} has no 'input_ids', only {sorted(item)}.")
        item, mask = item["input_ids"], item.get("attention_mask")
    try:
        ids = torch.as_tensor(item)
        mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    except (ValueError, TypeError, RuntimeError) as error:
        raise CalibrationError(
            f"Batch {number} is no rectangle of token ids ({error}). Pad it and pass an attention_mask, or pass one "
            "sequence at a time."
        ) from error
    if ids.ndim == 1:
        ids = ids.unsqueeze(0)
    if mask.ndim == 1:
        mask = mask.unsqueeze(0)
    if ids.ndim != 2 or (ids.is_floating_point() and ids.numel()) or ids.dtype == torch.bool:
        raise CalibrationError(
            f"Batch {number} has input_ids of shape {tuple(ids.shape)} and dtype {ids.dtype}; pass integers of shape "
            "(batch, tokens)."
        )
    if mask.shape != ids.shape:
        raise CalibrationError(
            f"Batch {number} has input_ids {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}; they must agree."
        )
    return Batch(ids.long(), mask.bool(), first + torch.arange(len(ids)))


@dataclass
class Trace:
    """Content keys and values of both models for `N` tokens.

    Attributes:
        source_keys, source_values (`(source_layers, N, source_heads, source_dim)`): Float32, or float64 from a
            float64 model.
        target_keys, target_values (`(target_layers, N, target_heads, target_dim)`): Likewise.
        rows (`(N,)`): Row of the batch each token is from.
        position_ids (`(N,)`): Its position in the sequence.
    """

    source_keys: torch.Tensor
    source_values: torch.Tensor
    target_keys: torch.Tensor
    target_values: torch.Tensor
    rows: torch.Tensor
    position_ids: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.source_keys.shape[1]

    def select(self, tokens: torch.Tensor) -> Trace:
        """Some of the tokens, by a bool mask or indices `(N',)`."""
        return Trace(
            **{
                name: getattr(self, name)[:, tokens.to(getattr(self, name).device)]
                for name in ("source_keys", "source_values", "target_keys", "target_values")
            },
            rows=self.rows[tokens],
            position_ids=self.position_ids[tokens],
        )


class TracedModel:
    """A model with what tracing needs to know about it."""

    def __init__(self, model: Any, role: str):
        self.model, self.role = model, role
        self.geometry = KVGeometry.from_model(model)
        self.rotary = ContentRotary.from_model(model)
        # The language modelling head is the largest product of a small model and tracing does not need it.
        self.body: Any = getattr(model, "base_model", model)
        self.takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where the model wants its inputs."""
        embeddings = self.model.get_input_embeddings()
        device: torch.device = embeddings.weight.device
        if device.type == "meta":  # offloaded by accelerate, whose hook knows where it runs
            device = torch.device(embeddings._hf_hook.execution_device)
        return device

    def forward(self, batch: Batch) -> Any:
        """The cache after reading a batch from its first token."""
        device = self.device
        mask = batch.attention_mask.long()
        kwargs = {"position_ids": positions_from_mask(mask).to(device)} if self.takes_positions else {}
        output = self.body(
            input_ids=batch.input_ids.to(device), attention_mask=mask.to(device), use_cache=True, **kwargs
        )
        return output_cache(output)

    def content(self, batch: Batch, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Content keys and values of the kept tokens.

        Args:
            batch: Sequences.
            keep (`(B, T)`): Bool; which tokens.

        Returns:
            Two tensors `(layers, N, heads, dim)` on one device.

        Raises:
            NonFiniteError: a layer gave NaN or Inf, names the first and the sequence.
        """
        cache = self.forward(batch)
        if len(cache.layers) != self.geometry.num_layers:
            raise CalibrationError(
                f"The {self.role} wrote a cache of {len(cache.layers)} layers, and its config says "
                f"{self.geometry.num_layers}. Only models with one K and one V per layer can be calibrated."
            )
        positions = positions_from_mask(batch.attention_mask.long())[keep].unsqueeze(0)
        keys, values = [], []
        cos_sin: dict[Any, Any] = {}
        for index, layer in enumerate(cache.layers):
            device = layer.keys.device
            rotation = (self.rotary.rotation_of(index), device)
            if rotation not in cos_sin:  # the same for all layers of one kind
                cos_sin[rotation] = self.rotary.cos_sin(positions.to(device), index)
            chosen = keep.to(device)
            # The kept tokens of all rows as one row: what is left out needs no rotation undone.
            kept = _at_least_float32(layer.keys.transpose(1, 2)[chosen]).transpose(0, 1).unsqueeze(0)
            keys.append(self.rotary.strip_with(kept, cos_sin[rotation], index)[0].transpose(0, 1))
            values.append(_at_least_float32(layer.values.transpose(1, 2)[chosen]))
        device = keys[0].device
        stacked = [torch.stack([part.to(device) for part in parts]) for parts in (keys, values)]
        self._check_finite(stacked, batch, keep)
        return stacked[0], stacked[1]

    def _check_finite(self, stacked: list[torch.Tensor], batch: Batch, keep: torch.Tensor) -> None:
        bad = torch.stack([~torch.isfinite(tensor).all(dim=3).all(dim=2) for tensor in stacked])  # kind, layer, token
        if not bool(bad.any()):
            return
        layer = int(bad.any(dim=2).any(dim=0).nonzero()[0])
        kind = "keys" if bool(bad[0, layer].any()) else "values"
        token = int(bad[0 if kind == "keys" else 1, layer].nonzero()[0])
        places = keep.nonzero().to(bad.device)
        row, column = (int(place) for place in places[token])
        rows = torch.zeros(len(batch.input_ids), dtype=torch.bool)
        rows[places[bad.any(dim=1).any(dim=0), 0].cpu()] = True
        raise NonFiniteError(
            f"The {self.role}'s {kind} of layer {layer} are NaN or Inf in sequence {int(batch.numbers[row])} at "
            f"column {column}. Load the model in bfloat16 or float32 (float16 overflows), check the checkpoint, or "
            "leave the sequence out.",
            rows,
        )


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; the training mode is put back afterwards."""
    modes = [(model, model.training) for model in models]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for model, mode in modes:
            model.train(mode)


def kept_tokens(attention_mask: torch.Tensor, num_sinks: int, token_stride: int) -> torch.Tensor:
    """Which tokens take part in a fit: valid, behind the sinks, on the stride. `(B, T)` bool."""
    after_sinks = positions_from_mask(attention_mask.long()) - num_sinks
    return attention_mask.bool() & (after_sinks >= 0) & (after_sinks % token_stride == 0)


def trace(
    source_model: nn.Module | TracedModel,
    target_model: nn.Module | TracedModel,
    batch: Batch | torch.Tensor | Mapping[str, Any],
    num_sinks: int = 0,
    token_stride: int = 1,
) -> Trace:
    """Run both models over a batch and keep what a fit reads.

    Args:
        source_model, target_model: Causal LMs, or [`TracedModel`]s where many batches follow.
        batch: `input_ids` `(B, T)`, a mapping with `attention_mask` beside it, or a checked [`Batch`].
        num_sinks: First tokens of each sequence to leave out.
        token_stride: Keep every so-manieth position after the sinks.

    Raises:
        CalibrationError: a model gave NaN or Inf, or the batch is malformed.
    """
    source = source_model if isinstance(source_model, TracedModel) else TracedModel(source_model, "source")
    target = target_model if isinstance(target_model, TracedModel) else TracedModel(target_model, "target")
    if not isinstance(batch, Batch):
        vocab_size = min(source.geometry.vocab_size, target.geometry.vocab_size)
        batch = next(read_batches([batch], vocab_size))
    keep = kept_tokens(batch.attention_mask, num_sinks, token_stride)
    with evaluating(source.model, target.model):
        source_content = source.content(batch, keep)
        target_content = source_content if source.model is target.model else target.content(batch, keep)
    return join_contents(batch, keep, source_content, target_content)


def join_contents(
    batch: Batch,
    keep: torch.Tensor,
    source: tuple[torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor],
) -> Trace:
    """A trace from the contents of both models for the kept tokens of a batch; see [`TracedModel.content`]."""
    return Trace(
        *source,
        *target,
        rows=keep.nonzero()[:, 0],
        position_ids=positions_from_mask(batch.attention_mask.long())[keep],
    )


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


__all__ = [
    "Batch",
    "NonFiniteError",
    "Trace",
    "TracedModel",
    "evaluating",
    "join_contents",
    "kept_tokens",
    "read_batches",
    "trace",
]
