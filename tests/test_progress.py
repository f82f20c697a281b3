"""One line for each phase: when it is printed, what it says, and when it is not."""

import gc
import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from compress.cli.options import with_verbosity
from compress.data import cache
from compress.progress import SCREEN, Progress, show_progress


class Clock:
    """A clock that is set by hand, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(seconds: float, console: Console, *, total: float | None = 100, count: int = 100, **more: object) -> None:
    """Advance by one, `count` times, each of which takes so many seconds."""
    clock = Clock()
    with Progress("scoring", total, "rows", console=console, clock=clock, **more) as bar:  # type: ignore[arg-type]
        for _ in range(count):
            clock.now += seconds
            bar.advance()


@pytest.fixture(autouse=True)
def nothing_is_shown() -> None:
    """A reader that another test left unfinished, in a cycle with its error, holds its bar until it is collected."""
    gc.collect()


@pytest.fixture
def printed() -> Iterator[Console]:
    yield Console(file=io.StringIO(), width=40)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_log_gets_fewer_lines_over_time(printed: Console) -> None:
    run(4.0, printed)
    first, *_, last = lines(printed)
    assert first == "scoring: 3/100 rows (3%), 0.2 rows/s, 6.5 min left", "on one line, however long"
    assert last == "scoring: 100/100 rows (100%), 0.2 rows/s"
    assert len(lines(printed)) == 21, "every 12 s at first, and later every 40"


def test_items_that_take_longer_than_others(printed: Console) -> None:
    """The first of four takes half of the time."""
    run(60.0, printed, total=4, count=1, share=lambda done: (done + 3) / 8 + 0.125 if done else 0.0)
    assert lines(printed) == ["scoring: 1/4 rows (25%), 60 s each, 0.6 min left"]
    run(60.0, printed, total=4, count=1, done=1, share=lambda done: (done + 3) / 8 + 0.125)
    assert lines(printed)[1:] == ["scoring: 2/4 rows (50%), 60 s each, 2.0 min left"]


def test_short_phases_have_no_line(printed: Console) -> None:
    run(0.09, printed)
    assert lines(printed) == []
    run(0.09, printed, always=True)
    assert lines(printed) == ["scoring: 100/100 rows (100%), 11 rows/s"]


def test_an_unknown_total(printed: Console) -> None:
    run(10.0, printed, total=None, count=1)
    assert lines(printed) == ["scoring: 1 rows, 0.1 rows/s"], "the end was told already"
    run(25.0, printed, total=2, count=1)
    assert lines(printed)[1] == "scoring: 1/2 rows (50%), 25 s each, 0.4 min left"


def test_a_phase_with_a_limit_has_no_more_time_left_than_that(printed: Console) -> None:
    clock = Clock()
    with Progress("scoring", 100, "rows", console=printed, seconds=85.0, clock=clock) as bar:
        clock.now += 25.0
        bar.advance()
    assert lines(printed)[0] == "scoring: 1/100 rows (1%), 25 s each, 1.0 min left"


def test_a_phase_that_may_end_early(printed: Console) -> None:
    clock = Clock()
    with Progress("learning", 4, "steps", console=printed, clock=clock) as bar:
        for at_most in (True, False):
            clock.now, bar.at_most = clock.now + 30.0, at_most
            bar.advance()
    assert [line.rpartition(", ")[2] for line in lines(printed)] == ["at most 1.5 min left", "1.0 min left"]


def test_a_terminal_shows_a_bar() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    run(0.001, console)
    assert lines(console) == []
    run(0.5, console)
    assert "100/100 rows (100%), 2.0 rows/s" in "\n".join(lines(console))


def test_quiet_consoles_show_nothing(printed: Console) -> None:
    run(20.0, Console(file=printed.file, quiet=True), always=True)
    assert lines(printed) == []


def test_a_long_phase_within_another_one_is_shown_too(printed: Console) -> None:
    with Progress("training", 2, "steps", console=printed) as outer:
        run(0.05, printed)
        assert lines(printed) == [], "a short one is not"
        run(20.0, printed)
        assert lines(printed)[0] == "scoring: 1/100 rows (1%), 20 s each, 33.0 min left"
        assert outer.inner == ""
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Progress("training", 2, "steps", console=terminal):
        run(20.0, terminal)
    assert "0/2 steps (0%), scoring 100/100 rows (100%)" in "\n".join(lines(terminal)), "on the bar of the outer one"


def test_a_failed_phase_has_no_last_line(printed: Console) -> None:
    with pytest.raises(KeyboardInterrupt), Progress("training", 2, "steps", console=printed, always=True):
        raise KeyboardInterrupt
    assert lines(printed) == []
    assert list(show_progress("ab", "letters", 2)) == ["a", "b"], "the next phase is shown again"


@pytest.mark.parametrize(("quiet", "expected"), [(False, "note: damaged\n"), (True, "")])
def test_quiet_commands_print_no_cache_notes(quiet: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with_verbosity(lambda: cache.note("damaged"))(quiet=quiet, log_level="info", version=False)  # type: ignore[call-arg]
    assert capsys.readouterr().err == expected
    assert SCREEN.get() is None
