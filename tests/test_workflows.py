"""What continuous integration and the container are told fits the project: versions, files, options."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet

from compress.cli import app

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
pytestmark = pytest.mark.skipif(not WORKFLOW.is_file(), reason="they are in a checkout only")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def test_the_matrix_matches_the_classifiers() -> None:
    matrix = jobs()["quick"]["strategy"]["matrix"]
    expected = [line.split(" :: ") for line in PROJECT["classifiers"]]
    assert matrix["python"] == [
        line[2] for line in expected if line[:2] == ["Programming Language", "Python"] and "." in line[2]
    ]
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0") for version in matrix["python"])
    systems = {"MacOS": "macos-latest", "Windows": "windows-latest", "Linux": "ubuntu-latest"}
    assert {systems[line[-1]] for line in expected if line[0] == "Operating System"} == set(matrix["os"])


def test_the_oldest_and_the_newest_versions_are_tried_every_week() -> None:
    """The newest on every Python, the oldest on the oldest, which alone has wheels of them."""
    found = yaml.safe_load(WORKFLOW.with_name("versions.yml").read_text(encoding="utf-8"))
    pythons = jobs()["quick"]["strategy"]["matrix"]["python"]
    tried = {(each["versions"], each["python"]) for each in found["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert tried == {("lowest", pythons[0]), *(("newest", each) for each in pythons)}
    assert "schedule" in found[True]  # YAML's `on`
    targets = set(re.findall(r"^([\w-]+):.* ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {f"test-{versions}" for versions, _ in tried} <= targets


def test_ci_runs_the_suite_without_write_permission() -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    assert [step["run"] for step in jobs()["test"]["steps"] if "run" in step] == [".ci/run"]
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert "github.event" not in text, "what others write never becomes a part of a script"


def test_files_of_the_jobs_exist() -> None:
    lines = [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]
    named = {word for line in lines for word in shlex.split(line) if "/" in word}
    assert named >= {".ci/run", "requirements/dev.txt", "requirements/torch.txt", "tests/training/test_tracking.py"}
    assert [word for word in named if not (ROOT / word).is_file()] == []
    actions = [step["uses"] for job in jobs().values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", each) for each in actions)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in jobs()["quick"]["strategy"]["matrix"]["python"]


def test_the_container_is_pinned_and_unprivileged() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    image = re.fullmatch(
        r"PYTHON=python:((3\.\d+)\.\d+)-slim-[a-z]+", next(line[1] for line in lines if line[0] == "ARG")
    )
    assert image and image[2] in jobs()["quick"]["strategy"]["matrix"]["python"], "one exact version, that is tested"
    assert {line[1].split()[0] for line in lines if line[0] == "FROM"} == {"${PYTHON}"}
    torch = (ROOT / "requirements" / "torch.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert [word for word in text.split() if word.startswith("torch==")] == [f"{torch}+cpu"]
    installs = [line[1] for line in lines if line[0] == "RUN" and "pip install" in line[1]]
    assert all("--no-deps" in each for each in installs)
    assert [each for each in installs if "-r " in each and "--require-hashes" not in each] == []
    last = {line[0]: line[1] for line in lines}
    assert last["USER"] not in ("root", "0")
    assert last["ENTRYPOINT"] == '["compress"]'


def test_files_of_the_container_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    ignored, *kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert (ignored, kept.pop()) == ("*", "**/__pycache__")
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()}
    assert {f"!{each}" for each in copied} == set(kept)
    assert [each for each in copied if not (ROOT / each).exists()] == []


# ---- the action that runs the gate


def gate_command() -> Any:
    return typer.main.get_command(app).commands["gate"]  # type: ignore[attr-defined]


def test_inputs_of_the_action() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    parameters = {each.opts[-1].removeprefix("--"): each for each in gate_command().params}
    assert set(action["inputs"]) - {"undecided"} <= set(parameters)
    for name, declared in action["inputs"].items():
        if name in parameters and "default" in declared and name not in ("markdown", "junit"):
            default = parameters[name].default
            assert declared["default"] == (
                "" if default is None else f"{default:g}" if isinstance(default, float) else default
            )
        assert declared.get("required", False) == (name in ("old", "new"))


@pytest.mark.parametrize(
    ("code", "undecided", "ends"), [(0, "fail", 0), (1, "warn", 1), (2, "warn", 2), (3, "fail", 3), (3, "warn", 0)]
)
def test_the_action_runs_our_command(code: int, undecided: str, ends: int, tmp_path: Path) -> None:
    """Given by the environment alone, so that no input is read as a script or an option."""
    step = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"][-1]
    assert "${{" not in step["run"]
    given = {
        "old": "--help",
        "new": "$(touch evil) new",
        "max-larger": "10%",
        "data": "my data",
        "undecided": undecided,
    }
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    values = {name: given.get(name, result.get("default")) for name, result in inputs.items()}
    assert step["env"] == {name.upper().replace("-", "_"): f"${{{{ inputs.{name} }}}}" for name in inputs}
    program = tmp_path / "bin" / "compress"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > words\necho done > gate.md\nexit {code}\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {
        **{name.upper().replace("-", "_"): value for name, value in values.items()},
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "GITHUB_OUTPUT": "output",
        "GITHUB_STEP_SUMMARY": "summary",
    }  # fmt: skip
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == ends
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"code={code}\n"
    assert (tmp_path / "summary").read_text(encoding="utf-8") == "done\n"
    assert not (tmp_path / "evil").exists()
    name, *words = (tmp_path / "words").read_text(encoding="utf-8").splitlines()
    assert name == "gate"
    parsed = gate_command().make_context("gate", words).params
    assert (str(parsed["old"]), str(parsed["new"])) == (given["old"], given["new"])
    assert (parsed["data"], parsed["max_larger"], parsed["max_slower"]) == ("my data", "10%", "5%")
    assert (parsed["max_drop"], parsed["minutes"], str(parsed["junit"])) == (None, 5.0, "gate.xml")
    bare = {**environment, "MARKDOWN": "", "JUNIT": ""}  # no files
    (tmp_path / "summary").unlink()
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=bare, check=False)
    assert done.returncode == ends
    assert not (tmp_path / "summary").exists()
    assert not {"--markdown", "--junit"} & {
        word.partition("=")[0] for word in (tmp_path / "words").read_text(encoding="utf-8").splitlines()
    }
