"""Marks, and the placing of labels, for pictures drawn as SVG; all text is escaped by markupsafe.

Lengths are pixels of the picture. Colours come from the page's style sheet, by class.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

# Average advance of a sans-serif letter, in ems: wide enough that a label never outgrows the box reserved for it.
ADVANCE = 0.58


@dataclass(frozen=True)
class Box:
    """A rectangle from (left, top) to (right, bottom)."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """The area both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, wide) * max(0.0, high)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def canvas(key: str, size: tuple[float, float], words: tuple[str, str], marks: Iterable[Markup]) -> Markup:
    """One picture; `key` is unique on the page, `words` are its title and its description for those who cannot see."""
    return Markup(
        '<svg class="picture" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        'role="img" aria-labelledby="{key}-title {key}-desc">'
        '<title id="{key}-title">{title}</title><desc id="{key}-desc">{desc}</desc>{marks}</svg>'
    ).format(width=size[0], height=size[1], key=key, title=words[0], desc=words[1], marks=Markup("").join(marks))


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
        x, y, style, anchor, content
    )


def line(start: tuple[float, float], end: tuple[float, float], style: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(*start, *end, style)


def bar(box: Box, style: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="2" class="{}"/>').format(
        box.left, box.top, box.right - box.left, box.bottom - box.top, style
    )


def path(points: Sequence[tuple[float, float]], style: str) -> Markup:
    """A line through the points; a single one is drawn as a dot by the round cap."""
    drawn = points if len(points) > 1 else [*points, *points]
    return Markup('<path d="M{}" class="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in drawn), style)


def dot(x: float, y: float, *, style: str, hint: str, square: bool = False) -> Markup:
    """A point with a hint that shows on hovering; `square` ones stand on a corner."""
    if square:
        shape = Markup('<path d="M{:.1f},{:.1f} l7,7 -7,7 -7,-7 z" class="{}">').format(x, y - 7, style)
        return shape + Markup("<title>{}</title></path>").format(hint)
    circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="6" class="{}"><title>{}</title></circle>')
    return circle.format(x, y, style, hint)


def tagged(data: Mapping[str, str], marks: Markup) -> Markup:
    """The marks as one group with these data-attributes; as they are where there are none."""
    if not data:
        return marks
    attributes = Markup(" ").join(Markup('data-{}="{}"').format(name, value) for name, value in data.items())
    return Markup("<g {}>{}</g>").format(attributes, marks)


def text_width(content: str, size: float) -> float:
    """Pixels that `content` may take at a font size; letters outside Latin are counted as wide."""
    return sum(ADVANCE if ord(letter) < 0x2E80 else 1.05 for letter in content) * size


def shortened(content: str, letters: int) -> str:
    return content if len(content) <= letters else content[: letters - 1].rstrip() + "…"


def place(point: tuple[float, float], size: tuple[float, float], taken: Sequence[Box], inside: Box) -> Box:
    """Where a label of `size` stands near `point`: inside, on nothing that is taken, as near as possible."""
    wide, high = size
    x, y = point
    options = []
    for gap in (11.0, 20.0, 34.0, 52.0, 74.0, 100.0, 130.0):
        for across, down in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1)):
            left = x + gap if across > 0 else x - gap - wide if across < 0 else x - wide / 2
            reach = gap if across == 0 else gap * 0.8
            top = y + reach if down > 0 else y - reach - high if down < 0 else y - high / 2
            # A pixel farther counts as two square pixels hidden: what is taken has a margin that may be grazed.
            options.append((2 * gap, Box(left, top, left + wide, top + high)))
    return min(options, key=lambda option: option[0] + lost(option[1], taken, inside))[1]


def lost(box: Box, taken: Sequence[Box], inside: Box) -> float:
    """The area of the box that is outside the picture or under what is taken."""
    return box.area - box.overlap(inside) + sum(box.overlap(other) for other in taken)
