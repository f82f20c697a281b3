"""Show how far a phase of a command is: the share done, the rate and the time left, in one line.

    with Progress("scoring", len(rows), "rows") as bar:
        for batch in batches:
            run(batch)
            bar.advance(len(batch))

On a terminal the line is a bar, which is gone when the phase is over. In a log it is printed after EVERY seconds, and
whenever a tenth of the phase's time has passed, EVERY seconds after the last at least. Nothing is shown on a quiet
console, nor of a phase within another. Imports nothing but the standard library: every command needs it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

EVERY: Final = 10.0
"""Seconds between two lines of a log, at least."""
SOON: Final = 1.0
"""Seconds after which a terminal shows a bar: what is over before then needs none."""
SLOW: Final = 0.1
"""The rate a second below which the seconds of each are told instead."""
SHARE: Final = 0.1
"""The share of a phase's time between two lines, where that is longer."""

SCREEN: ContextVar["Callable[[], Console] | None"] = ContextVar("screen", default=None)
"""Returns the console of the command that runs; None: there is no command, and nothing is shown."""
_SHOWN: ContextVar["Progress | None"] = ContextVar("shown", default=None)

Item = TypeVar("Item")


class Progress:
    """Show a phase. total: None where it is not known; console: None for the command's; always: tell its end in a log.

    Values of `facts` follow the rate.
    """

    def __init__(
        self, name: str, total: float | None = None, unit: str = "", *, console: "Console | None" = None,
        done: float = 0, always: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.total, self.unit, self.done, self.always = name, total, unit, done, always
        self.screen = SCREEN.get() if console is None else lambda: console
        self.first, self.clock, self.facts = done, clock, dict[str, str]()
        self.began = self.said = clock()
        self.told: float | None = None
        self.bar: Bar | None = None

    def __enter__(self) -> Self:
        """Begin to show it."""
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop it; a phase that an error has ended tells no end."""
        self.stop(ended=kind is None)

    def start(self) -> None:
        """Begin to show it."""
        if _SHOWN.get() is not None or (self.always and self.screen is not None and self.screen().quiet):
            self.screen = None
        if self.screen is not None:
            _SHOWN.set(self)

    def stop(self, *, ended: bool = True) -> None:
        """Stop it: the terminal gets its cursor back. ended: the phase came to its end, which a log may be told."""
        if self.screen is None:
            return
        _SHOWN.set(None)
        if self.bar is not None:
            self.bar.stop()
        if ended and (self.always or self.told is not None) and self.told != self.done:
            self._say()
        self.screen = None

    def advance(self, count: float = 1) -> None:
        """Tell that so much more is done."""
        self.done += count
        now = self.clock()
        if self.screen is None or now - self.began < SOON:
            return
        if self.screen().is_terminal and not self.screen().quiet:
            self._draw(self.screen())
        elif now - self.said >= max(EVERY, SHARE * (now - self.began)):
            self._say()

    def _draw(self, console: "Console") -> None:
        """Show the bar on the terminal."""
        if self.bar is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}", style="bold", markup=False), BarColumn(bar_width=20)
            self.bar = Bar(*columns, TextColumn("{task.fields[line]}", markup=False), console=console, transient=True)
            self.task = self.bar.add_task(self.name, total=self.total, line="")
            self.bar.start()
        self.bar.update(self.task, completed=self.done, total=self.total, line=self.line())

    def line(self) -> str:
        """Return the share done, the rate, the facts, and the time left."""
        rate = (self.done - self.first) / max(self.clock() - self.began, 1e-9)
        of = "" if self.total is None else f"/{self.total:,.0f}"
        told = [f"{self.done:,.0f}{of} {self.unit}".rstrip()]
        if self.total:
            told[0] += f" ({self.done / self.total:.0%})"
        if rate >= SLOW:
            told.append(f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s")
        elif rate:
            told.append(f"{1 / rate:,.0f} s each")
        told += self.facts.values()
        if self.total is not None and rate and self.done < self.total:
            told.append(f"{(self.total - self.done) / rate / 60:.1f} min left")
        return ", ".join(told)

    def _say(self) -> None:
        assert self.screen is not None, "it is shown"
        self.said, self.told, console = self.clock(), self.done, self.screen()
        if not console.quiet:  # which would keep it as its last line
            console.print(f"{self.name}: {self.line()}", markup=False, highlight=False, soft_wrap=True)


def show_progress(
    items: Iterable[Item], name: str, total: float | None = None, unit: str = "", *, console: "Console | None" = None
) -> Iterator[Item]:
    """Yield the items, and show how many are done."""
    with Progress(name, total, unit, console=console) as bar:
        for item in items:
            yield item
            bar.advance()
