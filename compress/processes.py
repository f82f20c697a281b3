"""What the processes of one run agree on."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


def from_first(compute: Callable[[], T]) -> T:
    """Compute a value in the first process alone, and return it in all of them."""
    shared: list[Any] = [compute() if PartialState().is_main_process else None]
    value: T = broadcast_object_list(shared)[0]
    return value
