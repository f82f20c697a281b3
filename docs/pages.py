"""Lay out the pages of the site: colours, tables, the index of the search, documents of the repository's root."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.contrib.search.search_index import SearchIndex
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PRODUCT_STYLE = ROOT / "compress" / "reporting" / "templates" / "page.css"
"""The style of the pages that the product makes, whose colours the site has."""
FROM_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "recipe-files.md",
    "recipes/prompts/README.md": "prompts.md",
}
"""Documents outside of docs/ that are pages of the site too, by their path in the repository."""
UNSEARCHED = {"LOG.md", "tried.md", "gallery.md", "changelog.md"}
"""Pages that would drown a search: the log, and figures of single measurements."""
CARD_COLUMNS = 4
"""Tables with this many columns are cards on a phone."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
MEMBER = re.compile(
    r'(<h4 id="compress\.[\w.]*?(\w+)\.(\w+)" class="doc doc-heading">\s*<span class="doc [^"]*">)(\w+)(?=</span>)'
)
"""The heading of a member on the API page: its class, and its name."""
INDEX = SearchIndex(indexing="full", prebuild_index=False, lang=["en"])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root, and the colours, for mkdocs."""
    for source, name in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "assets/tokens.css", content=tokens()))
    return files


def tokens() -> str:
    """Return the colours of the product's pages, light and dark."""
    style = PRODUCT_STYLE.read_text(encoding="utf-8")
    return style.partition("\n* {")[0] + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to documents of the repository at their pages; name files that the site has not, without a link."""
    source = next((path for path, name in FROM_ROOT.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def point(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups("")
        path = (ROOT / source).parent.joinpath(target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        address = FROM_ROOT.get(name, name.removeprefix("docs/"))
        if files.get_file_from_path(address):
            return f"{image}[{text}]({address}{anchor})"
        return f"{text} (`{name}`)" if path.exists() else link.group()

    return LINK.sub(point, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let tables scroll or become cards, and break no line inside of an option such as `--max-drop`."""
    html = MEMBER.sub(r"\1\2.\4", html)
    html = re.sub(r"<table>.*?</table>", lambda table: lay_out(table.group()), html, flags=re.DOTALL)
    return re.sub(
        r"<code>.*?</code>",
        lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code.group()),
        html,
        flags=re.DOTALL,
    )


def lay_out(table: str) -> str:
    """Wrap a table, and repeat the heading of a column in each of its cells."""
    headings = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]

    def name_cells(row: re.Match[str]) -> str:
        names = iter(headings)
        return re.sub(r"<td", lambda _: f'<td data-heading="{next(names, "")}"', row.group())

    body = re.sub(r"<tr>.*?</tr>", name_cells, table, flags=re.DOTALL)
    kind = "scroll cards" if len(headings) >= CARD_COLUMNS else "scroll"
    return f'<div class="{kind}">{body}</div>'


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take a page into the index of the search."""
    if page.file.src_uri not in UNSEARCHED:
        INDEX.add_entry_from_context(page)
    return output


def on_pre_build(config: MkDocsConfig) -> None:
    """Begin with an empty index, as `mkdocs serve` builds many times."""
    INDEX._entries.clear()


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index as a script, which a page from the disk may load: rows of place, page, title, text."""
    rows = list[list[Any]]()
    page = title = ""
    for entry in json.loads(INDEX.generate_search_index())["docs"]:
        if "#" not in entry["location"]:
            page = title = entry["title"]  # also the title of the first section, below the page's heading
            continue
        member = re.search(r"#compress\..*\b([A-Z]\w*\.\w+)$", entry["location"])
        rows.append([entry["location"], page, title or (member[1] if member else entry["title"]), entry["text"]])
        title = ""
    file = Path(config.site_dir, "assets", "index.js")
    file.write_text(f"window.INDEX = {json.dumps(rows, ensure_ascii=False)};\n", encoding="utf-8")
