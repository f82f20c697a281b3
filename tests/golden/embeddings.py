"""Compute embeddings.json: what others' losses of sentence vectors return on the vectors that stand beside the values.

    python tests/golden/embeddings.py FOLDER > tests/golden/embeddings.json

sentence-transformers' are called as they are installed. FOLDER has the code of Park et al., which is not part of this
repository: metric/ of lenscloth/RKD at 0a6c3c0, unmodified.
"""

import json
import sys
from typing import Any

import sentence_transformers
import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn

T = 0.1


class Vectors(nn.Module):
    """A model whose features are its answers."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(features)

    def get_embedding_dimension(self) -> int:
        return 6


def main() -> None:
    draw = torch.Generator().manual_seed(20)
    student, teacher = (torch.randn((5, 6), generator=draw) for _ in range(2))
    near, far = student / student.norm(dim=-1, keepdim=True), teacher / teacher.norm(dim=-1, keepdim=True)
    model: Any = Vectors()
    mse, negatives = losses.MSELoss(model), losses.MultipleNegativesRankingLoss(model, scale=1 / T)

    def features(*vectors: Tensor) -> list[dict[str, Tensor]]:
        return [{"sentence_embedding": each} for each in vectors]

    # Of each text, the others as its candidates.
    columns = [torch.stack([near[j if j < i else j + 1] for i in range(5)]) for j in range(4)]
    seen = torch.stack([(far[i] @ far.T)[[j for j in range(5) if j != i]] for i in range(5)])
    values = {
        "MSELoss": mse(features(student), teacher),
        "MSELoss parallel": mse(features(student, student.roll(1, 0)), teacher),
        "EmbedDistillLoss l2": losses.EmbedDistillLoss(model, "l2")(features(near), far),
        "EmbedDistillLoss cosine": losses.EmbedDistillLoss(model, "cosine")(features(student), teacher),
        "DistillKLDivLoss": losses.DistillKLDivLoss(model, temperature=T)(features(near, *columns), seen),
        "MultipleNegativesRankingLoss": negatives(features(student, teacher), None),
        "MatryoshkaLoss": losses.MatryoshkaLoss(model, negatives, [6, 4, 2], [1, 0.5, 2])(
            features(student, teacher), None
        ),
    }
    sys.path.insert(0, sys.argv[1])
    from metric.loss import RKdAngle, RkdDistance

    values |= {"RkdDistance": RkdDistance()(student, teacher), "RKdAngle": RKdAngle()(student, teacher)}
    found = {
        "versions": {"sentence-transformers": sentence_transformers.__version__, "torch": torch.__version__},
        "temperature": T,
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "values": {name: value.item() for name, value in values.items()},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
