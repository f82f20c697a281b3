"""Measure on a machine over ssh: one connection of the system's own ssh, over which all goes, files too.

The far side needs a POSIX shell, Python 3.8, numpy and onnxruntime; no sftp, no pip, no root. A shell makes a folder
and removes it when the agent in it ends, which is when the connection does: by our hand, by Ctrl-C, or by accident.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compress.benchmark import jobs
from compress.benchmark.local import AgentDevice, Link, connect
from compress.benchmark.remote import agent, runner
from compress.records.latency import DeviceError

SSH_FAILED = 255
NO_PYTHON = 127
NO_FOLDER = 73
"""EX_CANTCREAT: what our command ends with when it cannot make its folder."""

FAILURES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its key is another than before. Find out why before you trust it"),
    (
        "Host key verification failed",
        "its key is not known here. Connect once by hand (ssh {host}), compare and accept the key",
    ),
    ("Permission denied", "it does not let this user in without a password, and none is asked for. ssh-copy-id {host}"),
    ("Could not resolve hostname", "no machine of that name. Check it: ssh {host}"),
    ("Connection refused", "nothing listens for ssh there. Is sshd running, on this port? ssh:host:port names another"),
    ("timed out", "no answer. Is it on, and reachable from here?"),
    ("No route to host", "no way there. Is it on, and in this network?"),
    ("Network is unreachable", "no way there. Is it on, and in this network?"),
)
"""Words of ssh, and what they mean to whoever reads our message. The first that is found counts."""


@dataclass(frozen=True)
class Address:
    """`[user@]host[:port]`, as a user writes it; an IPv6 address in brackets."""

    host: str
    port: str = ""

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse what a user writes. Raises DeviceError for what is no address, before it comes near ssh."""
        found = re.fullmatch(
            r"((?:[^@\s-][^@\s]*@)?)(\[[0-9a-fA-F:.%\w]+\]|[^-:@\s\[\]][^:@\s\[\]]*)(?::(\d{1,5}))?", text
        )
        if not found:
            raise DeviceError(f"--device ssh:{text}: expected ssh:[user@]host[:port], as in ssh:pi@raspberry:22")
        return Address(found[1] + found[2].strip("[]"), found[3] or "")

    @property
    def by_hand(self) -> str:
        """Write what follows `ssh` when a user types it."""
        return f"-p {self.port} {self.host}" if self.port else self.host

    def command(self, far: str, timeout: float) -> list[str]:
        """Call ssh so that it asks nothing, opens this connection alone, and notices within 45 s that it is lost."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(timeout))),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "LogLevel": "ERROR",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", "-x", *given, *(["-p", self.port] if self.port else []), "--", self.host, far]


def far_command(python: str, length: int) -> str:
    """Write what the far login shell runs, whichever it is: a POSIX shell that makes a folder, removes it at the end,
    and in between runs the agent, whose `length` bytes of source come first on standard input."""
    boot = f"import sys; exec(compile(sys.stdin.buffer.read({length}), 'agent.py', 'exec'))"
    script = (
        f"d=$(mktemp -d) || exit {NO_FOLDER}; trap 'rm -rf \"$d\"' EXIT; trap 'exit 1' HUP INT TERM; "
        f'{shlex.quote(python)} -c {shlex.quote(boot)} "$d"'
    )
    return f"exec sh -c {shlex.quote(script)}"


@contextmanager
def ssh(
    where: str, *, python: str, affinity: tuple[int, ...], timeout: float, say: Callable[[str], None]
) -> Iterator[AgentDevice]:
    """Open the machine at `where`. `python`: its interpreter that has onnxruntime. Raises DeviceError."""
    address = Address.parse(where)
    name = f"ssh:{where}"
    if shutil.which("ssh") is None:
        raise DeviceError(f"{name}: there is no program `ssh` here; install an OpenSSH client")
    source = Path(str(agent.__file__)).read_bytes()

    def lost(code: int | None, words: str) -> DeviceError:
        return DeviceError(f"{name}: {_reason(code, words, address, python, timeout)}")

    def missing(runtime: str, why: str) -> DeviceError:
        version = link.hello["facts"]["python"]
        return DeviceError(
            f"{name}: {python} there (Python {version}) does not load {runtime} and numpy ({why}). "
            f"Install them there: {python} -m pip install {runtime} numpy; or name another interpreter: --python"
        )

    command = address.command(far_command(python, len(source)), timeout)
    with connect(command, loss=lost, timeout=timeout, preamble=source) as link:
        folder = Folder(name, link)
        far_runner = folder.place(Path(str(runner.__file__)), "runner.py")
        yield AgentDevice(name, link, folder.place_model, far_runner, affinity, say, missing)


@dataclass(frozen=True)
class Folder:
    """The folder on the far side: what is there already is not sent again. sent: path, size, time of change -> there"""

    name: str
    link: Link
    sent: dict[tuple[Path, int, int], str] = field(default_factory=dict)

    def place_model(self, path: Path) -> str:
        """Send a model and what belongs to it, unless they are there. Return its path there."""
        state = path.stat()
        key = (path.resolve(), state.st_size, state.st_mtime_ns)
        if key not in self.sent:
            number = len(self.sent)
            there = [self.place(part, f"{number}{part.suffix}") for part in jobs.parts(path)]
            self.sent[key] = there[0]
        return self.sent[key]

    def place(self, path: Path, name: str) -> str:
        size, free = path.stat().st_size, int(self.link.hello["free"])
        if size > free:
            raise self._full(path, size, "No space left on device")
        answer = self.link.ask(path, do="put", name=name, bytes=size)
        if "error" in answer:
            raise self._full(path, size, answer["error"])
        there: str = answer["path"]
        return there

    def _full(self, path: Path, size: int, why: str) -> DeviceError:
        free, folder = int(self.link.hello["free"]), self.link.hello["folder"]
        return DeviceError(
            f"{self.name}: {path} ({size / 1e6:.1f} MB) cannot be written there: {why}. {folder} had "
            f"{free / 1e6:.1f} MB free. Make room, or set TMPDIR for that user to where there is some"
        )


def _reason(code: int | None, words: str, address: Address, python: str, timeout: float) -> str:
    """Say why the connection ended, for whoever can mend it. `code`: of ssh, which is 255 for its own failures."""
    last = words.splitlines()[-1].rstrip(".") if words else "ssh said nothing"
    if code is None:
        return f"no answer within {timeout:g} s ({last}); give it more time with --timeout"
    for found, meaning in FAILURES if code == SSH_FAILED else ():
        if found in words:
            return f"{last}: {meaning.format(host=address.by_hand)}"
    if code == SSH_FAILED:
        return f"the connection was lost ({last}). What ran there ends, and its folder goes, by itself"
    if code == NO_PYTHON:
        return f"no {python} there ({last}). Install Python 3.8 or newer, or name its path: --python"
    if code == NO_FOLDER:
        return f"no folder can be made there ({last}). Make room in its TMPDIR"
    return f"what keeps the measuring processes there ended with code {code} ({last})"
