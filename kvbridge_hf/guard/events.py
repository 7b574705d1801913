"""Events: what happened to each handoff, as plain dictionaries without prompt text.

Every event goes to the policy's `on_event` callback and, as one JSON object, to the logger `kvbridge_hf.events` at
level INFO. Schema, version 1 (fields are added within a version, never renamed or given another meaning):

Every event:
    schema: `"kvbridge_hf.event"`.
    version: 1.
    event: `"handoff"`, `"shadow"` or `"switch"`.
    time: seconds since 1970, UTC.
    request_id: what the caller gave, or null.

`handoff`, one for each call of a bridge:
    status: `"ok"`; `"fallback"`, the target read the prompt itself; `"error"`, an exception was raised.
    gate: the gate that rejected, or null.
    error: name of the exception's class, or null.
    reason: its message where the exception is this library's own; null otherwise (and for the gate `accept`, which
    gives
        the caller's words), as it may quote the prompt.
    batch_size: rows, or null where only a cache was given.
    tokens_mapped, tokens_native: real tokens of all rows.
    times: seconds of each part so far, as in `HandoffReport.times`.
    gates: what each gate saw, as in `HandoffReport.gates`.

`shadow`, one for each handoff that was compared with the target's own prefill:
    rejected: whether a gate rejected the handoff.
    rows: for each row `kl` (mean KL(own prefill || handoff) over the compared columns, nats), `kl_last` (at the last
        column, which gives the first new token), `top1` (share of compared columns that agree on the likeliest token),
        `columns` (how many), and the likelihood gate's `nll`, `source_nll`, `excess`, `divergence`,
        `reverse_divergence`, `drift` and `score`, null where they are not known.

`switch`, one for each time a session brings a model up to date:
    status, tokens_mapped, tokens_native, times: as in `handoff`.
    source, target: names of the models; source is null where none was mapped from.
    tokens_history: tokens of the conversation.
    tokens_repaired: tokens handed over earlier that the target recomputed for the question of this turn.
    resync: whether the target read its mapped tokens again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ..errors import KVBridgeError

SCHEMA = "kvbridge_hf.event"
VERSION = 1

events_logger = logging.getLogger("kvbridge_hf.events")
logger = logging.getLogger(__name__)


def make_event(kind: str, request_id: str | None = None, **fields: Any) -> dict[str, Any]:
    """An event of version 1; numbers that JSON does not know become null."""
    event = {"schema": SCHEMA, "version": VERSION, "event": kind, "time": time.time(), "request_id": request_id}
    event.update(fields)
    return {name: _plain(value) for name, value in event.items()}


def handoff_event(
    report: Any, *, batch_size: int | None, request_id: str | None = None, error: BaseException | None = None
) -> dict[str, Any]:
    """The event of a finished handoff."""
    # A foreign exception's message may quote what it failed on, and a caller's own word anything.
    is_own = error is None or (isinstance(error, KVBridgeError) and report.gate != "accept")
    fallen = report.status == "fallback"
    return make_event(
        "handoff",
        request_id,
        status="fallback" if fallen else "ok" if error is None else "error",
        gate=report.gate,
        error=None if error is None else type(error).__name__,
        reason=str(error) if error is not None and is_own else None,
        batch_size=batch_size,
        tokens_mapped=report.tokens_mapped,
        tokens_native=report.tokens_native,
        times=dict(report.times),
        gates=report.gates,
    )


def emit(event: dict[str, Any], on_event: Callable[[dict[str, Any]], Any] | None) -> None:
    """Send an event. Watching must not change what is watched: a callback that raises is logged and nothing more."""
    if events_logger.isEnabledFor(logging.INFO):
        events_logger.info(json.dumps(event))
    if on_event is None:
        return
    try:
        on_event(event)
    except Exception:
        logger.exception("The on_event callback failed; the handoff goes on.")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


__all__ = ["SCHEMA", "VERSION", "emit", "events_logger", "handoff_event", "make_event"]
