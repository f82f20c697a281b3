"""Show how far a phase of a command is: the share done, the rate and the time left, on
one line.

    with Progress("scoring", len(rows), "rows") as bar:
        for batch in batches:
            run(batch)
            bar.advance(len(batch))

On a terminal this is a bar, which disappears when the phase ends. In a log, a line is
printed after EVERY seconds, and then whenever a tenth of the phase's time has passed,
at intervals of at least EVERY seconds. A phase within another one has its own lines in
a log, and is shown on the outer phase's bar. Nothing is shown on a quiet console. Only
the standard library is imported: every command needs this.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

EVERY: Final = 10.0
"""Minimum seconds between two lines of a log."""
SOON: Final = 1.0
"""Seconds after which a terminal shows a bar: shorter phases need none."""
SLOW: Final = 0.1
"""The rate per second below which the seconds per item are shown instead."""
SHARE: Final = 0.1
"""The share of a phase's time between two lines of a log, if longer than EVERY."""

SCREEN: ContextVar["Callable[[], Console] | None"] = ContextVar("screen", default=None)
"""Returns the console of the running command; None outside of a command, where nothing
is shown."""
_ACTIVE: ContextVar["Progress | None"] = ContextVar("active", default=None)

Tracked = TypeVar("Tracked")
Say = Callable[[str], None]
"""A function that prints what happens."""


class Progress:
    """The progress of one phase. The values of `facts` are shown after the rate.

    total    None if unknown
    console  None: the console of the running command
    always   print the end of the phase to a log, however short it was
    seconds  the phase ends after this time, even if less than `total` is done
    share    returns the share of the phase's time that this many items take; None: all
             items take equally long

    Set `at_most` while the phase may end before `total`.
    """

    at_most = False
    outer: "Progress | None" = None
    """The phase that this one is a part of, if it is shown."""
    inner = ""
    """The line of a part of this phase; '' if none is shown."""

    def __init__(
        self,
        name: str,
        total: float | None = None,
        unit: str = "",
        *,
        console: "Console | None" = None,
        done: float = 0,
        always: bool = False,
        seconds: float = math.inf,
        share: Callable[[float], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = done
        self.always = always
        self.seconds = seconds
        self.share = share or self._share_of_items
        self.screen = SCREEN.get() if console is None else lambda: console
        self.first = done
        self.clock = clock
        self.facts = dict[str, str]()
        self.began = self.printed_at = clock()
        self.printed: float | None = None
        self.bar: Bar | None = None

    def __enter__(self) -> Self:
        """Start to show it."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Stop showing it; after an error, no end is printed."""
        self.stop(ended=kind is None)

    def start(self) -> None:
        """Start to show it."""
        if self.always and self.screen is not None and self.screen().quiet:
            self.screen = None
        if self.screen is not None:
            self.outer = _ACTIVE.get()
            _ACTIVE.set(self)

    def stop(self, *, ended: bool = True) -> None:
        """Stop showing it, and restore the terminal's cursor. ended: print the end of
        the phase to a log."""
        if self.screen is None:
            return
        _ACTIVE.set(self.outer)
        if self.bar is not None:
            self.bar.stop()
        if self.outer is not None:
            self.outer.inner = ""
        if (
            ended
            and (self.always or self.printed is not None)
            and self.printed != self.done
        ):
            self._print()
        self.screen = None

    def advance(self, count: float = 1) -> None:
        """Add to the count of what is done."""
        self.done += count
        now = self.clock()
        if self.screen is None or now - self.began < SOON:
            return
        if self.screen().is_terminal and not self.screen().quiet:
            self._draw(self.screen())
        elif now - self.printed_at >= max(EVERY, SHARE * (now - self.began)):
            self._print()

    def _draw(self, console: "Console") -> None:
        """Show the bar on the terminal, or its text on the outer phase's bar."""
        if self.outer is not None:
            self.outer.inner = f", {self.name} {self.line()}"
            self.outer._draw(console)
            return
        if self.bar is None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=20),
            )
            self.bar = Bar(
                *columns,
                TextColumn("{task.fields[line]}", markup=False),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task(self.name, total=self.total, line="")
            self.bar.start()
        line = self.line() + self.inner
        self.bar.update(self.task, completed=self.done, total=self.total, line=line)

    def line(self) -> str:
        """Return the share done, the rate, the facts, and the time left."""
        passed = self.clock() - self.began
        rate = (self.done - self.first) / max(passed, 1e-9)
        of = "" if self.total is None else f"/{self.total:,.0f}"
        parts = [f"{self.done:,.0f}{of} {self.unit}".rstrip()]
        if self.total:
            parts[0] += f" ({self.done / self.total:.0%})"
        if rate >= SLOW:
            parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s")
        elif rate:
            parts.append(f"{1 / rate:,.0f} s each")
        parts += self.facts.values()
        if self.total is not None and rate and self.done < self.total:
            share = self.share(self.done)
            first = self.share(self.first)
            left = min(
                passed * (1 - share) / (share - first), max(0.0, self.seconds - passed)
            )
            parts.append(
                f"{'at most ' if self.at_most else ''}{left / 60:.1f} min left"
            )
        return ", ".join(parts)

    def _share_of_items(self, done: float) -> float:
        assert self.total, "an unknown total has no share"
        return done / self.total

    def _print(self) -> None:
        assert self.screen is not None, "only called while it is shown"
        self.printed_at = self.clock()
        self.printed = self.done
        console = self.screen()
        if not console.quiet:  # a quiet screen would keep it as its last line
            console.print(
                f"{self.name}: {self.line()}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def show_progress(
    items: Iterable[Tracked],
    name: str,
    total: float | None = None,
    unit: str = "",
    *,
    console: "Console | None" = None,
) -> Iterator[Tracked]:
    """Yield the items, and show how many are done."""
    with Progress(name, total, unit, console=console) as bar:
        for item in items:
            yield item
            bar.advance()


def note(message: str) -> None:
    """Print a note on standard error, unless the running command is quiet."""
    if (screen := SCREEN.get()) is None or not screen().quiet:
        print(f"note: {message}", file=sys.stderr, flush=True)
