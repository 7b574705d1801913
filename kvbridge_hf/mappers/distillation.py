"""KL distillation: train a mapper on what the target predicts from it, starting at the closed form.

As in KVLRelay both models are frozen and the loss is KL(target with its own cache || target with the mapped cache) on
continuation tokens. Where the prefix ends is drawn at random for each step, and the native parts of a handoff (sinks,
native suffix, lowest layers, repair) are there, so the map learns what they leave. Running text asks its prefix for
little; `lookups` are texts with questions, whose answers cannot be had without them. Validation is on the sequences
that the closed form held out (and on held-out lookups), and the state kept is the best one measured there, the start
among them: a distillation never ends above its start.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics as stats
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..attention_outputs import recorded_attention
from ..calibration.traces import Batch, read_batches
from ..errors import CalibrationError, FitConfigError
from ..modeling_kvbridge import KVBridgeMapper, SourceContent
from .distillation_config import DistillationConfig
from .distillation_data import StepBatches, sequences_of, split_lookups, validation_items
from .distillation_run import Run, RunFolder, train_run
from .functional import FunctionalHandoff, frozen, kl_on_tokens, mean_kl, nll_on_tokens
from .learning_rate import search_learning_rate
from .preconditioning import covariance_of, precondition

logger = logging.getLogger(__name__)

# Batches from which the features' covariance is taken, with `precondition`.
PRECONDITION_BATCHES = 64


class Student(nn.Module):
    """The loss of a mapper as a module that a `Trainer` can train. Only the mapper is a part of it.

    Args:
        mapper: Trained.
        handoff: The pair, frozen.
        config: Weights of the losses.
    """

    def __init__(self, mapper: nn.Module, handoff: FunctionalHandoff, config: DistillationConfig):
        super().__init__()
        self.mapper = mapper
        # Neither is a module: not trained, not moved, not saved.
        self._handoff, self._config = handoff, config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        boundary: torch.Tensor,
        question: torch.Tensor | None = None,
        native_fraction: torch.Tensor | float = 0.0,
    ) -> dict[str, Any]:
        """Loss of one batch whose continuation starts at column `boundary`; see `FunctionalHandoff.hand_over`."""
        # A map in white coordinates is a product: computed once a forward, not once a layer.
        with parametrize.cached():
            batch = Batch(input_ids, attention_mask.bool(), torch.arange(len(input_ids)))
            return self._loss(batch, int(boundary), question, float(native_fraction))

    def _loss(self, batch: Batch, start: int, question: torch.Tensor | None, native_fraction: float) -> dict[str, Any]:
        config, handoff = self._config, self._handoff
        stop = handoff.mapped_columns(start)
        own_attention: list[torch.Tensor] = []
        if config.attention_weight:
            with recorded_attention(handoff.target.model) as outputs:
                own = handoff.read_target(batch)
                own_attention = [states[:, stop:] for states in outputs]
        else:
            own = handoff.read_target(batch)
        mapper: Any = self.mapper
        entries, source = handoff.hand_over(mapper, batch, start, own, question, native_fraction)
        loss = torch.zeros((), device=own.log_probs.device)
        if config.kl_weight or config.attention_weight or config.nll_weight:
            with recorded_attention(handoff.target.model) as outputs:
                logits = handoff.go_on(batch, entries)
                read = list(outputs)
        if config.kl_weight:
            kl, there = kl_on_tokens(own.log_probs[:, start - 1 : -1], logits[:, start - 1 - stop : -1], batch, start)
            loss = loss + config.kl_weight * kl.sum() / there.sum().clamp(min=1)
        if config.nll_weight:
            nll, there = nll_on_tokens(logits[:, start - 1 - stop : -1], batch, start)
            loss = loss + config.nll_weight * nll.sum() / there.sum().clamp(min=1)
        if config.attention_weight:
            valid = batch.attention_mask[:, stop:].to(loss.device)
            loss = loss + config.attention_weight * _relative_error(read, own_attention, valid, centred=False)
        if config.reconstruction_weight:
            valid = (source.valid & (source.position_ids >= handoff.num_sinks)).to(loss.device)
            for kind in (0, 1):
                mapped = [entry[kind].transpose(1, 2).flatten(2) for entry in entries]
                wanted = [entry[kind][:, :, :stop].transpose(1, 2).flatten(2) for entry in own.entries]
                loss = loss + 0.5 * config.reconstruction_weight * _relative_error(mapped, wanted, valid, centred=True)
        return {"loss": loss}


def _relative_error(
    found: list[torch.Tensor], wanted: list[torch.Tensor], valid: torch.Tensor, *, centred: bool
) -> torch.Tensor:
    """Mean over layers of squared error over power (or variance), both over the valid columns `(B, T)`."""
    errors = []
    for one, own in zip(found, wanted, strict=True):
        own, one = own[valid].float(), one[valid].float()
        spread = own - own.mean(dim=0, keepdim=True) if centred else own
        errors.append((one - own).square().sum() / spread.square().sum().clamp(min=1e-12))
    return torch.stack(errors).mean()


def distill(
    mapper: KVBridgeMapper,
    source_model: Any,
    target_model: Any,
    token_batches: Iterable[Any],
    config: DistillationConfig | None = None,
    *,
    lookups: Iterable[Any] | None = None,
    heldout_fraction: float = 0.1,
    seed: int = 0,
    output_dir: str | Path | None = None,
    progress: bool = True,
) -> KVBridgeMapper:
    """Train a mapper on the target's predictions.

    Args:
        mapper: The start; not changed. Its config says which sinks, suffix and lowest layers are native; how much is
            repaired while it trains is said by `config.native_fraction`.
        source_model, target_model: The pair; frozen for the time.
        token_batches: As in [`fit_mapper`].
        config: Settings.
        lookups: Texts with questions about them, for `config.lookup_fraction`: mappings with `input_ids` (the text,
            then questions and answers), `boundary` (tokens of the text) and `answers` (a flag a token).
        heldout_fraction, seed: Which sequences are for validation, by the hash that the closed form uses; give its
            values.
        output_dir: Where checkpoints go. An interrupted run goes on from the newest one; a folder that was begun with
            other data, settings, models, start or code is refused. None keeps nothing.
        progress: Show a bar (never outside a terminal).

    Returns:
        The best mapper measured on validation, of the dtype that `mapper` has. `config.fit["distillation"]` holds the
        settings, the start's and the end's KL, the search and every seed's run.

    Raises:
        CalibrationError: there are no sequences to train or to validate on, or `output_dir` belongs to another run.
        FitConfigError: no learning rate gave a finite loss, or `lookup_fraction` has no lookups to take.
    """
    config = config or DistillationConfig()
    handoff = FunctionalHandoff(
        source_model,
        target_model,
        mapper.config.num_sinks,
        mapper.config.num_native_suffix,
        mapper.config.native_layers,
        mapper.config.boundary_tokens,
    )
    vocab_size = min(handoff.source.geometry.vocab_size, handoff.target.geometry.vocab_size)
    training, validating = sequences_of(read_batches(token_batches, vocab_size), heldout_fraction, seed)
    if not training or not validating:
        raise CalibrationError(
            f"Distillation needs sequences to train and others to validate on; heldout_fraction={heldout_fraction} "
            f"left {len(training)} and {len(validating)} of two tokens or more. Use more sequences or another one."
        )
    asked, asked_held = split_lookups(lookups or (), heldout_fraction, seed)
    if config.lookup_fraction and not (asked and asked_held):
        raise FitConfigError(
            f"lookup_fraction={config.lookup_fraction} needs lookups to train and others to validate on, got "
            f"{len(asked)} and {len(asked_held)}. Pass lookups=, texts with questions about them."
        )
    held = validation_items(validating, asked_held, config, seed)
    settings = {"distillation": config.to_dict(), "heldout_fraction": heldout_fraction, "seed": seed}
    folder = None
    if output_dir is not None:
        folder = RunFolder(Path(output_dir))
        told = [lookup.ids for lookup in (*asked, *asked_held)]
        folder.claim(settings, [*training, *told], validating, mapper, source_model, target_model)

    def validate(candidate: Any) -> float:
        return mean_kl(held, partial(_objective, candidate, handoff, config))

    start = copy.deepcopy(mapper).to(handoff.target.device)  # type: ignore[arg-type]
    with frozen(source_model, target_model), torch.random.fork_rng():
        start_kl = validate(start)
        facts: dict[str, Any] = {
            "settings": config.to_dict(),
            "start_kl": start_kl,
            "objective": "kl" if not config.nll_weight else "kl_weight * kl + nll_weight * nll",
            "training_sequences": len(training),
            "training_lookups": len(asked),
            "validation_sequences": min(len(validating), config.validation_sequences),
        }
        best_kl, best = start_kl, start
        if config.steps:
            roots = None
            if config.precondition:
                steps = StepBatches(training, config, min(PRECONDITION_BATCHES, config.steps), seed, asked)
                contents = (_prefix_content(start, handoff, steps[place]) for place in range(len(steps)))
                roots = covariance_of(start, handoff.num_sinks, contents)

            def run(rate: float, run_seed: int, steps: int, name: str | None, evaluations: int) -> Run:
                trained = copy.deepcopy(start).float().requires_grad_(True)
                if roots is not None:
                    precondition(trained, roots)
                student = Student(trained, handoff, replace(config, steps=steps))
                return train_run(
                    student,
                    StepBatches(training, config, steps, run_seed, asked),
                    lambda: validate(student.mapper),
                    config=config,
                    rate=rate,
                    steps=steps,
                    evaluations=evaluations,
                    seed=run_seed,
                    folder=None if folder is None or name is None else folder.path / name,
                    progress=progress,
                )

            rate = config.learning_rate
            if rate is None:
                rate, table = _search(run, config, folder)
                facts["learning_rates"] = [[one, loss if math.isfinite(loss) else None] for one, loss in table.items()]
            facts["learning_rate"] = rate
            runs = [run(rate, one, config.steps, f"seed-{one}", config.evaluations) for one in config.seeds]
            facts["seeds"] = {str(one): found.summary() for one, found in zip(config.seeds, runs, strict=True)}
            ends = [found.best_kl for found in runs]
            facts["mean_kl"] = stats.fmean(ends)
            facts["standard_error"] = stats.stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else None
            winner = min(runs, key=lambda found: found.best_kl)
            if winner.best_state is not None:
                trained = copy.deepcopy(start).float()
                trained.load_state_dict(winner.best_state)
                trained.to(mapper.dtype)
                # In the dtype in which it is stored, where rounding may cost more than training gave.
                kl = validate(trained)
                if kl < best_kl:
                    best_kl, best = kl, trained
        facts["kl"] = best_kl
    if best is start and config.steps:
        logger.warning(
            "Distillation found nothing better than its start (validation KL %.4g), which is kept.", start_kl
        )
    result = best.to(mapper.device).requires_grad_(True).eval()
    result.zero_grad(set_to_none=True)
    result.config.fit = {**result.config.fit, "distillation": facts}
    return result


def _objective(
    mapper: Any, handoff: FunctionalHandoff, config: DistillationConfig, batch: Batch, start: int, *repair: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is measured on validation: the KL of each token and, where it is trained on, the token's own loss."""
    if not config.nll_weight:
        return handoff.continuation_kl(mapper, batch, start, *repair)
    own = handoff.read_target(batch)
    entries, _ = handoff.hand_over(mapper, batch, start, own, *repair)
    logits = handoff.go_on(batch, entries)[:, start - 1 - handoff.mapped_columns(start) : -1]
    kl, there = kl_on_tokens(own.log_probs[:, start - 1 : -1], logits, batch, start)
    return config.kl_weight * kl + config.nll_weight * nll_on_tokens(logits, batch, start)[0], there


def _prefix_content(mapper: Any, handoff: FunctionalHandoff, step: dict[str, torch.Tensor]) -> SourceContent:
    """What an affine map reads of a step's batch."""
    batch = Batch(step["input_ids"], step["attention_mask"], torch.arange(len(step["input_ids"])))
    stop = handoff.mapped_columns(int(step["boundary"]))
    return handoff.read_source(batch, stop, handoff.extras(mapper, batch, stop))


def _search(run: Any, config: DistillationConfig, folder: RunFolder | None) -> tuple[float, dict[float, float]]:
    """The learning rate by short runs on the first seed; what an interrupted search has measured is kept."""
    steps = config.search_steps or max(1, config.steps // 4)
    measured = {} if folder is None else folder.read_search()

    def loss_of(rate: float) -> float:
        if rate not in measured:
            measured[rate] = run(rate, config.seeds[0], steps, None, 1).last_kl
            if folder is not None:
                folder.write_search(measured)
        return measured[rate]

    return search_learning_rate(loss_of, config.learning_rates, config.max_extensions)


__all__ = ["DistillationConfig", "Student", "distill"]
