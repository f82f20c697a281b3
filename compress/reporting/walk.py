"""Show the path to the smallest student that keeps a share of its teacher's score: in a
sentence, a table and two charts."""

from collections.abc import Callable
from functools import partial

from markupsafe import Markup

from compress.records.path import (
    COST_UNITS,
    KeptScore,
    PathStudent,
    Training,
    WalkedPath,
)
from compress.reporting import format as units
from compress.reporting.charts import (
    LEFT,
    RIGHT,
    SIDE,
    TOP,
    Axis,
    Figure,
    Plot,
    draw_dot,
    draw_figure,
)
from compress.reporting.tables import Cell, Line, ResultTable, column

AIR = 1.15
"""Margin around the points on a logarithmic axis, as a factor."""
WALK_BOTTOM = 290
"""Position of the horizontal axis, in pixels from the top."""


def describe_sizes(rung: PathStudent) -> str:
    """Write the sizes as `3 layers, hidden 256, heads 8, ffn 384`."""
    sizes = {name: count for name, count in rung.sizes.items() if name != "head_size"}
    layers = sizes.pop("layers")
    if not layers:
        return f"a vector of width {rung.sizes['hidden']} for each token"
    return ", ".join(
        [f"{layers} layers", *(f"{name} {count}" for name, count in sizes.items())]
    )


def describe_kept(look: KeptScore) -> str:
    """Write a share with its bounds, as `98.7 % (97.9 to 99.6)`."""
    return f"{100 * look.share:.1f} % ({100 * look.low:.1f} to {100 * look.high:.1f})"


def path_text(path: WalkedPath) -> list[str]:
    """Say what was asked for, what was found, and how certain it is."""
    rung = path.student
    if rung is None:
        return []
    look = rung.looks["finished"]
    sentences = [
        f"Asked for {units.share(path.keep)} of the teacher's score with the least "
        f"{path.least}: {rung.name} of {len(path.students)} shapes on the path, "
        f"{describe_sizes(rung)}, keeps {describe_kept(look)} on {look.examples:,} "
        f"validation examples; the probability that it keeps the requested share is "
        f"{100 * look.chance:.0f} %."
    ]
    if not look.keeps:
        sentences.append(
            "No student on the path is likely enough to keep "
            f"{units.share(path.keep)}: this one comes closest."
        )
    if not look.resolved:
        sentences.append(explain_unresolved(look, path.keep))
    if path.measured is not None and path.whole_measured is not None:
        own = units.measure(path.measured, "ms")
        whole = units.measure(path.whole_measured, "ms")
        sentences.append(
            f"Its file takes {own}, the teacher's of the same precision {whole}: "
            f"{path.whole_measured / path.measured:.1f} times as fast ({path.where})."
        )
    if path.tested is not None:
        kept = describe_kept(path.tested)
        sentences.append(
            f"On the rows of the comparison, the shipped file keeps {kept}."
        )
    sentences.append(f"The path ended: {path.stopped}.")
    return sentences


def explain_unresolved(look: KeptScore, keep: float) -> str:
    """Say that there are too few examples to be certain, and how many would suffice."""
    enough = (
        "no number of them can"
        if look.needed is None
        else f"about {look.needed:,} would"
    )
    return (
        f"{look.examples:,} validation examples cannot show with 90 % confidence that "
        f"a student keeps {units.share(keep)}; {enough}."
    )


_RANKS: dict[Training, int] = {"brief": 3, "long": 2, "finished": 0}
"""Rank of each column: a narrow terminal drops the highest first."""


def path_table(path: WalkedPath) -> ResultTable:
    """List the students, the largest first."""
    of = partial(column, path.students, "")
    unit = COST_UNITS[path.least]

    def kept(training: Training, rung: PathStudent) -> Cell:
        look = rung.looks.get(training)
        return Cell(units.MISSING if look is None else describe_kept(look))

    columns = [
        of("sizes", describe_sizes, rank=1),
        of(unit, lambda rung: f"{rung.cost:.3g}", rank=4),
        of("times", lambda rung: f"{path.whole / rung.cost:.1f}", rank=0),
        of("MB", lambda rung: f"{rung.file_mb:.1f}", rank=5),
    ]
    for training, rank in _RANKS.items():
        columns.append(of(training, partial(kept, training), rank=rank))
    lines = [
        Line(rung.name, "student" if rung.name == path.chosen else "plain")
        for rung in path.students
    ]
    caption = ["share of the teacher's score that is kept, with 80 % intervals"]
    if path.where:
        caption.append(f"times are predicted: {path.where}")
    title = f"Students on the way to {units.share(path.keep)} of the score"
    return ResultTable.build(lines, columns, title, caption)


def path_figures(path: WalkedPath) -> list[Figure]:
    """Draw the kept share against the cost, and against the size of the file."""
    if not any(rung.looks for rung in path.students):
        return []
    # one chart if the file size is what is minimised
    axes: dict[str, Callable[[PathStudent], float]] = {
        COST_UNITS[path.least]: lambda rung: rung.cost,
        "MB": lambda rung: rung.file_mb,
    }
    return [
        draw_figure(
            f"Share of the score against {name}",
            partial(_draw, path, name, cost),
            f"path-{at}",
            SIDE,
            caption="Hollow: after a brief recovery, in blue after a longer one; "
            "filled: finished. Vertical: 80 % intervals; horizontal: requested share.",
        )
        for at, (name, cost) in enumerate(axes.items())
    ]


_STYLES: dict[Training, str] = {
    "brief": "point behind",
    "long": "point fitted",
    "finished": "point student",
}


def _draw(
    path: WalkedPath,
    unit: str,
    cost: Callable[[PathStudent], float],
    key: str,
    width: float,
) -> Markup:
    rungs = [rung for rung in path.students if rung.looks]
    costs = [cost(rung) for rung in rungs]
    looks = [look for rung in rungs for look in rung.looks.values()]
    x = Axis(min(costs) / AIR, max(costs) * AIR, LEFT, width - RIGHT, log=True)
    ends = [100 * end for look in looks for end in (look.low, look.high)]
    asked = 100 * path.keep
    y = Axis.padded(min(*ends, asked), max(*ends, asked), WALK_BOTTOM, TOP)
    plot = Plot(x, y, (unit, "% of the teacher's score"))
    plot.level(y.at(asked), "reference")
    for rung in rungs:
        for training, look in rung.looks.items():
            at = cost(rung)
            low = plot.at(at, 100 * look.low)
            high = plot.at(at, 100 * look.high)
            plot.line(low, high, "gain")
            hint = f"{rung.name}, {training}: {describe_kept(look)}"
            place = plot.at(at, 100 * look.share)
            plot.marks.append(draw_dot(place, _STYLES[training], hint))
    description = f"{len(rungs)} shapes; the line marks {units.share(path.keep)}"
    return plot.picture(key, "What students on the path keep", description)
