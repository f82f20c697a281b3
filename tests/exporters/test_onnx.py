"""An exported file computes what the model does, at any shape, and exporting leaves the model alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from compress.errors import ExportError
from compress.exporters import onnx as export
from compress.exporters.onnx import parity, prepare_mask, to_onnx
from tests import tiny


def batches(config: Any) -> Iterator[dict[str, Tensor]]:
    """Batches as a collator makes them: padded rows of several lengths, the second text of a pair marked."""
    generator = torch.Generator().manual_seed(1)
    for rows, tokens in ((1, 1), (4, 9), (2, 48)):
        ids = torch.randint(5, config.vocab_size, (rows, tokens), generator=generator)
        length = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
        mask = (torch.arange(tokens) < length).long()
        yield {
            "input_ids": ids.where(mask == 1, config.pad_token_id),
            "attention_mask": mask,
            "token_type_ids": (torch.arange(tokens) >= length // 2).long() * mask,
            "labels": torch.zeros(rows, dtype=torch.long),
        }


def test_parity_detects_another_model(tmp_path: Path) -> None:
    to_onnx(tiny.bert(3, seed=0), tmp_path / "model.onnx")
    other = tiny.bert(3, seed=1)
    assert parity(other, tmp_path / "model.onnx", batches(other.config)) > 0.01
    with pytest.raises(ExportError, match="at least one batch"):
        parity(other, tmp_path / "model.onnx", [])


def test_masked_tokens_never_matter(tmp_path: Path) -> None:
    to_onnx(tiny.bert(), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    ids, mask = torch.tensor([[2, 9, 25, 3, 17, 30]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    feeds = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": (0 * ids).numpy()}
    (masked,) = session.run(None, feeds)
    (cut,) = session.run(None, {name: array[:, :4] for name, array in feeds.items()})
    (seen,) = session.run(None, {**feeds, "attention_mask": (0 * mask + 1).numpy()})
    assert abs(masked - cut).max() < 1e-6 < abs(masked - seen).max()


@pytest.mark.parametrize(
    ("family", "settings", "back"),
    [
        ("qwen2", {}, True),
        ("qwen2", {"is_causal": False}, False),
        ("bert", {}, False),
        ("bert", {"is_decoder": True}, True),
    ],
)
def test_a_token_sees_what_follows_it_unless_the_config_says_otherwise(
    family: str, settings: dict[str, Any], back: bool
) -> None:
    config = AutoConfig.for_model(family, **settings)
    mask = prepare_mask(torch.ones(1, 3, dtype=torch.long), config).expand(1, 1, 3, 3)
    hidden = mask[0, 0] < 0
    assert torch.equal(hidden, torch.ones(3, 3).triu(1).bool() if back else torch.zeros(3, 3).bool())


def test_exporting_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny.bert().to(torch.bfloat16).train()
    model.bert.encoder.layer[0].eval()
    model.classifier.weight.requires_grad_(False)
    model.classifier.bias.grad = torch.ones_like(model.classifier.bias)

    def state() -> Any:
        modes = [module.training for module in model.modules()]
        parameters = [(p.dtype, p.requires_grad, p.data_ptr(), p.grad is None) for p in model.parameters()]
        return modes, parameters, model.config.to_dict(), model.config._attn_implementation, torch.get_rng_state().sum()

    before, weights = state(), [parameter.clone() for parameter in model.parameters()]
    to_onnx(model, tmp_path / "model.onnx")
    assert state() == before
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert parity(model, tmp_path / "model.onnx", batches(model.config)) < 2e-5  # float32 logits of the bf16 weights


def test_metadata_of_a_file(tmp_path: Path) -> None:
    model = tiny.bert(id2label={0: "no", 1: "yes"}, problem_type="single_label_classification")
    to_onnx(model, tmp_path / "model.onnx", opset=18)
    file = onnx.load_model(tmp_path / "model.onnx")
    assert file.producer_name == "compress"
    assert file.opset_import[0].version == 18
    properties = {entry.key: entry.value for entry in file.metadata_props}
    assert json.loads(properties["compress.labels"]) == ["no", "yes"]
    assert properties["compress.task"] == "single_label_classification"
    assert "SkipLayerNormFusion" in properties["compress.session"]
    onnx.checker.check_model(file)


class Baked(BertForSequenceClassification):
    """Takes the number of tokens for a constant when traced."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        logits = super().forward(input_ids=input_ids, **inputs).logits
        return SequenceClassifierOutput(logits=logits + len(input_ids[0].tolist()))


def test_sizes_that_were_traced_as_constants_are_detected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="Baked: the ONNX file's logits differ from the model's by"):
        to_onnx(Baked(tiny.bert().config), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_nan_weights_are_found_and_an_earlier_file_stays(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("earlier")
    model = tiny.bert()
    model.classifier.weight.data[0, 0] = float("nan")
    with pytest.raises(ExportError, match="may hold NaN"):
        to_onnx(model, tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "earlier"


class Silent(BertForSequenceClassification):
    """Answers under a name that nobody looks for."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {"answer": super().forward(input_ids=input_ids, **inputs).logits}


def test_models_without_logits_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match=r"Silent: cannot be exported .* expected an encoder, alone"):
        to_onnx(Silent(tiny.bert().config), tmp_path / "model.onnx")
    monkeypatch.setattr(export, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(ExportError, match="at most 2 GB"):
        to_onnx(tiny.bert(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
