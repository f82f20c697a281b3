"""What tests of pruning share: a tiny model, its data, a recipe of two cuts, and a run that ships nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compress
from tests import learning, tiny
from tests.unshipped import Trained, Unshipped

SHORT = {"steps": 3, "batch": 8, "max_length": 32, "lr": 1e-3, "evaluate": 1, "checkpoint": 1}
RECIPE = f"""
paper: {{title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}}
about: Half of the way, and the rest.
teacher: {{finetune: teacher, steps: 24, batch: 16, lr: 1.0e-2, max_length: 32, evaluate: 1}}
student: {{init: teacher}}
stages:
  - {{prune: half, importance: {{by: molchanov.taylor}}, way: 0.5, rows: 24, batch: 8, max_length: 32}}
  - distill: between
    {", ".join(f"{key}: {value}" for key, value in SHORT.items()).replace(", ", f"{chr(10)}    ")}
    objective: &both
      - {{loss: tinybert.hidden, project: true}}
      - {{loss: hinton.soft_targets, only: [classification, tagging, qa]}}
      - {{loss: hinton.matched_logits, only: regression}}
  - {{prune: all, importance: {{by: molchanov.taylor}}, rows: 24, batch: 8, max_length: 32}}
  - distill: recover
    {", ".join(f"{key}: {value}" for key, value in SHORT.items()).replace(", ", f"{chr(10)}    ")}
    objective: *both
"""


def given(folder: Path, **model: Any) -> dict[str, Any]:
    """What `compress.prune` is given: four layers of four heads, 32 wide, without dropout, with a head for the task."""
    made = tiny.bert(**{"layers": 4, "initializer_range": 0.1, **learning.NO_DROPOUT, **model})
    return {
        "model": tiny.checkpoint(folder / "model", made),
        "recipe": tiny.recipe(folder, RECIPE),
        "data": tiny.reviews(folder / "data"),
        "precision": "fp32",
        "gate": "warn",
    }


def pruned(given: Mapping[str, Any], out: Path, **changes: Any) -> Path:
    """The run's directory after the last stage: nothing is shipped, which takes longer than all of this."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.jobs.shipping.Bundle", Unshipped)
        with pytest.raises(Trained):
            tiny.call(compress.prune, **{**given, **changes}, out=out)
    return out
