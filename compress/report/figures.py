"""Pictures as the pages show them: each drawn at two widths, of which the style sheet shows one."""

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup

# Widths in pixels of the page's columns: the wider and the narrower of two, both together, and a phone's only one.
MAIN, SIDE, WHOLE, PHONE = 690, 350, 1088, 342


@dataclass(frozen=True)
class Figure:
    """A picture at two widths, with its heading and caption, and a legend of (line class, name, last value)."""

    heading: str
    wide: Markup
    narrow: Markup
    caption: str = ""
    legend: tuple[tuple[str, str, str], ...] = ()


def drawn(draw: Callable[[str, float], Markup], key: str, width: float) -> tuple[Markup, Markup]:
    """The same picture for a wide window and for a phone; the style sheet shows one of them."""
    return draw(f"{key}-wide", width), draw(f"{key}-phone", PHONE)
