"""Shared by the benchmarks: the parser, the result file, worker processes, bundles with their data, texts of a file."""

import argparse
import csv
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compress.benchmark.local import machine
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import PACKAGES
from compress.provenance import versions


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser whose help is the docstring of the script, as it is laid out there."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def write_result(out: Path | None, facts: dict[str, Any], packages: Iterable[str] = PACKAGES) -> None:
    """Write a result as JSON: command, date, machine, versions, commit, then the facts. None as `out`: do nothing."""
    if out is None:
        return
    command = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    result = {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {**versions(packages), "python": platform.python_version()},
        **COMMIT,
        **facts,
    }
    out.write_text(json.dumps(result, indent=1, default=float) + "\n", encoding="utf-8")


def find_commit() -> dict[str, Any]:
    """Return the commit of this checkout, and whether what runs is as it was committed; None if that is not known."""
    paths = ("compress", "recipes", "benchmarks", ":!benchmarks/results")
    commands = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", *paths])
    asked = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        for words in commands
    ]
    if any(each.returncode for each in asked):
        return {"commit": None, "clean": None}
    commit, changed = (each.stdout.strip() for each in asked)
    return {"commit": commit, "clean": not changed}


ROOT = Path(__file__).parents[1]
COMMIT = find_commit()
"""Of the time when the script began."""


def run_worker(command: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run a process to its end, and read the last line that it prints as JSON; exit where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def load_pair(pair: str) -> tuple[str, Bundle, str]:
    """Load the bundle of `BUNDLE=DATA`; return its name, the bundle, and the name of the data."""
    path, _, data = pair.partition("=")
    bundle = Bundle.load(Path(path))
    return bundle.path.parent.name if bundle.path.name == "bundle" else bundle.path.name, bundle, data


def read_texts(file: Path) -> list[str]:
    """Read the first column of a TSV file with a header."""
    with file.open(encoding="utf-8") as lines:
        return [row[0] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)][1:]


def log(words: str) -> None:
    """Print progress to stderr, so that stdout has the result alone."""
    print(words, file=sys.stderr, flush=True)
