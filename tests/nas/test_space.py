"""Spaces: what may be chosen, how it is drawn, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from transformers import BertConfig, DistilBertConfig

from compress.errors import SearchError
from compress.nas.config import Space, space_names
from compress.nas.space import Shapes, architecture_key
from compress.nas.study import SAMPLERS, make_sampler
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes
from compress.training.objective import Objective

BERT = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
STAGE = {"lr": 1e-3, "objective": [{"loss": "hinton.soft_targets"}]}
PAPER = {"title": "A test", "authors": "Nobody", "year": 2025, "url": "https://example.org"}


def tree(axes: Mapping[str, Any], mode: str = "supernet", **more: Any) -> dict[str, Any]:
    supernet = {"supernet": {"distill": "supernet", **STAGE}} if mode == "supernet" else {}
    return {
        "name": "test", "paper": PAPER, "about": "A test.", "mode": mode, "axes": dict(axes), **supernet,
        "short": {"distill": "short", **STAGE}, "final": [{"distill": "final", **STAGE}], **more,
    }  # fmt: skip


def space(axes: Mapping[str, Any], mode: str = "supernet", **more: Any) -> Space:
    return Space.from_tree(tree(axes, mode, **more), "test.yaml")


def shapes(axes: Mapping[str, Any], mode: str = "supernet", teacher: Any = BERT, **more: Any) -> Shapes:
    return Shapes.from_space(space(axes, mode, **more), teacher)


@pytest.mark.parametrize("name", space_names())
def test_our_spaces_have_students_and_survive_their_yaml(name: str) -> None:
    found = Space.load(name)
    assert Space.from_tree(yaml.safe_load(found.to_yaml()), name) == found
    drawn = Shapes.from_space(found, BERT).drawn(5, seed=0)
    assert len({architecture_key(choice) for choice in drawn}) == 5
    assert all(Shapes.from_space(found, BERT).config(choice).vocab_size == BERT.vocab_size for choice in drawn)


def test_a_space_that_extends_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: width-depth\nabout: Mine.\naxes: {layers: [2, 3]}\n", encoding="utf-8")
    found, base = Space.load(str(file)), Space.load("width-depth")
    assert (found.name, found.about, found.axes) == ("mine", "Mine.", {**base.axes, "layers": (2, 3)})
    assert (found.stages, found.rungs) == (base.stages, base.rungs)
    file.write_text("extends: widthdepth\n", encoding="utf-8")
    with pytest.raises(SearchError, match=r"no such space: 'widthdepth'\. Did you mean 'width-depth'"):
        Space.load(str(file))
    file.write_text("- layers\n", encoding="utf-8")
    with pytest.raises(SearchError, match="expected a mapping with axes and stages, found list"):
        Space.load(str(file))


def test_our_spaces_are_listed() -> None:
    assert space_names() == ["albert", "autotinybert", "dynabert", "mobilebert", "npu", "width-depth"]


def test_autotinyberts_space_is_that_of_its_code() -> None:
    """searcher.py: 1 to 8 layers, widths of 128 to 768 by 16, feed-forward widths of 128 to 3,072 by 32."""
    found = Space.load("autotinybert")
    base = {"layers": 12, "hidden": 768, "ffn": 3072}
    counts = {axis: [round(share * base[axis]) for share in values] for axis, values in found.axes.items()}  # type: ignore[operator]
    assert counts == {
        "layers": [*range(1, 9)], "hidden": [*range(128, 769, 16)], "ffn": [*range(128, 3073, 32)],
    }  # fmt: skip
    assert found.supernet is not None and found.supernet.step is not None
    assert found.supernet.step.options == {"random": 1, "largest": False, "smallest": False}
    shape = Shape.from_config(BERT)
    objective = Objective(found.supernet.objective, shape, shape, kind="classification")
    assert objective.teacher_wants == {"layers", "scores", "logits"}
    assert objective.pairs[:2] == [[(5, 5)], [(5, 5)]]


def test_counts_shares_ranges_and_single_values() -> None:
    found = shapes({"layers": {"from": 2, "to": 6, "step": 2}, "hidden": [192, 1.0], "ffn": 0.5})
    assert found.size() == 6
    assert {(one["layers"], one["hidden"], one["ffn"]) for one in found.every()} == {
        (layers, hidden, 768) for layers in (2, 4, 6) for hidden in (192, 384)
    }


def test_equal_students_have_one_key() -> None:
    implied, said = (list(shapes(axes).every()) for axes in ({"hidden": [192]}, {"heads": [6], "hidden": [192]}))
    assert [architecture_key(one) for one in implied] == [architecture_key(one) for one in said]
    assert architecture_key({"layers": 1, "hidden": 2}) == architecture_key({"hidden": 2, "layers": 1})
    assert architecture_key({"layers": 1, "hidden": 2}) != architecture_key({"layers": 2, "hidden": 1})
    assert len(architecture_key({})) == 16


def test_widths_divide_into_heads() -> None:
    found = shapes({"layers": [2, 3], "hidden": [192, 256, 384], "heads": [3, 4, 8]})
    pairs = {(one["hidden"], one["heads"]) for one in found.every()}
    assert pairs == {(192, 3), (192, 4), (192, 8), (256, 4), (256, 8), (384, 3), (384, 4), (384, 8)}
    assert found.size() == 2 * len(pairs)
    assert found.dropped == ()


def test_impossible_values_are_dropped_and_named() -> None:
    found = shapes({"hidden": [192, 256], "heads": [5, 8]}, "plain")
    assert {(one["hidden"], one["heads"]) for one in found.every()} == {(192, 8), (256, 8)}
    assert found.dropped == ("heads 5: not possible in any bert student",)


def test_tied_axes_are_one_choice() -> None:
    found = shapes({"heads": [0.25, 0.5, 1.0], "ffn": [0.25, 0.5, 1.0]}, tied=[["heads", "ffn"]])
    assert [(one["heads"], one["ffn"]) for one in found.every()] == [(3, 384), (6, 768), (12, 1536)]


def test_a_width_of_dynabert_narrows_heads_neurons_and_stream() -> None:
    found = Shapes.from_space(Space.load("dynabert"), BERT)
    widths = {(one["hidden"], one["heads"], one["ffn"]) for one in found.every()}
    assert widths == {(96, 3, 384), (192, 6, 768), (288, 9, 1152), (384, 12, 1536)}
    assert found.size() == 12


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_suggest_only_possible_students(sampler: str) -> None:
    found = shapes({"layers": [1, 2, 6], "hidden": [192, 256, 384], "heads": [3, 4, 8], "precision": ["int8", "fp32"]})
    known = {architecture_key(one) for one in found.every()}
    study = optuna.create_study(sampler=make_sampler(sampler, 0))
    seen = set()
    for number in range(12):
        trial = study.ask()
        seen.add(architecture_key(found.suggest(trial)))
        study.tell(trial, number % 5)
    assert seen <= known
    assert len(seen) > 4


def test_a_trials_parameters_give_the_same_student() -> None:
    found = shapes({"layers": [1, 2, 6], "hidden": [192, 256, 384], "heads": [3, 4, 8]})
    trial = optuna.create_study(sampler=make_sampler("random", 0)).ask()
    choice = found.suggest(trial)
    assert found.suggest(optuna.trial.FixedTrial(trial.params)) == choice  # type: ignore[arg-type]


def test_a_supernets_student_is_a_part_of_the_teacher() -> None:
    found = shapes({"hidden": [192], "layers": [3]})
    (choice,) = found.every()
    assert found.sizes(choice) == Sizes(layers=3, hidden=192, heads=6, head_size=32, ffn=1536)
    assert (found.config(choice).hidden_size, found.config(choice).num_hidden_layers) == (192, 3)


def test_a_plain_student_follows_its_spec() -> None:
    found = shapes({"config.hidden_act": ["relu"], "share.ffn": [1, 2], "layers": [2]}, "plain", student="bert")
    one, other = found.every()
    assert (found.spec(one).share, found.spec(other).share) == ({"ffn": 1}, {"ffn": 2})
    assert found.config(one).hidden_act == "relu"


@pytest.mark.parametrize(
    ("axes", "mode", "said"),
    [
        ({"layers": {"from": 4, "to": 2, "step": 1}}, "supernet", "from 4, to 2, step 1: expected `to` of at least"),
        ({"layers": []}, "supernet", "axes.layers: is an empty list"),
        ({"layers": [2, 2]}, "supernet", "axes.layers: has 2 twice"),
        ({"layers": [0]}, "supernet", "axes.layers: 0; expected a count"),
        ({"layers": [1.5]}, "supernet", "axes.layers: 1.5; expected a count, or a share"),
        ({"leyers": [2]}, "supernet", "axes.leyers: no such axis. Did you mean 'layers'?"),
        ({"layers": {"from": 1, "to": 2}}, "supernet", "expected a list of values, or {from:, to:, step:}"),
        ({"config.hidden_act": ["relu"]}, "supernet", "axes.config.hidden_act: is the same for all students"),
        ({"share.ffn": [1]}, "supernet", "use mode: plain"),
        ({"precision": ["int9"]}, "supernet", "axes.precision: no 'int9'. Did you mean 'int8'?"),
        ({"bottleneck": [64]}, "plain", "here, use config.intra_bottleneck_size"),
    ],
)
def test_invalid_axes_are_refused(axes: Mapping[str, Any], mode: str, said: str) -> None:
    with pytest.raises(SearchError) as error:
        space(axes, mode)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("axes", "mode", "teacher", "said"),
    [
        ({"layers": [2, 9], "ffn": [4000]}, "supernet", BERT, "axes.layers: 9 is more than the teacher's 6"),
        ({"layers": [2, 9], "ffn": [4000]}, "supernet", BERT, "axes.ffn: 4000 is more than the teacher's 1536"),
        ({"embedding": [64]}, "supernet", BERT, "axes.embedding: bert models have no such size"),
        ({"hidden": [200], "heads": [7]}, "plain", BERT, "the space is empty: no student has hidden and heads"),
        (
            {"config.hidden_act": ["relu", "glue"]},
            "plain",
            BERT,
            "config.hidden_act glue: transformers cannot build a bert",
        ),
        ({"config.hiden_act": ["relu"]}, "plain", BERT, "Did you mean 'hidden_act'?"),
        ({"share.ffn": [9]}, "plain", BERT, "the student has 6 layers, expected 1..6"),
        ({"bottleneck": [9]}, "supernet", DistilBertConfig(), "axes.bottleneck: distilbert models have no such size"),
    ],
)
def test_values_impossible_with_the_teacher_are_refused(
    axes: Mapping[str, Any], mode: str, teacher: Any, said: str
) -> None:
    with pytest.raises(SearchError) as error:
        shapes(axes, mode, teacher)
    assert said in str(error.value)


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    bad = tree({"layers": [0]}, shorts=1)
    bad["short"]["objective"] = [{"loss": "hinton.soft_targets", "wieght": 2, "weight": "much"}]
    bad["supernet"]["epoch"] = 3
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    with pytest.raises(SearchError) as error:
        Space.load(str(tmp_path / "bad.yaml"))
    said = str(error.value)
    assert "bad.yaml: shorts: no such setting. Did you mean 'short'?" in said
    assert "bad.yaml: short.objective[0]: weight: expected a number" in said
    assert "supernet.epoch: no such setting. Did you mean 'epochs'?" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rungs": [0.5]}, "rungs: 0.5; expected growing shares that end in 1"),
        ({"student": "bert"}, "student: a supernet's students are parts of the teacher"),
        ({"supernet": None}, "supernet: is missing"),
        ({"tied": [["layers", "fnn"]]}, "tied: 'fnn' is not among the axes"),
        ({"tied": [["layers", "ffn"]]}, "tied: layers has 1 values, ffn has 2 values"),
        ({"final": "tinybrt"}, "final: no recipe 'tinybrt'. Did you mean 'tinybert'?"),
    ],
)
def test_contradictions_are_refused(more: Mapping[str, Any], said: str) -> None:
    with pytest.raises(SearchError) as error:
        space({"layers": [2], "ffn": [64, 128]}, **more)
    assert said in str(error.value)


def test_final_may_name_a_recipe() -> None:
    found = space({"layers": [2]}, final="tinybert")
    assert [stage.name for stage in found.final] == ["intermediate", "prediction"]
    assert "tinybert.attention" in found.to_yaml()


def test_overrides_and_misspelled_names() -> None:
    assert Space.load("width-depth", ["supernet.lr=1e-3", "axes.layers=[2]"]).axes["layers"] == (2,)
    with pytest.raises(SearchError, match="Did you mean 'width-depth'"):
        Space.load("width-deth")
