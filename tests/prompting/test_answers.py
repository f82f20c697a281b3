"""Answers are kept: nothing is asked twice, whatever happened in between."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from compress.errors import DataError, TeacherError
from compress.prompting import answers as module
from compress.prompting.answers import LikelihoodOf, Likelihoods, stack_likelihoods
from tests.prompting.language_models import FakeLanguageModel

QUIET = Console(quiet=True)
ANSWERS = (" a", " b")
PROMPTS = ("one", "two", "three", "two", "four")
SAYS = {"one": (-1.0, -2.0), "two": (-3.0, -0.5), "three": (-0.1, -0.25)}


def told(**changes: object) -> FakeLanguageModel:
    return FakeLanguageModel(**{"says": SAYS, "otherwise": (-9.0, -8.0), "tokens": (1, 2), **changes})  # type: ignore[arg-type]


def ask(speaker: FakeLanguageModel, prompts: Sequence[str], answers: Sequence[str], *, console: Console) -> Likelihoods:
    return stack_likelihoods(speaker.name, module.ask(speaker, prompts, LikelihoodOf(answers), console=console))


def kept(home: Path) -> Path:
    (file,) = (home / "soft-labels").iterdir()
    return file


def test_rows_follow_the_prompts_and_duplicates_are_asked_once() -> None:
    speaker = told()
    found = ask(speaker, PROMPTS, ANSWERS, console=QUIET)
    assert found.log_p_NA.tolist() == [[-1, -2], [-3, -0.5], [-0.1, -0.25], [-3, -0.5], [-9, -8]]
    assert found.tokens_NA.tolist() == [[1, 2]] * 5
    assert speaker.asked == ["one", "two", "three", "four"]
    assert (found.asked, found.absent) == (4, 0)


def test_cached_answers_are_not_asked_again(home: Path) -> None:
    first = ask(told(), PROMPTS, ANSWERS, console=QUIET)
    again = told()
    second = ask(again, [*PROMPTS[::-1], "five"], ANSWERS, console=QUIET)
    assert again.asked == ["five"]
    np.testing.assert_array_equal(second.log_p_NA[:-1], first.log_p_NA[::-1])
    assert len(kept(home).read_text().splitlines()) == 5


def test_an_interrupted_run_continues(home: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(told(stop_after=2), PROMPTS, ANSWERS, console=QUIET)
    assert len(kept(home).read_text().splitlines()) == 2
    again = told()
    found = ask(again, PROMPTS, ANSWERS, console=QUIET)
    assert again.asked == ["three", "four"]
    assert found.log_p_NA.tolist() == ask(told(stop_after=0), PROMPTS, ANSWERS, console=QUIET).log_p_NA.tolist()


def test_an_incomplete_line_is_asked_again(home: Path) -> None:
    ask(told(), PROMPTS, ANSWERS, console=QUIET)
    whole = kept(home).read_bytes()
    kept(home).write_bytes(whole[:-9])
    again = told()
    ask(again, PROMPTS, ANSWERS, console=QUIET)
    assert again.asked == ["four"]
    assert kept(home).read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"[" * 20_000, b"3", b'{"prompt": "x"}', "a flipped bit"])
def test_only_damaged_answers_are_asked_again(
    content: bytes | str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bit that turns one digit of a likelihood into another leaves JSON behind."""
    first = ask(told(), PROMPTS, ANSWERS, console=QUIET)
    lines = kept(home).read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"3.0", b"2.0") if isinstance(content, str) else content
    kept(home).write_bytes(b"\n".join(lines))
    again = told()
    second = ask(again, PROMPTS, ANSWERS, console=QUIET)
    assert again.asked == ["two"]
    np.testing.assert_array_equal(second.log_p_NA, first.log_p_NA)
    assert "line 2" in capsys.readouterr().err
    last = told()
    ask(last, PROMPTS, ANSWERS, console=QUIET)
    assert last.asked == []
    assert not capsys.readouterr().err


def test_caches_of_older_versions_are_used(home: Path) -> None:
    ask(told(), PROMPTS, ANSWERS, console=QUIET)
    lines = [json.loads(line) for line in kept(home).read_text().splitlines()]
    kept(home).write_text("".join(json.dumps({k: v for k, v in x.items() if k != "check"}) + "\n" for x in lines))
    again = told()
    ask(again, PROMPTS, ANSWERS, console=QUIET)
    assert again.asked == []


def test_a_read_only_cache_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(told(), PROMPTS, ANSWERS, console=QUIET).log_p_NA

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module, "locked", refuse)
    np.testing.assert_array_equal(ask(told(), PROMPTS, ANSWERS, console=QUIET).log_p_NA, expected)
    with pytest.raises(DataError, match="COMPRESS_HOME"):
        ask(told(), ["five"], ANSWERS, console=QUIET)


@pytest.mark.parametrize("change", ["speaker", "answers"])
def test_other_models_or_answers_have_another_cache(change: str) -> None:
    ask(told(), PROMPTS, ANSWERS, console=QUIET)
    other = told(digest="other") if change == "speaker" else told()
    ask(other, PROMPTS, ANSWERS[::-1] if change == "answers" else ANSWERS, console=QUIET)
    assert len(other.asked) == 4


def test_texts_are_not_cached(home: Path) -> None:
    ask(told(), ["a private remark"], ANSWERS, console=QUIET)
    assert "private" not in kept(home).read_text()
    assert set(json.loads(kept(home).read_text())) == {"prompt", "log_p", "tokens", "absent", "check"}


def test_non_finite_likelihoods_are_refused() -> None:
    with pytest.raises(TeacherError, match="its likelihoods are not finite for 1 of 5 prompts"):
        ask(told(otherwise=(float("nan"), 0.0)), PROMPTS, ANSWERS, console=QUIET)


def _ask_slowly(started: "multiprocessing.synchronize.Event") -> None:
    class Slow(FakeLanguageModel):
        def count(self, text: str) -> int:
            return 0

    import time

    def says(self: FakeLanguageModel, prompts: object, answers: object) -> object:
        started.set()
        time.sleep(0.5)
        return FakeLanguageModel.likelihoods(self, prompts, answers)  # type: ignore[arg-type]

    Slow.likelihoods = says  # type: ignore[assignment, method-assign]
    ask(Slow(SAYS, (-9.0, -8.0), (1, 2)), PROMPTS, ANSWERS, console=QUIET)


def test_two_processes_do_not_ask_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    other = context.Process(target=_ask_slowly, args=(started,))
    other.start()
    assert started.wait(10)
    late = told()
    ask(late, PROMPTS, ANSWERS, console=QUIET)
    other.join()
    assert late.asked == []
    assert "another process" in capsys.readouterr().err
