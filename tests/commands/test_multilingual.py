"""XLM-R as it comes: a Unigram tokenizer of many scripts, padding of id 1, and positions counted from behind it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    XLMRobertaTokenizer,
)

import compress
from compress.config.stages import StudentSpec
from compress.data.collate import Collate
from compress.exporters.artifact import Bundle
from compress.exporters.onnx import parity, to_onnx
from compress.exporters.rewrite.forms import Form, rewrite_graph
from compress.exporters.session import read_model
from compress.models.signals import ATTENTION, open_attention, read
from compress.models.student import build, choose_units
from compress.pruning.importance import Batches, gradients
from compress.slicing.plan import Group, SlicePlan
from compress.slicing.shape import positions
from compress.trimming import trim_bundle, trim_checkpoint
from tests import tiny
from tests.slicing import families
from tests.slicing.oracle import masked

ENGLISH = ("the film was good and the story is warm", "this actor was never dull , a good plot !")
TEXTS = (
    *ENGLISH,
    "der Film war gut und die Geschichte ist schön",
    "фильм был хороший и история тоже хорошая",
    "η ταινία ήταν καλή και η ιστορία επίσης",
    "这部电影很好 故事也很好",
    "फिल्म अच्छी थी और कहानी भी अच्छी थी",
)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


@pytest.fixture(scope="module")
def words() -> Any:
    """The mask comes last, as in XLM-R's own."""
    learned = Tokenizer(models.Unigram())
    learned.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=list(SPECIAL), unk_token="<unk>")
    learned.train_from_iterator([*TEXTS * 20, *tiny.WORDS], trainer)
    pieces = sorted(learned.get_vocab().items(), key=lambda each: each[1])
    vocabulary = [(token, 0.0 if number < 4 else -3.0 - number / 50) for token, number in pieces]
    return XLMRobertaTokenizer(vocab=[*vocabulary, ("<mask>", 0.0)])


def model(words: Any, *, head: Any = AutoModelForSequenceClassification, **changes: Any) -> Any:
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "vocab_size": len(words)}
    sizes = {"layers": 3, "max_position_embeddings": 66}
    made = tiny.model("xlm-roberta", head=head, **{**ids, **sizes, **changes})
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def encoded(words: Any, *texts: str) -> dict[str, Tensor]:
    found = words(list(texts or TEXTS), padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def test_positions_start_after_the_padding_index(words: Any) -> None:
    assert words.pad_token_id == 1
    assert positions(model(words)) == 64


@pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForMaskedLM])
def test_a_sliced_student_equals_a_masked_teacher(words: Any, head: Any) -> None:
    teacher, batch = model(words, head=head), encoded(words)
    spec = StudentSpec(layers=2, hidden=24, heads=3, ffn=40, init="teacher")
    kept = choose_units(spec, teacher)
    assert kept is not None and kept.layers == (0, 2)
    name = "masked_lm" if head is AutoModelForMaskedLM else "task"
    student = build(spec, teacher, head=name, kind="classification").eval()
    with masked(teacher, kept):
        expected = families.logits(teacher, batch)
    torch.testing.assert_close(families.logits(student, batch), expected, rtol=1e-5, atol=1e-5)
    assert student.base_model.embeddings.position_embeddings.weight.shape == (66, 24)
    assert positions(student) == 64


@pytest.mark.parametrize(("family", "rows"), [("bert", 64), ("distilbert", 64), ("roberta", 66)])
def test_students_of_other_families(words: Any, family: str, rows: int) -> None:
    teacher, batch = model(words, head=AutoModel), encoded(words)
    student = build(StudentSpec(family=family, init="teacher"), teacher, head="encoder", kind=None).eval()
    assert positions(student) == 64
    assert student.get_input_embeddings().padding_idx == 1
    assert student.embeddings.position_embeddings.weight.shape[0] == rows
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = (each(**batch).last_hidden_state[real] for each in (student, teacher))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def test_signals_do_not_depend_on_padding(words: Any) -> None:
    tapped = model(words)
    open_attention(tapped)
    together = read(tapped, encoded(words), ATTENTION | {"layers", "embeddings", "logits"})
    for at, text in enumerate(TEXTS):
        alone = read(tapped, encoded(words, text), ATTENTION | {"layers", "embeddings", "logits"})
        length = int(alone.mask_BL.sum())
        for name in ("queries", "keys", "values"):
            for mine, other in zip(getattr(alone, name), getattr(together, name), strict=True):
                torch.testing.assert_close(other[at, :, :length], mine[0], rtol=1e-4, atol=1e-5)
        for mine, other in zip(alone.scores, together.scores, strict=True):
            torch.testing.assert_close(other[at, :, :length, :length], mine[0], rtol=1e-4, atol=1e-5)
        for mine, other in zip(alone.layers, together.layers, strict=True):
            torch.testing.assert_close(other[at, :length], mine[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.embeddings[at, :length], alone.embeddings[0], rtol=1e-5, atol=1e-6)


def test_importance_does_not_depend_on_padding(words: Any) -> None:
    asked, rows = model(words), Dataset.from_list([{**words(text), "length": len(text)} for text in TEXTS])
    found = []
    for size in (1, len(TEXTS)):
        total: dict[Group, Tensor] = {}
        batches = Batches(rows, Collate(words), size)
        for of_batch in gradients(asked, batches, SlicePlan.from_model(asked), targets="drawn"):
            for group, gradient in of_batch.items():
                total[group] = total.get(group, torch.zeros(())) + gradient.abs().sum(0)
        found.append(total)
    for group, vector in found[0].items():
        torch.testing.assert_close(found[1][group], vector, rtol=1e-3, atol=1e-3 * float(vector.max()))


def test_rewritten_graphs_match(words: Any, tmp_path: Path) -> None:
    asked = model(words)
    to_onnx(asked, tmp_path / "raw.onnx", form=None, segments=False)
    raw, batches = read_model(tmp_path / "raw.onnx"), [encoded(words), encoded(words, TEXTS[0])]
    for form in (Form(), Form(tokens_first=False), Form(merged=True)):
        made = rewrite_graph(raw, form)
        assert (made.attentions, made.softmaxes) == (3, 3)
        onnx.save_model(made.model, tmp_path / "rewritten.onnx")
        assert parity(asked, tmp_path / "rewritten.onnx", batches) < 1e-4, form


@pytest.mark.parametrize("head", [AutoModel, AutoModelForMaskedLM])
def test_trimming_to_one_language(words: Any, head: Any, tmp_path: Path) -> None:
    whole = model(words, head=head)
    whole.save_pretrained(tmp_path / "whole")
    words.save_pretrained(tmp_path / "whole")
    result = trim_checkpoint(tmp_path / "whole", ENGLISH, tmp_path / "small")
    small, fewer = head.from_pretrained(result.path).eval(), AutoTokenizer.from_pretrained(result.path)
    assert small.config.vocab_size == len(fewer) == len(result.kept) < len(words)
    assert fewer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL), "positions are counted from after the padding"
    assert small.config.pad_token_id == small.get_input_embeddings().padding_idx == fewer.pad_token_id == 1
    assert fewer.mask_token_id == len(fewer) - 1
    assert [fewer.tokenize(text) for text in ENGLISH] == [words.tokenize(text) for text in ENGLISH]
    for text in TEXTS:
        assert fewer.unk_token_id not in fewer(text)["input_ids"], "every character of another language stays"
    batches = encoded(words, *ENGLISH), encoded(fewer, *ENGLISH)
    with torch.no_grad():
        before, after = (each(**batch)[0] for each, batch in zip((whole, small), batches, strict=True))
    if head is AutoModelForMaskedLM:
        before = before[..., list(result.kept)]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert sum(each.numel() for each in whole.parameters()) - sum(each.numel() for each in small.parameters()) == (
        (len(words) - len(result.kept)) * (32 + (head is AutoModelForMaskedLM))
    ), "rows of the table, and biases of the head"


@pytest.mark.usefixtures("hastened")
def test_distilling_a_trimmed_teacher(words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut out of its teacher by half, taught, exported and quantised; then its bundle keeps the task's tokens."""
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    model(words, head=AutoModel).save_pretrained(tmp_path / "whole")
    words.save_pretrained(tmp_path / "whole")
    corpus = [*TEXTS, " ".join(tiny.WORDS), "positive negative"]
    teacher = trim_checkpoint(tmp_path / "whole", corpus, tmp_path / "teacher").path
    sizes = "student: {layers: 1, hidden: 16, ffn: 32, heads: 2, init: teacher}"
    text = tiny.RECIPE.replace("student: {layers: 1, hidden: 16, ffn: 32, heads: 2}", sizes)
    bundle = tiny.call(
        compress.distill, teacher=str(teacher), recipe=tiny.recipe(tmp_path / "recipe", text), gate="warn",
        data=tiny.reviews(tmp_path / "data", train=32, dev=12), out=tmp_path / "run",
    )  # fmt: skip
    result = trim_bundle(bundle, ["good film", "bad story", "the plot is dull"], tmp_path / "small")
    small = Bundle.load(result.path)
    assert result.whole == 1.0 and len(result.kept) < result.before < len(words) + 1
    texts = ["good film", "bad story", "the plot is dull"]
    for precision in ("fp32", "int8"):
        found, expected = (
            each.logits([AutoTokenizer.from_pretrained(each.path)(text) for text in texts], precision=precision)
            for each in (small, bundle)
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert [each.label for each in small.predict(texts)] == [each.label for each in bundle.predict(texts)]
