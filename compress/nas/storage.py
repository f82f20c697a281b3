"""Where a study lives: a journal file (the default), a database, or a gRPC proxy in front of one.

runs/sst2/journal.log                a file; any number of processes, on one machine or a shared file system
postgresql://user:pw@host/name       a database, for workers on many machines; any other that SQLAlchemy knows
grpc://host:13000                    `serve` in front of a database: for more workers than it has connections
"""

import json
import os
import platform
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from threading import Event, Thread, get_ident
from threading import enumerate as enumerate_threads
from typing import Any

import optuna
import psutil
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, ProgrammingError, SQLAlchemyError

from compress.errors import SearchError
from compress.provenance import install_command, redact, redact_in

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


LOCK_GRACE = 15
"""Seconds after which the lock of a journal that nobody releases is taken over."""
_BEGINNING = b'{"op_code"'


class WholeLines(BaseJournalBackend):
    """A journal backend of Optuna's. `path` is absolute and exists; raises StorageError if it is no journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = JournalFileOpenLock(str(path), grace_period=LOCK_GRACE)
        self.reader = JournalFileBackend(str(path), self.lock)
        with path.open("rb") as file:
            start = file.read(len(_BEGINNING))
        if not _BEGINNING.startswith(start):
            raise StorageError(f"{path}: is not the journal of a study; give another file")

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Those from that number on. Raises StorageError (a line that is no JSON, file gone)."""
        try:
            yield from self.reader.read_logs(log_number_from)
        except ValueError as error:
            raise StorageError(
                f"{self.path}: line {self._first_strange()} cannot be read. Put back a copy of the file that is "
                f"whole, or begin another study"
            ) from error
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read ({error.strerror})") from error

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """All of them, on the disk, or none. Raises StorageError (disk full, file gone)."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            with self._locked() as file:
                _cut_tail(file)
                _append(file, lines)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error.strerror}). The study is whole up to here: make space, then "
                f"repeat the command; the trial that was running is run again"
            ) from error

    def mend(self) -> int:
        """Cut off what follows the last whole line; how many bytes that was."""
        with self._locked() as file:
            return _cut_tail(file)

    def _first_strange(self) -> int:
        with self.path.open("rb") as file:
            return next((number for number, line in enumerate(file, 1) if not _is_json(line)), 0)

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        self.lock.acquire()
        try:
            # Not created here: a journal that was removed under a study is not begun anew in its middle.
            with FileIO(self.path, "r+", opener=lambda path, flags: os.open(path, flags | os.O_APPEND)) as file:
                yield file
        finally:
            # Held up for longer than the grace, this process lost its lock; its line is whole all the same.
            with suppress(RuntimeError):
                self.lock.release()


def _cut_tail(file: FileIO) -> int:
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = (file.read(end - start) or b"").rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
        os.fsync(file.fileno())
    return size - end


def _append(file: FileIO, lines: bytes) -> None:
    size = file.seek(0, os.SEEK_END)
    try:
        left = memoryview(lines)
        while left:
            left = left[file.write(left) or 0 :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(size)
        raise


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


ATTEMPTS = 3
"""A shape whose worker died so often (out of memory, say) is not tried again."""
_CLOCK = 60.0
"""Seconds by which the start of the same process may seem to differ: the machine's clock was set in between."""


@dataclass(frozen=True)
class Pulse:
    """In seconds: between the beats of a worker, and since its last one when another host calls it dead."""

    interval: int = 20
    grace: int = 120


STEADY = Pulse()


@contextmanager
def beating(study: optuna.Study, trial: optuna.Trial, pulse: Pulse) -> Iterator[None]:
    """While inside, the trial is this process's and shows that it lives."""
    storage = study._storage
    stop = Event()

    def beat() -> None:
        if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None:
            storage.record_heartbeat(trial._trial_id)
        else:
            trial.set_user_attr("beat", time.time())

    def go_on() -> None:
        while not stop.wait(pulse.interval):
            # The thread that runs the trial meets the same trouble, and tells it.
            with suppress(StorageError, UpdateFinishedTrialError), reaching(study.study_name):
                beat()

    beat()
    trial.set_user_attr("owner", me())
    thread = Thread(target=go_on, name=f"beat of trial {trial.number}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def sweep(study: optuna.Study, pulse: Pulse, say: Say) -> None:
    """Fail the trials whose worker is gone and queue their parameters again: each once, however many sweep.

    Not to be called by a thread that is in the middle of a trial.
    """
    with quiet():
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        why = _abandoned(trial, pulse)
        if not why:
            continue
        try:
            study.tell(trial.number, state=TrialState.FAIL)
        except (ValueError, UpdateFinishedTrialError):
            continue  # told by its own worker, or swept by another, in this moment
        again = run_again(study, trial)
        say(f"trial {trial.number}: {why}; {'the same shape is queued again' if again else 'it is not tried again'}")


def run_again(study: optuna.Study, trial: FrozenTrial, *, died: bool = True) -> bool:
    """Queue the parameters of a trial that was not finished; False if its worker died `ATTEMPTS` times over it."""
    deaths = int(trial.user_attrs.get("deaths", 0)) + died
    if not trial.params or deaths >= ATTEMPTS:
        return False
    first = trial.user_attrs.get("again", trial.number)
    study.enqueue_trial(trial.params, user_attrs={"again": first, "deaths": deaths})
    return True


def me() -> dict[str, Any]:
    """This process, told apart from any other that had or will have its number, and the thread in it."""
    process = psutil.Process()
    return {"host": _host(), "pid": process.pid, "started": process.create_time(), "thread": get_ident()}


def _abandoned(trial: FrozenTrial, pulse: Pulse) -> str:
    """Why nobody runs the trial any more; empty if somebody may."""
    owner = trial.user_attrs.get("owner")
    if owner is None:  # its worker is, or died, between asking for the trial and putting its name to it
        began = trial.datetime_start
        late = began is not None and (datetime.now() - began).total_seconds() > pulse.grace
        return "the worker that asked for it never began" if late else ""
    name = f"process {owner['pid']} on {str(owner['host']).split('/', maxsplit=1)[0]}"
    if owner["host"] == _host() and _gone(owner["pid"], owner["started"]):
        return f"{name} is gone"
    if owner["host"] == _host() and owner["pid"] == os.getpid() and _left(owner["thread"]):
        return "an error ended it"
    beat = trial.user_attrs.get("beat")
    silent = time.time() - beat if beat is not None else 0.0
    return f"{name} has been silent for {silent:.0f} s" if silent > pulse.grace else ""


def _gone(pid: int, started: float) -> bool:
    """Whether the process of this host ended; one that cannot be looked at counts as there."""
    try:
        process = psutil.Process(pid)
        if process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return True
        return bool(abs(process.create_time() - started) > _CLOCK)
    except psutil.AccessDenied:
        return False
    except psutil.NoSuchProcess:
        return not psutil.pid_exists(pid)


def _left(thread: int) -> bool:
    """Whether a thread of this process cannot be running a trial: it ended, or it is this one, which sweeps."""
    return thread == get_ident() or all(one.ident != thread for one in enumerate_threads())


@cache
def _host() -> str:
    """The machine, while it is up, and the namespace in which the number of a process means anything (containers)."""
    marks = [platform.node()]
    with suppress(OSError):  # not Linux: the name must do
        marks += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            Path("/proc/self/ns/pid").readlink().name,
        ]
    return "/".join(marks)


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
            f"\"from compress.nas.storage import serve; serve('postgresql://...', port={match[2]})\""
        ) from error
    return storage
