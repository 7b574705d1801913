"""A damaged handoff, and what the guard makes of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from judgement import judge_answer, without_gates
from machine import whole_machine
from pairs import Pair
from transformers import Cache

from kvbridge_hf import HandoffReport, KVBridge
from kvbridge_hf.modeling_kvbridge import MapperMethod, SourceContent

#: Damage for the curve, as [`damaged_bridge`] counts it.
STEPS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0)


class DamagedMethod(MapperMethod):
    """Another method whose results get noise, the same for the same seed: `damage` times each head's own spread."""

    tokenwise = False  # the noise of a token depends on where it stands

    def __init__(self, method: MapperMethod, damage: float, seed: int = 0):
        self.method, self.damage, self.seed = method, damage, seed

    def map_layer(self, mapper: Any, target_layer: int, source: SourceContent) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.method.map_layer(mapper, target_layer, source)
        generator = torch.Generator().manual_seed(self.seed + target_layer)
        noisy = []
        for tensor in states:
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            spread = tensor.std(dim=(-2, -1), keepdim=True, correction=0)
            noisy.append(tensor + self.damage * spread * noise)
        return noisy[0], noisy[1]


def damaged_bridge(bridge: KVBridge, damage: float, seed: int = 0) -> KVBridge:
    """A bridge that shares everything with another one, but what it maps is damaged.

    Args:
        damage: standard deviation of the noise, in units of each head's own; 0 for none.
    """
    damaged = copy.copy(bridge)
    damaged.mapper = copy.copy(bridge.mapper)  # the same weights; only the method is another
    damaged.mapper.method = DamagedMethod(bridge.mapper.method, damage, seed)
    return damaged


@dataclass(frozen=True)
class Verdict:
    """One damage: what the guard said, and what would have come of it.

    Args:
        kl_unguarded: mean KL in nats to the target's own distributions along the target's own answer, gates off.
        kl_guarded: the same of what is really used: 0 but for rounding where the guard fell back.
    """

    damage: float
    report: HandoffReport
    kl_unguarded: float
    kl_guarded: float

    @property
    def fell_back(self) -> bool:
        return self.report.status == "fallback"


class DamageTest:
    """The guard at work on one prompt.

    Args:
        input_ids: `(1, tokens)`.
        answer: the target's own answer, along which distributions are compared.
        source_cache: the source's cache of the prompt.
    """

    def __init__(self, pair: Pair, input_ids: torch.Tensor, answer: Sequence[int], source_cache: Cache):
        self.pair, self.input_ids, self.answer, self.source_cache = pair, input_ids, list(answer), source_cache

    def verdict(self, damage: float) -> Verdict:
        """The guard's word on one damage."""
        bridge = damaged_bridge(self.pair.bridge, damage)
        policy = replace(bridge.policy, on_failure="prefill", on_rejection="prefill")
        with whole_machine(), torch.no_grad():
            bridge.handoff(
                self.input_ids, source_cache=self.source_cache, target_model=self.pair.target, policy=policy
            )
            report = bridge.last_report
        assert report is not None
        return Verdict(damage, report, self._mean_kl(bridge, without_gates(bridge)), self._mean_kl(bridge, policy))

    def curve(self, stop: threading.Event | None = None, steps: Sequence[float] = STEPS) -> Iterator[Verdict]:
        """Verdicts from no damage to much of it."""
        for damage in steps:
            if stop is not None and stop.is_set():
                return
            yield self.verdict(damage)

    def answer_with(self, damage: float, guarded: bool, max_new_tokens: int) -> str:
        """The target's greedy answer from the damaged cache."""
        bridge = damaged_bridge(self.pair.bridge, damage)
        bridge.policy = (
            replace(bridge.policy, on_failure="prefill", on_rejection="prefill") if guarded else without_gates(bridge)
        )
        with whole_machine(), torch.no_grad():
            output = self.pair.target.generate(
                self.input_ids,
                attention_mask=torch.ones_like(self.input_ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                bridge=bridge,
                source_cache=self.source_cache,
            )
        tokens = output[0, self.input_ids.shape[1] :]
        return self.pair.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def _mean_kl(self, bridge: KVBridge, policy: Any) -> float:
        return judge_answer(
            self.pair,
            self.input_ids,
            self.answer,
            self.source_cache,
            bridge=bridge,
            policy=policy,
            attention=False,
        ).mean_kl


__all__ = ["STEPS", "DamageTest", "DamagedMethod", "Verdict", "damaged_bridge"]
