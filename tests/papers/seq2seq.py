"""Shleifer & Rush 2020."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm

from compress.papers import seq2seq
from tests.papers.case import Arrays, Case, prefix, random, real, squares
from tests.papers.distilbert import MASKED

HIDDEN, TAUGHT = random(3, 5, 6, seed=3), random(3, 5, 6, seed=4)


def normalised(row: list[float]) -> list[float]:
    mean = sum(row) / len(row)
    variance = sum((value - mean) ** 2 for value in row) / len(row)
    return [(value - mean) / (variance + 1e-5) ** 0.5 for value in row]


def hidden(student: Any, teacher: Any, mask: Any, *, normalise: bool = True) -> float:
    shown = normalised if normalise else list
    values = [
        squares(shown(student[b][t]), shown(teacher[b][t])) / len(student[b][t])
        for b in range(len(mask))
        for t in real(mask[b])
    ]
    return sum(values) / len(values)


CASES = {
    "decoder_hidden": Case(HIDDEN, TAUGHT, MASKED, hidden),
    "decoder_hidden of any scale": Case(HIDDEN, TAUGHT, MASKED, hidden, options={"normalise": False}),
    "encoder_hidden": Case(HIDDEN, TAUGHT, prefix(5, 2, 3), hidden),
    "encoder_hidden of any scale": Case(HIDDEN, TAUGHT, prefix(5, 2, 3), hidden, options={"normalise": False}),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    """Student states h and 2 h against the teacher's h and 3 h of h, 2 h, 3 h: the map [0, 2]."""
    student, teacher, mask = of["hidden_student"], of["hidden_teacher"], of["mask"]
    pairs = [(student, teacher), (2 * student, 3 * teacher)]

    def at_once(hidden_BLD: Tensor) -> Tensor:
        """The authors' normalisation: over batch, tokens (pads too) and width together."""
        return layer_norm(hidden_BLD, hidden_BLD.shape)

    def total(shown: Any) -> Tensor:
        return sum(seq2seq.encoder_hidden(shown(s), shown(t), mask, normalise=False) for s, t in pairs)  # type: ignore[return-value]

    return {"seq2seq.hidden normalize=False": total(lambda h: h), "seq2seq.hidden normalize=True": total(at_once)}
