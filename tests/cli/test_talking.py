"""How much a command prints: all, without progress, or errors and the last line alone."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.table import Table
from typer.testing import CliRunner

from compress.cli.options import UNCERTIFIED, Command, console, print_result, user_errors, with_verbosity
from compress.console import print_note, warn
from compress.errors import DataError, RunError
from compress.jobs.checks import join_processes
from tests import command, tiny


def work(end: Callable[[], None]) -> Callable[[], None]:
    def command() -> None:
        with user_errors(hint="Nothing is lost."):
            output = console()
            output.print("step 1")
            with output.status("working"):
                warn(output, "a row is empty")
            print_note(output, "a note")
            output.print(Table("a table"))
            console().print("bundle: here")
            console(answer=True).print("an answer")
            print_result("a result")
            end()

    return command


def fails() -> None:
    raise DataError("no such file") from ValueError("the cause")


def exits() -> None:
    raise typer.Exit(UNCERTIFIED)


def run(end: Callable[[], None], *words: str) -> Any:
    app = typer.Typer()
    app.command(cls=Command)(with_verbosity(work(end)))
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["step 1", "warning: a row is empty", "note a note", "a table", "bundle: here", "an answer", "a result"]),
        (["--log-level", "warning"], ["warning: a row is empty", "an answer", "a result", "bundle: here"]),
        (["--log-level", "error"], ["an answer", "a result", "bundle: here"]),
        (["--quiet"], ["an answer", "a result", "bundle: here"]),
        (["-q"], ["an answer", "a result", "bundle: here"]),
    ],
)
@pytest.mark.parametrize(("end", "code"), [(lambda: None, 0), (exits, UNCERTIFIED)])
def test_what_is_printed(end: Callable[[], None], code: int, words: list[str], expected: list[str]) -> None:
    result = run(end, *words)
    assert result.exit_code == code
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert [line for line in lines if line.strip("┏━┓┃┡┩└─┘│ ")] == [
        line if line != "a table" else "┃ a table ┃" for line in expected
    ]


def test_quiet_prints_only_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.cli.options.print_result", lambda _: None)
    result = run(fails, "--quiet")
    assert result.exit_code == 2
    assert result.stderr == "error: no such file\n"
    assert "bundle" not in result.stdout


def test_debug_prints_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    result = run(fails, "--log-level", "debug")
    assert result.exit_code == 2
    assert "ValueError: the cause" in result.stderr
    assert result.stderr.endswith("error: no such file\n")
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "debug"
    assert "Traceback" not in run(fails).stderr


def test_a_level_ends_with_its_command() -> None:
    run(lambda: None, "--quiet")
    assert "step 1" in run(lambda: None).stdout


def test_other_processes_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for words in ([], ["--quiet"]):
        for alone in ("1", ""):
            monkeypatch.setenv("WORLD_SIZE", alone)
            assert "step 1" in run(lambda: None).stdout, "the only process"
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert run(lambda: None, *words).stdout == "a result\n"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "RANK="),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK=first"),
    ],
)
def test_a_part_of_a_launchers_variables_is_refused(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    told = command.run("recipes")
    assert told.code == 2 and f"{named}: expected what torchrun" in told.err


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_processes_that_cannot_meet_are_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    for name, value in (variables | {missing: ""}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=f"{missing}=: expected what torchrun"):
        join_processes()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("bench.bench", "bench bundle"),
        ("gate.gate", "gate old new"),
        ("trim.trim", "trim bundle --out new --corpus pydoc"),
        ("export.export", "export bundle --out new"),
        ("label.label", "label --teacher minilm --prompt sentiment --data texts.txt --out new.jsonl"),
    ],
)
def test_ctrl_c_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.bundle(Path("bundle"))
    Path("texts.txt").write_text("a film\n", encoding="utf-8")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"compress.commands.{function}", stop)
    result = command.run(*words.split())
    assert result.code == 130
    assert "the same command" in result.err
