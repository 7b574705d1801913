"""What the page's buttons do, without the page: module-level functions over plain values.

Those marked with `gpu` may run in a process of their own (ZeroGPU), so what they take and give travels by pickle.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from chat import Chat, View
from damage import DamageTest
from judgement import judge_answer
from machine import whole_machine
from pairs import Pair, Pairs
from prompts import Unsuitable, encode
from race import Race, Settings
from visitors import Visitors
from zero import ON_ZERO, gpu

from kvbridge_hf.evaluation import measure_latency
from kvbridge_hf.evaluation.controls import BridgeHandoff
from kvbridge_hf.prompt_reading import read_columns

pairs = Pairs()
visitors = Visitors()


def configure(family: Path | None) -> None:
    """Offer the family in this folder instead of the installation's."""
    global pairs
    pairs = Pairs(family)


@gpu(90)
def race_frames(key: str, prompt: str, settings: Settings, stop: threading.Event | None) -> Iterator[tuple[str, Any]]:
    """`("race", Snapshot)` while both panes stream, then `("judgement", Judgement)` of the handoff's answer."""
    pair = pairs.load(key)
    race = Race(pair, prompt, settings, stop)
    last = None
    for last in race.run():
        yield "race", last
    if last is not None and last.handoff.tokens and last.handoff.error is None:
        # The special token at the end is judged like any other.
        yield "judgement", judge_answer(pair, race.input_ids, last.handoff.tokens, race.source_cache)


@gpu(60)
def chat_frames(
    key: str, visitor: str | None, folder: str | None, text: str, model: str, settings: Settings, stop: Any
) -> Iterator[View]:
    """One turn of a visitor's conversation."""
    yield from chat_of(key, visitor, folder).turn(text, model, settings, stop)


def chat_of(key: str, visitor: str | None, folder: str | None = None) -> Chat:
    """A visitor's conversation with a pair; another pair begins a new one."""
    pair, owner = pairs.load(key), visitors.get(visitor)
    if owner.chat is None or owner.chat.pair is not pair:
        owner.chat = Chat(pair, None if folder is None else Path(folder))
    return owner.chat


def new_chat_folder() -> str | None:
    """Where a new conversation is kept between turns, where turns do not share a process."""
    return tempfile.mkdtemp(prefix="kvbridge-chat-") if ON_ZERO else None


@gpu(90)
def damage_frames(
    key: str, prompt: str, damage: float, max_new_tokens: int, sweep: bool, stop: threading.Event | None
) -> Iterator[tuple[str, Any]]:
    """`("verdict", (Verdict, own, unguarded, guarded answer))`, then with `sweep` `("curve", verdicts so far)`."""
    pair = pairs.load(key)
    ids = encode(pair, prompt, max_new_tokens)
    with whole_machine(stop), torch.no_grad():
        mask = torch.ones_like(ids)
        cache = read_columns(pair.source, ids.to(pair.source.device), mask.bool().to(pair.source.device))
        output = pair.target.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    own = output[0, ids.shape[1] :].tolist()
    test = DamageTest(pair, ids, own, cache)
    own_text = pair.tokenizer.decode(own, skip_special_tokens=True).strip()
    yield (
        "verdict",
        (
            test.verdict(damage),
            own_text,
            test.answer_with(damage, False, max_new_tokens),
            test.answer_with(damage, True, max_new_tokens),
        ),
    )
    if sweep:
        verdicts = []
        for verdict in test.curve(stop):
            verdicts.append(verdict)
            yield "curve", list(verdicts)


@gpu(120)
def latency(key: str, prompt: str, repeats: int) -> dict[str, Any]:
    """Times of the four paths to the first logits; see [`measure_latency`]."""
    pair = pairs.load(key)
    ids = encode(pair, prompt, 1)
    if ids.shape[1] < 2:
        raise Unsuitable("Give a text of two tokens or more; one alone has nothing to hand over.")
    with whole_machine():
        return measure_latency(
            pair.source, pair.target, BridgeHandoff(pair.bridge, pair.target), ids, warmup=2, repeats=repeats
        )


def facts(pair: Pair) -> list[tuple[str, str]]:
    """What a visitor should know about a pair."""
    config = pair.mapper.config
    source, target = config.source_geometry, config.target_geometry
    gates = (config.gates or {}).get("rows")
    support = config.support.replace("_", "-")
    return [
        ("source, reads", f"{pair.source_name} · {source['num_layers']} layers · {_count(pair.source)}"),
        ("target, answers", f"{pair.target_name} · {target['num_layers']} layers · {_count(pair.target)}"),
        ("mapper", f"{config.method}, {support}, k = {config.top_k} · {_count(pair.mapper)}"),
        ("target reads itself", _own_reading(config)),
        ("gates", f"calibrated on {gates:,} rows" if gates else "not calibrated"),
        ("longest text", f"{pair.max_tokens:,} tokens"),
    ]


def _own_reading(config: Any) -> str:
    share = f", {config.native_fraction:.0%} of the rest" if config.native_fraction else ""
    return f"first {config.num_sinks}, last {max(1, config.num_native_suffix)} tokens{share}"


def _count(model: torch.nn.Module) -> str:
    number = sum(parameter.numel() for parameter in model.parameters())
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number / 1e3:.0f} k"


__all__ = [
    "chat_frames",
    "chat_of",
    "configure",
    "damage_frames",
    "facts",
    "latency",
    "new_chat_folder",
    "race_frames",
]
