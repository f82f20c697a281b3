"""Read the prose of Python's own documentation as an unlabelled English corpus,
`pydoc`, that every installation has.

It has one document for each topic of `help()` (pydoc_data), then one for each module of
the standard library: its docstrings in the order of the source, which is parsed but not
imported. Code, grammars, tables and headings are left out, and each paragraph is a
line. It is the same for the same patch version of Python.
"""

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from compress.data import cache
from compress.errors import DataError

CLEANING: Final = "1"
"""Part of the fingerprint; raise it when the documents of the same Python change."""

SHORTEST_DOCUMENT: Final = 20
"""The fewest words of a document; shorter ones are left out."""

_NOT_LIBRARY: Final = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "_pyrepl"}
)
_SHORTEST_PARAGRAPH = 5
_BULLET = re.compile(r"(?:[*•-]|\d+\.|\(\d+\))\s+")
_MARKUP: Final = (
    (re.compile(r":[\w:]+:`~?\.?([^`<]+?)(?:\s*<[^`]*>)?`"), r"\1"),  # :class:`name`
    (re.compile(r"``?([^`]+)``?|`([^`']+)'"), r"\1\2"),  # ``code``, `code', `emphasis`
    # **bold**, *emphasis*
    (re.compile(r"\*\*([^*]+)\*\*|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])"), r"\1\2"),
    # "code", not "words of a phrase"
    (re.compile(r"\"([^\"\s]+|[^\"]*[_()=\[\]{}.:@+/*-][^\"]*)\""), r"\1"),
    (re.compile(r"\s*\[(?:\d+|#\w*)\](?:_)?"), ""),  # [1], [1]_
    (re.compile(r"\s+"), " "),
    (re.compile(r"::\s*$"), ":"),
)
_PROSE = re.compile(r"[\"'(“‘]?[A-Za-z].*[.:!?][)\"'”’]*", re.DOTALL)
_CODE = re.compile(
    r"::=|>>>|==|!=|\+=|->|</|\\|\$|__\(|\w\(\w*=|^(?:def|class|import|from|for|return|@)\s\S*[:(]|\|\s|={3}"
)
_SYMBOLS = re.compile(r"[^\w\s.,;:'\"()\-–—“”‘’!?]|_")


def documents() -> Iterator[str]:
    """Yield documents, a paragraph per line: topics, then modules. DataError if Python
    lacks its topics."""
    for texts in chain(
        ([text] for text in _topics().values()), map(_docstrings, _modules())
    ):
        document = "\n".join(line for text in texts for line in paragraphs(text))
        if len(document.split()) >= SHORTEST_DOCUMENT:
            yield document


def fingerprint() -> str:
    """Hash the topics, the modules of the standard library and the version of the
    cleaning."""
    topics = _topics()
    return cache.digest(
        CLEANING,
        *(part for pair in sorted(topics.items()) for part in pair),
        *_modules(),
    )


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of plain or reStructured text that are prose, each on one
    line and without markup."""
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        line = _join(block)
        for pattern, plain in _MARKUP:
            line = pattern.sub(plain, line)
        if _is_prose(line := line.strip()):
            yield line


def _join(block: str) -> str:
    """Join the lines of a block, without a bullet or the term above an indented
    definition; rejoin hyphenated words."""
    lines = [line for line in block.splitlines() if line.strip()]
    above = (
        len(lines) > 1
        and not _BULLET.match(lines[0].strip())
        and _indent(lines[0]) < min(map(_indent, lines[1:]))
    )
    text = "\n".join(line.strip() for line in lines[above:])
    return re.sub(
        r"(?<=\w-)\n",
        "",
        _BULLET.sub("", text, count=1) if _BULLET.match(text) else text,
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_prose(line: str) -> bool:
    words = line.split()
    if (
        len(words) < _SHORTEST_PARAGRAPH
        or not _PROSE.fullmatch(line)
        or _CODE.search(line)
    ):
        return False
    spelled = sum(bool(re.fullmatch(r"\W?[A-Za-z'’-]+\W{0,2}", word)) for word in words)
    return spelled >= 0.7 * len(words) and len(_SYMBOLS.findall(line)) <= 0.03 * len(
        line
    )


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no documentation topics (pydoc_data), so there is no "
            "corpus 'pydoc'. Use a text file or folder instead, or install the full "
            "standard library."
        ) from error
    return dict(topics)


def _modules() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for name in sys.stdlib_module_names
        for path in (root / f"{name}.py", *(root / name).rglob("*.py"))
    ]
    return sorted(
        path
        for path in found
        if path.is_file() and not _NOT_LIBRARY & set(path.relative_to(root).parts)
    )


def _docstrings(module: Path) -> Iterable[str]:
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the source of the standard library
        tree = ast.parse(module.read_bytes())
    nodes = [node for node in ast.walk(tree) if isinstance(node, described)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return dict.fromkeys(ast.get_docstring(node) or "" for node in nodes)
