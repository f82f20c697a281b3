"""Bad input to every command: exit code 2, one sentence that has the decisive word, and nothing half-written."""

import shlex
from pathlib import Path

import pytest

from tests import command
from tests.campaign import corpus, process
from tests.campaign.cases import Record, one_of_each
from tests.campaign.reference import Reference

CASES = list(corpus.cases())
SLOW = 60.0


@pytest.fixture(scope="session")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    corpus.write(folder)
    return folder


def test_there_are_enough() -> None:
    assert len({(name, words) for name, words, _ in CASES}) >= 200
    assert {name for name, *_ in CASES} >= {*corpus.GOOD}


@pytest.mark.parametrize(
    ("name", "words", "said"), one_of_each(CASES, lambda case: case[0]), ids=lambda value: value[-50:]
)
def test_bad_input(
    reference: Reference, bad: Path, tmp_path: Path, name: str, words: str, said: str, record_property: Record
) -> None:
    record_property("campaign", f"bad input: {name}")
    out, here = tmp_path / "out", tmp_path / "here"
    here.mkdir()
    filled = words.format(**reference.given, bad=bad, out=out)
    ended = process.run([*name.split(), *command.keep_last(shlex.split(filled))], folder=here, home=tmp_path / "home")
    assert ended.sentence, (ended.code, ended.out[-300:], ended.err[-3000:])
    assert said.lower() in ended.err.lower(), ended.err
    assert ended.seconds < SLOW
    assert list(here.iterdir()) == []
    assert command.partial(tmp_path) == []
    assert not list(tmp_path.rglob("bundle"))
