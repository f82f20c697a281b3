"""The evidence in a bundle: certificates, sensitivities and races, kept in its report.json."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import isfinite

from compress.errors import BundleError
from compress.exporters.artifact import Bundle
from compress.records.certificate import Certificate, Sensitivity, Tried
from compress.records.run_report import NAME, Report


def keep(
    bundle: Bundle,
    *,
    certificates: Sequence[Certificate] = (),
    sensitivity: Sequence[Sensitivity] = (),
    tuning: Sequence[Tried] = (),
) -> Bundle:
    """The bundle with this evidence in its report.

    A certificate takes the place of an older one of the same file on the same device and runtime; a race takes the
    place of an older one on the same device; sensitivities, of all older ones. What is not given stays. A bundle
    without a report, as one exported from a checkpoint, gets one that holds nothing else. Raises BundleError for a
    figure that is not finite: JSON has no words for it.
    """
    given: tuple[Certificate | Sensitivity | Tried, ...] = (*certificates, *sensitivity, *tuning)
    for each in given:
        for name, value in asdict(each).items():
            if isinstance(value, float) and not isfinite(value):
                raise BundleError(f"{bundle.path}: {type(each).__name__.lower()}: {name} is {value}; nothing was kept")
    report = report_of(bundle)
    proved = {(each.artefact, each.device, each.runtime): each for each in (*report.certificates, *certificates)}
    raced = {each.device for each in tuning}
    report = replace(
        report,
        certificates=tuple(proved.values()),
        sensitivity=tuple(sensitivity) or report.sensitivity,
        tuning=(*(each for each in report.tuning if each.device not in raced), *tuning),
    )
    return bundle.attach(NAME, report.to_json())


def report_of(bundle: Bundle) -> Report:
    """The report in the bundle, or an empty one that says what the bundle is."""
    if (bundle.path / NAME).is_file():
        return Report.from_json(bundle.path / NAME)
    task = bundle.task
    return Report(
        title=bundle.path.name,
        recipe="",
        teacher="",
        data="",
        kind=task.kind,
        metric=task.metric,
        labels=len(task.labels),
        split="",
        split_rows=0,
        rows=(),
        command="",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(bundle.manifest.versions),
    )
