"""What every loss of every paper is tested on: `tests/papers/<paper>.py`, if there is one, has the cases of a paper.

A case key is the loss's name, with a variant after a space where one case is not enough: `labels`, `labels numbers`.
Formulas get nested lists, never tensors, and are written as the paper writes them: sums over indices.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import compress.papers
from compress.config.term import Term
from compress.training.objective import Loss, find_loss
from compress.training.reads import Reading

Formula = Callable[..., float]
Arrays = Mapping[str, Tensor]
"""The inputs of the golden values, by their names in losses.npz."""

TOKENS = {
    **dict.fromkeys(("layers", "encoder_layers", "embeddings"), (1,)),
    "scores": (2, 3),
    "pair": (),
    **dict.fromkeys(("queries", "keys", "values"), (2,)),
}
"""The axes that run over tokens; those of logits depend on the loss."""


@dataclass(frozen=True)
class Case:
    """Inputs of one loss, what it must give on them, and where its minimum is.

    mask      as the loss gets it: real tokens, or labelled positions where the loss's reading says so
    formula   (student, target, mask, **options) -> float, in nested loops
    best      the student at which the loss is smallest: the teacher itself, unless said
    minimum   the loss there
    across    the loss compares the examples of a batch with each other: it is no mean over them
    query     the query of each row, of losses whose mask is of pairs of rows
    """

    student: Tensor
    target: Tensor
    mask: Tensor
    formula: Formula
    best: Tensor | None = None
    minimum: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    across: bool = False
    query: Tensor | None = None

    @property
    def smallest(self) -> Tensor:
        return self.target if self.best is None else self.best

    def token_axes(self, reading: Reading) -> tuple[int, ...]:
        if reading.signal == "logits":
            return (1,) if self.student.dim() == 3 or reading.per == "token" else ()
        return TOKENS[reading.signal]


def authors(paper: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The inputs and values of tests/golden/authors.json: what the authors' code returns, see authors.py beside it."""
    file = Path(__file__).parent.parent / "golden" / "authors.json"
    found = json.loads(file.read_text(encoding="utf-8"))[paper]
    return found["inputs"], found["values"]


def papers() -> list[str]:
    return [module.name for module in iter_modules(compress.papers.__path__) if module.name != "reading"]


def case_modules() -> dict[str, ModuleType]:
    """`tests/papers/<paper>.py` of each paper that has one."""
    named = {paper: f"tests.papers.{paper}" for paper in papers()}
    return {paper: import_module(name) for paper, name in named.items() if find_spec(name)}


def losses(paper: str) -> dict[str, Loss]:
    """The losses that this paper introduces."""
    module = import_module(f"compress.papers.{paper}")
    return {
        name: find_loss(Term(f"{paper}.{name}"))
        for name, value in vars(module).items()
        if hasattr(value, "reading") and value.__module__ == module.__name__
    }


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def prefix(*lengths: int) -> Tensor:
    """The mask of rows of these lengths, padded to the longest."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def softmax(row: Sequence[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def kl(teacher: Sequence[float], student: Sequence[float]) -> float:
    """KL(p || q) of two distributions."""
    return sum(p * (math.log(p) - math.log(q)) for p, q in zip(teacher, student, strict=True))


def squares(student: Sequence[float], target: Sequence[float]) -> float:
    return sum((s - t) ** 2 for s, t in zip(student, target, strict=True))


def real(mask_row: Sequence[int]) -> list[int]:
    """Positions of the real tokens of one example."""
    return [at for at, one in enumerate(mask_row) if one]
