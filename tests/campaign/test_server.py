"""Random requests to the server of a browser measurement: each is answered, none is let in, none does harm."""

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from compress.benchmark.browser import server
from compress.benchmark.browser.server import PUBLIC, PageSession, Site, serve_site
from tests.benchmark.fake_page import claim, request
from tests.campaign.cases import WHOLE, Record, draw, record

EACH = 100
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "", "G" * 300)
NAMES = (
    "",
    "page.js",
    "style.css",
    "worker.js",
    "files/0.onnx",
    "next?after=0",
    "next",
    "answer",
    "bye",
    "claim",
    "../" * 9,
)
ODD = (
    "http://[", "%00", "%2e%2e/", "//[", "[::1", "\\..\\", "é", "?after=-1", "?after=9e9", "#", ";", "%", "a" * 70_000,
    "\x7f", "*",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"[]", b"{", b"null", b"\xff\xfe", b"[" * 50_000, b'{"token": null}', b'{"token": "x"}',
    b'{"id": 1e999}',
)  # fmt: skip
VERSIONS = ("1.1", "1.1", "1.0", "0.9", "9", "x")
HEADERS = (
    "Host: evil.example", "Host:", "Origin: null", "Origin: http://evil.example", "Transfer-Encoding: chunked",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5", "Content-Length: x",
    "Expect: 100-continue", "Connection: keep-alive", "Cookie: " + "c" * 60_000, "X: \x00", ": ", "no colon",
    "Range: bytes=0-",
    *(f"X-{at}: y" for at in range(3)),
)  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "model.onnx").write_bytes(b"weights" * 1000)
    made = Site(PageSession(), {"worker.js": server.WEB / "worker.js"})
    made.offer(tmp_path / "model.onnx")
    return made


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Errors of ours that the server would swallow."""
    import sys

    errors: list[str] = []

    def keep(*_: object) -> None:
        kind, error, _ = sys.exc_info()
        if kind is not None and not issubclass(kind, OSError):
            errors.append(repr(error))

    monkeypatch.setattr(server._Server, "handle_error", keep)
    monkeypatch.setattr("compress.benchmark.browser.server.HOLD", 0.01)
    yield errors


@pytest.mark.parametrize("part", range(10 if WHOLE else 1))
def test_random_requests(site: Site, broken: list[str], part: int, record_property: Record) -> None:
    """The odd parts know the secret path, as a page has it that went mad."""
    chance, faults = draw("server", part), {}
    with serve_site(site, lan=False) as link:
        base = str(claim(link).json()["base"]) if part % 2 else "/not-the-secret/"
        threads = threading.active_count()
        for number in range(EACH):
            sent = random_request(chance, link, base)
            status = exchange(link, sent)
            inside = base.encode() in sent.split(b"\r\n")[0] and part % 2
            path = sent.split(b" ")[1].split(b"?")[0].decode("latin-1") if sent.count(b" ") > 1 else ""
            wrong = status is not None and status >= 500 and status not in (501, 505)
            wrong |= status in (200, 204, 206) and not inside and path not in PUBLIC
            if wrong or broken:
                faults[f"{number}: {sent[:200]!r}"] = [status, *broken]
                broken.clear()
        if not part % 2:
            assert claim(link).status == 200, "the token is still good, once"
        assert claim(link).status == 403
        assert request(link, "/").status == 200
        assert threading.active_count() < threads + 30
    record(record_property, "server: requests", EACH, faults)


def random_request(chance: random.Random, link: str, base: str) -> bytes:
    path = chance.choice(("/", base, "")) + chance.choice(NAMES)
    if chance.random() < 0.4:
        at = chance.choice((0, chance.randint(0, len(path))))
        path = path[:at] + chance.choice(ODD) + path[at:]
    body = chance.choice(BODIES)
    lines = [f"{chance.choice(METHODS[:2] * 6 + METHODS)} {path} HTTP/{chance.choice(VERSIONS)}"]
    if chance.random() < 0.9:
        lines.append(f"Host: {urlsplit(link).netloc}")
    lines += chance.sample(HEADERS, chance.choice((0, 0, 1, 2)))
    if chance.random() < 0.7:
        lines.append(f"Content-Length: {len(body)}")
    sent = "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body
    return sent if chance.random() < 0.8 else bytes(each ^ (chance.random() < 0.002) for each in sent)


def exchange(link: str, sent: bytes) -> int | None:
    """The status of the reply; None where there is none, as for what is no HTTP."""
    url = urlsplit(link)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            reply = b""
            while chunk := connection.recv(2**16):
                reply += chunk
        except OSError:
            return None
    first = reply.split(b"\r\n")[0].split(b" ")
    return int(first[1]) if len(first) > 1 and first[0].startswith(b"HTTP/") else None
