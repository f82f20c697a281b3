"""Who runs a trial, whether that process still lives, and what becomes of the trial when it does not.

A worker that is killed leaves its trial RUNNING for ever. Hence each trial says who runs it (host, process, its start)
and shows a beat every `Pulse.interval` seconds: in the database's own heartbeats, by its clock, or, in a journal and
through a proxy, as an attribute of the trial, by the worker's clock. `sweep` fails a trial whose process is gone from
this host at once, and one of another host when its beat is older than `Pulse.grace` (the clocks of the machines must
agree to less than that), and queues the same parameters again.
"""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from threading import Event, Thread, get_ident
from threading import enumerate as enumerate_threads
from typing import Any

import optuna
import psutil
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState

from compress.search.reach import Say, StorageError, quiet, reaching

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
