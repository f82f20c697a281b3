"""Make the fields of the model card of a measured student."""

from collections.abc import Mapping
from typing import Any

from compress.config.recipe import Recipe
from compress.data.sources import EMBEDDED_DATA, hub_id
from compress.exporters.card import proof_line
from compress.records.run_report import Report, ReportRow
from compress.reporting.remarks import run_warnings

MACHINE_FACTS = ("cpu", "cores", "instructions", "memory", "system")
NOISY = (
    "The times are approximate: something else used the machine while they were taken "
    "(report.json says what). Times marked noisy differed between two passes."
)


def card_fields(
    report: Report, recipe: Recipe, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the fields of the model card (see `exporters.card.Card`). origin: the fields
    taken from the teacher's card."""
    paper = recipe.paper
    known = hub_id(report.data)
    libraries = ", ".join(f"{name} {each}" for name, each in report.versions.items())
    machine = [report.machine[key] for key in MACHINE_FACTS if key in report.machine]
    return {
        "name": f"{recipe.name} student of {report.teacher} on {report.data}",
        "recipe": recipe.name,
        "citation": f"{paper.authors} {paper.year}, {paper.title}, {paper.url}",
        "command": report.command,
        "teacher": report.teacher,
        **origin,
        **({"language": "en"} if report.data in EMBEDDED_DATA else {}),
        "data": report.data,
        "dataset": known[0] if known else "",
        "config": known[1] if known else "",
        "split": report.split,
        "results": _list_results(report),
        "rows": _list_rows(report),
        "classes": _list_classes(report),
        "vectors": [
            {
                "form": form.name,
                "bytes of a vector": f"{form.bytes:,}",
                report.metric: f"{form.score:.4f}",
            }
            for form in report.vectors
        ],
        "proofs": [proof_line(proof) for proof in report.certificates],
        "measured": [
            *([", ".join(machine)] if machine else []),
            *([NOISY] if report.noise else []),
            f"{report.date}; {libraries}",
        ],
        "limits": [
            *run_warnings(report),
            f"Scored on the {report.split} split of {report.data} "
            f"({report.split_rows:,} {report.unit}) only.",
            "Latency is of the machine it was measured on; int8 results can differ "
            "between processors.",
        ],
    }


def _list_results(report: Report) -> list[dict[str, Any]]:
    """List the scores of the student's files, as the hub reads them."""
    return [
        {
            "metric": report.metric,
            "value": value,
            "low": row.interval and row.interval[0],
            "high": row.interval and row.interval[1],
            "rows": report.split_rows,
            "file": row.name.removeprefix("student "),
        }
        for row in report.of_role("student")
        if (value := report.score(row)) is not None
    ]


def _list_rows(report: Report) -> list[dict[str, str]]:
    """List the cells of the table of models; a cell is '' where nothing was
    measured."""
    setting = next(iter(report.settings), None)
    with_f1 = any(map(report.macro_f1, report.rows))
    rows = []
    for row in report.rows:
        score = report.score(row)
        cells = {
            "model": row.name,
            report.metric: "" if score is None else f"{score:.4f}",
            "95 % interval": _describe_interval(row),
        }
        if with_f1:
            f1 = report.macro_f1(row)
            cells["macro F1"] = "" if f1 is None else f"{f1:.4f}"
        cells["parameters"] = f"{row.parameters:,}" if row.parameters else ""
        cells["file"] = f"{row.file_mb:.1f} MB" if row.file_mb else ""
        latency = report.latency(row)
        time = f"{latency.p50_ms:.2f} ms" if latency else ""
        noisy = latency is not None and latency.noisy
        cells[f"p50 ({setting})"] = f"~{time} (noisy)" if noisy else time
        rows.append(cells)
    return rows


def _describe_interval(row: ReportRow) -> str:
    if row.interval is None:
        return ""
    low, high = row.interval
    return f"{low:.3f} to {high:.3f}"


def _list_classes(report: Report) -> list[dict[str, str]]:
    """List precision, recall and F1 of each class, a column for every model."""
    rows = [row for row in report.rows if row.classes]
    support = {each.label: each.support for row in rows for each in row.classes}
    cells = {
        (
            row.name,
            each.label,
        ): f"{each.precision:.3f} / {each.recall:.3f} / {each.f1:.3f}"
        for row in rows
        for each in row.classes
    }
    return [
        {
            "class": label,
            "support": f"{count:,}",
            **{row.name: cells.get((row.name, label), "") for row in rows},
        }
        for label, count in support.items()
    ]
