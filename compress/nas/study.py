"""The study of a search in Optuna: open its database, begin, continue or join the study, and run its trials.

    study = open_study(folder / "study.db", "sst2", {"teacher": ..., "data": ...}, objectives=("score", "latency"))
    run_trials(study, evaluator, trials=200)

The storage (`nas.storage`) is an SQLite file for the processes of one machine, PostgreSQL for several machines. Its
heartbeats find the trials of killed processes, which are queued again with the same parameters. After a kill, a full
disk or a restart of the database, the same two lines continue the study.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

import compress
from compress.errors import SearchError, did_you_mean
from compress.nas.config import OBJECTIVES, describe_choice
from compress.nas.storage import (
    GRACE,
    HEARTBEAT,
    Say,
    StorageError,
    close_storage,
    open_storage,
    queue_again,
    quiet,
    storage_errors,
)
from compress.nas.trial import Verdict, count_scored, evaluate_trial, is_within_limits, outcome, pareto_front
from compress.provenance import redact

if TYPE_CHECKING:
    from compress.nas.context import StudentEvaluator


def close_study(study: optuna.Study) -> None:
    """Close the connections of a study, which is not used after that."""
    close_storage(study._storage)


# ---- beginning, continuing and joining a study

SAMPLERS = ("tpe", "nsga2", "gp", "random")
POPULATION = 24
"""The population of NSGA-II: a generation is that many completed trials, and a search has some hundred of them."""


def make_sampler(name: str, seed: int | None = None, stream: Sequence[int] = ()) -> BaseSampler:
    """Make the sampler of that name, whose draws depend on `seed` and `stream`; without a seed, on chance.

    Two that propose to the same study need different streams, or they draw the same. Raises SearchError.

    tpe     of the parameters together (by default Optuna takes them one by one where there are several objectives), in
            groups that occur together, away from what is running elsewhere
    nsga2   evolution; wants hundreds of trials
    gp      a Gaussian process: the fewest trials, some seconds for each
    random
    """
    drawn = None if seed is None else int(np.random.SeedSequence([seed, *stream]).generate_state(1)[0])
    with quiet():
        if name == "tpe":
            return TPESampler(seed=drawn, multivariate=True, group=True, constant_liar=True)
        if name == "nsga2":
            return NSGAIISampler(seed=drawn, population_size=POPULATION)
        if name == "gp":
            return GPSampler(seed=drawn, warn_independent_sampling=False)
        if name == "random":
            return RandomSampler(seed=drawn)
    raise SearchError(f"no sampler {name!r}.{did_you_mean(name, SAMPLERS)}")


@cache
def code_version() -> str:
    """Return the version of this package with a digest of its files: all processes of a study must have the same."""
    folder = Path(compress.__file__).parent
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda each: each.relative_to(folder).as_posix()):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{compress.__version__}+{total.hexdigest()[:12]}"


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
    """Begin the study of that name, or continue it.

    identity     the search in words that workers can begin from too: teacher, data, space ...
    objectives   of `OBJECTIVES`, the score among them
    limits       of `OBJECTIVES` -> the most it may be; of the score: the least
    sampler      one of `SAMPLERS`; it and the seed may change when a study is continued
    owner        names the caller where only one such process runs at a time: a trial that an earlier one left running
                 is queued again at once

    Raises SearchError, the study untouched, if it is another search, naming each difference, or was begun by another
    version of this code; StorageError if the storage cannot be reached.
    """
    wanted = _identify(identity, objectives, limits or {})
    make_sampler(sampler)
    with _opened(storage, say) as (opened, where), storage_errors(name), quiet():
        names = optuna.get_all_study_names(opened)
        if name not in names:
            if names and not isinstance(storage, BaseStorage) and "://" not in str(storage):  # a folder's own file
                raise SearchError(
                    f"{storage}: holds study {', '.join(sorted(names))}, not {name!r}; choose another folder or name"
                )
            directions = [OBJECTIVES[objective] for objective in objectives]
            study = optuna.create_study(
                storage=opened, study_name=name, directions=directions, pruner=NopPruner(), load_if_exists=True
            )
            study.set_metric_names(list(objectives))
            study.set_user_attr("identity", wanted)
        study = _load(opened, name)
        if "identity" not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("identity", wanted)  # killed between the two
        _check_same(study, wanted, where)
        for key, value in {"sampler": sampler, "seed": seed, "owner": owner}.items():
            if study.user_attrs.get(key, "none") != value:
                study.set_user_attr(key, value)
        study.sampler = make_sampler(sampler, seed, [len(study.get_trials(deepcopy=False))])
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if owner is not None and trial.user_attrs.get("owner") == owner:
                study.tell(trial.number, state=TrialState.FAIL)
                drawn = bool(trial.params)  # else the next draw is the same
                again = queue_again(study, trial) if drawn else "it had drawn no shape"
                say(f"trial {trial.number}: its process was killed; {again}")
        return study


def join_study(storage: Path | str | BaseStorage, name: str | None = None, *, say: Say = print) -> optuna.Study:
    """Load a study that another process began; the only one in the storage if no name is given.

    Its draws differ from those of every other worker. Raises SearchError if there is none, or several and no name, or
    it was begun by another version of this code; StorageError if the storage cannot be reached.
    """
    with _opened(storage, say, create=False) as (opened, where), storage_errors(name or where), quiet():
        names = optuna.get_all_study_names(opened)
        if not names:
            raise SearchError(f"{where}: holds no study yet; begin it first, then start workers")
        if name is None and len(names) > 1:
            raise SearchError(f"{where}: holds {len(names)} studies; name one of {', '.join(sorted(names))}")
        if name is not None and name not in names:
            raise SearchError(f"{where}: holds no study {name!r}, but {', '.join(sorted(names))}")
        study = _load(opened, name or names[0])
        _check_code(study, where)
        stream = [len(study.get_trials(deepcopy=False)), secrets.randbits(32)]
        study.sampler = make_sampler(study.user_attrs.get("sampler", "tpe"), study.user_attrs.get("seed"), stream)
        return study


@contextmanager
def _opened(storage: Path | str | BaseStorage, say: Say, *, create: bool = True) -> Iterator[tuple[BaseStorage, str]]:
    """Open the storage; yield it with its name in messages. Close it again if the caller fails."""
    if isinstance(storage, BaseStorage):
        yield storage, type(storage).__name__
        return
    opened = open_storage(storage, create=create, say=say)
    try:
        yield opened, redact(storage)
    except BaseException:
        close_storage(opened)
        raise


def _load(storage: BaseStorage, name: str) -> optuna.Study:
    # The sampler is set once the study is known to be the right one.
    return optuna.load_study(study_name=name, storage=storage, sampler=make_sampler("random"), pruner=NopPruner())


def _identify(identity: Mapping[str, str], objectives: Sequence[str], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return what is kept in the study. Raises SearchError for objectives or limits that are none of `OBJECTIVES`."""
    if not objectives or len(set(objectives)) < len(objectives):
        raise SearchError(f"objectives {list(objectives)}: expected one or more, each once, of {', '.join(OBJECTIVES)}")
    for name in [*objectives, *limits]:
        if name not in OBJECTIVES:
            raise SearchError(f"no objective {name!r}.{did_you_mean(name, OBJECTIVES)}")
    if "score" not in objectives:
        raise SearchError(f"objectives {', '.join(objectives)}: the score must be one, or the smallest shape is best")
    return {
        "of": dict(identity),
        "objectives": list(objectives),
        "limits": {name: float(limit) for name, limit in limits.items()},
        "code": code_version(),
    }


def _check_same(study: optuna.Study, wanted: Mapping[str, Any], where: str) -> None:
    """Raise SearchError, naming every difference, unless the study is the search that is `wanted`."""
    _check_code(study, where, differs=False)
    before, now = _flatten(study.user_attrs["identity"]), _flatten(wanted)
    differences = [
        f"{name}: was {before.get(name, 'not there')!s}, now {now.get(name, 'not there')!s}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise SearchError(
            f"{where}: study {study.study_name!r} is another search. {'; '.join(differences)}. Repeat what it was "
            f"started with, or give the new search a name or a storage of its own"
        )
    _check_code(study, where)


def _check_code(study: optuna.Study, where: str, *, differs: bool = True) -> None:
    """Raise SearchError unless `open_study` began the study, and (where `differs` counts) this code did."""
    kept = study.user_attrs.get("identity")
    if not isinstance(kept, dict) or not {"of", "objectives", "limits", "code"} <= kept.keys():
        raise SearchError(f"{where}: study {study.study_name!r} was not begun by `compress search`; give another")
    if differs and kept["code"] != code_version():
        raise SearchError(
            f"{where}: study {study.study_name!r} was begun by compress {kept['code']}, this is {code_version()}: the "
            f"same shape could score differently. Install here what the study was begun with, or begin a new study"
        )


def _flatten(kept: Mapping[str, Any]) -> dict[str, str]:
    limits = {f"limit of {name}": f"{limit:g}" for name, limit in kept["limits"].items()}
    return {**kept["of"], "objectives": ", ".join(kept["objectives"]), **limits}


# ---- running trials

PATIENCE = 200
"""Shapes drawn in a row, all known already or outside the limits, after which a search has seen its space."""
FAILURES = 5
"""Trials that fail one after another, after which it is not the shapes that are wrong."""


def run_trials(
    study: optuna.Study,
    evaluator: "StudentEvaluator",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    worker: bool = False,
    wait: float = GRACE + HEARTBEAT,
    say: Say = print,
    watch: Callable[[optuna.Study], None] | None = None,
) -> None:
    """Evaluate shapes until the study has `trials` scored ones in all, `seconds` have passed, or nothing new is drawn.

    trials   of all processes and all earlier sessions together. Shapes known already or outside the limits do not
             count. N workers may score up to N - 1 more. None: as many as there is time for
    worker   take `trials` from the study, and end as soon as the search has ended; `trials` is not read
    wait     seconds to wait at the end for trials of workers: long enough for a heartbeat to be missed, so that the
             trial of a killed worker is run again
    watch    called with the study after every trial

    Raises SearchError when all that was drawn is outside the limits (naming the closest), and when `FAILURES` trials
    fail in a row; StorageError when the storage is lost. An interruption is passed on, its trial queued again.
    """
    size = evaluator.costs.shapes.size()
    began, barren, failed = time.monotonic(), 0, 0
    waiting: float | None = None
    with storage_errors(study.study_name):
        limits = study.user_attrs["identity"]["limits"]
        if not worker:
            for name, value in {"trials": trials, "over": False}.items():
                study.set_user_attr(name, value)
        while True:
            late = seconds is not None and time.monotonic() - began >= seconds
            if over := "the time is over" if late else _is_over(study, size, barren, worker):
                running = len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
                if late or worker or not running or (waiting is not None and time.monotonic() - waiting > wait):
                    break
                if waiting is None:
                    say(f"{over}; waiting for {running} trials that run elsewhere")
                    waiting = time.monotonic()
                time.sleep(min(1.0, wait / 10))
                with quiet():
                    optuna.storages.fail_stale_trials(study)
                continue
            waiting = None
            if not worker:
                _reseed(study)
            number, verdict = _run_trial(study, evaluator, limits, None if worker else study.user_attrs.get("owner"))
            say(f"trial {number}: {_report(study, number, verdict)}")
            barren = barren + 1 if verdict.state in {"duplicate", "too slow"} else 0
            failed = failed + 1 if verdict.state == "failed" else 0
            if watch is not None:
                watch(study)
            if failed == FAILURES:
                raise SearchError(f"{FAILURES} trials failed one after another; the last: {verdict.reason}")
        if not worker:
            study.set_user_attr("over", True)
        scored, front = count_scored(study.get_trials(deepcopy=False)), pareto_front(study)
        say(f"{over}; {scored} shapes scored, {len(front)} on the front")
        _check_one_within(study, limits)


def _reseed(study: optuna.Study) -> None:
    """Let the next draw depend on seed and number of shapes drawn alone, so that a killed search draws the same."""
    seed, sampler = study.user_attrs.get("seed"), study.user_attrs["sampler"]
    if seed is not None and sampler != "gp":  # which goes on from what it fitted before
        trials = study.get_trials(deepcopy=False)
        drawn = sum(bool(trial.params) and not trial.system_attrs.get("fixed_params") for trial in trials)
        study.sampler = make_sampler(sampler, seed, [drawn])


def _is_over(study: optuna.Study, size: int | None, barren: int, worker: bool) -> str:
    """Return why the search is over; empty if it is not."""
    trials = study.get_trials(deepcopy=False)
    if worker and study.user_attrs.get("over"):
        return "the search has ended"
    if any(trial.state == TrialState.WAITING for trial in trials):
        return ""  # queued again after its process died
    running = sum(trial.state == TrialState.RUNNING for trial in trials)
    wanted = study.user_attrs.get("trials")
    if wanted is not None and count_scored(trials) + running >= wanted:
        return "all trials asked for are done" + (f", or running elsewhere ({running})" if running else "")
    known = {trial.user_attrs.get("key") for trial in trials} - {None}
    if size is not None and len(known) >= size:
        return f"the space has no more than these {size} shapes"
    if barren >= PATIENCE:
        return f"the last {PATIENCE} shapes drawn were known already, or outside the limits"
    return ""


def _run_trial(
    study: optuna.Study, evaluator: "StudentEvaluator", limits: Mapping[str, float], owner: str | None
) -> tuple[int, Verdict]:
    """Run one trial; return its number and verdict. Queue its shape again where an interruption or a bug ends it."""
    number, verdict = -1, Verdict(None)

    def objective(trial: optuna.Trial) -> tuple[float, ...]:
        nonlocal number, verdict
        number, began = trial.number, time.monotonic()
        try:
            if owner is not None:
                trial.set_user_attr("owner", owner)
            verdict = evaluate_trial(study, trial, evaluator, limits)
            known = {"reason": verdict.reason, "seconds": round(time.monotonic() - began, 3), "state": verdict.state}
            for name, value in known.items():
                if value not in ("", None):
                    trial.set_user_attr(name, value)
        except UpdateFinishedTrialError:
            verdict = Verdict(None, None, LATE)
        if verdict.state == "failed":
            raise SearchError(verdict.reason)
        if verdict.values is None:
            raise TrialPruned
        return verdict.values

    try:
        with quiet():
            study.optimize(objective, n_trials=1, catch=(SearchError,))
    except ValueError:  # Optuna refuses to finish what another process has finished
        if verdict.reason != LATE:
            _give_back(study, number)
            raise
    except BaseException:
        _give_back(study, number)
        raise
    return number, verdict


LATE = "this process stood still for so long that it was given up for dead; the shape was queued again"


def _give_back(study: optuna.Study, number: int) -> None:
    """Queue the parameters of a trial that an interruption ended, for whoever continues the study."""
    if number < 0:
        return
    with suppress(StorageError), storage_errors(study.study_name):
        trial = study.get_trials(deepcopy=False)[number]
        if trial.state == TrialState.FAIL and trial.params and outcome(trial) is None:
            study.enqueue_trial(trial.params)


def _report(study: optuna.Study, number: int, verdict: Verdict) -> str:
    if verdict.state != "complete" or verdict.values is None:
        return f"{verdict.state or 'stopped'}: {verdict.reason}"
    objectives = study.user_attrs["identity"]["objectives"]
    values = ", ".join(f"{name} {value:.4g}" for name, value in zip(objectives, verdict.values, strict=True))
    on_front = any(number == trial.number for trial in pareto_front(study))
    shape = describe_choice(study.get_trials(deepcopy=False)[number].user_attrs["choice"])
    return f"{values}{' (on the front)' if on_front else ''}: {shape}"


def _check_one_within(study: optuna.Study, limits: Mapping[str, float]) -> None:
    """Raise SearchError, naming the closest, if every shape that was drawn is outside the limits."""
    trials = study.get_trials(deepcopy=False)
    outside = [trial for trial in trials if outcome(trial) in {"complete", "too slow"} and not is_within_limits(trial)]
    if not outside or any(outcome(trial) in {"complete", "pruned"} and is_within_limits(trial) for trial in trials):
        return
    closest = min(outside, key=lambda trial: max(trial.constraints.values()))
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in limits.items())
    least = f"score {closest.user_attrs['scores'][-1]:.4g}, at least {limits['score']:g}" if closest.values else ""
    raise SearchError(
        f"study {study.study_name!r}: none of {len(outside)} shapes is within {wanted}. The closest is trial "
        f"{closest.number} ({describe_choice(closest.user_attrs['choice'])}): "
        f"{least or closest.user_attrs['reason']}. Relax the limit, or give the space other shapes"
    )
