"""To choose among the files of several bundles: one task, one set of rows, every device, and the best within limits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.config.limits import check_number
from compress.data.task import Task
from compress.errors import BundleError, did_you_mean
from compress.evaluation.statistics import SHARES, apart
from compress.records.class_scores import ClassScore, describe, macro_f1
from compress.records.latency import NOISE_FACTOR, Setting
from compress.reporting import candidates as inputs
from compress.reporting import candidates as made
from compress.reporting import format as units
from compress.reporting.candidates import OWN, Basis, Candidate, Place, Shipped, Timing

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
        return _or_last(median_ms(one, view)), _or_last(one.size_mb)

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
    score, took = choice.score(one), median_ms(one, view)
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


def median_ms(one: Candidate, view: View | None) -> float | None:
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


MOST_NAMED = 3
"""Candidates a sentence names before it counts."""


def choice_headline(choice: Choice, limits: Limits, chosen: Pick) -> str:
    """One sentence: the pick, what it was picked for, and a faster one where these rows cannot tell them apart."""
    one, metric = chosen.candidate, units.metric(choice.task.metric)
    if one is None:
        return _nothing(choice, limits)
    facts = _facts(choice, one, choice.view)
    cheapest = limits.min_score is not None and limits.budget_ms is None and limits.max_mb is None
    asked = _asked(limits, metric)
    if cheapest:
        how = "the fastest" if median_ms(one, choice.view) is not None else "the smallest"
        said = f"{one.name} is {how} with {metric} of at least {units.score(limits.min_score)}: {facts}"
    elif asked:
        said = f"{asked}, {one.name} scores best: {facts}"
    else:
        said = f"{one.name} scores best: {facts}"
    if chosen.thrifty and choice.basis and not cheapest:
        took = units.measure(median_ms(chosen.thrifty, choice.view), "ms")
        said += (
            f"; on {choice.basis.rows:,} rows {chosen.thrifty.name} cannot be told from it, and takes {took} "
            f"for {units.measure(chosen.thrifty.size_mb, 'MB')}"
        )
    return said + "."


def choice_remarks(choice: Choice, chosen: Pick) -> tuple[str, ...]:
    """Ties, verdicts, baselines, and what the figures cannot bear."""
    return (
        *_ties(choice, chosen),
        *_proof(chosen.candidate),
        *_fallen(chosen),
        *_choice_baselines(choice, chosen.candidate),
        *_other_rows(choice),
        *_times(choice),
        *_joined(choice),
        *_absent(choice),
    )


def where(choice: Choice) -> str:
    """What is compared, in words."""
    files, bundles = len(choice.candidates), len(choice.bundles)
    counted = f"{files} file{'s' * (files != 1)} of {bundles} bundle{'s' * (bundles != 1)}"
    return f"{counted}, {units.metric(choice.task.metric)} on {choice.basis}" if choice.basis else counted


def named(candidates: tuple[Candidate, ...], choice: Choice | None = None) -> str:
    """The first few by name, with their score of `choice`; the others by number."""
    shown = [
        f"{one.name} ({units.score(choice.score(one))})" if choice else one.name for one in candidates[:MOST_NAMED]
    ]
    rest = len(candidates) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _facts(choice: Choice, one: Candidate, view: View | None) -> str:
    costs = [(median_ms(one, view), "ms"), (one.size_mb, "MB")]
    known = " and ".join(units.measure(value, unit) for value, unit in costs if value is not None)
    return f"{units.metric(choice.task.metric)} {units.score(choice.score(one))}" + (f" at {known}" if known else "")


def _asked(limits: Limits, metric: str) -> str:
    costs = [(limits.budget_ms, "ms"), (limits.max_mb, "MB")]
    within = " and ".join(f"{value:g}{units.GAP}{unit}" for value, unit in costs if value is not None)
    least = f"with {metric} of at least {units.score(limits.min_score)}" if limits.min_score is not None else ""
    return " and ".join(part for part in (f"Within {within}" if within else "", least) if part)


def _nothing(choice: Choice, limits: Limits) -> str:
    scored = [one for one in choice.candidates if choice.score(one) is not None]
    if not scored:
        return "No candidate has a score."
    asked = _asked(limits, units.metric(choice.task.metric))
    best = max(units.score(choice.score(one)) for one in scored)
    times = [took for one in scored if (took := median_ms(one, choice.view)) is not None]
    sizes = [one.size_mb for one in scored if one.size_mb is not None]
    fastest = f"the fastest takes {units.measure(min(times), 'ms')}" if times else "none was timed"
    ends = [f"the best score is {best}", fastest]
    ends += [f"the smallest has {units.measure(min(sizes), 'MB')}"] if sizes else []
    return f"{asked}, there is nothing: {', '.join(ends)}."


def _ties(choice: Choice, chosen: Pick) -> Iterator[str]:
    if chosen.candidate is None or choice.basis is None:
        return
    rows = choice.basis.rows
    if chosen.level:
        yield (
            f"{rows:,} rows cannot tell {choice.task.metric} {units.score(choice.score(chosen.candidate))} from that "
            f"of {named(chosen.level, choice)} (95{units.GAP}%, answers taken as independent)."
        )
    elif choice.task.metric not in SHARES and len(choice.candidates) > 1:
        metric = units.metric(choice.task.metric)
        yield f"How far apart two values of {metric} must be on {rows:,} rows is not known from them alone."


def _proof(one: Candidate | None) -> Iterator[str]:
    if one is not None and one.certified is False:
        yield f"{one.name} is not certified: {one.reason}."


def _fallen(chosen: Pick) -> Iterator[str]:
    """Say which classes the pick has lost, and the faster one that is named beside it."""
    for one in (chosen.candidate, chosen.thrifty):
        if one is not None and one.fallen:
            yield f"{one.name} finds {describe(one.fallen)}."


def _choice_baselines(choice: Choice, one: Candidate | None) -> Iterator[str]:
    own = choice.score(one) if one else None
    level = [(score, name) for name, score in choice.baselines if own is not None and score >= own]
    if one and level:
        score, name = max(level)
        beside = f"{units.score(own)} against {units.score(score)}"
        yield f"{one.name} is no better than the baseline {name} ({beside})."


def _other_rows(choice: Choice) -> Iterator[str]:
    other = tuple(one for one in choice.candidates if one.scores and choice.score(one) is None)
    if other:
        rows = sorted({str(basis) for one in other for basis in one.scores})
        verb = "is" if len(other) == 1 else "are"
        yield f"{named(other)} {verb} scored on other rows ({'; '.join(rows)}): shown, and not compared."


def _times(choice: Choice) -> Iterator[str]:
    view = choice.view
    if view is None:
        yield "Nothing was timed: give this the result files of `compress bench` too."
        return
    if view.place == OWN and len({one.bundle for one in choice.timed(view)}) > 1:
        spread = _spread(choice, view)
        drift = f" The same teacher took {spread} in them." if spread else ""
        yield (
            f"Latencies are of the runs’ own races, not of one race of all.{drift} `compress bench` of all these "
            "bundles at once compares them fairly."
        )
    noisy = tuple(one for one in choice.candidates if (found := timing(one, view)) and found.noisy)
    if noisy:
        verb = "was" if len(noisy) == 1 else "were"
        yield (
            f"The machine changed speed while {named(noisy)} {verb} timed (noisy, ~) at {view.name}: take these times "
            "as approximate."
        )
    if busy := [found.busy for one in choice.candidates if (found := timing(one, view)) and found.busy]:
        yield f"The machine was not quiet at {view.name}: {max(busy)}. Alone the files are faster."


def _joined(choice: Choice) -> Iterator[str]:
    by_name = tuple(one for one in choice.candidates if one.by_name)
    if by_name:
        yield (
            f"Figures of {named(by_name)} were joined by the file’s name: their report or result is older than the "
            "SHA-256 that tells whether they are of the very file that is there. `compress bench` measures again."
        )


def _spread(choice: Choice, view: View) -> str:
    """From the least to the most that the same teacher took in the runs' own races, where that is more than noise."""
    at = view.setting
    races: dict[str, list[float]] = {}
    for bundle in choice.bundles:
        report = bundle.report
        for row in report.of_role("teacher") if report else ():
            for one in (row.latency or {}).values():
                if (one["threads"], one["batch"], one["seq"]) == (at.threads, at.batch, at.seq):
                    races.setdefault(row.name, []).append(one["p50_ms"])
    wide = [times for times in races.values() if max(times) > NOISE_FACTOR * min(times)]
    if not wide:
        return ""
    times = max(wide, key=lambda times: max(times) / min(times))
    return f"{units.three_digits(min(times))} to {units.measure(max(times), 'ms')}"


def _absent(choice: Choice) -> Iterator[str]:
    unscored = tuple(one for one in choice.candidates if not one.scores)
    if unscored:
        yield f"{named(unscored)} {'has' if len(unscored) == 1 else 'have'} no score."
    untimed = tuple(one for one in choice.candidates if choice.view and timing(one, choice.view) is None)
    if untimed and choice.view:
        yield f"Not timed at {choice.view.name}: {named(untimed)}."
    if choice.unmatched:
        shown = ", ".join(choice.unmatched[:MOST_NAMED])
        rest = len(choice.unmatched) - MOST_NAMED
        yield f"Of no bundle given here, and left out: {shown}{f' and {rest} more' if rest > 0 else ''}."
