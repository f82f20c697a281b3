"""What is installed: the wheel holds all of it and nothing else, works outside a checkout, and the pins are pins."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from compress import provenance

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as package indexes and their users do, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has the wheel, and borrows everything it depends on from this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    options = ["--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, *options, str(wheel)], check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a path, not a site directory: the editable install of the checkout stays unknown
    (packages / "borrowed.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")), encoding="utf-8")
    return folder / "bin"


KEPT = ("PYTHONPYCACHEPREFIX",)
"""Where compiled modules are kept: torch and transformers would be compiled again."""


def outside(command: list[str | Path], cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key in KEPT or not key.startswith("PYTHON")}
    return subprocess.run(command, cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_the_wheel_is_the_package_and_the_recipes(wheel: Path) -> None:
    files = {path for path in (ROOT / "compress").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    expected |= {f"compress/{path.relative_to(ROOT).as_posix()}" for path in recipes}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {
        "compress/py.typed",
        "compress/recipes/tinybert.yaml",
        "compress/recipes/prompts/sentiment.yaml",
        "compress/reporting/templates/run.html.j2",
        "compress/reporting/templates/page.css",
        "compress/reporting/templates/compare.js",
        "compress/exporters/card.md.jinja",
        "compress/data/resources/intents/train.tsv",
    } < found


def test_metadata_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (about,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    text = archive.read(about).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Description-Content-Type: text/markdown" in text
    assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


def test_it_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = outside([installed / "python", "-c", "import compress; print(compress.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    listed = outside([installed / "compress", "recipes"], tmp_path)
    named = {line.split()[0] for line in listed.splitlines() if line.strip()}
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} < named
    output = outside([installed / "compress", "recipes", "tinybert"], tmp_path)
    assert output.strip() == (ROOT / "recipes" / "tinybert.yaml").read_text(encoding="utf-8").strip()
    count = "from compress import load_task; print(len(load_task('intents').train))"
    assert int(outside([installed / "python", "-c", count], tmp_path)) > 0


def pins(*names: str) -> dict[str, str]:
    """Return the version of each pinned distribution; every pin but torch's has hashes."""
    pinned = {"torch": _text("torch").splitlines()[-1].removeprefix("torch==")}
    for name in names:
        text = re.sub(r"^(#.*|-r base\.txt)\n", "", _text(name), flags=re.MULTILINE)
        pin = r"([a-z0-9-]+)==([0-9][a-z0-9.]*)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
        assert re.fullmatch(f"(?:{pin})+", text), f"{name}.txt: one exact version with its hashes each, no addresses"
        found = {match[1]: match[2] for match in re.finditer(pin, text)}
        assert not found.keys() & pinned.keys(), "nothing is pinned twice"
        pinned |= found
    return pinned


def _text(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")


def test_declared_packages_are_pinned() -> None:
    project = PROJECT["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = [Requirement(line) for line in (*PROJECT["build-system"]["requires"], *project["dependencies"], *extras)]
    own = pins("base", "executorch", "npu") | pins("base", "coreml")
    own |= pins("base", "coreai") | pins("base", "engines")
    own |= pins("litert") | pins("trackers")  # environments of their own
    pinned = own | pins("base", "dev")
    for requirement in declared:
        if requirement.name != project["name"]:
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier


def test_dependencies_of_pins_are_pinned() -> None:
    pinned = pins("base", "dev")
    for name, version in pinned.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version.partition("+")[0] != version:
            continue
        needed = [Requirement(line) for line in found.requires or []]
        plain = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(each.name) for each in plain} <= pinned.keys(), f"of {name}"


@pytest.mark.parametrize(("file", "extras"), [("litert", ["litert"]), ("trackers", ["mlflow", "trackio", "wandb"])])
def test_separate_environments_are_pinned(file: str, extras: list[str]) -> None:
    more = [line for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]]
    declared = [Requirement(line) for line in (*PROJECT["project"]["dependencies"], *more)]
    assert all(pins(file)[canonicalize_name(each.name)] in each.specifier for each in declared)


def test_no_file_names_the_other_compress() -> None:
    """`compress` on package indexes is not ours."""
    assert PROJECT["project"]["name"] == provenance.DISTRIBUTION != "compress"
    bare = re.compile(rb"(?<![\w.-])compress\[\w+\]|pip install (-\S+ )*['\"]?compress(?![\w-])")
    own = [path for path in _tracked() if path.suffix != ".py" or path.name != Path(__file__).name]
    assert [path for path in own if bare.search(path.read_bytes())] == []


@pytest.mark.parametrize("extra", sorted(PROJECT["project"]["optional-dependencies"].keys() - {"dev"}))
def test_a_hint_names_what_the_extra_lists(extra: str) -> None:
    listed = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"][extra]]
    words = shlex.split(provenance.install_command(extra))
    assert words[:2] == ["pip", "install"]
    found = [Requirement(word) for word in words[2:]]
    assert {(each.name, each.specifier) for each in found} == {(each.name, each.specifier) for each in listed}


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1].endswith(" test")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_file_has_a_local_path() -> None:
    machine = re.compile(rb"(?<![\w.])/((work|root|opt)|home/\w+)/\w")
    assert [path for path in _tracked() if machine.search(path.read_bytes())] == []


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
