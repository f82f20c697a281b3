"""Rankings from tables, BEIR's folders and SQuAD's json: what is detected, drawn, left out, held out and refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import TaskData, load_task
from compress.data.ranking import is_ranking
from compress.data.tokenize import encode
from compress.errors import DataError
from tests import tiny
from tests.data.conftest import Folder
from tests.data.test_retrieval import BEIR, lines
from tests.data.test_squad import answer, asked, squad

HEADER = "query\tpassage\trelevance\n"
TABLE = HEADER + "a\tp1\t2\na\tp2\t0\nb\tp3\t1\nb\tp4\t0.5\nc\tp5\t0\n"


def loaded(folder: Folder, files: Mapping[str, str], **options: Any) -> TaskData:
    return load_task(folder(files), **options)


def pairs(split: Any) -> list[tuple[str, str, float]]:
    return list(zip(split["text"][:], split["text_pair"][:], split["label"][:], strict=True))


def test_a_table_of_pairs(folder: Folder) -> None:
    data = loaded(folder, {"train.tsv": TABLE, "dev.tsv": TABLE}, kind="ranking")
    task = data.task
    assert (task.kind, task.text, task.label, task.labels) == ("ranking", ("query", "passage"), "relevance", ())
    assert (task.metric, task.outputs, task.pair, task.tokenwise, task.numeric) == ("ndcg@10", 1, True, False, True)
    assert pairs(data.train) == [("a", "p1", 2), ("a", "p2", 0), ("b", "p3", 1), ("b", "p4", 0.5), ("c", "p5", 0)]
    assert data.train["query"][:] == [0, 0, 1, 1, 2]
    assert pairs(data.validation) == pairs(data.train)[:4]
    assert any("left out 1 of 3 queries" in note for note in data.notes)


def test_pairs_are_classification_by_default(folder: Folder) -> None:
    table = "query\tpassage\tlabel\n" + "".join(f"what is {n // 2}\tit is {n} here\t{n % 2}\n" for n in range(20))
    files = {"train.tsv": table, "dev.tsv": table.replace("what", "who")}
    assert loaded(folder, files).task.kind == "classification"
    assert loaded(folder, files, kind="ranking", metric="map").task.metric == "map"


@pytest.mark.parametrize("column", ["negative", "negatives", "negative_2"])
@pytest.mark.parametrize("negative", ['"n1"', '["n1", "n2"]'])
def test_positives_and_negatives(folder: Folder, column: str, negative: str) -> None:
    rows = [{"query": q, "positive": p, column: json.loads(negative)} for q, p in ("ax", "ay", "bz")]
    data = loaded(folder, {name: "\n".join(map(json.dumps, rows)) for name in ("train.jsonl", "dev.jsonl")})
    negatives = ["n1"] if negative == '"n1"' else ["n1", "n2"]
    expected = [("a", "x", 1), *(("a", n, 0) for n in negatives), ("a", "y", 1), ("b", "z", 1)]
    assert pairs(data.train) == [*expected, *(("b", n, 0) for n in negatives)]
    assert data.train["query"][:].count(1) == 1 + len(negatives)


def test_bm25_negatives(folder: Folder) -> None:
    rows = [(f"what is word{n}", f"word{n} is a thing like word{n + 1}") for n in range(12)]
    table = "query\tpositive\n" + "".join(f"{q}\t{p}\n" for q, p in rows)
    data = loaded(folder, {"train.tsv": table, "dev.tsv": table})
    assert data.task.kind == "ranking"
    first = [row for row in pairs(data.train) if row[0] == "what is word5"]
    assert first[0] == (*rows[5], 1)
    assert [label for *_, label in first] == [1] + [0] * 8
    assert first[1][1] == rows[4][1]  # which has the word, too


def test_the_query_is_not_among_its_bm25_negatives(folder: Folder) -> None:
    """BM25 finds it first, if it is the passage of another query."""
    rows = [(f"what is word{n}", f"word{n} is what") for n in range(12)]
    table = "query\tpositive\n" + "".join(f"{q}\t{p}\n{p}\t{q}\n" for q, p in rows)
    data = loaded(folder, {"train.tsv": table, "dev.tsv": table})
    assert all(query != passage for query, passage, _ in pairs(data.train))
    assert [label for query, _, label in pairs(data.train) if query == rows[0][0]] == [1] + [0] * 8


SCORED = "query\tpassage\tteacher_score\n"


def test_scores_of_a_teacher(folder: Folder) -> None:
    """They stand beside the relevance of duplicate rows, and are detected without the kind."""
    rows = "a\tp1\t1\t-2.5\na\tp2\t0\t3\na\tp2\t2\t4\na\tp2\t2\t5\nb\tp3\t1\t1e-3\nb\tp4\t0\t0\n"
    table = "query\tpassage\trelevance\tteacher_score\n" + rows
    data = loaded(folder, {"train.tsv": table, "dev.tsv": table})
    assert (data.task.kind, data.task.label) == ("ranking", "relevance")
    assert pairs(data.train) == [("a", "p1", 1), ("a", "p2", 2), ("b", "p3", 1), ("b", "p4", 0)]
    assert data.train["teacher"][:] == pytest.approx([-2.5, 4, 1e-3, 0])
    assert data.validation["teacher"][:] == data.train["teacher"][:]
    assert any("2 pairs occur with different numbers" in note for note in data.notes)
    plain = loaded(folder, {"train.tsv": TABLE, "dev.tsv": TABLE}, kind="ranking")
    assert "teacher" not in plain.train.column_names
    other = loaded(folder, {"train.tsv": table, "dev.tsv": table}, kind="ranking", label="teacher_score")
    assert (other.task.label, other.train.column_names) == ("teacher_score", plain.train.column_names)


def test_scores_of_a_teacher_instead_of_relevance(folder: Folder) -> None:
    table = SCORED + "a\tp1\t-2\na\tp2\t-1\nb\tp3\t7\nb\tp4\t7\nb\tp5\t0\n"
    data = loaded(folder, {"train.tsv": table, "dev.tsv": table})
    assert (data.task.kind, data.task.label) == ("ranking", "teacher_score")
    assert pairs(data.train) == [("a", "p1", 0), ("a", "p2", 1), ("b", "p3", 1), ("b", "p4", 1), ("b", "p5", 0)]
    assert any("highest 'teacher_score' is the query's relevant one" in note for note in data.notes)


def test_scores_are_held_out_with_their_rows(folder: Folder) -> None:
    table = SCORED + "".join(f"q{n}\tp{each}\t{10 * n + each}\n" for n in range(20) for each in range(2))
    data = loaded(folder, {"train.tsv": table})
    for split in (data.train, data.validation):
        assert split["teacher"][:] == [10 * int(query[1:]) + int(passage[1:]) for query, passage, _ in pairs(split)]
    assert len(data.validation) == 4


def test_parquet_and_columns_by_name(folder: Folder, tmp_path: Any) -> None:
    table = pa.table({"q": ["a", "a", "b", "b"], "d": ["x", "y", "x", "y"], "gain": [1, 0, 0, 3]})
    for name in ("train", "dev"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    found = load_task(str(tmp_path), kind="ranking", text=["q", "d"], label="gain")
    assert (found.task.text, found.task.label) == (("q", "d"), "gain")
    assert pairs(found.train)[-1] == ("b", "y", 3)
    with pytest.raises(DataError, match="which column is the query"):
        load_task(str(tmp_path), kind="ranking")


@pytest.mark.parametrize("text", [["passage", "query"], ["Document", "question"]])
def test_passages_named_as_the_queries_are_refused(folder: Folder, text: list[str]) -> None:
    table = TABLE.replace("query\tpassage", "\t".join(reversed(text)))
    with pytest.raises(DataError, match=f"expected the queries first: --text {text[1]} --text {text[0]}"):
        loaded(folder, {"train.tsv": table, "dev.tsv": table}, kind="ranking", text=text)


def test_beir_folder(folder: Folder) -> None:
    corpus = lines(**{f"d{n}": f"cats number{n} purr in house{n % 5}" for n in range(30)}) + lines(no="nothing of it")
    queries = lines(**{f"q{n}": f"which cat has number{n}" for n in range(20)})
    head = "query-id\tcorpus-id\tscore\n"
    train = head + "".join(f"q{n}\td{n}\t1\n" for n in range(12)) + "q0\tno\t0\n"
    source = {"corpus.jsonl": corpus, "queries.jsonl": queries, "qrels/train.tsv": train}
    data = loaded(folder, {**source, "qrels/dev.tsv": head + "".join(f"q{n}\td{n}\t1\n" for n in range(12, 16))})
    assert (data.task.kind, data.task.text) == ("ranking", ("query", "passage"))
    first = [row for row in pairs(data.train) if row[0] == "which cat has number0"]
    assert first[:2] == [(first[0][0], "cats number0 purr in house0", 1), (first[0][0], "nothing of it", 0)]
    assert len(first) == 2 + 8
    assert all("cats" in passage for _, passage, _ in first[2:])
    assert len(set(data.validation["text"][:])) == 4
    (Path(folder({})) / "qrels" / "dev.tsv").unlink()
    again = loaded(folder, source)
    assert again.fingerprint == loaded(folder, source).fingerprint != data.fingerprint
    assert len(set(again.validation["query"][:])) == 1  # held out, a tenth of 12
    assert not set(again.validation["text"][:]) & set(again.train["text"][:])


def test_squad_as_ranking(folder: Folder) -> None:
    texts = [f"The river number{n} is long and wide here." for n in range(25)]
    questions = [
        {"question": f"how long is river number{n}", "answers": [answer("long", texts[n].index("long"))]}
        for n in range(25)
    ]
    paragraphs = [asked(text, question, question) for text, question in zip(texts, questions, strict=True)]
    files = {"train.json": squad(*paragraphs), "dev.json": squad(*paragraphs[:5])}
    assert loaded(folder, files).task.kind == "qa"
    data = loaded(folder, files, kind="ranking")
    assert len(data.train) == 25 * 9
    assert [label for _, text, label in pairs(data.train) if text == texts[3] and label] == [1]
    assert len(data.validation) == 5 * 5


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (HEADER + "a\tp\tmuch\n", "row 2: 'relevance' is 'much'"),
        (HEADER + "a\tp\t\n", "row 2: 'relevance' is"),
        (HEADER + "a\tp\t1\n\tq\t0\n", "row 3: the query 'query' is empty"),
        (HEADER + "a\tp\t1\na\t \t0\n", "row 3: the passage 'passage' is empty"),
        (HEADER + "a\tp\t1\nb\tq\t0\n", "no order can be learned"),
        (HEADER + "a\tp\t0\na\tq\t0\n", "no order can be learned"),
        ("query\tpassage\tother\na\tp\tx\n", "which column is the relevance"),
        (SCORED + "a\tp\t1\na\tq\tnan\n", "row 3: 'teacher_score' is 'nan'; expected the teacher's score"),
        (SCORED + "a\tp\t\n", "row 2: 'teacher_score' is"),
        (SCORED + "a\tp\t-inf\n", "row 2: 'teacher_score' is '-inf'"),
        (SCORED + "a\tp\t1\na\tq\t2\n", "dev.tsv: has no column 'teacher_score', but the training split"),
        ("query\tpositive\tnegative\tteacher_score\na\tp\tq\t1\n", "'teacher_score' cannot score both passages"),
    ],
)
def test_invalid_rankings(folder: Folder, table: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        loaded(folder, {"train.tsv": table, "dev.tsv": TABLE}, kind="ranking")


def test_split_without_scorable_queries(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"\[validation\]: no query has both"):
        loaded(folder, {"train.tsv": TABLE, "dev.tsv": HEADER + "a\tp1\t1\nb\tp2\t0\n"}, kind="ranking")


def test_a_single_query_is_refused(folder: Folder) -> None:
    with pytest.raises(DataError, match="too few queries to hold some out"):
        loaded(folder, {"train.tsv": HEADER + "a\tp\t1\na\tq\t0\na\tq\t0\n"}, kind="ranking")


def test_judgements_without_training_split(folder: Folder) -> None:
    with pytest.raises(DataError, match="judgements of validation but no training split"):
        loaded(folder, {name: text for name, text in BEIR.items() if "train" not in name})


def test_encode_rankings(folder: Folder) -> None:
    data = loaded(folder, {"train.tsv": TABLE, "dev.tsv": TABLE}, kind="ranking")
    rows = encode(data.validation, tiny.tokenizer(), 32)
    assert rows["query"][:] == [0, 0, 1, 1]
    assert rows["labels"][:] == [2.0, 0.0, 1.0, 0.5]
    assert np.asarray(rows["length"][:]).min() > 3


def test_is_ranking(folder: Folder) -> None:
    assert not is_ranking("intents")
    assert is_ranking(folder({"train.csv": "query,positive,negative\na,b,c\n"}))
    assert not is_ranking(folder({"train.csv": "query,positive,label\na,b,1\n"}))
    assert is_ranking(folder({"train.csv": "question,document,label,teacher_score\na,b,1,2\n"}))
    assert not is_ranking(folder({"train.csv": "text,label,teacher_score\na,1,2\n"}))
    assert is_ranking(folder({"train.csv": "query,passage,relevance\na,b,1\n"}))
    assert not is_ranking(folder({"train.csv": "query,passage,label\na,b,1\n"}))
