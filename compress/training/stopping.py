"""End a stage on SIGTERM, which schedulers and torchrun send, only once its checkpoint
is written."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compress.errors import RunError
from compress.training.processes import any_process

GRACE_SECONDS = 20.0
"""Seconds from SIGTERM until a process ends without a checkpoint, because a step or a
peer takes too long. Schedulers and torchrun kill it after 30."""


class StopRequest:
    """A SIGTERM that has come during training, in this process (`asked`) or in any of
    the launch (`agreed`)."""

    def __init__(self) -> None:
        self.asked = False
        self.agreed = False
        self._terminate: Callable[[], None] = _refuse

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep a SIGTERM for `end`. Further ones are ignored: torchrun and its
        scheduler both send it.

        If SIGTERM has no handler, or outside the main thread, it ends the process as
        before.
        """
        before = signal.getsignal(signal.SIGTERM)
        in_main = threading.current_thread() is threading.main_thread()
        if not (callable(before) and in_main and hasattr(signal, "setitimer")):
            yield
            return
        process = os.getpid()

        def ask(number: int, frame: Any) -> None:
            if os.getpid() != process:
                before(number, frame)
            if not self.asked:
                self.asked = True
                signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

        def end(*_: Any) -> None:
            signal.signal(signal.SIGTERM, before)
            before(signal.SIGTERM, None)

        self._terminate = end
        signal.signal(signal.SIGTERM, ask)
        alarm = signal.signal(signal.SIGALRM, end)
        try:
            yield
            if self.asked:
                end()
        except (RunError, RuntimeError):
            if self.asked:  # others may have ended sooner
                end()
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            if signal.getsignal(signal.SIGTERM) is ask:
                signal.signal(signal.SIGTERM, before)

    def agree(self) -> bool:
        """Return True if any process of the launch was asked to end. All processes call
        this after the same step."""
        self.agreed = any_process(self.asked)
        return self.agreed

    def end(self) -> None:
        """End the process as SIGTERM would have, if all processes have agreed."""
        if self.agreed:
            self._terminate()


def _refuse() -> None:
    raise RunError("another process of this launch was asked to end")
