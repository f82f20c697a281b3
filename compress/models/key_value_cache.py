"""Pass the cache of keys and values by the name that the installed transformers gives
it: `cache` since 5.24, `past_key_values` before."""

import inspect
from typing import Any, Final

from torch import nn

NAMES: Final = ("cache", "past_key_values")
"""The arguments and outputs that hold the cache, the newest first."""
LOOK_BACK: Final = ("sliding_window", "window_size")
"""The settings of how far back a layer sees."""


def cache_name(model: nn.Module) -> str:
    """Return the name of the forward argument for the cache, or '' if the model takes
    none, or keeps a state in it that cannot be repeated, as Mamba does."""
    if getattr(model, "_is_stateful", False):  # transformers has no public name for it
        return ""
    if {"conv", "linear_attention"} & _kinds(model):
        return ""
    known = inspect.signature(model.forward).parameters
    return next((name for name in NAMES if name in known), "")


def counts_places(model: nn.Module) -> bool:
    """Check whether attention depends on the places of tokens in the cache rather than
    on their positions, so that padding may not stand between tokens: a window, ALiBi,
    or layers of another kind."""
    config: Any = model.config
    window = any(getattr(config, name, None) for name in LOOK_BACK)
    positions = "position_ids" in inspect.signature(model.forward).parameters
    return window or not positions or bool(_kinds(model) - {"full_attention"})


def _kinds(model: nn.Module) -> set[str]:
    config: Any = model.config
    return set(getattr(config, "layer_types", None) or ())


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the arguments that let a model read a cache, which it extends."""
    return {cache_name(model): cache, "use_cache": True}


def cache_of(outputs: Any) -> Any:
    """Return the cache among a model's outputs."""
    return next(outputs[name] for name in NAMES if name in outputs)
