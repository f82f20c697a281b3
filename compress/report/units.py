"""Numbers as people read them. None, and what is not finite, is an em dash everywhere."""

import math
from typing import TypeGuard

MISSING = "—"
# A number and its unit stay on one line.
GAP = "\u00a0"


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number to show."""
    return value is not None and math.isfinite(value)


def score(value: float | None) -> str:
    return f"{value:.3f}".replace("-", "−") if known(value) else MISSING


def share(value: float | None) -> str:
    """0.984 -> `98.4 %`."""
    return f"{100 * value:.1f}{GAP}%" if known(value) else MISSING


def magnitude(value: float | None) -> str:
    """22_713_216 -> `22.7 M`; three digits tell a model's size."""
    if not known(value):
        return MISSING
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:
            return three_digits(value / unit) + GAP + name
    return three_digits(value)


def three_digits(value: float | None) -> str:
    """At least three digits, never an exponent: 0.0123, 3.41, 14.5, 1234."""
    if not known(value):
        return MISSING
    if value == 0:
        return "0"
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    decimals = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    return f"{value:.{min(decimals, 6)}f}".replace("-", "−")


def measure(value: float | None, unit: str) -> str:
    """14.5, "ms" -> `14.5 ms`."""
    return f"{three_digits(value)}{GAP}{unit}" if known(value) else MISSING


def duration(seconds: float | None) -> str:
    """3725 -> `1 h 2 min`; 252 -> `4 min 12 s`; 3.4 -> `3.4 s`."""
    if not known(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f}{GAP}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{GAP}min {rest}{GAP}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{GAP}h {minutes}{GAP}min"


def times(ratio: float) -> str:
    """4.264 -> `4.3×`; from 10 on without decimals, below 1 with two digits that count."""
    if ratio >= 9.95:
        return f"{ratio:.0f}×"
    return f"{ratio:.1f}×" if ratio >= 0.995 else f"{ratio:.2g}×"


def percent(ratio: float) -> str:
    """0.0812 -> `8 %`; what is under one per cent keeps a decimal."""
    return f"{100 * ratio:.{0 if ratio >= 0.0095 else 1}f}{GAP}%"


def metric(name: str) -> str:
    """The name of a score as a reader knows it; a name we do not know is shown as it is."""
    return {
        "f1": "F1",
        "f1_macro": "macro F1",
        "matthews": "Matthews correlation",
        "pearson": "Pearson correlation",
        "spearman": "Spearman correlation",
        "mse": "mean squared error",
        "exact": "exact match",
        "f1_answerable": "F1 of the answerable",
        "f1_of_spans": "F1 if always answered",
        "no_answer": "rightly unanswered",
    }.get(name, name)
