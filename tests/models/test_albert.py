"""ALBERT students, and the sentence-order head between their stages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.config.recipe import Recipe
from compress.config.stages import StudentSpec
from compress.models import heads
from compress.models.flops import warn_if_larger
from compress.models.loader import load_result
from compress.models.student import build, config_for
from tests import tiny


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_sentence_order_has_two_outputs(outputs: int, tmp_path: Path) -> None:
    """Build for pre-training, save and load, then change to the task's head."""
    names = {number: f"label {number}" for number in range(outputs)}
    teacher = tiny.bert(outputs)
    teacher.config.id2label = names
    student: Any = build(StudentSpec(family="albert", embedding=8), teacher, head="pretraining")
    assert student.eval()(**tiny.batch()).sop_logits.shape == (3, 2)
    student.save_pretrained(tmp_path)
    kept = load_result(tmp_path, "pretraining", "classification")
    for model in (student, kept):
        last = heads.under(model, "task", "classification").eval()
        assert last(**tiny.batch()).logits.shape == (3, outputs)
        assert last.config.id2label == names
        assert torch.equal(last.get_input_embeddings().weight, student.get_input_embeddings().weight)
    assert teacher.config.id2label == names


def test_the_recipes_have_the_papers_students() -> None:
    """12M parameters, of which 4M are tables; one group of layers, an embedding of 128."""
    config = config_for(Recipe.load("albert").student, tiny.config("bert", vocab_size=30_000))
    assert (config.num_hidden_groups, config.embedding_size, config.hidden_size) == (1, 128, 768)
    teacher = tiny.config("bert", layers=6, hidden_size=384, intermediate_size=1536, vocab_size=30_000)
    shared = config_for(Recipe.load("albert-shared").student, teacher)
    assert (shared.num_hidden_layers, shared.num_hidden_groups, shared.embedding_size) == (6, 1, 128)
    assert warn_if_larger("only", shared, teacher) == []  # 0.4 % more FLOPs, for a quarter of the parameters
