"""The folder of a run: one run, one process at a time, and no half-written files."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.config.recipe import Recipe
from compress.errors import DamagedError, RunError
from compress.io import atomic_folder
from compress.training.run import Run, clean
from tests import tiny

IDENTITY = {"teacher": "minilm", "data": "glue/sst2", "corpus": None, "seed": 3, "precision": "bf16", "columns": []}
QUIET = Console(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.load(tiny.recipe(tmp_path / "recipes"))


def open_run(path: Path, recipe: Recipe, *, resume: bool = False, **changes: Any) -> Run:
    return Run.open(path, recipe, IDENTITY | changes, resume=resume)


def start_run(path: Path, recipe: Recipe) -> Path:
    """Start a run and leave a log in it."""
    with closing(open_run(path, recipe)):
        (path / "log.jsonl").write_text("", encoding="utf-8")
    return path


def test_recipe_and_identity_are_written_first(tmp_path: Path, recipe: Recipe) -> None:
    with closing(open_run(tmp_path / "deep" / "run", recipe, command="compress distill")) as run:
        assert Recipe.load(str(run.path / "recipe.yaml")).plain() == recipe.plain() | {"name": "tiny"}
        assert json.loads((run.path / "run.json").read_text(encoding="utf-8")) == IDENTITY | {
            "command": "compress distill"
        }
        assert (run.seed, run.main) == (3, True)


def test_an_existing_run_is_resumed_not_started_again(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    with pytest.raises(RunError, match="already holds a run; --resume continues it, another --out starts a new one"):
        open_run(path, recipe)
    open_run(path, recipe, resume=True, command="typed otherwise").close()


@pytest.mark.parametrize(("began", "now"), [(2, 1), (1, 2), (4, 8)])
def test_a_run_is_resumed_by_any_number_of_processes(began: int, now: int, tmp_path: Path, recipe: Recipe) -> None:
    """The record and a warning say which."""
    path = tmp_path / "run"
    open_run(path, recipe, processes=began).close()
    (path / "log.jsonl").write_text("", encoding="utf-8")
    for processes, notes, numbers in (
        (began, "", []),
        (now, f"{began}, then {now} processes", [now]),
        (now, f"{began}, then {now} processes", [now]),
        (began, f"{began}, then {now}, then {began} processes", [now, began]),
    ):
        with closing(open_run(path, recipe, processes=processes, resume=True)) as run:
            assert notes in run.note
            assert bool(notes) == bool(run.note)
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
        assert facts["processes"] == began
        assert facts.get("continued_by", []) == numbers
    with closing(open_run(path, recipe, processes=began, resume=True)) as run:
        run.finish()
    with closing(open_run(path, recipe, processes=now, resume=True)) as run:
        assert run.note.count("then") == 2, "nothing is trained any more"


def test_runs_that_have_not_recorded_their_processes_are_resumed(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = start_run(tmp_path / "run", recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Run.check(path, resume=True)


def test_resume_needs_a_run(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "not there"):
        with pytest.raises(RunError, match=r"holds no run .* without --resume"):
            open_run(tmp_path / name, recipe, resume=True)
    assert {each.name for each in tmp_path.rglob("*")} == {"recipes", "tiny.yaml", "empty"}


@pytest.mark.parametrize(
    "left",
    [".lock", ".lock recipe.yaml", ".lock recipe.yaml run.json costs.json", ".lock recipe.yaml .run.json.partial"],
)
def test_a_run_killed_before_it_began_starts_again(tmp_path: Path, recipe: Recipe, left: str) -> None:
    for name in left.split():
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("cut sho", encoding="utf-8")
    for resume in (True, False):
        open_run(tmp_path / "run", recipe, resume=resume).close()
        assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8")) == IDENTITY
    assert not (tmp_path / "run" / "costs.json").exists()


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match=r"file/run: cannot be made .*choose an --out that can be written"):
        open_run(tmp_path / "file" / "run", recipe)


def test_every_difference_from_the_existing_run_is_named(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    other = Recipe.load(tiny.recipe(tmp_path / "recipes"), ["stages.0.lr=1e-5"])
    with pytest.raises(RunError) as caught:
        open_run(path, other, resume=True, teacher="bert-base", seed=4)
    message = str(caught.value)
    assert "teacher was 'minilm', now 'bert-base'; seed was 3, now 4; the recipe differs" in message
    assert "precision" not in message
    open_run(path, recipe, resume=True).close()


def test_other_folders_are_left_alone(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "recipe.yaml").write_text("soup", encoding="utf-8")
    for resume in (True, False):
        with pytest.raises(RunError, match="is not empty and not a run of compress; choose another --out"):
            open_run(tmp_path / "notes", recipe, resume=resume)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["recipe.yaml"]
    with pytest.raises(RunError, match="is a file"):
        open_run(tmp_path / "notes" / "recipe.yaml", recipe)


# The lock


@contextmanager
def hold_lock(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock in another process."""
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_process_at_a_time(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    (path / ".lock").write_text("4711", encoding="utf-8")
    with hold_lock(path / ".lock") as other:
        with pytest.raises(
            RunError, match=r"another process \(pid 4711\) is running this run; wait for it, or stop it"
        ):
            open_run(path, recipe, resume=True)
        other.send_signal(signal.SIGKILL)
        other.wait()
        open_run(path, recipe, resume=True).close()


def test_a_refused_run_is_unlocked(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    with pytest.raises(RunError, match="seed"):
        open_run(path, recipe, resume=True, seed=4)
    open_run(path, recipe, resume=True).close()


def test_only_the_first_process_of_several_writes(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.open(tmp_path / "run", recipe, IDENTITY, main=False)
    assert not run.main
    assert not run.path.exists()
    run.close()


# The cursor


def write_result(run: Run, stage: str) -> None:
    with atomic_folder(run.result(stage), sealed=True) as folder:
        (folder / "weights").write_text("0.5", encoding="utf-8")


def test_a_stage_is_done_when_its_result_is_there(tmp_path: Path, recipe: Recipe) -> None:
    with closing(open_run(tmp_path / "run", recipe)) as run:
        first, second = recipe.stages
        assert run.remaining(recipe.stages, QUIET) == (None, [first, second])
        (run.stage(first.name) / "checkpoints" / "checkpoint-4").mkdir(parents=True)
        (run.stage(first.name) / ".model.partial").mkdir()
        assert run.remaining(recipe.stages, QUIET) == (None, [first, second])
        write_result(run, first.name)
        assert run.remaining(recipe.stages, QUIET) == (run.result(first.name), [second])
        write_result(run, second.name)
        assert run.remaining(recipe.stages, QUIET) == (run.result(second.name), [])


@pytest.mark.parametrize("name", ["weights", "checksums.json"])
def test_a_stage_with_a_damaged_result_is_not_done(tmp_path: Path, recipe: Recipe, name: str) -> None:
    console = Console(file=StringIO(), width=500)
    with closing(open_run(tmp_path / "run", recipe)) as run:
        first, second = recipe.stages
        for stage in recipe.stages:
            write_result(run, stage.name)
        (run.result(second.name) / name).write_bytes(b"")
        assert run.remaining(recipe.stages, console) == (run.result(first.name), [second])
        assert not run.result(second.name).exists()
        assert console.file.getvalue().count("\n") == 1  # type: ignore[attr-defined]
        for part in ("warning", str(run.result(second.name)), name, "made again"):
            assert part in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"seed": 3, "teacher', "\0" * 40])
def test_a_damaged_run_json_or_recipe_is_refused(tmp_path: Path, recipe: Recipe, content: str) -> None:
    path = start_run(tmp_path / "run", recipe)
    (path / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(DamagedError, match=r"run\.json: is damaged: .* another --out") as caught:
        open_run(path, recipe, resume=True)
    assert caught.value.path == path / "run.json"
    open_run(start_run(tmp_path / "other", recipe), recipe, resume=True).close()
    (tmp_path / "other" / "recipe.yaml").write_bytes(b"\xff\0")
    with pytest.raises(RunError, match=r"recipe\.yaml"):
        open_run(tmp_path / "other", recipe, resume=True)


# Identity


def test_a_teacher_that_has_changed_is_refused(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    with closing(open_run(path, recipe, resume=True)) as run:
        run.confirm(teacher="3f2a")
        run.confirm(teacher="3f2a", data="77ab")
    with closing(open_run(path, recipe, resume=True)) as run:
        run.confirm(teacher="3f2a", data="77ab")
        for changed, told in (({"teacher": "9999"}, "minilm"), ({"data": "0000"}, "glue/sst2")):
            with pytest.raises(RunError, match="has changed") as caught:
                run.confirm(**changed)
            for part in (told, "--out", *changed.values(), *({"3f2a"} if "teacher" in changed else {"77ab"})):
                assert part in str(caught.value)
        other = Run.open(path, recipe, IDENTITY, main=False)
        with pytest.raises(RunError, match="has changed"):
            other.confirm(teacher="9999")


# Time and disk


def test_seconds_add_up_over_processes(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("compress.training.run.time.monotonic", lambda: clock[0])
    path = start_run(tmp_path / "run", recipe)
    for before in (0.0, 10.0, 20.0):
        with closing(open_run(path, recipe, resume=True)) as run:
            assert run.before == before
            clock[0] += 10.0
            run.save_seconds()
            clock[0] += 5.0  # whose work was not kept
    (path / "seconds.json").write_text('{"secondr": 20}', encoding="utf-8")
    with pytest.raises(DamagedError, match=r"seconds\.json.* Remove it"):
        open_run(path, recipe, resume=True)


def leave_files(path: Path) -> int:
    """Write what a stage and a kill leave in a run; return the bytes that a finished run does not need."""
    needless = ("checkpoints/checkpoint-2/optimizer.pt", "best.safetensors", ".partial/checkpoint-4/optimizer.pt")
    needless = (*needless, ".model.partial/model.safetensors", "checkpoints/.checkpoint-3.partial/optimizer.pt")
    for name in (*needless, "model/model.safetensors"):
        file = path / "students" / "3" / "stages" / "lesson" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 1000)
    (path / "report.html").write_text("", encoding="utf-8")
    return 1000 * len(needless)


def list_files(path: Path) -> set[str]:
    return {each.name for each in path.rglob("*") if each.is_file()} - {".lock", "run.json", "recipe.yaml", "log.jsonl"}


def test_a_finished_run_keeps_only_its_results(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    with closing(open_run(path, recipe, resume=True)) as run:
        leave_files(path)
        run.finish()
    assert list_files(path) == {"model.safetensors", "report.html"}
    size = leave_files(path)
    assert clean(path, dry_run=True) == size
    assert len(list_files(path)) > 2
    assert clean(path) == size
    assert clean(path) == 0
    assert list_files(path) == {"model.safetensors", "report.html"}
    open_run(path, recipe, resume=True).close()


def test_an_unfinished_run_is_cleaned_only_with_the_option(tmp_path: Path, recipe: Recipe) -> None:
    path = start_run(tmp_path / "run", recipe)
    size = leave_files(path)
    with pytest.raises(RunError, match=r"is not finished.* --unfinished"):
        clean(path)
    with hold_lock(path / ".lock"), pytest.raises(RunError, match="another process"):
        clean(path, unfinished=True)
    assert clean(path, unfinished=True) == size
    with pytest.raises(RunError, match="holds no run"):
        clean(tmp_path)
