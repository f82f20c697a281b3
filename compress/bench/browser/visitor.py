"""The page at the other end of the link: who it is, one command at a time to it, one answer back.

The page polls for its next command, and each poll says that it is alive. A command is handed out until it is answered,
so one that was lost on the way is asked for again; an answer that nobody waits for is dropped.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from compress.bench.protocol import DeviceError

HOLD = 5.0
"""Seconds for which a poll is held open before it is told that there is nothing to do."""

SILENCE = 20.0
"""Seconds without a poll after which the page counts as gone."""

LONGEST = 900.0
"""Seconds one command may take: opening a large file over a slow network, or a round of a slow model."""

GONE = (
    "Usual reasons: the tab was closed or reloaded, the phone was locked, the network was lost, or the browser had too "
    "little memory for the model. Run the command again and keep the page in front."
)


class Visitor:
    """One link and the one page that may claim it. Requests call from threads of their own.

    `token` is in the link, for one use. Whoever claims it gets the secret path under which everything else is.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._secret = secrets.token_urlsafe(32)
        self._changed = threading.Condition()
        self._claimed = False
        self._left = False
        self._seen = 0.0
        self._number = 0
        self._command: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._ended = False
        self._told_end = False

    def claim(self, token: str) -> str | None:
        """The secret for the first who shows the token, None for everybody else."""
        right = hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.token.encode())
        with self._changed:
            if not right or self._claimed:
                return None
            self._claimed, self._seen = True, time.monotonic()
            self._changed.notify_all()
            return self._secret

    def knows(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def next(self, after: int) -> dict[str, Any] | None:
        """The command that follows number `after`, as soon as there is one; None after HOLD seconds."""
        with self._changed:
            self._seen = time.monotonic()
            self._changed.wait_for(lambda: self._ended or self._waiting(after), HOLD)
            if self._ended:
                self._told_end = True
                self._changed.notify_all()
                return self._command
            return self._command if self._waiting(after) else None

    def answered(self, answer: Mapping[str, Any]) -> None:
        """Takes the page's answer, unless it is to another question than the one asked now."""
        with self._changed:
            self._seen = time.monotonic()
            if answer.get("id") == self._number and self._command is not None and not self._ended:
                self._command, self._answer = None, dict(answer)
                self._changed.notify_all()

    def leaves(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def arrives(self, timeout: float) -> bool:
        """Waits for a browser to claim the link, at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._claimed, timeout)

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Has the page do something; its answer. Raises DeviceError when the page is gone or takes for ever."""
        with self._changed:
            self._number += 1
            self._command, self._answer = {"id": self._number, **command}, None
            self._changed.notify_all()
            deadline = time.monotonic() + LONGEST
            while self._answer is None:
                self._check(deadline)
                self._changed.wait(0.25)
            return self._answer

    def end(self, words: str, patience: float = 2.0) -> None:
        """Tells the page that it is over, and waits a moment for it to hear that."""
        with self._changed:
            self._number += 1
            self._command = {"id": self._number, "do": "end", "say": words}
            self._ended = True
            self._changed.notify_all()
            if self._claimed and not self._left and time.monotonic() - self._seen < SILENCE:
                self._changed.wait_for(lambda: self._told_end or self._left, patience)

    def _waiting(self, after: int) -> bool:
        return self._command is not None and self._number > after

    def _check(self, deadline: float) -> None:
        now = time.monotonic()
        if self._left:
            raise DeviceError(f"browser: the page was left in the middle of a measurement. {GONE}")
        if now - self._seen > SILENCE:
            raise DeviceError(f"browser: nothing heard from the page for {SILENCE:.0f} s. {GONE}")
        if now > deadline:
            raise DeviceError(
                f"browser: the page is there, but has not finished one step in {LONGEST / 60:.0f} minutes. Measure "
                "with fewer --runs, shorter --seq, or a smaller model."
            )
