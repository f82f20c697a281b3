"""The user's own functions: where they may come from, when they are imported, and errors when they fail."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from compress.config import user_code
from compress.config.recipe import Recipe
from compress.errors import RecipeError
from compress.nas.config import Space
from compress.training.objective import check_terms, find_loss
from tests import command, tiny
from tests.command import Shelf, accepted, refused
from tests.config.test_recipe import GOOD, written

pytestmark = pytest.mark.usefixtures("hastened")

GOOD_LOSS = """
import compress

@compress.reads("logits")
def margin(student, teacher, *, temperature: float = 1.0):
    return ((student - teacher) / temperature).pow(2).mean()

def plain(student, teacher, mask):
    return (student - teacher).abs().mean()

def four(student, teacher, mask, power):
    return student.mean()

number = 3
"""


@pytest.fixture(autouse=True)
def restored_modules() -> Iterator[None]:
    """Remove modules and paths that a test added."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("mine", "pack", "space"):
            del sys.modules[name]


def folder(tmp_path: Path, source: str = GOOD_LOSS, name: str = "mine.py") -> Path:
    """Write a folder with one module, which leaves a file when it is imported."""
    file = tmp_path / "code" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    mark = tmp_path / "imported"
    file.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n{source}", encoding="utf-8")
    return tmp_path / "code"


def imported(tmp_path: Path) -> bool:
    return (tmp_path / "imported").exists()


def recipe(tmp_path: Path, **line: object) -> str:
    stage = {"distill": "first", "lr": 1e-3, "objective": [{"loss": "mine.margin"} | line]}
    return written(tmp_path, GOOD | {"stages": [stage]})


def problem(tmp_path: Path, allowed: Path | str | None, **line: object) -> str:
    with pytest.raises(RecipeError) as error:
        user_code.load(Recipe.load(recipe(tmp_path, **line)), allowed)
    (message,) = error.value.problems
    assert message.startswith("mine: stages[0].objective[0]: ") or "--allow-code" in message
    return message


def test_import_from_the_folder(tmp_path: Path) -> None:
    name, code = recipe(tmp_path, temperature=2.0), folder(tmp_path)
    read = Recipe.load(name)
    assert not imported(tmp_path)
    loaded = Recipe.load(name, allow_code=code)
    (term,) = loaded.training[0].objective
    assert find_loss(term).function(3.0 * _one(), _one()) == 4.0
    assert check_terms([term], "here") == []
    assert (loaded, loaded.to_yaml()) == (read, read.to_yaml()), "the code is no part of what a recipe is"
    assert "loss: mine.margin" in loaded.to_yaml()
    assert user_code.load(loaded, None) is loaded


def _one() -> object:
    import torch

    return torch.ones(1)


def test_reads_of_an_unmarked_function(tmp_path: Path) -> None:
    loaded = Recipe.load(recipe(tmp_path, loss="mine.plain", reads="layers"), allow_code=folder(tmp_path))
    assert find_loss(loaded.training[0].objective[0]).reading.signal == "layers"
    loaded = Recipe.load(recipe(tmp_path, loss="mine.plain"), allow_code=tmp_path / "code")
    assert "does not declare what it reads" in check_terms(loaded.training[0].objective, "here")[0]


def test_packages_and_neighbouring_modules(tmp_path: Path) -> None:
    code = folder(tmp_path, "from pack.losses import margin\n")
    folder(tmp_path, "", "pack/__init__.py")
    folder(tmp_path, GOOD_LOSS, "pack/losses.py")
    for name in ("mine.margin", "pack.losses.margin"):
        assert Recipe.load(recipe(tmp_path, loss=name), allow_code=code).training[0].objective[0].code is not None


def test_functions_of_stages_and_spaces(tmp_path: Path) -> None:
    code = folder(tmp_path)
    lines = {"corrupt": "mine.plain", "step": {"by": "mine.plain"}, "rows": "mine.plain"}
    student = {"init": {"by": "mine.plain"}}
    stages = [GOOD["stages"][0] | lines | {"student": student}, GOOD["stages"][1]]
    loaded = Recipe.load(written(tmp_path, GOOD | {"stages": stages, "student": student}), allow_code=code)
    first = loaded.training[0]
    assert first.student is not None
    calls = [first.corrupt, first.step, first.rows, first.student.init, loaded.student.init]
    assert [call.function.__name__ for call in calls if call and not isinstance(call, str)] == ["plain"] * 5
    space = Space.load("width-depth", ["short.objective.0.loss=mine.margin"])
    assert user_code.load(space, code).short.objective[0].code is not None


@pytest.mark.parametrize("loss", ["mine.margin", "no.such.module", "math.gcd", "torch.nn.functional.mse_loss"])
def test_nothing_is_imported_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    monkeypatch.chdir(folder(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    message = problem(tmp_path, None, loss=loss)
    assert loss in message
    assert "--allow-code" in message
    assert not imported(tmp_path)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "there is no such folder" in problem(tmp_path, tmp_path / "absent")
    assert "there is no such folder" in problem(tmp_path, "unittest", loss="unittest.case.main")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("mien.margin", "there is no module 'mien' in"),
        ("mien.margin", "Did you mean 'mine'?"),
        ("mine.margni", "mine has no function 'margni'. Did you mean 'margin'?"),
        ("mine.number", "mine has no function 'number'"),
        ("mine.inner.margin", "importing mine.inner failed: ModuleNotFoundError"),
        ("unittest.case.main", "'unittest.case': is not in"),
        ("json.dumps", "'json': is not in"),
        ("sys.exit", "'sys': is not in"),
        ("numpy.mean", "'numpy': is not in"),
    ],
)
def test_unknown_functions(tmp_path: Path, loss: str, message: str) -> None:
    assert message in problem(tmp_path, folder(tmp_path), loss=loss)


def test_a_module_of_the_same_name_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder(tmp_path)))
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    assert f"but in {tmp_path / 'code' / 'mine.py'}" in problem(tmp_path, allowed)
    assert not imported(tmp_path)


def test_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, "", "pack/__init__.py")
    monkeypatch.syspath_prepend(str(folder(tmp_path, GOOD_LOSS, "pack/losses.py")))
    (tmp_path / "empty").mkdir()
    assert "--allow-code pack" in problem(tmp_path, tmp_path / "empty", loss="pack.losses.margin")
    assert not imported(tmp_path)
    Recipe.load(recipe(tmp_path, loss="pack.losses.margin"), allow_code="pack")
    assert imported(tmp_path)
    assert "is not in" in problem(tmp_path, "pack", loss="json.dumps")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(0)", "SystemExit: 0 ("),
        ("raise SystemExit", "SystemExit"),
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("import absent_module", "ModuleNotFoundError: No module named 'absent_module' ("),
        ("def margin(:", "SyntaxError"),
        ("raise ValueError('first\\nsecond')", "ValueError: first ("),
    ],
)
def test_a_module_that_fails_on_import(tmp_path: Path, source: str, message: str) -> None:
    result = problem(tmp_path, folder(tmp_path, source))
    assert f"importing mine failed: {message}" in result
    assert f"{tmp_path / 'code' / 'mine.py'}, line {3 + source.startswith('import sys')}" in result
    assert "\n" not in result


def test_digests(tmp_path: Path) -> None:
    loaded = Recipe.load(recipe(tmp_path), allow_code=folder(tmp_path))
    before = user_code.digests(loaded)
    folder(tmp_path, GOOD_LOSS + "\n# changed\n")
    assert before is not None
    changed = user_code.digests(loaded)
    assert changed != before
    own = folder(tmp_path, "import helpers\nfrom package import part\n" + GOOD_LOSS)
    (own / "package").mkdir()
    for place in ("helpers.py", "package/__init__.py", "package/part.py", "unused.py"):
        (own / place).write_text("from . import other\n" if "part" in place else "", encoding="utf-8")
    (own / "package/other.py").write_text("", encoding="utf-8")
    found = [user_code.digests(loaded)]
    for place in ("helpers.py", "package/other.py", "unused.py"):
        (own / place).write_text("changed = True\n", encoding="utf-8")
        found.append(user_code.digests(loaded))
    assert len({str(each) for each in found[:3]}) == 3 and found[2] == found[3]
    assert user_code.digests(Recipe.load("tinybert")) is None


# The command


def own(tmp_path: Path, **line: object) -> str:
    tree = yaml.safe_load(tiny.RECIPE)
    tree["stages"][1]["objective"][0] = {"loss": "mine.margin"} | line
    return tiny.recipe(tmp_path / "recipes", yaml.safe_dump(tree))


def test_a_module_beside_the_recipe_is_not_run(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = own(tmp_path)
    monkeypatch.chdir(folder(tmp_path))
    (tmp_path / "recipes" / "mine.py").write_text((tmp_path / "code" / "mine.py").read_text())
    assert refused(command.run(*shelf.distill(tmp_path / "run", recipe=name)), tmp_path / "run", "--allow-code")
    assert not imported(tmp_path)


@pytest.mark.parametrize(
    ("words", "changed", "message"),
    [
        ("--set stages.0.stpes=1", {}, "stpes"),
        ("--set stages.0.objective.0.loss=tinybert.hiden", {}, "tinybert.hiden"),
        ("--set stages.0.micro_batch=3", {}, "micro_batch 3 does not divide"),
        ("--seed -5", {}, "seed"),
        ("", {"data": "./nowhere"}, "nowhere"),
        ("", {"teacher": "./nowhere"}, "nowhere"),
        ("--corpus ./nowhere", {}, "nowhere"),
    ],
)
def test_other_checks_come_first(
    shelf: Shelf, tmp_path: Path, words: str, changed: dict[str, str], message: str
) -> None:
    more = [*words.split(), "--allow-code", str(folder(tmp_path))]
    result = command.run(*shelf.distill(tmp_path / "run", *more, recipe=own(tmp_path), **changed))
    assert result.code == 2
    assert message in result.err
    assert not imported(tmp_path)


def test_a_module_that_exits(shelf: Shelf, tmp_path: Path) -> None:
    more = ["--allow-code", str(folder(tmp_path, "raise SystemExit(0)"))]
    result = command.run(*shelf.distill(tmp_path / "run", *more, recipe=own(tmp_path)))
    assert refused(result, tmp_path / "run", "SystemExit")


def test_wrong_arguments_are_found_first(shelf: Shelf, tmp_path: Path) -> None:
    more = ["--allow-code", str(folder(tmp_path))]
    name = own(tmp_path, loss="mine.four", reads="logits")
    result = command.run(*shelf.distill(tmp_path / "run", *more, recipe=name))
    assert refused(result, tmp_path / "run", "expected def four(student, teacher[, mask], *, option=...)")


def test_allowed_code_reaches_training(shelf: Shelf, tmp_path: Path) -> None:
    more = ["--allow-code", str(folder(tmp_path))]
    assert accepted(*shelf.distill(tmp_path / "run", *more, recipe=own(tmp_path, temperature=2.0)))
