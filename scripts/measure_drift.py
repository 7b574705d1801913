"""Drift of a ten-turn conversation that moves between two models at every turn, and the time of a switch.

    python scripts/measure_drift.py --pair s-to-m [--conversations 24] [--output drift.json]

In every turn the small model reads the user's message, the large one takes over and answers, and the small one takes
over again: what one has read or written is mapped to the other (for a direction without a bundled mapper one is
fitted). The answers are the conversation's own, so that all policies see the same text. At each answer the large
model's next-token distribution is compared with that of the large model alone, which has read everything itself. Then:
the time of one switch against a full re-read, for histories of 256, 512 and 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from kvbridge_hf import HandoffPolicy, KVBridgeMapper, bundled
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.guard import Gates, calibrate_gates
from kvbridge_hf.guard.likelihood import divergence
from kvbridge_hf.guard.peek import peek, run_columns
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.session import HandoffSession

# Name -> resync, and whether what was handed over in earlier turns is repaired for each new question.
POLICIES = {
    "never, history left": ("never", False),
    "never": ("never", True),
    "every 5": ("every 5", True),
    "every 2": ("every 2", True),
    "on gate": ("on gate", True),
}
LENGTHS = (256, 512, 1024)
INCREMENT = 64


@torch.no_grad()
def own_log_probs(model: Any, tokens: list[int], stem: list[int], known: dict[Any, torch.Tensor]) -> torch.Tensor:
    """As [`answer_log_probs`] of a model that has read everything itself; the same for every policy, so kept."""
    key = (id(model), *tokens, *stem)
    if key not in known:
        known[key] = answer_log_probs(model, tokens, stem)
    return known[key]


@torch.no_grad()
def answer_log_probs(model: Any, tokens: list[int], stem: list[int], cache: Any = None) -> torch.Tensor:
    """Log-probabilities after the history's last token and each token of the stem, `(stem + 1, vocab)`."""
    ids = torch.tensor([tokens + stem])
    if cache is None:
        return model(ids).logits[0, -len(stem) - 1 :].float().log_softmax(-1)
    held = len(tokens) - 1
    mask, positions = torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1])[None]
    return run_columns(model, peek((cache, held)), ids[:, held:], mask, positions[:, held:], len(stem) + 1)[0]


def converse(
    conversation: dict[str, Any],
    models: dict[str, Any],
    mappers: dict[Any, Any],
    tokenizer: Any,
    resync: tuple[str, bool],
    gates: Gates,
    known: dict[Any, torch.Tensor],
) -> list[dict[str, Any]]:
    """One conversation under one policy; a record for each turn."""
    policy = HandoffPolicy(on_failure="prefill", gates=gates)
    session = HandoffSession(models, mappers, tokenizer, policy, resync=resync[0], repair_history=resync[1])
    session.send("system", conversation["system"])
    records = []
    for number, turn in enumerate(conversation["turns"]):
        session.send("user", turn["user"])
        session.catch_up("small")
        switch = session.catch_up("large")
        tokens = session.input_ids[0].tolist()
        stem = tokenizer(turn["stem"], add_special_tokens=False)["input_ids"]
        choices = [tokenizer(choice, add_special_tokens=False)["input_ids"][0] for choice in turn["choices"]]
        own = own_log_probs(models["large"], tokens, stem, known)
        moved = answer_log_probs(models["large"], tokens, stem, session.cache_of("large"))
        alone = own_log_probs(models["small"], tokens, stem, known)
        kl = divergence(own, moved)
        mapped = sum(span.stop - span.start for span in session.spans("large") if span.origin is not None)
        records.append(
            {
                "turn": number + 1,
                "tokens": len(tokens),
                "kl": float(kl.mean()),
                "kl_answer": float(kl[-1]),
                "right": int(moved[-1, choices].argmax()) == turn["answer"],
                "right_own": int(own[-1, choices].argmax()) == turn["answer"],
                "right_small": int(alone[-1, choices].argmax()) == turn["answer"],
                "mapped_share": mapped / len(tokens),
                "read_natively": switch.tokens_native,
                "repaired": switch.tokens_repaired + (0 if switch.handoff is None else switch.handoff.tokens_repaired),
                "lacking": switch.tokens_native + switch.tokens_mapped,
                "status": switch.status,
                "resync": switch.resync,
            }
        )
        session.send("assistant", f"{turn['stem']}{turn['choices'][turn['answer']]} .")
        session.catch_up("large", add_generation_prompt=False)  # it has written this itself
    return records


def drift_table(records: dict[str, list[dict[str, Any]]]) -> str:
    """Mean over conversations for each turn and policy."""
    turns = sorted({record["turn"] for rows in records.values() for record in rows})

    def mean(rows: list[dict[str, Any]], name: str, turn: int) -> float:
        values = [float(row[name]) for row in rows if row["turn"] == turn]
        return sum(values) / len(values)

    first = next(iter(records.values()))
    head = " | ".join(f"{name}: KL, right" for name in records)
    lines = [f"| turn | tokens | large alone right | small alone right | {head} |", "|---" * (4 + len(records)) + "|"]
    for turn in turns:
        cells = [f"{mean(rows, 'kl', turn):.3f}, {mean(rows, 'right', turn):.0%}" for rows in records.values()]
        lines.append(
            f"| {turn} | {mean(first, 'tokens', turn):.0f} | {mean(first, 'right_own', turn):.0%} | "
            f"{mean(first, 'right_small', turn):.0%} | " + " | ".join(cells) + " |"
        )

    def overall(rows: list[dict[str, Any]], name: str) -> float:
        return sum(float(row[name]) for row in rows) / len(rows)

    cells = [f"{overall(rows, 'kl'):.3f}, {overall(rows, 'right'):.0%}" for rows in records.values()]
    alone = f"{overall(first, 'right_own'):.0%} | {overall(first, 'right_small'):.0%}"
    lines.append(f"| all | | {alone} | " + " | ".join(cells) + " |")
    cells = []
    for rows in records.values():
        history = sum(row["tokens"] for row in rows)
        shares = [sum(row[name] for row in rows) / history for name in ("read_natively", "repaired")]
        cells.append(f"{shares[0]:.0%} read, {shares[1]:.0%} repaired, {overall(rows, 'resync'):.0%} of turns resync")
    lines.append("| of the history, by large, a turn | | | | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def switch_times(
    models: dict[str, Any], mappers: dict[Any, Any], tokenizer: Any, repeats: int
) -> list[dict[str, Any]]:
    """Seconds until the large model can answer: by a full handoff, one of the last tokens only, and its own read."""
    up = {pair: mapper for pair, mapper in mappers.items() if pair == ("small", "large")}
    texts = " ".join(read_texts(bundled.text_path("test")))
    words = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = []
    for length in LENGTHS:
        tokens = [tokenizer.bos_token_id] + words[: length - 1]

        def session(
            used: dict[Any, Any], policy: HandoffPolicy | None = None, tokens: Any = tokens, length: int = length
        ) -> HandoffSession:
            # The message's text is the number of tokens to show.
            opened = HandoffSession(
                models, used, tokenizer, policy, render=lambda messages, prompt: tokens[: int(messages[0]["content"])]
            )
            opened.send("user", str(length))
            return opened

        found = {"reread": _times(session({}), repeats)}
        for name, gates in (("", Gates.off()), ("_gated", Gates())):
            whole = session(up, HandoffPolicy(gates=gates))
            part = whole.branch()
            part.edit(0, str(length - INCREMENT))
            part.catch_up("large")
            part.edit(0, str(length))
            for opened in (whole, part):
                opened.catch_up("small")
            found["handoff" + name] = _times(whole, repeats)
            found["increment" + name] = _times(part, repeats)
        rows.append({"tokens": length, **{name: median(values) for name, values in found.items()}})
    return rows


def _times(session: HandoffSession, repeats: int) -> list[float]:
    """Of bringing the large model up to date, each time from the same state; the first one is warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        branch = session.branch()
        started = time.perf_counter()
        report = branch.catch_up("large")
        seconds.append(time.perf_counter() - started)
        assert report.status == "ok", report.reason
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="s-to-m", help="SMALL-to-LARGE of the bundled family")
    parser.add_argument("--small", help="another small model, with --large (folders; mappers are fitted)")
    parser.add_argument("--large")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--preset", default="default", help="preset of the fits")
    parser.add_argument("--fit-texts", type=int, help="texts for a fit; all by default")
    parser.add_argument("--gate-texts", type=int, help="texts for gates that a mapper lacks; all by default")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the records as JSON")
    args = parser.parse_args()
    short = bundled.split_pair(args.pair)
    paths = (args.small, args.large) if args.small else tuple(map(bundled.model_path, short))
    models = dict(zip(("small", "large"), map(load_model, paths), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(str(paths[1]))
    mappers = {}
    for source, target, pair in (("small", "large", args.pair), ("large", "small", f"{short[1]}-to-{short[0]}")):
        try:
            if args.small:
                raise bundled.BundledFileError("fitted below")
            mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path(pair)), dtype=torch.float32)
        except bundled.BundledFileError:
            texts = read_texts(bundled.text_path("train"), args.fit_texts)
            batches = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
            mapper = fit_mapper(
                models[source],
                models[target],
                batches,
                FitConfig.preset(args.preset),
                tokenizer=tokenizer,
                progress=False,
            )
        if not mapper.config.gates:
            texts = read_texts(bundled.text_path("gates"), args.gate_texts)
            batches = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
            calibrate_gates(models[source], models[target], mapper, batches)
        mappers[source, target] = mapper
    with open(bundled.questions_path("conversations"), encoding="utf-8") as file:
        conversations = [json.loads(line) for line in file][: args.conversations]
    records: dict[str, list[dict[str, Any]]] = {}
    known: dict[Any, torch.Tensor] = {}
    for name, resync in POLICIES.items():
        # Without a gate to act on, a rejection would hide what "never" means.
        gates = Gates() if name == "on gate" else Gates.off()
        records[name] = [
            record
            for conversation in conversations
            for record in converse(conversation, models, mappers, tokenizer, resync, gates, known)
        ]
    print(f"{paths[0]} <-> {paths[1]}, {len(conversations)} conversations\n")
    print(drift_table(records))
    times = switch_times(models, mappers, tokenizer, args.repeats)
    print("\n| history | full re-read | full handoff | with gates | last 64 tokens only | with gates |")
    print("|---" * 6 + "|")
    for row in times:
        cells = (row[name] for name in ("reread", "handoff", "handoff_gated", "increment", "increment_gated"))
        print(f"| {row['tokens']} | " + " | ".join(f"{1000 * seconds:.1f} ms" for seconds in cells) + " |")
    if args.output:
        args.output.write_text(json.dumps({"records": records, "times": times}))


if __name__ == "__main__":
    main()
