"""Optuna's RDBStorage in an SQLite file or a database server, with heartbeats and plain
errors."""

import random
import sqlite3
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import text
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
    SQLAlchemyError,
)

from compress.errors import SearchError
from compress.progress import Say
from compress.provenance import install_command, redact, redact_in


class StorageError(SearchError):
    """A study's storage that cannot be reached, read or written."""


class NotStartedError(StorageError):
    """A storage that has no study, or no trials, of a search yet."""


HEARTBEAT = 10
GRACE = 60
"""Seconds between the heartbeats of a trial, and after its last one until its process
counts as dead."""
RETRIES = 2
"""The most retries of a shape whose process was killed: a shape too large for memory
kills every worker."""
LOCK_SECONDS = 60
CONNECT_SECONDS = 10
"""Seconds to wait for another process to release an SQLite file, and for a server to
answer."""


class HeartbeatStorage(RDBStorage):
    """RDBStorage whose heartbeat thread survives failed writes, and whose state changes
    are atomic in SQLite."""

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat; errors are left to the thread that runs the trial, which
        meets the same ones."""
        with suppress(SQLAlchemyError, StorageInternalError):
            super().record_heartbeat(trial_id)

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Read and write the state in one transaction.

        SQLite has no row locks such as Optuna relies on: two processes would queue a
        killed one's trial twice.
        """
        if self.engine.dialect.name == "sqlite":
            try:
                self.scoped_session().execute(text("BEGIN IMMEDIATE"))
            except SQLAlchemyError:
                self.scoped_session.remove()
                raise
        return super().set_trial_state_values(trial_id, state, values)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Optuna's logging of trials and its warnings about experimental
    features."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def storage_errors(study: str) -> Iterator[None]:
    """Turn errors of a database that is lost, full or locked for too long into a
    StorageError."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError, UnboundLocalError) as error:
        # Optuna 5.0.0 raises UnboundLocalError when it cannot read back the trial that
        # failed.
        lost: BaseException | None = error
        while lost is not None and not isinstance(
            lost, SQLAlchemyError | StorageInternalError
        ):
            lost = lost.__context__
        if lost is None:
            raise
        raise StorageError(
            f"study {study!r}: lost the connection to its storage: {_describe(lost)}. "
            "Finished trials are saved. Check that the disk has space and the server "
            "runs, then repeat the command; the interrupted trial is run again"
        ) from error


def _describe(error: BaseException) -> str:
    """Return the database driver's message in one line."""
    while (cause := getattr(error, "orig", None) or error.__cause__) is not None:
        error = cause
    lines = (" ".join(line.split()) for line in str(error).splitlines())
    return (
        "; ".join(line for line in lines if line).rstrip(".?") or type(error).__name__
    )


def open_storage(
    where: Path | str,
    *,
    create: bool = True,
    say: Say = print,
    heartbeat: int = HEARTBEAT,
    grace: int = GRACE,
) -> BaseStorage:
    """Open the storage at a path (of an SQLite file) or URL, creating it if `create`.

    Raises StorageError if it cannot be reached, read or written. No message shows a
    password.
    """
    url, engine = _locate(str(where), create)

    def retry(study: optuna.Study, trial: FrozenTrial) -> None:
        say(
            f"trial {trial.number}: no heartbeat from its process for {grace} s; "
            f"{queue_again(study, trial)}"
        )

    def connect() -> BaseStorage:
        storage = HeartbeatStorage(
            url,
            engine,
            heartbeat_interval=heartbeat,
            grace_period=grace,
            heartbeat_stale_trial_callback=retry,
        )
        return optuna.storages.get_storage(storage)

    try:
        with quiet():
            for _ in range(7):
                with suppress(IntegrityError, ProgrammingError):
                    return connect()
                # another process is creating the same tables
                time.sleep(random.uniform(0.05, 0.3))
            return connect()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise StorageError(
            f"{redact(where)}: is not the address of a storage; expected the path of "
            "an SQLite file, sqlite:///FILE or postgresql://user:password@host/database"
        ) from error
    except ImportError as error:
        raise StorageError(
            f"{redact(where)}: its driver is not installed "
            f"({redact_in(_describe(error), str(where))})"
        ) from error
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
        expected = (
            "the database of a study, in a writable folder"
            if url.startswith("sqlite")
            else "a running database in which this user may create tables; check "
            "server, host, port, user, password (its @ : / ? # written as %40 %3A %2F "
            "%3F %23) and database"
        )
        raise StorageError(
            f"{redact(where)}: cannot be opened: "
            f"{redact_in(_describe(error), str(where))}. Expected {expected}"
        ) from error


def _locate(where: str, create: bool) -> tuple[str, dict[str, Any]]:
    """Return the URL for SQLAlchemy, and the options of its engine."""
    if "://" not in where or (where.startswith("sqlite:///") and "?" not in where):
        # the working folder may change
        path = Path(where.removeprefix("sqlite:///")).absolute()
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror})"
            ) from error
        if not create and not path.exists():
            raise NotStartedError(
                f"{path}: no such file; start the search first, then its workers"
            )
        uri = f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}"

        connect = partial(
            sqlite3.connect,
            uri,
            uri=True,
            timeout=LOCK_SECONDS,
            check_same_thread=False,
        )
        # no URL of SQLAlchemy's can hold every path
        return "sqlite:///study.db", {"creator": connect}
    scheme, _, rest = where.partition("://")
    pool: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 3}
    if scheme in {"postgres", "postgresql", "postgresql+psycopg"}:
        driver = (
            "psycopg2"
            if scheme != "postgresql+psycopg" and not find_spec("psycopg")
            else "psycopg"
        )
        if not find_spec(driver):
            raise StorageError(
                f"{redact(where)}: needs the package psycopg: "
                f"{install_command('postgresql')}"
            )
        where = f"postgresql+{driver}://{rest}"
    if where.startswith("postgresql"):
        pool["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    return where, pool


def close_storage(storage: BaseStorage) -> None:
    """Close the database connections of a storage."""
    # Optuna wraps a database in a cache
    backend = getattr(storage, "_backend", storage)
    if isinstance(backend, RDBStorage):
        backend.engine.dispose()


def queue_again(study: optuna.Study, trial: FrozenTrial) -> str:
    """Queue the parameters of a trial whose process died, RETRIES times at most; return
    what was done, in words."""
    with quiet():
        again = len(RetryHeartbeatStaleTrialCallback.retry_history(trial)) < RETRIES
        RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)(study, trial)
    return "its shape is queued again" if again else "its shape is not retried"
