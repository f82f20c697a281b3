"""Serve one job to one page: the page itself to anyone who knows the address,
everything else under a secret path.

No file name comes from a request: it is looked up among the files on offer. Headers
isolate the page (so that WebAssembly may use threads) and keep it from loading anything
from elsewhere. Requests with a foreign Host (a name that was pointed at this machine)
or from the page of another site are refused.
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
from typing import IO, Annotated, Any, TypeVar, cast
from urllib.parse import parse_qs

import numpy as np
from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from compress.arrays import Floats
from compress.benchmark.remote.runner import join_outputs
from compress.io import JsonObject
from compress.records.latency import DeviceError
from compress.terminal import one_line

HOLD = 5.0
"""Seconds for which a poll is held open when there is no command."""

SILENCE = 20.0
"""Seconds without a poll after which the page counts as gone."""

COMMAND_TIMEOUT = 900.0
"""The most seconds that one command may take, such as opening a large file over a slow
network, or a round of a slow model."""

GONE_REASONS = (
    "Usual reasons: the tab was closed or reloaded, the phone was locked, the network "
    "was lost, or the browser had too little memory for the model. Run the command "
    "again and keep the page in front."
)


class PageSession:
    """The conversation with the one page that may claim the link. Requests call it from
    their own threads.

    The link holds `token`, which is valid once. Whoever claims it gets the secret path
    of everything else.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._secret = secrets.token_urlsafe(32)
        self._changed = threading.Condition()
        self._claimed = False
        self._left = False
        self._last_seen = 0.0
        self._number = 0
        self._command: JsonObject | None = None
        self._answer: JsonObject | None = None
        self._ended = False
        self._end_sent = False

    def claim(self, token: str) -> str | None:
        """Return the secret to the first caller with the token, None to everyone
        else."""
        valid = hmac.compare_digest(
            token.encode("utf-8", "surrogatepass"), self.token.encode()
        )
        with self._changed:
            if not valid or self._claimed:
                return None
            self._claimed = True
            self._last_seen = time.monotonic()
            self._changed.notify_all()
            return self._secret

    def has_secret(self, secret: str) -> bool:
        return hmac.compare_digest(secret.encode(), self._secret.encode())

    def next_command(self, after: int) -> JsonObject | None:
        """Wait for a command with a number above `after`; return None after HOLD
        seconds."""

        def is_due() -> bool:
            return self._ended or (self._command is not None and self._number > after)

        with self._changed:
            self._last_seen = time.monotonic()
            due = self._changed.wait_for(is_due, HOLD)
            if self._ended:
                self._end_sent = True
                self._changed.notify_all()
            return self._command if due else None

    def receive_answer(self, answer: Mapping[str, Any]) -> None:
        """Accept the page's answer to the current command; ignore any other."""
        with self._changed:
            self._last_seen = time.monotonic()
            if (
                answer.get("id") == self._number
                and self._command is not None
                and not self._ended
            ):
                self._command = None
                self._answer = dict(answer)
                self._changed.notify_all()

    def mark_left(self) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def wait_for_claim(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._claimed, timeout)

    def ask(self, command: Mapping[str, Any]) -> JsonObject:
        """Send a command to the page and return its answer. Raises DeviceError if it is
        gone or takes too long."""
        with self._changed:
            self._number += 1
            self._command = {"id": self._number, **command}
            self._answer = None
            self._changed.notify_all()
            deadline = time.monotonic() + COMMAND_TIMEOUT
            while self._answer is None:
                now = time.monotonic()
                if self._left:
                    raise DeviceError(
                        "browser: the page was left in the middle of a measurement. "
                        f"{GONE_REASONS}"
                    )
                if now - self._last_seen > SILENCE:
                    raise DeviceError(
                        f"browser: nothing heard from the page for {SILENCE:.0f} s. "
                        f"{GONE_REASONS}"
                    )
                if now > deadline:
                    raise DeviceError(
                        "browser: the page is open, but has not finished one step in "
                        f"{COMMAND_TIMEOUT / 60:.0f} minutes. Measure with fewer "
                        "--runs, shorter --seq, or a smaller model."
                    )
                self._changed.wait(0.25)
            return self._answer

    def end(self, message: str, patience: float = 2.0) -> None:
        """Tell the page that the measurement is over, and wait at most `patience`
        seconds for its reply."""
        with self._changed:
            self._number += 1
            self._command = {"id": self._number, "do": "end", "say": message}
            self._ended = True
            self._changed.notify_all()
            if (
                self._claimed
                and not self._left
                and time.monotonic() - self._last_seen < SILENCE
            ):
                self._changed.wait_for(lambda: self._end_sent or self._left, patience)


WEB = Path(__file__).parent / "web"

LOOPBACK = "127.0.0.1"

MOST_CLAIM = 1_000
MOST_ANSWER = 64_000_000
"""The largest request bodies in bytes: a claim is a token, an answer at most the logits
of a few rows."""

LONGEST_BODY = 120.0
"""Seconds within which a body must arrive."""

IDLE = 60.0
"""Seconds after which an idle connection is closed."""

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "connect-src 'self'; style-src 'self'; img-src 'self' data:; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

CONTENT_TYPES: Mapping[str, str] = {
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

PUBLIC: Mapping[str, Path] = {
    "/": WEB / "index.html",
    "/page.js": WEB / "page.js",
    "/style.css": WEB / "style.css",
}


@dataclass(frozen=True)
class Site:
    """The files of a job and the session of its page.

    offers  name -> file or content, for requests under the secret path
    public  path -> file, for everyone
    """

    session: PageSession
    offers: dict[str, Path | bytes] = field(default_factory=dict)
    public: Mapping[str, Path] = field(default_factory=lambda: PUBLIC)
    names: dict[tuple[Path, int, int], str] = field(default_factory=dict)

    def offer(self, file: Path) -> str:
        """Offer a file to the page and return its name, which changes when the file is
        rewritten."""
        stat = file.stat()
        identity = (file.resolve(), stat.st_mtime_ns, stat.st_size)
        if identity not in self.names:
            self.names[identity] = f"files/{len(self.names)}{file.suffix}"
            self.offers[self.names[identity]] = file
        return self.names[identity]


@contextmanager
def serve_site(site: Site, *, lan: bool) -> Iterator[str]:
    """Serve the site, and yield the link to the page, with its token. Raises
    DeviceError without a network address."""
    host = lan_address() if lan else LOOPBACK
    try:
        server = _Server((host, 0), _Handler)
    except OSError as error:
        raise DeviceError(f"browser: cannot listen on {host}: {error}") from None
    server.site = site
    names = (host, "localhost") if host == LOOPBACK else (host,)
    server.hosts = frozenset(f"{name}:{server.server_port}" for name in names)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
    )
    thread.start()
    try:
        # after '#': not sent until the page's own script claims it, so that a preview
        # of the link does not use it up
        yield f"http://{host}:{server.server_port}/#{site.session.token}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lan_address() -> str:
    """Return this machine's address on the local network. Nothing is sent: connecting a
    UDP socket picks a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation, RFC 5737
        except OSError as error:
            raise DeviceError(
                f"browser: --lan: this machine has no network address ({error}). "
                "Connect it to the phone's network, or leave --lan out and open the "
                "link on this machine."
            ) from None
        return str(probe.getsockname()[0])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a poll may be held open
    request_queue_size = 64  # a page opens several connections at once
    site: Site
    hosts: frozenset[str]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection: the silence of a page shows that it is gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "compress"
    sys_version = ""
    timeout = IDLE

    @property
    def site(self) -> Site:
        return cast(_Server, self.server).site

    def do_GET(self) -> None:
        if not self._check_origin():
            return
        path, _, query = self.path.partition("?")
        if page := self.site.public.get(path):
            self._send(HTTPStatus.OK, page)
        elif (name := self._name_under_secret(path)) is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif name == "next":
            after = parse_qs(query).get("after", [""])[0]
            if not (after.isascii() and after.isdigit() and len(after) < 10):
                self._refuse(HTTPStatus.BAD_REQUEST)
            elif (command := self.site.session.next_command(int(after))) is None:
                self._send(HTTPStatus.NO_CONTENT, b"")
            else:
                self._send_json(command)
        elif offered := self.site.offers.get(name):
            kind = "" if isinstance(offered, Path) else CONTENT_TYPES[Path(name).suffix]
            self._send(HTTPStatus.OK, offered, kind=kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if not self._check_origin():
            return
        if self.path == "/claim":
            if (claim := self._read_json(MOST_CLAIM)) is None:
                return
            token = claim.get("token")
            if (
                not isinstance(token, str)
                or (secret := self.site.session.claim(token)) is None
            ):
                self._refuse(HTTPStatus.FORBIDDEN)
            else:
                self._send_json({"base": f"/{secret}/"})
        elif (name := self._name_under_secret(self.path)) is None:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif name == "answer":
            if (answer := self._read_json(MOST_ANSWER)) is not None:
                self.site.session.receive_answer(answer)
                self._send(HTTPStatus.NO_CONTENT, b"")
        elif name == "bye":
            self.site.session.mark_left()
            self.close_connection = True
            self._send(HTTPStatus.NO_CONTENT, b"")
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _check_origin(self) -> bool:
        """Return True if the request is for this address and not from the page of
        another site; else refuse it."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        if host in cast(_Server, self.server).hosts and origin in {
            None,
            f"http://{host}",
        }:
            return True
        self._refuse(HTTPStatus.FORBIDDEN)
        return False

    def _name_under_secret(self, path: str) -> str | None:
        """Return what follows the secret in the path, None if the secret is wrong."""
        secret, _, name = path.removeprefix("/").partition("/")
        return name if self.site.session.has_secret(secret) else None

    def _read_json(self, limit: int) -> JsonObject | None:
        """Read a JSON object; refuse anything else, or a body above `limit` bytes, and
        return None."""
        length = self.headers.get("Content-Length", "")
        status = HTTPStatus.BAD_REQUEST
        if not (length.isascii() and length.isdigit()):
            status = HTTPStatus.LENGTH_REQUIRED
        elif len(length) > 12 or int(length) > limit:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        else:
            try:
                body = json.loads(self._read_body(int(length)))
                if isinstance(body, dict):
                    return body
            except TimeoutError:
                status = HTTPStatus.REQUEST_TIMEOUT
            except (ValueError, RecursionError):
                pass
        self._refuse(status)
        return None

    def _read_body(self, length: int) -> bytes:
        """Read a body. Raises TimeoutError after LONGEST_BODY seconds, however slowly
        it trickles in."""
        body = bytearray()
        deadline = time.monotonic() + LONGEST_BODY
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
        self.close_connection = True  # the rest of the body is not read
        self._send(status, status.phrase.encode(), kind="text/plain; charset=utf-8")

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), kind="application/json")

    def _send(
        self,
        status: HTTPStatus,
        content: Path | bytes,
        *,
        kind: str = "",
    ) -> None:
        with suppress(ConnectionError, TimeoutError):
            source: IO[bytes]
            cacheable = False
            if isinstance(content, bytes):
                source = BytesIO(content)
                length = len(content)
            else:
                source = content.open("rb")
                length = content.stat().st_size
                kind = kind or CONTENT_TYPES[content.suffix]
                # every worker loads the runtime again
                cacheable = content.suffix in {".mjs", ".wasm"}
            with source:
                self.send_response(status)
                for name, value in HEADERS.items():
                    self.send_header(name, value)
                self.send_header(
                    "Cache-Control",
                    "private, max-age=3600" if cacheable else "no-store",
                )
                if kind:
                    self.send_header("Content-Type", kind)
                if status != HTTPStatus.NO_CONTENT:
                    self.send_header("Content-Length", str(length))
                if self.close_connection:
                    self.send_header("Connection", "close")
                self.end_headers()
                shutil.copyfileobj(source, self.wfile, 2**18)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


ReportedText = Annotated[
    str,
    BeforeValidator(lambda value: one_line(value) if isinstance(value, str) else value),
]
Milliseconds = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class BrowserFacts:
    """The browser's description of itself; '' and 0 for facts that it does not report.

    timer_ms  the smallest step its clock shows
    isolated  whether the page may share memory between threads
    """

    agent: ReportedText
    cores: Annotated[int, Field(ge=0)]
    memory_gb: Annotated[FiniteFloat, Field(ge=0)]
    isolated: bool
    simd: bool
    timer_ms: Milliseconds
    processor: ReportedText
    system: ReportedText
    model: ReportedText
    gpu: ReportedText


@dataclass(frozen=True)
class OpenTimes:
    """The times of opening a file and of its first forward.

    forwards  how many forwards one sample is the mean of, so that the clock's step is
              at most 1 % of what it times
    """

    init_ms: Milliseconds
    first_ms: Milliseconds
    forwards: PositiveInt


@dataclass(frozen=True)
class RoundTimes:
    """The time per forward of each sample, and the size that WebAssembly's memory grew
    to, in 10^6 bytes."""

    ms: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=1)]
    heap_mb: Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True)
class OutputTensor:
    """A float32 tensor of one row: its shape, and its little-endian bytes in base64."""

    dims: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=2**31)], ...],
        Field(min_length=2, max_length=3),
    ]
    data: str

    def decode(self) -> Floats:
        """Decode the row, with infinities and nan, so that overflows show. Raises
        ValueError for another shape."""
        values = np.frombuffer(
            base64.b64decode(self.data, validate=True), "<f4"
        ).reshape(self.dims)
        if len(values) != 1:
            raise ValueError(f"{len(values)} rows, not 1")
        return values[0]


@dataclass(frozen=True)
class RowOutputs:
    """The outputs of the file, row by row."""

    rows: list[Annotated[list[OutputTensor], Field(min_length=1)]]

    def logits(self) -> list[Floats]:
        """Decode every row, with the starts and ends of spans stacked. Raises
        DeviceError for malformed tensors."""
        try:
            return [
                join_outputs([output.decode() for output in outputs])
                for outputs in self.rows
            ]
        except ValueError as error:
            raise DeviceError(
                f"browser: the page sent a malformed tensor: {error}"
            ) from None


@dataclass(frozen=True)
class Acknowledgement:
    """An answer without content."""


Replied = TypeVar(
    "Replied", BrowserFacts, OpenTimes, RoundTimes, RowOutputs, Acknowledgement
)


def parse_answer(
    answer: Mapping[str, Any],
    kind: type[Replied],
    *,
    about: str = "",
) -> Replied:
    """Parse the page's answer to a command `about` a file. Raises DeviceError for an
    error or a malformed answer."""
    device = f"browser: {about}" if about else "browser"
    if "error" in answer:
        raise DeviceError(
            f"{device}: "
            f"{one_line(str(answer['error'])) or 'the page failed without a message'}"
        )
    try:
        return TypeAdapter(kind).validate_python(answer.get("ok"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise DeviceError(
            f"{device}: the page sent an invalid answer: {where}: {first['msg']}"
        ) from None
