"""The site: every link of it leads somewhere, it needs nothing from elsewhere, and it works from the disk."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import compress
from benchmarks import chromium, effects
from compress.config import catalog, loader
from compress.config.loader import folder
from compress.config.recipe import Recipe

ROOT = folder().parent
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documents are in a checkout only")
if DOCS.is_dir():
    sys.path.insert(0, str(ROOT))
    from docs import docstrings, measured, pages, reference

GENERATED = {"tried.md", "gallery.md", "cli.md", "api.md", "recipes.md"}
in_chromium = pytest.mark.skipif(
    not all(map(shutil.which, chromium.NEEDED)), reason=f"needs {' and '.join(chromium.NEEDED)}"
)


class Links(HTMLParser):
    """The identifiers of a page, and what it links to or loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.identifiers = set[str]()
        self.links = list[str]()
        self.loaded = list[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.identifiers |= {given["id"] or ""} if "id" in given else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if tag in ("script", "img", "link", "iframe", "source") and "canonical" not in (given.get("rel") or ""):
            self.loaded += [address for key in ("src", "href") if (address := given.get(key))]


# --- the sources


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")]), ids=lambda page: page.name)
def test_a_link_of_a_document_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    dead = [each for each in targets if not (page.parent / each).exists() and each not in GENERATED]
    assert dead == []


def test_every_page_is_in_the_list_of_pages_once() -> None:
    listed = re.findall(r"([\w-]+\.md)\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.name for page in DOCS.glob("*.md")} | GENERATED | set(pages.FROM_ROOT.values())


def test_the_order_of_the_pages() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    use = ["Start", "Choose a path", "Tasks", "Compress", "Ship", "Scale", "Reference"]
    assert re.findall(r"^  - ([\w ]+):", text, re.MULTILINE) == [*use, "Measurements"]


def test_the_site_has_the_colours_of_the_products_pages() -> None:
    """Each colour that its style uses is defined, for light and dark."""
    style = (DOCS / "theme/assets/site.css").read_text(encoding="utf-8")
    light, dark = pages.tokens().split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--[\w-]+)\)", style))
    assert used <= set(re.findall(r"(--[\w-]+):", light))
    assert used <= set(re.findall(r"(--[\w-]+):", dark))
    assert not re.search(r"#[0-9a-f]{6}\b|@import|url\(", style)


def test_a_table_of_many_columns_names_them_in_each_cell() -> None:
    head = "<thead><tr><th>a</th><th><code>b</code></th><th>c</th><th>d</th></tr></thead>"
    table = f"<table>{head}<tbody><tr><td>1</td><td>2</td><td>3</td><td>4</td></tr></tbody></table>"
    output = pages.lay_out(table)
    assert output.startswith('<div class="scroll cards">')
    assert '<td data-heading="b">2</td>' in output
    assert 'class="scroll"' in pages.lay_out("<table><tr><th>a</th></tr></table>")


def test_fields_of_a_docstring_are_a_list() -> None:
    text = "Say what.\n\nseed  a number,\n      that draws\nlayers ... heads  counts\nMore words."
    listed = "Say what.\n\n- `seed`: a number,\n  that draws\n- `layers ... heads`: counts\n\nMore words."
    assert docstrings.list_fields(text) == listed


def test_functions_come_before_types_on_the_api_page() -> None:
    names = re.findall(r"^::: compress\.[\w.]+\.(\w+)$", reference.api(), re.MULTILINE)
    assert sorted(names) == sorted(compress.__all__)
    kinds = [isinstance(getattr(compress, name), type) for name in names]
    assert names[0] == "bench"
    assert kinds.index(True) == names.index("Bundle")
    assert all(kinds[names.index("Budget") :])


def test_each_field_of_an_option_group_has_its_help() -> None:
    rows = reference.described(compress.RunOptions)
    assert "| `seed` | `int` | `0` | Seed all random numbers of the run. |" in rows
    assert reference.described(compress.Report) == []


def test_the_page_of_recipes_has_the_verdicts_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = reference.recipes()
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| .* \| (.+?) \| \[.*\]\(https?://.*\) \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == loader.names()
    verdicts = effects.judge(effects.load(reference.RESULTS))
    for name, choose, verdict in rows:
        assert re.sub("<[^>]+>", "", verdict) == (verdicts[name][0] if name in verdicts else "not run")
        assert choose == Recipe.load(name).choose
    (tmp_path / "static.json").write_text(json.dumps({"effects": {"control": {"mean": -1.0, "p": 0.001}}}))
    monkeypatch.setattr(reference, "RESULTS", tmp_path)
    assert '| <span class="harmful">harmful</span> |' in reference.recipes()


def test_the_command_knows_the_verdicts_of_the_results() -> None:
    """Written anew by `python -m docs.measured`, as the package has no results."""
    assert measured.VERDICTS.read_text(encoding="utf-8") == measured.verdicts(reference.RESULTS)
    assert catalog.verdicts().keys() <= set(loader.names())


# --- the site, built


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return place


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    for page in ("index", "quickstart", "recipes", "cli", "api", "architecture", "contributing", "security"):
        assert (site / f"{page}.html").is_file()
    output = (site / "api.html").read_text(encoding="utf-8")
    assert all(f'id="{getattr(compress, name).__module__}.{name}"' in output for name in compress.__all__)
    for member in ("Bundle.load", "Bundle.predict", "Report.shipped", "Recipe.load"):
        assert re.search(rf'<span class="doc [^"]*">{member}</span>', output)


@pytest.mark.slow
def test_no_link_of_the_site_is_dead_and_nothing_comes_from_elsewhere(site: Path) -> None:
    found = {page: Links(page) for page in site.rglob("*.html")}
    assert len(found) > 60
    dead = list[str]()
    for page, links in found.items():
        assert not [one for one in links.loaded if urlsplit(one).scheme not in ("", "data")], page
        for link in [*links.links, *links.loaded]:
            address = urlsplit(link)
            if address.scheme:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            anchors = found[target].identifiers if target in found else {address.fragment}
            if not target.exists() or (address.fragment and unquote(address.fragment) not in anchors):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.slow
def test_what_can_be_searched(site: Path) -> None:
    script = (site / "assets/index.js").read_text(encoding="utf-8")
    rows = json.loads(script.removeprefix("window.INDEX = ").removesuffix(";\n"))
    places = {place.partition(".html")[0] for place, *_ in rows}
    assert {"index", "api", "cli", "recipes", "faq"} <= places
    assert not {"LOG", "tried", "gallery"} & places
    assert "Bundle.predict" in [title for _, _, title, _ in rows]


@pytest.fixture
def tab(site: Path, tmp_path: Path) -> Iterator[Any]:
    with chromium.open_tab(tmp_path / "profile", (site / "keep.html").as_uri()) as one:
        one.wait("document.readyState === 'complete' && !!document.getElementById('query')")
        yield one


@pytest.mark.slow
@in_chromium
def test_the_search_works_from_the_disk(site: Path, tab: Any) -> None:
    tab.type("#query", "smoothquant")
    tab.wait("document.querySelectorAll('#found a').length > 0")
    assert "quantize.html" in tab.see("document.querySelector('#found a').getAttribute('href')")
    tab.type("#query", "Bundle.load")
    tab.wait("document.querySelector('#found b').textContent === 'Python API: Bundle.load'")
    tab.type("#query", "qwertzuiop")
    tab.wait("document.querySelector('#found').textContent.startsWith('No page')")
    assert tab.problems == []
    assert all(request.startswith(site.as_uri()) for request in tab.requests)


@pytest.mark.slow
@in_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut(site: Path, tab: Any, width: int) -> None:
    """No block of code, and no page, is wider than its place; no name of a recipe is broken."""
    tab.do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    for page in sorted(site.glob("*.html")):
        tab.do("Page.navigate", url=page.as_uri())
        tab.wait(f"location.pathname.endsWith('/{page.name}') && document.readyState === 'complete'")
        cut = "[...document.querySelectorAll('pre, pre code')].filter(one => one.scrollWidth > one.clientWidth + 1)"
        assert tab.see(f"{cut}.map(one => one.innerText.slice(0, 80))") == [], page.name
        assert tab.see("document.documentElement.scrollWidth") <= width, page.name
        names = "[...document.querySelectorAll('.cards td:first-child > code:only-child')]"
        assert tab.see(f"{names}.every(one => one.getClientRects().length === 1)"), page.name
