"""Talk to an agent, wherever it runs, through its pipe: a request, an answer."""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from compress.benchmark.remote import agent
from compress.records.latency import DeviceError

PATIENCE = 15.0
"""Seconds an agent has to end after its input did: it kills its runners, and removes its folder where it has one."""

Loss = Callable[[int | None, str], DeviceError]
"""The error for a lost agent, of its process's exit code (None: given up) and its words on standard error."""


@dataclass
class Link:
    """A running agent. `hello` is its first line."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    loss: Loss
    hello: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, body: Path | None = None, **request: Any) -> dict[str, Any]:
        """Return the agent's answer; the content of `body` follows the request. Raises what `loss` makes of its end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            if body is not None:
                with body.open("rb") as file:
                    shutil.copyfileobj(file, self.process.stdin, agent.CHUNK)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.lost() from None
        found: dict[str, Any] = json.loads(self.read_line())
        return found

    def read_line(self) -> str:
        """Read a whole line of its output. Raises what `loss` makes of its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self.lost()
        return line.decode(errors="replace")

    def lost(self, *, gave_up: bool = False) -> DeviceError:
        """Say what its end means, with its last words."""
        code = self.process.wait()
        self.errors.seek(0)
        return self.loss(None if gave_up else code, self.errors.read().decode(errors="replace").strip())


@contextmanager
def connect(command: Sequence[str], *, loss: Loss, timeout: float, preamble: bytes = b"") -> Iterator[Link]:
    """Start the agent by `command`; `preamble` is written before the first request.

    In a session of its own: Ctrl-C is for us alone, and the agent ends when its input does, which is here, whatever
    happens. Raises DeviceError when it says nothing for `timeout` seconds.
    """
    pipe, silent = subprocess.PIPE, threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        link = Link(process, errors, loss)

        def give_up() -> None:
            silent.set()
            process.kill()

        alarm = threading.Timer(timeout, give_up)
        try:
            alarm.start()
            try:
                process.stdin.write(preamble)
                process.stdin.flush()
                while not (line := link.read_line()).startswith(agent.READY):
                    pass  # what a login shell says
            except (BrokenPipeError, DeviceError):
                raise link.lost(gave_up=silent.is_set()) from None
            finally:
                alarm.cancel()
            link.hello = json.loads(line)
            yield link
        finally:
            try:
                with suppress(BrokenPipeError):  # of what is still in the buffer
                    process.stdin.close()
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
