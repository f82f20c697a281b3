"""The data of a command are read once, however many of its parts ask for them."""

from pathlib import Path

import pytest
from rich.console import Console

from compress.config.choices import CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.data import load_task
from compress.jobs import loading
from compress.jobs.loading import TaskLoader
from compress.jobs.request import DistillRequest
from compress.teachers.checkpoint import CheckpointTeacher
from compress.teachers.inputs import load_inputs
from compress.teachers.opening import choose_recipe
from tests import tiny


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds that are asked for when data are read."""
    found = list[str]()

    def counting(*arguments: object, **options: object) -> object:
        found.append(str(options["kind"]))
        return load_task(*arguments, **options)

    monkeypatch.setattr(loading, "load_task", counting)
    return found


def test_choosing_a_recipe_reads_the_data_for_the_run(tmp_path: Path, home: Path, read: list[str]) -> None:
    teacher = tiny.checkpoint(tmp_path / "teacher")
    tasks = TaskLoader(tiny.reviews(tmp_path / "data"), 0)
    candidates = CandidateRecipes.load("auto")
    request = DistillRequest(
        teacher=teacher,
        data=tasks.source,
        out=tmp_path / "run",
        recipe=candidates,
        corpus=None,
        prompt=None,
        length=LengthOptions(),
        options=RunOptions(),
        console=Console(quiet=True),
    )
    choose_recipe(candidates, request, tasks)
    inputs = load_inputs(CheckpointTeacher("tiny", teacher, False), tasks)
    assert len(inputs.data.train) == 96
    assert read == ["None"]


def test_another_way_to_read_them_is_another_reading(tmp_path: Path, home: Path, read: list[str]) -> None:
    tasks = TaskLoader(tiny.reviews(tmp_path / "data"), 0)
    detected = tasks.load(DataOptions(), unlabelled=False)
    several = tasks.load(DataOptions(kind="multilabel"), unlabelled=False)
    assert (detected.task.kind, several.task.kind) == ("classification", "multilabel")
    assert read == ["None", "multilabel"]
