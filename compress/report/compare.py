"""To choose among the files of several bundles: one task, one set of rows, every device, and the best within limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.bench.protocol import NOISE_FACTOR, Setting
from compress.classes import ClassScore, macro_f1
from compress.data.task import Task
from compress.errors import BundleError, did_you_mean
from compress.limits import check_number
from compress.report import candidates as made
from compress.report import inputs
from compress.report.candidates import OWN, Basis, Candidate, Place, Timing
from compress.report.inputs import Shipped
from compress.report.significance import apart

Cost = Callable[[Candidate], float | None]


@dataclass(frozen=True)
class View:
    """Where latency is read: one setting on one device."""

    place: str
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.place}, {self.setting}"


@dataclass(frozen=True)
class Limits:
    """What a pick must keep to: milliseconds of the median, 10^6 bytes of the file, score. None: no matter."""

    budget_ms: float | None = None
    max_mb: float | None = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Raise CompressError for limits that no file can keep; a score's own are its metric's, see `check`."""
        for name, value in (("--budget-ms", self.budget_ms), ("--max-mb", self.max_mb)):
            if value is not None:
                check_number(name, value, 0, 1e9)


@dataclass(frozen=True)
class Pick:
    """candidate: the pick, None where nothing is within the limits; level: those within them whose score these rows
    cannot tell from its, the best first; thrifty: the fastest of them, where it is clearly faster."""

    candidate: Candidate | None
    level: tuple[Candidate, ...] = ()
    thrifty: Candidate | None = None


@dataclass(frozen=True)
class Choice:
    """All there is to choose from.

    basis       the rows most candidates are scored on; scores of other rows are shown, and not compared
    candidates  by their score on these rows, the best first; then those that have none
    teachers    what they were made from, to stand beside them
    baselines   (name, score) on these rows
    view        where latency is read unless told otherwise; None where nothing was timed
    unmatched   names in result files that are of no bundle given
    """

    task: Task
    basis: Basis | None
    candidates: tuple[Candidate, ...]
    teachers: tuple[Candidate, ...]
    baselines: tuple[tuple[str, float], ...]
    places: tuple[Place, ...]
    view: View | None
    bundles: tuple[Shipped, ...]
    unmatched: tuple[str, ...]

    def score(self, one: Candidate) -> float | None:
        """On the rows of `basis`."""
        return one.scores.get(self.basis) if self.basis else None

    def classes(self, one: Candidate) -> tuple[ClassScore, ...]:
        """Look up the scores of each class on the rows of `basis`; () where there are none."""
        return one.classes.get(self.basis, ()) if self.basis else ()

    def macro_f1(self, one: Candidate) -> float | None:
        return macro_f1(self.classes(one))

    def drop(self, one: Candidate) -> float | None:
        """How much of the score of the same bundle's fp32 file is lost, on the same rows; None for that file."""
        exact = next((each for each in self.candidates if (each.bundle, each.precision) == (one.bundle, "fp32")), None)
        if exact is None or exact is one:
            return None
        before, after = self.score(exact), self.score(one)
        return before - after if before is not None and after is not None else None

    def settings(self, place: str) -> list[Setting]:
        """Those measured there, the one that most candidates have first."""
        found = [setting for one in self.candidates for setting in one.times.get(place, {})]
        return sorted(dict.fromkeys(found), key=lambda setting: -found.count(setting))

    def views(self) -> list[View]:
        return [View(place.name, setting) for place in self.places for setting in self.settings(place.name)]

    def commonest(self) -> list[View]:
        """Each device once: at the setting of the view, or where that was not measured at its own commonest."""
        found = []
        for place in self.places:
            settings = self.settings(place.name)
            if self.view and self.view.setting in settings:
                found.append(View(place.name, self.view.setting))
            elif settings:
                found.append(View(place.name, settings[0]))
        return found

    def timed(self, view: View) -> list[Candidate]:
        return [one for one in self.candidates if timing(one, view)]

    def number(self, one: Candidate) -> int:
        """Its place in the list, from 1."""
        return self.candidates.index(one) + 1

    def front(self, cost: Cost) -> list[Candidate]:
        """The candidates that no other one beats in score without costing more, the cheapest first."""
        placed = [
            (price, -score, one)
            for one in self.candidates
            if (price := cost(one)) is not None and (score := self.score(one)) is not None
        ]
        found: list[tuple[float, float, Candidate]] = []
        for price, lost, one in sorted(placed, key=lambda each: each[:2]):
            if not found or lost < found[-1][1] or (price, lost) == found[-1][:2]:
                found.append((price, lost, one))
        return [one for _, _, one in found]


def compare(paths: Sequence[Path], at: str | None = None) -> Choice:
    """Runs, bundles and result files of `compress bench`, brought together.

    at  a device, a setting or both, in the words of their names and separated by commas: `browser, 32 tokens`
    Raises BundleError for what cannot be read, for bundles of different tasks, and for an `at` that was not measured.
    """
    given = inputs.read(paths)
    task = _one_task(given.bundles)
    listed = [one for bundle in given.bundles for one in made.of_bundle(bundle)]
    places, listed, unmatched = made.places(given, listed)
    taught = made.teachers(given.bundles)
    basis = _basis(listed, taught)
    teachers = [one for one in taught if basis in one.scores]
    if any(OWN in one.times for one in listed):
        places.append(_own(given.bundles))
    choice = Choice(
        task=task,
        basis=basis,
        candidates=tuple(sorted(listed, key=lambda one: _rank(one, basis))),
        teachers=tuple(teachers),
        baselines=_baselines(given.bundles, basis),
        places=tuple(places),
        view=None,
        bundles=given.bundles,
        unmatched=tuple(unmatched),
    )
    return seen(choice, at)


def seen(choice: Choice, at: str | None) -> Choice:
    """The same choice with the view that `at` means: of several, the one most candidates were timed at."""
    views = choice.views()
    words = [word.strip().casefold() for word in (at or "").split(",") if word.strip()]
    meant = [view for view in views if all(word in _words(view) for word in words)]
    if words and not meant:
        unknown = [word for word in words if not any(word in _words(view) for view in views)]
        known = {word for view in views for word in _words(view)}
        hint = did_you_mean(unknown[0], known) if unknown else " Each was, but not together."
        raise BundleError(f"--at {at}: {', '.join(unknown) or 'that'}: no latency was measured there.{hint}")
    return replace(choice, view=max(meant, key=lambda view: len(choice.timed(view)), default=None))


def pick(choice: Choice, limits: Limits, view: View | None) -> Pick:
    """The best score within the limits; with a least score and no budget, the fastest (or smallest) that has it.

    Equal scores: the faster, then the smaller. Latency is read at `view`.
    """
    within = [one for one in choice.candidates if keeps(choice, one, limits, view)]
    if not within:
        return Pick(None)

    def cost(one: Candidate) -> tuple[float, float]:
        return _or_last(median(one, view)), _or_last(one.size_mb)

    def lost(one: Candidate) -> float:
        return -_known(choice.score(one))

    cheapest = limits.min_score is not None and limits.budget_ms is None and limits.max_mb is None
    best = min(within, key=lambda one: (cost(one), lost(one)) if cheapest else (lost(one), cost(one)))
    level = [one for one in within if one is not best and _level(choice, one, best)]
    first = min(level, key=cost, default=None)
    return Pick(best, tuple(level), first if first and _clearly_faster(first, best, view) else None)


def check(choice: Choice, limits: Limits) -> None:
    """Raise BundleError for a least score that no score of this metric can have."""
    least, metric = limits.min_score, choice.task.metric
    if least is not None and metric != "mse" and not -1 <= least <= 1:
        raise BundleError(
            f"--min-score {least:g}: {metric} is at most 1; expected a share, as {least / 100:g} for {least:g} %"
        )


def keeps(choice: Choice, one: Candidate, limits: Limits, view: View | None) -> bool:
    """Whether a candidate is scored on the rows compared and, with measured figures, keeps to every limit."""
    score, took = choice.score(one), median(one, view)
    return (
        score is not None
        and (limits.min_score is None or score >= limits.min_score)
        and (limits.max_mb is None or _or_last(one.size_mb) <= limits.max_mb)
        and (limits.budget_ms is None or _or_last(took) <= limits.budget_ms)
    )


def _clearly_faster(one: Candidate, other: Candidate, view: View | None) -> bool:
    """By more than noise makes, in times that are not noisy themselves."""
    mine, theirs = timing(one, view), timing(other, view)
    if mine is None or theirs is None or mine.noisy or theirs.noisy:
        return False
    return theirs.p50_ms > NOISE_FACTOR * mine.p50_ms


def timing(one: Candidate, view: View | None) -> Timing | None:
    return one.times.get(view.place, {}).get(view.setting) if view else None


def median(one: Candidate, view: View | None) -> float | None:
    """Milliseconds at `view`."""
    found = timing(one, view)
    return found.p50_ms if found else None


def _one_task(bundles: Sequence[Shipped]) -> Task:
    told = {bundle.name: bundle.manifest.task for bundle in bundles}
    different = {(task.kind, task.labels, task.metric, task.pair, task.unanswerable) for task in told.values()}
    if len(different) > 1:
        said = "; ".join(f"{name}: {_said(task)}" for name, task in told.items())
        raise BundleError(f"these bundles do not do the same task, so no score of one says anything of another: {said}")
    return next(iter(told.values()))


def _said(task: Task) -> str:
    shown = ", ".join(task.labels[:4]) + (f" and {len(task.labels) - 4} more" if len(task.labels) > 4 else "")
    of = " of pairs" if task.pair else ""
    return f"{task.kind}{of}{f' ({shown})' if shown else ''} by {task.metric}"


def _basis(listed: Sequence[Candidate], teachers: Sequence[Candidate]) -> Basis | None:
    """Choose the rows that most candidates are scored on; of several, those that most teachers are scored on too."""
    found, beside = ([basis for one in each for basis in one.scores] for each in (listed, teachers))
    return max(dict.fromkeys(found), key=lambda basis: (found.count(basis), beside.count(basis)), default=None)


def _baselines(bundles: Sequence[Shipped], basis: Basis | None) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for report in (bundle.report for bundle in bundles if bundle.report):
        if basis == Basis(report.data, report.split, report.split_rows):
            scored = ((row.name, report.score(row)) for row in report.of_role("baseline"))
            found.update({name: score for name, score in scored if score is not None})
    return tuple(found.items())


def _own(bundles: Sequence[Shipped]) -> Place:
    timed = [bundle.report for bundle in bundles if bundle.report and bundle.report.settings]
    machine = timed[-1].machine
    if any(report.machine.get("cpu") != machine.get("cpu") for report in timed):
        machine = {"cpu": "several: " + ", ".join(sorted({report.machine.get("cpu", "unnamed") for report in timed}))}
    return Place(OWN, machine, tuple((report.command, report.date) for report in timed), own=True)


def _rank(one: Candidate, basis: Basis | None) -> tuple[float, float, str]:
    score = one.scores.get(basis) if basis else None
    return -score if score is not None else 1e9, _or_last(one.size_mb), one.name


def _words(view: View) -> set[str]:
    return {view.place.casefold(), *(part.strip().casefold() for part in view.name.split(","))}


def _level(choice: Choice, one: Candidate, other: Candidate) -> bool:
    rows = choice.basis.rows if choice.basis else 0
    return apart(choice.task.metric, _known(choice.score(one)), _known(choice.score(other)), rows) is False


def _or_last(value: float | None) -> float:
    return value if value is not None else float("inf")


def _known(value: float | None) -> float:
    assert value is not None, "only what has a score on the rows compared is ranked"
    return value
