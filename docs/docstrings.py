"""Lay out the fields that our docstrings list, for the API page: a griffe extension."""

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(\w+(?:(?:, | \.\.\. )\w+)*) {2,}(\S.*)$")


def list_fields(docstring: str) -> str:
    """Turn lines such as `seed  a number`, with indented lines that go on, into a list of Markdown."""
    lines = list[str]()
    within = False
    for line in docstring.splitlines():
        entry = ENTRY.match(line)
        if entry:
            lines += [""] if not within and lines and lines[-1] else []
            lines.append(f"- `{entry[1]}`: {entry[2]}")
            within = True
        elif within and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            lines += [""] if within and line else []
            lines.append(line)
            within = False
    return "\n".join(lines)


class Fields(Extension):
    """Rewrite the docstring of every object that the API page shows."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = list_fields(obj.docstring.value)
