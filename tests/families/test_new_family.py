"""A family that only this folder knows is sliced, counted, exported and pruned: no existing file changes for it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)
from transformers.models.bert.modeling_bert import BertEmbeddings

from compress import families
from compress.config.stages import StudentSpec
from compress.exporters.onnx import parity, to_onnx
from compress.latency.features import Terms
from compress.models.flops import flops_per_token
from compress.models.student import build, choose_units
from compress.pruning.l0 import Gates, TargetSizes, fold
from compress.pruning.shapes import count_parameters
from compress.pruning.stage import read_record
from compress.records.latency import Setting
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.select import choose, magnitude
from compress.slicing.sizes import Sizes
from tests import pruning_given, tiny
from tests.families.test_work import TOKENS, counted
from tests.slicing.families import logits
from tests.slicing.oracle import masked

SMALLER = {"layers": 2, "hidden": 24, "heads": 3, "ffn": 40}


class TwigConfig(BertConfig):
    model_type = "twig"


class TwigEmbeddings(BertEmbeddings):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bark = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor:
        return self.bark(super().forward(*args, **inputs))


class TwigModel(BertModel):
    config_class = TwigConfig

    def __init__(self, config: Any, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.embeddings = TwigEmbeddings(config)
        self.post_init()


class TwigForSequenceClassification(BertForSequenceClassification):
    config_class = TwigConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = TwigModel(config)
        self.post_init()


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    AutoConfig.register("twig", TwigConfig, exist_ok=True)
    AutoModel.register(TwigConfig, TwigModel, exist_ok=True)
    AutoModelForSequenceClassification.register(TwigConfig, TwigForSequenceClassification, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "__path__", [*families.__path__, str(Path(__file__).parent / "toy")])
        families.find.cache_clear()
        yield
    families.find.cache_clear()
    sys.modules.pop("compress.families.twig", None)


@pytest.fixture
def twig() -> Any:
    """Random, its gains and biases too."""
    model = tiny.model("twig", layers=3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_it_is_found_by_its_name() -> None:
    assert families.find("twig").name == "twig"
    assert "twig" in families.names("rules")


def test_it_is_sliced(twig: Any) -> None:
    plan = SlicePlan.from_model(twig)
    kept = choose(plan, magnitude(twig), Sizes.from_request(twig.config, **SMALLER))
    small = slice_model(twig, kept)
    with masked(twig, kept):
        expected = logits(twig)
    torch.testing.assert_close(logits(small), expected, rtol=1e-5, atol=1e-5)
    assert count_parameters(twig, plan, kept.sizes) == sum(each.numel() for each in small.parameters())


def test_a_student_is_cut_out_of_it(twig: Any) -> None:
    spec = StudentSpec(layers=2, hidden=24, heads=3, ffn=40, init="teacher")
    kept = choose_units(spec, twig)
    assert kept is not None
    assert torch.equal(logits(build(spec, twig, kept=kept).eval()), logits(slice_model(twig, kept)))


def test_it_is_exported_and_its_work_counted(twig: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    to_onnx(twig, path, segments=False)
    assert parity(twig, path, [tiny.batch(), tiny.batch((3, 9))]) < 2e-5
    terms = Terms.from_config(twig.config, Setting(seq=TOKENS))
    found = counted(path)
    assert found["with weights"] == terms.counts["projections"] + terms.counts["feed_forward"]
    assert found["attention"] == terms.counts["attention"]
    assert terms.flops == pytest.approx(flops_per_token(twig, TOKENS) * TOKENS)


def test_its_units_are_gated(twig: Any) -> None:
    plan = SlicePlan.from_model(twig)
    gates = Gates(plan, TargetSizes.from_request(twig, plan, SMALLER), begin=0.0)
    for each in gates.log_alpha.values():
        each.data.normal_()
    gates.attach(twig)
    twig.eval()
    expected, values, kept = logits(twig), gates.values, gates.target.kept(gates.active())
    gates.detach()
    fold(twig, plan, values)
    torch.testing.assert_close(logits(slice_model(twig, kept)), expected, rtol=1e-5, atol=1e-5)


def test_it_is_pruned_by_the_command(tmp_path: Path, hastened: None) -> None:
    given = pruning_given.given(tmp_path / "given")
    given["model"] = tiny.checkpoint(tmp_path / "model", tiny.model("twig", labels=2, layers=3))
    run = pruning_given.pruned(given, tmp_path / "run", layers=2, hidden=24, heads=3, ffn=0.5)
    after = read_record(run / "stages" / "all" / "model")["sizes"]["after"]
    assert after == {"layers": 2, "hidden": 24, "heads": 3, "head_size": 8, "ffn": 32}
    loaded = AutoModelForSequenceClassification.from_pretrained(run / "stages" / "recover" / "model")
    assert type(loaded) is TwigForSequenceClassification
