"""What was proved of files, as tables and pictures: certificates, the race of the variants, what each layer costs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from compress.records.certificate import Certificate, Sensitivity, Tried
from compress.reporting import format as units
from compress.reporting.cells import Cell, Column, Line, Sheet, verdict_cell
from compress.reporting.charts import MAIN, Bar, Figure, bars, draw_figure

LEVELS = 8
"""Steps of the heat."""


@dataclass(frozen=True)
class Heat:
    """One field of the heat: what it says, how strong it is (0 to LEVELS), and whether it stays in float."""

    text: str
    strength: int
    kept: bool
    hint: str


@dataclass(frozen=True)
class HeatMap:
    """Layers down, their products across; a field is None where a layer has no such product.

    alone  products of no layer, by name
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Heat | None, ...]], ...]
    alone: tuple[tuple[str, Heat], ...]


@dataclass(frozen=True)
class Race:
    """The variants raced on one device: what they were made of, bars of their times, and all that was measured."""

    heading: str
    figure: Figure | None
    sheet: Sheet


def proofs(certificates: Sequence[tuple[str, Certificate]]) -> Sheet:
    """(name of the file, its certificate) as a table."""
    found = [one for _, one in certificates]

    def column(group: str, heading: str, cells: list[Cell]) -> Column:
        return Column(group, heading, tuple(cells))

    columns = [
        column("Verdict", "certified", [verdict_cell(one.certified, one.reason) for one in found]),
        column("Score", "fp32", [Cell(units.score(one.before), units.metric(one.metric)) for one in found]),
        column(
            "Score",
            "this file",
            [
                Cell(units.score(one.after), f"{units.change(one.drop)}; {units.change(one.max_drop)} allowed")
                for one in found
            ],
        ),
        column("Answers", "agreement", [Cell(units.share(one.agreement)) for one in found]),
        column("Answers", "logits differ by", [Cell(units.small(one.max_logit_difference)) for one in found]),
        column("Measured", "on", [Cell(f"{one.rows:,} rows", f"{one.data}, {one.split}") for one in found]),
        column("Measured", "device", [_device(one) for one in found]),
        column("Measured", "made by", [_made(one) for one in found]),
    ]
    return Sheet.of((Line(name, "plain") for name, _ in certificates), columns)


def races(tried: Sequence[Tried], key: str, of: str = "") -> list[Race]:
    """One per device; `key` is unique on the page, `of` the bundle where there are several."""
    found = []
    for index, device in enumerate(dict.fromkeys(one.device for one in tried)):
        group = [one for one in tried if one.device == device]
        setting, items = race_bars(group)
        figure = None
        if items:
            draw = partial(bars, items, "Time beside the first variant’s", "×")
            figure = draw_figure(f"Time beside the first variant’s: {setting}", draw, f"{key}-{index}", MAIN)
        found.append(Race(", ".join(part for part in (of, device) if part), figure, race(group)))
    return found


def race(tried: Sequence[Tried]) -> Sheet:
    """The variants of one race, in their order; measures that none has are left out."""
    settings = tuple(dict.fromkeys(setting for one in tried for setting in one.p50_ms))
    columns = [
        Column("Verdict", "result", tuple(map(_result, tried))),
        *(
            Column("p50, ms", name, tuple(Cell(_time(one, setting), _ratio(one, setting)) for one in tried))
            for setting, name in zip(settings, units.telling(settings), strict=True)
        ),
        Column("Graph", "fused", tuple(_counted(one.fused) for one in tried)),
        Column("Graph", "file, MB", tuple(Cell(units.three_digits(one.file_mb)) for one in tried)),
        Column("Parity", "logits differ by", tuple(Cell(units.small(one.difference)) for one in tried)),
        Column("Parity", "agreement", tuple(Cell(units.share(one.agreement)) for one in tried)),
    ]
    return Sheet.of((Line(one.variant, "student" if one.chosen else "baseline") for one in tried), columns)


def race_bars(tried: Sequence[Tried]) -> tuple[str, list[Bar]]:
    """The setting that most variants ran at, and a bar each of its time over the first one's."""
    settings = [setting for one in tried for setting in one.ratio]
    setting = max(dict.fromkeys(settings), key=settings.count, default="")
    return setting, [
        Bar(one.variant, ratio, "student" if one.chosen else "other", f"{ratio:.2f}×{' noisy' if one.noisy else ''}")
        for one in tried
        if units.known(ratio := one.ratio.get(setting))
    ]


def heat(found: Sequence[Sensitivity]) -> HeatMap:
    """Share of the error by layer and product, in the order of the graph."""
    strongest = max((one.share for one in found if units.known(one.share)), default=0.0)
    fields: dict[tuple[str, str], Heat] = {}
    alone = []
    for one in found:
        match = re.fullmatch(r"(layer \d+),? (.+)", one.layer)
        if match:
            fields[match[1], match[2]] = _heat(one, strongest)
        else:
            alone.append((one.layer, _heat(one, strongest)))
    headings = tuple(dict.fromkeys(part for _, part in fields))
    layers = dict.fromkeys(layer for layer, _ in fields)
    rows = tuple((layer, tuple(fields.get((layer, part)) for part in headings)) for layer in layers)
    return HeatMap(headings, rows, tuple(alone))


def _heat(one: Sensitivity, strongest: float) -> Heat:
    strength = round(LEVELS * max(0.0, one.share) / strongest) if strongest > 0 and units.known(one.share) else 0
    hint = f"{one.layer}: {units.share(one.share)} of the error; alone {units.small(one.error)}; {one.product}"
    return Heat(units.share(one.share), strength, one.kept, hint)


def _device(one: Certificate) -> Cell:
    """`browser`, and in small print what it is made of and runs."""
    name, _, more = one.device.partition(", ")
    return Cell(name, "; ".join(part for part in (more, one.runtime) if part))


def _made(one: Certificate) -> Cell:
    """The method in a word or two; the rest of it, which wraps, below."""
    name, _, rest = one.method.partition(", ")
    return Cell(name, "; ".join(filter(None, (rest, _kept(one.kept)))))


def _kept(names: Sequence[str]) -> str:
    return f"{len(names)} product{'s' * (len(names) != 1)} left in float32" if names else ""


def _result(one: Tried) -> Cell:
    if not one.passed:
        return Cell("failed", one.reason, "bad")
    return Cell("chosen" if one.chosen else "passed", one.reason)


def _time(one: Tried, setting: str) -> str:
    return f"{'~' if one.noisy else ''}{units.three_digits(one.p50_ms[setting])}" if setting in one.p50_ms else "—"


def _ratio(one: Tried, setting: str) -> str:
    return f"{one.ratio[setting]:.2f}×" if setting in one.ratio else ""


def _counted(fused: Mapping[str, int]) -> Cell:
    told = ", ".join(f"{count} {name}" for name, count in fused.items())
    return Cell(str(sum(fused.values())), told) if fused else Cell(units.MISSING)
