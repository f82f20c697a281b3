"""What `compress push` sends, by the hub's own client, to a hub that is a server in this process."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import compress
from compress.errors import PushError
from compress.exporters.artifact import Bundle
from tests import command, tiny

TOKEN = "hf_local"


@dataclass
class Hub:
    """The requests of the hub's client that an upload makes. What was sent is kept; `status` refuses a commit."""

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    status: int = 200

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if method == "PUT":
            self.large[path.rpartition("/")[2]] = body
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/team/small", "name": "team/small"}
        if "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": self.mode(n), "shouldIgnore": False} for n in names]}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self.place(each) for each in json.loads(body)["objects"]]}
        return self.commit(body) if "/commit/" in path else (200, {"errors": [], "warnings": []})

    def commit(self, body: bytes) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {"error": "no"}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.large[value["oid"]]
        return 200, {"commitUrl": f"{self.address}/team/small/commit/1", "commitOid": "1", "success": True}

    def mode(self, name: str) -> str:
        return "lfs" if name.endswith((".onnx", ".safetensors")) else "regular"

    def place(self, each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "actions": {"upload": {"href": f"{self.address}/store/{each['oid']}"}}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.command == "POST":
                found.tokens.add(self.headers.get("Authorization"))
            status, expected = found.answer(self.command, self.path, body)
            content = b"" if self.command == "HEAD" else json.dumps(expected).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = respond

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    card = {"name": "tiny", "license": "mit", "base_model": "owner/base"}
    return tiny.bundle(tmp_path_factory.mktemp("push") / "bundle", card=card)


def pushed(bundle: Bundle, hub: Hub, home: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    away = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    kept = {name: value for name, value in os.environ.items() if name not in away}
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    words = [sys.executable, "-m", "compress", "push", str(bundle.path), "team/small", *more]
    return subprocess.run(
        words, env={**kept, **settings, "HF_HOME": str(home)}, capture_output=True, text=True, check=False
    )


def test_push_uploads_every_file(bundle: Bundle, hub: Hub, tmp_path: Path) -> None:
    (bundle.path / "notes.txt").write_text("not one of its files")
    result = pushed(bundle, hub, tmp_path, "--json")
    (bundle.path / "notes.txt").unlink()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["url"] == f"{hub.address}/team/small/commit/1"
    (made,) = hub.created
    assert (made["name"], made["organization"], made["visibility"]) == ("small", "team", "private")
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert hub.files.keys() == {*bundle.manifest.files, "manifest.json"}
    for name, stamp in bundle.manifest.files.items():
        assert hashlib.sha256(hub.files[name]).hexdigest() == stamp.sha256


def test_a_refused_push(bundle: Bundle, hub: Hub, tmp_path: Path) -> None:
    hub.status = 403
    result = pushed(bundle, hub, tmp_path, "--public")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: team/small: ")
    assert "the token may not write there" in result.stderr
    assert hub.files == {}
    assert hub.created[0]["visibility"] == "public"


def test_push_without_a_hub(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = command.run("push", str(bundle.path), "team/small")  # tests are offline
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert f"copy the folder {bundle.path} instead" in result.err


def test_push_without_a_token(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(PushError, match="HF_TOKEN"):
        compress.push(bundle.path, "team/small")


def test_a_dry_run(bundle: Bundle) -> None:
    result = command.run("push", str(bundle.path), "team/small", "--dry-run")
    assert result.code == 0
    assert "onnx/model_quantized.onnx" in result.out
    assert "license mit" in result.out
    assert "missing from the card: datasets, language" in result.out
    assert "would go to team/small, private if it is new" in result.out
    found = compress.push(bundle.path, "team/small", dry_run=True)
    assert found.files["model.safetensors"] == bundle.manifest.files["model.safetensors"].bytes
    assert found.url == ""


@pytest.mark.parametrize("name", ["small", "a/b/c", "team/sm all", "team/-small", "../small"])
def test_invalid_repository_names(bundle: Bundle, name: str) -> None:
    with pytest.raises(PushError, match="owner/name"):
        compress.push(bundle.path, name, dry_run=True)


@pytest.mark.parametrize(
    "front",
    ["license: {", "- a", "model-index:\n- name: x", "model-index:\n- name: x\n  results:\n  - metrics: []"],
)
def test_front_matter_that_the_hub_would_not_read(front: str, tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle").attach("README.md", f"---\n{front}\n---\n# x\n")
    with pytest.raises(PushError, match=r"README.md: its front matter is not in the hub's form"):
        compress.push(bundle.path, "team/small", dry_run=True)


def test_scores_and_lists_of_the_user_s_own_card(tmp_path: Path) -> None:
    card = """---
license: [mit, apache-2.0]
model-index:
- name: x
  results:
  - task: {type: text-classification}
    dataset: {type: d, name: d}
    metrics:
    - {type: accuracy, value: "88.5 %"}
    - {type: f1, name: "F1 (int8)", value: 0.88512}
---
"""
    bundle = tiny.bundle(tmp_path / "bundle").attach("README.md", card)
    found = compress.push(bundle.path, "team/small", dry_run=True)
    assert found.card == {"license": ["mit", "apache-2.0"]}
    assert found.scores == ("accuracy 88.5 %", "F1 (int8) 0.8851")
    empty = bundle.attach("README.md", "---\nlicense:\nmodel-index:\n---\n")
    assert "license" in compress.push(empty.path, "team/small", dry_run=True).missing
