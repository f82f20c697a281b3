"""MRA, whose attention is a kernel of CUDA."""

from dataclasses import dataclass
from typing import Any

from compress.families.family import Family


@dataclass(frozen=True)
class MRA(Family):
    """A family that computes zeros without CUDA."""

    def without_kernels(self, config: Any) -> str:
        return "MRA's attention runs only on CUDA; elsewhere transformers returns zeros"


FAMILY = MRA("mra", first_row=2)
