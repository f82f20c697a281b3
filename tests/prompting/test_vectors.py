"""Vectors that were made elsewhere, in files and behind an endpoint, as the teacher of a student."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import compress
from compress.data import cache
from compress.errors import DataError, PromptError, TeacherError
from compress.prompting.http_model import Endpoint, RemoteEncoder, open_encoder, open_endpoint
from compress.prompting.vectors import CachedVectors, open_source
from tests import tiny
from tests.commands.test_embedding import save_encoder
from tests.prompting.endpoint_server import Reply, Server, Start, ok

TEXTS = ["a good film", "so sad", "a slow story", "good"]
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)


def array(folder: Path, vectors: Any = VECTORS, texts: list[str] | None = TEXTS) -> Path:
    np.save(folder / "made.npy", vectors)
    if texts is not None:
        (folder / "made.txt").write_text("\n".join(texts) + "\n")
    return folder / "made.npy"


def table(folder: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), folder / "made.parquet")
    return folder / "made.parquet"


@pytest.mark.parametrize("kind", ["npy", "parquet", "fixed-size lists"])
def test_each_text_gets_its_own_vector(kind: str, tmp_path: Path) -> None:
    if kind == "npy":
        path = array(tmp_path)
    else:
        lists = pa.array(VECTORS.tolist(), pa.list_(pa.float32(), 3) if kind != "parquet" else pa.list_(pa.float64()))
        path = table(tmp_path, id=[1, 2, 3, 4], text=TEXTS, embedding=lists)
    source = open_source(str(path))
    np.testing.assert_array_equal(source.vectors(["good", " so sad ", "good"]), VECTORS[[3, 1, 3]])
    before = source.digest
    array(tmp_path, VECTORS + 1) if kind == "npy" else table(tmp_path, text=TEXTS, embedding=(VECTORS + 1).tolist())
    assert open_source(str(path)).digest != before


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda folder: array(folder, texts=None), "its texts are missing; expected made.txt next to it"),
        (lambda folder: array(folder, VECTORS[:3]), "3 vectors, but made.txt has 4 texts"),
        (lambda folder: array(folder, VECTORS.astype(int)), "holds int64 of shape .4, 3.; expected a row"),
        (lambda folder: array(folder, VECTORS[0]), "expected a row of floating-point numbers"),
        (
            lambda folder: array(folder, np.full((4, 3), np.nan)),
            "4 of the 4 requested vectors are not finite, such as row 1",
        ),
        (lambda folder: array(folder, VECTORS * 1e5), "exceed 65,504"),
        (lambda folder: array(folder, VECTORS[:2], TEXTS[:2]), "no vector for 2 of 4 texts, such as 'a slow story'"),
        (lambda folder: table(folder, text=TEXTS), "0 of its columns .text. hold vectors"),
        (lambda folder: table(folder, text=TEXTS, v=[[1.0], [1.0, 2.0], [1.0], [1.0]]), "have 1, 2 numbers"),
        (lambda folder: table(folder, text=TEXTS, v=[[1.0], None, [1.0], [1.0]]), "have 0, 1 numbers"),
        (lambda folder: table(folder, text=TEXTS, v=pa.nulls(4, pa.list_(pa.float32()))), "have 0 numbers"),
        (lambda folder: folder / "nowhere.npy", "no such file"),
    ],
)
def test_vectors_that_are_not_of_these_texts_are_refused(
    made: Callable[[Path], Path], expected: str, tmp_path: Path
) -> None:
    with pytest.raises((TeacherError, DataError), match=expected):
        open_source(str(made(tmp_path))).vectors(TEXTS)


def test_a_file_that_is_no_array_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "made.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "made.txt").write_text("a\n")
    with pytest.raises(DataError, match="cannot be read as an array of numbers"):
        open_source(str(tmp_path / "made.npy")).vectors(["a"])


def vector_of(text: str, width: int = 3) -> list[float]:
    return [float(len(text)), *[float(ord(text[0]) % 7)] * (width - 1)]


def scripted(width: Callable[[int], int] = lambda _: 3) -> Callable[[int, str, dict[str, Any]], Reply]:
    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        assert path.endswith("/embeddings")
        data = [{"index": at, "embedding": vector_of(text, width(number))} for at, text in enumerate(body["input"])]
        return ok({"data": data[::-1]})

    return reply


def kept(server: Server, **changes: Any) -> CachedVectors:
    settings = {"url": server.url, "model": "m", "mode": "embeddings", "retries": 1, "concurrency": 1, "batch": 2}
    return CachedVectors(RemoteEncoder(Endpoint(**{**settings, **changes})))


def test_an_endpoint_is_asked_once_for_each_text(serve: Start) -> None:
    server = serve(scripted())
    for _ in range(2):
        found = kept(server).vectors([*TEXTS, "good"])
        np.testing.assert_array_equal(found, [vector_of(text) for text in [*TEXTS, "good"]])
    assert [body["input"] for _, body, _ in server.seen] == [TEXTS[:2], TEXTS[2:]]
    kept(server).vectors(["another", "good"])
    assert server.seen[-1][1]["input"] == ["another"]


def test_answers_before_a_failure_are_cached(serve: Start) -> None:
    healthy = scripted()
    server = serve(lambda number, path, body: healthy(number, path, body) if number == 0 else (401, {}, b"no"))
    with pytest.raises(TeacherError, match="HTTP 401"):
        kept(server).vectors(TEXTS)
    server.reply = healthy
    kept(server).vectors(TEXTS)
    assert server.seen[-1][1]["input"] == TEXTS[2:]


def test_an_endpoint_that_changes_its_width_is_refused_and_nothing_is_lost(serve: Start) -> None:
    server = serve(scripted(lambda number: 3 if number == 0 else 4))
    with pytest.raises(TeacherError, match="a vector has 4 numbers, earlier ones have 3"):
        kept(server).vectors(TEXTS)
    server.reply = scripted()
    np.testing.assert_array_equal(kept(server).vectors(TEXTS), [vector_of(text) for text in TEXTS])
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"data": []}, "0 vectors for 2 texts"),
        ({"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]}, "differ in length"),
        (b'{"data": [{"index": 0, "embedding": [NaN]}, {"index": 1, "embedding": [1]}]}', "finite"),
        ({"error": "busy"}, "data: Field required"),
    ],
)
def test_malformed_vectors_are_explained(answer: Any, expected: str, serve: Start) -> None:
    with pytest.raises(TeacherError, match=expected):
        kept(serve(lambda *_: ok(answer))).vectors(TEXTS[:2])


def test_damaged_vectors_are_asked_for_again(serve: Start) -> None:
    server = serve(scripted())
    kept(server).vectors(TEXTS)
    (file,) = (cache.home() / "vectors").rglob("3.bin")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content + b"torn")
    np.testing.assert_array_equal(kept(server).vectors(TEXTS), [vector_of(text) for text in TEXTS])
    assert server.seen[-1][1]["input"] == ["good"]


def test_an_endpoint_file_is_of_a_language_model_or_of_vectors(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("url: http://127.0.0.1:1/v1\nmodel: m\nmode: embeddings\n")
    with pytest.raises(PromptError, match="omit --prompt"):
        open_endpoint(str(file))
    file.write_text("url: http://127.0.0.1:1/v1\nmodel: m\n")
    with pytest.raises(PromptError, match="mode: embeddings"):
        open_encoder(str(file))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an encoder that students are cut out of."""
    return save_encoder(tmp_path_factory.mktemp("start"))


def test_a_student_learns_vectors_of_another_width(start: Path, tmp_path: Path) -> None:
    words = [word for word in tiny.WORDS if word.isalpha()]
    rng = np.random.default_rng(0)
    texts = sorted({" ".join(rng.choice(words, 4, replace=False)) for _ in range(150)})
    own = rng.normal(size=(len(words), 40))
    vectors = np.array([sum(own[words.index(word)] for word in text.split()) for text in texts])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    path = array(tmp_path, vectors, texts)
    changes = ["student.layers=1", f"student.init={start}", "stages.0.epochs=20", "stages.0.lr=1e-2"]
    bundle = compress.distill(
        teacher=path, data=tmp_path / "made.txt", recipe="leaf", out=tmp_path / "run",
        options=compress.RunOptions(overrides=[*changes, "stages.0.max_length=16"]),
    )  # fmt: skip
    rows = {row.name: row for row in bundle.report().rows}
    assert bundle.task.width == 40
    assert rows["made.npy"].score["spearman"] == pytest.approx(1)
    assert rows["student fp32"].score["spearman"] > 0.6  # of a random encoder alone: 0.3
    assert not (bundle.path / "prompt.yaml").exists()


def test_equal_vectors_teach_nothing(start: Path, tmp_path: Path) -> None:
    texts = [f"{one} {other}" for one in tiny.WORDS[5:17] for other in tiny.WORDS[17:25]]
    changes = [f"student.init={start}", "stages.0.max_length=16"]
    with pytest.raises(TeacherError, match=r"cannot teach this task.+Check that its vectors or scores belong"):
        compress.distill(
            teacher=array(tmp_path, np.ones((len(texts), 3)), texts), data=tmp_path / "made.txt", recipe="leaf",
            out=tmp_path / "run", options=compress.RunOptions(overrides=changes),
        )  # fmt: skip


def test_vectors_teach_no_classes(start: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n" + "\n".join(f"{text},{len(text) % 2}" for text in TEXTS * 20))
    with pytest.raises(TeacherError, match="returns vectors, but the task of the data is classification"):
        compress.distill(
            teacher=array(tmp_path), data=tmp_path / "rows.csv", recipe="leaf", out=tmp_path / "run",
            columns=compress.DataOptions(kind="classification"),
            options=compress.RunOptions(overrides=[f"student.init={start}"]),
        )  # fmt: skip
