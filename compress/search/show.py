"""One student of a search, as a bundle."""

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from compress import heads
from compress.errors import SearchError
from compress.export.bundle import Bundle, check_place
from compress.files import load_json
from compress.run import Run
from compress.search import record
from compress.search.asked import NAME, Search
from compress.search.desk import Desk, kept
from compress.search.finalists import begun, finish, shipped
from compress.search.found import Found, Point
from compress.search.pace import Ledger
from compress.search.pipeline import judge, parts, prepared


def show(
    study: Path,
    number: int,
    out: Path,
    *,
    train: bool = False,
    allow_code: str | Path | None = None,
    console: Console | None = None,
) -> Bundle:
    """The student of a trial as a bundle in `out`, measured beside its teacher.

    One that the search has shipped is copied. Any other is what the search made of it, a part of the supernet or the
    student of a short training, which its card says; with `train` it is distilled fully first, by the search's final
    stages. allow_code: the folder of your own functions that its space names. Raises SearchError where there is no such
    trial or its shape could not be judged.
    """
    console = console or Console(quiet=True)
    asked, found = Search.read(study), record.read(study)
    point = found.point(number)
    if not point.choice or point.state == "failed":
        raise SearchError(
            f"{study}: trial {number} failed ({point.reason}); choose another: compress search show {study}"
        )
    check_place(out)
    known = kept(study, number)
    if known.bundle is None or (train and "final" not in known.scores):
        facts = load_json(study / "run.json", f"Put back a whole copy of it; the trials are still told of: {study}")
        run = Run.open(study, asked, facts, resume=True, name=NAME)
        try:
            asked = asked.with_code(allow_code)
            ledger = Ledger(study / "students" / str(number), parts(asked.space), None)  # not the search's own time
            ledger.folder.mkdir(parents=True, exist_ok=True)
            desk = prepared(asked, run, ledger, None, strict=False, allow_pickle=False, console=console)
            desk = desk.judged_by(judge(desk))
            bundle = finish(desk, point) if train else _as_it_is(desk, point)
            record.keep(_with(found, number, study), study)
        finally:
            run.close()
    else:
        bundle = Bundle.load(Path(known.bundle))
    return bundle.copied(out)


def _as_it_is(desk: Desk, point: Point) -> Bundle:
    """Of the training that it had in the search."""
    space, short = desk.search.space, "short" in desk.kept(point.number).scores
    student = heads.load(begun(desk, point), "task", desk.material.kind)
    stages = [stage for stage in (space.supernet, space.short) if stage is not None]
    had = f"a short distillation, stage `{space.short.name}`"
    if space.mode == "supernet" and not short:
        stages, had = stages[:1], f"the supernet's training, stage `{stages[0].name}`, of which it is a part"
    note = f"Its only training was {had}; the search's final distillation was left out."
    return shipped(desk, point, student, stages, began=time.time(), note=note)


def _with(found: Found, number: int, study: Path) -> Found:
    """The record with what is now known of this trial."""
    points = tuple(record.further(study, each) if each.number == number else each for each in found.points)
    now = replace(found, points=points, front=())
    return replace(now, front=now.compute_front())
