"""Wang et al. 2020 and 2021."""

import math
from collections.abc import Mapping
from typing import Any

from compress.papers import minilm
from tests.papers.case import Arrays, Case, kl, prefix, random, real, softmax

MASK = prefix(5, 2, 3)
NARROW, WIDE = random(3, 2, 5, 6, seed=1), random(3, 4, 5, 6, seed=2)
"""Two heads against four: 12 and 24 wide."""


def relation_kl(student: Any, teacher: Any, mask: Any) -> float:
    """(B, H, L, L) before the softmax; each sequence over its own real tokens."""
    sequences = []
    for b, row in enumerate(mask):
        tokens, heads = real(row), len(student[b])
        total = sum(
            kl(softmax([teacher[b][h][i][j] for j in tokens]), softmax([student[b][h][i][j] for j in tokens]))
            for h in range(heads)
            for i in tokens
        )
        sequences.append(total / heads / len(tokens))
    return sum(sequences) / len(sequences)


def dots(vectors: Any, heads: int) -> list[Any]:
    """X X^T / sqrt d_r over `heads` relation heads of the concatenated attention heads: (B, R, L, L)."""
    out = []
    for by_head in vectors:
        width = [[value for head in by_head for value in head[t]] for t in range(len(by_head[0]))]
        size = len(width[0]) // heads
        out.append(
            [
                [
                    [sum(a[r * size + k] * c[r * size + k] for k in range(size)) / math.sqrt(size) for c in width]
                    for a in width
                ]
                for r in range(heads)
            ]
        )
    return out


def head_relations(student: Any, teacher: Any, mask: Any) -> float:
    return relation_kl(dots(student, len(student[0])), dots(teacher, len(teacher[0])), mask)


def relations(student: Any, teacher: Any, mask: Any, *, heads: int) -> float:
    return relation_kl(dots(student, heads), dots(teacher, heads), mask)


def related(heads: int) -> Case:
    return Case(NARROW, WIDE, MASK, relations, options={"heads": heads})


CASES = {
    "attention": Case(random(3, 2, 5, 5, seed=3), random(3, 2, 5, 5, seed=4), MASK, relation_kl),
    "value_relation": Case(NARROW, random(3, 2, 5, 3, seed=5), MASK, head_relations),
    "query_relations": related(3),
    "key_relations": related(12),
    "value_relations": related(1),
    "value_relations of the teacher's heads": related(4),
}


def golden(of: Arrays) -> Mapping[str, Any]:
    return {"minilmv2.kl one relation": minilm.attention(of["scores_student"], of["scores_teacher"], of["mask"])}
