"""What the formulas on sentence vectors share, in plain Python."""

import math
from collections.abc import Sequence

Vector = Sequence[float]


def dot(left: Vector, right: Vector) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))


def cosine(left: Vector, right: Vector) -> float:
    return dot(left, right) / math.sqrt(dot(left, left) * dot(right, right))


def minus(left: Vector, right: Vector) -> list[float]:
    return [x - y for x, y in zip(left, right, strict=True)]


def length(vector: Vector) -> float:
    return math.sqrt(dot(vector, vector))


def unit(vector: Vector) -> list[float]:
    return [x / length(vector) for x in vector]


def huber(apart: float) -> float:
    return apart**2 / 2 if abs(apart) <= 1 else abs(apart) - 0.5
