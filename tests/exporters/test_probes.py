"""The texts on which a file is compared with its model: as long as it is made for, and where attention changes."""

import copy
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from transformers import BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from compress.errors import LONGEST_REASON, ExportError, first_reason, shorten
from compress.exporters import probes
from compress.exporters.onnx import CHECKED_KEY, outputs_of, to_onnx
from compress.exporters.probes import Probe, choose_probes
from compress.exporters.session import metadata, open_session, quiet
from compress.families.family import Family
from compress.slicing.shape import positions, token_rows
from tests import command, every_family, tiny
from tests.campaign.cases import WHOLE, draw

MOST = 5e-5


def difference(model: Any, file: Path, tokens: int) -> float:
    """Compute the largest difference between the answers of model and file to one text, relative to the largest."""
    ids = torch.randint(5, every_family.VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    if model.config.is_encoder_decoder:
        ids[:, -1] = model.config.eos_token_id
    session = open_session(file)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    batch = {node.name: batch[node.name] for node in session.get_inputs()}
    with torch.no_grad():
        expected = outputs_of(copy.deepcopy(model)(**batch))
    found = session.run(list(expected), {name: tensor.numpy() for name, tensor in batch.items()})
    pairs = zip(found, expected.values(), strict=True)
    return max(float(np.abs(one - other.numpy()).max() / max(1.0, other.abs().max().item())) for one, other in pairs)


# Which texts


def test_the_longest_text_is_the_one_the_file_is_made_for() -> None:
    assert choose_probes(tiny.bert())[-1] == Probe(1, 64) or choose_probes(tiny.bert())[-1] == Probe(2, 64)
    assert choose_probes(tiny.bert(), 20)[-1].tokens == 20
    assert choose_probes(tiny.bert(), 500)[-1].tokens == 64, "no model reads more tokens than it has positions for"
    assert choose_probes(every_family.encoder("xlnet"))[-1].tokens == probes.PROBED_LENGTH
    assert choose_probes(every_family.encoder("xlnet"), 1000)[-1].tokens == 1000


def test_texts_are_compared_where_attention_changes() -> None:
    lengths = [probe.tokens for probe in choose_probes(every_family.encoder("gpt_neo"), 100)]
    assert {every_family.WINDOW, every_family.WINDOW + 1, 100} <= set(lengths)
    t5 = every_family.classifier("t5", relative_attention_num_buckets=12, relative_attention_max_distance=50)
    assert {12, 13, 50, 51, 100} <= {probe.tokens for probe in choose_probes(t5, 100)}
    assert probes.changing_lengths(every_family.config("longformer")) == [every_family.WINDOW]


def test_a_batch_with_padding_is_among_them_and_long_texts_are_alone() -> None:
    shapes = choose_probes(every_family.encoder("xlnet"), 200)
    assert any(shape.rows > 1 for shape in shapes)
    assert all(shape.rows == 1 for shape in shapes if shape.tokens > probes.BATCHED)
    batch = probes.draw(every_family.encoder("bert"), Probe(2, 9), segments=True)
    assert list(batch) == ["input_ids", "attention_mask", "token_type_ids"]
    assert batch["attention_mask"].sum(1).tolist() == [5, 9]
    assert probes.draw(every_family.encoder("bert"), Probe(1, 9), segments=False)["attention_mask"].sum() == 9


def test_a_comparison_takes_seconds_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = every_family.encoder("xlnet")
    monkeypatch.setattr(probes, "MOST_WORK", 1e8)
    affordable = probes.affordable_length(model)
    linear = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert 64 < affordable < 2000
    assert linear * affordable + 4 * 2 * 32 * affordable**2 < 2e8
    assert choose_probes(model, 10**5)[-1].tokens == affordable
    monkeypatch.setattr(probes, "MOST_SCORES", 4 * 100**2)
    assert choose_probes(model, 10**5)[-1].tokens == 100


def test_the_file_says_up_to_how_many_tokens_it_was_compared(tmp_path: Path) -> None:
    to_onnx(every_family.encoder("bert"), tmp_path / "model.onnx", max_length=90)
    assert metadata(onnx.load_model(tmp_path / "model.onnx"))[CHECKED_KEY] == "90"


# What they find


class Near(BertForSequenceClassification):
    """Answers otherwise for texts of more than 80 tokens, which a tracer does not see."""

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutput:
        logits = super().forward(input_ids=input_ids, **inputs).logits
        return SequenceClassifierOutput(logits=logits + (1.0 if input_ids.shape[1] > 80 else 0.0))


def test_what_only_long_texts_show_is_found_and_the_length_that_works_is_named(tmp_path: Path) -> None:
    model = Near(every_family.config("bert"))
    with pytest.raises(ExportError, match=r"Near: .* on 160 tokens, .*give max_length 64, up to which"):
        to_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    to_onnx(model, tmp_path / "model.onnx", max_length=64)
    assert difference(model.eval(), tmp_path / "model.onnx", 64) < MOST


def test_a_window_that_is_not_in_the_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask without T5Gemma's windows is right for short texts."""
    monkeypatch.setattr("compress.families.find", partial(Family, prepared_mask=True))
    with pytest.raises(ExportError, match=r"T5GemmaForSequenceClassification: the ONNX file's logits differ"):
        to_onnx(every_family.classifier("t5gemma"), tmp_path / "model.onnx")


@pytest.mark.parametrize("family", ["big_bird", "bigbird_pegasus"])
def test_a_bigbird_of_sparse_attention_is_exported_for_texts_that_it_reads_in_full(family: str, tmp_path: Path) -> None:
    model = every_family.classifier(family, attention_type="block_sparse")
    with pytest.raises(ExportError, match=r"attention_type: block_sparse .*more than 28 tokens.*give max_length 28"):
        to_onnx(model, tmp_path / "model.onnx", max_length=29)
    to_onnx(model, tmp_path / "model.onnx", max_length=28)
    assert max(difference(model, tmp_path / "model.onnx", tokens) for tokens in (1, 8, 27, 28)) < MOST
    assert model.config.attention_type == "block_sparse"
    assert model.base_model.encoder.attention_type == "block_sparse", "a text of a probe has not changed the model"


def test_a_bigbird_of_full_attention_is_exported_for_all_texts(tmp_path: Path) -> None:
    model = every_family.classifier("big_bird")
    to_onnx(model, tmp_path / "model.onnx")
    assert max(difference(model, tmp_path / "model.onnx", tokens) for tokens in (1, 28, 29, 33, 159, 160)) < MOST


def test_positions_that_are_scaled_for_long_texts_hold_for_short_ones(tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = every_family.classifier("llama", rope_parameters=scaled)
    with pytest.raises(ExportError, match=r"rope_type: dynamic .*more than 160 tokens"):
        to_onnx(model, tmp_path / "model.onnx", max_length=161)
    to_onnx(model, tmp_path / "model.onnx", max_length=160)
    assert max(difference(model, tmp_path / "model.onnx", tokens) for tokens in (1, 64, 160)) < MOST


@pytest.mark.parametrize(("family", "changes"), [("mra", {}), ("yoso", {"use_expectation": False})])
def test_what_runs_on_cuda_alone_is_refused(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"only on CUDA.*distil it on a GPU"):
        to_onnx(every_family.classifier(family, **changes), tmp_path / "model.onnx")


def deberta(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw the settings of relative positions."""
    family = rng.choice(["deberta", "deberta-v2"])
    changes: dict[str, Any] = {
        "relative_attention": rng.random() < 0.85,
        "pos_att_type": rng.choice([["c2p"], ["p2c"], ["c2p", "p2c"], "c2p|p2c", []]),
        "max_relative_positions": rng.choice([-1, 2, 4, 7, 16, 64, 200]),
        "position_biased_input": rng.random() < 0.5,
        "type_vocab_size": rng.choice([0, 2]),
    }
    if not changes["relative_attention"]:
        changes["pos_att_type"] = []
    if family == "deberta":
        changes["talking_head"] = rng.random() < 0.2
    else:
        changes["position_buckets"] = rng.choice([-1, 4, 8, 32])
        changes["share_att_key"] = rng.random() < 0.5
        changes["norm_rel_ebd"] = rng.choice(["none", "layer_norm"])
        changes["conv_kernel_size"] = rng.choice([0, 3])
    return family, changes


@pytest.mark.parametrize("case", range(80 if WHOLE else 8))
def test_relative_positions_of_deberta_are_exact_up_to_the_longest_text(case: int, tmp_path: Path) -> None:
    rng = draw("deberta", case)
    family, changes = deberta(rng)
    longest = rng.choice([33, 160] if changes["position_biased_input"] else [33, 160, 300])
    model = getattr(every_family, rng.choice(["classifier", "encoder"]))(family, **changes)
    assert positions(model) == (160 if changes["position_biased_input"] else None)
    to_onnx(model, tmp_path / "model.onnx", max_length=longest)
    apart = {n: difference(model, tmp_path / "model.onnx", n) for n in (1, 3, 8, 17, longest // 2, longest)}
    assert {n: value for n, value in apart.items() if not value < MOST} == {}, changes


# Sizes


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("bert", 160), ("roberta", 159), ("ibert", 159), ("nystromformer", 160), ("yoso", 160), ("bart", 160),
        ("opt", 160), ("gptj", 160), ("ctrl", 160), ("roformer", 160), ("t5", None), ("xlnet", None), ("llama", None),
        ("funnel", None), ("layoutlmv3", 159), ("gemma3", None), ("longformer", 159),
    ],
)  # fmt: skip
def test_positions_of_families_whose_table_is_not_berts(family: str, known: int | None) -> None:
    assert positions(every_family.encoder(family)) == known


def test_rows_of_tokens_of_families_whose_table_is_not_berts() -> None:
    assert token_rows(every_family.encoder("ibert")) == every_family.VOCABULARY
    assert token_rows(every_family.encoder("canine")) is None
    assert probes.vocabulary_of(every_family.config("canine")) == sys.maxunicode + 1
    assert probes.vocabulary_of(every_family.config("gemma3")) == every_family.VOCABULARY


# Messages


def test_a_librarys_message_is_shortened_to_its_reason() -> None:
    graph = "\n".join(f"%{n} : Long(5)" for n in range(5000))
    assert first_reason(ValueError(f"\n  no such  operator \n{graph}")) == "ValueError: no such operator"
    assert first_reason(AssertionError()) == "AssertionError"
    assert len(shorten("x" * 10_000)) == LONGEST_REASON + 4


def test_what_libraries_print_reaches_neither_standard_stream(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet():
        print("a progress bar")
        os.write(1, b"a graph")
        os.write(2, b"a warning")
    print("a result")
    assert capfd.readouterr() == ("a result\n", "")


@pytest.mark.parametrize("family", ["fnet", "mra", "canine", "glm"])
def test_a_refusal_is_a_line_that_names_the_model_and_what_to_do(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = every_family.classifier(family)
    with pytest.raises(ExportError) as refused:
        to_onnx(model, tmp_path / "model.onnx")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
    assert str(refused.value).startswith(f"{type(model).__name__}: ")
    assert "student" in str(refused.value)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def refused_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "fnet"
    every_family.classifier("fnet").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", ["", "--json", "--opset 20", "--for ort", "--for web", "--for text", "--tune"])
def test_nothing_is_left_of_an_export_that_is_refused(
    options: str, refused_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = command.run("export", str(refused_checkpoint), "--out", str(tmp_path / "out"), *options.split())
    assert command.refused(result, tmp_path, "FNetForSequenceClassification: cannot be exported", "fft_fftn")
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert capfd.readouterr().out == ""
    assert not list(tmp_path.iterdir())
