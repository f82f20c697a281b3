"""On a GPU the same code trains the same student: skipped where CUDA is not."""

from pathlib import Path

import pytest
import torch

import compress
from compress.config.stages import StudentSpec
from compress.config.term import Term
from compress.models import student as students
from compress.models.signals import read
from compress.training.compilation import LEAST_COMPILED, can_compile, compile_layers
from compress.training.teacher_cache import teacher_cache
from tests import learning, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_student_is_trained_there_and_answers_here(precision: str, tmp_path: Path, home: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    bundle = compress.distill(
        teacher=tiny.checkpoint(tmp_path / "teacher"), data=tiny.reviews(tmp_path / "data"), out=tmp_path / "run",
        recipe=tiny.recipe(tmp_path / "recipe"), options=compress.RunOptions(precision=precision),
    )  # fmt: skip
    assert torch.cuda.max_memory_allocated() > 0
    answers = bundle.predict(["a good film", "a bad film"])
    assert [answer.label for answer in answers] == ["positive", "negative"]


@pytest.mark.skipif(not can_compile(), reason="torch's compiler does not work here")
def test_compiled_layers_give_the_losses_of_the_layers_as_they_are() -> None:
    step = learning.step([Term("hinton.soft_targets"), Term("distilbert.cosine", layers="last")]).cuda().eval()
    rows, collate = learning.rows(), learning.collate()
    batches = [
        {name: column.cuda() for name, column in collate([rows[i] for i in chosen]).items()}
        for chosen in ([0, 3], [1, 2, 4, 5, 6])
    ]
    expected = [step(**batch)["loss"] for batch in batches]
    with compile_layers(step, LEAST_COMPILED):
        assert any("forward" in vars(module) for module in step.student.modules())
        found = [step(**batch)["loss"] for batch in batches]
    torch.testing.assert_close(found, expected)


def test_a_student_is_cut_out_of_a_teacher_there() -> None:
    spec = StudentSpec.model_validate({"family": "distilbert", "layers": 1, "init": "teacher"})
    here, there = tiny.model("bert"), tiny.model("bert").cuda()
    expected, found = (students.build(spec, teacher, kind="classification").state_dict() for teacher in (here, there))
    table = "distilbert.embeddings.position_embeddings.weight"  # the sum of two of the teacher's
    torch.testing.assert_close(found[table].cpu(), expected[table])


def test_kept_outputs_are_the_teachers(tmp_path: Path) -> None:
    teacher, wants = tiny.model("bert").eval().requires_grad_(False).cuda(), frozenset({"logits"})
    rows, collate = learning.rows(), learning.collate()
    kept = teacher_cache(teacher, rows, collate, tmp_path / "kept", wants=wants, layers=[])
    batch = {name: column.cuda() for name, column in collate([rows[0], rows[3], rows[1]]).items()}
    found, expected = kept.signals(batch, wants).logits, read(teacher, batch, wants).logits
    assert found is not None and expected is not None and found.is_cuda
    torch.testing.assert_close(found, expected.float())
