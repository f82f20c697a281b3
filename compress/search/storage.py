"""Where a study lives: a journal file (the default), a database, or a gRPC proxy in front of one.

runs/sst2/journal.log                a file; any number of processes, on one machine or a shared file system
postgresql://user:pw@host/name       a database, for workers on many machines; any other that SQLAlchemy knows
grpc://host:13000                    `serve` in front of a database: for more workers than it has connections
"""

import random
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, ProgrammingError, SQLAlchemyError

from compress.address import redact, redact_in
from compress.provenance import install_command
from compress.search.lines import WholeLines
from compress.search.pulse import STEADY, Pulse, run_again
from compress.search.reach import Say, StorageError, cause, quiet

CONNECT_SECONDS = 10
"""A database or proxy that has not answered by then is not there."""


def open_storage(where: Path | str, pulse: Pulse = STEADY, say: Say = print) -> BaseStorage:
    """The storage at that path or URL, made if it is not there; a torn last line of a journal is cut off, and told.

    A database keeps the heartbeats itself, at this pulse. Raises StorageError where it cannot be reached, read or
    written; no message shows a password.
    """
    address = str(where)
    with quiet():
        if isinstance(where, Path) or "://" not in address:
            return _journal(Path(address).absolute(), say)  # the working folder may change, the journal does not
        if address.startswith("grpc://"):
            return _proxy(address)
        return _database(address, pulse)


def close_storage(storage: BaseStorage) -> None:
    """Give back the connections of a storage that is not needed any more; a journal has none."""
    behind = getattr(storage, "_backend", storage)  # Optuna puts its cache before a database
    if isinstance(behind, RDBStorage):
        behind.engine.dispose()
    elif isinstance(behind, GrpcStorageProxy):
        behind.close()


def serve(url: str, host: str = "localhost", port: int = 13000) -> None:
    """Answer `grpc://host:port` with the database at `url`, until interrupted.

    The channel is not encrypted and asks for no password: bind it to localhost or to a private network.
    """
    if "://" not in url or url.startswith("grpc://"):
        raise StorageError(f"{redact(url)}: a proxy stands in front of a database; give its URL, as postgresql://...")
    storage = open_storage(url)
    with quiet():
        # Cached, as Optuna advises: each question of a worker would be a query otherwise.
        optuna.storages.run_grpc_proxy_server(optuna.storages.get_storage(storage), host=host, port=port)


def _journal(path: Path, say: Say) -> BaseStorage:
    if path.is_dir():
        raise StorageError(f"{path}: is a folder; a study's journal is a file, as {path / 'journal.log'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        lines = WholeLines(path)
        cut = lines.mend()
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); a study's journal is appended to") from error
    if cut:
        say(f"{path}: its last line was cut short and is dropped ({cut} bytes); what stands before it is whole")
    try:
        return JournalStorage(lines)
    except (KeyError, AssertionError) as error:  # of JSON, but not what Optuna writes
        raise StorageError(f"{path}: is not the journal of a study ({error!r}); give another file") from error


def _database(url: str, pulse: Pulse) -> BaseStorage:
    full = _with_driver(url)

    def retry(study: optuna.Study, trial: FrozenTrial) -> None:
        run_again(study, trial)

    def connected(attempts: int = 8) -> BaseStorage:
        try:
            return RDBStorage(
                full,
                engine_kwargs=_engine(full),
                heartbeat_interval=pulse.interval,
                grace_period=pulse.grace,
                heartbeat_stale_trial_callback=retry,
            )
        except (IntegrityError, ProgrammingError):
            if attempts == 1:
                raise
        time.sleep(random.uniform(0.05, 0.3))  # other workers are making the same tables in this moment
        return connected(attempts - 1)

    try:
        return connected()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise StorageError(
            f"{redact(url)}: is not the address of a storage; expected the path of a journal file, "
            f"postgresql://user:password@host/database or grpc://host:port"
        ) from error
    except ImportError as error:
        raise StorageError(f"{redact(url)}: its driver is not installed ({redact_in(cause(error), url)})") from error
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:
        raise StorageError(
            f"{redact(url)}: cannot be opened: {redact_in(cause(error), url)}. Expected a database that runs there, "
            "which this user may enter and make tables in; see that the server runs, and that host, port, user, "
            "password (its @ : / ? # written as %40 %3A %2F %3F %23) and database are right"
        ) from error


def _with_driver(url: str) -> str:
    """A PostgreSQL URL with the driver that is there; any other as it is."""
    scheme, _, rest = url.partition("://")
    if scheme not in {"postgres", "postgresql", "postgresql+psycopg"}:
        return url
    if scheme != "postgresql+psycopg" and not find_spec("psycopg") and find_spec("psycopg2"):
        return f"postgresql+psycopg2://{rest}"
    if not find_spec("psycopg"):
        raise StorageError(f"{redact(url)}: needs the package psycopg: {install_command('postgresql')}")
    return f"postgresql+psycopg://{rest}"


def _engine(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    pool: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 3}
    if url.startswith("postgresql"):
        pool["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    return pool


def _proxy(url: str) -> BaseStorage:
    match = re.fullmatch(r"grpc://([^:/@]+|\[[^\]]+\]):(\d{1,5})/?", url)
    if not match:
        raise StorageError(f"{redact(url)}: is not the address of a proxy; expected grpc://host:port")
    storage = GrpcStorageProxy(host=match[1], port=int(match[2]))
    try:
        storage.wait_server_ready(timeout=CONNECT_SECONDS)
    except ConnectionError as error:
        storage.close()
        raise StorageError(
            f"{url}: nothing answers there within {CONNECT_SECONDS} s; start it beside the database: python -c "
            f"\"from compress.search.storage import serve; serve('postgresql://...', port={match[2]})\""
        ) from error
    return storage
