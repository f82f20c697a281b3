"""Serves one job to one page: the page itself to anyone who knows the address, all else under a secret path.

No file name comes from a request: what is asked for is looked up among the names offered, or it is not there. Headers
isolate the page (which is what lets WebAssembly have threads) and let it load nothing from elsewhere; a Host that is
not ours (a name that was pointed at this machine) and a request that another site's page made are refused.
"""

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

from compress.bench.browser.visitor import Visitor
from compress.bench.protocol import DeviceError

WEB = Path(__file__).parent / "web"

LOOPBACK = "127.0.0.1"

MOST_CLAIM = 1_000
MOST_ANSWER = 64_000_000
"""Bytes of a request's body: a claim is a token, an answer at most the logits of a few rows."""

LONGEST_BODY = 120.0
"""Seconds in which a body must be there."""

IDLE = 60.0
"""Seconds after which a connection that says nothing is closed."""

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

KINDS: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".wasm": "application/wasm",
    ".onnx": "application/octet-stream",
}

PUBLIC: Mapping[str, Path] = {
    "/": WEB / "index.html",
    "/page.js": WEB / "page.js",
    "/style.css": WEB / "style.css",
}


@dataclass(frozen=True)
class Site:
    """What a job's page may fetch under its secret path, by name, and whom it talks to."""

    visitor: Visitor
    offers: dict[str, Path | bytes] = field(default_factory=dict)
    named: dict[tuple[Path, int, int], str] = field(default_factory=dict)

    def offer(self, file: Path) -> str:
        """The name under which the page finds the file: the same one until the file is written anew."""
        stat = file.stat()
        identity = (file.resolve(), stat.st_mtime_ns, stat.st_size)
        if identity not in self.named:
            self.named[identity] = f"files/{len(self.named)}{file.suffix}"
            self.offers[self.named[identity]] = file
        return self.named[identity]


@contextmanager
def serving(site: Site, *, lan: bool) -> Iterator[str]:
    """The link to the page, with its token, while the site is served. Raises DeviceError without a network address."""
    host = lan_address() if lan else LOOPBACK
    try:
        server = _Server((host, 0), _Exchange)
    except OSError as error:
        raise DeviceError(f"browser: cannot listen on {host}: {error}") from None
    server.site = site
    names = (host, "localhost") if host == LOOPBACK else (host,)
    server.hosts = frozenset(f"{name}:{server.server_port}" for name in names)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        # after '#': not sent until the page's own script claims it, so that a previewed link is not a used one
        yield f"http://{host}:{server.server_port}/#{site.visitor.token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lan_address() -> str:
    """This machine's address on the network that leads elsewhere. Nothing is sent: UDP connects by choosing a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address kept for documentation, RFC 5737
        except OSError as error:
            raise DeviceError(
                f"browser: --lan: this machine has no network address ({error}). Connect it to the phone's network, or "
                "leave --lan out and open the link on this machine."
            ) from None
        return str(probe.getsockname()[0])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a poll may be held open
    request_queue_size = 64  # a page opens several connections at once
    site: Site
    hosts: frozenset[str]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke: the page's silence will tell."""


class _Exchange(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "compress"
    sys_version = ""
    timeout = IDLE

    @property
    def site(self) -> Site:
        return cast(_Server, self.server).site

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        path, _, query = self.path.partition("?")
        if page := PUBLIC.get(path):
            self._send(HTTPStatus.OK, page)
        elif (name := self._inside(path)) is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif name == "next":
            self._next(parse_qs(query).get("after", [""])[0])
        elif offered := self.site.offers.get(name):
            self._send(HTTPStatus.OK, offered, kind=KINDS[Path(name).suffix])
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        if self.path == "/claim":
            claim = self._body(MOST_CLAIM)
            if claim is not None:
                self._claim(claim.get("token"))
        elif (name := self._inside(self.path)) is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif name == "answer":
            answer = self._body(MOST_ANSWER)
            if answer is not None:
                self.site.visitor.answered(answer)
                self._send(HTTPStatus.NO_CONTENT, b"")
        elif name == "bye":
            self.site.visitor.leaves()
            self.close_connection = True
            self._send(HTTPStatus.NO_CONTENT, b"")
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _is_ours(self) -> bool:
        """Whether the request is to this address and from no other site's page; refuses it otherwise."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host in cast(_Server, self.server).hosts and origin in {None, f"http://{host}"}:
            return True
        self._refuse(HTTPStatus.FORBIDDEN)
        return False

    def _inside(self, path: str) -> str | None:
        """What follows the secret in the path, None without the right secret."""
        secret, _, name = path.removeprefix("/").partition("/")
        return name if self.site.visitor.knows(secret) else None

    def _claim(self, token: object) -> None:
        secret = self.site.visitor.claim(token) if isinstance(token, str) else None
        if secret is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        else:
            self._send(HTTPStatus.OK, json.dumps({"base": f"/{secret}/"}).encode(), kind="application/json")

    def _next(self, after: str) -> None:
        if not (after.isascii() and after.isdigit() and len(after) < 10):
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        command = self.site.visitor.next(int(after))
        if command is None:
            self._send(HTTPStatus.NO_CONTENT, b"")
        else:
            self._send(HTTPStatus.OK, json.dumps(command).encode(), kind="application/json")

    def _body(self, most: int) -> dict[str, Any] | None:
        """The JSON object that came; None after refusing what is none, or larger than `most` bytes."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return None
        if len(length) > 12 or int(length) > most:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        try:
            body = json.loads(self._received(int(length)))
        except TimeoutError:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
            return None
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            return body
        self._refuse(HTTPStatus.BAD_REQUEST)
        return None

    def _received(self, length: int) -> bytes:
        """Read a body. Raises TimeoutError when it is not there after LONGEST_BODY seconds, however it trickles in."""
        body, deadline = bytearray(), time.monotonic() + LONGEST_BODY
        try:
            while len(body) < length:
                self.connection.settimeout(max(0.01, deadline - time.monotonic()))
                chunk = self.rfile.read1(length - len(body))
                if not chunk:
                    break
                body += chunk
        finally:
            self.connection.settimeout(IDLE)
        return bytes(body)

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True  # what is left of the body is not read
        self._send(status, status.phrase.encode(), kind="text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, content: Path | bytes, *, kind: str = "") -> None:
        kind = kind or (KINDS[content.suffix] if isinstance(content, Path) else "")
        runtime = isinstance(content, Path) and content.suffix in {".mjs", ".wasm"}  # every worker loads it again
        with suppress(ConnectionError, TimeoutError), _opened(content) as (source, length):
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Cache-Control", "private, max-age=3600" if runtime else "no-store")
            if kind:
                self.send_header("Content-Type", kind)
            if status != HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(length))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            shutil.copyfileobj(source, self.wfile, 2**18)

    def log_message(self, format: str, *args: Any) -> None:
        """The command line is not an access log."""


@contextmanager
def _opened(content: Path | bytes) -> Iterator[tuple[Any, int]]:
    if isinstance(content, bytes):
        yield BytesIO(content), len(content)
        return
    with content.open("rb") as file:
        yield file, content.stat().st_size
