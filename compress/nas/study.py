"""The Optuna study of a search: create, continue or join it, and run its trials.

    identity = {"teacher": ..., "data": ...}
    objectives = ("score", "latency")
    study = open_study(folder / "study.db", "sst2", identity, objectives=objectives)
    run_trials(study, evaluator, trials=200)

The storage (`nas.storage`) is an SQLite file for the processes of one machine,
PostgreSQL for several machines. Its heartbeats find the trials of killed processes,
which are queued again with the same parameters. After a kill, a full disk or a restart
of the database, the same lines continue the study."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.samplers import (
    BaseSampler,
    GPSampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from compress import __version__
from compress.errors import SearchError, did_you_mean
from compress.io import hash_files
from compress.nas.config import OBJECTIVES, describe_choice
from compress.nas.storage import (
    GRACE,
    HEARTBEAT,
    NotStartedError,
    StorageError,
    close_storage,
    open_storage,
    queue_again,
    quiet,
    storage_errors,
)
from compress.nas.trial import (
    count_scored,
    evaluate_trial,
    is_within_limits,
    outcome,
    pareto_front,
)
from compress.progress import Say
from compress.provenance import redact

if TYPE_CHECKING:
    from compress.nas.context import StudentEvaluator


def close_study(study: optuna.Study) -> None:
    """Close the database connections of a study that is no longer used."""
    close_storage(study._storage)


# ---- creating, continuing and joining a study

SAMPLERS: Mapping[str, Callable[..., BaseSampler]] = {
    "tpe": partial(TPESampler, multivariate=True, group=True, constant_liar=True),
    # completed trials in a generation; a search has some hundred trials
    "nsga2": partial(NSGAIISampler, population_size=24),
    "gp": partial(GPSampler, warn_independent_sampling=False),
    "random": RandomSampler,
}


def make_sampler(
    name: str, seed: int | None = None, stream: Sequence[int] = ()
) -> BaseSampler:
    """Create a sampler by name, seeded by `seed` and `stream`; without a seed its draws
    are not reproducible.

    Two samplers of one study need different streams, or they draw the same shapes.
    Raises SearchError.

    tpe     tree-structured Parzen estimator over all parameters jointly (Optuna's
            default with several objectives takes them one by one); penalises shapes
            that are being evaluated elsewhere
    nsga2   evolution; needs hundreds of trials
    gp      Gaussian process: needs the fewest trials, takes seconds for each
    random
    """
    drawn = (
        None
        if seed is None
        else int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])
    )
    if name not in SAMPLERS:
        raise SearchError(f"no sampler {name!r}.{did_you_mean(name, SAMPLERS)}")
    with quiet():
        return SAMPLERS[name](seed=drawn)


@cache
def code_version() -> str:
    """Return the package's version with a digest of its files, which all processes of a
    study must share."""
    digest = hash_files(Path(__file__).parents[1].rglob("*.py"))
    return f"{__version__}+{digest[:12]}"


def open_study(
    storage: Path | str | BaseStorage,
    name: str,
    identity: Mapping[str, str],
    *,
    objectives: Sequence[str],
    limits: Mapping[str, float] | None = None,
    sampler: str = "tpe",
    seed: int | None = None,
    owner: str | None = None,
    say: Say = print,
) -> optuna.Study:
    """Create the study of that name, or continue it.

    identity     settings that identify the search: teacher, data, space ...
    objectives   keys of `OBJECTIVES`, including the score
    limits       objective -> its maximum; for the score, its minimum
    sampler      one of `SAMPLERS`; it and the seed may change when a study is continued
    owner        identifies the calling process, of which one runs at a time: a trial
                 that an earlier one left running is queued again at once

    Raises SearchError, leaving the study unchanged, if it belongs to a different search
    (naming each difference) or to another version of this code; StorageError if the
    storage cannot be reached."""
    wanted = {
        "of": dict(identity),
        "objectives": list(objectives),
        "limits": {name: float(limit) for name, limit in (limits or {}).items()},
        "code": code_version(),
    }
    make_sampler(sampler)
    with _opened(storage, say) as (opened, where), storage_errors(name), quiet():
        names = optuna.get_all_study_names(opened)
        if (
            names
            and name not in names
            and not isinstance(storage, BaseStorage)
            and "://" not in str(storage)
        ):
            raise SearchError(
                f"{storage}: holds study {', '.join(sorted(names))}, not {name!r}; "
                "choose another folder or name"
            )
        directions = [OBJECTIVES[objective] for objective in objectives]
        study = optuna.create_study(
            storage=opened, study_name=name, directions=directions, load_if_exists=True
        )
        if "identity" not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_metric_names(list(objectives))
            study.set_user_attr("identity", wanted)
        _check_identity(study, where, wanted)
        for key, value in {"sampler": sampler, "seed": seed, "owner": owner}.items():
            if study.user_attrs.get(key, "none") != value:
                study.set_user_attr(key, value)
        study.sampler = make_sampler(
            sampler, seed, [len(study.get_trials(deepcopy=False))]
        )
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if owner is not None and trial.user_attrs.get("owner") == owner:
                study.tell(trial.number, state=TrialState.FAIL)
                drawn = bool(trial.params)  # else the next draw is the same
                again = (
                    queue_again(study, trial)
                    if drawn
                    else "it had not drawn a shape yet"
                )
                say(f"trial {trial.number}: its process was killed; {again}")
        return study


def join_study(
    storage: Path | str | BaseStorage, name: str | None = None, *, say: Say = print
) -> optuna.Study:
    """Load a study that another process created; without a name, the only one in the
    storage.

    Its draws differ from those of every other worker. Raises SearchError if there is no
    such study (NotStartedError), if there are several and no name is given, or if
    another version of this code created it; StorageError if the storage cannot be
    reached.
    """
    with (
        _opened(storage, say, create=False) as (opened, where),
        storage_errors(name or where),
        quiet(),
    ):
        names = optuna.get_all_study_names(opened)
        if not names:
            raise NotStartedError(
                f"{where}: contains no study yet; start the search first, then its "
                "workers"
            )
        if name is None and len(names) > 1:
            raise SearchError(
                f"{where}: contains {len(names)} studies; name one of "
                f"{', '.join(sorted(names))}"
            )
        if name is not None and name not in names:
            raise NotStartedError(
                f"{where}: contains no study {name!r}, only {', '.join(sorted(names))}"
            )
        study = optuna.load_study(study_name=name or names[0], storage=opened)
        _check_identity(study, where)
        stream = [len(study.get_trials(deepcopy=False)), secrets.randbits(32)]
        study.sampler = make_sampler(
            study.user_attrs.get("sampler", "tpe"), study.user_attrs.get("seed"), stream
        )
        return study


@contextmanager
def _opened(
    storage: Path | str | BaseStorage, say: Say, *, create: bool = True
) -> Iterator[tuple[BaseStorage, str]]:
    """Open the storage; yield it with its name in messages. Close it again if the
    caller fails."""
    if isinstance(storage, BaseStorage):
        yield storage, type(storage).__name__
        return
    opened = open_storage(storage, create=create, say=say)
    try:
        yield opened, redact(storage)
    except BaseException:
        close_storage(opened)
        raise


def _check_identity(
    study: optuna.Study, where: str, wanted: Mapping[str, Any] | None = None
) -> None:
    """Raise SearchError unless a search with this code, and the `wanted` settings if
    any, created the study."""
    known = study.user_attrs.get("identity")
    if (
        not isinstance(known, dict)
        or not {"of", "objectives", "limits", "code"} <= known.keys()
    ):
        raise SearchError(
            f"{where}: study {study.study_name!r} was not created by `compress "
            "search`; name another"
        )
    if wanted is not None:
        before, now = (
            {
                **identity["of"],
                "objectives": ", ".join(identity["objectives"]),
                **{
                    f"limit of {name}": f"{limit:g}"
                    for name, limit in identity["limits"].items()
                },
            }
            for identity in (known, wanted)
        )
        differences = [
            f"{name}: was {before.get(name, 'absent')!s}, now "
            f"{now.get(name, 'absent')!s}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if differences:
            raise SearchError(
                f"{where}: study {study.study_name!r} belongs to a different search. "
                f"{'; '.join(differences)}. Repeat the original settings, or give the "
                "new search its own name or storage"
            )
    if known["code"] != code_version():
        raise SearchError(
            f"{where}: study {study.study_name!r} was created by compress "
            f"{known['code']}, this is {code_version()}: the same shape could score "
            "differently. Install that version here, or start a new study"
        )


# ---- running trials

MOST_REJECTED = 200
"""Duplicate or infeasible shapes drawn in a row after which a search has exhausted its
space."""
MOST_FAILURES = 5
"""Failed trials in a row after which the search, not the shapes, must be at fault."""
OVERTAKEN = (
    "this process paused for so long that its trial was taken for dead; the shape was "
    "queued again"
)


def run_trials(
    study: optuna.Study,
    evaluator: "StudentEvaluator",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    worker: bool = False,
    wait: float = GRACE + HEARTBEAT,
    say: Say = print,
    watch: Callable[[optuna.Study], None] = lambda study: None,
) -> None:
    """Evaluate shapes until the study has `trials` scored ones, `seconds` have passed,
    or no new shape is drawn.

    trials   across all processes and earlier sessions. Duplicates and shapes outside
             the limits do not count. N workers may score up to N - 1 more. None: no
             limit
    worker   take `trials` from the study, and stop as soon as the search has ended;
             `trials` is ignored
    wait     seconds to wait at the end for workers' trials: long enough to miss a
             heartbeat, so that the trial of a killed worker is run again
    watch    called with the study after every trial

    Raises SearchError when every shape is outside the limits (naming the closest), and
    when `MOST_FAILURES` trials in a row fail; StorageError when the storage is lost. An
    interruption propagates after its trial is queued again.
    """
    began = time.monotonic()
    waiting = float("inf")
    with storage_errors(study.study_name), quiet():
        limits = study.user_attrs["identity"]["limits"]
        owner = study.user_attrs.get("owner")
        session = _Session(
            study, evaluator, worker, say, watch, limits, None if worker else owner
        )
        if not worker:
            study.set_user_attr("trials", trials)
            study.set_user_attr("over", False)
        while True:
            left = None if seconds is None else seconds - (time.monotonic() - began)
            late = left is not None and left <= 0
            if not (over := "the time is over" if late else session.why_over()):
                session.optimize(left)
                waiting = float("inf")
                continue
            running = len(
                study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            )
            if late or worker or not running or time.monotonic() - waiting > wait:
                break
            if waiting == float("inf"):
                say(f"{over}; waiting for {running} trials that run elsewhere")
                waiting = time.monotonic()
            time.sleep(min(1.0, wait / 10))
            optuna.storages.fail_stale_trials(study)
        if not worker:
            study.set_user_attr("over", True)
        scored = count_scored(study.get_trials(deepcopy=False))
        front = pareto_front(study)
        say(f"{over}; {scored} shapes scored, {len(front)} on the front")
        _check_feasible(study)


@dataclass
class _Session:
    """The trials that this process runs.

    barren, failed   trials in a row without a new shape within the limits, and that
                     failed
    number           of the latest trial; overtaken: another process has already ended
                     it
    """

    study: optuna.Study
    evaluator: "StudentEvaluator"
    worker: bool
    say: Say
    watch: Callable[[optuna.Study], None]
    limits: Mapping[str, float]
    owner: str | None
    barren: int = 0
    failed: int = 0
    number: int = -1
    overtaken: bool = False

    def optimize(self, seconds: float | None) -> None:
        """Run trials until the search is over or the time has passed."""
        self.reseed()
        try:
            self.study.optimize(
                self.objective,
                timeout=seconds,
                catch=(SearchError,),
                callbacks=[lambda _, trial: self.after(trial)],
            )
        except BaseException as error:
            if not (self.overtaken and isinstance(error, ValueError)):
                self.queue_interrupted()
                raise
            # Optuna refuses to end it a second time
            self.say(f"trial {self.number}: stopped: {OVERTAKEN}")
            self.barren = self.failed = 0
            self.watch(self.study)

    def objective(self, trial: optuna.Trial) -> tuple[float, ...]:
        self.number = trial.number
        self.overtaken = False
        started = time.monotonic()
        try:
            if self.owner is not None:
                trial.set_user_attr("owner", self.owner)
            verdict = evaluate_trial(self.study, trial, self.evaluator, self.limits)
            attributes = {
                "reason": verdict.reason,
                "seconds": round(time.monotonic() - started, 3),
                "state": verdict.state,
            }
            for name, value in attributes.items():
                if value not in ("", None):
                    trial.set_user_attr(name, value)
        except UpdateFinishedTrialError:
            self.overtaken = True
            raise TrialPruned from None
        if verdict.state == "failed":
            raise SearchError(verdict.reason)
        if verdict.values is None:
            raise TrialPruned
        return verdict.values

    def after(self, trial: FrozenTrial) -> None:
        """Report a trial, and stop the study if it was the last."""
        state = outcome(trial)
        reason = trial.user_attrs.get("reason", "")
        described = (
            _describe_scored(self.study, trial)
            if state == "complete"
            else f"{state or 'stopped'}: {reason}"
        )
        self.say(f"trial {trial.number}: {described}")
        self.barren = self.barren + 1 if state in {"duplicate", "too slow"} else 0
        self.failed = self.failed + 1 if state == "failed" else 0
        self.watch(self.study)
        if self.failed == MOST_FAILURES:
            raise SearchError(
                f"{MOST_FAILURES} trials in a row failed; the last: {reason}"
            )
        if self.why_over():
            self.study.stop()
        else:
            self.reseed()

    def reseed(self) -> None:
        """Make the next draw depend only on the seed and the number of shapes drawn, so
        that a killed search repeats it."""
        seed = self.study.user_attrs.get("seed")
        sampler = self.study.user_attrs["sampler"]
        # gp continues from its previous fit
        if seed is not None and sampler != "gp" and not self.worker:
            trials = self.study.get_trials(deepcopy=False)
            drawn = sum(
                bool(trial.params) and not trial.system_attrs.get("fixed_params")
                for trial in trials
            )
            self.study.sampler = make_sampler(sampler, seed, [drawn])

    def why_over(self) -> str:
        """Return why the search is over; empty if it is not."""
        trials = self.study.get_trials(deepcopy=False)
        size = self.evaluator.costs.shapes.size()
        if self.worker and self.study.user_attrs.get("over"):
            return "the search has ended"
        if any(trial.state == TrialState.WAITING for trial in trials):
            return ""  # queued again after its process died
        running = sum(trial.state == TrialState.RUNNING for trial in trials)
        wanted = self.study.user_attrs.get("trials")
        if wanted is not None and count_scored(trials) + running >= wanted:
            return "all requested trials are done" + (
                f", or running elsewhere ({running})" if running else ""
            )
        if len({trial.user_attrs.get("key") for trial in trials} - {None}) >= size:
            return f"the space has no more than these {size} shapes"
        if self.barren >= MOST_REJECTED:
            return (
                f"the last {MOST_REJECTED} shapes were duplicates, or outside the "
                "limits"
            )
        return ""

    def queue_interrupted(self) -> None:
        """Queue the parameters of a trial that an interruption or a bug ended, for
        whoever continues the study."""
        if self.number < 0:
            return
        with suppress(StorageError), storage_errors(self.study.study_name):
            trial = self.study.get_trials(deepcopy=False)[self.number]
            if (
                trial.state == TrialState.FAIL
                and trial.params
                and outcome(trial) is None
            ):
                self.study.enqueue_trial(trial.params)


def _describe_scored(study: optuna.Study, trial: FrozenTrial) -> str:
    objectives = study.user_attrs["identity"]["objectives"]
    values = ", ".join(
        f"{name} {value:.4g}"
        for name, value in zip(objectives, trial.values, strict=True)
    )
    on_front = any(trial.number == other.number for other in pareto_front(study))
    return (
        f"{values}{' (on the front)' if on_front else ''}: "
        f"{describe_choice(trial.user_attrs['choice'])}"
    )


def _check_feasible(study: optuna.Study) -> None:
    """Raise SearchError, naming the closest, if every shape that was drawn is outside
    the limits."""
    limits = study.user_attrs["identity"]["limits"]
    trials = study.get_trials(deepcopy=False)
    outside = [
        trial
        for trial in trials
        if outcome(trial) in {"complete", "too slow"} and not is_within_limits(trial)
    ]
    if not outside or any(
        outcome(trial) in {"complete", "pruned"} and is_within_limits(trial)
        for trial in trials
    ):
        return
    closest = min(outside, key=lambda trial: max(trial.constraints.values()))
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in limits.items())
    least = (
        f"score {closest.user_attrs['scores'][-1]:.4g}, at least {limits['score']:g}"
        if closest.values
        else ""
    )
    raise SearchError(
        f"study {study.study_name!r}: none of {len(outside)} shapes is within "
        f"{wanted}. The closest is trial {closest.number} "
        f"({describe_choice(closest.user_attrs['choice'])}): "
        f"{least or closest.user_attrs['reason']}. Relax the limit, or add other "
        "shapes to the space"
    )
