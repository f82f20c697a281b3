"""A real sshd on this machine, on a port of its own, with keys and known hosts of its own; and the real client."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SSH = shutil.which("ssh")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
needs_sshd = pytest.mark.skipif(
    not (SSHD and SSH and shutil.which("ssh-keygen")),
    reason="needs sshd, ssh and ssh-keygen: apt-get install openssh-server",
)
PATIENCE = 20.0


@dataclass(frozen=True)
class Server:
    """where: as in `--device ssh:WHERE`. temporary: the far TMPDIR, where a folder of ours would be."""

    where: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def temporary(self) -> Path:
        return self.folder / "far"

    def left(self) -> list[str]:
        """What is in the far TMPDIR once all has had time to end."""
        end = time.monotonic() + PATIENCE
        while (found := [path.name for path in self.temporary.iterdir()]) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def drop(self) -> None:
        """Every connection is lost: the processes that serve them are killed."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
        parents = dict(map(int, line.split()) for line in listed.splitlines()[1:])
        for child, parent in parents.items():
            if parent == self.process.pid:
                grandchildren = [pid for pid, above in parents.items() if above == child]
                for pid in (child, *(pid for pid in grandchildren if "sshd" in _command(pid))):
                    os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """sshd lets the user of this process in, by a key; `folder/bin/ssh` is the client with the key and the host known.

    The client is the system's: ssh has no variable for its configuration, so a script of that name adds `-F`.
    """
    assert SSHD
    for key in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "far").mkdir()
    shutil.copyfile(folder / "user.pub", folder / "authorized")
    host_key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin yes\nSetEnv TMPDIR={folder}/far\n"
    )
    client(folder, key="user", known="known")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd of Debian locks itself in, made by its service file
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE) as process:
        try:
            _listens(port, process)
            yield Server(f"{getpass.getuser()}@127.0.0.1:{port}", folder, process)
        finally:
            process.terminate()


def client(folder: Path, *, key: str, known: str) -> None:
    """`folder/bin/ssh` is the system's client with this key and these known hosts."""
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/{key}\nIdentitiesOnly yes\nIdentityAgent none\nGlobalKnownHostsFile /dev/null\n"
        f"UserKnownHostsFile {folder}/{known}\n"
    )
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "ssh"
    script.write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/ssh_config "$@"\n')
    script.chmod(0o755)


def _listens(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    process.terminate()
    assert process.stderr
    raise AssertionError(f"sshd does not listen: {process.stderr.read().decode()}")
