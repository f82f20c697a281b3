"""The console that progress, tables and notes are printed to."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from compress.terminal import printable


class Screen(Console):
    """A console for text of any origin: no markup, no highlighting, and control
    characters are escaped.

    last      None: print everything; a list: print nothing, but keep in it the call
              that prints the last line
    warnings  print warnings even if everything else is held back
    """

    def __init__(
        self,
        *,
        stderr: bool = False,
        quiet: bool = False,
        last: list[Callable[[], None]] | None = None,
        warnings: bool = True,
    ) -> None:
        super().__init__(
            stderr=stderr,
            quiet=quiet or last is not None,
            markup=False,
            highlight=False,
        )
        self.last = last
        self.warnings = warnings
        self._silent = quiet

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, or keep the text as the last line."""
        if self.last is None:
            super().print(*objects, **options)
        elif objects and isinstance(objects[0], str | Text):
            self.last[:] = [partial(self.print_now, *objects, **options)]

    def print_now(self, *objects: Any, **options: Any) -> None:
        """Print even if output is held back."""
        self.quiet = self._silent
        super().print(*objects, **options)
        self.quiet = self._silent or self.last is not None

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=printable(segment.text))
            )


def plain_printer(console: Console) -> Callable[..., None]:
    """Return a function that prints lines of any origin, without breaking them."""
    return partial(console.print, markup=False, highlight=False, soft_wrap=True)


def print_note(console: Console, text: str) -> None:
    """Print a note, without interpreting markup in it."""
    console.print(Text.assemble(("note", "yellow"), " ", text))


def warn(console: Console, text: str) -> None:
    """Print a warning: what is wrong, and what is done about it."""
    line = Text.assemble(("warning:", "yellow"), " ", text)
    if not isinstance(console, Screen):
        console.print(line, soft_wrap=True)
    elif console.warnings:
        console.print_now(line, soft_wrap=True)
