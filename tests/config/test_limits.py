"""Numbers out of their range are refused by commands and functions."""

from pathlib import Path

import pytest

from compress.arguments import MOST_SEED
from compress.config.options import RunOptions
from compress.config.recipe import Recipe
from compress.errors import ArgumentError, CompressError, PruneError
from compress.jobs.target import set_target
from compress.reporting.compare import Limits
from tests import command


@pytest.mark.parametrize("seed", [-1, MOST_SEED + 1, 1.5, True])
def test_seeds(seed: int) -> None:
    assert [RunOptions(seed=each).seed for each in (0, MOST_SEED)] == [0, MOST_SEED]
    with pytest.raises(ArgumentError) as refused:
        RunOptions(seed=seed)
    assert refused.value.name == "seed"


@pytest.mark.parametrize("limits", [{"budget_ms": -1}, {"max_mb": -1}, {"max_mb": float("nan")}])
def test_invalid_limits(limits: dict[str, float]) -> None:
    with pytest.raises(CompressError, match="expected a number from"):
        Limits(**limits)


@pytest.mark.parametrize("setting", [{"threads": 9999}, {"batch": 10**9}, {"seq": 10**9}])
def test_invalid_settings(setting: dict[str, int]) -> None:
    with pytest.raises(PruneError, match="less than or equal to"):
        set_target(Recipe.load("prune-taylor"), {"layers": 2}, setting)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("quantize {here} --data intents --max-drop -1", "--max-drop"),
        ("quantize {here} --data intents --max-drop 101", "--max-drop"),
        ("export {here} --tune --max-drop -1", "--max-drop"),
        ("trim {here} --data intents --out {here}/out --max-drop -1", "--max-drop"),
        ("report {here} --budget-ms -1", "--budget-ms"),
        ("report {here} --max-mb -1", "--max-mb"),
        ("label --teacher gpt2 --prompt sentiment --data {here} --out {here}/out.jsonl --seed -5", "--seed"),
    ],
)
def test_commands_refuse_them(tmp_path: Path, words: str, option: str) -> None:
    result = command.run(*words.format(here=tmp_path).split())
    assert result.code == 2
    assert option in result.err
