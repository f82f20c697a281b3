"""How Optuna and what is under it are talked to: what they say that nobody need hear, and how they fail."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from compress.errors import SearchError

Say = Callable[[str], None]
"""Takes one line about what happens."""


class StorageError(SearchError):
    """A study's storage that cannot be reached, read or written."""


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, Optuna says only what is wrong, and not that what is used of it is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed", UserWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def reaching(study: str) -> Iterator[None]:
    """What a database or a proxy says when it is lost in the middle of things, as a StorageError."""
    lost: tuple[type[Exception], ...] = (SQLAlchemyError, StorageInternalError)
    if find_spec("grpc"):
        lost += (import_module("grpc").RpcError,)
    try:
        yield
    except lost as error:
        raise StorageError(
            f"study {study!r}: its storage does not answer any more: {cause(error)}. What it was told is kept: see "
            f"that it runs and has space left, then repeat the command; the trial that was running is run again"
        ) from error


def cause(error: BaseException) -> str:
    """What the driver said, in one line."""
    inner = error
    while (deeper := getattr(inner, "orig", None) or inner.__cause__) is not None:
        inner = deeper
    details = getattr(inner, "details", None)  # of a gRPC error: a method
    told = details() if callable(details) else inner
    lines = (" ".join(line.split()) for line in str(told).splitlines())
    return "; ".join(line for line in lines if line).rstrip(".?") or type(inner).__name__
