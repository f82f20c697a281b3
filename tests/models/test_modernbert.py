"""Compress a tiny ModernBERT end to end: by recipes, and by every command on the result."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import compress
from compress.config.stages import StudentSpec
from compress.exporters.artifact import Bundle
from compress.records.run_report import Report
from tests import command, tiny, unshipped
from tests.commands.test_every_recipe import shrunk
from tests.commands.test_trim import byte_bpe
from tests.unshipped import Trained

SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
WINDOW = 8
STORY = "the story was sharp but slow . a film is never quite dull . this actor was great and the plot is fun ."
SMALLER = StudentSpec(layers=2, hidden=16, ffn=32, heads=2, init="teacher")
STUDENTS = {"tinybert": SMALLER, "minilm": SMALLER, "prune-taylor": None, "prune-dynabert": None}
"""The student of each recipe, in place of its own BERT."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer like ModernBERT's: bytes, no token types, [CLS] and [SEP] around."""
    words = byte_bpe(special=SPECIAL).backend_tokenizer
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        mask_token="[MASK]", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def teacher(folder: Path) -> str:
    """Save a teacher with two heads, global, local, local and global layers, and windows shorter than the texts."""
    own = tokenizer()
    ids = {"cls_token_id": 1, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2, "pad_token_id": 3}
    sizes = {"layers": 4, "heads": 2, "vocab_size": len(own), "local_attention": WINDOW}
    tiny.model("modernbert", head=AutoModel, **sizes, **ids, classifier_pooling="mean").save_pretrained(folder)
    own.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, places: dict[str, str]) -> Path:
    """Share the caches, so that the teacher is fine-tuned once."""
    folder = Path(places["teacher"]).with_name("home")
    monkeypatch.setenv("COMPRESS_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modern")
    (folder / "corpus.txt").write_text("\n\n".join([f"{STORY}\n{STORY}"] * 30), encoding="utf-8")
    data = tiny.reviews(folder / "data", train=48, dev=16)
    return {"data": data, "corpus": str(folder / "corpus.txt"), "teacher": teacher(folder / "teacher")}


def distilled(recipe: str, places: dict[str, str], out: Path) -> Bundle:
    """Run a recipe at tiny size. All fine-tune the teacher alike, so that it is done once."""
    changes = {"teacher": shrunk("distilbert").teacher, "student": STUDENTS.get(recipe)}
    small = shrunk(recipe).model_copy(update={name: value for name, value in changes.items() if value is not None})
    return tiny.call(compress.distill, **places, recipe=small, out=out, gate="warn")  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", STUDENTS)
def test_a_recipe_makes_a_smaller_modernbert(
    recipe: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hastened: None
) -> None:
    students: list[Any] = []

    def trained(_: Any, job: Any) -> None:
        students.append(job.student)
        raise Trained

    monkeypatch.setattr("compress.jobs.shipping.Ship.run", trained)
    with pytest.raises(Trained):
        distilled(recipe, places, tmp_path / "run")
    (student,) = students
    config, layers = student.config, {"prune-taylor": 3, "prune-dynabert": 3}.get(recipe, 2)
    assert (config.model_type, config.num_hidden_layers, len(config.layer_types)) == ("modernbert", layers, layers)
    assert config.layer_types[0] == "full_attention" and config.local_attention == WINDOW
    logits = student.eval()(**tiny.batch((20, 3))).logits
    assert logits.shape == (2, 2) and logits.isfinite().all()


@pytest.fixture(scope="module")
def bundle(places: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(Path(places["teacher"]).with_name("home")))
        unshipped.hasten(patch)
        return distilled("distilbert", places, folder / "run")


def test_it_ships_in_fp32_and_int8(bundle: Bundle) -> None:
    rows = Report.from_json(bundle.path / "report.json").of_role("student")
    assert [row.name for row in rows] == ["student fp32", "student int8"]
    model = AutoModelForSequenceClassification.from_pretrained(bundle.path).eval()
    config = model.config
    assert (config.model_type, config.classifier_pooling, config.num_hidden_layers) == ("modernbert", "mean", 2)
    assert config.layer_types[0] == "full_attention" and len(config.layer_types) == 2
    assert config.local_attention == WINDOW
    text = STORY[:90]
    row = tokenizer()(text)
    batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model(**batch).logits
    session = onnxruntime.InferenceSession(bundle.files()["fp32"])
    found = session.run(None, {name: each.numpy() for name, each in batch.items()})[0]
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)
    assert len(row["input_ids"]) > WINDOW, "longer than the window"


def test_it_is_trimmed_quantised_and_exported(
    bundle: Bundle, places: dict[str, str], tmp_path: Path, hastened: None
) -> None:
    text, data = "good film", ["--data", places["data"]]
    before = bundle.predict([text])[0]
    trimmed = tmp_path / "trimmed"
    result = command.run("trim", str(bundle.path), *data, "--out", str(trimmed))
    assert result.code == 0, result.err
    smaller = Bundle.load(trimmed)
    assert smaller.predict([text])[0].label == before.label
    assert AutoConfig.from_pretrained(trimmed).vocab_size < len(tokenizer())
    result = command.run("quantize", str(trimmed), *data, "--method", "static", "--rows", "16", "--max-drop", "100")
    assert result.code == 0, result.err
    assert Bundle.load(trimmed).predict([text])[0].label == before.label
    result = command.run("export", str(trimmed), "--out", str(tmp_path / "exported"))
    assert result.code == 0, result.err
    assert Bundle.load(tmp_path / "exported").files().keys() == {"fp32", "int8"}
    result = command.run("export", str(trimmed), "--out", str(tmp_path / "web"), "--for", "web")
    assert result.code == 0, result.err
