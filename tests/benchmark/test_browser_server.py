"""What the server of a measurement lets in, and what it does not."""

import base64
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from compress.benchmark.browser import server
from compress.benchmark.browser.server import PageSession, Site, serve_site
from compress.records.latency import DeviceError
from tests.benchmark.fake_page import claim, request


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "model.onnx").write_bytes(b"weights" * 100_000)
    (tmp_path / "ours.onnx").write_bytes(b"not offered")
    made = Site(PageSession(), {"worker.js": server.WEB / "worker.js"})
    made.offer(tmp_path / "model.onnx")
    return made


@pytest.fixture
def link(site: Site) -> Iterator[str]:
    with serve_site(site, lan=False) as link:
        yield link


@pytest.fixture
def base(link: str) -> str:
    return str(claim(link).json()["base"])


def test_the_first_to_show_the_token_gets_the_secret_and_nobody_after(link: str) -> None:
    assert claim(link, "wrong").status == 403
    assert claim(link, "").status == 403
    assert claim(link, "é\ud800").status == 403
    first = claim(link)
    assert first.status == 200
    assert claim(link).status == 403
    assert request(link, f"{first.json()['base']}worker.js").status == 200


def test_only_one_of_several_claims_succeeds(link: str) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(claim(link).status)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200] + [403] * 7


def test_the_page_is_public_and_all_else_is_not(link: str, base: str) -> None:
    for path in ("/", "/page.js", "/style.css"):
        assert request(link, path).status == 200
    for name in ("worker.js", "files/0.onnx", "next?after=0"):
        assert request(link, f"/{name}").status == 403
        assert request(link, f"/{'x' * 43}/{name}").status == 403
        assert request(link, f"//{name}").status == 403
    for name in ("answer", "bye"):
        assert request(link, f"/{name}", b"{}").status == 403
        assert request(link, f"/{'x' * 43}/{name}", b"{}").status == 403


def test_a_file_comes_whole_and_under_one_name(link: str, base: str, site: Site, tmp_path: Path) -> None:
    name = site.offer(tmp_path / "model.onnx")
    assert list(site.offers) == ["worker.js", name]
    reply = request(link, base + name)
    assert reply.body == (tmp_path / "model.onnx").read_bytes()
    assert reply.headers["Content-Type"] == "application/octet-stream"


def test_a_rewritten_file_gets_another_name(link: str, base: str, site: Site, tmp_path: Path) -> None:
    before = site.offer(tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"other weights")
    after = site.offer(tmp_path / "model.onnx")
    assert after != before
    assert request(link, base + after).body == b"other weights"


@pytest.mark.parametrize(
    "path",
    ["ours.onnx", "../page.js", "files/../ours.onnx", "files/../../../../etc/passwd", "%2e%2e/page.js", "..%2fpage.js",
     "", "files", "files/", "/etc/passwd", "files/0.onnx/", "files/0.onnx%00", "\\..\\page.js"],
)  # fmt: skip
def test_only_offered_files_are_served(link: str, base: str, path: str) -> None:
    assert request(link, base + path).status == 404
    assert request(link, f"/{path.lstrip('/')}").status in {200, 403}  # 200: '/' itself is the page
    assert request(link, f"/../../{path}").status == 403


def test_every_reply_has_isolation_headers(link: str, base: str) -> None:
    for path in ("/", "/page.js", "/nowhere", f"{base}worker.js", f"{base}nowhere"):
        headers = request(link, path).headers
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self' 'wasm-unsafe-eval';"
        )
        assert "unsafe-inline" not in headers["Content-Security-Policy"]
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_foreign_hosts_and_origins_are_refused(link: str) -> None:
    port = urlsplit(link).port
    assert request(link, "/", headers={"Host": f"localhost:{port}"}).status == 200
    for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example", ""):
        assert request(link, "/", headers={"Host": host}).status == 403
    body = json.dumps({"token": urlsplit(link).fragment}).encode()
    assert request(link, "/claim", body, {"Origin": "http://evil.example"}).status == 403
    assert request(link, "/claim", body, {"Origin": "null"}).status == 403
    assert request(link, "/claim", body, {"Origin": f"http://127.0.0.1:{port}"}).status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 900, b'{"token": 1}', b"{}"])
def test_malformed_claims_are_refused_without_harm(link: str, body: bytes) -> None:
    assert request(link, "/claim", body).status in {400, 403}
    assert claim(link).status == 200


def test_malformed_answers_are_refused(link: str, base: str) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 200_000):
        assert request(link, f"{base}answer", body).status == 400
    assert request(link, f"{base}next?after=x").status == 400
    assert request(link, f"{base}next").status == 400
    assert request(link, f"{base}next?after={'9' * 5000}").status == 400


@pytest.mark.parametrize(
    ("length", "status"), [("64000001", 413), ("9" * 5000, 413), ("-1", 411), ("x", 411), (None, 411)]
)
def test_a_body_too_large_or_of_unknown_length_is_refused_unread(
    link: str, base: str, length: str | None, status: int
) -> None:
    url = urlsplit(link)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    connection.putrequest("POST", f"{base}answer")
    if length is not None:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    response = connection.getresponse()
    assert (response.status, response.getheader("Connection")) == (status, "close")
    connection.close()


def test_an_address_that_cannot_be_parsed_is_refused(link: str) -> None:
    """Not a connection that ends without a reply, from an error in the server."""
    url = urlsplit(link)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    connection.putrequest("GET", "http://[/", skip_host=True)
    connection.putheader("Host", url.netloc)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_a_body_that_trickles_in_is_given_up(link: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LONGEST_BODY", 0.2)
    url = urlsplit(link)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
        head = f"POST {base}answer HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(0.02)
        reply = b""
        while not reply:
            connection.sendall(b" ")
            with suppress(TimeoutError):
                reply = connection.recv(1000)
    assert reply.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("dims", "data"),
    [
        ([], [1.0]), ([1], [1.0]), ([0, 2], []), ([2, 1], [1.0, 2.0]), ([1, 3], [1.0, 2.0]), ([1, -1], [1.0]),
        ([1, 2**40], [1.0]), ([1, 10**400], [1.0]), ([1, 1, 1, 1], [1.0]),
        ([1.5, 1], [1.0]), ("12", [1.0]), ([True, "x"], [1.0]), (None, [1.0]), ([1, 1], []),
    ],
)  # fmt: skip
def test_malformed_tensors_are_refused(dims: Any, data: list[float]) -> None:
    sent = {"dims": dims, "data": base64.b64encode(np.array(data, "<f4").tobytes()).decode()}
    with pytest.raises(DeviceError, match="the page"):
        server.parse_answer({"ok": {"rows": [[sent]]}}, server.RowOutputs).logits()


def test_tensors_of_one_row_must_have_one_shape() -> None:
    one, two = ({"dims": [1, n], "data": base64.b64encode(bytes(4 * n)).decode()} for n in (1, 2))
    assert server.parse_answer({"ok": {"rows": [[two, two]]}}, server.RowOutputs).logits()[0].shape == (2, 2)
    for rows in ([[one, two]], [[]], [[{"dims": [1, 1], "data": "?"}]], [[{"dims": [1, 1], "data": "é"}]]):
        with pytest.raises(DeviceError, match="the page"):
            server.parse_answer({"ok": {"rows": rows}}, server.RowOutputs).logits()


def test_other_methods_are_not_implemented(link: str) -> None:
    url = urlsplit(link)
    for method in ("PUT", "DELETE", "OPTIONS"):
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
        connection.request(method, "/")
        assert connection.getresponse().status == 501
        connection.close()


def test_nothing_listens_afterwards(site: Site) -> None:
    before = threading.active_count()
    with serve_site(site, lan=False) as link:
        assert request(link, "/").status == 200
    with pytest.raises(ConnectionRefusedError):
        request(link, "/")
    assert threading.active_count() <= before + 1  # a connection's own thread may be ending


def test_lan_without_a_network_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object, address: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(server.socket.socket, "connect", unreachable)
    with (
        pytest.raises(DeviceError, match=r"--lan: this machine has no network address .* leave --lan out"),
        serve_site(site, lan=True),
    ):
        pass


def test_a_command_is_handed_out_until_it_is_answered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.benchmark.browser.server.HOLD", 0.1)
    session, found = site.session, []
    session.claim(session.token)
    asking = threading.Thread(target=lambda: found.append(session.ask({"do": "clear"})))
    asking.start()
    first = session.next_command(0)
    assert first is not None
    assert session.next_command(0) == first  # the first reply was lost on its way
    assert session.next_command(first["id"]) is None
    session.receive_answer({"id": first["id"] + 1, "ok": "to another question"})
    session.receive_answer({"ok": "to none"})
    session.receive_answer({"id": first["id"], "ok": {}})
    asking.join(10)
    assert found == [{"id": first["id"], "ok": {}}]
    session.receive_answer({"id": first["id"], "ok": "twice"})
    assert session.next_command(0) is None
