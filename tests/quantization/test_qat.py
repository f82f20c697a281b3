"""Quantisation-aware training of a bundle: another bundle, trained for the int8 file it holds; resumable."""

from pathlib import Path

import onnx
import pytest
from datasets import Dataset

from compress.commands.quantize import _arguments_of_training, quantize, train_for_int8
from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters.artifact import Bundle
from compress.exporters.codebook import has_codebook
from compress.jobs.quantize import QuantizeRequest
from compress.training.codebook import rounded_table
from compress.training.trainer import StepTrainer
from tests import tiny
from tests.exporters.test_bundle import write

QUICK = ["stages.0.steps=3", "stages.0.batch=8", "stages.0.checkpoint=1", "stages.0.warmup=0"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, str]:
    folder = tmp_path_factory.mktemp("qat")
    task = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")
    return write(folder / "bundle", task=task), tiny.reviews(folder / "data")


def test_qat_makes_another_bundle_with_static_int8(
    places: tuple[Bundle, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    bundle, data = places
    real, asked = StepTrainer.compute_loss, []

    def interrupted(*args: object, **kwargs: object) -> object:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(StepTrainer, "compute_loss", interrupted)
    request = QuantizeRequest(bundle, data, method="qat", out=tmp_path / "new", overrides=QUICK)
    with pytest.raises(KeyboardInterrupt), train_for_int8(request):
        pass
    with pytest.raises(KeyboardInterrupt), train_for_int8(request):
        raise KeyboardInterrupt
    with train_for_int8(request) as made:
        assert len(asked) == 4, "two steps were kept, then all of them until somebody had done with them"
        assert (made.task, made.manifest.max_length) == (bundle.task, bundle.manifest.max_length)
        assert "MatMulIntegerToFloat" in {node.op_type for node in onnx.load_model(made.files()["int8"]).graph.node}
        assert made.manifest.parameters == bundle.manifest.parameters, "the whole model"
        assert made.manifest.files["model.safetensors"] != bundle.manifest.files["model.safetensors"]
    assert Bundle.load(bundle.path) == bundle
    assert not list((tmp_path / "home" / "qat").iterdir()), "what was kept for going on is gone"


def test_the_bundle_itself_is_not_overwritten(places: tuple[Bundle, str]) -> None:
    bundle, data = places
    for out in (None, bundle.path):
        with pytest.raises(BundleError, match="give --out another folder"):
            quantize(bundle, data, method="qat", out=out)


def test_the_tokens_stay_those_of_the_former_model(places: tuple[Bundle, str], tmp_path: Path) -> None:
    bundle, data = places
    request = QuantizeRequest(bundle, data, method="qat", out=tmp_path / "new")
    assert _arguments_of_training(request)["vocabulary"] == "full"


def test_a_table_on_a_codebook_stays_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    task = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")
    model = tiny.bert(vocab_size=1200)
    with rounded_table(model, Dataset.from_dict({"input_ids": [[5, 6, 7]]})):
        bundle = write(tmp_path / "bundle", task=task, model=model)
    data = tiny.reviews(tmp_path / "data")
    request = QuantizeRequest(bundle, data, method="qat", out=tmp_path / "new", overrides=QUICK)
    with train_for_int8(request) as made:
        assert has_codebook(bundle.files()["int8"])
        assert has_codebook(made.files()["int8"])
