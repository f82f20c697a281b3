"""Let the processes of a launch wait for each other, agree, and receive each other's
files.

A process that waits in a collective for longer than the timeout of its process group is
ended, and preparation may take longer than that. Processes therefore wait here, in a
group of their own, and meet in collectives of the other one only once all have come.

Nodes may have a cache and folders of their own. The first process of each node makes
there what follows from its inputs. What was trained, bought or drawn at random is made
by the first process of the launch, and sent to the nodes that lack it.
"""

import datetime
import os
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

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

T = TypeVar("T")

WAIT_LIMIT = datetime.timedelta(days=14)
"""The time that processes wait for each other. Those of one that has ended stop at
once."""
SENT_AT_ONCE = 1 << 26
"""Bytes of a file that are held in memory while it is sent."""


def count_processes() -> int:
    """Count the processes of this launch: more than one if accelerate or torchrun has
    started them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_rank() -> int:
    """Return the number of this process in its launch, from 0."""
    return int(os.environ.get("RANK", "0"))


@cache
def _waiting_group(_: Any) -> Any:
    """Make the group to wait in. Every process of the default group calls this at the
    same time."""
    from torch import distributed

    return distributed.new_group(backend="gloo", timeout=WAIT_LIMIT)


def _group() -> Any:
    from torch import distributed

    return _waiting_group(distributed.group.WORLD)


def wait_for_all() -> None:
    """Return once all processes of this launch have come here, however long that takes.

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
    """Raise RunError for what collectives raise once a process has ended."""
    from torch import distributed

    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise RunError(
                "another process of this launch has ended, and its own output says "
                "why; start all of them again, and those of a run with --resume"
            ) from error
        raise


def any_process(flag: bool) -> bool:
    """Return True if the flag is set in any process of this launch. All of them come
    here at about the same time."""
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
    """Let the first process of each node go first: the others find in its cache what it
    has made or downloaded."""
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
    """Compare facts, by what they are of, with those of the first process. Raises
    RunError in all processes, with the rank and the host of each that differs."""
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
    """Compare the files and the version of this package that the processes of a launch
    have been given. Raises RunError."""
    if count_processes() == 1:
        return
    facts = {"version of compress": __version__}
    for name, source in sources.items():
        facts |= glance(name, source)
    check_same(facts)


def glance(name: str, source: str | None) -> dict[str, str]:
    """Return a line for each file of what a user has named, in a moment: its bytes, and
    a hash of the first and the last ones of some files.

    name  what it is; nothing is returned for a source that is no file or folder
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
    """Return a sealed folder of the first process as this node has it.

    That is the folder itself on nodes that see the same files there. The others receive
    it once, under $COMPRESS_HOME/received. Every process of a launch calls this.
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
    """Send a file of the first process to those that have a target."""
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

    make  returns a whole entry of `data.cache`
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
    """Give a model the weights that it has in the first process."""
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
