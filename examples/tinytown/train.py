"""Train the Tinytown family from nothing: resumable, one model a call or all of them in turn.

    python examples/tinytown/train.py --runs runs/tinytown                # the whole family, one model after another
    python examples/tinytown/train.py --runs runs/tinytown tinytown-m     # one model
    accelerate launch --mixed_precision bf16 examples/tinytown/train.py --runs runs/tinytown tinytown-l

A curriculum decides what the models learn at all: bare pairs first, from which lookups arise; then statements with
questions; then everything, in longer documents. A lesson ends when it is learned (recall of the answers on validation
worlds), or at its share of the budget. The learning rate falls over the last part of the budget only, so that a run
may be given another budget (``--tokens``) when it is resumed. The batch of a step depends on seed and step alone:
killed at any moment, the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from corpus import document  # noqa: E402
from family import FAMILY, Member  # noqa: E402
from tokenizer import SegmentEncoder, build_tokenizer  # noqa: E402

ANSWER_WEIGHT = 4.0
WARMUP_STEPS = 100
DECAY_SHARE = 0.3
REVIEW_SHARE = 0.25
UNASKED_SHARE = 0.25


@dataclass(frozen=True)
class Lesson:
    """What is trained until ``goal`` recall, for at most ``share`` of the budget: lengths in tokens, 2,048 a batch."""

    level: int
    lengths: tuple[int, ...]
    goal: float
    share: float
    drill: float = 0.0  # share of documents with one or two kinds of question


LESSONS = (
    Lesson(0, (64,), 0.90, 0.40),
    Lesson(1, (64, 96), 0.75, 0.20),
    Lesson(2, (96, 128, 192), 0.90, 0.20),
    Lesson(3, (128, 192, 256), 0.90, 0.25, drill=0.25),
    Lesson(3, (128, 192, 256, 320, 384, 768), 2.0, 1.0, drill=0.25),
)
TOKENS_PER_STEP = 2048


def make_batch(
    encode: SegmentEncoder, lesson: Lesson, earlier: tuple[Lesson, ...], genre: str | None, seed: str, split: str
):
    """``input_ids``, mask and answer flags of one step, padded on the right: a function of its arguments alone.

    A document in four repeats one of the ``earlier`` lessons.
    """
    rng = random.Random(seed)
    length = rng.choice(lesson.lengths)
    rows = []
    for _ in range(max(1, TOKENS_PER_STEP // length)):
        source = rng.choice(earlier) if earlier and rng.random() < REVIEW_SHARE else lesson
        chosen = genre if source.level == 3 else None
        if chosen is None and source.drill and rng.random() < source.drill:
            chosen = "drill"
        written = document(rng, split, length, source.level, chosen, UNASKED_SHARE)
        ids, answers = encode(written)
        rows.append((ids[: length + 8], answers[: length + 8]))
    width = max(len(ids) for ids, _ in rows)
    pad = encode.tokenizer.pad_token_id
    input_ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    answers = torch.tensor([flags + [False] * (width - len(flags)) for _, flags in rows])
    # Only the first token of an answer is looked up; the full stop after it is not.
    answers[:, 1:] &= ~answers[:, :-1].clone()
    return input_ids, input_ids != pad, answers


def loss_and_recall(model, batch):
    """Cross-entropy with the answers weighted up, and the share of answer tokens that are the most likely one."""
    input_ids, mask, answers = batch
    logits = model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
    labels, answers, mask = input_ids[:, 1:], answers[:, 1:], mask[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    weights = mask * (1.0 + (ANSWER_WEIGHT - 1.0) * answers)
    recall = (logits.argmax(-1) == labels)[answers].float().mean()
    return (loss * weights).sum() / weights.sum(), recall.item()


@torch.no_grad()
def validate(model, encode, lesson, genre, device, batches: int = 3) -> float:
    model.eval()
    recalls = []
    for index in range(batches):
        batch = make_batch(encode, lesson, (), genre, f"validation-{lesson.level}-{index}", "validation")
        recalls.append(loss_and_recall(model, [part.to(device) for part in batch])[1])
    model.train()
    return sum(recalls) / len(recalls)


def learning_rate(member: Member, step: int, tokens: int, budget: int) -> float:
    """Warm-up, a plateau, and a linear fall to a twentieth over the last part of the budget."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    fall = max(0.05, min(1.0, (budget - tokens) / (DECAY_SHARE * budget)))
    return member.peak_lr * warm * fall


@torch.no_grad()
def scale_initial_weights(model) -> None:
    """Let the embeddings speak first: with one standard deviation for all weights, what the untrained layers write is
    an order louder than the token itself, and the models take several times as long to learn lookups.
    """
    model.get_input_embeddings().weight.normal_(0.0, 1.0)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.mul_((2 * len(model.model.layers)) ** -0.5)


def save_checkpoint(accelerator: Accelerator, folder: Path, state: dict) -> None:
    """Written beside the last one and moved into place, so that a kill leaves one of the two whole."""
    fresh, old = folder / "checkpoint.new", folder / "checkpoint"
    shutil.rmtree(fresh, ignore_errors=True)
    accelerator.save_state(str(fresh))
    (fresh / "progress.json").write_text(json.dumps(state))
    trash = folder / "checkpoint.old"
    shutil.rmtree(trash, ignore_errors=True)
    if old.exists():
        old.rename(trash)
    fresh.rename(old)
    shutil.rmtree(trash, ignore_errors=True)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint; after a kill between two renames it is still under its other name."""
    for name in ("checkpoint", "checkpoint.new", "checkpoint.old"):
        if (folder / name / "progress.json").exists():
            return folder / name
    return None


def train(name: str, runs: Path, budget: int | None, checkpoint_tokens: int, log_tokens: int) -> None:
    member = FAMILY[name]
    folder = runs / name
    budget = budget or member.tokens
    if (folder / "model" / "training.json").exists():
        done = json.loads((folder / "model" / "training.json").read_text())["tokens"]
        if done >= budget:
            print(f"{name}: finished with {done:,} tokens")
            return
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(member.seed)
    tokenizer = build_tokenizer()
    encode = SegmentEncoder(tokenizer)
    if member.starts_from:
        start = runs / member.starts_from / "model"
        if not start.exists():
            raise SystemExit(f"{name} starts from {member.starts_from}, which is not trained yet: train that first")
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        first_lesson = len(LESSONS) - 1
    else:
        model = AutoModelForCausalLM.from_config(member.config(tokenizer), dtype=torch.float32)
        if member.scaled_init:
            scale_initial_weights(model)
        first_lesson = 0
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=member.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    state = {"step": 0, "tokens": 0, "lesson": first_lesson, "lesson_tokens": 0, "seconds": 0.0, "log": []}
    checkpoint = latest_checkpoint(folder)
    if checkpoint:
        accelerator.load_state(str(checkpoint))
        state = json.loads((checkpoint / "progress.json").read_text())
    started, before = time.monotonic(), state["seconds"]
    next_log, next_save = state["tokens"] + log_tokens, state["tokens"] + checkpoint_tokens
    loss_sum = loss_count = 0
    bar = tqdm(total=budget, initial=state["tokens"], unit="tok", unit_scale=True, desc=name, disable=None)
    while state["tokens"] < budget:
        index = state["lesson"]
        lesson = LESSONS[index]
        batch = make_batch(encode, lesson, LESSONS[:index], member.genre, f"{member.seed}-{state['step']}", "train")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(member, state["step"], state["tokens"], budget)
        with accelerator.autocast():
            loss, _ = loss_and_recall(model, [part.to(accelerator.device) for part in batch])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        count = int(batch[1].sum())
        state["step"] += 1
        state["tokens"] += count
        state["lesson_tokens"] += count
        loss_sum, loss_count = loss_sum + loss.item(), loss_count + 1
        bar.update(count)
        if state["tokens"] >= next_log:
            recall = validate(model, encode, lesson, member.genre, accelerator.device)
            state["seconds"] = before + time.monotonic() - started
            entry = {
                "tokens": state["tokens"],
                "lesson": index,
                "loss": round(loss_sum / loss_count, 4),
                "recall": round(recall, 4),
                "seconds": round(state["seconds"]),
            }
            state["log"].append(entry)
            print(json.dumps({"model": name, **entry}), flush=True)
            bar.set_postfix(lesson=index, recall=f"{recall:.2f}")
            loss_sum = loss_count = 0
            next_log = state["tokens"] + log_tokens
            if index + 1 < len(LESSONS) and (recall >= lesson.goal or state["lesson_tokens"] > lesson.share * budget):
                state["lesson"], state["lesson_tokens"] = index + 1, 0
        if state["tokens"] >= next_save:
            save_checkpoint(accelerator, folder, state)
            next_save = state["tokens"] + checkpoint_tokens
    bar.close()
    state["seconds"] = before + time.monotonic() - started
    save_checkpoint(accelerator, folder, state)
    finish(accelerator.unwrap_model(model), tokenizer, folder, state)


def finish(model, tokenizer, folder: Path, state: dict) -> None:
    """The trained model as 16-bit safetensors with its tokenizer and the record of its training."""
    fresh = folder / "model.new"
    shutil.rmtree(fresh, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / "training.json").write_text(json.dumps(state, indent=1))
    shutil.rmtree(folder / "model", ignore_errors=True)
    fresh.rename(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"any of {', '.join(FAMILY)}; all when none is named"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tinytown"), help="folder for checkpoints and results")
    parser.add_argument("--tokens", type=int, help="budget in tokens; may differ when a run is resumed")
    parser.add_argument("--checkpoint-tokens", type=int, default=500_000)
    parser.add_argument("--log-tokens", type=int, default=200_000)
    parser.add_argument("--threads", type=int, help="CPU threads of this process")
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in FAMILY]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(FAMILY)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    for name in args.models or FAMILY:
        train(name, args.runs, args.tokens, args.checkpoint_tokens, args.log_tokens)


if __name__ == "__main__":
    main()
