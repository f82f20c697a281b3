"""Write bundles and result files of the sample report: files of zeros stand for models. No number was measured."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compress.data.task import Task
from compress.exporters import manifest as manifests
from compress.exporters.manifest import BUNDLE_FILES, Manifest, Precision, Stamp
from compress.records.certificate import Certificate, Sensitivity, VariantResult
from compress.records.latency import Latency, Setting
from compress.records.run_report import Report
from tests.reporting.sample import ROWS, latency, report

TASK = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")
LATER = "2026-11-22T00:00:00+00:00"
OTHER = "f" * 64
"""The digest of no file here."""


def student(score: float, p50: float, **changes: Any) -> Report:
    """Make a report whose int8 student has this score and median; fp32 scores 0.01 more and takes twice as long."""
    fp32 = replace(ROWS[3], score={"accuracy": score + 0.01}, latency=latency(2 * p50))
    int8 = replace(ROWS[4], score={"accuracy": score}, latency=latency(p50))
    return report(**{"rows": (*ROWS[:3], fp32, int8), **changes})


def bundle(
    folder: Path, report: Report | None, *, task: Task = TASK, sizes: Mapping[str, float] | None = None,
    inner: bool = True,
) -> Path:  # fmt: skip
    """Write a run with this report in its bundle (`inner`), or the bundle alone; `sizes`: precision -> kB."""
    path = folder / "bundle" if inner else folder
    (path / "onnx").mkdir(parents=True)
    for precision, size in ({"fp32": 57.0, "int8": 14.4} if sizes is None else sizes).items():
        name = f"{folder} {precision}".encode()
        (path / BUNDLE_FILES[precision]).write_bytes(name.ljust(int(size * 1e3), b"\0"))  # type: ignore[index]
    if report is not None:
        report = name_files(report, manifests.stamp_files(path))
        (path / "report.json").write_text(report.to_json(), encoding="utf-8")
    files = manifests.stamp_files(path)
    Manifest(
        task=task, max_length=128, model_type="bert", parameters=14_000_000, versions={"torch": "2.13.0"}, files=files
    ).write(path)
    return folder


def name_files(report: Report, files: Mapping[str, Stamp]) -> Report:
    """Let students and certificates name the digests of the files, where they name none."""
    digests = {name: stamp.sha256 for name, stamp in files.items()}
    by_row = {f"student {precision}": digests.get(name) for precision, name in BUNDLE_FILES.items()}
    rows = tuple(replace(row, sha256=row.sha256 or by_row.get(row.name)) for row in report.rows)
    certificates = tuple(
        replace(
            one, sha256=one.sha256 or digests.get(one.artefact, ""),
            exact_sha256=one.exact_sha256 or digests.get(BUNDLE_FILES["fp32"], ""),
        )
        for one in report.certificates
    )  # fmt: skip
    return replace(report, rows=rows, certificates=certificates)


def digest(folder: Path, precision: Precision) -> str:
    return Stamp.of(folder / "bundle" / BUNDLE_FILES[precision]).sha256


def bench(path: Path, times: Mapping[str, float], *, runs: Iterable[Path] = (), **changes: Any) -> Path:
    """Write a result file: `<run>:<precision>` of one of the runs -> median at 1 thread, batch 1, 128 tokens."""
    folders = {run.name: run for run in runs}
    latencies = [
        Latency(name, Setting(1, 1, 128), 20, p50 * 0.9, p50, p50 * 1.2, p50 * 1.3, 40.0, p50 * 3, 90.0, False, "")
        for name, p50 in times.items()
    ]
    digests = {}
    for name in [*times, *(one["name"] for one in changes.get("sustained", ()))]:
        run, _, precision = name.rpartition(":")
        if run in folders:
            digests[name] = digest(folders[run], precision)
    content = {
        "format": 1, "device": "local", "machine": {"cpu": "invented"}, "date": LATER, "command": "compress bench a b",
        "latencies": [asdict(one) for one in latencies], "sustained": [], "sha256": digests, **changes,
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def all_files(runs: list[Path]) -> Mapping[str, float]:
    return {f"{run.name}:{precision}": 3.0 for run in runs for precision in ("int8", "fp32")}


def certificate(after: float, *, certified: bool = True, **changes: Any) -> Certificate:
    whole = Certificate(
        artefact=BUNDLE_FILES["int8"], method="static int8", metric="accuracy", before=0.89, after=after,
        max_drop=0.005,
        agreement=0.98, max_logit_difference=0.02, rows=872, split="validation", data="sst2", device="local",
        runtime="onnxruntime 1.31.1", certified=certified, date=LATER,
        reason="the drop is within 0.005" if certified else "the drop of 0.020 is more than 0.005",
    )  # fmt: skip
    return replace(whole, **changes)


def proved(**changes: Any) -> Report:
    """Make a report with every kind of evidence."""
    at = "1 thread, batch 1, 128 tokens"
    race = (
        VariantResult("raw, fp32", "local", {at: 6.0}, {at: 1.0}, 1e-7, 57.0, True, False),
        VariantResult(
            "merged, int8", "local", {at: 3.0}, {at: 0.5}, 0.02, 14.0, True, True, fused={"Gelu": 4}, agreement=0.98
        ),
        VariantResult("bad, int8", "local", {at: 2.0}, {at: 0.33}, 9.0, 14.0, False, False, "logits differ by 9"),
    )  # fmt: skip
    sensitivity = (
        Sensitivity("/a", "layer 0, output", 1e-3, 0.5, True),
        Sensitivity("/b", "layer 0, intermediate", 1e-4, -0.01, False),
        Sensitivity("/c", "layer 1, output", 1e-5, 0.1, False),
        Sensitivity("/d", "pooler", 1e-5, 0.0, False),
    )
    evidence = {"certificates": (certificate(0.888),), "sensitivity": sensitivity, "tuning": race}
    return student(0.88, 3.0, **{**evidence, **changes})
