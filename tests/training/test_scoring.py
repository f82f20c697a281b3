"""A student is scored by what its stage trains, over all held-out rows together."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining

from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.masking import Words
from compress.papers import bert, deberta, electra, mobilebert
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.scoring import Scoring, choose_scoring, objective_scorer
from compress.training.step import Distillation
from tests import learning, tiny

WORDS = Words.from_tokenizer(tiny.tokenizer())
MASK = partial(bert.mask, words=WORDS, rate=0.3)


def context(**fields: Any) -> Any:
    rows = learning.rows(20).remove_columns("labels")
    return SimpleNamespace(rows=lambda *_, **__: rows, collate=learning.collate(), bf16=False, **fields)


def chosen(step: Any, corrupt: Any, **settings: Any) -> Scoring | None:
    stage = Stage(
        **{
            "kind": "pretrain",
            "name": "text",
            "data": "text",
            "head": "masked_lm",
            "steps": 5,
            "batch": 4,
            "lr": 1e-3,
            "objective": (Term("bert.masked_lm"),),
            "max_length": 32,
            **settings,
        }
    )
    return choose_scoring(stage, step, corrupt, context(), seed=0, teacher_logits=None)


def test_deberta_is_scored_through_its_decoder() -> None:
    """The head on the student's own last layer is not trained."""
    student = tiny.model("deberta-v2", head=AutoModelForMaskedLM)
    step = deberta.EnhancedMaskDecoder(student, None, None)
    scoring = chosen(step, MASK)
    assert scoring is not None
    score = step.wrap_score(scoring.score)
    found = score(student)["score"]
    rows = context().rows()
    order = sorted(range(len(rows)), key=lambda row: -rows[row]["length"])
    step.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        loss = step(**MASK(learning.collate()([rows[row] for row in order])))["loss"]
    assert found == pytest.approx(-float(loss), rel=1e-5)
    torch.nn.init.normal_(step.decoder.positions.weight, std=3)
    assert abs(score(student)["score"] - found) > 1e-3, "its positions are the step's"
    assert step.decoder.training is False


def test_a_step_without_logits_is_not_scored_as_a_language_model() -> None:
    """Layers that are learned one after the other give no answers before the last."""
    student, teacher = (tiny.model("bert", head=AutoModelForMaskedLM, seed=seed) for seed in (1, 2))
    shapes = (Shape.from_config(model.config) for model in (student, teacher))
    step = mobilebert.Progressive(student, teacher, Objective([Term("mobilebert.feature_maps")], *shapes))
    assert chosen(step, MASK) is None
    assert chosen(Distillation(student, teacher, [Term("tinybert.hidden")]), MASK) is None
    assert chosen(Distillation(student, None, [Term("bert.masked_lm")]), MASK) is not None


@pytest.mark.parametrize("batch", [3, 7, 20])
@pytest.mark.parametrize("loss", ["tinybert.hidden", "tinybert.attention", "minilm.attention"])
def test_the_objective_is_a_mean_over_all_rows(loss: str, batch: int) -> None:
    """Rows of 3 to 20 tokens in batches of any size."""
    step = learning.step([Term(loss, project=loss == "tinybert.hidden", layers="last")])
    rows = context().rows()
    score = objective_scorer(step, context(), rows, batch)
    whole = step.eval()(**learning.collate()([rows[row] for row in range(len(rows))]))["loss"]
    assert score(step.student)["distance"] == pytest.approx(float(whole.detach()), rel=1e-4)


def test_held_out_text_is_corrupted_in_the_same_way_every_time() -> None:
    student = tiny.model("electra", head=AutoModelForPreTraining)
    step = electra.ReplacedTokens(student, None, None, width=0.5)
    scoring = chosen(step, partial(electra.mask, words=WORDS), head="pretraining", steps=None, epochs="auto")
    assert scoring is not None
    before = torch.random.get_rng_state()
    first, second = scoring.score(student), scoring.score(student)
    assert first == second
    assert first["distance"] > 0
    assert torch.equal(torch.random.get_rng_state(), before)
