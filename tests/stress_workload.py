"""Handoffs of random shapes, paddings, policies and injected faults, for the stress test and its long form.

Every case follows from its number alone, so it can be run again, in any thread, and must give the same.
"""

from __future__ import annotations

import random
import threading
import warnings
from dataclasses import dataclass

import torch
from handoff_reference import batch, positions_of
from transformers import DynamicCache, StaticCache

from kvbridge_hf import HandoffPolicy, KVBridge
from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.guard import Gates, Shadow

NEW_TOKENS = 3
FAULTS = (
    "nan in the source cache",
    "rows missing",
    "layers missing",
    "accept raises",
    "accept refuses",
    "no time",
    "surprising",
)


@dataclass
class Case:
    """One call of the bridge."""

    number: int
    ids: torch.Tensor
    mask: torch.Tensor
    call: str  # "handoff", "append" (to what the target holds), "generate", "beams", "static"
    source: str  # "none", "given", "static", "short", "long"
    fault: str | None
    policy: HandoffPolicy

    @property
    def must_fall_back(self):
        """Whether a fault that cannot be overlooked was put in, where anything is mapped at all."""
        return self.fault is not None


@dataclass
class Outcome:
    status: str
    gate: str | None
    tokens_mapped: int
    result: torch.Tensor  # generated tokens, or the log-probabilities of the first new token


def make_case(number: int) -> Case:
    rng = random.Random(number)
    lengths = [rng.randint(1, 48) for _ in range(rng.randint(1, 4))]
    side = rng.choice(["left", "right", "mixed"])
    ids, mask = batch(lengths, side=side, seed=number)
    call = rng.choice(["handoff", "handoff", "append", "generate", "beams", "static"])
    fault = rng.choice(FAULTS) if rng.random() < 0.35 else None
    source = rng.choice(["none", "given", "static", "short", "long"])
    if fault in ("nan in the source cache", "rows missing", "layers missing"):
        source = "given"
    return Case(number, ids, mask, call, source, fault, _policy(rng, fault))


def _policy(rng: random.Random, fault: str | None) -> HandoffPolicy:
    def refuse(cache, report):
        if fault == "accept raises":
            raise RuntimeError("injected")
        return "injected"

    gates = {
        "accept raises": Gates(accept=refuse),
        "accept refuses": Gates(accept=refuse),
        "no time": Gates(latency_budget=-1.0),
        "surprising": Gates(max_nll=-1.0),
    }.get(fault or "")
    if gates is None:
        gates = rng.choice([Gates(), Gates(max_nll=1e9, max_excess=1e9), Gates(accept=lambda cache, report: True)])
    suffix = rng.choice([None, 1, 2, 6])
    if fault == "surprising":
        suffix = 6
    return HandoffPolicy(
        on_failure="prefill",
        num_sinks=rng.choice([None, 0, 1, 5]),
        num_native_suffix=suffix,
        gates=gates,
        shadow=rng.choice([None, None, Shadow(0.3)]),
        on_event=lambda event: None,
    )


@torch.no_grad()
def own_cache(model, ids, mask, columns, kind="given"):
    cache = StaticCache(config=model.config, max_cache_len=columns + 7) if kind == "static" else DynamicCache()
    model(
        ids[:, :columns],
        attention_mask=mask[:, :columns],
        position_ids=positions_of(mask)[:, :columns],
        **cache_kwargs(cache),
    )
    return cache


def _source_cache(case: Case, source):
    columns = case.ids.shape[1]
    if case.source == "none":
        return None
    if case.source == "short":
        columns = max(1, 2 * columns // 3)
    ids, mask = case.ids, case.mask
    if case.source == "long":
        ids = torch.cat([ids, ids[:, :3]], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :3])], dim=1)
        columns = ids.shape[1]
    cache = own_cache(source, ids, mask, columns, case.source)
    if case.fault == "nan in the source cache":
        # In the longest row, which fills the width: its first column is handed over if anything is.
        cache.layers[0].keys[int(case.mask.sum(1).argmax()), 0, 0, 0] = torch.nan
    elif case.fault == "rows missing":
        cache.batch_select_indices(torch.zeros(case.ids.shape[0] + 1, dtype=torch.long))
    elif case.fault == "layers missing":
        del cache.layers[-1]
    return cache


@torch.no_grad()
def next_log_probs(model, ids, mask, cache):
    """Of the token after each row's last one, `(batch, vocab)`; rows may end in padding."""
    held = 0 if cache is None else cache.get_seq_length()
    kwargs = {} if cache is None else cache_kwargs(cache)
    logits = model(ids[:, held:], attention_mask=mask, position_ids=positions_of(mask)[:, held:], **kwargs).logits
    return logits[:, -1].float().log_softmax(-1)


@torch.no_grad()
def run_case(case: Case, bridge: KVBridge, target) -> Outcome:
    ids, mask = case.ids, case.mask
    source_cache = _source_cache(case, bridge.source_model)
    if case.call in ("handoff", "append"):
        third = ids.shape[1] // 3
        held = own_cache(target, ids, mask, third) if case.call == "append" and third > 0 else None
        cache = bridge.handoff(ids, mask, source_cache, target, target_cache=held, policy=case.policy)
        report = bridge.last_report
        columns = cache.get_seq_length()
        result = next_log_probs(target, ids, mask, cache if columns else None)
        # A row that ends in padding has no logits at the last column.
        result = torch.where(mask[:, -1:].bool(), result, 0.0)
    else:
        extra = {"num_beams": 2} if case.call == "beams" else {}
        if case.call == "static":
            extra = {"cache_implementation": "static"}
        mine = KVBridge.__new__(KVBridge)
        mine.__dict__.update(bridge.__dict__)  # the same bridge, with the case's policy
        mine.policy = case.policy
        result = generate(target, ids, mask, bridge=mine, source_cache=source_cache, **extra)
        report = mine.last_report
    return Outcome(report.status, report.gate, report.tokens_mapped, result)


def generate(target, ids, mask, **kwargs):
    return target.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **kwargs
    )


def native(case: Case, target) -> torch.Tensor:
    """What the target alone gives."""
    if case.call in ("handoff", "append"):
        return torch.where(case.mask[:, -1:].bool(), next_log_probs(target, case.ids, case.mask, None), 0.0)
    # generate() does not turn a batch that is padded on the right; the bridge does.
    order = torch.argsort(case.mask, dim=1, stable=True)
    extra = {"num_beams": 2} if case.call == "beams" else {}
    out = generate(target, case.ids.gather(1, order), case.mask.gather(1, order), **extra)
    return torch.cat([case.ids, out[:, case.ids.shape[1] :]], dim=1)


def complaint(case: Case, outcome: Outcome, reference: Outcome, own: torch.Tensor) -> str | None:
    """Why an outcome is neither its single-threaded reference nor a visible fallback; None if it is."""
    where = f"case {case.number} ({case.call}, source {case.source}, fault {case.fault})"
    if outcome.status not in ("ok", "fallback"):
        return f"{where}: status {outcome.status}"
    if (outcome.status, outcome.gate, outcome.tokens_mapped) != (
        reference.status,
        reference.gate,
        reference.tokens_mapped,
    ):
        return f"{where}: {outcome.status}/{outcome.gate} instead of {reference.status}/{reference.gate}"
    if outcome.status == "fallback" and not same(outcome.result, own):
        return f"{where}: a fallback that is not the target's own"
    if not same(outcome.result, reference.result):
        return f"{where}: another result than in one thread"
    if case.must_fall_back and outcome.status == "ok" and outcome.tokens_mapped > 0:
        return f"{where}: a mapped cache despite the fault"
    return None


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype == torch.long:
        return torch.equal(one, two)
    return torch.allclose(one, two, rtol=1e-3, atol=1e-3)


def run_all(numbers, bridge, target, num_threads, references, natives, after=None):
    """Run cases in threads.

    Args:
        references, natives: outcomes in one thread and of the target alone, by number.
        after: called with the count of finished cases while all threads wait for it.

    Returns:
        Complaints, and how many cases had each status.
    """
    todo, lock, complaints, counts, done = list(numbers), threading.Lock(), [], {}, [0]

    def work():
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop(0)
            case = make_case(number)
            try:
                outcome = run_case(case, bridge, target)
                found = complaint(case, outcome, references[number], natives[number])
                status = outcome.status
            except Exception as error:
                found, status = f"case {number} ({case}): {type(error).__name__}: {error}", "exception"
            with lock:
                counts[status] = counts.get(status, 0) + 1
                done[0] += 1
                if found:
                    complaints.append(found)
                if after is not None:
                    after(done[0])

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return complaints, counts


def prepare(numbers, bridge, target):
    """Outcomes in one thread and of the target alone."""
    references, natives = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            case = make_case(number)
            references[number] = run_case(case, bridge, target)
            natives[number] = native(case, target)
    return references, natives
