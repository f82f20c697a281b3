"""What is compared: bundles as they were given, and result files of `compress bench`; read strictly, or refused."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.bench.protocol import DeviceError
from compress.bench.result import Result
from compress.errors import BundleError
from compress.export import manifest as manifests
from compress.export.bundle import Bundle
from compress.export.manifest import Manifest
from compress.report.evidence import NAME
from compress.report.report import Report

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
