"""Retrieval sets: BEIR's folders, the json of SQuAD, what is refused in them, and BM25."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from compress.data.retrieval import INDEX_BLOCK, WordIndex, read_beir, read_squad_retrieval
from compress.data.sources import is_beir
from compress.errors import DataError
from tests.data.conftest import Folder
from tests.data.test_squad import YES, answer, asked, squad

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ranking.json").read_text())["bm25"]


def lines(**texts: str) -> str:
    return "".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in texts.items())


BEIR: Mapping[str, str] = {
    "corpus.jsonl": '{"_id": "d1", "title": "Cats", "text": "They purr."}\n{"_id": 2, "text": "Dogs bark."}\n',
    "queries.jsonl": lines(q1="who purrs?", q2="who barks?", q3="who?"),
    "qrels/train.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\t2\t0\n",
    "qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq2\t2\t1\n",
}


def test_a_folder_of_beir(folder: Folder) -> None:
    found = read_beir(Path(folder(BEIR)))
    assert is_beir(Path(folder({})))
    assert found.corpus == {"d1": "Cats They purr.", "2": "Dogs bark."}
    assert found.queries["q3"] == "who?"
    assert found.qrels == {"train": {"q1": {"d1": 2.0, "2": 0.0}}, "validation": {"q2": {"2": 1.0}}}
    assert found.notes == ()


def test_empty_texts_without_judgements(folder: Folder) -> None:
    more = {"corpus.jsonl": BEIR["corpus.jsonl"] + lines(d3=" "), "queries.jsonl": lines(q1="a", q2="b", q3="")}
    found = read_beir(Path(folder({**BEIR, **more, "qrels/extra.tsv": "x"})))
    assert set(found.corpus) == {"d1", "2"}
    assert set(found.queries) == {"q1", "q2"}
    assert len(found.notes) == 3


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq2\td9\t1\n"}, "dev.tsv, line 2: corpus.jsonl has no id 'd9'"),
        ({"qrels/dev.tsv": "q9\td1\t1\n"}, "dev.tsv, line 1: queries.jsonl has no id 'q9'"),
        ({"qrels/dev.tsv": "q1\td1\t1\nq1\td1\n"}, "dev.tsv, line 2: expected query-id"),
        ({"qrels/dev.tsv": "query-id\tcorpus-id\tscore\n"}, "no judgement"),
        ({"queries.jsonl": lines(q1="who?", q2=" ")}, "'q2' has no text"),
        ({"corpus.jsonl": lines(d1="") + lines(**{"2": "x"})}, "'d1' has no text"),
        ({"corpus.jsonl": lines(d1="x") + lines(d1="y")}, "corpus.jsonl, line 2: an earlier line has the id 'd1'"),
        ({"corpus.jsonl": '{"id": "d1", "text": "x"}'}, "corpus.jsonl, line 1: expected"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(folder: Folder, changed: Mapping[str, str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_beir(Path(folder({**BEIR, **changed})))


def test_a_folder_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="as BEIR lays them out"):
        read_beir(tmp_path)


def test_squad_retrieval(folder: Folder) -> None:
    other = asked("The moon.", {"answers": [answer("moon", 4)]}, {"answers": [], "is_impossible": True})
    path = Path(folder({"dev.json": squad(YES, other, YES)})) / "dev.json"
    found = read_squad_retrieval(path, "validation")
    assert found.corpus == {"p0": "Café 🙂 in Paris.", "p1": "The moon."}
    assert list(found.queries.values()) == ["q0?", "q0?", "q0?"]  # by place: the file gives one id to several
    assert [*found.qrels["validation"].values()] == [{"p0": 1.0}, {"p1": 1.0}, {"p0": 1.0}]
    assert len(found.notes) == 1
    with pytest.raises(DataError, match="no question has an answer"):
        read_squad_retrieval(Path(folder({"dev.json": squad(asked("x", {}))})) / "dev.json")


def test_bm25_equals_lucene() -> None:
    found, scores = WordIndex.from_texts(GOLDEN["texts"]).search(GOLDEN["asked"], 5)
    for row, (places, values) in enumerate(zip(found, scores, strict=True)):
        expected = np.array(GOLDEN["scores"][row])
        np.testing.assert_allclose(values, expected[places], rtol=1e-6)
        assert places.tolist() == np.argsort(-expected, kind="stable").tolist()  # equal ones as the corpus lists them
    index, pairs = WordIndex.from_texts(GOLDEN["texts"]), [(n, m) for n in range(4) for m in range(5)]
    values = index.score([GOLDEN["asked"][n] for n, _ in pairs], np.array([m for _, m in pairs]))
    np.testing.assert_allclose(values.reshape(4, 5), GOLDEN["scores"], rtol=1e-6)


def test_bm25_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 50, 12))) for _ in range(200)]
    whole = WordIndex.from_texts(texts).search(texts[:30], 7)
    assert whole[0].shape == whole[1].shape == (30, 7)
    assert (whole[0][:, 0] == np.arange(30)).mean() > 0.9
    monkeypatch.setattr("compress.data.retrieval.INDEX_BLOCK", 500)
    np.testing.assert_array_equal(WordIndex.from_texts(texts).search(texts[:30], 7)[0], whole[0])
    assert WordIndex.from_texts(texts[:3]).search(texts[:1], 9)[0].shape == (1, 3)
    assert INDEX_BLOCK > 500
    with pytest.raises(DataError, match="no words"):
        WordIndex.from_texts(["?", "!"]).search(["a"], 1)
