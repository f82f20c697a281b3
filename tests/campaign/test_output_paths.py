"""Random trees of files, folders, links, pipes and sockets: one path of each is written, and nothing else changes."""

import os
import random
import socket
import stat
from pathlib import Path

from compress.errors import OutputError
from compress.outputs import check_output_file, output_file
from tests.campaign.cases import WHOLE, Record, draw, record

TREES = 300 if WHOLE else 30
NAMES = "abcdef"
CONTENT = "new"


class Interrupted(Exception):  # noqa: N818
    pass


def grow(folder: Path, rng: random.Random) -> None:
    """Make each name a file, a folder, a link to some name, a pipe or a socket, or leave it out."""
    for name in NAMES:
        path, kind = folder / name, rng.choice(("file", "file", "folder", "link", "link", "link", "pipe", "socket", ""))
        if kind == "file":
            path.write_text(name)
            path.chmod(rng.choice((0o600, 0o640, 0o644, 0o755)))
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            target = rng.choice((*NAMES, *(f"{one}/{other}" for one in NAMES for other in NAMES), "absent"))
            path.symlink_to(folder / target if rng.random() < 0.5 else target)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)


def look(folder: Path) -> dict[str, tuple[int, str]]:
    """Describe everything below a folder: its kind and mode, and its content or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = str(path.readlink()) if stat.S_ISLNK(mode) else path.read_text() if stat.S_ISREG(mode) else ""
        found[str(path.relative_to(folder))] = (mode, content)
    return found


def test_one_path_is_written_and_nothing_else(tmp_path: Path, record_property: Record) -> None:
    here, faults, outcomes = Path.cwd(), dict[str, object](), dict[str, int]()
    for number in range(TREES):
        rng, folder = draw("tree", number), tmp_path / str(number)
        folder.mkdir()
        os.chdir(folder)  # a socket's path has 107 bytes at most
        grow(folder, rng)
        path = folder / rng.choice(NAMES) / ("" if rng.random() < 0.7 else rng.choice(NAMES))
        before, expected = look(folder), expect(path)
        if expected == "pipe":
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        outcome, fails = "", rng.random() < 0.2
        try:
            check_output_file(path, "out", "x")
            with output_file(path) as partial:
                partial.write_text(CONTENT)
                if fails:
                    raise Interrupted
            outcome = "pipe" if expected == "pipe" else "written"
        except OutputError:
            outcome = "refused"
        except Interrupted:
            outcome = "interrupted"
        if expected == "pipe":
            outcome = outcome if fails or os.read(reader, 99).decode() == CONTENT else "lost"
            os.close(reader)
        after, real = look(folder), str(Path(os.path.realpath(path)).relative_to(folder))
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        right = "interrupted" if fails and expected != "refused" else expected
        if outcome != right or changed != ({real} if outcome == "written" else set()):
            faults[f"tree {number}: {path.relative_to(folder)}"] = (right, outcome, sorted(changed))
        elif outcome == "written" and (after[real][1] != CONTENT or after[real][0] != before.get(real, after[real])[0]):
            faults[f"tree {number}: {path.relative_to(folder)}"] = (before.get(real), after[real])
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    os.chdir(here)
    print(f"{TREES} trees: {outcomes}")
    record(record_property, "output paths", TREES, faults)


def expect(path: Path) -> str:
    """Say what becomes of a path, by the system's own view of what lies there."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "written" if Path(os.path.realpath(path)).parent.is_dir() else "refused"
    except OSError:  # a circle of links
        return "refused"
    if stat.S_ISFIFO(mode):
        return "pipe"
    return "written" if stat.S_ISREG(mode) else "refused"
