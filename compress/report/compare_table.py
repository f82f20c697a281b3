"""The candidates as a terminal table that fits, and as plain values for JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from compress.report import units, verdict
from compress.report.candidates import Candidate
from compress.report.compare import Choice, Limits, Pick, View, median, timing
from compress.report.table import Column, fitted

CERTIFIED = {True: "yes", False: "no", None: units.MISSING}


def table(choice: Choice, chosen: Pick, width: int) -> Table:
    """Candidates by score, not wider than `width` columns; the pick in bold."""
    rows = (*choice.teachers, *choice.candidates)
    styles = {id(one): "dim" for one in choice.teachers} | {id(chosen.candidate): "bold"}
    caption = [verdict.where(choice)]
    if choice.view:
        caption.append(f"latency of one forward: {choice.view.name}")
        caption.append("on front: no other is as good at less time")
    if any((found := timing(one, choice.view)) and found.noisy for one in rows):
        caption.append("~ noisy")
    return fitted(
        _columns(choice, rows),
        [(one.name, styles.get(id(one), "")) for one in rows],
        width=width,
        title="Which model to ship",
        caption=caption,
    )


def plain(choice: Choice, limits: Limits, chosen: Pick) -> dict[str, Any]:
    """What the table and the page say, in values that JSON can hold."""
    front = choice.front(lambda one: median(one, choice.view))
    return {
        "metric": choice.task.metric,
        "rows": None if choice.basis is None else vars(choice.basis),
        "view": None if choice.view is None else {"device": choice.view.place, **vars(choice.view.setting)},
        "limits": vars(limits),
        "pick": chosen.candidate.name if chosen.candidate else None,
        "headline": verdict.headline(choice, limits, chosen),
        "remarks": verdict.remarks(choice, chosen),
        "candidates": [
            {
                "name": one.name,
                "path": next(str(bundle.path) for bundle in choice.bundles if bundle.name == one.bundle),
                "precision": one.precision,
                "sha256": one.sha256,
                "by_name": one.by_name,
                "score": choice.score(one),
                "drop": choice.drop(one),
                "macro_f1": choice.macro_f1(one),
                "classes": [asdict(each) for each in choice.classes(one)],
                "fallen": [asdict(each) for each in one.fallen],
                "certified": one.certified,
                "reason": one.reason,
                "size_mb": one.size_mb,
                "parameters": one.parameters,
                "front": one in front,
                "latency": [
                    {"device": place, **vars(setting), **vars(found)}
                    for place, there in one.times.items()
                    for setting, found in there.items()
                ],
            }
            for one in choice.candidates
        ],
    }


def _columns(choice: Choice, rows: tuple[Candidate, ...]) -> list[Column]:
    def column(rank: int, heading: str, cell: Callable[[Candidate], str]) -> Column:
        return Column(heading, tuple(cell(one) for one in rows), rank)

    front = choice.front(lambda one: median(one, choice.view))
    times = [column(1 + 3 * (view != choice.view), _heading(view), _taken(view)) for view in choice.commonest()]
    return [
        column(0, choice.task.metric, lambda one: units.score(choice.score(one))),
        column(5, "vs fp32", lambda one: units.change(choice.drop(one))),
        column(3, "certified", lambda one: CERTIFIED[one.certified]),
        column(2, "MB", lambda one: units.three_digits(one.size_mb)),
        column(6, "params", lambda one: units.magnitude(one.parameters)),
        *times,
        column(1, "on\nfront", lambda one: "●" if one in front else units.MISSING),
    ]


def _heading(view: View) -> str:
    at = view.setting
    words = view.place if len(view.place) <= 14 else view.place.split(",")[0][:14]
    batch = f" x{at.batch}" if at.batch > 1 else ""
    threads = f" {at.threads}t" if at.threads > 1 else ""
    return f"p50 ms\n{words}\n{at.seq} tok{batch}{threads}"


def _taken(view: View) -> Callable[[Candidate], str]:
    def cell(one: Candidate) -> str:
        found = timing(one, view)
        return units.MISSING if found is None else f"{'~' if found.noisy else ''}{units.three_digits(found.p50_ms)}"

    return cell
