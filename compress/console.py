"""The console that progress, tables and notes are printed to."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from compress.terminal import printable


class Screen(Console):
    """A console for texts of any origin: brackets are no markup, and control characters are escaped."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_note(console: Console, text: str) -> None:
    """Print what the reader should know, as it is."""
    console.print(Text.assemble(("note", "yellow"), " ", text))


def warn(console: Console, text: str) -> None:
    """Print what is lost, and what is done about it."""
    console.print(Text.assemble(("warning:", "yellow"), " ", text), soft_wrap=True)
