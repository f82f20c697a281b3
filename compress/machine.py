"""Count the cores and measure the memory that a process may use, and read which process
of a launch it is from the variables that torchrun and accelerate set."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from compress.errors import RunError


def count_processes() -> int:
    """Count the processes of this launch: more than one if accelerate or torchrun has
    started them. Raises RunError if WORLD_SIZE is not a count."""
    return int(_read_variable("WORLD_SIZE", r"[1-9]\d*", "1"))


def process_rank() -> int:
    """Return the number of this process in its launch, from 0. Raises RunError if there
    are several and RANK is not a number."""
    return int(_read_variable("RANK")) if count_processes() > 1 else 0


def check_meeting() -> None:
    """Raise RunError if there are several processes and a variable by which they meet
    is missing."""
    if count_processes() > 1:
        for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
            _read_variable(name)
        _read_variable("MASTER_ADDR", ".+")


def _read_variable(name: str, pattern: str = r"\d+", default: str = "") -> str:
    value = os.environ.get(name) or default
    if not re.fullmatch(pattern, value):
        raise RunError(
            f"{name}={value}: expected what torchrun or accelerate launch set for each "
            "of several processes: start them with one of these, or unset WORLD_SIZE"
        )
    return value


def count_cores() -> int:
    """Count the cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def measure_memory() -> tuple[int, int]:
    """Return total and free memory in bytes, within a container's limit; (0, 0) if
    unknown."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0, 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = (line.split() for line in _read_text(Path("/proc/meminfo")).splitlines())
    free = next(
        (int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), total
    )
    for limit, used in _list_limits():
        if limit < total:
            total = limit
            free = min(free, limit - used)
    return total, free


def _list_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of this process's control group, and the bytes that cannot be
    read again from files, by version 2 and version 1 of Linux's control groups."""
    versions = {
        "": (Path("/sys/fs/cgroup"), "memory.max", "anon"),
        "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "total_rss"),
    }
    for line in _read_text(Path("/proc/self/cgroup")).splitlines():
        _, controller, path = line.split(":", 2)
        if controller not in versions:
            continue
        root, limit_file, used_name = versions[controller]
        # in a container, the path may be the host's
        for folder in (root / path.lstrip("/"), root):
            limit = _read_text(folder / limit_file).strip()
            stat = _read_text(folder / "memory.stat").split()
            if limit.isdecimal() and used_name in stat:
                yield int(limit), int(stat[stat.index(used_name) + 1])
                break


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
