"""Hostile teachers, data, bundles, recipes, endpoints: no code of theirs runs, no key leaves, none grows or hangs."""

import gzip
import http.server
import json
import pickle
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import tiny
from tests.campaign import process
from tests.campaign.cases import Record, one_of_each
from tests.campaign.reference import Reference
from tests.campaign.works import DISTILL
from tests.commands.test_bad_teachers import Touches
from tests.exporters.test_hostile import forged

KEY = "sk-very-secret"
CANARY = "COMPRESS_CAMPAIGN_CANARY"
"""The variable that names the file which hostile code would make."""
EVIL = f"import os, pathlib\npathlib.Path(os.environ['{CANARY}']).touch()\n"
MOST_MB, MOST_SECONDS = 1200, 60
LABEL = "label --teacher {bad}/endpoint.yaml --prompt {prompt} --data {texts} --gate warn --out {out}.jsonl"
PREDICT = "predict {bad}/bundle good"
TEACHER = DISTILL.replace("{teacher}", "{bad}/teacher")
DATA = DISTILL.replace("{data}", "{bad}/data")
OWN = DISTILL.replace("{recipe}", "{bad}/recipe.yaml")
Spoil = Callable[[Path], object]


# Teachers: `spoil` is given the folder of a good one


def config(**changes: Any) -> Spoil:
    def change(teacher: Path) -> None:
        file = teacher / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        (teacher / "evil.py").write_text(EVIL + "class Model: pass\nclass Config: pass\nclass Tokenizer: pass\n")

    return change


def tokenizer(teacher: Path) -> None:
    config()(teacher)
    settings = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}
    (teacher / "tokenizer_config.json").write_text(json.dumps(settings))


def pickled(name: str) -> Spoil:
    def change(teacher: Path) -> None:
        content = pickle.dumps(Touches(Path(teacher.parent / "touched")))
        (teacher / "model.safetensors").unlink()
        (teacher / name).write_bytes(content)

    return change


def header(content: bytes) -> Spoil:
    return lambda teacher: (teacher / "model.safetensors").write_bytes(content)


def elsewhere(teacher: Path) -> None:
    """Weights that an index looks for outside the folder."""
    weights = load_file(teacher / "model.safetensors")
    (teacher / "model.safetensors").rename(teacher.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../outside.safetensors")}
    (teacher / "model.safetensors.index.json").write_text(json.dumps(index))


TEACHERS: Mapping[str, Spoil] = {
    "auto_map": config(auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}),
    "auto_map, own type": config(model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}),
    "auto_map of a repository": config(auto_map={"AutoModel": "someone/evil--evil.Model"}),
    "attention kernel": config(_attn_implementation="kernels-community/x"),
    "attention kernel, internal": config(_attn_implementation_internal="kernels-community/x"),
    "attention of a file": config(attn_implementation="evil.Model"),
    "tokenizer class": tokenizer,
    "pickled": pickled("pytorch_model.bin"),
    "pickled as safetensors": pickled("model.safetensors"),
    "wide": config(hidden_size=10**9),
    "deep": config(num_hidden_layers=10**9),
    "vocabulary": config(vocab_size=10**12),
    "minus": config(hidden_size=-32),
    "labels": config(num_labels=10**9),
    "labels, named": config(id2label={str(at): "x" for at in range(10**5)}),
    "names for numbers": config(hidden_size="many", num_attention_heads=None),
    "header of 2^60": header(struct.pack("<Q", 2**60) + b"{}"),
    "header of nonsense": header(struct.pack("<Q", 64) + b"[" * 64),
    "tensor of 2^60": header(
        struct.pack("<Q", 80) + b'{"x":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4]}}'.ljust(80)
    ),
    "weights outside": elsewhere,
    "tokenizer, deep": lambda teacher: (teacher / "tokenizer.json").write_text('{"a":' * 10**5),
}


# Data: `spoil` is given a folder that is not there yet


def data(name: str, content: bytes) -> Spoil:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / name).write_bytes(content)

    return write


def packed(name: str, line: bytes, times: int) -> Spoil:
    """Much in little: `times` lines, compressed."""

    def write(folder: Path) -> None:
        folder.mkdir()
        with gzip.open(folder / name, "wb", compresslevel=9) as file:
            for _ in range(times // 1000):
                file.write(line * 1000)

    return write


def script(folder: Path) -> None:
    folder.mkdir()
    (folder / "data.py").write_text(EVIL)
    (folder / "__init__.py").write_text(EVIL)


def loop(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.tsv").symlink_to(folder / "train.tsv")


DATA_SETS: Mapping[str, Spoil] = {
    "script": script,
    "link to itself": loop,
    "endless device": lambda folder: folder.symlink_to("/dev/zero"),
    "packed rows": packed("train.csv.gz", b"text,label\n", 10**8),
    "packed cell": packed("train.jsonl.gz", b'{"text": "a"' + b" " * 1000, 10**6),
    "packed zeros": packed("train.tsv.gz", bytes(1000), 10**6),
    "cell": data("train.tsv", b"text\tlabel\n" + b"a" * 40_000_000 + b"\tx\n"),
    "columns": data("train.tsv", b"\t".join(b"c%d" % at for at in range(200_000)) + b"\n"),
    "jsonl, deep": data("train.jsonl", b'{"text":' * 10**5),
    "number": data("train.jsonl", b'{"text": "a", "label": ' + b"9" * 10**5 + b"}\n"),
    "parquet": data("train.parquet", b"PAR1" + b"\xff" * 4096 + struct.pack("<I", 2**31 - 1) + b"PAR1"),
    "control characters": data("train.tsv", b"text\tlabel\na\t\x1b]0;evil\x07\x1b[2J\nb\n"),
}


# Bundles: the content of the manifest, changed; what is None stays as it is


def manifest(**changes: Any) -> Spoil:
    def change(bundle: Path) -> None:
        file = bundle / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def member(name: str, content: bytes) -> Spoil:
    """A file of the bundle with its hash in the manifest made right."""

    def change(bundle: Path) -> None:
        shutil.move(bundle, bundle.with_name("before"))
        forged(bundle.with_name("before"), bundle, name, content)

    return change


BUNDLES: Mapping[str, Spoil] = {
    "file outside": manifest(files={"../outside.safetensors": {"bytes": 1, "sha256": "0"}}),
    "file of the system": manifest(files={"/etc/passwd": {"bytes": 1, "sha256": "0"}}),
    "no files": manifest(files={}),
    "length -1": manifest(max_length=-1),
    "length 0": manifest(max_length=0),
    "length 10^12": manifest(max_length=10**12),
    "length of words": manifest(max_length="many"),
    "task": manifest(task={"kind": "evil", "text": ["text"], "label": "label", "labels": [], "metric": "accuracy"}),
    "labels": manifest(
        task={"kind": "classification", "text": ["text"], "label": "label", "labels": [], "metric": "x"}
    ),
    "format": manifest(format=99),
    "list": lambda bundle: (bundle / "manifest.json").write_text("[1]"),
    "deep": lambda bundle: (bundle / "manifest.json").write_text("[" * 10**6),
    "tokenizer": member("tokenizer.json", b"[" * 10**6),
    "model": member("onnx/model_quantized.onnx", b"\x08\x07" + b"\xff" * 4096),
}


# Recipes: text in which {loss} is a loss


def recipe(text: str) -> Spoil:
    def write(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(text)
        (folder / "evil.py").write_text(EVIL + "raise SystemExit(0)\n")

    return write


def loss(name: str) -> Spoil:
    return recipe(tiny.RECIPE.replace("tinybert.hidden", name, 1))


RECIPES: Mapping[str, Spoil] = {
    "module beside it": loss("evil.loss"),
    "system": loss("os.system"),
    "main": loss("unittest.__main__.main"),
    "this": loss("antigravity.fly"),
    "dots": loss("..evil.loss"),
    "path": loss("'../evil.loss'"),
    "object": recipe("!!python/object/apply:os.system ['true']"),
    "above": recipe("extends: ../../../../../etc/passwd"),
    "deep": recipe("[" * 10**6),
    "doubling": recipe("a0: &a0 [x]\n" + "".join(f"a{at + 1}: &a{at + 1} [*a{at}, *a{at}]\n" for at in range(40))),
}


# Endpoints: `answer` is given the handler of a request


def endless(handler: Any) -> None:
    while True:
        handler.wfile.write(b"a" * 2**16)


def endless_headers(handler: Any) -> None:
    while True:
        handler.wfile.write(b"X-A: " + b"a" * 60_000 + b"\r\n")


def slowly(handler: Any) -> None:
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.05)


def says(content: Any, status: int = 200, **headers: str) -> Callable[[Any], None]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    def answer(handler: Any) -> None:
        lines = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
        handler.wfile.write(f"HTTP/1.1 {status} Said\r\n".encode())
        handler.wfile.write("".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode() + b"\r\n" + body)

    return answer


def begins(then: Callable[[Any], None]) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        then(handler)

    return answer


def scored(log_p: Any) -> Callable[[Any], None]:
    shown = {"tokens": ["a", " b"], "text_offset": [0, 1], "token_logprobs": [None, log_p]}
    return says({"choices": [{"index": at, "logprobs": shown} for at in range(2)]})


ENDPOINTS: Mapping[str, Callable[[Any], None]] = {
    "never ends": begins(endless),
    "headers never end": endless_headers,
    "slowly": begins(slowly),
    "says nothing": lambda handler: time.sleep(30),
    "cut": says(b'{"choices": [{"index"'),
    "packed": says(gzip.compress(bytes(2**28)), Content_Encoding="gzip"),
    "deep": says(b"[" * 10**6),
    "no choices": says({}),
    "numbers": says({"choices": [1, 2]}),
    "probability": scored(1000),
    "nan": scored(float("nan")),
    "words": scored("often"),
    "wait nan": says({}, 429, Retry_After="nan"),
    "wait -5": says({}, 429, Retry_After="-5"),
    "wait for ever": says({}, 429, Retry_After="1e300"),
    "broken": says(b"oops", 500),
    "redirect": says(b"", 307, Location="http://127.0.0.1:9/elsewhere"),
    "tells the key": says(f"\x1b[2J{KEY} is wrong\x07".encode(), 401),
    "no HTTP": lambda handler: handler.wfile.write(bytes(range(256))),
}


@pytest.fixture
def endpoint() -> Iterator[Callable[[Callable[[Any], None]], tuple[str, list[float]]]]:
    """Serves an answer; returns where, and the times of requests."""
    running: list[http.server.ThreadingHTTPServer] = []

    def serve(answer: Callable[[Any], None]) -> tuple[str, list[float]]:
        asked: list[float] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(time.monotonic())
                self.close_connection = True
                with suppress(OSError):
                    answer(self)

            def log_message(self, *_: object) -> None:
                pass

        running.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[0].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{running[0].server_port}/v1", asked

    yield serve
    for server in running:
        server.shutdown()
        server.socket.close()


ALL = [
    (kind, name)
    for kind, table in {
        "teacher": TEACHERS, "data": DATA_SETS, "bundle": BUNDLES, "recipe": RECIPES, "endpoint": ENDPOINTS,
    }.items()
    for name in table
]  # fmt: skip
FINE = {("teacher", "attention kernel"), ("teacher", "attention kernel, internal"), ("teacher", "attention of a file"),
        ("teacher", "auto_map"), ("teacher", "auto_map of a repository"), ("teacher", "tokenizer class"),
        ("teacher", "labels, named"), ("data", "cell")}  # fmt: skip
"""What may be used: the hostile part of it is left alone."""


@pytest.mark.parametrize(("kind", "name"), one_of_each(ALL, lambda case: case[0]))
def test_hostile(
    reference: Reference, tmp_path: Path, endpoint: Any, kind: str, name: str, record_property: Record
) -> None:
    record_property("campaign", f"hostile: {kind}")
    bad, out, asked = tmp_path / "bad", tmp_path / "out", list[float]()
    bad.mkdir()
    if kind == "teacher":
        shutil.copytree(reference.given["teacher"], bad / "teacher")
        TEACHERS[name](bad / "teacher")
    elif kind == "bundle":
        shutil.copytree(reference.given["bundle"], bad / "bundle")
        BUNDLES[name](bad / "bundle")
    elif kind == "endpoint":
        url, asked = endpoint(ENDPOINTS[name])
        text = f"url: {url}\nmodel: m\nkey: EVIL_KEY\ntimeout: 2\nretries: 1\nconcurrency: 4\n"
        (bad / "endpoint.yaml").write_text(text)
    else:
        {"data": DATA_SETS, "recipe": RECIPES}[kind][name](bad / "data" if kind == "data" else bad)
    words = {"teacher": TEACHER, "data": DATA, "bundle": PREDICT, "recipe": OWN, "endpoint": LABEL}[kind]
    ended = process.run(
        words.format(**reference.given, bad=bad, out=out).split() + (["--gate", "warn"] if kind == "teacher" else []),
        folder=bad, home=tmp_path / "home", environment={"EVIL_KEY": KEY, CANARY: str(tmp_path / "touched")},
        patience=2 * MOST_SECONDS,
    )  # fmt: skip
    assert ended.sentence or (ended.code == 0 and (kind, name) in FINE), (ended.code, ended.err[-3000:])
    assert not (tmp_path / "touched").exists() and not (bad / "touched").exists()
    assert "\x1b" not in ended.err + ended.out and "\x07" not in ended.err + ended.out
    assert KEY not in ended.err + ended.out
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert ended.grown_mb < MOST_MB and ended.seconds < MOST_SECONDS
    assert len(asked) <= 64, "no more than calls under way, each repeated once"
