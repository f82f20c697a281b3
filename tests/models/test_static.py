"""Static students: the mean of a table's rows, computed from a teacher by model2vec, and shipped like any student."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForSequenceClassification

import compress
from compress.commands.students import list_students
from compress.config.recipe import Recipe
from compress.config.stages import StudentSpec
from compress.data.masking import Words
from compress.errors import StudentError
from compress.exporters.onnx import parity, to_onnx
from compress.latency.features import Terms
from compress.latency.model import model_cost
from compress.models import own_classes
from compress.models.flops import count_parameters, flops_per_token
from compress.models.signals import read
from compress.models.static import StaticConfig, StaticForSequenceClassification, StaticModel
from compress.models.student import build
from compress.papers import model2vec
from compress.papers.model2vec import from_teacher
from compress.records.latency import Setting
from compress.slicing.shape import Shape
from tests import command, tiny

pytestmark = pytest.mark.usefixtures("hastened")

WIDTH = 8


def config(**changes: Any) -> StaticConfig:
    plain: dict[str, Any] = {"vocab_size": len(tiny.SPECIAL) + len(tiny.WORDS), "hidden_size": WIDTH, "num_labels": 3}
    return StaticConfig(**plain | changes)


def classifier(**changes: Any) -> Any:
    torch.manual_seed(0)
    model: Any = StaticForSequenceClassification(config(initializer_range=0.5, **changes))
    return model.eval()


def spec(**sizes: Any) -> StudentSpec:
    return StudentSpec.model_validate({"family": "static-embedding", "hidden": 8, **sizes})


def drawn(teacher: Any, *, hidden: int = WIDTH, **options: Any) -> Any:
    student = StaticForSequenceClassification(config(hidden_size=hidden))
    from_teacher(student, teacher, words=Words.from_tokenizer(tiny.tokenizer()), **options)
    return student


@pytest.mark.parametrize("normalize", [False, True])
def test_logits_are_linear_in_the_mean_of_real_tokens(normalize: bool) -> None:
    model, batch = classifier(normalize=normalize), tiny.batch((7, 5, 1))
    with torch.no_grad():
        found = model(**batch).logits
        for row, length in enumerate((7, 5, 1)):
            mean = torch.zeros(WIDTH)
            for token in range(length):
                mean += model.static.word_embeddings.weight[batch["input_ids"][row, token]] / length
            if normalize:
                mean = mean / mean.pow(2).sum().sqrt()
            by_hand = model.classifier.weight @ mean + model.classifier.bias
            assert torch.allclose(found[row], by_hand, atol=1e-6)


def test_order_and_padding_do_not_matter() -> None:
    model, batch = classifier(), tiny.batch((6,))
    turned = {"input_ids": batch["input_ids"].flip(1), "attention_mask": batch["attention_mask"]}
    padded = {key: torch.nn.functional.pad(value, (0, 5)) for key, value in batch.items()}
    with torch.no_grad():
        whole = model(**batch).logits
        assert torch.allclose(model(**turned).logits, whole, atol=1e-6)
        assert torch.allclose(model(**padded).logits, whole, atol=1e-6)
        nothing = model(batch["input_ids"], torch.zeros_like(batch["attention_mask"])).logits
    assert torch.allclose(nothing[0], model.classifier.bias)


def test_loss_and_signals() -> None:
    model, batch = classifier(), tiny.batch()
    labels = torch.tensor([0, 2, 1])
    out = model(**batch, labels=labels)
    assert torch.allclose(out.loss, cross_entropy(out.logits, labels))
    shown = read(model, batch, frozenset({"logits", "embeddings"}))
    assert shown.embeddings.shape == (3, 7, WIDTH)
    assert shown.layers == ()
    assert shown.logits is not None
    shown.logits.sum().backward()  # type: ignore[no-untyped-call]
    table = model.static.word_embeddings.weight
    assert table.grad is not None and table.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="exactly one of"):
        model()


def test_save_load_and_shape(tmp_path: Path) -> None:
    model, batch = classifier(), tiny.batch()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert isinstance(again, StaticForSequenceClassification)
    assert isinstance(AutoModel.from_pretrained(tmp_path), StaticModel)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    shape = Shape.from_config(again.config)
    assert (shape.layers, shape.hidden, shape.ffn, shape.classes) == (0, WIDTH, 0, 3)


def test_onnx_parity_and_cost(tmp_path: Path) -> None:
    model = classifier()
    to_onnx(model, tmp_path / "model.onnx")
    assert parity(model, tmp_path / "model.onnx", [tiny.batch((7, 5, 1)), tiny.batch((12,), seed=1)]) < 1e-5
    terms = Terms.from_config(model.config, Setting(seq=16))
    assert terms.flops == pytest.approx(flops_per_token(model, 16) * 16) == 2 * WIDTH * 3
    assert "layers" not in terms.counts
    assert model_cost(model.config).parameters == count_parameters(model)


def test_vectors_keep_distances_between_the_teachers_states() -> None:
    """Use all directions, unweighted, and states of each token by itself."""
    teacher = tiny.model("bert", hidden=16, head=AutoModel)
    student = drawn(teacher, hidden=16, sif=0.0, batch=7)
    tokenizer, table = tiny.tokenizer(), student.get_input_embeddings().weight.detach()
    chosen: Any = tokenizer.convert_tokens_to_ids(list(tiny.WORDS[:6]))
    states = []
    with torch.no_grad():
        for token in chosen:
            row = torch.tensor([[tokenizer.cls_token_id, token, tokenizer.sep_token_id]])
            states.append(teacher(row, torch.ones_like(row)).last_hidden_state[0].mean(0))
    ratios = torch.cdist(table[chosen], table[chosen]) / torch.cdist(torch.stack(states), torch.stack(states))
    known = ratios[~torch.eye(6, dtype=torch.bool)]
    assert torch.allclose(known, known[0].expand_as(known), rtol=1e-3)


def test_fewer_dimensions_are_principal() -> None:
    teacher = tiny.model("bert", hidden=16, head=AutoModel)
    narrow, wide = (drawn(teacher, hidden=hidden, sif=0.0).get_input_embeddings().weight for hidden in (4, 16))
    words = [number for number in range(wide.shape[0]) if wide[number].abs().sum() > 0]
    kept = wide[words, :4] / narrow[words]
    assert torch.allclose(kept, kept[0, 0].expand_as(kept), rtol=1e-3)
    spread = wide[words].var(0)
    assert bool((spread[:-1] >= spread[1:] - 1e-6).all())


def test_frequency_weights() -> None:
    teacher = tiny.model("bert", hidden=16, head=AutoModel)
    weighted, plain = (drawn(teacher, sif=sif).get_input_embeddings().weight.detach() for sif in (1e-4, 0.0))
    tokenizer = tiny.tokenizer()
    silent = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert {number for number in range(len(weighted)) if not weighted[number].any()} == silent
    first, last = len(tiny.SPECIAL), len(weighted) - 1
    shares = 1 / np.arange(2, len(weighted) + 2)
    shares /= shares.sum()
    expected = (1e-4 + shares[last]) / (1e-4 + shares[first])
    found = (weighted[first] / plain[first]).mean() / (weighted[last] / plain[last]).mean()
    assert float(found) == pytest.approx(expected, rel=1e-3)
    assert float(weighted.pow(2).mean().sqrt()) == pytest.approx(WIDTH**-0.5, rel=0.2)


def test_unused_tokens_have_no_rank() -> None:
    words = Words.from_tokenizer(tiny.tokenizer(("[unused0]", "a", "[unused12]", "unused", *tiny.WORDS[1:])))
    assert words.unused_V is not None
    free = [len(tiny.SPECIAL), len(tiny.SPECIAL) + 2]
    assert words.unused_V.nonzero().flatten().tolist() == free
    weights = model2vec._weights(words.size, 1e-4, words.unused_V)
    torch.testing.assert_close(weights[~words.unused_V], model2vec._weights(words.size - 2, 1e-4, None))
    assert weights[free].tolist() == [1.0, 1.0]


def test_special_tokens_around() -> None:
    words = Words.from_tokenizer(tiny.tokenizer())
    tokenizer = tiny.tokenizer()
    assert (words.before, words.after) == ((tokenizer.cls_token_id,), (tokenizer.sep_token_id,))
    assert words.unknown == tokenizer.unk_token_id
    for family in ("distilbert", "albert", "mobilebert", "deberta-v2"):
        assert drawn(tiny.model(family, head=AutoModel)).get_input_embeddings().weight.isfinite().all()


def test_the_cards_of_version_0_2_still_import_the_classes() -> None:
    assert import_module("compress.models.families").own_classes is own_classes


def test_errors() -> None:
    teacher = tiny.model("bert", hidden=16)
    with pytest.raises(
        StudentError, match=r"student.hidden: 32; the teacher's states have 16 .*--set student.hidden=16"
    ):
        drawn(teacher, hidden=32)
    with pytest.raises(StudentError, match="fills static-embedding students, not bert"):
        from_teacher(tiny.model("bert"), teacher, words=Words.from_tokenizer(tiny.tokenizer()))
    with pytest.raises(StudentError, match="static-embedding models have no such size"):
        build(spec(layers=2), teacher)
    with pytest.raises(StudentError, match="has no task head"):
        build(spec(), teacher, kind="tagging")


def test_the_teacher_is_unchanged() -> None:
    teacher = tiny.model("bert").train()
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    drawn(teacher)
    assert teacher.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_it_is_listed(tmp_path: Path) -> None:
    teacher = tiny.checkpoint(tmp_path / "teacher")
    recipe = Recipe.load("static", ["student.hidden=8"])
    listing = list_students(teacher, [recipe])
    (line,) = listing.recipes
    assert (line.size.layers, line.size.hidden, line.size.encoder_parameters) == (0, 8, 0)


def test_a_misspelt_option(shelf: command.Shelf, tmp_path: Path) -> None:
    words = ("--set", "student.init.siff=1", "--set", "student.hidden=8")
    result = command.run(*shelf.distill(tmp_path / "run", *words, recipe="static"))
    assert command.refused(result, tmp_path / "run", "model2vec.from_teacher has no option 'siff'", "'sif'")


@pytest.mark.slow
def test_the_recipe_end_to_end(shelf: command.Shelf, tmp_path: Path) -> None:
    """Distil, measure, quantise, and export with the tokenizer inside; one word decides these texts."""
    changes = {
        "student.hidden": 16, "teacher.steps": 40, "teacher.lr": 0.01, "teacher.max_length": 32, "teacher.evaluate": 0,
        "stages.0.steps": 120, "stages.0.lr": 0.02, "stages.0.max_length": 32, "stages.0.evaluate": 0,
    }  # fmt: skip
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    result = command.run(*shelf.distill(tmp_path / "run", *words, "--gate", "warn", recipe="static"))
    assert result.code == 0, result.err
    bundle = compress.Bundle.load(tmp_path / "run" / "bundle")
    texts = ["a good film", "the bad plot was slow"]
    for precision in ("int8", "fp32"):
        answers: list[Any] = list(bundle.predict(texts, precision=precision))
        assert [answer.label for answer in answers] == ["positive", "negative"]
    exported = command.run("export", str(bundle.path), "--for", "text", "--out", str(tmp_path / "texts"))
    assert exported.code == 0, exported.err
    assert len(list((tmp_path / "texts").rglob("*.onnx"))) == 1
