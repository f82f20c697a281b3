"""The sandwich step: what it minimises is the sum of what its subnets would, drawn anew in every step and process."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compress.config import reference
from compress.config.loader import locate
from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.task import Task
from compress.errors import ObjectiveError, PruneError
from compress.models.signals import read
from compress.nas.supernet import Supernet
from compress.papers import dynabert, hinton, tinybert
from compress.slicing.cut import rank_units, reorder_units
from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, inner_weights
from compress.training.objective import Objective
from compress.training.scoring import Scoring
from compress.training.stage import run_stage
from compress.training.teacher_cache import teacher_cache
from tests import children, learning, tiny

TERMS = (
    Term("hinton.soft_targets", 0.7, options={"temperature": 2.0}),
    Term("tinybert.embeddings", 0.3, project="stream"),
    Term("tinybert.hidden", 0.2, project="stream"),
)
WIDTHS = [0.25, 0.5, 0.75]


def step(
    terms: Sequence[Term] = TERMS, *, dropout: bool = False, shown: Any = None, seed: int = 3, **options: Any
) -> dynabert.Sandwich:
    """The same weights each time: a student as wide as its teacher of 6 layers, and half as deep."""
    settings = {} if dropout else learning.NO_DROPOUT
    student = tiny.model("bert", layers=3, seed=1, **settings)
    teacher = tiny.model("bert", layers=6, seed=2)
    torch.manual_seed(seed)
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    made: dynabert.Sandwich = Call("dynabert.Sandwich", {"widths": WIDTHS, **options})(
        student, teacher, objective, shown=shown
    )
    return made


def batch(count: int = 8) -> dict[str, Tensor]:
    rows = learning.rows()
    return learning.collate()([rows[n] for n in range(count)])


def gradients(made: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}


# What is minimised


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_loss_is_the_sum_over_separately_computed_models(power: float) -> None:
    made, inputs = step(layers=[2], power=power), batch()
    map_TD = made.objective.projections["stream"].weight
    total = torch.zeros(())
    whole = Sizes.from_config(made.student.config)
    for _, sizes in made.subnets():
        layers = made.supernet.layers(sizes)
        wants = made.objective.student_wants
        mine, theirs = read(made.supernet.extract(sizes), inputs, wants), made.distillation.read_teacher(inputs)
        assert theirs is not None
        assert mine.logits is not None
        first, mask = map_TD[:, : sizes.hidden], mine.mask_BL
        loss = 0.7 * hinton.soft_targets(mine.logits, theirs.logits, mask, temperature=2.0)  # type: ignore[arg-type]
        loss = loss + 0.3 * tinybert.embeddings(linear(mine.embeddings, first), theirs.embeddings, mask)
        for m, source in enumerate(layers):  # layer 0, 1, 2 of the whole learns from 1, 3, 5
            loss = loss + 0.2 * tinybert.hidden(linear(mine.layers[m], first), theirs.layers[2 * source + 1], mask)
        total = total + loss * (inner_weights(sizes) / inner_weights(whole)) ** power
    found = made(**inputs)
    torch.testing.assert_close(found["loss"], total, rtol=1e-5, atol=1e-5)
    if not power:
        parts = {name: 2 * part if name.startswith("random") else part for name, part in found.items()}
        torch.testing.assert_close(sum(parts.values()) - parts["loss"], found["loss"], rtol=1e-5, atol=1e-5)


def test_the_whole_alone_is_a_plain_distillation() -> None:
    made, inputs = step(random=0, smallest=False), batch()
    plain = made.distillation(**inputs)["loss"]
    loss = made(**inputs)["loss"]
    torch.testing.assert_close(loss, plain)
    mine, theirs = gradients(made, loss), gradients(made, plain)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_all_of_the_student_and_the_map_learn_and_the_teacher_does_not() -> None:
    made = step()
    found = gradients(made, made(**batch())["loss"])
    assert found.keys() == {name for name, _ in made.named_parameters()}
    assert not any(each.requires_grad for each in made.distillation.teacher.parameters())  # type: ignore[union-attr]
    assert not any("teacher" in name for name in made.state_dict())
    narrow = step(largest=False, random=0)
    found = gradients(narrow, narrow(**batch())["loss"])
    map_TD = found["distillation.objective.projections.stream.weight"]
    assert bool((map_TD[:, :8] != 0).all(0).any())
    assert not map_TD[:, 8:].any()


def test_a_cached_teacher_is_the_teacher(tmp_path: Path) -> None:
    online = step()
    cache = teacher_cache(
        online.distillation.teacher, learning.rows(), learning.collate(), tmp_path,  # type: ignore[arg-type]
        wants=online.objective.teacher_wants, layers=[1, 3, 5],
    )  # fmt: skip
    assert step(shown=cache).distillation.teacher is cache
    torch.testing.assert_close(step(shown=cache)(**batch())["loss"], online(**batch())["loss"], rtol=1e-5, atol=1e-5)


def test_a_stage_gives_the_cache_to_a_step_that_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    seen = []
    monkeypatch.setattr("compress.training.stage.train", lambda made, *_, **__: seen.append(made))
    stage = learning.stage(
        TERMS, cache_teacher=True, step=reference.Call("dynabert.Sandwich", {"widths": WIDTHS}), evaluate=0
    )
    teacher = SimpleNamespace(model=tiny.model("bert", layers=6), answers_any_rows=True, digest="a teacher's")
    material: Any = SimpleNamespace(
        rows=lambda *_: learning.rows(), tokenizer=tiny.tokenizer(), collate=learning.collate(), bf16=False,
        kind="classification", task=Task, console=SimpleNamespace(print=lambda *_: None), seconds=lambda _: None,
    )  # fmt: skip
    run = SimpleNamespace(seed=1, main=False)
    run_stage(stage, tiny.model("bert", layers=3), teacher, material, run)  # type: ignore[arg-type]
    assert type(seen[0].distillation.teacher).__name__ == "TeacherCache"


@pytest.mark.parametrize("depth", ["even", "last"])
def test_the_kept_weights_are_those_of_the_best_mean_of_all_subnets(
    depth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("compress.training.stage.train", lambda made, *_, **given: seen.update(given, step=made))
    monkeypatch.setattr("compress.training.stage.choose_scoring", lambda *_, **__: Scoring(of_encoder, 1))
    options = {"widths": [0.5], "layers": [2], "depth": depth}
    stage = learning.stage(TERMS, step=reference.Call("dynabert.Sandwich", options))
    context: Any = SimpleNamespace(
        rows=lambda *_: learning.rows(), tokenizer=tiny.tokenizer(), collate=learning.collate(), bf16=False,
        kind="classification", task=Task, console=None, seconds=lambda _: None,
    )  # fmt: skip
    teacher: Any = SimpleNamespace(model=tiny.model("bert", layers=6), answers_any_rows=True)
    run_stage(stage, tiny.model("bert", layers=3), teacher, context, SimpleNamespace(seed=1, main=False))  # type: ignore[arg-type]
    made: dynabert.Sandwich = seen["step"]
    shapes = [Sizes.from_request(made.student.config, **each) for each in (
        {}, {"layers": 2}, {"hidden": 0.5, "heads": 0.5, "ffn": 0.5},
        {"layers": 2, "hidden": 0.5, "heads": 0.5, "ffn": 0.5},
    )]  # fmt: skip
    scores = [of_encoder(Supernet(made.student, depth=depth).extract(sizes))["score"] for sizes in shapes]
    found = seen["scoring"].score(made.student)
    assert found["score"] == pytest.approx(sum(scores) / 4)
    assert sorted(found[f"subnet_{n}"] for n in range(4)) == pytest.approx(sorted(scores))
    assert len(set(scores)) == 4


def of_encoder(model: Any) -> dict[str, float]:
    """A score that depends on the units and layers that a model has."""
    return {"score": sum(each.abs().sum().item() for each in model.bert.encoder.parameters())}


# Which subnets


def names(made: dynabert.Sandwich) -> list[str]:
    return [name for name, _ in made.subnets()]


def test_the_largest_the_smallest_and_others() -> None:
    made = step(layers=[1, 2])
    assert names(made) == ["largest", "smallest", "random", "random"]
    largest, smallest, *drawn = [sizes for _, sizes in made.subnets()]
    assert largest == Sizes.from_config(made.student.config)
    assert (smallest.layers, smallest.hidden, smallest.heads, smallest.ffn) == (1, 8, 1, 16)
    assert len(set(drawn)) == 2
    assert not {largest, smallest} & set(drawn)
    seen = set()
    for number in range(60):
        made.begin(number, 60)
        seen |= {sizes for _, sizes in made.subnets()}
    assert len(seen) == 4 * 3, "every width with every depth is drawn"


def test_draws_depend_on_the_step_number_only() -> None:
    made, again, other = step(layers=[1, 2]), step(layers=[1, 2]), step(layers=[1, 2], seed=4)
    drawn = []
    for number in range(8):
        made.begin(number, 8)
        drawn.append(made.subnets())
        torch.rand(7)
    for number in (5, 2, 7):
        again.begin(number, 8)
        assert again.subnets() == drawn[number] == again.subnets()
    assert len({str(each) for each in drawn}) > 4
    of_other_seed = []
    for number in range(8):
        other.begin(number, 8)
        of_other_seed.append(other.subnets())
    assert of_other_seed != drawn


def test_each_process_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step(layers=[1, 2], largest=False, smallest=False, random=1)
    drawn = {}
    for rank in (0, 1):
        monkeypatch.setattr(
            dynabert, "PartialState", lambda rank=rank: SimpleNamespace(process_index=rank, num_processes=2)
        )
        for number in range(20):
            made.begin(number, 20)
            drawn[rank, number] = made.subnets()
    assert sum(drawn[0, number] != drawn[1, number] for number in range(20)) > 10
    assert any(drawn[1, number] != drawn[0, number + 1] for number in range(19)), "nor what the other draws next"


def test_one_random_subnet_like_autotinybert() -> None:
    made = step(largest=False, smallest=False, random=1)
    seen = set()
    for number in range(40):
        made.begin(number, 40)
        assert names(made) == ["random"]
        seen |= {sizes for _, sizes in made.subnets()}
    assert len(seen) == 4, "the whole student among them"


def test_impossible_sizes_are_left_out() -> None:
    made = step(widths=[], heads=[2, 4], hidden=[16, 32], ffn=[0.5], random=99)
    found = {(sizes.hidden, sizes.heads, sizes.ffn) for _, sizes in made.subnets()}
    assert found == {(hidden, heads, ffn) for hidden in (16, 32) for heads in (2, 4) for ffn in (32, 64)}
    made = step(widths=[], heads=[3, 4], hidden=[24, 16], random=99)
    found = {(sizes.hidden, sizes.heads) for _, sizes in made.subnets()}
    assert found == {(32, 4), (24, 4), (24, 3), (16, 4), (16, 2)}, "three heads do not divide 16 or 32"


def test_among_those_that_a_search_looks_at() -> None:
    shapes = [{"layers": 2, "hidden": 16, "heads": 2, "ffn": 16}, {"layers": 1, "ffn": 8}]
    made = step(widths=[], among=shapes, random=5)
    assert names(made) == ["largest", "smallest", "random"]
    found = [(sizes.layers, sizes.hidden, sizes.heads, sizes.ffn) for _, sizes in made.subnets()]
    assert found == [(3, 32, 4, 64), (2, 16, 2, 16), (1, 32, 4, 8)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"widths": [], "heads": [3], "hidden": []}, "not a multiple of 3 heads"),
        ({"widths": [0.5, 2.0]}, "widths: 2; expected"),
        ({"heads": [2]}, "remove those"),
        ({"widths": [], "among": [{"head": 2}]}, "no size 'head'. Did you mean 'heads'"),
        ({"among": [{"heads": 2}]}, "remove the other sizes"),
        ({"widths": [], "among": [{"heads": 3}]}, "3 heads"),
        ({"widths": [], "layers": [9]}, "more than the model's 3"),
        ({"widths": [], "largest": False, "smallest": False}, "no subnet"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PruneError, match=problem):
        if options == {"widths": [], "largest": False, "smallest": False}:
            options = {**options, "random": 0}
        step(**options)


def test_terms_that_cannot_compare_a_subnet() -> None:
    with pytest.raises(ObjectiveError, match="project: true"):
        step([Term("tinybert.hidden")])
    with pytest.raises(ObjectiveError, match="the student has heads"):
        step([Term("mobilebert.attention")])
    step([Term("tinybert.attention")])
    with pytest.raises(ObjectiveError, match="give the stage one"):
        dynabert.Sandwich(tiny.model("bert"), tiny.model("bert"), None, sizes=dynabert.SubnetOptions())
    step([Term("tinybert.hidden")], widths=[], ffn=WIDTHS)
    step([Term("minilm.value_relations", layers="last", options={"heads": 2})])


def test_the_last_layer_of_a_subnet_is_always_compared() -> None:
    made = step([Term("tinybert.hidden", layers="last", project=True)], layers=[1, 2], depth="first", widths=[])
    assert made(**batch())["smallest.tinybert.hidden"] > 0


# Training


def stage(**changes: Any) -> Stage:
    return learning.stage(TERMS, evaluate=0, schedule="constant", checkpoint=3, **changes)


def trained(path: Path, *, interrupted: int | None = None, **options: Any) -> dynabert.Sandwich:
    made = step(layers=[1, 2], dropout=True, **options)
    if interrupted is not None:
        learning.interrupt(made, interrupted)
    learning.train(made, stage(), path)
    return made


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "halved", interrupted=5)
    again = trained(tmp_path / "halved")
    for name, tensor in learning.weights(whole).items():  # type: ignore[arg-type]
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_training_on_the_tokens_in_use_is_training(tmp_path: Path) -> None:
    """Tokens that never occur keep their values, all else learns as without."""
    rows = learning.rows(vocabulary=10)
    made, dense = step(), step()
    dense.only_rows = False
    before = made.student.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    for each, folder in ((made, "some"), (dense, "all")):
        learning.train(each, stage(weight_decay=0.0), tmp_path / folder, data=rows)
    for name, tensor in learning.weights(dense).items():  # type: ignore[arg-type]
        torch.testing.assert_close(made.state_dict()[name], tensor, rtol=0, atol=1e-5, msg=name)
    after = made.student.get_input_embeddings().weight  # type: ignore[operator]
    assert torch.equal(after[20:], before[20:])
    assert not torch.equal(after[6:12], before[6:12])


def test_the_recipe_has_the_authors_numbers_and_augmentation() -> None:
    """README.md of DynaBERT in huawei-noah/Pretrained-Language-Model, steps 2 to 4, and run_glue.py's defaults."""
    own = Recipe.load("prune-dynabert")
    assert {each.max_length for each in own.stages} == {128}
    assert {(each.epochs, each.batch, each.weight_decay) for each in own.training} == {(3, 32, 0)}
    near = Call("tinybert.near_words", {"copies": 20, "probability": 0.4, "candidates": 15, "limit": 1000})
    assert [each.augment for each in own.training] == [near, near, None]
    assert [each.evaluate for each in own.training[:2]] == [1, 1], "the best of all subnets is kept"
    line = next(
        line for line in locate("prune-dynabert").read_text(encoding="utf-8").splitlines() if "tinybert.augment" in line
    )
    asked = line.partition('"')[2].rpartition('"')[0]
    width, depth, _ = Recipe.load("prune-dynabert", [asked]).training
    theirs = Call("tinybert.augment", {"copies": 20, "probability": 0.4, "candidates": 15})
    assert (width.augment, depth.augment) == (theirs, near)
    assert Recipe.load("tinybert-aug").training[0].augment == theirs


def test_subnets_learn_together(tmp_path: Path) -> None:
    """Each of them is nearer to the teacher afterwards than before."""
    terms = [Term("hinton.soft_targets")]
    made, inputs = step(terms), batch(16)
    before = made(**inputs)
    learning.train(made, learning.stage(terms, steps=40, evaluate=0), tmp_path)
    made.begin(0, 1)
    after = made(**inputs)
    for name in ("largest", "smallest", "random"):
        assert after[f"{name}.hinton.soft_targets"] < 0.7 * before[f"{name}.hinton.soft_targets"]


STAGE = """
  - distill: NAME
    step: {by: dynabert.Sandwich, widths: [0.5], layers: [1], random: RANDOM}
    steps: 6
    batch: 16
    max_length: 32
    lr: 1.0e-3
    eps: 1.0e-4
    evaluate: 0
    objective:
      - {loss: hinton.soft_targets, temperature: 2.0}
      - {loss: tinybert.hidden, project: true}
"""


@pytest.mark.slow
def test_two_processes_train_like_one_with_more_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnets that are drawn are trained in the second stage alone."""
    from safetensors.torch import load_file

    teacher = tiny.checkpoint(tmp_path / "teacher", tiny.bert(initializer_range=0.1, **learning.NO_DROPOUT))
    stages = STAGE.replace("NAME", "fixed").replace("RANDOM", "0") + STAGE.replace("NAME", "drawn").replace(
        "RANDOM", "1"
    )
    text = tiny.RECIPE.partition("student:")[0] + "student: {init: teacher}\nstages:" + stages
    arguments = ["distill", "--teacher", teacher, "--recipe", tiny.recipe(tmp_path / "recipe", text), "--data"]
    arguments += [tiny.reviews(tmp_path / "data"), "--precision", "fp32", "--gate", "warn"]
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    assert children.run(arguments, tmp_path / "one", children.does_not_ship) == 0, children.said(tmp_path / "one")
    started = children.start_together(arguments, tmp_path / "two", children.does_not_ship, processes=2)
    assert [children.finish(child) for child in started] == [0, 0], children.said(tmp_path / "two")
    apart = {}
    for stage in ("fixed", "drawn"):
        one, two = (load_file(tmp_path / run / "stages" / stage / "model/model.safetensors") for run in ("one", "two"))
        apart[stage] = max((one[name] - two[name]).abs().max().item() for name in one)
    assert apart["fixed"] < 1e-6 < apart["drawn"] < 0.1


# Order before, prefix after


def test_the_order_of_units_is_undone_by_no_cut_but_the_prefix() -> None:
    """`first` rates so that what a prune stage then keeps is what the subnets are."""
    whole = tiny.model("bert", layers=3)
    plan = SlicePlan.from_model(whole)
    draw = torch.Generator().manual_seed(1)
    importance = {group: torch.rand(count, generator=draw) for group, count in plan.groups.items()}
    again, inputs = reorder_units(whole, importance), tiny.batch()
    torch.testing.assert_close(again(**inputs).logits, whole(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert rank_units(plan, importance).indices.keys() >= {group for group in plan.groups if group.axis == "ffn"}
    sizes = Sizes.from_request(whole.config, heads=2, hidden=16, ffn=0.5, layers=2)
    kept = choose(plan, dynabert.first(again, (), plan), sizes, layers="uniform")
    expected = choose(plan, None, sizes, layers=kept.layers)
    assert kept.layers == (0, 2)
    assert kept.indices.keys() == expected.indices.keys()
    assert all(torch.equal(kept.indices[group], expected.indices[group]) for group in expected.indices)
