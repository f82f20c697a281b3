"""Compare the files of several bundles: scores, certificates, sizes, times on each
device, and the best within limits.

A measurement belongs to the file whose SHA-256 it names, whatever the dates and names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Annotated, Literal

from compress.arguments import check_arguments
from compress.data.task import Task
from compress.errors import BundleError, did_you_mean
from compress.evaluation.statistics import differ_significantly
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES, Manifest, find_bundle
from compress.records.bench_result import BenchResult
from compress.records.certificate import Certificate
from compress.records.class_scores import (
    ClassChange,
    ClassScore,
    macro_f1,
    select_fallen,
)
from compress.records.latency import NOISE_FACTOR, Latency, Setting, Sustained
from compress.records.run_report import REPORT, Report, ReportRow, finite
from compress.training.run import advise
from compress.values import Range

OWN = "own races"
"""Name of the device for times taken from reports: files of one run were raced
together, files of different runs were not."""


StoredResult = tuple[Path, BenchResult]
Limit = Annotated[float | None, Range(0, 1e9)]


@dataclass(frozen=True)
class ComparedBundle:
    """One bundle: its folder, a name that is unique here, its task, its manifest and
    its report."""

    path: Path
    name: str
    task: Task
    manifest: Manifest
    report: Report | None


@dataclass(frozen=True)
class Basis:
    """The rows that a score was computed on; scores on different rows are not
    compared."""

    data: str
    split: str
    rows: int

    def __str__(self) -> str:
        return f"{self.data}, {self.split} split, {self.rows:,} rows"


@dataclass(frozen=True)
class View:
    """One setting on one device, where latency is compared."""

    device: str
    setting: Setting

    @property
    def name(self) -> str:
        """Name device and setting."""
        return f"{self.device}, {self.setting}"


@dataclass(frozen=True)
class ComparedModel:
    """One file that can be shipped, or a teacher.

    name          `<bundle> <precision>`, or the teacher's
    sha256        of the file; '' for a teacher
    scores        of the report's metric, by the rows they were computed on; of several
                  devices, the lowest
    certificates  of the file, one for each device
    times         device -> setting -> times
    classes       scores of each class, by rows; fallen: classes of which the file finds
                  nothing, or far less than its teacher or, where it was certified, than
                  its fp32 file
    """

    name: str
    bundle: str
    precision: str
    role: Literal["student", "teacher"]
    size_mb: float | None
    parameters: int | None
    scores: Mapping[Basis, float]
    sha256: str = ""
    certificates: tuple[Certificate, ...] = ()
    times: Mapping[str, Mapping[Setting, Latency]] = field(default_factory=dict)
    classes: Mapping[Basis, tuple[ClassScore, ...]] = field(default_factory=dict)
    fallen: tuple[ClassChange, ...] = ()

    @property
    def certified(self) -> bool | None:
        """Return whether every certificate holds; None if the file has none."""
        return (
            all(one.certified for one in self.certificates)
            if self.certificates
            else None
        )

    @property
    def reason(self) -> str:
        """Return the reason of the first certificate that does not hold, or else of the
        first one."""
        return (
            min(self.certificates, key=lambda one: one.certified).reason
            if self.certificates
            else ""
        )

    def latency(self, view: View | None) -> Latency | None:
        """Look up the times at `view`; None if it was not timed there."""
        return self.times.get(view.device, {}).get(view.setting) if view else None

    def median_ms(self, view: View | None) -> float | None:
        """Look up the median at `view`."""
        latency = self.latency(view)
        return latency.p50_ms if latency else None


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, and what was measured on it.

    sources    (command, date) of each measurement; own: the times come from the
               reports, measured separately for each run
    sustained  (name of the candidate, its times without pause)
    """

    name: str
    machine: Mapping[str, str]
    sources: tuple[tuple[str, str], ...] = ()
    sustained: tuple[tuple[str, Sustained], ...] = ()
    own: bool = False


@check_arguments
@dataclass(frozen=True)
class Limits:
    """The limits of a pick: milliseconds of the median, 10^6 bytes of the file, score.
    None: no limit."""

    budget_ms: Limit = None
    max_mb: Limit = None
    min_score: float | None = None

    @property
    def cheapest(self) -> bool:
        """Return True if the cheapest file with a minimum score is wanted."""
        return (
            self.min_score is not None
            and self.budget_ms is None
            and self.max_mb is None
        )


@dataclass(frozen=True)
class Pick:
    """The file to ship.

    candidate  None if no file is within the limits
    best       the file within the limits that scores best; None if that is the
               candidate
    level      the others within the limits whose scores these rows cannot tell from the
               best one, the best first
    """

    candidate: ComparedModel | None
    best: ComparedModel | None = None
    level: tuple[ComparedModel, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The candidates to choose from, and what to compare them with.

    basis       the rows that most candidates are scored on; scores on other rows are
                shown, but not compared
    candidates  by their score on these rows, the best first; then those without a score
    teachers    of the candidates
    baselines   (name, score) on these rows
    view        where latency is compared; None if nothing was timed
    unmatched   names in result files whose SHA-256 matches no file here
    """

    task: Task
    basis: Basis | None
    candidates: tuple[ComparedModel, ...]
    teachers: tuple[ComparedModel, ...]
    baselines: tuple[tuple[str, float], ...]
    devices: tuple[MeasuredDevice, ...]
    view: View | None
    bundles: tuple[ComparedBundle, ...]
    unmatched: tuple[str, ...]

    def score(self, one: ComparedModel) -> float | None:
        """Look up the score on the rows of `basis`."""
        return one.scores.get(self.basis) if self.basis else None

    def classes(self, one: ComparedModel) -> tuple[ClassScore, ...]:
        """Look up the scores of each class on the rows of `basis`; () if there are
        none."""
        return one.classes.get(self.basis, ()) if self.basis else ()

    def macro_f1(self, one: ComparedModel) -> float | None:
        """Average the F1 of the classes on the rows of `basis`."""
        return macro_f1(self.classes(one))

    def drop(self, one: ComparedModel) -> float | None:
        """Compute how much of the score of the bundle's fp32 file is lost; None for the
        fp32 file."""
        exact = next(
            (
                each
                for each in self.candidates
                if (each.bundle, each.precision) == (one.bundle, "fp32")
            ),
            None,
        )
        if exact is None or exact is one:
            return None
        before = self.score(exact)
        after = self.score(one)
        return before - after if before is not None and after is not None else None

    def settings(self, device: str) -> list[Setting]:
        """List the settings measured on a device, the most frequent first."""
        settings = [
            setting for one in self.candidates for setting in one.times.get(device, {})
        ]
        return sorted(
            dict.fromkeys(settings), key=lambda setting: -settings.count(setting)
        )

    def views(self) -> list[View]:
        """List every setting of every device."""
        return [
            View(device.name, setting)
            for device in self.devices
            for setting in self.settings(device.name)
        ]

    def commonest(self) -> list[View]:
        """List one view of each device: at the setting of `view`, or at the most
        frequent one if that was not measured."""
        setting = self.view.setting if self.view else None
        chosen: dict[str, View] = {}
        for view in self.views():
            if view.device not in chosen or view.setting == setting:
                chosen[view.device] = view
        return list(chosen.values())

    def number(self, one: ComparedModel) -> int:
        """Return a candidate's place in the list, from 1."""
        return self.candidates.index(one) + 1

    def front(
        self, cost: Callable[[ComparedModel], float | None]
    ) -> list[ComparedModel]:
        """List the candidates that no other one beats in score without costing more,
        the cheapest first."""
        known = [
            (price, -score, one)
            for one in self.candidates
            if (price := cost(one)) is not None
            and (score := self.score(one)) is not None
        ]
        front: list[tuple[float, float, ComparedModel]] = []
        for price, loss, one in sorted(known, key=lambda each: each[:2]):
            if not front or loss < front[-1][1] or (price, loss) == front[-1][:2]:
                front.append((price, loss, one))
        return [one for _, _, one in front]


def compare(paths: Sequence[Path], at: str | None = None) -> Comparison:
    """Compare the files of runs and bundles, with the result files of `compress bench`.

    at  a device, a setting or both, in the words of their names and separated by
        commas: `browser, 32 tokens`

    Raises BundleError for paths that cannot be read, bundles of different tasks, and
    for an `at` that was not measured; DeviceError for an invalid result file."""
    bundles, results = _read(paths)
    task = _check_task(bundles)
    devices, models, unmatched = _join(
        results, [one for bundle in bundles for one in _list_files(bundle)]
    )
    reports = [bundle.report for bundle in bundles if bundle.report]
    teachers = _list_teachers(reports)
    if any(OWN in one.times for one in models):
        timed = [report for report in reports if report.settings]
        machine = timed[-1].machine
        processors = {report.machine.get("cpu", "unnamed") for report in timed}
        if len(processors) > 1:
            machine = {"cpu": "several: " + ", ".join(sorted(processors))}
        sources = tuple((each.command, each.date) for each in timed)
        devices.append(MeasuredDevice(OWN, machine, sources, own=True))
    # the rows that most candidates are scored on; in a tie, those that most
    # teachers are scored on too
    scored, taught = (
        [basis for one in group for basis in one.scores] for group in (models, teachers)
    )
    basis = max(
        dict.fromkeys(scored),
        key=lambda each: (scored.count(each), taught.count(each)),
        default=None,
    )
    baselines = {
        row.name: score
        for report in reports
        if basis == Basis(report.data, report.split, report.split_rows)
        for row in report.of_role("baseline")
        if (score := report.score(row)) is not None
    }

    def rank(one: ComparedModel) -> tuple[float, float, str]:
        score = one.scores.get(basis) if basis else None
        return -score if score is not None else 1e9, _or_last(one.size_mb), one.name

    comparison = Comparison(
        task=task,
        basis=basis,
        candidates=tuple(sorted(models, key=rank)),
        teachers=tuple(one for one in teachers if basis in one.scores),
        baselines=tuple(baselines.items()),
        devices=tuple(devices),
        view=None,
        bundles=bundles,
        unmatched=tuple(unmatched),
    )
    return replace(comparison, view=_choose_view(comparison, at))


def pick(comparison: Comparison, limits: Limits) -> Pick:
    """Pick the cheapest of the files within the limits whose scores these rows cannot
    tell from the best; with a minimum score alone, the fastest (or smallest) that
    reaches it, certified and without noise if there is one.

    The cheapest is the smallest of those that are not clearly slower than the fastest;
    a file that is not certified, or has lost classes, never replaces the best. Raises
    BundleError for a minimum score that this metric cannot reach.
    """
    least = limits.min_score
    metric = comparison.task.metric
    view = comparison.view
    if least is not None and not -1 <= least <= 1:
        raise BundleError(
            f"--min-score {least:g}: {metric} is at most 1; expected a share, "
            f"such as {least / 100:g} for {least:g} %"
        )
    scores = {
        id(one): score
        for one in comparison.candidates
        if (score := comparison.score(one)) is not None
        and (least is None or score >= least)
        and _or_last(one.size_mb) <= _or_last(limits.max_mb)
        and _or_last(one.median_ms(view)) <= _or_last(limits.budget_ms)
    }
    within = [one for one in comparison.candidates if id(one) in scores]
    if not within:
        return Pick(None)

    def cost(one: ComparedModel) -> tuple[float, float]:
        return _or_last(one.median_ms(view)), _or_last(one.size_mb)

    def doubt(one: ComparedModel) -> tuple[bool, bool]:
        """Put files whose score or time proves nothing after all others."""
        latency = one.latency(view)
        return not _is_sound(one), latency is not None and latency.noisy

    def order(one: ComparedModel) -> tuple[float, ...]:
        return (
            (*doubt(one), *cost(one), -scores[id(one)])
            if limits.cheapest
            else (-scores[id(one)], *cost(one))
        )

    best = min(within, key=order)
    rows = comparison.basis.rows if comparison.basis else 0
    level = [
        one
        for one in within
        if one is not best
        and (metric in comparison.task.shares or scores[id(one)] == scores[id(best)])
        and differ_significantly(scores[id(one)], scores[id(best)], rows) is False
    ]
    sound = list(filter(_is_sound, level))
    chosen = best if limits.cheapest else _find_cheapest(best, sound, view)
    return Pick(chosen, None if chosen is best else best, tuple(level))


def _is_sound(one: ComparedModel) -> bool:
    return one.certified is not False and not one.fallen


def _find_cheapest(
    best: ComparedModel, others: Sequence[ComparedModel], view: View | None
) -> ComparedModel:
    """Find the smallest of the files that are not clearly slower than the fastest;
    return `best` if its own times are missing or noisy."""
    near = [best, *others]
    timed = {id(one): latency for one in near if (latency := one.latency(view))}
    if timed:
        if id(best) not in timed or timed[id(best)].noisy:
            return best
        quiet = {key: each.p50_ms for key, each in timed.items() if not each.noisy}
        most = NOISE_FACTOR * min(quiet.values())
        near = [one for one in near if _or_last(quiet.get(id(one))) <= most]
    return min(near, key=lambda one: _or_last(one.size_mb))


def _choose_view(comparison: Comparison, at: str | None) -> View | None:
    """Choose the view that `at` names; of several, the one with the most timed
    candidates."""
    views = {
        view: {
            view.device.casefold(),
            *(part.strip().casefold() for part in view.name.split(",")),
        }
        for view in comparison.views()
    }
    words = [word.strip().casefold() for word in (at or "").split(",") if word.strip()]
    matching = [view for view, names in views.items() if names.issuperset(words)]
    if words and not matching:
        names = set().union(*views.values())
        unknown = [word for word in words if word not in names]
        hint = (
            did_you_mean(unknown[0], names)
            if unknown
            else " Each was measured, but not together."
        )
        raise BundleError(
            f"--at {at}: {', '.join(unknown) or 'the combination'}: no latency was "
            f"measured there.{hint}"
        )
    return max(
        matching,
        key=lambda view: sum(bool(one.latency(view)) for one in comparison.candidates),
        default=None,
    )


def _check_task(bundles: Sequence[ComparedBundle]) -> Task:
    """Check that all bundles do the same task, and return it."""
    tasks = {bundle.name: bundle.task for bundle in bundles}
    different = {
        (task.kind, task.labels, task.metric, task.pair, task.unanswerable)
        for task in tasks.values()
    }
    if len(different) > 1:
        kinds = []
        for name, task in tasks.items():
            labels = ", ".join(task.labels[:4]) + (
                f" and {len(task.labels) - 4} more" if len(task.labels) > 4 else ""
            )
            pairs = " of pairs" if task.pair else ""
            kind = f"{task.kind}{pairs}{f' ({labels})' if labels else ''}"
            kinds.append(f"{name}: {kind} by {task.metric}")
        raise BundleError(
            "the bundles do not do the same task, so scores cannot be compared: "
            f"{'; '.join(kinds)}"
        )
    return bundles[0].task


def _read(
    paths: Sequence[Path],
) -> tuple[tuple[ComparedBundle, ...], list[StoredResult]]:
    """Read runs, bundles and result files, each once and in the given order."""
    folders = []
    files = []
    for path in paths:
        if path.is_dir():
            folder = find_bundle(path)
            if folder is None:
                hint = "Expected the folder of a run, or of a bundle."
                if (path / "run.json").is_file():
                    hint = advise(path)
                raise BundleError(f"{path}: no bundle in it. {hint}")
            folders.append(folder.resolve())
        elif path.is_file():
            files.append(path)
        else:
            raise BundleError(
                f"{path}: not there; expected the folder of a run or of a bundle, or a "
                "file of `compress bench --out`"
            )
    if not folders:
        raise BundleError(
            "no run and no bundle was given: a result file of `compress bench` alone "
            "has no scores"
        )
    unique = list(dict.fromkeys(folders))
    bundles = []
    for path, name in zip(unique, _name_bundles(unique), strict=True):
        # every file is checked: a report describes the files that the manifest lists
        bundle = Bundle.load(path)
        report = (
            Report.from_json(path / REPORT) if REPORT in bundle.manifest.files else None
        )
        bundles.append(ComparedBundle(path, name, bundle.task, bundle.manifest, report))
    return tuple(bundles), [
        (file, BenchResult.from_json(file)) for file in dict.fromkeys(files)
    ]


def _name_bundles(paths: Sequence[Path]) -> list[str]:
    """Name each bundle by the shortest unique end of its path, without the final
    `bundle` of a run's path."""
    ends = [
        path.parts[1:-1]
        if path.name == "bundle" and len(path.parts) > 2
        else path.parts[1:]
        for path in paths
    ]

    def name(parts: tuple[str, ...]) -> str:
        for count in range(1, len(parts) + 1):
            if sum(other[-count:] == parts[-count:] for other in ends) == 1:
                return "/".join(parts[-count:])
        return "/".join((*parts, "bundle"))  # the bundle inside what is a bundle itself

    return [name(parts) for parts in ends]


def _list_files(bundle: ComparedBundle) -> Iterator[ComparedModel]:
    """List the files of one bundle, with what its report says about them."""
    report = bundle.report
    certificates = report.certificates if report else ()
    for precision, file in BUNDLE_FILES.items():
        if file not in bundle.manifest.files:
            continue
        stamp = bundle.manifest.files[file]
        own = tuple(one for one in certificates if one.sha256 == stamp.sha256)
        rows = report.of_role("student") if report else ()
        row = next((row for row in rows if row.sha256 == stamp.sha256), None)
        scores = _row_score(report, row)
        for basis, value in _list_proved(report, own, "after"):
            scores[basis] = min(value, scores.get(basis, value))
        before = dict(
            _list_proved(
                report,
                (one for one in certificates if one.exact_sha256 == stamp.sha256),
                "before",
            )
        )
        changes = [change for one in own for change in select_fallen(one.classes)]
        changes += report.fallen(row) if report and row else ()
        changes.sort(key=lambda one: one.after - one.before)
        yield ComparedModel(
            name=f"{bundle.name} {precision}",
            bundle=bundle.name,
            precision=precision,
            role="student",
            size_mb=stamp.bytes / 1e6,
            parameters=bundle.manifest.parameters,
            scores=before | scores,
            sha256=stamp.sha256,
            certificates=own,
            times=_own_times(row),
            classes=dict.fromkeys(_row_score(report, row), row.classes)
            if row and row.classes
            else {},
            # the worst change of each class
            fallen=tuple({one.label: one for one in reversed(changes)}.values())[::-1],
        )


def _list_teachers(reports: Sequence[Report]) -> list[ComparedModel]:
    """List each teacher (by name and rows) once, with the first times that are not
    noisy."""
    teachers: dict[tuple[str, Basis], ComparedModel] = {}
    for report in reports:
        for row in report.of_role("teacher"):
            name = PurePath(row.name).name
            name = name if "teacher" in name else f"{name} (teacher)"
            scores = _row_score(report, row)
            times = _own_times(row)
            figures = row.file_mb, row.parameters, scores
            one = ComparedModel(name, "", "", "teacher", *figures, times=times)
            for basis in scores:
                old = teachers.setdefault((name, basis), one)
                noisy, quiet = (
                    any(each.noisy for each in at.times.get(OWN, {}).values())
                    for at in (old, one)
                )
                if noisy and not quiet:
                    teachers[name, basis] = replace(old, times=times)
    return list(teachers.values())


def _row_score(report: Report | None, row: ReportRow | None) -> dict[Basis, float]:
    """Map the data that a row was scored on to its score; {} if it has none."""
    score = report.score(row) if report and row else None
    return (
        {Basis(report.data, report.split, report.split_rows): score}
        if report and score is not None
        else {}
    )


def _list_proved(
    report: Report | None,
    certificates: Iterable[Certificate],
    which: Literal["before", "after"],
) -> Iterator[tuple[Basis, float]]:
    """Yield the scores in certificates that use the report's metric."""
    for one in certificates:
        value = finite(getattr(one, which))
        if report and one.metric == report.metric and value is not None:
            yield Basis(one.data, one.split, one.rows), value


def _own_times(row: ReportRow | None) -> dict[str, dict[Setting, Latency]]:
    return (
        {OWN: {one.setting: one for one in row.latency.values()}}
        if row and row.latency
        else {}
    )


def _join(
    results: Sequence[StoredResult], candidates: Sequence[ComparedModel]
) -> tuple[list[MeasuredDevice], list[ComparedModel], list[str]]:
    """Assign results to the files whose digest they name; return devices, candidates
    with times, and names that match no file.

    Results with the same name, processor, engine of the browser and CPUs belong to one
    device; of the same file and setting, the latest count.
    """
    # candidate -> device -> setting -> times
    times: dict[str, dict[str, dict[Setting, Latency]]] = {}
    groups: dict[tuple[str, ...], list[StoredResult]] = {}

    def moment(one: StoredResult) -> datetime:
        try:
            found = datetime.fromisoformat(one[1].date)
        except ValueError:  # what is no date is before all others
            return datetime.min.replace(tzinfo=UTC)
        return found if found.tzinfo else found.replace(tzinfo=UTC)

    for path, result in sorted(results, key=moment):
        groups.setdefault(_place(result), []).append((path, result))
    devices = []
    unmatched = list[str]()
    for place, group in groups.items():
        others = zip(*(each for each in groups if each[0] == place[0]), strict=True)
        told = [
            part
            for part, known in zip(place, others, strict=True)
            if len(set(known)) > 1
        ]
        device = ", ".join([place[0], *told])
        runs = list[tuple[str, Sustained]]()
        for path, result in group:
            names = dict.fromkeys(
                [one.name for one in result.latencies]
                + [one.name for one in result.sustained]
            )
            meant = {
                each: [
                    one.name
                    for one in candidates
                    if one.sha256 == result.sha256.get(each)
                ]
                for each in names
            }
            unmatched += [f"{path}: {each}" for each in names if not meant[each]]
            for one in result.latencies:
                for file in meant[one.name]:
                    times.setdefault(file, {}).setdefault(device, {})[one.setting] = one
            runs += [
                (file, run) for run in result.sustained for file in meant[run.name]
            ]
        sources = tuple((result.command, result.date) for _, result in group)
        devices.append(
            MeasuredDevice(device, group[-1][1].machine, sources, tuple(runs))
        )
    joined = [
        replace(one, times={**one.times, **times.get(one.name, {})})
        for one in candidates
    ]
    return devices, joined, list(dict.fromkeys(unmatched))


def _place(result: BenchResult) -> tuple[str, ...]:
    """Name the device of a result, and what else decides its times."""
    engine = str(result.machine.get("runtime", ""))
    web = engine.startswith("onnxruntime-web")
    cpus = {one.affinity for one in result.latencies}
    return (
        result.device,
        str(result.machine.get("cpu", "") or "unnamed processor"),
        engine.rpartition(", ")[2] if web else "native",
        f"CPUs {' and '.join(sorted(cpus))}" if any(cpus) else "any CPU",
    )


def _or_last(value: float | None) -> float:
    return value if value is not None else float("inf")
