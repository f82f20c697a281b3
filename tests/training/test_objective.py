"""Layer maps, projections, and refusals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.config.term import Term, layer_pairs
from compress.errors import ObjectiveError
from compress.models.signals import LayerAttention, Signals
from compress.papers import hinton, tinybert
from compress.slicing.shape import Shape
from compress.training.objective import Objective, check_terms, find_loss
from compress.training.reads import reads
from tests import tiny

TEACHER = Shape("bert", layers=12, hidden=24, heads=4, head_size=6, ffn=96, embedding=24, vocabulary=50, classes=3)
STUDENT = replace(TEACHER, layers=6)


def signals(shape: Shape, seed: int = 0, *, lengths: Sequence[int] = (5, 3)) -> Signals:
    torch.manual_seed(seed)
    mask = tiny.batch(lengths)["attention_mask"]
    B, L = mask.shape
    hidden = tuple(torch.randn(B, L, shape.hidden) for _ in range(shape.layers + 1))
    heads = [[torch.randn(B, shape.heads, L, shape.head_size) for _ in range(3)] for _ in range(shape.layers)]
    return Signals(mask, torch.randn(B, shape.classes), hidden, tuple(LayerAttention(*qkv) for qkv in heads))


# Layer maps


@pytest.mark.parametrize(
    ("layers", "students", "teachers", "taught_by"),
    [
        ("uniform", 4, 12, [2, 5, 8, 11]),
        ("uniform", 6, 12, [1, 3, 5, 7, 9, 11]),
        ("uniform", 3, 6, [1, 3, 5]),
        ("uniform", 4, 6, [0, 2, 3, 5]),
        ("uniform", 12, 12, list(range(12))),
        ("skip", 6, 12, [1, 3, 5, 7, 9]),
        ("skip", 3, 12, [3, 7]),
        ("first", 4, 12, [0, 1, 2, 3]),
        ("top", 4, 12, [8, 9, 10, 11]),
    ],
)
def test_named_maps(layers: str, students: int, teachers: int, taught_by: list[int]) -> None:
    assert layer_pairs(layers, students, teachers) == list(enumerate(taught_by))


def test_last_is_the_last_of_each_even_from_a_shallower_teacher() -> None:
    assert layer_pairs("last", 6, 12) == [(5, 11)]
    assert layer_pairs("last", 12, 6) == [(11, 5)]


def test_spread_serves_whichever_is_deeper() -> None:
    assert layer_pairs("spread", 6, 12) == layer_pairs("uniform", 6, 12)
    assert layer_pairs("spread", 12, 6) == [(1, 0), (3, 1), (5, 2), (7, 3), (9, 4), (11, 5)]
    assert layer_pairs("spread", 6, 4) == [(0, 0), (2, 1), (3, 2), (5, 3)]


def test_explicit_pairs_may_count_from_the_end() -> None:
    assert layer_pairs([(0, 3), (-1, -2), (1, 11)], 4, 12) == [(0, 3), (3, 10), (1, 11)]


@pytest.mark.parametrize("pair", [(4, 0), (0, 12), (-5, 0), (0, -13)])
def test_a_layer_that_does_not_exist_is_named_with_both_depths(pair: tuple[int, int]) -> None:
    message = rf"\[{pair[0]}, {pair[1]}\] does not exist.* 4 layers, the teacher 12, numbered from 0"
    with pytest.raises(ObjectiveError, match=message):
        layer_pairs([(0, 0), pair], 4, 12)


@pytest.mark.parametrize("layers", ["uniform", "skip", "first", "top"])
def test_a_deeper_student_needs_explicit_pairs(layers: str) -> None:
    with pytest.raises(ObjectiveError, match=r"the 6 student layers .* at most 4 layers, or explicit pairs"):
        layer_pairs(layers, 6, 4)


@pytest.mark.parametrize(("layers", "students"), [("skip", 1), ([], 4)])
def test_a_map_that_leaves_nothing_to_compare_is_refused(layers: Any, students: int) -> None:
    with pytest.raises(ObjectiveError, match="leaves none of"):
        layer_pairs(layers, students, 12)


def test_the_mapped_layers_are_those_compared() -> None:
    student, teacher = signals(STUDENT, 1), signals(TEACHER, 2)
    objective = Objective([Term("tinybert.hidden", 0.5, layers=((0, 3), (-1, 11)))], STUDENT, TEACHER)
    by_hand = 0.5 * (
        tinybert.hidden(student.layers[0], teacher.layers[3], student.mask_BL)
        + tinybert.hidden(student.layers[5], teacher.layers[11], student.mask_BL)
    )
    torch.testing.assert_close(objective(student, teacher)["tinybert.hidden"], by_hand)


# Parts


def test_parts_are_weighted_named_and_summed() -> None:
    terms = [
        Term("hinton.soft_targets", 2.0, options={"temperature": 3.0}),
        Term(hinton.soft_targets, 0.5),
        Term("tinybert.embeddings"),
    ]
    student, teacher = signals(STUDENT, 1), signals(TEACHER, 2)
    parts = Objective(terms, STUDENT, TEACHER)(student, teacher)
    assert list(parts) == ["hinton.soft_targets", "hinton.soft_targets#2", "tinybert.embeddings", "total"]
    softened = hinton.soft_targets(student.logits, teacher.logits, None, temperature=3.0)
    torch.testing.assert_close(parts["hinton.soft_targets"], 2.0 * softened)
    torch.testing.assert_close(
        parts["hinton.soft_targets#2"], 0.5 * hinton.soft_targets(student.logits, teacher.logits, None)
    )
    torch.testing.assert_close(parts["total"], sum(parts[name] for name in list(parts)[:-1]))


def test_an_objective_wants_the_signals_of_its_terms_only() -> None:
    terms = [Term("bert.labels"), Term("minilm.attention", layers="last")]
    objective = Objective(terms, STUDENT, TEACHER)
    assert objective.student_wants == {"logits", "scores"}
    assert objective.teacher_wants == {"scores"}


def test_only_serves_one_kind_of_task() -> None:
    terms = [
        Term("hinton.soft_targets", only=("classification",)),
        Term("hinton.soft_labels", only=("multilabel",)),
        Term("tinybert.hidden"),
    ]
    assert Objective(terms, STUDENT, TEACHER, kind="multilabel").names == ["hinton.soft_labels", "tinybert.hidden"]
    assert Objective(terms, STUDENT, TEACHER, kind="regression").names == ["tinybert.hidden"]
    assert len(Objective(terms, STUDENT, TEACHER).names) == 3
    with pytest.raises(ObjectiveError, match=r"no term .* serves a regression task: hinton\.soft_targets"):
        Objective(terms[:2], STUDENT, TEACHER, kind="regression")


def test_labels_that_are_not_there() -> None:
    student, teacher = signals(STUDENT), signals(TEACHER)
    for term in (Term("bert.labels"), Term("distilbert.masked_soft_targets")):
        with pytest.raises(ObjectiveError, match=f"{term.name} needs labels, but this batch has none"):
            Objective([term], STUDENT, TEACHER)(student, teacher)


def test_a_teacher_that_is_not_there() -> None:
    with pytest.raises(ObjectiveError, match=r"tinybert\.hidden: needs a teacher"):
        Objective([Term("tinybert.hidden")], STUDENT)


# Projections

NARROW = replace(STUDENT, hidden=16, heads=4, head_size=4)


def test_a_projection_bridges_widths_without_bias_once_for_all_layers_of_a_term() -> None:
    objective = Objective([Term("tinybert.hidden", project=True)], NARROW, TEACHER)
    ((name, projection),) = objective.projections.items()
    assert isinstance(projection, nn.Linear)
    assert (projection.in_features, projection.out_features, projection.bias) == (16, 24, None)
    student, teacher = signals(NARROW, 1), signals(TEACHER, 2)
    by_hand = sum(
        tinybert.hidden(student.layers[m] @ projection.weight.T, teacher.layers[n], student.mask_BL)
        for m, n in layer_pairs("uniform", 6, 12)
    )
    torch.testing.assert_close(objective(student, teacher)["total"], by_hand)
    assert [name for name, _ in objective.named_parameters()] == [f"projections.{name}.weight"]


def test_terms_project_on_their_own_unless_they_share_a_name() -> None:
    def projections(*projects: bool | str) -> int:
        terms = [
            Term(loss, project=project)
            for loss, project in zip(
                ("tinybert.embeddings", "tinybert.hidden", "tinybert.hidden"), projects, strict=True
            )
        ]
        return len(Objective(terms, NARROW, TEACHER).projections)

    assert projections(True, True, True) == 3
    assert projections("fit_dense", "fit_dense", "fit_dense") == 1
    assert projections("fit_dense", "fit_dense", True) == 2


def test_a_shared_projection_is_trained_by_every_term_that_names_it() -> None:
    terms = [Term("tinybert.embeddings", project="fit"), Term("tinybert.hidden", project="fit")]
    objective = Objective(terms, NARROW, TEACHER)
    student, teacher = signals(NARROW, 1), signals(TEACHER, 2)
    (weight,) = objective.parameters()
    parts = objective(student, teacher)
    by_term = [torch.autograd.grad(parts[name], weight, retain_graph=True)[0] for name in objective.names]
    assert all(gradient.any() for gradient in by_term)
    torch.testing.assert_close(torch.autograd.grad(parts["total"], weight)[0], by_term[0] + by_term[1])


# Refusals


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (
            "mobilebert.attention",
            {"heads": 2},
            r"mobilebert.attention .*scores.* heads 2 .*teacher 4: .*tinybert.attention.*minilm.*_relations",
        ),
        ("minilm.attention", {"heads": 3}, r"minilm.attention .* heads 3 .*teacher 4: give the student 4 heads"),
        ("minilm.value_relation", {"heads": 2}, r"minilm.value_relation .*values.* heads 2 .* 4: "),
        ("tinybert.hidden", {"hidden": 16}, r"tinybert.hidden .*layers.* width 16 .*teacher 24: add `project: true`"),
        ("pkd.patience", {"hidden": 16}, r"pkd.patience .* width 16 .*teacher 24: add `project: true`"),
        ("tinybert.embeddings", {"hidden": 16}, r"tinybert.embeddings .*embeddings.* width 16 .*teacher 24"),
        ("hinton.soft_targets", {"classes": 2}, r"hinton.soft_targets .*logits.* classes 2 .*teacher 3: .*same labels"),
        ("distilbert.soft_targets", {"vocabulary": 40}, r"distilbert.soft_targets .* vocabulary 40 .* 50: .*tokenizer"),
    ],
)
def test_shapes_that_cannot_be_compared(loss: str, changes: Mapping[str, int], message: str) -> None:
    """The message says which loss, both sizes, and the remedy."""
    with pytest.raises(ObjectiveError, match=message):
        Objective([Term(loss)], replace(STUDENT, **changes), TEACHER)
    Objective([Term(loss)], STUDENT, TEACHER)


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_attention_scores_bridge_any_number_of_heads(heads: int) -> None:
    student = replace(STUDENT, heads=heads, head_size=8)
    mine, theirs = signals(student, 1), signals(TEACHER, 2)
    found = Objective([Term("tinybert.attention", layers="last")], student, TEACHER)(mine, theirs)["total"]
    expected = tinybert.attention(mine.scores[-1], theirs.scores[-1], mine.mask_BL)
    torch.testing.assert_close(found, expected)


def test_relations_bridge_any_heads_and_widths() -> None:
    student = replace(STUDENT, hidden=16, heads=2, head_size=8)
    terms = [
        Term(f"minilm.{each}_relations", options={"heads": 8}, layers="last") for each in ("query", "key", "value")
    ]
    parts = Objective(terms, student, TEACHER)(signals(student, 1), signals(TEACHER, 2))
    assert all(part.isfinite() and part > 0 for part in parts.values())


def test_value_relation_accepts_any_head_size() -> None:
    student = replace(STUDENT, hidden=16, head_size=4)
    objective = Objective([Term("minilm.value_relation", layers="last")], student, TEACHER)
    assert objective(signals(student, 1), signals(TEACHER, 2))["total"] > 0


@pytest.mark.parametrize(("heads", "side", "width"), [(12, "student", 16), (16, "teacher", 24)])
def test_relation_heads_must_divide_both_widths(heads: int, side: str, width: int) -> None:
    student = replace(STUDENT, hidden=16, heads=2, head_size=8)
    message = f"{heads} relation heads do not divide the {side}'s attention width {width}"
    with pytest.raises(ObjectiveError, match=message):
        Objective([Term("minilm.key_relations", options={"heads": heads})], student, TEACHER)


def test_mobilebert_attends_in_its_bottleneck() -> None:
    """128 stream, 4 heads over a bottleneck of 32: 32 relation heads are too many for its queries, 16 are not."""
    shape = Shape.from_config(tiny.config("mobilebert", hidden=64))
    assert (shape.hidden, shape.heads, shape.head_size) == (64, 4, 4)
    Objective([Term("minilm.query_relations", options={"heads": 16})], shape, shape)
    with pytest.raises(ObjectiveError, match="attention width 16"):
        Objective([Term("minilm.query_relations", options={"heads": 32})], shape, shape)


# What shows without models


@reads("layers")
def mine(student_BLD: Tensor, teacher_BLD: Tensor, mask_BL: Tensor, *, power: float = 1.0) -> Tensor:
    return (student_BLD - teacher_BLD).abs().pow(power).mean()


def plain(student_BLD: Tensor, teacher_BLD: Tensor) -> Tensor:
    return (student_BLD - teacher_BLD).abs().mean()


def needy(student_BLD: Tensor, teacher_BLD: Tensor, *, power: float) -> Tensor:
    return (student_BLD - teacher_BLD).pow(power).mean()


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Term("tinybert.hiden"), "no loss 'tinybert.hiden'. Did you mean 'tinybert.hidden'?"),
        (Term("tinybret.hidden"), "no loss 'tinybret.hidden': no paper 'tinybret'. Did you mean 'tinybert'?"),
        (Term("tinybert.mean_over"), "no loss 'tinybert.mean_over'"),
        (Term("reading.reads"), "no paper 'reading'"),
        (Term("no.such.module"), "no loss 'no.such.module'"),
        (Term("tests.tiny.model"), "no loss 'tests.tiny.model'"),
        (Term(tiny.model), "tests.tiny.model does not declare what it reads"),
        (Term(mine, reads="logits"), "already declares that it reads layers: remove `reads`"),
        (Term(plain, reads="logitz"), "reads 'logitz'. Did you mean 'logits'?"),
        (Term(plain, reads="layers", power=2), "has no option 'power'"),
        (Term(tiny.model, reads="layers"), "expected def model(student, teacher[, mask], *, option=...)"),
        (Term(print, reads="layers"), "expected def print(student, teacher[, mask], *, option=...)"),
        (Term(lambda student, teacher, mask, power=2: student, reads="layers"), "(student, teacher, mask, power=2)"),
        (Term(lambda student: student, reads="layers"), "(student)"),
        (Term(lambda student, teacher, **more: student, reads="layers"), "**more"),
        (Term("hinton.soft_targets", temperature=0), "temperature: Input should be greater than 0, found 0"),
        (Term("hinton.soft_targets", temperature="warm"), "temperature: "),
        (Term("minilm.value_relations", heads=0), "heads: Input should be greater than 0, found 0"),
        (Term("hinton.soft_targets", temperature="2.0"), "temperature: Input should be a valid number, found '2.0'"),
        (Term("gkd.divergence", beta=1.5), "beta: Input should be less than or equal to 1, found 1.5"),
        (Term(needy, reads="layers"), "needs the option 'power'"),
        (
            Term("hinton.soft_targets", options={"temprature": 2.0}),
            "no option 'temprature'. Did you mean 'temperature'?",
        ),
        (Term("hinton.soft_targets", options={"wieght": 2.0}), "no option 'wieght'. Did you mean 'weight'?"),
        (Term("hinton.soft_targets", options={"mask_BL": 2.0}), "no option 'mask_BL'"),
        (Term("tinybert.attention", project=True), "reads scores, which cannot be projected; remove `project`"),
        (Term("hinton.soft_targets", layers="last"), "reads logits, which is not per layer; remove `layers`"),
    ],
)
def test_problems_of_a_term(term: Term, message: str) -> None:
    problems = check_terms([Term("tinybert.hidden"), term], "stages[0]")
    assert len(problems) == 1
    assert problems[0].startswith("stages[0].objective[1]: ")
    assert message in problems[0]
    with pytest.raises(ObjectiveError) as error:
        Objective([term], STUDENT, TEACHER)
    assert message in str(error.value)


def test_all_problems_at_once() -> None:
    terms = [Term("tinybert.hiden"), Term("tinybert.hidden"), Term("hinton.soft_targets", options={"t": 1, "u": 2})]
    places = [problem.partition(":")[0] for problem in check_terms(terms, "stages[1]")]
    assert places == ["stages[1].objective[0]", "stages[1].objective[2]", "stages[1].objective[2]"]


def test_your_own_loss_is_a_function_with_or_without_mark_and_mask() -> None:
    student, teacher = signals(STUDENT, 1), signals(TEACHER, 2)
    terms = [Term(mine, layers="last", power=1), Term(plain, reads="layers", layers="last")]
    marked, unmarked = (Objective([term], STUDENT, TEACHER)(student, teacher) for term in terms)
    expected = mine(student.layers[-1], teacher.layers[-1], student.mask_BL)
    assert marked["total"] == unmarked["total"] == expected
    assert list(marked) == [f"{__name__}.mine", "total"]
    assert find_loss(terms[0]).function is mine


@pytest.mark.parametrize("loss", [lambda student, teacher: student - teacher, lambda student, teacher: 1.0])
def test_a_loss_returns_one_number(loss: Callable[..., Any]) -> None:
    objective = Objective([Term(loss, reads="layers")], STUDENT, TEACHER)
    with pytest.raises(ObjectiveError, match="expected one number"):
        objective(signals(STUDENT, 1), signals(TEACHER, 2))


@pytest.mark.parametrize(
    ("signal", "per"), [("logits", "example"), ("pair", "example"), ("scores", "pair"), ("layers", "token")]
)
def test_what_a_mean_usually_runs_over(signal: str, per: str) -> None:
    assert find_loss(Term(plain, reads=signal)).reading.per == per
    assert find_loss(Term(reads(signal)(lambda student, teacher: student))).reading.per == per
