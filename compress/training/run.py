"""Keep the state of a run in one directory, made so that a kill at any moment leaves it resumable.

    recipe.yaml   the resolved recipe (of a search search.yaml), written before anything runs
    run.json      what the run is of: teacher, data, seed, precision, versions, command; when it was finished
    seconds.json  what all processes have taken until their last checkpoint or finished stage
    log.jsonl     one line per logged step: stage, step, every named loss part, scores
    tensorboard/  the same for TensorBoard
    stages/<name>/checkpoints/checkpoint-<step>/   each sealed, flushed and renamed into place when complete; they go
                                                   when the run is finished
    stages/<name>/model/                           the stage's result, likewise: the stage is done
    bundle/, report.html                           what was asked for

A stage is done when its `model/` is there and whole; there is no other cursor.
"""

import datetime
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from compress.config.recipe import AnyStage
from compress.console import warn
from compress.errors import DamagedError, RunError
from compress.io import atomic_file, keep_if_intact, load_json, lock, make_folder, name_disk_errors, write_json
from compress.provenance import resume_command

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def from_first(compute: Callable[[], T]) -> T:
    """Compute a value in the first process alone, and return it in all of them."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    shared: list[Any] = [compute() if PartialState().is_main_process else None]
    value: T = broadcast_object_list(shared)[0]
    return value


_IDENTITY = ("teacher", "prompt", "data", "corpus", "seed", "precision", "columns", "code")
"""The settings that must agree for a run to be continued, besides the recipe."""
_FACTS, _LOCK = "run.json", ".lock"
_PAPERS = ("recipe.yaml", "search.yaml", _FACTS)
"""Written before anything runs; a directory that holds no more than these has nothing to lose."""
_SPENT = "costs.json"
"""The time that a search has spent. Of one that failed at once, nothing is lost with it."""
_SECONDS = "seconds.json"
_NO_FACTS = "What the run is of is not known without it: begin anew in another --out"
_LEFTOVERS = (
    "stages/*/checkpoints", "stages/*/best.safetensors", "stages/*/.partial", ".*.partial", ".*.retired", ".timing-*",
)  # fmt: skip
"""The files that only an unfinished run needs, or that a kill has left."""


class Resolved(Protocol):
    """Say what is to be done, with every number: a recipe, or a search."""

    def to_yaml(self) -> str: ...


@dataclass(frozen=True)
class Run:
    path: Path
    seed: int
    main: bool
    """True where this process writes: in all but the first of a multi-process launch it does not."""
    before: float = 0.0
    """Seconds that earlier processes have worked on it."""
    track: str | None = None
    """The tracker that its stages report to, besides its own log."""
    _opened: float = 0.0
    _lock: IO[str] | None = None

    @staticmethod
    def open(
        path: Path,
        recipe: Resolved,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        main: bool = True,
        name: str = "recipe.yaml",
        track: str | None = None,
    ) -> "Run":
        """Create the directory, or continue the same run in it with `resume`. Raises RunError.

        A run that ended before it had anything to keep is no run: its directory may be used again, by any other.
        `identity` holds what the run is of (teacher, data, corpus, seed, precision, columns) and any facts to record.
        `name` is the file that the recipe is kept in; `track` names a tracker, which may be another when resumed.
        """
        if not main:
            return Run(path, identity["seed"], main=False)
        there = Run.check(path, resume=resume)
        try:
            make_folder(path)
        except OSError as error:
            raise RunError(f"{path}: cannot be made ({error.strerror}); choose an --out that can be written") from error
        lock, before = _locked(path), 0.0
        try:
            if there:
                _same(path, recipe, identity, name)
                before = _seconds(path / _SECONDS)
            else:
                (path / _SPENT).unlink(missing_ok=True)
                papers = {name: recipe.to_yaml(), _FACTS: json.dumps(dict(identity), indent=1) + "\n"}
                for paper, content in papers.items():
                    with atomic_file(path / paper) as partial:
                        partial.write_text(content, encoding="utf-8")
        except BaseException:
            lock.close()
            raise
        return Run(path, identity["seed"], main=True, before=before, track=track, _opened=time.monotonic(), _lock=lock)

    @staticmethod
    def check(path: Path, *, resume: bool = False) -> bool:
        """Tell whether a run is there, to be continued; nothing is written.

        Raises RunError for another's directory, and for `resume` where none was begun.
        """
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: is a file; --out must name a directory")
        kept = _holds_work(path)
        there = (path / _FACTS).is_file() and kept
        if kept and not there:
            raise RunError(f"{path}: is not empty and not a run of compress; choose another --out")
        if there and not resume:
            raise RunError(f"{path}: holds a run already; --resume continues it, another --out starts a new one")
        if resume and not (path / _LOCK).exists():
            raise RunError(
                f"{path}: holds no run that --resume could continue; check --out, or begin one there without --resume"
            )
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            locked = hasattr(os, "statvfs") and os.statvfs(above).f_flag & os.ST_RDONLY
            why = os.strerror((errno.EROFS if locked else errno.EACCES) if above.is_dir() else errno.ENOTDIR)
            raise RunError(f"{path}: cannot be made ({why}); choose an --out that can be written")
        if (path / _LOCK).is_file():
            with (path / _LOCK).open(encoding="utf-8") as file:
                _lock(path, file, shared=True)
        return there

    def stage(self, name: str) -> Path:
        """Return the stage's own folder."""
        return self.path / "stages" / name

    def result(self, name: str) -> Path:
        """Return the stage's result, which exists once the stage is done."""
        return self.stage(name) / "model"

    def done(self, name: str, console: "Console") -> bool:
        """Tell whether the stage's result is there and whole; one that is damaged is removed, with a warning.

        All processes are told the same.
        """

        return from_first(lambda: keep_if_intact(self.result(name), partial(warn, console)))

    def remaining(self, stages: Sequence[AnyStage], console: "Console") -> tuple[Path | None, list[AnyStage]]:
        """Find the result of the last stage done (None: none is), and the stages still to run."""
        for at in reversed(range(len(stages))):
            if self.done(stages[at].name, console):
                return self.result(stages[at].name), list(stages[at + 1 :])
        return None, list(stages)

    def confirm(self, **digests: str) -> None:
        """Record the digests of what the run reads, or compare them with those it began with. Raises RunError."""
        if self.main and self._lock is None:  # a part of a run, such as one student of a search
            return
        facts = load_json(self.path / _FACTS, _NO_FACTS)
        known = facts.get("digests", {})
        differences = [
            f"the {name} ({facts.get(name, 'which it begins as')}) has changed since the run began: its SHA-256 was "
            f"{known[name]}, now {now}"
            for name, now in digests.items()
            if known.get(name, now) != now
        ]
        if differences:
            raise RunError(
                f"{self.path}: {'; '.join(differences)}. Put back what it was, or choose another --out for a new run"
            )
        if self.main and not digests.keys() <= known.keys():
            write_json(self.path / _FACTS, {**facts, "digests": {**known, **digests}})

    def keep_seconds(self) -> None:
        """Write down what the run has taken until now, for the process that may continue it."""
        if self._lock is not None:
            write_json(self.path / _SECONDS, {"seconds": round(self.before + time.monotonic() - self._opened, 3)})

    def finish(self) -> None:
        """Record that all that was asked for is there, and remove what only an unfinished run needs."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.path / _FACTS, {**load_json(self.path / _FACTS, _NO_FACTS), "finished": now})
        for each in _leftovers(self.path):
            _remove(each)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def is_finished(path: Path) -> bool:
    """Tell whether a folder holds a run that has all that was asked for."""
    return (path / _FACTS).is_file() and "finished" in load_json(path / _FACTS, _NO_FACTS)


def continuation(path: Path) -> str:
    """Return the command that continues the run in a folder; '' where it was not begun by one, or that is not known."""
    try:
        return resume_command(path, str(load_json(path / _FACTS, _NO_FACTS).get("command", "")))
    except DamagedError:
        return ""


def clean(path: Path, *, unfinished: bool = False, dry_run: bool = False) -> int:
    """Remove the checkpoints of a run's directory and what kills have left in it; returns how many bytes that frees.

    Bundle, report, log and the stages' results stay. `dry_run`: nothing is removed. Raises RunError for a directory
    that holds no run, for a run that another process works on, and without `unfinished` for one that is not finished:
    its interrupted stage would start from its beginning.
    """
    if not (path / _FACTS).is_file() or not (path / _LOCK).exists():
        raise RunError(f"{path}: holds no run of compress; expected the --out of a run or a search")
    with closing(_locked(path)):
        finished = "finished" in load_json(path / _FACTS, _NO_FACTS)
        if not finished and not unfinished:
            raise RunError(
                f"{path}: is not finished, and --resume would need its checkpoints. Finish it, or give --unfinished: "
                "the stage that was interrupted then starts from its beginning"
            )
        found = _leftovers(path)
        size = sum(file.stat().st_size for each in found for file in (each, *each.rglob("*")) if file.is_file())
        for each in () if dry_run else found:
            _remove(each)
    return size


def _seconds(file: Path) -> float:
    if not file.exists():
        return 0.0
    remedy = "Remove it: the time that the run takes is then counted from now on"
    found = load_json(file, remedy).get("seconds")
    if not isinstance(found, int | float):
        raise DamagedError(file, ["it names no number of seconds"], remedy)
    return found


def _leftovers(path: Path) -> list[Path]:
    return sorted(each for pattern in _LEFTOVERS for each in path.rglob(pattern))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _holds_work(path: Path) -> bool:
    """Return True if a folder holds more than what a run of ours begins with: the lock, then its papers, whole or
    not."""
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    papers = {_LOCK, _SPENT, *_PAPERS, *(f".{name}.partial" for name in _PAPERS)}
    return bool(entries - papers) or (bool(entries) and _LOCK not in entries)


def _locked(path: Path) -> IO[str]:
    """Lock a run as long as the process lives, whatever kills it."""
    file = (path / _LOCK).open("a+", encoding="utf-8")
    try:
        _lock(path, file)
        file.truncate(0)
        with name_disk_errors(path / _LOCK):
            file.write(str(os.getpid()))
            file.flush()
    except (OSError, RunError):
        with suppress(OSError):  # what could not be written before cannot be written when closing
            file.close()
        raise
    return file


def _lock(path: Path, file: IO[str], *, shared: bool = False) -> None:
    """Lock the file without waiting. Raises RunError where another process holds it."""
    try:
        lock(file, shared=shared)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise RunError(f"{path}: another process (pid {owner}) is running this run; wait for it, or stop it") from None


def _same(path: Path, recipe: Resolved, identity: Mapping[str, Any], name: str) -> None:
    """Refuse to continue a run of something else, naming every difference."""
    if not (path / name).is_file():
        raise RunError(f"{path}: is a run of another kind, without {name}; choose another --out")
    before = load_json(path / _FACTS, _NO_FACTS)
    differences = [
        f"{name} was {before.get(name)!r}, now {identity.get(name)!r}"
        for name in _IDENTITY
        if before.get(name) != identity.get(name)
    ]
    if (path / name).read_text(encoding="utf-8", errors="replace") != recipe.to_yaml():
        differences.append(f"the {Path(name).stem} differs (compare its {name})")
    if differences:
        raise RunError(f"{path}: is another run: {'; '.join(differences)}. Choose another --out, or repeat its options")
