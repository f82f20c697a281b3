"""Numbers as people read them. None, and what is not finite, is an em dash everywhere."""

import math
from collections.abc import Sequence
from typing import TypeGuard

MISSING = "—"
# A number and its unit stay on one line.
GAP = "\u00a0"


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number to show."""
    return value is not None and math.isfinite(value)


def score(value: float | None) -> str:
    return f"{value:.3f}".replace("-", "−") if known(value) else MISSING


def change(drop: float | None) -> str:
    """A drop of 0.004 -> `−0.004`, what was gained with a plus; nothing worth three decimals is 0.000."""
    if not known(drop):
        return MISSING
    return "0.000" if abs(drop) < 0.0005 else f"{-drop:+.3f}".replace("-", "−")


def share(value: float | None) -> str:
    """0.984 -> `98.4 %`."""
    if not known(value):
        return MISSING
    rounded = round(100 * value, 1) or 0.0  # no minus before nothing
    return f"{rounded:.1f}{GAP}%".replace("-", "−")


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


def small(value: float | None) -> str:
    """What may be tiny: 0.0123 as it is, 0.00000123 -> `1.2·10⁻⁶`."""
    if not known(value) or value == 0 or abs(value) >= 0.001:
        return three_digits(value)
    digits, _, power = f"{value:.1e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits}·10{raised}".replace("-", "−")


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


def telling(names: Sequence[str]) -> list[str]:
    """Names of settings without the parts that are the same in all: `64 tokens`, `16 tokens`. One alone stays whole."""
    parts = [name.split(", ") for name in names]
    if len(names) < 2 or len({len(each) for each in parts}) > 1:
        return list(names)
    kept = [index for index, same in enumerate(zip(*parts, strict=True)) if len(set(same)) > 1]
    return [", ".join(each[index] for index in kept) for each in parts]


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
