"""Processes forked from a server that has imported everything once, so that one costs what it does and not its imports.

A test process has one such server, which whoever asks first starts: all ask here, for the same imports.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """Return the context whose `Process` is forked from that server."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.imports"])
    return forks
