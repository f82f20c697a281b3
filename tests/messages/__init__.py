"""Pin wording in one place: what users read stands in tests/messages/<area>.txt, and in no other test.

An area has one test, which gives `check` a call for each message. A call returns the words, or raises the error that
holds them; a context manager that it returns is entered:

    check("benchmark", {"no such phone": lambda: open_device("adb:C")}, {str(tmp_path): "TMP"})

`COMPRESS_MESSAGES=write pytest tests/benchmark/test_messages.py` writes the file again: read what changed before you
commit it. Other tests assert types, fields and values.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from compress.errors import CompressError

FOLDER = Path(__file__).parent


def said(call: Callable[[], object]) -> str:
    """Return the words of a call, or the type and the words of its error."""
    try:
        found = call()
        if isinstance(found, AbstractContextManager):
            with found:
                return "nothing is wrong"
    except CompressError as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(map(str, found)) if isinstance(found, list | tuple) else str(found)


def check(area: str, calls: Mapping[str, Callable[[], object]], hidden: Mapping[str, str]) -> None:
    """Compare what every call says with the file of the area; `hidden`: what differs between machines -> its name."""
    sections = []
    for name, call in calls.items():
        words = said(call).replace("\N{NO-BREAK SPACE}", " ")
        for part, stand_in in hidden.items():
            words = words.replace(part, stand_in)
        sections.append(f"== {name}\n{words}\n")
    file = FOLDER / f"{area}.txt"
    if os.environ.get("COMPRESS_MESSAGES") == "write":
        file.write_text("\n".join(sections), encoding="utf-8")
    assert sections == file.read_text(encoding="utf-8").replace("\n\n== ", "\n\0== ").split("\0")
