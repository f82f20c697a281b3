"""End a command on SIGTERM as on Ctrl-C: clean up, and say how to continue."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
"""Exit codes after Ctrl-C and after SIGTERM: 128 plus the signal's number, as in a
shell."""


class Terminated(KeyboardInterrupt):
    """Raised in the main thread on SIGTERM. Code that cleans up after Ctrl-C cleans up
    after it too."""


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise Terminated for the first SIGTERM in this context; the second ends the
    process at once.

    Processes that are forked meanwhile end at once as well. A SIGTERM that the parent
    process ignores stays ignored.
    """
    before = signal.getsignal(signal.SIGTERM)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is signal.SIG_IGN
    ):
        yield
        return
    process = os.getpid()

    def terminate(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def exit_code(interrupt: BaseException) -> int:
    """Return the exit code for an interrupt: that of SIGTERM if it, or an exception
    that it was raised from, is a Terminated."""
    error: BaseException | None = interrupt
    while error is not None:
        if isinstance(error, Terminated):
            return TERMINATED
        error = error.__cause__ or error.__context__
    return INTERRUPTED
