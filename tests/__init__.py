"""No test pulls the plug, and an fsync takes 10 ms: files are not flushed, in any process that imports from here.

Tests of what is flushed, and when, put a function of their own, or the `real_fsync`, in its place.
"""

import os

real_fsync = os.fsync


def skip_flush(handle: int) -> None:
    """Stand in for `os.fsync`."""


os.fsync = skip_flush
