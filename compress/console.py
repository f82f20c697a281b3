"""The console that progress, tables and notes are printed to."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from compress.terminal import printable


class Screen(Console):
    """A console for texts of any origin: brackets are no markup, and control characters are escaped.

    last      None: everything is printed; else nothing is, and this list gets what prints the last of it
    warnings  whether warnings are printed all the same
    """

    def __init__(
        self, *, stderr: bool = False, quiet: bool = False, last: list[Callable[[], None]] | None = None,
        warnings: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(stderr=stderr, quiet=quiet or last is not None, markup=False)
        self.last, self.warnings, self._silent = last, warnings, quiet

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, or keep as the last thing that was to be printed."""
        if self.last is None:
            super().print(*objects, **options)
        elif objects and isinstance(objects[0], str | Text):
            self.last[:] = [partial(self.print_now, *objects, **options)]

    def print_now(self, *objects: Any, **options: Any) -> None:
        """Print what is not to be kept back."""
        self.quiet = self._silent
        super().print(*objects, **options)
        self.quiet = self._silent or self.last is not None

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_note(console: Console, text: str) -> None:
    """Print what the reader should know, as it is."""
    console.print(Text.assemble(("note", "yellow"), " ", text))


def warn(console: Console, text: str) -> None:
    """Print what is lost, and what is done about it."""
    said = Text.assemble(("warning:", "yellow"), " ", text)
    if not isinstance(console, Screen):
        console.print(said, soft_wrap=True)
    elif console.warnings:
        console.print_now(said, soft_wrap=True)
