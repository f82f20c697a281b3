"""Decide how many rows are held out for decisions, and say how precisely they measure a
score."""

from typing import Final

from compress.arrays import Array

SHARE_HELD_OUT: Final = 0.1
"""The share of the training rows that becomes the validation split of a source without
one."""
DECIDING_ROWS: Final = 10_000
"""The most rows held out for decisions: they measure an accuracy of 90 % to 0.6 points,
and more would hardly help."""


def held_out_share(rows: int) -> float:
    """Return the share to hold out of `rows` rows, of which there is at least one."""
    return min(SHARE_HELD_OUT, DECIDING_ROWS / rows)


def score_error(rows: int) -> float:
    """Return to how many points `rows` rows measure an accuracy of 90 %: half of its 95
    % interval."""
    return 196 * (0.9 * 0.1 / rows) ** 0.5


def describe_held_out(held_out: Array, seed: int) -> str:
    """Say how many rows a mask holds out and, if they are fewer than the usual share,
    how precisely they measure a score."""
    count = int(held_out.sum())
    rows = len(held_out)
    known = ""
    if held_out_share(rows) < SHARE_HELD_OUT:
        error = score_error(count)
        known = f", which measure an accuracy of 90 % to {error:.1f} points"
    return (
        f"no validation split: held out {count:,} of {rows:,} training rows (seed "
        f"{seed}){known}"
    )
