"""Of all variants the fastest that is right is kept; what is slower, wrong or broken never takes a file's place."""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnxruntime import __version__ as runtime_version
from packaging.version import Version
from transformers import AutoModelForSequenceClassification

from compress import tuning
from compress.benchmark.devices import open_device
from compress.errors import ExportError
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.onnx import to_onnx
from compress.exporters.rewrite.forms import FORM_KEY, SHIPPED_FORM
from compress.exporters.rewrite.graph import products
from compress.exporters.session import CERTIFICATE_KEY as CERTIFICATE
from compress.exporters.session import SESSION_KEY, EncodedRow, metadata, opset_of, read_model
from compress.records.certificate import VariantResult
from compress.records.latency import DeviceError, Setting
from compress.records.run_report import Report
from compress.tuning import Tuned, fp32_variants, tune
from tests.quantization.graphs import Rule, exported
from tests.quantization.test_mixed import bundle

TURNED = "fp32, one token at the end, tokens first"
TURNED_INT8 = "dynamic int8, one token at the end, tokens first"
STATIC = "static int8, minmax, one token at the end, tokens first"
SETTINGS = (Setting(seq=8), Setting(seq=16))

fuses_attention = pytest.mark.skipif(
    Version(runtime_version) < Version("1.31"), reason="onnxruntime finds the attention of these graphs since 1.31"
)


def fastest(*names: str) -> Callable[[str, Path], float]:
    return lambda name, _: 1.0 if name in names else 2.0


def form(path: Path) -> str:
    return metadata(read_model(path)).get(FORM_KEY, "as traced")


def operators(path: Path) -> set[str]:
    return {node.op_type for node in read_model(path).graph.node}


@pytest.fixture(autouse=True, scope="module")
def made_once() -> Iterator[None]:
    """Trace each model once per opset; let onnxruntime fuse, quantise and open each graph once."""
    traces: dict[tuple[str, int], Path] = {}
    fused: dict[tuple[bytes, bool], onnx.ModelProto | None] = {}
    quantised: dict[tuple[bytes, str], bytes] = {}
    counts: dict[bytes, dict[str, int]] = {}
    trace, fuse = tuning._export, tuning.attention_fused
    quantise, count = tuning.quantize_dynamic, tuning.count_fused

    def export(bundle: Bundle, folder: Path) -> Path:
        weights = bundle.manifest.files["model.safetensors"].sha256
        key = weights, opset_of(read_model(bundle.files()["fp32"]))
        if key not in traces:
            traces[key] = Path(tempfile.mkdtemp(dir=scratch))
            trace(bundle, traces[key])
        return Path(shutil.copyfile(traces[key] / "traced.onnx", folder / "traced.onnx"))

    def attention_fused(model: onnx.ModelProto, *, norms: bool) -> onnx.ModelProto | None:
        key = model.SerializeToString(deterministic=True), norms
        if key not in fused:
            fused[key] = fuse(model, norms=norms)
        return copy.deepcopy(fused[key])

    def quantize_dynamic(source: Path, target: Path, **options: Any) -> None:
        key = source.read_bytes(), repr(options)
        if key not in quantised:
            quantise(source, target, **options)
            quantised[key] = target.read_bytes()
        target.write_bytes(quantised[key])

    def count_fused(path: Path) -> dict[str, int]:
        content = path.read_bytes()
        if content not in counts:
            counts[content] = count(path)
        return counts[content]

    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_export", export)
        patch.setattr(tuning, "attention_fused", attention_fused)
        patch.setattr(tuning, "quantize_dynamic", quantize_dynamic)
        patch.setattr(tuning, "count_fused", count_fused)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Evaluator]:
    return bundle(tmp_path_factory.mktemp("tuned") / "bundle")


@pytest.fixture
def shipped(written: tuple[Bundle, Evaluator], tmp_path: Path) -> Bundle:
    return written[0].copy_to(tmp_path / "bundle")


@pytest.fixture
def evaluator(written: tuple[Bundle, Evaluator]) -> Evaluator:
    return written[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def named(tuned: Tuned, name: str) -> VariantResult:
    return next(each for each in tuned.tried if each.variant == name)


def test_the_fastest_right_file_takes_the_place_of_the_bundles(shipped: Bundle) -> None:
    before = contents(shipped.path)
    tuned = tune(shipped, device=Rule(fastest(TURNED)), settings=SETTINGS)
    (chosen,) = tuned.chosen
    assert chosen.variant == TURNED
    assert not [each.variant for each in tuned.tried if "sleeping" in each.variant], "with one thread there is no need"
    assert chosen.ratio == {str(setting): 0.5 for setting in SETTINGS}
    assert chosen.difference < 1e-5
    assert chosen.fused["FusedMatMul"] == 4
    again = Bundle.load(shipped.path)
    assert metadata(read_model(again.files()["fp32"]))[FORM_KEY] == "one token at the end, tokens first"
    assert (shipped.path / BUNDLE_FILES["int8"]).read_bytes() == before[BUNDLE_FILES["int8"]], (
        "without rows nothing judges int8"
    )
    report = Report.from_json(shipped.path / "report.json")
    assert report.tuning == tuned.tried
    assert again.predict(["good film"], precision="fp32")


def test_session_settings_that_won_travel_in_the_file(shipped: Bundle) -> None:
    tune(shipped, device=Rule(fastest("fp32, fused norms")), settings=SETTINGS)
    result = metadata(read_model(shipped.path / BUNDLE_FILES["fp32"]))
    assert json.loads(result[SESSION_KEY]) == {}
    tune(Bundle.load(shipped.path), device=Rule(fastest(TURNED)), settings=SETTINGS)
    result = metadata(read_model(shipped.path / BUNDLE_FILES["fp32"]))
    assert "SkipLayerNormFusion" in json.loads(result[SESSION_KEY])["optimization.disable_specified_optimizers"]


def test_sleeping_threads_are_tried_with_several_threads(shipped: Bundle, evaluator: Evaluator) -> None:
    name, small = f"{TURNED}, sleeping threads", f"{TURNED_INT8}, sleeping threads"
    device, several = Rule(fastest(name, small)), [Setting(threads=2, seq=8)]
    tuned = tune(shipped, device=device, settings=several, evaluator=evaluator, max_drop=1.0)
    assert [each.variant for each in tuned.chosen] == [name, small]
    for precision in ("fp32", "int8"):
        result = json.loads(metadata(read_model(shipped.path / BUNDLE_FILES[precision]))[SESSION_KEY])
        assert result["session.intra_op.allow_spinning"] == "0"
        assert "optimization.disable_specified_optimizers" in result
    assert Bundle.load(shipped.path).predict(["good film"])


def test_wrong_variants_are_not_raced(shipped: Bundle) -> None:
    before = contents(shipped.path)
    device = Rule(lambda name, _: 1.0 if "tokens first" in name else 2.0, lambda file: "tokens first" in form(file))
    tuned = tune(shipped, device=device, settings=SETTINGS)
    wrong = named(tuned, TURNED)
    assert not wrong.passed
    assert "logits differ" in wrong.reason
    assert not wrong.p50_ms
    assert TURNED not in device.raced
    assert [each.variant for each in tuned.chosen] == ["fp32 of the bundle"]
    assert (shipped.path / BUNDLE_FILES["fp32"]).read_bytes() == before[BUNDLE_FILES["fp32"]]


def test_a_little_faster_is_not_worth_a_change(shipped: Bundle) -> None:
    before = contents(shipped.path)
    tuned = tune(shipped, device=Rule(lambda name, _: 0.99 if name == TURNED else 1.0), settings=SETTINGS)
    assert [each.variant for each in tuned.chosen] == ["fp32 of the bundle"]
    after = contents(shipped.path)
    assert {name for name in after if after[name] != before.get(name)} == {"report.json", "manifest.json"}


def test_int8_is_judged_on_rows_and_certified(shipped: Bundle, evaluator: Evaluator) -> None:
    calibration = list(evaluator.rows.select(range(24)))
    device = Rule(fastest(TURNED, STATIC))
    tuned = tune(
        shipped, device=device, settings=SETTINGS, evaluator=evaluator, calibration=calibration, max_drop=0.1, data="d"
    )
    assert [each.variant for each in tuned.chosen] == [TURNED, STATIC]
    chosen = named(tuned, STATIC)
    assert chosen.ratio == {str(setting): 0.5 for setting in SETTINGS}, "beside the bundle's own fp32"
    assert chosen.agreement is not None
    assert chosen.fused["MatMulIntegerToFloat"] > 0
    small = shipped.path / BUNDLE_FILES["int8"]
    assert "MatMulIntegerToFloat" in operators(small)
    assert Bundle.load(shipped.path)
    (proof,) = Report.from_json(shipped.path / "report.json").certificates
    assert (proof.method, proof.rows, proof.data, proof.artefact) == (STATIC, len(evaluator), "d", BUNDLE_FILES["int8"])
    assert json.loads(metadata(read_model(small))[CERTIFICATE])["method"] == STATIC


def test_other_rows_than_those_that_chose_it_can_certify_int8(shipped: Bundle, evaluator: Evaluator) -> None:
    few = evaluator.subsample(5)
    device = Rule(fastest(TURNED, TURNED_INT8))
    tune(shipped, device=device, settings=SETTINGS, evaluator=evaluator, proof=few, split="test", max_drop=1.0)
    (proof,) = Report.from_json(shipped.path / "report.json").certificates
    assert (proof.rows, proof.split) == (5, "test")


def test_int8_that_loses_too_much_is_not_chosen(shipped: Bundle, evaluator: Evaluator) -> None:
    def spoils(file: Path) -> bool:
        return "tokens first" in form(file) and "int8" in metadata(read_model(file)).get("compress.precision", "")

    before = (shipped.path / BUNDLE_FILES["int8"]).read_bytes()
    tuned = tune(shipped, device=Rule(fastest(TURNED_INT8), spoils), settings=SETTINGS, evaluator=evaluator)
    wrong = named(tuned, TURNED_INT8)
    assert not wrong.passed
    assert "points and changes" in wrong.reason
    assert "int8 of the bundle" in [each.variant for each in tuned.chosen]
    assert (shipped.path / BUNDLE_FILES["int8"]).read_bytes() == before


def test_products_that_stay_in_float_stay_so(tmp_path: Path) -> None:
    made, evaluator = bundle(tmp_path / "bundle", outlier_in=(0,))
    from compress.exporters.int8 import quantize_dynamic

    name = "/model/bert/encoder/layer.0/output/dense/MatMul"
    quantize_dynamic(made.files()["fp32"], tmp_path / "kept.onnx", keep=[name])
    made = made.put("int8", tmp_path / "kept.onnx")
    tuned = tune(made, device=Rule(fastest(TURNED_INT8)), settings=SETTINGS, evaluator=evaluator, max_drop=1.0)
    assert TURNED_INT8 in [each.variant for each in tuned.chosen]
    assert [each.name for each in products(read_model(made.path / BUNDLE_FILES["int8"]).graph)] == [name]
    (proof,) = Report.from_json(made.path / "report.json").certificates
    assert proof.kept == (name,)


def test_ratios_are_to_the_bundles_own_files(shipped: Bundle, evaluator: Evaluator) -> None:
    times = {"fp32 of the bundle": 4.0, "int8 of the bundle": 2.0, "fp32": 8.0}
    tuned = tune(shipped, device=Rule(lambda name, _: times.get(name, 3.95)), settings=SETTINGS, evaluator=evaluator)
    assert form(shipped.files()["fp32"]) == form(shipped.files()["int8"]) == str(SHIPPED_FORM)
    assert [each.variant for each in tuned.chosen] == ["fp32 of the bundle", "int8 of the bundle"]
    ratios = {each.variant: set(each.ratio.values()) for each in tuned.tried if each.variant in times}
    assert ratios == {"fp32 of the bundle": {1.0}, "int8 of the bundle": {0.5}, "fp32": {2.0}}


@pytest.mark.parametrize("opset", [12, 17])
def test_a_bundle_whose_file_is_as_traced_is_tuned_too(opset: int, shipped: Bundle, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(shipped.path)
    to_onnx(model, tmp_path / "old.onnx", opset=opset, form=None)
    old = shipped.put("fp32", tmp_path / "old.onnx")
    chosen = "fp32, one token at the end, rows first"
    tuned = tune(old, device=Rule(fastest(chosen)), settings=SETTINGS)
    assert [each.variant for each in tuned.chosen] == [chosen]
    assert opset_of(read_model(shipped.path / BUNDLE_FILES["fp32"])) == opset
    left = "the attention of 2 of 2 layers has an unknown form" if opset == 12 else ""
    assert named(tuned, chosen).reason == left


def test_tuning_again_begins_with_the_weights(shipped: Bundle) -> None:
    tune(shipped, device=Rule(fastest(TURNED)), settings=SETTINGS)
    other = "fp32, one token at the end, rows first"
    again = tune(Bundle.load(shipped.path), device=Rule(fastest(other)), settings=SETTINGS)
    assert named(again, "fp32 of the bundle").passed
    assert [each.variant for each in again.chosen] == [other]
    assert len(Report.from_json(shipped.path / "report.json").tuning) == len(again.tried)


def test_a_new_folder_leaves_the_bundle_alone(shipped: Bundle, tmp_path: Path) -> None:
    before = contents(shipped.path)
    tuned = tune(shipped, device=Rule(fastest(TURNED)), settings=SETTINGS, out=tmp_path / "new")
    assert contents(shipped.path) == before
    assert tuned.bundle.path == tmp_path / "new"
    assert FORM_KEY in metadata(read_model(Bundle.load(tmp_path / "new").files()["fp32"]))


def test_a_device_that_fails_leaves_the_bundle_alone(shipped: Bundle) -> None:
    before = contents(shipped.path)

    def gone(*_: object) -> float:
        raise DeviceError("rule: unplugged")

    with pytest.raises(DeviceError, match="unplugged"):
        tune(shipped, device=Rule(gone), settings=SETTINGS)
    assert contents(shipped.path) == before
    assert [path.name for path in shipped.path.parent.iterdir()] == ["bundle"]
    with pytest.raises(ExportError, match="at least one"):
        tune(shipped, device=Rule(fastest()), settings=[])


@fuses_attention
def test_variants_that_the_device_cannot_run_are_skipped(shipped: Bundle) -> None:
    class Plain(Rule):
        def logits(self, file: Path, rows: Sequence[EncodedRow]) -> list[NDArray[np.float32]]:
            if "Attention" in operators(file):
                raise DeviceError("rule: no operator Attention")
            return super().logits(file, rows)

    tuned = tune(shipped, device=Plain(fastest(TURNED)), settings=SETTINGS)
    assert "no operator Attention" in named(tuned, "fp32, onnxruntime's fused attention").reason
    assert [each.variant for each in tuned.chosen] == [TURNED]


@fuses_attention
def test_missing_fusions_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "deberta").mkdir()
    found = {each.name: each for each in fp32_variants(exported(tmp_path / "b.onnx", form=None), tmp_path / "bert")}
    assert found["fp32, onnxruntime's fused attention"].fused["Attention"] == 2
    assert not found["fp32, onnxruntime's fused attention"].warning
    assert not found[TURNED].warning
    assert not found["fp32"].warning
    # onnxruntime fuses norms of this exporter's graphs only after its own optimiser rearranged them
    assert "should run SkipLayerNormalization" in found["fp32, fused norms"].warning
    assert found["fp32, onnxruntime's fused attention, fused norms"].fused["SkipLayerNormalization"] == 4
    other = fp32_variants(exported(tmp_path / "d.onnx", "deberta-v2", form=None), tmp_path / "deberta")
    assert [each.name for each in other] == ["fp32", "fp32, fused norms", "fp32, one token at the end, rows first"]
    assert "the attention of 2 of 2 layers has an unknown form" in other[-1].warning
    for each in found.values():
        onnx.checker.check_model(each.path)


@pytest.mark.slow
def test_this_machine_races_real_files(shipped: Bundle, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TUNING_ROUNDS", 2)
    monkeypatch.setattr(tuning, "TUNING_RUNS", 2)
    with open_device("local") as device:
        tuned = tune(shipped, device=device, settings=[Setting(seq=16)], evaluator=evaluator, max_drop=0.1)
    assert all(each.p50_ms for each in tuned.tried if each.passed)
    assert len(tuned.chosen) == 2
    assert Bundle.load(shipped.path).predict(["good film"])
