"""How long the rows are decides how many tokens of them are read."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console

from compress.commands.distill import distill
from compress.commands.preflight import without_task
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.data.lengths import RowLengths
from compress.data.task import Task
from compress.errors import RecipeError
from compress.jobs.checks import describe_cuts
from compress.jobs.pretrain import open_pretraining
from compress.jobs.request import DistillRequest, PretrainRequest
from compress.kinds import Kind
from compress.nas.config import Space
from compress.nas.preparation import SearchRequest
from compress.teachers.inputs import open_job
from tests import tiny


def measure(
    words: list[int], *, kind: Kind = "classification", positions: int | None = None, teacher_length: int | None = None
) -> RowLengths:
    """Measure texts of so many words; every word is a token, and every text has two special ones."""
    split = Dataset.from_dict({"text": ["film " * many for many in words], "label": [0] * len(words)})
    task = Task(kind, ("text",), "label", (), "")
    return RowLengths.measure(split, task, tiny.tokenizer(), positions, teacher_length=teacher_length, seed=0)


@pytest.mark.parametrize(
    ("words", "fitting"),
    [
        ([3] * 100, 64),
        ([62] * 100, 64),
        ([63] * 100, 128),
        ([30] * 199 + [400], 64),  # half a percent may be cut
        ([30] * 190 + [200] * 10, 256),
        ([900] * 10, 512),
    ],
)
def test_the_longest_row_of_99_percent_decides(words: list[int], fitting: int) -> None:
    assert measure(words).fitting == fitting


def test_no_more_than_the_positions_are_read() -> None:
    assert [measure([200], positions=number).fitting for number in (40, 128, 8192)] == [40, 128, 256]


def test_the_kind_of_task_limits_the_length() -> None:
    long = {"question": ["a film"], "context": ["film " * 2000], "answers": [[]], "starts": [[]]}
    spans = Task("qa", ("question", "context"), "answers", (), "f1")
    read = RowLengths.measure(Dataset.from_dict(long), spans, tiny.tokenizer(), 512, seed=0)
    assert (read.fitting, read.share_cut(64)) == (384, 0.0)  # the rest is in other windows


def test_vectors_read_as_much_as_the_teacher() -> None:
    assert measure([5], kind="embedding").fitting == 256
    assert measure([5], kind="embedding", positions=128).fitting == 128
    assert measure([5], kind="embedding", teacher_length=384, positions=512).fitting == 384
    assert measure([200], kind="embedding").fitting == 256
    assert measure([200], kind="embedding", teacher_length=128).fitting == 128  # of more it makes other vectors
    assert measure([5], kind="embedding", teacher_length=8192).fitting == 512
    assert measure([5], teacher_length=384).fitting == 64  # a sentence encoder that learns to classify


def test_a_student_that_reads_less_than_its_teacher_is_named(tmp_path: Path) -> None:
    rows = measure([5], kind="embedding", teacher_length=384)
    short = recipe(tmp_path, "stages.1.max_length=128").with_length(rows.fitting)
    (note,) = describe_cuts(short, rows)
    assert "the first 128 tokens" in note and "--set stages.1.max_length=384" in note
    assert describe_cuts(recipe(tmp_path).with_length(rows.fitting), rows) == []
    assert describe_cuts(short, measure([5], teacher_length=384)) == []


def test_pairs_are_measured_together() -> None:
    pairs = Dataset.from_dict({"text": ["film " * 40], "text_pair": ["plot " * 40], "label": [0]})
    task = Task("regression", ("text", "text_pair"), "label", (), "pearson")
    assert RowLengths.measure(pairs, task, tiny.tokenizer(), 512, seed=0).fitting == 128


def test_large_splits_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.lengths.ROWS_SAMPLED", 50)
    assert len(measure([4] * 120).tokens) == 50


def stage(**given: Any) -> Stage:
    settings = {"distill": "x", "lr": 1e-3, "objective": [{"loss": "hinton.soft_targets"}]}
    return Stage.model_validate(settings | given)


def test_auto_is_the_default_for_rows_of_the_task() -> None:
    assert stage().max_length == "auto"
    assert stage().with_length(192).length == 192
    assert stage(max_length=48).with_length(192).length == 48
    assert stage(data="text").length == 128
    assert stage(rows="t5.rows").length == 128


@pytest.mark.parametrize("given", [{"data": "text"}, {"rows": "t5.rows"}, {"tokens": 512}])
def test_auto_fits_nothing_else(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fits the task's own rows only"):
        stage(max_length="auto", **given)


def test_the_papers_own_length_is_there() -> None:
    assert {each.max_length for each in Recipe.load("tinybert", paper=True).stages} == {64}
    assert {each.max_length for each in Recipe.load("tinybert").stages} == {"auto"}


def recipe(folder: Path, *more: str) -> Recipe:
    text = tiny.RECIPE.replace("    max_length: 32\n", "").replace(", max_length: 32", "")
    return Recipe.load(tiny.recipe(folder, text), more)


def test_runs_and_searches_read_what_their_rows_need(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split, rows in (("train", 60), ("dev", 40)):
        lines = [f"{'film ' * 80}{('bad', 'good')[n % 2]}\t{('no', 'yes')[n % 2]}" for n in range(rows)]
        (data / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
    teacher = tiny.checkpoint(tmp_path / "teacher", tiny.bert(max_position_embeddings=256).bert)
    request = DistillRequest(
        teacher=teacher, data=str(data), recipe=recipe(tmp_path), out=tmp_path / "run", corpus=None, prompt=None,
        columns=DataOptions(), length=LengthOptions(), options=RunOptions(), console=Console(quiet=True),
    )  # fmt: skip
    with open_job(request) as (job, _):
        models, notes = job.models, job.notes
        lengths = {stage.length for stage in (models.recipe.teacher, *models.recipe.stages)}
        assert (lengths, notes) == ({128}, ())
        assert set(models.context.rows(models.recipe.training[-1], 0)["length"]) == {83}
    space = Space.load("albert", ["axes={config.num_hidden_groups: [1, 2]}"])
    request = SearchRequest(teacher=teacher, data=data, out=tmp_path / "search")
    config = request.make_config(teacher, str(data), space)
    assert ({stage.length for stage in config.space.stages.values()}, config.seq) == ({128}, 128)


def test_long_rows_that_are_cut_are_named(tmp_path: Path) -> None:
    rows = measure([100] * 30 + [10] * 70, positions=512)
    short = recipe(tmp_path, "stages.1.max_length=64").with_length(rows.fitting)
    (note,) = describe_cuts(short, rows)
    assert note.startswith("30% of the training rows are longer than 64 tokens")
    assert "--set stages.1.max_length=128" in note
    assert describe_cuts(recipe(tmp_path).with_length(rows.fitting), rows) == []
    limited = measure([100] * 30 + [10] * 70, positions=64)
    (note,) = describe_cuts(recipe(tmp_path).with_length(limited.fitting), limited)
    assert "split long texts" in note


def test_a_stage_on_text_alone_needs_no_rows(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("the film was good and the plot was warm .\n" * 40, encoding="utf-8")
    heads = [f"stages.0.objective.{term}.heads=4" for term in range(3)]  # 48 do not divide the tiny teacher's width
    corpus = str(tmp_path / "corpus.txt")
    minilm = Recipe.load("minilm", ["stages.0.max_length=32", "stages.0.steps=2", *heads])
    request = PretrainRequest(
        teacher=tiny.checkpoint(tmp_path / "teacher"), corpus=corpus, data=None,
        recipe=without_task(minilm, corpus, None), out=tmp_path / "run",
        length=LengthOptions(), console=Console(quiet=True), options=RunOptions(),
    )  # fmt: skip
    with open_pretraining(request) as job:
        assert job.models.recipe.stages[0].length == 32


def test_a_length_above_the_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"stages\[1\].max_length is 100; .* has 64 positions"):
        distill(
            teacher=tiny.checkpoint(tmp_path / "teacher"), data=tiny.reviews(tmp_path / "data"),
            recipe=recipe(tmp_path, "stages.1.max_length=100"), out=tmp_path / "run",
        )  # fmt: skip
