"""An endpoint of ours on 127.0.0.1, which answers as a script says."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-very-secret"
Reply = tuple[int, Mapping[str, str], bytes]


@dataclass
class Server:
    """`reply` answers the n-th request (from 0) for this path and body."""

    reply: Callable[[int, str, dict[str, Any]], Reply]
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    url: str = ""


def ok(content: Any) -> Reply:
    return 200, {}, content if isinstance(content, bytes) else json.dumps(content).encode()


Start = Callable[[Callable[[int, str, dict[str, Any]], Reply]], Server]


@contextmanager
def serving() -> Iterator[Start]:
    """Yield what starts a server with a script, until all are stopped."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(reply: Callable[[int, str, dict[str, Any]], Reply]) -> Server:
        server, lock = Server(reply), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.seen)
                    server.seen.append((self.path, body, dict(self.headers)))
                status, headers, content = server.reply(number, self.path, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        listening.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that waited no longer
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        running.append((listening, thread))
        server.url = f"http://127.0.0.1:{listening.server_port}/v1"
        return server

    yield start
    for listening, thread in running:
        listening.shutdown()
        thread.join()
        listening.server_close()
