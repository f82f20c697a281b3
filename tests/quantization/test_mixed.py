"""The int8 file keeps its score, or says which products had to stay in float32."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from datasets import Dataset

from compress.data.task import Task
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.rewrite.graph import Product, layer, products
from compress.exporters.session import read_model
from compress.quantization.certify import QuantizationEvaluator, ScoreDrop
from compress.quantization.select import attempt_as_written, keep_score
from compress.quantization.sensitivity import Mixed, estimate_costs, mix, race_products
from tests import learning, tiny
from tests.quantization.graphs import Rule

TASK = Task("classification", ("text",), "label", ("a", "b", "c"), "accuracy")


def bundle(path: Path, *, outlier_in: tuple[int, ...] = ()) -> tuple[Bundle, Evaluator]:
    """A bundle and an evaluator in which the fp32 model's own answers are right, so that fp32 scores 1.

    `outlier_in`: one inner neuron of these layers is huge and read by nobody: it changes nothing but the scale that all
    of its neighbours are quantised with.
    """
    torch.manual_seed(4)
    model = tiny.model("bert", layers=2, seed=4)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for linear in (layer.intermediate.dense, layer.output.dense):
                linear.weight.normal_(std=0.5)
        model.bert.pooler.dense.weight.normal_(std=1.0)
        model.classifier.weight.normal_(std=1.0)
        for at in outlier_in:
            layer = model.bert.encoder.layer[at]
            layer.intermediate.dense.bias[3] = 2000.0
            layer.output.dense.weight[:, 3] = 0.0
    shipped = tiny.bundle(path, model=model, task=TASK, max_length=24)
    rows = learning.rows(200)
    rows = rows.add_column("token_type_ids", [[0] * length for length in rows["length"]])
    answers = shipped.logits(rows, precision="fp32").argmax(1)
    return shipped, Evaluator(TASK, Dataset.from_dict({"label": answers}), rows)


def parts(shipped: Bundle) -> list[Product]:
    return products(read_model(shipped.files()["fp32"]).graph)


def outputs(shipped: Bundle) -> list[str]:
    """The products that read a feed-forward's inner layer, by layer."""
    return [each.name for each in parts(shipped) if layer(each.name).endswith(", output")]


Made = tuple[Bundle, Evaluator]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Make each bundle once; tests must not change it."""
    return cache(lambda *outliers: bundle(tmp_path_factory.mktemp("made") / "bundle", outlier_in=outliers))


def copy(made: Made, folder: Path) -> Made:
    return made[0].copy_to(folder / "bundle"), made[1]


@pytest.fixture(scope="module")
def kept(make: Callable[..., Made], tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Mixed]:
    """The bundle with an outlier in layer 0 within a limit of 0.05."""
    shipped, evaluator = copy(make(0), tmp_path_factory.mktemp("kept"))
    return keep_score(shipped, evaluator, limit=0.05, threads=1)[:2]


def check_kept(made: Made, kept: Bundle, mixed: Mixed, layer: int) -> None:
    evaluator = made[1]
    lost = 1 - evaluator.scores(made[0].logits(evaluator.rows))[TASK.metric]
    assert lost > 0.05, "all-int8 misses the limit"
    assert mixed.near
    assert mixed.keep == (outputs(made[0])[layer],)
    assert 1 - evaluator.scores(kept.logits(evaluator.rows))[TASK.metric] == pytest.approx(mixed.outcome.drop)
    assert mixed.outcome.drop <= 0.05
    nodes = {node.name: node.op_type for node in onnx.load(kept.files()["int8"]).graph.node}
    assert nodes[mixed.keep[0]] == "MatMul"
    assert "MatMulInteger" in nodes.values()
    Bundle.load(kept.path)


def test_only_the_product_with_the_error_stays_in_float32(
    make: Callable[..., Made], kept: tuple[Bundle, Mixed], tmp_path: Path
) -> None:
    check_kept(make(0), *kept, 0)
    shipped, evaluator = copy(make(1), tmp_path)
    check_kept(make(1), *keep_score(shipped, evaluator, limit=0.05, threads=1)[:2], 1)


def test_smoothing_is_preferred_to_float32(make: Callable[..., Made], tmp_path: Path) -> None:
    shipped, evaluator = copy(make(0), tmp_path)
    smoothed, mixed, method = keep_score(shipped, evaluator, limit=0.05, threads=1, rows=lambda: evaluator.rows)
    assert method.startswith("SmoothQuant static int8")
    assert (mixed.near, mixed.keep) == (True, ())
    nodes = onnx.load(smoothed.files()["int8"]).graph.node
    assert "MatMul" not in {node.op_type for node in nodes if "output" in node.name}
    assert [node.op_type for node in nodes].count("MatMulIntegerToFloat") == len(parts(shipped))


def test_the_price_names_the_limit_that_avoids_it(
    make: Callable[..., Made], kept: tuple[Bundle, Mixed], tmp_path: Path
) -> None:
    shipped, evaluator = copy(make(0), tmp_path)
    sizes = [each.files()["int8"].stat().st_size for each in (shipped, kept[0])]
    mixed = kept[1]
    assert mixed.cost is not None
    assert mixed.cost.max_drop == mixed.whole.least_limit > 0.05
    assert mixed.cost.mb == pytest.approx((sizes[1] - sizes[0]) / 1e6)
    assert "24 tokens" in mixed.cost.setting
    points = re.findall(r"--max-drop ([0-9.]+)", mixed.price())
    assert mixed.price().startswith(f"1 of {len(parts(shipped))} ")
    same, cheaper, _ = keep_score(shipped, evaluator, limit=float(points[0]) / 100, threads=1)
    assert (cheaper.keep, cheaper.sensitivity, cheaper.near) == ((), (), True)
    assert (cheaper.cost, cheaper.price()) == (None, "")
    assert same == shipped


def test_sensitivity_is_reported_for_each_product(make: Callable[..., Made], kept: tuple[Bundle, Mixed]) -> None:
    found = kept[1].sensitivity
    assert [each.product for each in found] == [each.name for each in parts(make(0)[0])]
    worst = max(found, key=lambda each: each.error)
    assert worst == max(found, key=lambda each: each.share)
    assert (worst.layer, worst.kept) == ("layer 0, output", True)
    assert worst.share > 0.5
    assert sum(each.kept for each in found) == 1


def test_an_unreachable_limit_keeps_only_what_matters(
    make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, evaluator = copy(make(0), tmp_path)
    for name in ("near", "keeps_score"):
        monkeypatch.setattr(ScoreDrop, name, lambda *_, **__: False)
    _, mixed, _ = keep_score(shipped, evaluator, limit=0.0, threads=1)
    assert mixed.keep == (outputs(shipped)[0],)
    assert not mixed.near


def test_of_two_equal_products_the_cheaper_is_tried_first(make: Callable[..., Made]) -> None:
    shipped, evaluator = make(0, 1)
    files, attempt = QuantizationEvaluator.from_bundle(shipped, evaluator, threads=1), attempt_as_written(shipped)
    names = outputs(shipped)
    for dear in names:
        costs = {each.name: 1e6 if each.name == dear else 1.0 for each in parts(shipped)}
        messages: list[str] = []
        mixed = mix(attempt.make, parts(shipped), files, limit=0.6, costs=lambda: costs, say=messages.append)  # noqa: B023
        assert dear not in mixed.keep
        assert mixed.outcome.near(0.6)
    both = mix(
        attempt.make, parts(shipped), files, limit=0.05, costs=lambda: estimate_costs(parts(shipped), graph(shipped))
    )
    assert set(both.keep) >= set(names)


def graph(shipped: Bundle) -> onnx.GraphProto:
    return read_model(shipped.files()["fp32"]).graph


def test_costs_come_from_a_race_of_few_files(make: Callable[..., Made]) -> None:
    shipped, _ = make(0)
    made: dict[str, tuple[str, ...]] = {}

    def write(target: Path, keep: tuple[str, ...]) -> None:
        made[target.name] = tuple(keep)
        target.touch()

    device = Rule(lambda _, file: 1.0 + 2.0 * len(made[file.name]))
    found = race_products(write, parts(shipped), graph(shipped), device, max_length=24)
    assert set(found.values()) == {2.0}
    assert found.keys() == {each.name for each in parts(shipped)}
    assert device.settings[0].seq == 24
    # all-int8, four shapes of weight (queries and keys hold the mask), pooler, classifier
    assert len(made) == 7


def test_dynamic_int8_keeps_products_and_heads_in_float32(make: Callable[..., Made], tmp_path: Path) -> None:
    shipped, _ = make(0)
    names = [each.name for each in parts(shipped)]
    for keep in (names[:1], names[-1:], names):
        attempt_as_written(shipped).make(tmp_path / "int8.onnx", keep=keep)
        found = onnx.load(tmp_path / "int8.onnx").graph
        assert [node.op_type for node in found.node].count("MatMulInteger") == len(names) - len(keep)
