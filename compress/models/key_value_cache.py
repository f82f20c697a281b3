"""Pass the cache of keys and values by the name that the installed transformers gives
it: `cache` since 5.24, `past_key_values` before."""

import inspect
from typing import Any, Final

from torch import nn

NAMES: Final = ("cache", "past_key_values")
"""The arguments and outputs that hold the cache, the newest first."""


def cache_name(model: nn.Module) -> str:
    """Return the name of the forward argument for the cache, or '' if the model takes
    none, or keeps a state in it that cannot be repeated, as Mamba does."""
    if getattr(model, "_is_stateful", False):  # transformers has no public name for it
        return ""
    known = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in known), "")


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the arguments that let a model read a cache, which it extends."""
    return {cache_name(model): cache, "use_cache": True}


def cache_of(outputs: Any) -> Any:
    """Return the cache among a model's outputs."""
    return next(outputs[name] for name in NAMES if name in outputs)
