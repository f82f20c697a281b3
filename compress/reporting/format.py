"""Format numbers and names for readers. None and numbers that are not finite become an
em dash."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

MISSING = "—"
GAP = "\u00a0"
"""The space between a number and its unit, which keeps them on one line."""
MOST_ITEMS_NAMED = 3
"""The most names that a sentence lists before it counts the others."""


def is_known(value: float | None) -> TypeGuard[float]:
    """Return True for a finite number."""
    return value is not None and math.isfinite(value)


def capitalise(name: str) -> str:
    """Capitalise the first letter, and leave the others unchanged."""
    return name[:1].upper() + name[1:]


def join_names(names: Sequence[str], most: int = MOST_ITEMS_NAMED) -> str:
    """Join the first few names, and count the others: `a, b, c and 2 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return (
        f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
    )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Name each path relative to the folder that all of them share."""
    parts = [Path(path).as_posix().split("/") for path in paths]
    shared = 0
    while (
        all(len(path) > shared + 1 for path in parts)
        and len({path[shared] for path in parts}) == 1
    ):
        shared += 1
    return {
        name: "/".join(path[shared:]) for name, path in zip(paths, parts, strict=True)
    }


def score(value: float | None) -> str:
    """Format a score: 0.8944 -> `0.894`."""
    return f"{value:.3f}".replace("-", "−") if is_known(value) else MISSING


def difference(largest: float, logit: float) -> str:
    """Format the largest difference of a logit, and the largest logit: `2.1e-03 of
    1.7`."""
    return f"{largest:.1e} of {logit:.2g}"


def change(drop: float | None) -> str:
    """Format a drop of 0.004 as `−0.004`, a gain with a plus; what three decimals do
    not show is 0.000."""
    if not is_known(drop):
        return MISSING
    return "0.000" if abs(drop) < 0.0005 else f"{-drop:+.3f}".replace("-", "−")


def share(value: float | None) -> str:
    """Format a share: 0.984 -> `98.4 %`."""
    if not is_known(value):
        return MISSING
    rounded = round(100 * value, 1) or 0.0  # no minus before nothing
    return f"{rounded:.1f}{GAP}%".replace("-", "−")


def magnitude(value: float | None) -> str:
    """Format a count with three digits: 22_713_216 -> `22.7 M`."""
    if not is_known(value):
        return MISSING
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return three_digits(value / unit) + GAP + name
    return three_digits(value)


def three_digits(value: float | None) -> str:
    """Format with at least three digits, never an exponent: 0.0123, 3.41, 14.5,
    1234."""
    if not is_known(value):
        return MISSING
    if value == 0:
        return "0"
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    decimals = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    return f"{value:.{min(decimals, 6)}f}".replace("-", "−")


def small(value: float | None) -> str:
    """Format a number that may be tiny: 0.0123 unchanged, 0.00000123 -> `1.2·10⁻⁶`."""
    if not is_known(value) or value == 0 or abs(value) >= 0.001:
        return three_digits(value)
    digits, _, power = f"{value:.1e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits}·10{raised}".replace("-", "−")


def measure(value: float | None, unit: str) -> str:
    """Format a value with its unit: 14.5, "ms" -> `14.5 ms`."""
    return f"{three_digits(value)}{GAP}{unit}" if is_known(value) else MISSING


def duration(seconds: float | None) -> str:
    """Format seconds: 3725 -> `1 h 2 min`; 252 -> `4 min 12 s`; 3.4 -> `3.4 s`."""
    if not is_known(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f}{GAP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{GAP}min {rest}{GAP}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{GAP}h {minutes}{GAP}min"


def times(ratio: float) -> str:
    """Format a factor: 4.264 -> `4.3×`; no decimals from 10 on, two digits below 1."""
    if ratio >= 9.95:
        return f"{ratio:.0f}×"
    return f"{ratio:.1f}×" if ratio >= 0.995 else f"{ratio:.2g}×"


def percent(ratio: float) -> str:
    """Format a ratio: 0.0812 -> `8 %`; one decimal below one per cent."""
    return f"{100 * ratio:.{0 if ratio >= 0.0095 else 1}f}{GAP}%"


def drop_shared_parts(names: Sequence[str]) -> list[str]:
    """Drop the parts that all names of settings share, which leaves `64 tokens`, `16
    tokens`; a single name is kept whole."""
    parts = [name.split(", ") for name in names]
    if len(names) < 2 or len({len(name) for name in parts}) > 1:
        return list(names)
    different = [
        index
        for index, values in enumerate(zip(*parts, strict=True))
        if len(set(values)) > 1
    ]
    return [", ".join(name[index] for index in different) for name in parts]


def metric(name: str) -> str:
    """Return the usual name of a metric; other names are returned as they are."""
    return {
        "f1": "F1",
        "f1_macro": "macro F1",
        "matthews": "Matthews correlation",
        "pearson": "Pearson correlation",
        "spearman": "Spearman correlation",
        "exact": "exact match",
        "ndcg@10": "nDCG@10",
        "mrr@10": "MRR@10",
        "map": "MAP",
        "f1_answerable": "F1 of the answerable",
        "f1_of_spans": "F1 if always answered",
        "no_answer": "rightly unanswered",
    }.get(name, name)
