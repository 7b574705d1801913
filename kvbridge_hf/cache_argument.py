"""The one place that knows what Transformers calls a cache.

Up to 5.17 a model takes and returns its cache as `past_key_values`; newer releases call it `cache` and keep the old
spelling with a deprecation warning for a while. Everything else in this library asks here.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import Cache, GenerationMixin

_SPELLINGS = ("cache", "past_key_values")


def _spelling() -> str:
    parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in _SPELLINGS if name in parameters)


#: Name under which the installed Transformers passes a cache to a model, to `generate` and to its own helpers.
CACHE_ARG: str = _spelling()


def cache_kwargs(cache: Cache | None) -> dict[str, Cache | None]:
    """Keyword arguments that hand `cache` to a forward or to `generate`: `model(ids, **cache_kwargs(cache))`."""
    return {CACHE_ARG: cache}


def get_cache(kwargs: dict[str, Any]) -> Cache | None:
    """The cache among keyword arguments, under either spelling; None when there is none."""
    return next((kwargs[name] for name in _SPELLINGS if kwargs.get(name) is not None), None)


def pop_cache(kwargs: dict[str, Any]) -> Cache | None:
    """Take the cache out of keyword arguments, under either spelling; None when there is none."""
    found = [kwargs.pop(name, None) for name in _SPELLINGS]
    return next((cache for cache in found if cache is not None), None)


def output_cache(model_output: Any) -> Cache:
    """The cache that a model's or `generate`'s output object carries.

    Raises:
        ValueError: it carries none (`use_cache=False`, or a tensor was returned).
    """
    cache = getattr(model_output, CACHE_ARG, None)
    if cache is None:
        raise ValueError(
            f"{type(model_output).__name__} carries no cache. Call the model with use_cache=True, and generate with "
            "return_dict_in_generate=True."
        )
    return cache


__all__ = ["CACHE_ARG", "cache_kwargs", "get_cache", "output_cache", "pop_cache"]
