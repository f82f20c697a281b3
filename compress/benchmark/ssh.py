"""Measure on a machine over ssh: everything, files too, goes over one connection of the
system's ssh.

The remote machine needs a POSIX shell, Python 3.8, numpy and onnxruntime; no sftp, no
pip, no root. A shell creates a folder there, and removes it when the agent in it exits,
which it does when the connection ends, however that happens.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compress.benchmark import jobs
from compress.benchmark.local import AgentDevice, Link, connect
from compress.benchmark.remote import agent, runner
from compress.progress import Say
from compress.records.latency import DeviceError

SSH_FAILED = 255
NO_PYTHON = 127
NO_FOLDER = 73
"""EX_CANTCREAT: the exit code of our command if it cannot create its folder."""

SSH_FAILURES = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed. Find out why before you trust it",
    ),
    (
        "Host key verification failed",
        "its host key is unknown here. Connect once yourself (ssh {host}), compare "
        "and accept the key",
    ),
    (
        "Permission denied",
        "it does not accept this user without a password. Install your key: "
        "ssh-copy-id {host}",
    ),
    (
        "Could not resolve hostname",
        "there is no machine of that name. Check it: ssh {host}",
    ),
    (
        "Connection refused",
        "no ssh server listens there. Is sshd running on this port? Another: "
        "ssh:host:port",
    ),
    ("timed out", "no answer. Is it switched on, and reachable from here?"),
    ("No route to host", "it cannot be reached. Is it on, and in this network?"),
    ("Network is unreachable", "it cannot be reached. Is it on, and in this network?"),
)
"""Parts of ssh's messages, and what to tell the user. The first match counts."""


@dataclass(frozen=True)
class Address:
    """`[user@]host[:port]`, with an IPv6 address in brackets."""

    host: str
    port: str = ""

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse an address. Raises DeviceError for anything else, so that it never
        reaches ssh."""
        match = re.fullmatch(
            r"((?:[^@\s-][^@\s]*@)?)(\[[0-9a-fA-F:.%\w]+\]|[^-:@\s\[\]][^:@\s\[\]]*)(?::(\d{1,5}))?",
            text,
        )
        if not match:
            raise DeviceError(
                f"--device ssh:{text}: expected ssh:[user@]host[:port], such as "
                "ssh:pi@raspberry:22"
            )
        return Address(match[1] + match[2].strip("[]"), match[3] or "")

    def command(self, remote_command: str, timeout: float) -> list[str]:
        """Build an ssh command that asks nothing, shares no connection, and notices a
        lost one within 45 s."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(timeout))),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "LogLevel": "ERROR",
        }
        flags = [
            word
            for name, value in options.items()
            for word in ("-o", f"{name}={value}")
        ]
        return [
            "ssh",
            "-T",
            "-x",
            *flags,
            *(["-p", self.port] if self.port else []),
            "--",
            self.host,
            remote_command,
        ]


def remote_command(python: str, length: int) -> str:
    """Build the command for any remote login shell: start a POSIX shell that creates a
    folder, runs the agent, whose `length` bytes of source come first on standard input,
    and removes the folder."""
    boot = (
        f"import sys; exec(compile(sys.stdin.buffer.read({length}), 'agent.py', "
        "'exec'))"
    )
    script = (
        f"d=$(mktemp -d) || exit {NO_FOLDER}; trap 'rm -rf \"$d\"' EXIT; trap 'exit 1' "
        "HUP INT TERM; "
        f'{shlex.quote(python)} -c {shlex.quote(boot)} "$d"'
    )
    return f"exec sh -c {shlex.quote(script)}"


@contextmanager
def open_ssh(
    where: str,
    *,
    python: str,
    affinity: tuple[int, ...],
    timeout: float,
    say: Say,
) -> Iterator[AgentDevice]:
    """Open the machine at `where` as a Device. `python`: its interpreter with
    onnxruntime. Raises DeviceError."""
    address = Address.parse(where)
    name = f"ssh:{where}"
    if shutil.which("ssh") is None:
        raise DeviceError(
            f"{name}: the program `ssh` is not installed; install an OpenSSH client"
        )
    source = Path(str(agent.__file__)).read_bytes()

    def lost(code: int | None, output: str) -> DeviceError:
        return DeviceError(
            f"{name}: {_explain_loss(code, output, address, python, timeout)}"
        )

    def missing(runtime: str, reason: str) -> DeviceError:
        version = link.hello["facts"]["python"]
        return DeviceError(
            f"{name}: {python} there (Python {version}) does not load {runtime} and "
            f"numpy ({reason}). Install them there: {python} -m pip install {runtime} "
            "numpy; or choose another interpreter: --python"
        )

    command = address.command(remote_command(python, len(source)), timeout)
    with connect(command, make_error=lost, timeout=timeout, preamble=source) as link:
        folder = RemoteFolder(name, link)
        remote_runner = folder.send(Path(str(runner.__file__)), "runner.py")
        yield AgentDevice(
            name,
            link,
            folder.send_model,
            remote_runner,
            affinity,
            say,
            missing,
        )


@dataclass(frozen=True)
class RemoteFolder:
    """The folder on the remote machine. sent: (path, size, time of change) -> remote
    path, of models already there."""

    name: str
    link: Link
    sent: dict[tuple[Path, int, int], str] = field(default_factory=dict)

    def send_model(self, path: Path) -> str:
        """Send a model with all its files, to a folder of its own, unless it is there
        already; return its remote path."""
        state = path.stat()
        key = (path.resolve(), state.st_size, state.st_mtime_ns)
        if key not in self.sent:
            number = len(self.sent)
            self.sent[key], *_ = [
                self.send(part, f"{number}/{part.relative_to(path.parent).as_posix()}")
                for part in jobs.parts(path)
            ]
        return self.sent[key]

    def send(self, path: Path, name: str) -> str:
        """Send a file and return its remote path. Raises DeviceError if it cannot be
        written."""
        size = path.stat().st_size
        free = int(self.link.hello["free"])
        answer = {"error": "No space left on device"}
        if size <= free:
            answer = self.link.ask(path, do="put", name=name, bytes=size)
        if "error" in answer:
            raise DeviceError(
                f"{self.name}: {path} ({size / 1e6:.1f} MB) cannot be written there: "
                f"{answer['error']}. {self.link.hello['folder']} had {free / 1e6:.1f} "
                "MB free. Make room, or set that user's TMPDIR to a folder with more "
                "space"
            )
        return answer["path"]


def _explain_loss(
    code: int | None,
    output: str,
    address: Address,
    python: str,
    timeout: float,
) -> str:
    """Explain why the connection ended. `code`: the exit code of ssh, which is 255 for
    its own failures."""
    last = output.splitlines()[-1].rstrip(".") if output else "no message"
    if code is None:
        return (
            f"no answer within {timeout:g} s ({last}); give it more time with --timeout"
        )
    if code == SSH_FAILED:
        host = f"-p {address.port} {address.host}" if address.port else address.host
        for pattern, meaning in SSH_FAILURES:
            if pattern in output:
                return f"{last}: {meaning.format(host=host)}"
        return (
            f"the connection was lost ({last}). The processes and the folder there are "
            "removed automatically"
        )
    if code == NO_PYTHON:
        return (
            f"no {python} there ({last}). Install Python 3.8 or newer, or give its "
            "path: --python"
        )
    if code == NO_FOLDER:
        return f"no folder can be created there ({last}). Make room in its TMPDIR"
    return f"the measuring agent there ended with code {code} ({last})"
