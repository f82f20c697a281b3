"""A study: begun, continued or joined, and run.

    study = open_study(folder / "journal.log", "sst2", {"teacher": ..., "data": ...}, objectives=("score", "latency"))
    run_trials(study, space, judge, trials=200)

A process is killed, a disk is full, a database restarts: the study is continued by the same two lines.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np
import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from compress.errors import CompressError, SearchError, did_you_mean
from compress.nas.budget import SURE
from compress.nas.config import OBJECTIVES, record, same, same_code
from compress.nas.outcomes import cost, costs, counted, fits, front, outcome, recorded, shape_of
from compress.nas.storage import (
    STEADY,
    Pulse,
    Say,
    StorageError,
    beating,
    close_storage,
    me,
    open_storage,
    quiet,
    reaching,
    run_again,
    sweep,
)
from compress.provenance import redact
from compress.records.search_report import State

Choice = Mapping[str, int | float | str]
"""One shape asked of a space: `layers`, `hidden`, `config.hidden_act`, `precision` ..."""


class Predicted(Protocol):
    """A latency in ms, and one standard deviation of it."""

    @property
    def ms(self) -> float: ...
    @property
    def error_ms(self) -> float: ...


class Space(Protocol):
    """space.Shapes is one."""

    def suggest(self, trial: optuna.Trial) -> Choice: ...

    def key(self, choice: Choice) -> str:
        """The same for the same shape, in whatever order it is written."""

    def size(self) -> int | None:
        """How many shapes there are, if that is known."""


class Judge(Protocol):
    """Evaluates choices. A CompressError of any of these ends that trial, not the study.

    rungs   how often a shape is scored, each time on more rows or after more training
    """

    @property
    def rungs(self) -> int: ...

    def latency(self, choice: Choice) -> Predicted | None:
        """None where nothing is known of it; then it can be neither an objective nor limited."""

    def facts(self, choice: Choice) -> Mapping[str, float]:
        """parameters, flops_per_token, file_mb: objectives and limits other than the score and the latency."""

    def score(self, choice: Choice, rung: int) -> float:
        """More is better. Asked of a shape for rung 0, 1 ... in order, in one process; the last is its score."""


ETA = 3
ALIKE = 1.2


@dataclass(frozen=True)
class Standing:
    """A trial at a rung: its score there, more is better, and its costs, less is better."""

    score: float
    costs: tuple[float, ...] = ()


def cut(one: Standing, before: Sequence[Standing]) -> str:
    """Why `one` does not go on, in words; empty if it does. `before`: the others that have a score at its rung."""
    if not any(_beats(other, one) for other in before):
        return ""
    field = [other for other in before if _alike(one, other)]
    about = "cost about the same"
    if len(field) < ETA:
        field = [other for other in before if _no_costlier(other, one, ALIKE)]
        about = "cost no more"
    if len(field) < ETA:
        return ""
    place = 1 + sum(other.score > one.score for other in field)
    on = ceil((len(field) + 1) / ETA)
    if place <= on:
        return ""
    return f"{one.score:.4g} is place {place} of {len(field) + 1} that {about}; the best {on} go on"


def _beats(other: Standing, one: Standing) -> bool:
    return other.score >= one.score and _no_costlier(other, one) and other != one


def _no_costlier(other: Standing, one: Standing, factor: float = 1.0) -> bool:
    return all(a <= b * factor for a, b in zip(other.costs, one.costs, strict=True))


def _alike(one: Standing, other: Standing) -> bool:
    return _no_costlier(one, other, ALIKE) and _no_costlier(other, one, ALIKE)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a trial: its values, in the order of the objectives, if it has them; else why not."""

    state: State
    values: tuple[float, ...] | None = None
    reason: str = ""

    @property
    def told(self) -> TrialState:
        """As what Optuna is told of it."""
        if self.values is not None:
            return TrialState.COMPLETE
        return TrialState.FAIL if self.state == "failed" else TrialState.PRUNED


def judge_trial(
    study: optuna.Study, trial: optuna.Trial, space: Space, judge: Judge, limits: Mapping[str, float]
) -> Verdict:
    """The shape the trial stands for, judged; each thing known of it is written down as it comes to be known."""
    try:
        choice = space.suggest(trial)
        key = space.key(choice)
        trial.set_user_attr("choice", dict(choice))
        trial.set_user_attr("key", key)
        if twin := _twin(study, key, trial.number):
            return _as_twin(trial, twin)
        if latency := judge.latency(choice):
            trial.set_user_attr("latency", {"ms": float(latency.ms), "error_ms": float(latency.error_ms)})
        if outside := _outside(trial, limits, ("latency",)):
            return Verdict("too slow", None, outside)
        trial.set_user_attr("facts", {name: float(value) for name, value in judge.facts(choice).items()})
        if outside := _outside(trial, limits, [name for name in limits if name not in {"latency", "score"}]):
            return Verdict("too slow", None, outside)
        return _climbed(study, trial, judge, choice, limits)
    except StorageError:
        raise
    except CompressError as error:
        return Verdict("failed", None, str(error))


def _climbed(
    study: optuna.Study, trial: optuna.Trial, judge: Judge, choice: Choice, limits: Mapping[str, float]
) -> Verdict:
    """Up the rungs as long as it goes on."""
    objectives = recorded(study)["objectives"]
    paid = {name: cost(trial.user_attrs, name) for name in objectives if name != "score"}
    if unknown := [name for name, value in paid.items() if not math.isfinite(value)]:
        raise SearchError(f"its {' and '.join(unknown)} is not known, but an objective of the study")
    scores: list[float] = []
    for rung in range(judge.rungs):
        score = float(judge.score(choice, rung))
        if not math.isfinite(score):
            raise SearchError(f"its score at rung {rung} is {score}")
        scores.append(score)
        trial.set_user_attr("scores", scores)
        if rung < judge.rungs - 1:
            before = _standings(study, rung, trial.number, objectives)
            if why := cut(Standing(score, tuple(paid.values())), before):
                return Verdict("pruned", None, f"rung {rung}: {why}")
    if "score" in limits:
        trial.set_constraint("score", limits["score"] - scores[-1])
    return Verdict("complete", tuple({**paid, "score": scores[-1]}[name] for name in objectives))


def _outside(trial: optuna.Trial, limits: Mapping[str, float], names: Sequence[str]) -> str:
    """What the trial is over, in words. The sampler is told by how much, of the limit, it is over or under."""
    over = []
    for name in set(names) & set(limits):
        value, limit = cost(trial.user_attrs, name), limits[name]
        if not math.isfinite(value):
            raise SearchError(f"its {name} is not known, but limited to {limit:g}")
        error = SURE * trial.user_attrs["latency"]["error_ms"] if name == "latency" else 0.0
        trial.set_constraint(name, (value + error - limit) / limit)
        if value + error > limit:
            over.append(f"{name} {value:.4g}{f' + {error:.2g} ({SURE:g} errors)' if error else ''}, limit {limit:g}")
    return "; ".join(sorted(over))


def _standings(study: optuna.Study, rung: int, number: int, objectives: Sequence[str]) -> list[Standing]:
    """The others that have a score at that rung: of trials that run, were cut, or came to the top."""
    return [
        Standing(trial.user_attrs["scores"][rung], costs(trial.user_attrs, objectives))
        for trial in study.get_trials(deepcopy=False)
        if trial.number != number
        and (trial.state == TrialState.RUNNING or outcome(trial) in {"complete", "pruned"})
        and len(trial.user_attrs.get("scores", ())) > rung
    ]


def _twin(study: optuna.Study, key: str, number: int) -> FrozenTrial | None:
    """The trial of the same shape whose outcome is known, or that began before this one and runs."""
    for trial in study.get_trials(deepcopy=False):
        if trial.number == number or trial.user_attrs.get("key") != key or outcome(trial) == "duplicate":
            continue
        if outcome(trial) or (trial.state == TrialState.RUNNING and trial.number < number):
            return trial
    return None


def _as_twin(trial: optuna.Trial, twin: FrozenTrial) -> Verdict:
    """What is known of the twin, told of this trial too, so that the sampler learns from it."""
    trial.set_user_attr("twin", twin.number)
    for name in ("latency", "facts", "scores"):
        if name in twin.user_attrs:
            trial.set_user_attr(name, twin.user_attrs[name])
    for name, excess in twin.constraints.items():
        trial.set_constraint(name, excess)
    became = outcome(twin)
    values = tuple(twin.values) if became == "complete" else None
    return Verdict("duplicate", values, f"the shape of trial {twin.number} ({became or 'running'})")


PATIENCE = 200
"""Shapes drawn in a row, all known already or outside the limits, after which a search has seen its space."""
FAILURES = 5
"""Trials that fail one after another, after which it is not the shapes that are wrong."""


def run_trials(
    study: optuna.Study,
    space: Space,
    judge: Judge,
    *,
    limits: Mapping[str, float] | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    say: Say = print,
    watch: Callable[[optuna.Study], None] | None = None,
    pulse: Pulse = STEADY,
) -> None:
    """Judge shapes until the study has `trials` scored ones in all, `seconds` have passed, or nothing new is drawn.

    trials   of all workers and all earlier sessions together; kept in the study, and read from it where None. Shapes
             known already or outside the limits do not count. N workers may score up to N - 1 more.
    limits   objective -> the most it may be (of the score: the least); the study's own where None
    watch    called with the study after every trial

    Raises SearchError when all that was drawn is outside the limits (naming the closest), and when `FAILURES` trials
    fail in a row; StorageError when the storage is lost. An interruption is passed on, its trial queued again.
    """
    within = recorded(study)["limits"] if limits is None else limits
    began, barren, failed = time.monotonic(), 0, 0
    with reaching(study.study_name):
        if trials is not None and study.user_attrs.get("trials") != trials:
            study.set_user_attr("trials", trials)
        while True:
            sweep(study, pulse, say)
            late = seconds is not None and time.monotonic() - began >= seconds
            if over := _over(study, space.size(), barren, late):
                break
            trial, verdict = _run_one(study, lambda trial: judge_trial(study, trial, space, judge, within), pulse)
            say(f"trial {trial.number}: {_in_words(study, trial, verdict)}")
            barren = barren + 1 if verdict.state in {"duplicate", "too slow"} else 0
            failed = failed + 1 if verdict.state == "failed" else 0
            if watch is not None:
                watch(study)
            if failed == FAILURES:
                raise SearchError(f"{FAILURES} trials failed one after another; the last: {verdict.reason}")
        say(f"{over}; {counted(study.get_trials(deepcopy=False))} shapes scored, {len(front(study))} on the front")
        _expect_one_within(study, within)


def _over(study: optuna.Study, size: int | None, barren: int, late: bool) -> str:
    """Why the search is over, in words; empty if it is not."""
    trials = study.get_trials(deepcopy=False)
    if late:
        return "the time is over"
    if any(trial.state == TrialState.WAITING for trial in trials):
        return ""  # somebody lost it, or asked for it
    running = sum(trial.state == TrialState.RUNNING for trial in trials)
    wanted = study.user_attrs.get("trials")
    if wanted is not None and counted(trials) + running >= wanted:
        return "all trials asked for are done" + (f", or running elsewhere ({running})" if running else "")
    known = {trial.user_attrs.get("key") for trial in trials} - {None}
    if size is not None and len(known) >= size:
        return f"the space has no more than these {size} shapes"
    if barren >= PATIENCE:
        return f"the last {PATIENCE} shapes drawn were known already, or outside the limits"
    return ""


def _run_one(
    study: optuna.Study, judged: Callable[[optuna.Trial], Verdict], pulse: Pulse
) -> tuple[optuna.Trial, Verdict]:
    """Ask for a trial, judge it, tell what became of it; queue it again if anything comes in between."""
    began = time.monotonic()
    with quiet():
        trial = study.ask()
    try:
        with reaching(study.study_name), beating(study, trial, pulse):
            verdict = judged(trial)
            if verdict.reason:
                trial.set_user_attr("reason", verdict.reason)
            trial.set_user_attr("seconds", round(time.monotonic() - began, 3))
            trial.set_user_attr("state", verdict.state)
            study.tell(trial, verdict.values, verdict.told)
    except UpdateFinishedTrialError:
        reason = "this process stood still for so long that it was given up for dead; the shape is queued again"
        return trial, Verdict("pruned", None, reason)
    except StorageError:
        raise
    except BaseException:
        _give_back(study, trial)
        raise
    return trial, verdict


def _give_back(study: optuna.Study, trial: optuna.Trial) -> None:
    """The trial is over; its shape waits for whoever goes on with the study."""
    try:
        with reaching(study.study_name):
            study.tell(trial, state=TrialState.FAIL)
            run_again(study, study.get_trials(deepcopy=False)[trial.number], died=False)
    except (StorageError, UpdateFinishedTrialError):
        return  # what cannot be told now is swept when the study is next opened


def _in_words(study: optuna.Study, trial: optuna.Trial, verdict: Verdict) -> str:
    if verdict.state != "complete" or verdict.values is None:
        return f"{verdict.state}: {verdict.reason}"
    objectives = recorded(study)["objectives"]
    values = ", ".join(f"{name} {value:.4g}" for name, value in zip(objectives, verdict.values, strict=True))
    on_front = any(trial.number == one.number for one in front(study))
    return f"{values}{' (on the front)' if on_front else ''}: {shape_of(trial.user_attrs)}"


def _expect_one_within(study: optuna.Study, limits: Mapping[str, float]) -> None:
    """Raise SearchError, naming the closest, if every shape that was drawn is outside the limits."""
    trials = study.get_trials(deepcopy=False)
    outside = [trial for trial in trials if outcome(trial) in {"complete", "too slow"} and not fits(trial)]
    if not outside or any(outcome(trial) in {"complete", "pruned"} and fits(trial) for trial in trials):
        return
    closest = min(outside, key=lambda trial: max(trial.constraints.values()))
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in limits.items())
    least = f"score {closest.user_attrs['scores'][-1]:.4g}, at least {limits['score']:g}" if closest.values else ""
    raise SearchError(
        f"study {study.study_name!r}: none of {len(outside)} shapes is within {wanted}. The closest is trial "
        f"{closest.number} ({shape_of(closest.user_attrs)}): {least or closest.user_attrs['reason']}. Relax the limit, "
        f"or give the space other shapes"
    )


SAMPLERS = ("tpe", "nsga2", "gp", "random")
POPULATION = 24
"""Of NSGA-II: a generation is that many completed trials, and a search has some hundred of them."""


def make_sampler(name: str, seed: int | None = None, stream: Sequence[int] = ()) -> BaseSampler:
    """The sampler of that name, whose draws depend on `seed` and `stream`; without a seed, on chance.

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


def open_study(
    storage: Path | str | BaseStorage,
    name: str,
    identity: Mapping[str, str],
    *,
    objectives: Sequence[str],
    limits: Mapping[str, float] | None = None,
    sampler: str = "tpe",
    seed: int | None = None,
    pulse: Pulse = STEADY,
    say: Say = print,
) -> optuna.Study:
    """Begin the study of that name, or continue it; trials whose worker is gone are queued again.

    identity     what the search is of, in words that workers can begin from too: teacher, data, space ...
    objectives   of `OBJECTIVES`, the score among them
    limits       of `OBJECTIVES` -> the most it may be; of the score: the least
    sampler      one of `SAMPLERS`; it and the seed may change when a study is continued

    Raises SearchError, the study untouched, if it is of something else, naming each difference, or was begun by another
    version of this code; StorageError if the storage cannot be reached.
    """
    wanted = record(identity, objectives, limits or {})
    make_sampler(sampler)
    with _opened(storage, pulse, say) as (opened, where), reaching(name):
        names = optuna.get_all_study_names(opened)
        if name not in names:
            _expect_room(storage, names, name)
            with quiet():
                directions = [OBJECTIVES[objective] for objective in objectives]
                study = optuna.create_study(
                    storage=opened, study_name=name, directions=directions, pruner=NopPruner(), load_if_exists=True
                )
                study.set_metric_names(list(objectives))
            study.set_user_attr("identity", wanted)
        study = _loaded(opened, name)
        if "identity" not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr("identity", wanted)  # killed between the two
        same(study, wanted, where)
        for key, value in {"sampler": sampler, "seed": seed}.items():
            if study.user_attrs.get(key, "none") != value:
                study.set_user_attr(key, value)
        study.sampler = make_sampler(sampler, seed, [len(study.get_trials(deepcopy=False))])
        sweep(study, pulse, say)
        return study


def join_study(
    storage: Path | str | BaseStorage, name: str | None = None, *, pulse: Pulse = STEADY, say: Say = print
) -> optuna.Study:
    """A study that another process began; the only one in the storage if no name is given.

    Its draws differ from those of every other worker. Raises SearchError if there is none, or which is not said, or it
    was begun by another version of this code; StorageError if the storage cannot be reached.
    """
    with _opened(storage, pulse, say) as (opened, where), reaching(name or where):
        names = optuna.get_all_study_names(opened)
        if not names:
            raise SearchError(f"{where}: holds no study yet; begin it first, then start workers")
        if name is None and len(names) > 1:
            raise SearchError(f"{where}: holds {len(names)} studies; name one of {', '.join(sorted(names))}")
        if name is not None and name not in names:
            raise SearchError(f"{where}: holds no study {name!r}, but {', '.join(sorted(names))}")
        study = _loaded(opened, name or names[0])
        same_code(study, where)
        stream = [len(study.get_trials(deepcopy=False)), crc32(repr(me()).encode())]
        study.sampler = make_sampler(study.user_attrs.get("sampler", "tpe"), study.user_attrs.get("seed"), stream)
        return study


def close_study(study: optuna.Study) -> None:
    """Give back its connections to a database or proxy; the study is not used after that."""
    close_storage(study._storage)


@contextmanager
def _opened(storage: Path | str | BaseStorage, pulse: Pulse, say: Say) -> Iterator[tuple[BaseStorage, str]]:
    """The storage and its name in messages; what was opened here is closed again if it is not used."""
    if isinstance(storage, BaseStorage):
        yield storage, type(storage).__name__
        return
    opened = open_storage(storage, pulse, say)
    try:
        yield opened, redact(storage)
    except BaseException:
        close_storage(opened)
        raise


def _loaded(storage: BaseStorage, name: str) -> optuna.Study:
    with quiet():
        # The sampler is set once the study is known to be the right one.
        return optuna.load_study(study_name=name, storage=storage, sampler=make_sampler("random"), pruner=NopPruner())


def _expect_room(storage: Path | str | BaseStorage, names: Sequence[str], name: str) -> None:
    """A journal is one study's; a database may hold many."""
    if names and not isinstance(storage, BaseStorage) and "://" not in str(storage):
        raise SearchError(
            f"{storage}: holds study {', '.join(sorted(names))}, not {name!r}; choose another folder or name"
        )
