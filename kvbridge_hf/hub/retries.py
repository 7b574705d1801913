"""Asking the Hub again where a failure may pass: overload, dropped connections, garbled answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub.errors import HfHubHTTPError

DELAYS = (1.0, 4.0)  # seconds

Result = TypeVar("Result")


def with_retries(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of `huggingface_hub`, and again after a pause where that may help; its own errors go through."""
    for delay in DELAYS:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not is_transient(error):
                raise
        time.sleep(delay)
    return call(*args, **kwargs)


def is_transient(error: BaseException) -> bool:
    """Whether to ask again. `huggingface_hub` itself resumes broken downloads, and asks again in some places only."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, json.JSONDecodeError) or is_connection_error(error)


def is_connection_error(error: BaseException) -> bool:
    """Whether a connection failed or broke."""
    # The class belongs to httpx or httpx2, whichever huggingface_hub brings along.
    return isinstance(error, ConnectionError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


__all__ = ["is_connection_error", "is_transient", "with_retries"]
