"""What `compress export` is given becomes what it is: a bundle, a checkpoint with its head, an encoder, a writer."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    BertForMaskedLM,
    BertForMultipleChoice,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5EncoderModel,
)

from compress.data.task import Task
from compress.errors import BundleError, CompressError, ExportError, TeacherError
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.exporters.session import open_session
from compress.kinds import Kind, find
from compress.models.sentence_settings import SentenceSettings, settings_of
from compress.reporting.compare import compare
from tests import tiny

VOCABULARY = len(tiny.SPECIAL) + len(tiny.WORDS)


PAIR = ("text", "text_pair")
MANY = {"problem_type": "multi_label_classification"}


def make_task(kind: Kind, label: str, labels: tuple[str, ...], metric: str, text: tuple[str, ...] = ("text",)) -> Task:
    return Task(kind, text, label, labels, metric)


def bundle_of(found: Any, out: Path) -> Bundle:
    assert isinstance(found, Checkpoint) and found.kind == "task"
    return found.write(out)


@pytest.mark.parametrize(
    ("labels", "config", "pair", "task"),
    [
        (
            2,
            {"id2label": {0: "bad", 1: "good"}},
            False,
            make_task("classification", "label", ("bad", "good"), "accuracy"),
        ),
        (1, {}, True, make_task("regression", "score", (), "pearson", PAIR)),
        (2, {"id2label": {0: "a", 1: "b"}, **MANY}, False, make_task("multilabel", "labels", ("a", "b"), "f1")),
    ],
)
def test_a_bundle_of_a_sequence_classifier(
    labels: int, config: dict[str, Any], pair: bool, task: Task, tmp_path: Path
) -> None:
    model = tiny.bert(labels, **config)
    found = load_source(tiny.checkpoint(tmp_path / "model", model), pair=pair)
    assert isinstance(found, Checkpoint)
    assert (found.task, found.max_length) == (task, 64)
    bundle = found.write(tmp_path / "bundle")
    assert bundle.task == task
    assert bundle.manifest.max_length == 64
    stored = load_file(bundle.path / "model.safetensors")
    assert all(torch.equal(stored[name], weight) for name, weight in model.state_dict().items())
    (answer,) = bundle.predict([("good film", "bad film")] if pair else ["good film"], precision="fp32")
    with torch.no_grad():
        rows = tiny.tokenizer()(*(("good film", "bad film") if pair else ("good film",)), return_tensors="pt")
        logits = model(**rows).logits[0]
    expected = {"classification": logits.softmax(0), "multilabel": logits.sigmoid(), "regression": logits}[task.kind]
    assert answer.score == pytest.approx(expected.max().item(), abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "config", "pair", "task"),
    [
        (3, {}, True, make_task("classification", "label", ("LABEL_0", "LABEL_1", "LABEL_2"), "accuracy", PAIR)),
        (1, {"id2label": {0: "stars"}}, False, make_task("regression", "stars", (), "pearson")),
        (
            1,
            {"sentence_transformers": {"version": "5.1.0"}},
            False,
            make_task("regression", "score", (), "pearson", PAIR),
        ),
        (
            *(1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
            make_task("regression", "score", (), "pearson", PAIR),
        ),
    ],
)
def test_the_task_of_a_sequence_classifier(
    labels: int, config: dict[str, Any], pair: bool, task: Task, tmp_path: Path
) -> None:
    assert load_source(tiny.checkpoint(tmp_path / "model", tiny.bert(labels, **config)), pair=pair).task == task


def test_a_cross_encoder_reads_pairs(tmp_path: Path) -> None:
    folder = Path(tiny.checkpoint(tmp_path / "model", tiny.bert(3)))
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"}])
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    found = load_source(str(folder)).task
    assert found is not None
    assert (found.kind, found.text) == ("classification", PAIR)


@pytest.mark.parametrize("names", [("0", "B-PER", "I-PER"), ("o", "b_PER", "i_PER")])
def test_tags_are_written_as_iob2(tmp_path: Path, names: tuple[str, ...]) -> None:
    model = AutoModelForTokenClassification.from_config(tiny.config("distilbert", id2label=dict(enumerate(names))))
    found = load_source(tiny.checkpoint(tmp_path / "tagger", model))
    assert found.task is not None
    assert found.task.labels == ("O", "B-PER", "I-PER")


def test_words_outside_are_in_no_entity(tmp_path: Path) -> None:
    names = {0: "O", 1: "PER-B", 2: "PER-I"}
    model = AutoModelForTokenClassification.from_config(tiny.config("distilbert", id2label=names))
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([5.0, 0.0, 0.0]))
    bundle = bundle_of(load_source(tiny.checkpoint(tmp_path / "tagger", model)), tmp_path / "out")
    assert (bundle.task.kind, bundle.task.text, bundle.task.labels) == ("tagging", ("words",), ("O", "B-PER", "I-PER"))
    assert bundle.predict(["a good film"], precision="fp32")[0].marks == ()  # type: ignore[union-attr]
    config = json.loads((bundle.path / "config.json").read_text())
    assert list(config["id2label"].values()) == ["O", "B-PER", "I-PER"]


def test_a_tagger_without_names_is_refused(tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_config(tiny.config("distilbert", num_labels=3))
    with pytest.raises(CompressError, match="its labels have no names"):
        load_source(tiny.checkpoint(tmp_path / "tagger", model))


def test_a_reader_becomes_a_bundle(tmp_path: Path) -> None:
    reader = AutoModelForQuestionAnswering.from_config(tiny.config("bert", labels=2))
    spans = bundle_of(load_source(tiny.checkpoint(tmp_path / "reader", reader), max_length=32), tmp_path / "spans")
    assert (spans.task.kind, spans.task.text, spans.manifest.max_length) == ("qa", ("question", "context"), 32)
    (answer,) = spans.predict([("a film", "the plot was good and the actor was sad")])
    assert answer.text


def test_a_family_that_begins_to_count_late_has_fewer_positions(tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=40, pad_token_id=0, type_vocab_size=1,
    )  # fmt: skip
    found = load_source(tiny.checkpoint(tmp_path / "model", RobertaForSequenceClassification(config)))
    assert isinstance(found, Checkpoint)
    assert found.max_length == 39
    with pytest.raises(ExportError, match="max_length 40; this model has 39 positions"):
        load_source(str(tmp_path / "model"), max_length=40)


def test_a_bundle_is_loaded_from_its_own_folder_or_its_run(tmp_path: Path) -> None:
    written = bundle_of(load_source(tiny.checkpoint(tmp_path / "model", tiny.bert())), tmp_path / "run" / "bundle")
    for name in (str(written.path), str(tmp_path / "run")):
        found = load_source(name)
        assert found == written
    with pytest.raises(ExportError, match="pair, max_length: does not apply: a bundle defines it"):
        load_source(name, pair=True, max_length=8)
    (written.path / "config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"config\.json"):
        load_source(name)
    shutil.rmtree(written.path)
    (tmp_path / "run" / "recipe.yaml").write_text("")
    with pytest.raises(ExportError, match=r"a run without a bundle\. The run has not finished"):
        load_source(str(tmp_path / "run"))


def test_a_run_that_has_left_a_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    """As one of `pretrain` has, and is exported or compared by name."""
    tiny.checkpoint(tmp_path / "run" / "student", tiny.bert())
    for name in ("recipe.yaml", "run.json"):
        (tmp_path / "run" / name).write_text("{}")
    found = load_source(str(tmp_path / "run"))
    assert isinstance(found, Checkpoint)
    assert found.name == str(tmp_path / "run" / "student")
    with pytest.raises(BundleError, match=r"left a checkpoint\. Make a bundle of it: compress export"):
        compare([tmp_path / "run"])


def test_untrained_poolers_are_dropped(tmp_path: Path) -> None:
    bare = load_source(tiny.checkpoint(tmp_path / "bare"))
    assert isinstance(bare, Checkpoint)
    assert (bare.kind, bare.task) == ("encoder", None)
    assert bare.model.pooler is not None
    masked = load_source(
        tiny.checkpoint(tmp_path / "masked", BertForMaskedLM(tiny.bert().config)), pool="cls", normalise=True
    )
    assert isinstance(masked, Checkpoint)
    settings = SentenceSettings.pooled(32, "cls", normalise=True)
    assert (masked.task, masked.max_length) == (find("embedding").from_settings(settings), 64)
    assert settings_of(masked.model.config) == settings
    assert masked.model.base_model.pooler is None


@pytest.mark.parametrize(
    "lost", ["classifier.weight", "bert.encoder.layer.0.attention.self.query.weight", "embeddings.LayerNorm.bias"]
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused(lost: str, tmp_path: Path) -> None:
    headed = [] if lost.startswith("embeddings") else [tiny.bert()]
    folder = Path(tiny.checkpoint(tmp_path / "model", *headed))
    weights = load_file(folder / "model.safetensors")
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TeacherError, match=f"1 of its tensors are missing.*{lost}"):
        load_source(str(folder))


def changed(folder: Path, **values: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return str(folder)


def test_unsupported_sources_are_refused(tmp_path: Path) -> None:
    folder = Path(tiny.checkpoint(tmp_path / "model", tiny.bert()))
    choice = tiny.checkpoint(tmp_path / "choice", BertForMultipleChoice(tiny.bert().config))
    t5 = T5EncoderModel(T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=24))
    refusals: list[tuple[str, dict[str, Any], str]] = [
        (choice, {}, "BertForMultipleChoice: cannot be exported; expected an encoder"),
        (tiny.checkpoint(tmp_path / "t5", t5), {}, "T5EncoderModel: is not a plain encoder"),
        (str(folder), {"pool": "mean"}, "pool: does not apply: it has a head, BertForSequenceClassification"),
        (tiny.checkpoint(tmp_path / "gpt2", gpt2), {"pool": "mean"}, "pool: does not apply: it is a generative model"),
        (str(tmp_path / "absent"), {}, "no such folder"),
        ("no-such-model", {}, "no teacher 'no-such-model'"),
    ]
    for name, options, message in refusals:
        with pytest.raises(CompressError, match=message):
            load_source(name, **options)
    with pytest.raises(ExportError, match="a regression of 2 numbers"):
        load_source(changed(folder, problem_type="regression", id2label={"0": "x", "1": "y"}))
    with pytest.raises(TeacherError, match="its own code"):
        load_source(changed(folder, auto_map={"AutoModel": "evil.Model"}))
    with pytest.raises(TeacherError, match=r"config\.json: cannot be read"):
        (folder / "config.json").write_text("[")
        load_source(str(folder))


def test_pickled_weights_are_asked_about(tmp_path: Path) -> None:
    model = tiny.bert()
    folder = Path(tiny.checkpoint(tmp_path / "model", model))
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(TeacherError, match="only pickled weights"):
        load_source(str(folder))
    assert isinstance(load_source(str(folder), allow_pickle=True), Checkpoint)


def test_a_vector_of_mobilebert_does_not_depend_on_padding(tmp_path: Path) -> None:
    """Its trigrams read the embedding of padding, which a checkpoint may have trained."""
    model = tiny.model("mobilebert", head=AutoModel)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = torch.randn(model.config.embedding_size)
    bundle = load_source(Path(tiny.checkpoint(tmp_path / "teacher", model)), pool="mean").write(tmp_path / "bundle")
    feeds = {name: values.numpy() for name, values in tiny.batch((7, 2)).items()}
    feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    session = open_session(bundle.files()["fp32"])
    together = session.run(["sentence_embedding"], feeds)[0][1]
    alone = session.run(["sentence_embedding"], {name: values[1:, :2] for name, values in feeds.items()})[0][0]
    np.testing.assert_allclose(together, alone, atol=1e-5)
