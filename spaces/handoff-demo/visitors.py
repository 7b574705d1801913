"""What belongs to one visitor: the run to be stopped, and the conversation. Nothing is shared between two."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any


class Visitor:
    """One open page."""

    def __init__(self) -> None:
        self.chat: Any = None
        self.last_race: Any = None
        self.seen = time.monotonic()
        self._stops: set[threading.Event] = set()
        self._lock = threading.Lock()

    def begin(self) -> threading.Event:
        """The stop event of a new run; whatever runs for this visitor already is stopped."""
        self.stop()
        event = threading.Event()
        with self._lock:
            self._stops = {event}
        return event

    def stop(self) -> bool:
        """End what runs; False where nothing did."""
        with self._lock:
            running = [event for event in self._stops if not event.is_set()]
            for event in running:
                event.set()
            self._stops.clear()
        return bool(running)

    def end(self, event: threading.Event) -> None:
        """A run came to its end by itself."""
        with self._lock:
            self._stops.discard(event)


class Visitors:
    """Visitors by the key that Gradio gives each open page.

    Args:
        limit: pages that are remembered; the one that was quiet for longest is forgotten first.
        idle: seconds after which a quiet page is forgotten.
    """

    def __init__(self, limit: int = 64, idle: float = 3600.0):
        self.limit, self.idle = limit, idle
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._visitors)

    def get(self, key: str | None) -> Visitor:
        """The visitor of a page; a page without a key (a script) is a new visitor each time."""
        if key is None:
            return Visitor()
        now = time.monotonic()
        with self._lock:
            visitor = self._visitors.pop(key, None) or Visitor()
            visitor.seen = now
            self._visitors[key] = visitor
            while self._visitors:
                oldest, other = next(iter(self._visitors.items()))
                if len(self._visitors) <= self.limit and now - other.seen <= self.idle:
                    break
                other.stop()
                del self._visitors[oldest]
        return visitor

    def forget(self, key: str | None) -> None:
        """A page was closed."""
        with self._lock:
            visitor = self._visitors.pop(key, None) if key is not None else None
        if visitor is not None:
            visitor.stop()


__all__ = ["Visitor", "Visitors"]
