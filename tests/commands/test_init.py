"""`compress init`: the command that fits the answers can be pasted, and each of its parts is explained."""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import compress
from compress.commands.init import RECIPES, SCHEMA
from compress.config.choices import Choices
from compress.config.recipe import Recipe
from compress.errors import CompressError
from compress.nas.config import Space
from tests import command
from tests.command import check_parses


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("goal", RECIPES)
@pytest.mark.parametrize("device", ["local", "browser", "ssh:me@host"])
def test_every_word_of_a_command_is_explained(goal: Any, device: str) -> None:
    found = compress.init(goal=goal, latency_ms=4 if goal == "latency" else None, minutes=30, device=device)
    for words in (found.command, found.plan, *found.after):
        if words:
            check_parses(words)
    explained = " ".join(found.parts)
    assert [word for word in shlex.split(found.command)[1:] if word not in explained and word != "minilm"] == []
    assert ("--minutes", "30") in pairwise(shlex.split(found.command))
    assert (found.plan == "") == (goal == "latency")


@pytest.mark.parametrize("goal", RECIPES)
def test_settings_are_written_and_load(goal: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    found = compress.init(goal=goal, latency_ms=4 if goal == "latency" else None, file=file)
    assert found.file == str(file)
    assert str(file) in shlex.split(found.command)
    load: Any = {"latency": Space.load, "score": Choices.load}.get(goal, Recipe.load)
    load(str(file))
    with pytest.raises(CompressError, match="expected a new"):
        compress.init(file=file)


def test_without_a_terminal_defaults_are_used() -> None:
    result = command.run("init", "--goal", "2.5", "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert found["schema"] == SCHEMA
    assert found["command"].startswith("compress search --teacher minilm --data intents --max-latency-ms 2.5 ")


def test_a_terminal_is_asked_for_missing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prompt(question: str, **_: object) -> str:
        asked.append(question)
        return {"What matters": "speed", "How many": "20"}.get(" ".join(question.split()[:2]), "local")

    monkeypatch.setattr("compress.cli.start.typer.prompt", prompt)
    monkeypatch.setattr("compress.cli.start.is_interactive", lambda: True)
    result = command.run("init", "--teacher", "minilm", "--data", "intents")
    assert result.code == 0
    assert len(asked) == 3
    assert "compress prune minilm --data intents --recipe prune-taylor --speedup 2 --minutes 20" in result.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--goal sped", "Did you mean 'speed'?"),
        ("--goal 0", "more than 0"),
        ("--goal 4ms", "expected numbers"),
        ("--goal latency", "as in --goal 4"),
        ("--teacher bert-bse", "Did you mean 'bert-base'?"),
        ("--data ./nowhere", "nowhere"),
        ("--file mine.txt", "expected a new .yaml file"),
    ],
)
def test_invalid_answers_are_refused(words: str, expected: str) -> None:
    result = command.run("init", *words.split())
    assert result.code == 2
    assert expected in result.err
