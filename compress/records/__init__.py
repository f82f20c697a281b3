from typing import Literal

Kind = Literal[
    "classification",
    "multilabel",
    "regression",
    "tagging",
    "qa",
    "embedding",
    "ranking",
]
"""The kinds of task."""
