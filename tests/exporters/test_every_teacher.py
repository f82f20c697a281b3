"""Every family teaches every kind of task: as a checkpoint, in a batch, in a training step, as ONNX, and end to end."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

import compress
from compress.config.stages import StudentSpec
from compress.config.term import Term
from compress.data import TaskData, load_task
from compress.data.collate import Collate
from compress.data.tokenize import encode
from compress.errors import DataError, ExportError, StudentError
from compress.evaluation import metrics
from compress.exporters.onnx import makes_segments, parity, to_onnx
from compress.exporters.session import read_model
from compress.models import student as students
from compress.models import teacher as teachers
from compress.models.padding import pads_left
from compress.models.teacher import Teacher
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.step import Distillation
from tests import generative, marked, tiny

WORDS = len(tiny.SPECIAL) + len(tiny.WORDS)
SIZES: Mapping[str, Mapping[str, Any]] = {
    "roberta": {"type_vocab_size": 2},  # the tiny tokenizer is BERT's and tells segments apart
    "xlm-roberta": {"type_vocab_size": 2},
    "deberta": {"max_relative_positions": -1},
}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "xlm": {
        "n_layers": 2, "emb_dim": 32, "n_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64, "n_langs": 1,
        "pad_index": 0, "unk_index": 1, "bos_index": 2, "eos_index": 3, "mask_index": 4, "pad_token_id": 0,
    },
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 64, "vocab_size": 60, "n_positions": 256},
    "t5": {
        "num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 60,
        "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    },
}  # fmt: skip
FAMILIES = (*tiny.FAMILIES, *OTHERS)
TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt2": lambda: generative.gpt2_tokenizer(pad=False),
    "t5": generative.t5_tokenizer,
}
KINDS = ("classification", "regression", "tagging", "qa")
SERVED = [(family, kind) for family in FAMILIES for kind in KINDS if (family, kind) != ("gpt2", "qa")]
"""GPT-2 frames a text by no token that could stand for "no answer"."""
LENGTH = 48


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskData]:
    folder = tmp_path_factory.mktemp("tasks")
    tiny.reviews(folder / "classification", train=24, dev=8)
    lines = ["text\tlabel", *(f"{'good ' * (i % 5)}film\t{(i % 5) / 2 + 0.25}" for i in range(24))]
    for split in ("train", "dev"):
        (folder / "regression").mkdir(exist_ok=True)
        (folder / "regression" / f"{split}.tsv").write_text("\n".join(lines), encoding="utf-8")
        marked.sentences(folder / "tagging" / f"{split}.conll", count=16)
        marked.questions(folder / "qa" / f"{split}.json", count=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        return {kind: load_task(str(folder / kind)) for kind in KINDS}


def saved(folder: Path, family: str) -> str:
    """A headless random model of this family, with a tokenizer of its manner."""
    torch.manual_seed(0)
    if family in OTHERS:
        model = AutoModel.from_config(CONFIG_MAPPING[family](**OTHERS[family]))
    else:
        model = tiny.model(family, head=AutoModel, **SIZES.get(family, {}))
    model.save_pretrained(folder)
    tokenizer = TOKENIZERS.get(family, tiny.tokenizer)()
    tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(folder: Path, family: str, data: TaskData) -> Teacher:
    return teachers.load(family, Path(saved(folder / family, family)), data.task)


def widened(teacher: Teacher) -> Teacher:
    """With weights so wide that different rows get clearly different answers."""
    torch.manual_seed(1)
    for parameter in teacher.model.parameters():
        if parameter.dim() > 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    if (
        teacher.model.config.model_type == "mobilebert"
    ):  # its embedding of a token looks at the next one, padding or not
        teacher.model.get_input_embeddings().weight.data[0] = 0
    return teacher


@pytest.mark.parametrize(("family", "kind"), SERVED)
def test_a_saved_teacher_loads_and_ignores_padding(
    family: str, kind: str, tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    teacher = loaded(tmp_path, family, tasks[kind])
    assert not teacher.trained and teacher.tokenizer.pad_token_id is not None
    teacher.model.save_pretrained(tmp_path / "tuned")
    teacher.tokenizer.save_pretrained(tmp_path / "tuned")
    again = teachers.load(family, tmp_path / "tuned", tasks[kind].task)
    assert again.trained and type(again.model) is type(teacher.model)
    teacher = widened(teacher)
    rows = encode(tasks[kind].train, teacher.tokenizer, LENGTH)
    collate = Collate(teacher.tokenizer, left=pads_left(teacher.model))
    alone, together = (metrics.logits(teacher.model, rows, collate, batch=batch) for batch in (1, 32))
    assert np.ptp(alone, axis=0).max() > 1e-3, "the answers differ"
    np.testing.assert_allclose(together, alone, atol=2e-4 * max(1.0, float(np.abs(alone).max())))


@pytest.mark.parametrize(("family", "kind"), [each for each in SERVED if each[1] in ("classification", "tagging")])
def test_a_smaller_student_learns_logits_and_hidden_states(
    family: str, kind: str, tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    teacher = loaded(tmp_path, family, tasks[kind])
    student = students.build(
        StudentSpec(layers=1, init="teacher"),  # type: ignore[call-arg]
        teacher.model,
        head="task",
        kind=tasks[kind].task.kind,
    )
    terms = [Term("hinton.soft_targets"), Term("bert.labels"), Term("tinybert.hidden", project=True)]
    objective = Objective(
        terms, Shape.from_config(student.config), Shape.from_config(teacher.model.config), kind=tasks[kind].task.kind
    )
    step = Distillation(student, teacher.model, objective)
    rows = encode(tasks[kind].train, teacher.tokenizer, LENGTH)
    parts = step(**Collate(teacher.tokenizer)([rows[i] for i in range(6)]))
    parts["loss"].backward()
    assert torch.isfinite(parts["loss"]) and parts["loss"] > 0
    learning = [parameter for parameter in student.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(parameter.grad).all() for parameter in learning) and len(learning) > 5
    assert all(parameter.grad is None for parameter in teacher.model.parameters())


@pytest.mark.parametrize(
    ("family", "kind"),
    [each for each in SERVED if each[0] in ("ernie", "gpt2", "t5", "xlm", "xlnet") and each[1] != "regression"]
    + [("modernbert", "qa"), ("deberta", "tagging")],
)
def test_its_onnx_file_answers_as_it_does(family: str, kind: str, tasks: dict[str, TaskData], tmp_path: Path) -> None:
    teacher = widened(loaded(tmp_path, family, tasks[kind]))
    to_onnx(teacher.model, tmp_path / "model.onnx", segments=makes_segments(teacher.tokenizer))
    rows = encode(tasks[kind].validation, teacher.tokenizer, LENGTH)
    batches = [Collate(teacher.tokenizer)([rows[i]]) for i in range(3)]
    largest = max(1.0, float(np.abs(metrics.logits(teacher.model, rows, Collate(teacher.tokenizer))).max()))
    assert parity(teacher.model, tmp_path / "model.onnx", batches) < 1e-4 * largest


def test_a_gpt2_whose_tokenizer_makes_types_is_given_them_in_its_file(
    tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    """It adds the embedding of the word with the number of the type."""
    folder = Path(saved(tmp_path / "gpt2", "gpt2"))
    for path in folder.glob("*token*"):
        path.unlink()
    tiny.tokenizer().save_pretrained(folder)
    teacher = widened(teachers.load("gpt2", folder, tasks["classification"].task))
    to_onnx(teacher.model, tmp_path / "model.onnx", segments=makes_segments(teacher.tokenizer))
    rows = encode(tasks["classification"].validation, teacher.tokenizer, LENGTH)
    expected = metrics.logits(teacher.model, rows, Collate(teacher.tokenizer))
    assert "token_type_ids" in [given.name for given in read_model(tmp_path / "model.onnx").graph.input]
    batches = [Collate(teacher.tokenizer)([rows[i]]) for i in range(3)]
    assert parity(teacher.model, tmp_path / "model.onnx", batches) < 1e-4 * max(1.0, float(np.abs(expected).max()))


def test_gpt2_answers_no_questions(tasks: dict[str, TaskData], tmp_path: Path) -> None:
    teacher = loaded(tmp_path, "gpt2", tasks["qa"])
    with pytest.raises(DataError, match="no special token before or after a question"):
        encode(tasks["qa"].train, teacher.tokenizer, LENGTH)


def test_xlnet_is_padded_before_the_text_whatever_its_tokenizer_says(
    tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    assert loaded(tmp_path, "xlnet", tasks["classification"]).tokenizer.padding_side == "left"


# Students of other families


def test_no_other_family_reads_what_xlnet_is_given(tasks: dict[str, TaskData], tmp_path: Path) -> None:
    teacher = loaded(tmp_path, "xlnet", tasks["classification"])
    with pytest.raises(StudentError, match=r"rows of xlnet are padded before the text.*use family: teacher"):
        students.config_for(StudentSpec(family="bert"), teacher.model.config)  # type: ignore[call-arg]


@pytest.mark.parametrize(("family", "known"), [("t5", 512), ("gpt2", 256), ("roberta", 63), ("bert", 64)])
def test_a_student_has_the_teachers_positions_or_as_many_as_bert(
    family: str, known: int, tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    teacher = loaded(tmp_path, family, tasks["classification"])
    config = students.config_for(StudentSpec(family="electra"), teacher.model.config)  # type: ignore[call-arg]
    assert config.max_position_embeddings == known


def test_a_modernbert_of_fewer_layers_has_as_many_kinds_of_attention(
    tasks: dict[str, TaskData], tmp_path: Path
) -> None:
    teacher = loaded(tmp_path, "modernbert", tasks["classification"])
    student = students.build(StudentSpec(layers=1), teacher.model)  # type: ignore[call-arg]
    student.save_pretrained(tmp_path / "student")
    assert len(student.config.layer_types) == 1


# End to end

RECIPE = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: One stage of logits and hidden states.
teacher: {finetune: teacher, steps: 4, batch: 16, lr: 1.0e-3, max_length: 48, evaluate: 1}
student: STUDENT
stages:
  - distill: prediction
    steps: 3
    batch: 8
    max_length: 48
    lr: 1.0e-3
    objective:
      - {loss: hinton.soft_targets}
      - {loss: tinybert.hidden, project: true}
"""
BERT = "{family: bert, layers: 1, hidden: 16, ffn: 32, heads: 2}"


def shipped(family: str, student: str, data: str, path: Path) -> tuple[Any, dict[str, Any]]:
    recipe = tiny.recipe(path / "recipe", RECIPE.replace("STUDENT", student))
    teacher = saved(path / "teacher", family)
    bundle = tiny.call(compress.distill, teacher=teacher, recipe=recipe, data=data, out=path / "run", gate="warn")
    return bundle, json.loads((bundle.path / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("family", "student"),
    [("xlm", BERT), ("ernie", BERT), ("gpt2", BERT), ("t5", BERT), ("modernbert", BERT), ("deberta", "{layers: 1}")],
)
def test_a_teacher_is_distilled_shipped_and_measured(family: str, student: str, tmp_path: Path, hastened: None) -> None:
    data = tiny.reviews(tmp_path / "data", train=32, dev=12)
    bundle, report = shipped(family, student, data, tmp_path)
    assert [each.label in ("negative", "positive") for each in bundle.predict(["good film", "bad"])] == [True, True]
    (row,) = [row for row in report["rows"] if row["role"] == "teacher"]
    assert row["latency"] and row["score"]["accuracy"] is not None


@pytest.mark.parametrize("kind", ["tagging", "qa"])
def test_xlnet_tags_and_answers(kind: str, tasks: dict[str, TaskData], tmp_path: Path, hastened: None) -> None:
    make = marked.sentences if kind == "tagging" else marked.questions
    for split in ("train", "dev"):
        make(tmp_path / "data" / f"{split}.{'conll' if kind == 'tagging' else 'json'}", count=16)
    bundle, report = shipped("xlnet", "{layers: 1}", str(tmp_path / "data"), tmp_path)
    asked: Any = ["good film"] if kind == "tagging" else [("what is the film ?", "the film is good")]
    assert len(bundle.predict(asked)) == 1
    assert [row["role"] for row in report["rows"]].count("teacher") == 1


def test_a_teacher_that_cannot_be_exported_is_scored_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hastened: None
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise ExportError("this one cannot be traced")

    monkeypatch.setattr("compress.jobs.measure.to_onnx", refused)
    _, report = shipped("bert", BERT, tiny.reviews(tmp_path / "data", train=32, dev=12), tmp_path)
    (row,) = [row for row in report["rows"] if row["role"] == "teacher"]
    assert not row["latency"] and 0 <= row["score"]["accuracy"] <= 1 and row["parameters"] > 0
    assert any("this one cannot be traced" in note for note in report["notes"])
    fp32 = next(row for row in report["rows"] if row["name"] == "student fp32")
    assert 0 <= fp32["agreement"] <= 1
