"""A fake page, which answers over real HTTP without a browser."""

import base64
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

FACTS = {
    "agent": "Stand-in 1.0", "cores": 8, "memory_gb": 4, "isolated": True, "simd": True, "timer_ms": 0.005,
    "processor": "arm 64 bit", "system": "Android 15", "model": "Phone", "gpu": "",
}  # fmt: skip


def tensor(values: Any) -> dict[str, Any]:
    array = np.asarray(values, "<f4")
    return {"dims": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "known": lambda _: FACTS,
    "clear": lambda _: {},
    "show": lambda _: {},
    "open": lambda _: {"init_ms": 30.0, "first_ms": 9.0, "forwards": 1},
    "time": lambda command: {"ms": [2.0] * command.get("runs", 3), "heap_mb": 50.0},
    "logits": lambda command: {"rows": [[tensor([[len(row[0]["data"]), 1.0]])] for row in command["rows"]]},
}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request(
    link: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout: float = 10
) -> Reply:
    """One request to where the link leads: POST when there is a body."""
    url = urlsplit(link)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
    try:
        connection.request("GET" if body is None else "POST", path, body, dict(headers or {}))
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def claim(link: str, token: str | None = None) -> Reply:
    token = urlsplit(link).fragment if token is None else token
    return request(link, "/claim", json.dumps({"token": token}).encode())


@dataclass
class Page:
    """Opens the link and answers commands in a thread of its own, until it is told the end or leaves.

    answers  instead of ANSWERS; one that returns None leaves the command unanswered and the page silent
    hidden   the commands during which it is hidden
    heard    all commands, in order
    """

    answers: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    heard: list[dict[str, Any]] = field(default_factory=list)
    link: str = ""
    base: str = ""
    threads: list[threading.Thread] = field(default_factory=list)

    def visit(self, link: str) -> None:
        self.link = link
        self.threads.append(threading.Thread(target=self._work, daemon=True))
        self.threads[-1].start()

    def said(self, what: str) -> list[dict[str, Any]]:
        return [command for command in self.heard if command["do"] == what]

    def leave(self) -> None:
        request(self.link, f"{self.base}bye", b"")

    def join(self) -> None:
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()

    def _work(self) -> None:
        self.base = claim(self.link).json()["base"]
        while True:
            after = self.heard[-1]["id"] if self.heard else 0
            reply = request(self.link, f"{self.base}next?after={after}")
            if reply.status == 204:
                continue
            self.heard.append(reply.json())
            command = self.heard[-1]
            if command["do"] == "end":
                return
            answer = {**ANSWERS, **self.answers}[command["do"]](command)
            if answer is None:
                return
            body = answer if "error" in answer else {"ok": answer}
            body |= {"id": command["id"], "hidden": command["do"] in self.hidden}
            request(self.link, f"{self.base}answer", json.dumps(body).encode())


@contextmanager
def page(answers: Mapping[str, Callable[[Mapping[str, Any]], Any]] | None = None, *hidden: str) -> Iterator[Page]:
    """A page whose thread has ended when the test has."""
    visitor = Page(answers or {}, frozenset(hidden))
    yield visitor
    visitor.join()
