"""IB-BERT, MobileBERT's teacher: layers that widen the stream."""

from dataclasses import dataclass, replace
from typing import Any

from compress.families.family import LayerWork
from compress.families.mobilebert import Trigrams


@dataclass(frozen=True)
class IBBERT(Trigrams):
    """A family whose layers widen the stream to `true_hidden_size` features."""

    def layer_work(self, config: Any, shape: Any) -> LayerWork:
        inner = config.true_hidden_size
        return replace(
            super().layer_work(config, shape),
            answer=3 * shape.hidden * inner + inner * inner,
            feed_forward=2 * inner * shape.ffn,
            normed=3 * inner + shape.hidden,
        )


FAMILY = IBBERT(
    "ib-bert",
    own_class=True,
    prepared_mask=True,
    counted=True,
    masked_by_feature=True,
)
