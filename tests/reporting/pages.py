"""What holds for every page: whole, self-contained, escaped; and helpers to read one."""

import base64
import hashlib
import re
import subprocess
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from compress.reporting import format as units
from compress.reporting.charts import Box, text_width

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


class Elements(HTMLParser):
    """Every start tag with its attributes; fails on end tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def text(page: str) -> str:
    """What a reader sees: no style, no script, no tags."""
    bare = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", bare)).replace(units.GAP, " ").split())


def check_whole(page: str) -> None:
    """No number is none, identifiers are unique, every reference leads somewhere; no request, and one known script."""
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b|undefined", text(page))
    elements = Elements(page).found
    tags = [tag for tag, _ in elements]
    assert tags.count("h1") == 1
    identifiers = [attrs["id"] for _, attrs in elements if "id" in attrs]
    assert len(identifiers) == len(set(identifiers))
    for tag, attrs in elements:
        for key in ("aria-labelledby", "for"):
            assert set((attrs.get(key) or "").split()) <= set(identifiers)
        assert tag not in ("iframe", "object", "embed", "img", "base", "form")
        assert not any(key.startswith("on") or key == "src" for key in attrs)
        place = attrs.get("href") or "data:,"
        assert place == "data:," or place.removeprefix("#") in identifiers
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|@import|url\(", page)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    named = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    (policy,) = (attrs["content"] for tag, attrs in elements if tag == "meta" and "http-equiv" in attrs)
    allowed = "".join(f"; script-src 'sha256-{name}'" for name in named)
    assert len(scripts) <= 1 and policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:{allowed}"


def check_escaped(page: str, times: int) -> None:
    """Hostile text stays text, so many times at least."""
    tags = [tag for tag, _ in Elements(page).found]
    assert tags.count("script") <= 1 and not {"img", "b"} & set(tags)
    assert "49" not in re.findall(r"&#34;&#39;&amp;(\S*)", page)
    assert page.count("&lt;/script&gt;") > times


def headings(page: str) -> set[str]:
    return set(re.findall(r"<h2 [^>]*>([^<]+)</h2>", page))


def boxes(drawn: str) -> list[Box]:
    """The room of each name in a picture, from its position and anchor."""
    found = []
    for x, y, anchor, words in re.findall(
        r'x="([\d.]+)" y="([\d.]+)" class="label" text-anchor="(\w+)">([^<]*)<', drawn
    ):
        wide = text_width(words, 13)
        left = float(x) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        found.append(Box(left, float(y) - 11, left + wide, float(y) + 3))
    return found


def stairs(drawn: str) -> list[tuple[float, ...]]:
    """The corners of the front in a picture, which never fall to the right."""
    (path,) = re.findall(r'<path d="M([^"]+)" class="edge"/>', drawn)
    corners = [tuple(map(float, point.split(","))) for point in path.split()]
    assert all(a[0] <= b[0] and a[1] >= b[1] and (a[0] == b[0] or a[1] == b[1]) for a, b in pairwise(corners))
    return corners


def in_browser(file: Path, *, size: str = "1400,3100") -> str:
    """What chromium makes of a page."""
    words = (
        "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        f"--disable-component-update --disable-sync --window-size={size} "
        f"--user-data-dir={file.parent / 'profile'} --dump-dom {file.as_uri()}"
    )
    return subprocess.run(words.split(), capture_output=True, text=True, timeout=120, check=True).stdout
