"""Which polluted CSV files are read right, refused, or read wrong without a word?

    python -m benchmarks.pollock CHECKOUT [--list]

CHECKOUT is a clone of github.com/HPI-Information-Systems/Pollock (Vitagliano et al., PVLDB 2023): 2,289 files made from
one table by the pollutions that a survey of open data found, and the table that each should be read as. Ours is the
reader of `compress.data.tables`; pandas and duckdb read with their defaults, every cell as a string, where they are
installed. Right: the header and all cells are those of the clean table. Refused: an error. Silent: anything else.
--list names the files that are read silently wrong.
"""

import csv
import importlib
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from benchmarks.common import log, make_parser
from compress.data.table_files import open_table
from compress.errors import DataError

Cells = list[list[str]]
Reader = Callable[[Path], Cells]


def ours(path: Path) -> Cells:
    """Read a file as training and `predict` do; a file without a header has no names in the clean table either."""
    table = open_table(path)
    names = [] if table.headerless else [list(table.columns)]
    rows = list(table.rows(table.columns, None))
    if wrong := next((row.error for row in rows if row.error), ""):
        raise DataError(wrong)
    return [*names, *([str(cell or "") for cell in row.cells] for row in rows)]


def readers() -> Iterator[tuple[str, Reader]]:
    """Yield the readers that are installed, by name and version."""
    yield "ours", ours
    for name, read in (("pandas", with_pandas), ("duckdb", with_duckdb)):
        if importlib.util.find_spec(name) is None:
            log(f"{name} is not installed: pip install {name}")
        else:
            yield f"{name} {metadata.version(name)}", read


def with_pandas(path: Path) -> Cells:
    """Read a file as `pandas.read_csv` does."""
    frame = importlib.import_module("pandas").read_csv(path, dtype=str, keep_default_na=False)
    return [list(map(str, frame.columns)), *([str(cell) for cell in row] for row in frame.to_numpy())]


def with_duckdb(path: Path) -> Cells:
    """Read a file as duckdb's `read_csv` does."""
    found = importlib.import_module("duckdb").sql(f"from read_csv('{path}', all_varchar=true)")
    return [list(found.columns), *([cell or "" for cell in row] for row in found.fetchall())]


def judge(read: Reader, path: Path, expected: Cells) -> str:
    """Return right, refused or silent."""
    try:
        return "right" if read(path) == expected else "silent"
    except Exception as error:  # each reader has errors of its own
        if read is ours and not isinstance(error, DataError):
            raise
        return "refused"


def count(files: Mapping[Path, Cells], read: Reader, *, listed: bool) -> dict[str, Counter[str]]:
    """Count the outcomes by pollution."""
    counts: dict[str, Counter[str]] = {}
    for path, expected in files.items():
        pollution = re.sub(r"_?\d+(_col\d+)?(_0x20)?$", "", path.stem) if path.name.startswith("row_") else "file"
        outcome = judge(read, path, expected)
        counts.setdefault(re.sub(r"_?row$", "", pollution), Counter())[outcome] += 1
        if listed and outcome == "silent":
            log(f"silent: {path.name}")
    return counts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--list", action="store_true")
    told = parser.parse_args()
    folder = told.checkout / "polluted_files"
    files = {}
    for path in sorted((folder / "csv").glob("*.csv")):
        with (folder / "clean" / path.name).open(newline="", encoding="utf-8") as file:
            files[path] = [row for row in csv.reader(file) if row]
    print(f"{len(files):,} files; right / refused / silent")
    for name, read in readers():
        counts = count(files, read, listed=told.list)
        total = sum(counts.values(), Counter[str]())
        rows = {"all": total, **counts}
        shown = {kind: [each["right"], each["refused"], each["silent"]] for kind, each in rows.items()}
        print(f"{name:14}", json.dumps(shown))


if __name__ == "__main__":
    main()
