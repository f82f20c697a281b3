"""The official codes' own values, reproduced directly or through the deviation that `tests/papers/<paper>.py` states.

COMPRESS_GOLDEN names another folder of the same keys, with inputs of other shapes.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compress.config.recipe import Recipe, Stage
from compress.config.term import Term
from compress.models.signals import Signals
from compress.papers import minilm
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from tests.papers.case import authors, case_modules

FOLDER = Path(os.environ.get("COMPRESS_GOLDEN") or Path(__file__).parent.parent / "golden")
EXPECTED: Mapping[str, Any] = json.loads((FOLDER / "losses.json").read_text(encoding="utf-8"))
LEFT_OUT = {
    # Of a library, not of a paper: one counts what the student gives to pads, the others change a temperature by step.
    "textbrewer.att_ce mask",
    "textbrewer.att_ce_mean mask",
    "textbrewer.flsw(1,2) base 4",
    "textbrewer.cwsm(1) base 4",
}


def arrays() -> dict[str, Tensor]:
    with np.load(FOLDER / "losses.npz") as stored:
        return {name: torch.from_numpy(array) for name, array in stored.items()}


OURS: dict[str, Any] = {}
for cases in case_modules().values():
    if hasattr(cases, "golden"):
        OURS |= cases.golden(arrays())


def plain(value: Any) -> Any:
    return {name: part.item() for name, part in value.items()} if isinstance(value, Mapping) else value.tolist()


def test_every_key_is_reproduced_or_named_as_left_out() -> None:
    assert EXPECTED.keys() == OURS.keys() | LEFT_OUT
    assert not OURS.keys() & LEFT_OUT


@pytest.mark.parametrize("key", OURS)
def test_official_value(key: str) -> None:
    assert plain(OURS[key]) == pytest.approx(EXPECTED[key], rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("restrict", "soft_targets"), [(False, "soft_targets"), (True, "masked_soft_targets")])
def test_the_triple_loss_is_assembled_from_terms(restrict: bool, soft_targets: str, temperature: float) -> None:
    """5 L_ce + 2 L_mlm + L_cos; the official total has a fourth, alpha_mse, at weight 1."""
    expected = EXPECTED[f"distilbert.step restrict={restrict} T={temperature}"]
    of = arrays()
    student = Signals(of["mask"], of["token_logits_student"], (of["hidden_student"], of["hidden_student"]))
    teacher = Signals(of["mask"], of["token_logits_teacher"], 3 * (of["hidden_teacher"],))
    terms = [
        Term(f"distilbert.{soft_targets}", 5, options={"temperature": temperature}),
        Term("bert.masked_lm", 2),
        Term("distilbert.cosine", 1, layers="last"),
    ]
    objective = Objective(terms, shape(of, layers=1), shape(of, layers=2))
    parts = objective(student, teacher, {"labels": of["mlm_labels"]})
    assert parts[f"distilbert.{soft_targets}"].item() == pytest.approx(5 * expected["_ce"], rel=1e-5)
    assert parts["bert.masked_lm"].item() == pytest.approx(2 * expected["_mlm"], rel=1e-5)
    assert parts["distilbert.cosine"].item() == pytest.approx(expected["_cos"], rel=1e-5)
    assert parts["total"].item() == pytest.approx(expected[""] - expected["_mse"], rel=1e-5)


def test_pkds_recipe_is_the_authors_whole_loss() -> None:
    """(1 - alpha) CE + alpha KL + beta PT, as intersun/PKD-for-BERT-Model-Compression at 9e9e860 computes it.

    Its functions `distillation_loss` and `patience_loss` of src/KD_loss.py were run once on the arrays of
    tests/golden/losses.npz: the class logits and labels at T 10, and hidden_student[:, :3] and hidden_teacher[:, :3]
    as the [CLS] states of three layers, normalised. Theirs rounds the patience to float16.
    """
    kd, ce, patience = 0.8441082239151001, 1.8554023504257202, 0.1256103515625
    with np.load(Path(__file__).parent.parent / "golden" / "losses.npz") as stored:
        of = {name: torch.from_numpy(array) for name, array in stored.items()}
    stage = Recipe.load("pkd").stages[0]
    assert isinstance(stage, Stage)

    def signals(of_whom: str) -> Signals:
        hidden = of[f"hidden_{of_whom}"]
        layers = [hidden.roll(-layer, dims=1) for layer in range(4)]  # layer n begins with token n
        return Signals(of["mask"], of[f"class_logits_{of_whom}"], (hidden, *layers))

    objective = Objective(stage.objective, shape(of, layers=4), shape(of, layers=4), kind="classification")
    parts = objective(signals("student"), signals("teacher"), {"labels": of["class_labels"]})
    assert parts["pkd.soft_targets"].item() == pytest.approx(0.5 * kd, rel=1e-5)
    assert parts["bert.labels"].item() == pytest.approx(0.5 * ce, rel=1e-5)
    assert parts["pkd.patience"].item() == pytest.approx(100 * patience, rel=2**-11)


def test_the_losses_of_minilms_first_version_are_cases_of_the_second_ones_code() -> None:
    given, expected = authors("minilm")
    with np.load(Path(__file__).parent.parent / "golden" / "losses.npz") as stored:
        of = {name: torch.from_numpy(array) for name, array in stored.items()}

    def heads(states_BLD: Tensor) -> list[Tensor]:
        """Queries, keys and values: the states, rolled."""
        return [states_BLD.roll(by, -1).unflatten(-1, (given["heads"], -1)).transpose(1, 2) for by in given["rolled"]]

    (q, k, v), (q_T, k_T, v_T) = heads(of["hidden_student"][..., : given["student_width"]]), heads(of["hidden_teacher"])
    scores, scores_T = (a @ b.mT / a.shape[-1] ** 0.5 for a, b in ((q, k), (q_T, k_T)))
    assert minilm.attention(scores, scores_T, of["mask"]).item() == pytest.approx(expected["attention"], rel=1e-5)
    assert minilm.value_relation(v, v_T, of["mask"]).item() == pytest.approx(expected["value_relation"], rel=1e-5)


def shape(of: Mapping[str, Tensor], layers: int) -> Shape:
    D, V = of["hidden_student"].shape[-1], of["token_logits_student"].shape[-1]
    return Shape("bert", layers, D, 1, D, 4 * D, D, vocabulary=V, classes=2)
