"""Let the processes of a launch wait for each other, agree, and receive each other's
files.

A process that waits in a collective for longer than the timeout of its process group is
ended, and preparation may take longer than that. Processes therefore wait here, in a
separate group, and enter collectives of the default group only once all have come.

Nodes may have their own cache and folders. The first process of each node makes there
whatever its inputs determine. Whatever is trained, paid for or drawn at random is made
by the first process of the launch, and sent to the nodes that lack it.
"""

import datetime
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compress import __version__, io
from compress.data.cache import dataset, home, is_whole
from compress.errors import DamagedError, RunError
from compress.machine import count_processes

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

T = TypeVar("T")

WAIT_LIMIT = datetime.timedelta(days=14)
"""The time that processes wait for each other. If one of them ends, the others stop at
once."""
SENT_AT_ONCE = 1 << 26
"""Bytes of a file that are held in memory while it is sent."""


@cache
def _waiting_group(_: Any) -> Any:
    """Make the process group to wait in. Every process of the default group calls this
    at the same time."""
    from torch import distributed

    return distributed.new_group(backend="gloo", timeout=WAIT_LIMIT)


def _group() -> Any:
    from torch import distributed

    return _waiting_group(distributed.group.WORLD)


def wait_for_all() -> None:
    """Wait until all processes of this launch have come here, however long that takes.

    Signals are handled meanwhile. Raises RunError if another process has ended.
    """
    from accelerate import PartialState
    from torch import distributed

    if PartialState().num_processes == 1:
        return
    with naming_lost_processes():
        barrier = distributed.barrier(_group(), async_op=True)
        pause = 1e-4
        while not barrier.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        barrier.wait()


@contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Re-raise as RunError what collectives raise once a process has ended."""
    from torch import distributed

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise RunError(
                "another process of this launch has ended; its own output says why. "
                "Start all of them again, a run with --resume"
            ) from error
        raise


def any_process(flag: bool) -> bool:
    """Return True if the flag is set in any process of this launch. All processes call
    this at about the same time."""
    import torch
    from accelerate import PartialState
    from torch import distributed

    if PartialState().num_processes == 1:
        return flag
    count = torch.tensor(int(flag))
    with naming_lost_processes():
        distributed.all_reduce(count, group=_group())
    return bool(count)


@contextmanager
def node_first() -> Iterator[None]:
    """Let the first process of each node go first: the others then find its results and
    downloads in the node's cache."""
    from accelerate import PartialState

    first = PartialState().is_local_main_process
    if not first:
        wait_for_all()
    yield
    if first:
        wait_for_all()


def from_first(compute: Callable[[], T]) -> T:
    """Compute a value in the main process only, and return it in all processes."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    shared: list[Any] = [compute() if PartialState().is_main_process else None]
    wait_for_all()
    value: T = broadcast_object_list(shared)[0]
    return value


def gather(value: T) -> list[T]:
    """Return the values of all processes, in their order."""
    from accelerate.utils import gather_object

    wait_for_all()
    values: list[T] = gather_object([value])
    return values


def check_same(facts: Mapping[str, str]) -> None:
    """Compare named facts with those of the first process. Raises RunError in all
    processes, with the rank and the host of each process that differs."""
    everywhere = gather((socket.gethostname(), dict(facts)))
    host, expected = everywhere[0]
    problems = [
        f"{name}: {found.get(name, 'missing')} in process {rank} on {where}, "
        f"{expected.get(name, 'missing')} in process 0 on {host}"
        for rank, (where, found) in enumerate(everywhere)
        for name in sorted(expected | found)
        if found.get(name) != expected.get(name)
    ]
    shown = 4
    if problems:
        more = f"; and {len(problems) - shown:,} more" if len(problems) > shown else ""
        raise RunError(
            f"the processes of this launch differ: {'; '.join(problems[:shown])}{more}"
            ". All need the same files, options and versions: copy or mount them where "
            "they differ"
        )


def check_given(**sources: str | None) -> None:
    """Compare the version of this package and the named files between the processes of
    a launch. Raises RunError."""
    if count_processes() == 1:
        return
    facts = {"version of compress": __version__}
    for name, source in sources.items():
        facts |= glance(name, source)
    check_same(facts)


def glance(name: str, source: str | None) -> dict[str, str]:
    """Describe each file of a source in a line: its size in bytes and, for some files,
    a hash of its beginning and end. Takes a moment.

    name  the name of the source in the line; there are no lines if the source is
          neither a file nor a folder
    """
    path = Path(source or "").expanduser()
    if source is None or not path.exists():
        return {}
    files = {name: path}
    if path.is_dir():
        found = sorted(each.relative_to(path).as_posix() for each in path.rglob("*"))
        visible = [each for each in found if "/." not in f"/{each}"]
        files = {f"{name} {each}": path / each for each in visible}
    hashed = 100
    lines = dict[str, str]()
    for each, file in files.items():
        if file.is_file():
            lines[each] = f"{file.stat().st_size:,} bytes"
            if len(lines) <= hashed:
                lines[each] += f" ({io.hash_sample(file)[:8]})"
    return lines


def share_folder(folder: Path) -> Path:
    """Return the path on this node of a sealed folder of the first process.

    That is the folder itself on nodes that see the same files there. Other nodes
    receive it once, under $COMPRESS_HOME/received. Every process of a launch calls
    this.
    """
    from accelerate import PartialState

    state = PartialState()
    if state.num_processes == 1:
        return folder
    sums = from_first(lambda: io.read_checksums(folder))
    place = folder
    seen = _has(folder, sums)
    if not seen:
        place = home() / "received" / io.hash_value(sums)[:24]
        seen = state.is_local_main_process and is_whole(place)
    offers = gather((state.is_local_main_process, place, seen))
    firsts = [rank for rank, (first, *_) in enumerate(offers) if first]
    own = max(rank for rank in firsts if rank <= state.process_index)
    _, place, _ = offers[own]
    if all(offers[rank][2] for rank in firsts):
        return place
    with ExitStack() as unfinished:
        target = None
        if own == state.process_index and not seen:
            target = unfinished.enter_context(io.atomic_folder(place))
        for name in [*sorted(sums), io.CHECKSUMS]:
            _send_file(folder / name, None if target is None else target / name)
    wait_for_all()
    return place


def _has(folder: Path, sums: Mapping[str, str]) -> bool:
    """Return True if a folder is sealed with these checksums."""
    try:
        return io.read_checksums(folder) == sums
    except DamagedError:
        return False


def _send_file(source: Path, target: Path | None) -> None:
    """Send a file of the first process to the processes that have a target."""
    import torch
    from accelerate import PartialState
    from torch import distributed

    size = from_first(lambda: source.stat().st_size)
    with ExitStack() as files:
        sent = None
        if PartialState().is_main_process:
            sent = files.enter_context(source.open("rb"))
        received = None
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            received = files.enter_context(target.open("wb"))
        for start in range(0, size, SENT_AT_ONCE):
            block = torch.empty(min(SENT_AT_ONCE, size - start), dtype=torch.uint8)
            if sent is not None:
                sent.readinto(block.numpy().data)
            distributed.broadcast(block, src=0, group=_group())
            if received is not None:
                received.write(block.numpy().data)


def share_rows(make: Callable[[], "Dataset"]) -> "Dataset":
    """Return cached rows that the first process makes, the same on every node.

    make  returns a complete entry of `data.cache`
    """
    from accelerate import PartialState

    rows = make() if PartialState().is_main_process else None

    def locate() -> tuple[Path, str]:
        assert rows is not None, "the first process has made them"
        return Path(rows.cache_files[0]["filename"]).parent, rows._fingerprint

    entry, fingerprint = from_first(locate)
    place = share_folder(entry)
    return dataset(place, fingerprint) if rows is None else rows


def copy_weights(model: "nn.Module") -> None:
    """Copy the weights of a model from the first process to all processes."""
    import torch
    from accelerate import PartialState
    from torch import distributed

    wait_for_all()
    if PartialState().num_processes == 1:
        return
    for tensor in model.state_dict().values():
        numbers = tensor.contiguous().reshape(-1)
        distributed.broadcast(numbers.view(torch.uint8), src=0)
        tensor.copy_(numbers.view_as(tensor))


def forget_received(place: Path, folder: Path) -> None:
    """Remove the copy of a folder that `share_folder` has placed on this node, once all
    processes have read it."""
    from accelerate import PartialState

    wait_for_all()
    if place != folder and PartialState().is_local_main_process:
        shutil.rmtree(place)
