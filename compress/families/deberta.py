"""The first DeBERTa."""

from dataclasses import dataclass
from typing import Any

from compress.families.family import Family


@dataclass(frozen=True)
class DeBERTa(Family):
    """A family whose code takes the smaller of the number of tokens and its largest
    distance."""

    def traced_distance(self, config: Any) -> int | None:
        """Return the largest distance. A graph traced at that many tokens is right for
        shorter texts too, since their distances are the same rows of its table; traced
        at fewer, it uses their number as the largest distance at all lengths."""
        distance: int | None = getattr(config, "max_relative_positions", None)
        if distance is None or distance > 0:
            return distance
        return int(config.max_position_embeddings)


FAMILY = DeBERTa(
    "deberta",
    disentangled=True,
    successor="deberta-v2",
    float32_only=True,  # it fills masked scores with a number outside bfloat16's range
    reads_values=True,
)
