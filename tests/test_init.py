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
from tests.command import pasted


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("goal", RECIPES)
@pytest.mark.parametrize("device", ["local", "browser", "ssh:me@host"])
def test_each_goal_is_a_command_whose_every_word_is_explained(goal: Any, device: str) -> None:
    found = compress.init(goal=goal, latency_ms=4 if goal == "latency" else None, minutes=30, device=device)
    for words in (found.command, found.plan, *found.after):
        if words:
            pasted(words)
    explained = " ".join(found.parts)
    assert [word for word in shlex.split(found.command)[1:] if word not in explained and word != "minilm"] == []
    assert ("--minutes", "30") in pairwise(shlex.split(found.command))
    assert (found.plan == "") == (goal == "latency")


@pytest.mark.parametrize("goal", RECIPES)
def test_the_settings_can_be_written_and_load(goal: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    found = compress.init(goal=goal, latency_ms=4 if goal == "latency" else None, file=file)
    assert found.file == str(file)
    assert str(file) in shlex.split(found.command)
    load: Any = {"latency": Space.load, "score": Choices.load}.get(goal, Recipe.load)
    load(str(file))
    with pytest.raises(CompressError, match="expected a new"):
        compress.init(file=file)


def test_without_a_terminal_nothing_is_asked_and_the_options_count() -> None:
    told = command.run("init", "--goal", "2.5", "--json")
    assert told.code == 0
    found = json.loads(told.out)
    assert found["schema"] == SCHEMA
    assert found["command"].startswith("compress search --teacher minilm --data intents --max-latency-ms 2.5 ")


def test_on_a_terminal_what_is_not_said_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prompt(question: str, **_: object) -> str:
        asked.append(question)
        return {"What matters": "speed", "How many": "20"}.get(" ".join(question.split()[:2]), "local")

    monkeypatch.setattr("compress.cli.start.typer.prompt", prompt)
    monkeypatch.setattr("compress.cli.start.is_interactive", lambda: True)
    told = command.run("init", "--teacher", "minilm", "--data", "intents")
    assert told.code == 0
    assert len(asked) == 3
    assert "compress prune minilm --data intents --recipe prune-taylor --speedup 2 --minutes 20" in told.out


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_answers_that_cannot_be_are_refused(words: str, said: str) -> None:
    told = command.run("init", *words.split())
    assert told.code == 2
    assert said in told.err
