"""Keep the state of a run in one directory that can be resumed after a kill at any
moment.

    recipe.yaml   the resolved recipe (search.yaml for a search), written before
                  anything runs
    run.json      identity of the run: teacher, data, seed, precision, versions,
                  command, number of processes at the start and after each resume; when
                  it was finished
    seconds.json  time spent by all processes until their last checkpoint or finished
                  stage
    log.jsonl     one line per logged step: stage, step, every named loss part, scores
    tensorboard/  the same for TensorBoard
    stages/<name>/checkpoints/checkpoint-<step>/   each sealed, flushed and renamed into
                                                   place when complete; they are removed
                                                   when the run is finished
    stages/<name>/model/                           the stage's result, written in the
                                                   same way
    bundle/, report.html                           the final results

A stage is done when its `model/` exists and is intact; there is no other cursor.
"""

import errno
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from compress.config.stages import AnyStage
from compress.console import warn
from compress.errors import DamagedError, RunError
from compress.io import (
    keep_if_intact,
    load_json,
    lock,
    make_folder,
    name_disk_errors,
    write_json,
    write_text,
)
from compress.outputs import check_name
from compress.provenance import resume_command, timestamp
from compress.training.processes import from_first

if TYPE_CHECKING:
    from rich.console import Console

_IDENTITY = (
    "teacher",
    "prompt",
    "knowledge",
    "data",
    "corpus",
    "seed",
    "minutes",
    "precision",
    "columns",
    "storage",
    "study",
    "code",
    "use_fsdp",
)
"""The settings that must be the same to resume a run, besides the recipe."""
RESULT = "student"
"""The folder of the checkpoint that a pre-training leaves in a run's folder."""
_FACTS = "run.json"
_LOCK = ".lock"
_PAPERS = ("recipe.yaml", "search.yaml", _FACTS)
"""Files that are written before anything runs: a directory with only these files may be
used again."""
_SPENT = "costs.json"
"""The file of the time that a search has spent, which need not be kept if the search
failed at once."""
_SECONDS = "seconds.json"
_NO_FACTS = "The run cannot be identified without it: start again in another --out"
_LEFTOVERS = (
    "stages/*/checkpoints",
    "stages/*/best.safetensors",
    "stages/*/.partial",
    ".*.partial",
    ".*.retired",
    ".timing-*",
)
"""Files that only an unfinished run needs, or that a killed process has left behind."""


class Resolved(Protocol):
    """A resolved configuration that a run carries out: a recipe, or a search."""

    def to_yaml(self) -> str: ...


@dataclass(frozen=True)
class Run:
    path: Path
    seed: int
    main: bool
    """True in the process that writes: the first one of a multi-process launch."""
    before: float = 0.0
    """Seconds for which earlier processes have worked on the run."""
    track: str | None = None
    """The tracker that stages report to, besides the log."""
    note: str = ""
    """A warning if other numbers of processes have worked on the run one after
    another."""
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
        """Create the directory, or with `resume` continue the run in it. Raises
        RunError.

        identity   identifies the run (teacher, data, corpus, seed, precision, columns),
                   with any facts to record
        name       the name of the file that the recipe is written to
        track      a tracker, which may change on resuming

        The directory of a run that ended before it had any results may be used again by
        another run.
        """
        if not main:
            return Run(path, identity["seed"], main=False)
        resumable = Run.check(path, resume=resume)
        try:
            make_folder(path)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be made ({error.strerror}); choose an --out that can "
                "be written"
            ) from error
        lock = _locked(path)
        before = 0.0
        note = ""
        try:
            if resumable:
                _check_same(path, recipe, identity, name)
                before = _seconds(path / _SECONDS)
                note = _record_processes(path, identity.get("processes"))
            else:
                (path / _SPENT).unlink(missing_ok=True)
                write_text(path / name, recipe.to_yaml())
                write_json(path / _FACTS, dict(identity))
        except BaseException:
            lock.close()
            raise
        return Run(
            path,
            identity["seed"],
            main=True,
            before=before,
            track=track,
            note=note,
            _opened=time.monotonic(),
            _lock=lock,
        )

    @staticmethod
    def check(path: Path, *, resume: bool = False) -> bool:
        """Return True if the directory holds a run to resume, without writing anything.

        Raises RunError if the directory belongs to something else, or if there is
        nothing to resume.
        """
        check_name(path, "out")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path}: is a file; --out must name a directory")
        entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        # what a run begins with
        papers = {_LOCK, _SPENT, *_PAPERS, *(f".{name}.partial" for name in _PAPERS)}
        used = bool(entries - papers) or (bool(entries) and _LOCK not in entries)
        resumable = (path / _FACTS).is_file() and used
        if used and not resumable:
            raise RunError(
                f"{path}: is not empty and not a run of compress; choose another --out"
            )
        if resumable and not resume:
            raise RunError(
                f"{path}: already holds a run; --resume continues it, another --out "
                "starts a new one"
            )
        if resume and not (path / _LOCK).exists():
            raise RunError(
                f"{path}: holds no run to resume; check --out, or start one there "
                "without --resume"
            )
        existing = next(
            folder for folder in (path, *path.absolute().parents) if folder.exists()
        )
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            read_only = (
                hasattr(os, "statvfs") and os.statvfs(existing).f_flag & os.ST_RDONLY
            )
            number = errno.EROFS if read_only else errno.EACCES
            if not existing.is_dir():
                number = errno.ENOTDIR
            why = os.strerror(number)
            raise RunError(
                f"{path}: cannot be made ({why}); choose an --out that can be written"
            )
        if (path / _LOCK).is_file():
            with (path / _LOCK).open(encoding="utf-8") as file:
                _lock(path, file, shared=True)
        return resumable

    def stage(self, name: str) -> Path:
        """Return the stage's own folder."""
        return self.path / "stages" / name

    def result(self, name: str) -> Path:
        """Return the folder of the stage's result, which exists once the stage is
        done."""
        return self.stage(name) / "model"

    def done(self, name: str, console: "Console") -> bool:
        """Return True, in all processes, if the stage's result is intact; a damaged one
        is removed, with a warning."""
        return from_first(
            lambda: keep_if_intact(self.result(name), partial(warn, console))
        )

    def remaining(
        self, stages: Sequence[AnyStage], console: "Console"
    ) -> tuple[Path | None, list[AnyStage]]:
        """Return the result of the last stage that is done, or None, and the stages
        still to run."""
        for at in reversed(range(len(stages))):
            if self.done(stages[at].name, console):
                return self.result(stages[at].name), list(stages[at + 1 :])
        return None, list(stages)

    def confirm(self, **digests: str) -> None:
        """Record the digests of the run's inputs, or compare them with the recorded
        ones. Every process of a launch calls this. Raises RunError."""
        # part of another run, such as one student of a search
        if self.main and self._lock is None:
            return
        # other nodes may not see the folder
        facts = from_first(lambda: load_json(self.path / _FACTS, _NO_FACTS))
        known = facts.get("digests", {})
        differences = [
            f"the {name} ({facts.get(name, 'which it begins as')}) has changed since "
            f"the run began: its SHA-256 was {known[name]}, now {now}"
            for name, now in digests.items()
            if known.get(name, now) != now
        ]
        if differences:
            raise RunError(
                f"{self.path}: {'; '.join(differences)}. Restore it, or choose another "
                "--out for a new run"
            )
        if self.main and not digests.keys() <= known.keys():
            write_json(self.path / _FACTS, {**facts, "digests": {**known, **digests}})

    def save_seconds(self) -> None:
        """Save the time that the run has taken so far, for a process that resumes
        it."""
        if self._lock is not None:
            write_json(
                self.path / _SECONDS,
                {"seconds": round(self.before + time.monotonic() - self._opened, 3)},
            )

    def finish(self) -> None:
        """Record that the run is finished, and remove what only an unfinished run
        needs."""
        now = timestamp()
        write_json(
            self.path / _FACTS,
            {**load_json(self.path / _FACTS, _NO_FACTS), "finished": now},
        )
        _remove(_leftovers(self.path))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def _record_processes(path: Path, now: int | None) -> str:
    """Record the number of processes that continue a run; return a warning if it has
    changed, else ''."""
    facts = load_json(path / _FACTS, _NO_FACTS)
    # runs of earlier versions, and searches, have not recorded it
    numbers = [facts.get("processes", now), *facts.get("continued_by", [])]
    if numbers[-1] != now and "finished" not in facts:
        numbers.append(now)
        write_json(path / _FACTS, {**facts, "continued_by": numbers[1:]})
    if len(numbers) == 1:
        return ""
    return (
        f"trained by {', then '.join(map(str, numbers))} processes: the weights differ "
        "from an uninterrupted run only in rounding, and in dropout and other random "
        "draws, which each process makes on its own"
    )


def is_finished(path: Path) -> bool:
    """Return True if a folder holds a finished run."""
    return (path / _FACTS).is_file() and "finished" in load_json(
        path / _FACTS, _NO_FACTS
    )


def continuation(path: Path) -> str:
    """Return the command that resumes the run in a folder, or '' if it is unknown, or
    if no command started the run."""
    try:
        return resume_command(
            path, str(load_json(path / _FACTS, _NO_FACTS).get("command", ""))
        )
    except DamagedError:
        return ""


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that a finished pre-training has left in its folder, or
    None for any other run."""
    checkpoint = path / RESULT
    return checkpoint if (checkpoint / "config.json").is_file() else None


def advise(path: Path) -> str:
    """Say how to continue with a run that has no bundle."""
    if find_checkpoint(path) is not None:
        words = ["compress", "export", str(path), "--out", str(path / "bundle")]
        return f"It has left a checkpoint. Make a bundle of it: {shlex.join(words)}"
    command = continuation(path) or "the command that began it, and --resume"
    return f"The run has not finished. Continue with: {command}"


def clean(path: Path, *, unfinished: bool = False, dry_run: bool = False) -> int:
    """Remove checkpoints and the files of killed processes from a run; return the
    number of bytes freed.

    Bundle, report, log and the stages' results are kept. dry_run: only count. Raises
    RunError for a directory without a run, for a run that another process works on, and
    (unless `unfinished`) for a run that is not finished, whose interrupted stage would
    restart from its beginning.
    """
    if not (path / _FACTS).is_file() or not (path / _LOCK).exists():
        raise RunError(
            f"{path}: holds no run of compress; expected the --out of a run or a search"
        )
    with closing(_locked(path)):
        finished = "finished" in load_json(path / _FACTS, _NO_FACTS)
        if not finished and not unfinished:
            raise RunError(
                f"{path}: is not finished, and --resume would need its checkpoints. "
                "Finish it, or pass --unfinished: the interrupted stage then restarts "
                "from its beginning"
            )
        leftovers = _leftovers(path)
        # one leftover may lie in another
        files = {file for each in leftovers for file in (each, *each.rglob("*"))}
        size = sum(file.stat().st_size for file in files if file.is_file())
        if not dry_run:
            _remove(leftovers)
    return size


def _seconds(file: Path) -> float:
    if not file.exists():
        return 0.0
    remedy = "Remove it: the time of the run is then counted from now on"
    seconds = load_json(file, remedy).get("seconds")
    if not isinstance(seconds, int | float):
        raise DamagedError(file, ["it contains no number of seconds"], remedy)
    return seconds


def _leftovers(path: Path) -> list[Path]:
    return sorted(
        leftover for pattern in _LEFTOVERS for leftover in path.rglob(pattern)
    )


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str]:
    """Lock a run for the lifetime of this process."""
    file = (path / _LOCK).open("a+", encoding="utf-8")
    try:
        _lock(path, file)
        file.truncate(0)
        with name_disk_errors(path / _LOCK):
            file.write(str(os.getpid()))
            file.flush()
    except (OSError, RunError):
        with suppress(OSError):  # closing flushes, which fails again
            file.close()
        raise
    return file


def _lock(path: Path, file: IO[str], *, shared: bool = False) -> None:
    """Lock the file without waiting. Raises RunError if another process holds the
    lock."""
    try:
        lock(file, shared=shared)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise RunError(
            f"{path}: another process (pid {owner}) is running this run; wait for it, "
            "or stop it"
        ) from None


def _check_same(
    path: Path, recipe: Resolved, identity: Mapping[str, Any], name: str
) -> None:
    """Raise RunError, which names every difference, if the folder holds another run."""
    if not (path / name).is_file():
        raise RunError(
            f"{path}: is a run of another kind, without {name}; choose another --out"
        )
    before = load_json(path / _FACTS, _NO_FACTS)
    differences = [
        f"{name} was {before.get(name)!r}, now {identity.get(name)!r}"
        for name in _IDENTITY
        if before.get(name) != identity.get(name)
    ]
    written = (path / name).read_text(encoding="utf-8", errors="replace")
    if written != recipe.to_yaml():
        differences.append(f"the {Path(name).stem} differs (compare its {name})")
    if differences:
        raise RunError(
            f"{path}: is another run: {'; '.join(differences)}. Choose another --out, "
            "or repeat its options"
        )
