"""A kind of task in a user's own file runs through every command; nothing of it runs unless they allow it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compress
from compress import kinds
from compress.config import user_code
from compress.errors import BundleError, CompressError, DataError, RecipeError
from compress.exporters.artifact import Bundle
from compress.records.run_report import Report
from tests import command, tiny
from tests.tasks.cases import page_code

RECIPE = tiny.RECIPE.replace("loss: hinton.soft_targets, weight: 0.5, temperature: 2.0", "loss: hinton.matched_logits")
KIND = "mykinds.count"


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mykinds"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Write the page's file, which leaves a mark when it is imported, and forget it afterwards."""
    file = tmp_path / "code" / "mykinds" / "count.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n{page_code()}", encoding="utf-8"
    )
    path = list(sys.path)
    yield tmp_path / "code"
    sys.path[:] = path
    forget()


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Write texts that say "good" none to three times, with the number."""
    (tmp_path / "data").mkdir()
    for split, rows in (("train", 96), ("dev", 40)):
        lines = [f"{'good ' * (n % 4)}{'film ' * (n % 3)}{'plot'}\t{n % 4}" for n in range(rows)]
        (tmp_path / "data" / f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n", encoding="utf-8")
    return str(tmp_path / "data")


def test_every_command_runs_it(
    folder: Path, data: str, tmp_path: Path, hastened: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    given: dict[str, Any] = {
        "teacher": tiny.checkpoint(tmp_path / "teacher"),
        "recipe": tiny.recipe(tmp_path, RECIPE),
        "data": data,
        "kind": KIND,
        "out": tmp_path / "run",
        "precision": "fp32",
        "gate": "warn",
    }
    with pytest.raises(DataError, match=r"mykinds\.count.* --allow-code FOLDER"):
        tiny.call(compress.distill, **given)
    assert not (tmp_path / "imported").exists()
    bundle = tiny.call(compress.distill, **given, allow_code=str(folder))
    assert bundle.task.kind == KIND
    report = Report.from_json(bundle.path / "report.json")
    assert (report.kind, report.metric, report.unit, report.labels) == (KIND, "right", "rows", 0)
    assert [row.name for row in report.of_role("baseline")] == ["the median"]
    (answer,) = bundle.predict(["good plot"])
    assert answer.score == int(answer.score)
    smaller = tiny.call(compress.quantize, bundle=str(bundle.path), out=tmp_path / "int8", data=data, max_drop=1.0)
    assert smaller.bundle.task == bundle.task
    forget()
    with pytest.raises(BundleError, match=r"manifest\.json.*mykinds\.count.*import"):
        Bundle.load(bundle.path)
    words = ("predict", str(bundle.path), "good plot")
    told = command.run(*words)
    assert (told.code, KIND in told.err) == (2, True)
    told = command.run(*words, "--allow-code", str(folder))
    assert (told.code, told.out.split("\t")[0]) == (0, f"{answer.score:.4f}")
    shown = command.run("report", str(tmp_path / "run"), "--allow-code", str(folder))
    assert shown.code == 0, shown.err


def test_a_module_is_refused_outside_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for kind, allowed in ((KIND, tmp_path / "empty"), ("json.decoder", folder), ("compress.tasks.qa", folder)):
        with pytest.raises(CompressError, match=re.escape(kind)):
            user_code.load_kind(kind, allowed)
    with pytest.raises(RecipeError, match="no such folder"):
        user_code.load_kind(KIND, tmp_path / "nowhere")
    assert not (tmp_path / "imported").exists()


def test_a_broken_module_is_named(folder: Path) -> None:
    for name, text, expected in (
        ("broken", "1 / 0", "ZeroDivisionError.*broken.py, line 1"),
        ("empty", "", "kind = __name__"),
    ):
        (folder / "mykinds" / f"{name}.py").write_text(text, encoding="utf-8")
        with pytest.raises(CompressError, match=expected):
            user_code.load_kind(f"mykinds.{name}", folder)


def test_permission_ends_with_its_command(folder: Path) -> None:
    with user_code.allow_kinds(folder):
        pass
    with pytest.raises(DataError, match="--allow-code"):
        kinds.find(KIND)


def test_a_changed_kind_is_another_run(folder: Path) -> None:
    recipe = compress.Recipe.load("distilbert")
    user_code.load_kind(KIND, folder)
    before = user_code.digests(recipe, KIND)
    file = folder / "mykinds" / "count.py"
    file.write_text(file.read_text() + "\n", encoding="utf-8")
    assert before is not None and user_code.digests(recipe, KIND) != before
    assert user_code.digests(recipe, "regression") is None


@pytest.mark.parametrize("kind", ["cout", "/tmp/count.py", "mykinds.", "a b.c", "..count"])
def test_what_is_no_kind(kind: str) -> None:
    with pytest.raises(DataError, match="no kind of task"):
        kinds.find(kind)
    with pytest.raises(CompressError):
        compress.DataOptions(kind=kind)
