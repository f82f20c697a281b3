"""The loop of a study: shapes asked of its sampler and judged one after another, by any number of processes at once.

All is in the storage as it happens: who is interrupted or killed loses the trial at hand, whose shape is queued again,
and whoever opens the study next goes on.
"""

import time
from collections.abc import Callable, Mapping

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from compress.errors import SearchError
from compress.search.judge import Judge, Space
from compress.search.judged import Verdict, judge_trial
from compress.search.pulse import STEADY, Pulse, beating, run_again, sweep
from compress.search.reach import Say, StorageError, quiet, reaching
from compress.search.told import counted, fits, front, outcome, recorded, shape_of

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
