"""Talk to an agent, wherever it runs, through its pipe: a request, an answer."""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compress.benchmark.remote import agent
from compress.records.latency import DeviceError

PATIENCE = 15.0
"""Seconds an agent has to end after its input did: it kills its runners, and removes its folder where it has one."""

Loss = Callable[[int | None, str], DeviceError]
"""What a lost agent means: its process's exit code, None where it was given up; and its words on standard error."""


@dataclass(frozen=True)
class Link:
    """A running agent. `hello` is its first line."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    loss: Loss
    hello: Mapping[str, Any]

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
            raise _lost(self.process, self.errors, self.loss) from None
        return json.loads(_line(self.process, self.errors, self.loss))


@contextmanager
def connect(command: Sequence[str], *, loss: Loss, timeout: float, preamble: bytes = b"") -> Iterator[Link]:
    """Start the agent by `command`; `preamble` is written before the first request.

    In a session of its own: Ctrl-C is for us alone, and the agent ends when its input does, which is here, whatever
    happens. Raises DeviceError when it says nothing for `timeout` seconds.
    """
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)
        try:
            yield Link(process, errors, loss, _hello(process, errors, loss, timeout, preamble))
        finally:
            _end(process)


def _hello(
    process: subprocess.Popen[bytes], errors: IO[bytes], loss: Loss, timeout: float, preamble: bytes
) -> dict[str, Any]:
    assert process.stdin is not None
    silent = threading.Event()

    def give_up() -> None:
        silent.set()
        process.kill()

    alarm = threading.Timer(timeout, give_up)
    alarm.start()
    try:
        process.stdin.write(preamble)
        process.stdin.flush()
        while not (line := _line(process, errors, loss)).startswith(agent.READY):
            pass  # what a login shell says
    except (BrokenPipeError, DeviceError) as error:
        if silent.is_set():
            raise loss(None, _words(errors)) from None
        raise error if isinstance(error, DeviceError) else _lost(process, errors, loss) from None
    finally:
        alarm.cancel()
    return json.loads(line)


def _line(process: subprocess.Popen[bytes], errors: IO[bytes], loss: Loss) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise _lost(process, errors, loss)
    return line.decode(errors="replace")


def _lost(process: subprocess.Popen[bytes], errors: IO[bytes], loss: Loss) -> DeviceError:
    return loss(process.wait(), _words(errors))


def _words(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # of what is still in the buffer
            process.stdin.close()
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
