"""YOSO, whose attention is a kernel of CUDA unless it takes the expectation."""

from dataclasses import dataclass
from typing import Any

from compress.families.family import Family


@dataclass(frozen=True)
class YOSO(Family):
    """A family that may need CUDA."""

    def without_kernels(self, config: Any) -> str:
        if config.use_expectation:
            return ""
        return (
            "use_expectation: false in its config.json runs only on CUDA; set it to "
            "true to export the model here"
        )


FAMILY = YOSO("yoso", first_row=2)
