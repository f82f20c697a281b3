"""The candidates: every file of every bundle, with its score, its proof, its size and its times on every device.

What was measured belongs to the file whose SHA-256 it names. Older reports and results name none: theirs is taken to
belong to the file of that name, and the candidate says so.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Literal

from compress.errors import BundleError
from compress.exporters import manifest as manifests
from compress.exporters.artifact import FILES, Bundle
from compress.exporters.manifest import Manifest
from compress.records import run_report as reports
from compress.records.bench_result import Result
from compress.records.certificate import Certificate
from compress.records.class_scores import ClassChange, ClassScore, fallen
from compress.records.latency import DeviceError, Latency, Setting, Sustained
from compress.records.run_report import NAME, Report, Row, finite
from compress.reporting.remarks import fallen_classes

MOST_PROBLEMS = 5
"""Problems of one file that an error lists."""


@dataclass(frozen=True)
class Shipped:
    """One bundle: where it is, a name that no other one here has, what its manifest and its report say."""

    path: Path
    name: str
    manifest: Manifest
    report: Report | None


@dataclass(frozen=True)
class Inputs:
    """All that was given, each once, in the order given; result files by their path."""

    bundles: tuple[Shipped, ...]
    benches: tuple[tuple[Path, Result], ...]


def read(paths: Sequence[Path]) -> Inputs:
    """Runs, bundles and result files, told apart by what they hold. Raises BundleError for what is none of
    them, DeviceError for a result file that cannot be understood."""
    folders, files = [], []
    for path in paths:
        if path.is_dir():
            folders.append(_bundle_folder(path).resolve())
        elif path.is_file():
            files.append(path)
        else:
            raise BundleError(
                f"{path}: not there; expected the folder of a run or of a bundle, or a file of `compress bench --out`"
            )
    if not folders:
        raise BundleError("no run and no bundle was given: a result file of `compress bench` alone has no scores")
    known = list(dict.fromkeys(folders))
    bundles = tuple(_shipped(path, name) for path, name in zip(known, _names(known), strict=True))
    return Inputs(bundles, tuple((file, _measured(file)) for file in dict.fromkeys(files)))


def called(name: str, bundles: Iterable[Shipped], beside: Path) -> Shipped | None:
    """The bundle that a name in the result file `beside` means, without its precision.

    By its path, from here or from the file's folder; else by the longest part of the path that one bundle alone ends
    on, so that results are found again after both were moved.
    """
    given, listed = Path(name), list(bundles)
    for start in (Path(), beside.parent):
        whole = (start / given).resolve()
        for bundle in listed:
            if bundle.path in (whole, whole / "bundle"):
                return bundle
    wanted = _telling(given)
    for count in range(len(wanted), 0, -1):
        found = [bundle for bundle in listed if _telling(bundle.path)[-count:] == wanted[-count:]]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _bundle_folder(path: Path) -> Path:
    """The bundle of a run, or the bundle itself."""
    for folder in (path, path / "bundle"):
        if (folder / manifests.NAME).is_file():
            return folder
    hint = "the run has not finished: `compress distill --resume`" if (path / "run.json").is_file() else ""
    raise BundleError(f"{path}: no bundle in it. {hint or 'Expected the folder of a run, or of a bundle.'}")


def _shipped(path: Path, name: str) -> Shipped:
    """Load a bundle, every file checked: what a report says is of the files that its manifest lists."""
    manifest = Bundle.load(path).manifest
    return Shipped(path, name, manifest, Report.from_json(path / NAME) if NAME in manifest.files else None)


def _telling(path: Path) -> tuple[str, ...]:
    """The parts of a path that tell bundles apart: a run's own folder for it does not."""
    parts = tuple(part for part in path.parts if part not in ("/", "\\", "..", path.anchor))
    return parts[:-1] if parts[-1:] == ("bundle",) and len(parts) > 1 else parts


def _names(paths: Sequence[Path]) -> list[str]:
    """Of each path the shortest end that no other one has."""
    told = [_telling(path) for path in paths]

    def name(parts: tuple[str, ...]) -> str:
        for count in range(1, len(parts) + 1):
            if sum(other[-count:] == parts[-count:] for other in told) == 1:
                return "/".join(parts[-count:])
        return "/".join((*parts, "bundle"))  # the bundle inside what is a bundle itself

    return [name(parts) for parts in told]


def _measured(path: Path) -> Result:
    try:
        found = Result.from_json(path)
    except DeviceError as error:
        if str(error).startswith(str(path)):
            raise
        raise DeviceError(f"{path}: {error}") from error  # a setting that is none
    problems = list(_impossible(found))
    if problems:
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise DeviceError(f"{path}: {'; '.join(problems[:MOST_PROBLEMS])}{more}; measure again")
    return found


def _impossible(measured: Result) -> Iterable[str]:
    """Figures that no clock shows, by where they are."""
    for index, one in enumerate(measured.latencies):
        for key in ("min_ms", "p50_ms", "p95_ms"):
            if not _time(getattr(one, key)):
                yield f"latencies.{index}.{key}: {getattr(one, key)} is no time"
    for index, run in enumerate(measured.sustained):
        if not all(map(_time, run.minutes)) or len(run.temperatures) != len(run.minutes):
            yield f"sustained.{index}: expected one time above 0 and one temperature for every minute"


def _time(value: float) -> bool:
    return math.isfinite(value) and value > 0


Key = tuple[str, str]
"""A candidate's bundle and precision."""
OWN = "own races"
"""The place of the times that reports hold: files of one run were raced against each other, those of two were not."""


@dataclass(frozen=True)
class Basis:
    """The rows that a score is of; scores of two are not compared."""

    data: str
    split: str
    rows: int

    def __str__(self) -> str:
        return f"{self.data}, {self.split} split, {self.rows:,} rows"


@dataclass(frozen=True)
class Timing:
    """Times of one forward in milliseconds; None: not told there. See `bench.protocol.Latency`."""

    min_ms: float
    p50_ms: float
    p95_ms: float
    noisy: bool
    p99_ms: float | None = None
    init_ms: float | None = None
    first_ms: float | None = None
    peak_rss_mb: float | None = None
    other_load: float | None = None
    busy: str = ""

    @staticmethod
    def of(one: Latency) -> "Timing":
        return Timing(**{each.name: getattr(one, each.name) for each in fields(Timing)})


@dataclass(frozen=True)
class Candidate:
    """One file that can be shipped, or (`teacher`) what it was made from.

    name          `<bundle> <precision>`, or the teacher's
    sha256        of the file; of a teacher ''
    scores        of the report's metric, by the rows they are of; on several devices, the lowest
    certificates  what was proved of the file, on each device
    times         place -> setting -> times
    classes       scores of each class, by the rows they are of; fallen: those of which the file finds nothing, or far
                  less, beside its teacher or, where it was certified, beside its fp32 file
    by_name       whether some of this was joined by the file's name, because its source names no SHA-256
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
    times: Mapping[str, Mapping[Setting, Timing]] = field(default_factory=dict)
    by_name: bool = False
    classes: Mapping[Basis, tuple[ClassScore, ...]] = field(default_factory=dict)
    fallen: tuple[ClassChange, ...] = ()

    @property
    def certified(self) -> bool | None:
        """Say whether every certificate holds; None without one."""
        return all(one.certified for one in self.certificates) if self.certificates else None

    @property
    def reason(self) -> str:
        """Of the verdict: the first certificate that is none, else the first."""
        telling = sorted(self.certificates, key=lambda one: one.certified)
        return telling[0].reason if telling else ""


@dataclass(frozen=True)
class Place:
    """A device, and what was measured on it.

    sources    (command, date) of every measurement; own: times are of the reports, each run by itself
    sustained  (candidate's name, its minutes)
    """

    name: str
    machine: Mapping[str, str]
    sources: tuple[tuple[str, str], ...] = ()
    sustained: tuple[tuple[str, Sustained], ...] = ()
    own: bool = False


def of_bundle(bundle: Shipped) -> list[Candidate]:
    """List the files of one bundle, with what its report says of them."""
    report = bundle.report
    certificates = report.certificates if report else ()
    found = []
    for precision, file in FILES.items():
        if file not in bundle.manifest.files:
            continue
        digest = bundle.manifest.files[file].sha256
        own = tuple(one for one in certificates if one.artefact == file and one.sha256 in (digest, ""))
        row = _row(report, precision, digest, own) if report else None
        scores = dict(_row_score(report, row))
        for basis, value in _proved(report, own, "after"):
            scores[basis] = min(value, scores.get(basis, value))
        # older certificates do not name the fp32 file that they compare with; one of its own outweighs them
        compared = [
            one for one in certificates if one.exact_sha256 == digest or (precision == "fp32" and not one.exact_sha256)
        ]
        scores = dict(_proved(report, compared, "before")) | scores
        found.append(
            Candidate(
                name=f"{bundle.name} {precision}",
                bundle=bundle.name,
                precision=precision,
                role="student",
                size_mb=bundle.manifest.files[file].bytes / 1e6,
                parameters=bundle.manifest.parameters,
                scores=scores,
                sha256=digest,
                certificates=own,
                times=_own_times(report, row),
                classes=_classes(report, row),
                fallen=_fallen(report, row, own),
                by_name=(row is not None and row.sha256 is None) or any(not one.sha256 for one in own),
            )
        )
    return found


def teachers(bundles: Sequence[Shipped]) -> list[Candidate]:
    """Every teacher once: two are one when name and scores agree; of its times the first quiet ones."""
    found: dict[tuple[str, Basis], Candidate] = {}
    for report in (bundle.report for bundle in bundles if bundle.report):
        for row in report.of_role("teacher"):
            scores = dict(_row_score(report, row))
            name, times = PurePath(row.name).name, _own_times(report, row)
            name = name if "teacher" in name else f"{name} (teacher)"
            for basis in scores:
                one = Candidate(
                    name=name,
                    bundle="",
                    precision="",
                    role="teacher",
                    size_mb=row.file_mb,
                    parameters=row.parameters,
                    scores=scores,
                    times=times,
                )
                old = found.setdefault((name, basis), one)
                quieter = _noisy(old) and not _noisy(one)
                if quieter:
                    found[name, basis] = replace(old, times=times)
    return list(found.values())


def places(inputs: Inputs, candidates: Sequence[Candidate]) -> tuple[list[Place], list[Candidate], list[str]]:
    """Group the results by device: places, candidates with their times there, and names that are of no file here.

    Results of the same device and processor are of one place; of the same file and setting, the later ones count.
    """
    known = {(one.bundle, one.precision): one for one in candidates}
    groups: dict[tuple[str, str], list[tuple[Path, Result]]] = {}
    for path, measured in sorted(inputs.benches, key=lambda one: moment(one[1].date)):
        groups.setdefault((measured.device, measured.machine.get("cpu", "")), []).append((path, measured))
    found: list[Place] = []
    unmatched: list[str] = []
    for (device, cpu), group in groups.items():
        alone = [name for name, _ in groups].count(device) == 1
        place = Place(device if alone else f"{device}, {cpu or 'unnamed processor'}", group[-1][1].machine)
        for path, measured in group:
            names = dict.fromkeys([one.name for one in measured.latencies] + [one.name for one in measured.sustained])
            meant = {name: _meant(name, measured.sha256.get(name), known, inputs.bundles, path) for name in names}
            unmatched += [f"{path}: {name}" for name in names if not meant[name]]
            for one in measured.latencies:
                for file in meant[one.name]:
                    timed = _timed(known[file], place.name, one)
                    known[file] = replace(timed, by_name=timed.by_name or one.name not in measured.sha256)
            runs = [(known[file].name, one) for one in measured.sustained for file in meant[one.name]]
            place = replace(
                place,
                sources=(*place.sources, (measured.command, measured.date)),
                sustained=(*place.sustained, *runs),
            )
        found.append(place)
    return found, list(known.values()), list(dict.fromkeys(unmatched))


def moment(date: str) -> datetime:
    """Read an ISO 8601 date; what is none is before all others."""
    try:
        found = datetime.fromisoformat(date)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _meant(
    name: str, digest: str | None, known: Mapping[Key, Candidate], bundles: Sequence[Shipped], file: Path
) -> list[Key]:
    """Find the candidates that a name in a result file means: those with its digest; without one, by the name."""
    if digest is not None:
        return [key for key, one in known.items() if one.sha256 == digest]
    folder, _, precision = name.rpartition(":")
    for which, inside in FILES.items():  # a lone file that is a bundle's
        if name.endswith(f"/{inside}"):
            folder, precision = name.removesuffix(f"/{inside}"), which
    bundle = called(folder, bundles, file)
    key = (bundle.name if bundle else "", precision)
    return [key] if key in known else []


def _row(report: Report, precision: str, digest: str, proofs: Sequence[Certificate]) -> Row | None:
    """Find the row of the file with this digest; without any, by its name, unless the file was certified later."""
    rows = report.of_role("student")
    if any(row.sha256 for row in rows):
        return next((row for row in rows if row.sha256 == digest), None)
    if any(one.sha256 for one in proofs):
        return None
    return next((row for row in rows if row.name.rpartition(" ")[2] == precision), None)


def _row_score(report: Report | None, row: Row | None) -> Iterator[tuple[Basis, float]]:
    score = report.score(row) if report and row else None
    if report and score is not None:
        yield Basis(report.data, report.split, report.split_rows), score


def _proved(
    report: Report | None, certificates: Sequence[Certificate], which: Literal["before", "after"]
) -> Iterator[tuple[Basis, float]]:
    """The scores that certificates tell, of the report's own metric."""
    for one in certificates:
        value = finite(one.before if which == "before" else one.after)
        if report and one.metric == report.metric and value is not None:
            yield Basis(one.data, one.split, one.rows), value


def _classes(report: Report | None, row: Row | None) -> dict[Basis, tuple[ClassScore, ...]]:
    return {Basis(report.data, report.split, report.split_rows): row.classes} if report and row and row.classes else {}


def _fallen(report: Report | None, row: Row | None, proofs: Sequence[Certificate]) -> tuple[ClassChange, ...]:
    """Choose the worst change of each class that fell."""
    found = list(fallen_classes(report, row)) if report and row else []
    found += [change for proof in proofs for change in fallen(proof.classes)]
    worst = sorted(found, key=lambda one: one.after - one.before)
    return tuple({one.label: one for one in reversed(worst)}.values())[::-1]


def _own_times(report: Report | None, row: Row | None) -> dict[str, dict[Setting, Timing]]:
    if report is None or row is None or not row.latency:
        return {}
    return {OWN: {_setting(one): _timing(one, row.peak_rss_mb) for one in row.latency.values()}}


def _setting(one: reports.Latency) -> Setting:
    return Setting(one["threads"], one["batch"], one["seq"])


def _timing(one: reports.Latency, memory: float | None) -> Timing:
    return Timing(
        one["min_ms"], one["p50_ms"], one["p95_ms"], one["noisy"], peak_rss_mb=memory,
        other_load=one.get("other_load"), busy=one.get("busy", ""),
    )  # fmt: skip


def _timed(candidate: Candidate, place: str, one: Latency) -> Candidate:
    there = {**candidate.times.get(place, {}), one.setting: Timing.of(one)}
    return replace(candidate, times={**candidate.times, place: there})


def _noisy(candidate: Candidate) -> bool:
    return any(one.noisy for there in candidate.times.values() for one in there.values())
