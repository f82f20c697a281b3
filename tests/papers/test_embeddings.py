"""Losses of sentence vectors: others' values, gradients, what they are blind to, what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress import Term
from compress.config.term import parse
from compress.errors import ObjectiveError
from compress.papers import leaf, matryoshka, oord, reimers, rkd, seed
from compress.slicing.shape import Shape
from compress.training.objective import Objective, check_terms
from tests import tiny
from tests.papers import oord as in_loops
from tests.papers.case import Case, random
from tests.papers.test_losses import CASES, FOUND

# Of sentence-transformers 6.2.0 and of the authors of RKD: tests/golden/embeddings.py.
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "embeddings.json").read_text(encoding="utf-8"))
STUDENT, TEACHER = torch.tensor(GOLDEN["student"]), torch.tensor(GOLDEN["teacher"])
T, VALUES = GOLDEN["temperature"], GOLDEN["values"]
EMBEDDING = [name for name in CASES if "embedding" in FOUND[name.partition(" ")[0]].reading.kinds]
FROM_DATA = [name for name in EMBEDDING if FOUND[name.partition(" ")[0]].reading.against != "teacher"]
"""Losses that read relevance or scores in the data instead of a teacher's vectors."""
ROTATED = torch.linalg.qr(random(6, 6, seed=9)).Q


def nested(student: Tensor, teacher: Tensor, sizes: list[float], weights: list[float] | None, **of: object) -> Tensor:
    return matryoshka.nested(student, teacher, of=of, sizes=sizes, weights=weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("MSELoss", reimers.mse),
        ("MSELoss parallel", lambda s, t: reimers.parallel(s, s.roll(1, 0), t)),
        ("EmbedDistillLoss l2", lambda s, t: leaf.l2(s, t, squared=False)),
        ("EmbedDistillLoss cosine", lambda s, t: leaf.l2(s, t) / 2),
        # Theirs has T^2.
        ("DistillKLDivLoss", lambda s, t: T**2 * seed.own_similarities(s, t, temperature=T)),
        ("MultipleNegativesRankingLoss", lambda s, t: oord.infonce(s, t, temperature=T)),
        ("MatryoshkaLoss", lambda s, t: nested(s, t, [6, 4, 2], [1, 0.5, 2], by="oord.infonce", temperature=T)),
        ("RkdDistance", rkd.distances),
        ("RKdAngle", rkd.angles),
    ],
)
def test_the_value_of_others_code(name: str, ours: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert ours(STUDENT, TEACHER).item() == pytest.approx(VALUES[name], rel=1e-5)


def test_every_value_is_reproduced() -> None:
    assert len(VALUES) == 9


def test_parallel_texts_are_rows_whose_vector_is_their_sources() -> None:
    target = STUDENT.roll(1, 0)
    rows = reimers.mse(torch.cat([STUDENT, target]), torch.cat([TEACHER, TEACHER]))
    assert reimers.parallel(STUDENT, target, TEACHER).item() == pytest.approx(rows.item(), rel=1e-6)


@pytest.mark.parametrize("name", EMBEDDING)
def test_the_gradient_is_the_slope_of_the_formula(name: str) -> None:
    """Central differences of the formula in plain Python, in double precision."""
    case, by = CASES[name], 1e-4
    student = case.student.clone().requires_grad_()
    FOUND[name.partition(" ")[0]](student, case.target, case.mask, **case.options).backward()
    rows = case.student.double().tolist()
    slopes = torch.zeros_like(case.student, dtype=torch.float64)
    for i, row in enumerate(rows):
        for d, value in enumerate(row):
            ends = []
            for at in (value + by, value - by):
                row[d] = at
                ends.append(case.formula(rows, case.target.double().tolist(), case.mask.tolist(), **case.options))
            row[d] = value
            slopes[i, d] = (ends[0] - ends[1]) / (2 * by)
    assert student.grad is not None
    torch.testing.assert_close(student.grad.double(), slopes, rtol=1e-3, atol=1e-5)


def of(name: str, student: Tensor, teacher: Tensor) -> float:
    case: Case = CASES[name]
    return FOUND[name.partition(" ")[0]](student, teacher, case.mask, **case.options).item()


@pytest.mark.parametrize("name", [name for name in EMBEDDING if name not in FROM_DATA])
def test_losses_are_invariant_as_documented(name: str) -> None:
    """Rotating both changes nothing, where nothing is cut; the rest is as the formulas say."""
    case = CASES[name]
    student, teacher = case.student, case.target
    value = of(name, student, teacher)
    rotated = random(teacher.shape[1], teacher.shape[1], seed=9)
    rotated = torch.linalg.qr(rotated).Q
    alike = {
        "both rotated": of(name, student @ ROTATED, teacher @ rotated),
        "student rotated": of(name, student @ ROTATED, teacher),
        "teacher rotated": of(name, student, teacher @ rotated),
        "scaled": of(name, 3 * student, 0.2 * teacher),
        "rows scaled": of(name, student * torch.tensor([[1.0], [2.0], [3.0], [4.0]]), teacher),
    }
    free = {each for each, found in alike.items() if found == pytest.approx(value, rel=1e-5)}
    rotation, relations = {"both rotated"}, {"both rotated", "student rotated", "teacher rotated"}
    expected = {
        "reimers.mse": rotation,
        "leaf.l2": rotation | {"scaled", "rows scaled"},
        "leaf.l2 lengths": rotation,
        "leaf.l2 distance": rotation | {"scaled", "rows scaled"},
        "seed.similarities": rotation | {"scaled", "rows scaled"},
        "seed.own_similarities": relations | {"scaled", "rows scaled"},
        "oord.infonce": rotation | {"scaled", "rows scaled"},
        "rkd.distances": relations | {"scaled"},
        "rkd.angles": relations | {"scaled"},
        "matryoshka.nested": {"scaled", "rows scaled"},
        "matryoshka.nested relations": {"teacher rotated", "scaled", "rows scaled"},
        "matryoshka.nested distances": {"teacher rotated", "scaled"},
    }
    of_variants = {"far": "", "wider": "", "weighted": ""}
    known = name if name in expected else " ".join(word for word in name.split() if word not in of_variants)
    assert free == expected[known]


@pytest.mark.parametrize("name", FROM_DATA)
def test_losses_that_read_data_compare_directions(name: str) -> None:
    case = CASES[name]
    rows, width = case.student.shape
    rotation = torch.linalg.qr(random(width, width, seed=9)).Q
    lengths = torch.arange(1.0, rows + 1)[:, None]
    assert of(name, lengths * case.student @ rotation, case.target) == pytest.approx(
        of(name, case.student, case.target), rel=1e-5
    )


NEAR = in_loops.NEAR
DRAWN = random(4, 4, seed=5)


@pytest.mark.parametrize(
    "options",
    [{"hardest": 1}, {"hardest": 2}, {"hardest": 9}, {"same_above": 0.8}, {"same_above": 0.1, "hardest": 1}],
    ids=str,
)
def test_the_teacher_chooses_the_negatives(options: dict[str, float]) -> None:
    found = oord.infonce(DRAWN, NEAR, temperature=0.5, **options)  # type: ignore[arg-type]
    expected = in_loops.infonce(DRAWN.tolist(), NEAR.tolist(), None, temperature=0.5, **options)  # type: ignore[arg-type]
    assert found.item() == pytest.approx(expected, rel=1e-5)
    whole = oord.infonce(DRAWN, NEAR, temperature=0.5)
    assert (found < whole - 0.01) == ("hardest" not in options or options["hardest"] < 3)


def test_the_teachers_temperature_is_its_own() -> None:
    sharp = seed.similarities(STUDENT, TEACHER, temperature=0.2, teacher_temperature=0.01)
    p_BB = torch.eye(5)  # at a low temperature the teacher sees nothing but the text itself
    q_BB = (reimers.unit(STUDENT) @ reimers.unit(TEACHER).T / 0.2).log_softmax(-1)
    assert sharp.item() == pytest.approx(-(p_BB * q_BB).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in EMBEDDING if CASES[name].across])
def test_one_text_has_no_relations(name: str) -> None:
    case = CASES[name]
    student = case.student[:1].clone().requires_grad_()
    alone = FOUND[name.partition(" ")[0]](student, case.target[:1], case.mask[:1], **case.options)
    alone.backward()
    assert alone.item() == pytest.approx(0, abs=1e-7)
    assert student.grad is not None
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("name", EMBEDDING)
def test_texts_that_the_student_cannot_tell_apart_have_an_ordinary_gradient(name: str) -> None:
    case = CASES[name]
    student = case.student[[0, 0, *range(1, len(case.student) - 1)]].clone().requires_grad_()
    FOUND[name.partition(" ")[0]](student, case.target, case.mask, **case.options).backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 10


@pytest.mark.parametrize("name", ["reimers.mse", "leaf.l2", "seed.similarities", "oord.infonce"])
def test_another_width_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ObjectiveError, match=rf"^{name} .* have 6 and the teacher's 9: .*rkd\.angles"):
        FOUND[name](STUDENT, random(5, 9, seed=1), torch.ones(5, 1))
    with pytest.raises(ObjectiveError, match=rf"^matryoshka.nested of {name} .* 6 and the teacher's 9"):
        matryoshka.nested(STUDENT, random(5, 9, seed=1), of=name, sizes=[6, 3])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"of": "hinton.soft_targets", "sizes": [4]}, "is not a loss of sentence vectors"),
        ({"of": "tinybert.hidden", "sizes": [4]}, "is not a loss of sentence vectors"),
        ({"of": "matryoshka.nested", "sizes": [4]}, "is not a loss of sentence vectors"),
        ({"of": "leaf.l3", "sizes": [4]}, "no loss 'leaf.l3'. Did you mean 'leaf.l2'?"),
        ({"of": "leaf", "sizes": [4]}, "names no function"),
        ({"of": {"by": "leaf.l2", "square": True}, "sizes": [4]}, "no option 'square'. Did you mean 'squared'?"),
        ({"of": {"by": "seed.similarities", "temperature": 0}, "sizes": [4]}, "greater than 0"),
        ({"of": "leaf.l2", "sizes": [4, 0]}, "greater than 0"),
        ({"of": "leaf.l2"}, "needs the option 'sizes'"),
        ({"sizes": [4]}, "needs the option 'of'"),
        ({"of": "leaf.l2", "sizes": [4], "weight_s": [1]}, "Did you mean 'weights'?"),
    ],
)
def test_a_line_of_a_recipe_is_checked_before_anything_runs(options: dict[str, object], problem: str) -> None:
    problems = check_terms([parse({"loss": "matryoshka.nested", **options})], "")
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.mark.parametrize(
    ("sizes", "weights"), [([7], None), ([2.5], None), ([0.01], None), ([], None), ([4, 2], [1.0])], ids=str
)
def test_sizes_that_the_vectors_do_not_have(sizes: list[float], weights: list[float] | None) -> None:
    with pytest.raises(ObjectiveError, match=r"^matryoshka\.nested: "):
        matryoshka.nested(STUDENT, TEACHER, of="leaf.l2", sizes=sizes, weights=weights)


def test_a_line_of_a_recipe_comes_back_as_it_was() -> None:
    line = {"loss": "matryoshka.nested", "of": {"by": "seed.own_similarities", "temperature": 0.1}, "sizes": [1.0, 0.5]}
    assert parse(line).plain() == line
    assert not check_terms([parse(line)], "")


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging"])
def test_class_scores_are_no_vectors(kind: str) -> None:
    shape = Shape.from_config(tiny.config("bert"))
    with pytest.raises(ObjectiveError, match=rf"^leaf\.l2 is about embedding tasks, this one is {kind}: add `only"):
        Objective([Term("leaf.l2")], shape, shape, kind=kind)
