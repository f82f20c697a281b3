"""Serve one job to one page: the page itself to anyone who knows the address, all else under a secret path.

No file name comes from a request: what is asked for is looked up among the names offered, or it is not there. Headers
isolate the page (which is what lets WebAssembly have threads) and let it load nothing from elsewhere; a Host that is
not ours (a name that was pointed at this machine) and a request that another site's page made are refused.
"""

import base64
import hmac
import json
import secrets
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
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import parse_qs

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from compress.records.latency import DeviceError
from compress.terminal import one_line

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
        """Return the secret to the first who shows the token, None to everybody else."""
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
        """Wait for the command that follows number `after`; None after HOLD seconds."""
        with self._changed:
            self._seen = time.monotonic()
            self._changed.wait_for(lambda: self._ended or self._waiting(after), HOLD)
            if self._ended:
                self._told_end = True
                self._changed.notify_all()
                return self._command
            return self._command if self._waiting(after) else None

    def answered(self, answer: Mapping[str, Any]) -> None:
        """Take the page's answer, unless it is to another question than the one asked now."""
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
        """Wait for a browser to claim the link, at most `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._claimed, timeout)

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Let the page do something; return its answer. Raises DeviceError when the page is gone or takes for ever."""
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
        """Tell the page that it is over, and wait a moment for it to hear that."""
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
    "style-src 'self'; img-src 'self' data:; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
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
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
}

PUBLIC: Mapping[str, Path] = {"/": WEB / "index.html", "/page.js": WEB / "page.js", "/style.css": WEB / "style.css"}


@dataclass(frozen=True)
class Site:
    """The files that a job's page may fetch under its secret path, by name, and the visitor whose they are.

    public  what anybody may fetch, by path
    """

    visitor: Visitor
    offers: dict[str, Path | bytes] = field(default_factory=dict)
    public: Mapping[str, Path] = field(default_factory=lambda: PUBLIC)
    named: dict[tuple[Path, int, int], str] = field(default_factory=dict)

    def offer(self, file: Path) -> str:
        """Return the name under which the page finds the file: the same one until the file is written anew."""
        stat = file.stat()
        identity = (file.resolve(), stat.st_mtime_ns, stat.st_size)
        if identity not in self.named:
            self.named[identity] = f"files/{len(self.named)}{file.suffix}"
            self.offers[self.named[identity]] = file
        return self.named[identity]


@contextmanager
def serving(site: Site, *, lan: bool) -> Iterator[str]:
    """Serve the site, and yield the link to the page, with its token. Raises DeviceError without a network address."""
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
    """Find this machine's address on the network that leads elsewhere. Nothing is sent: UDP connects by choosing a
    route."""
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
        """Ignore a connection that broke: the page's silence will tell."""


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
        if page := self.site.public.get(path):
            self._send(HTTPStatus.OK, page)
        elif (name := self._inside(path)) is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif name == "next":
            self._next(parse_qs(query).get("after", [""])[0])
        elif offered := self.site.offers.get(name):
            self._send(HTTPStatus.OK, offered, kind="" if isinstance(offered, Path) else KINDS[Path(name).suffix])
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
        """Return True if the request is to this address and from no other site's page; refuse it otherwise."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host in cast(_Server, self.server).hosts and origin in {None, f"http://{host}"}:
            return True
        self._refuse(HTTPStatus.FORBIDDEN)
        return False

    def _inside(self, path: str) -> str | None:
        """Return what follows the secret in the path, None without the right secret."""
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
        """Return the JSON object that came; None after refusing what is none, or larger than `most` bytes."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return None
        if len(length) > 12 or int(length) > most:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return None
        try:
            body = json.loads(self._read_body(int(length)))
        except TimeoutError:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
            return None
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            return body
        self._refuse(HTTPStatus.BAD_REQUEST)
        return None

    def _read_body(self, length: int) -> bytes:
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
        """Print nothing: the command line is not an access log."""


@contextmanager
def _opened(content: Path | bytes) -> Iterator[tuple[Any, int]]:
    if isinstance(content, bytes):
        yield BytesIO(content), len(content)
        return
    with content.open("rb") as file:
        yield file, content.stat().st_size


Text = Annotated[str, BeforeValidator(lambda value: one_line(value) if isinstance(value, str) else value)]
Milliseconds = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Known:
    """The browser's description of itself; '' and 0 where it gives none.

    timer_ms  the least step its clock shows
    isolated  whether the page may share memory between threads
    """

    agent: Text
    cores: Annotated[int, Field(ge=0)]
    memory_gb: Annotated[FiniteFloat, Field(ge=0)]
    isolated: bool
    simd: bool
    timer_ms: Milliseconds
    processor: Text
    system: Text
    model: Text
    gpu: Text


@dataclass(frozen=True)
class Opened:
    """The times of opening a file: init_ms; first_ms of the first forward; forwards: one sample is the mean of so many.

    With these the clock's step is at most 1 % of what it times.
    """

    init_ms: Milliseconds
    first_ms: Milliseconds
    forwards: PositiveInt


@dataclass(frozen=True)
class Timed:
    """The times of a round. ms: of one forward, per sample; heap_mb: what WebAssembly's memory grew to, 10^6 bytes."""

    ms: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=1)]
    heap_mb: Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class Output:
    """One tensor of float32 for one row: its shape, and its bytes (little-endian) in base64."""

    dims: Annotated[tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(min_length=2, max_length=3)]
    data: str

    def row(self) -> NDArray[np.float32]:
        """Decode the row, infinities and nan too, so that overflows show. Raises ValueError for another shape."""
        values = np.frombuffer(base64.b64decode(self.data, validate=True), "<f4").reshape(self.dims)
        if len(values) != 1:
            raise ValueError(f"{len(values)} rows, not 1")
        return values[0]


@dataclass(frozen=True)
class Computed:
    """The outputs of the file, row by row."""

    rows: list[Annotated[list[Output], Field(min_length=1)]]

    def logits(self) -> list[NDArray[np.float32]]:
        """Decode every row; starts and ends of spans side by side. Raises DeviceError for tensors that are none."""
        try:
            rows = [[output.row() for output in outputs] for outputs in self.rows]
            rows = [[each for each in arrays if each.ndim == min(one.ndim for one in arrays)] for arrays in rows]
            return [arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1) for arrays in rows]
        except ValueError as error:
            raise DeviceError(f"browser: the page sent a tensor that is none: {error}") from None


@dataclass(frozen=True)
class Done:
    """Nothing to tell."""


Answer = TypeVar("Answer", Known, Opened, Timed, Computed, Done)


def read(answer: Mapping[str, Any], kind: type[Answer], *, about: str = "") -> Answer:
    """Read the page's answer as `kind`; `about`: what was asked. Raises DeviceError for an error, in the page's own
    words, and for nonsense."""
    device = f"browser: {about}" if about else "browser"
    if "error" in answer:
        raise DeviceError(f"{device}: {one_line(str(answer['error'])) or 'the page failed without a word'}")
    try:
        return TypeAdapter(kind).validate_python(answer.get("ok"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise DeviceError(f"{device}: the page answered what cannot be: {where}: {first['msg']}") from None
