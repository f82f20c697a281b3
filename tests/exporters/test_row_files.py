"""Rows of files are answered in batches, with all of their columns, into a file that is whole or not there."""

import csv
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compress.data import delimited, delimited_batches
from compress.data.task import Task
from compress.errors import DataError, OutputError
from compress.exporters import row_files
from compress.exporters.artifact import Bundle
from compress.exporters.predictor import ROWS_PER_BATCH, Predictor, iterate_batches
from compress.exporters.row_files import choose_columns, predict_file
from tests import command, tiny

TEXTS = ["a good film", "the plot is bad", 'so "fine", and fun', "never dull"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return tiny.bundle(tmp_path_factory.mktemp("rows") / "bundle")


@pytest.fixture(scope="module")
def opened(bundle: Bundle) -> Predictor:
    return bundle.open("int8", threads=2)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def table(path: Path, *, delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "sentence", "stars"])
        writer.writerows([number, text, 5] for number, text in enumerate(TEXTS))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("to", [".csv", ".tsv"])
def test_columns_are_kept_and_answers_are_those_of_predict(
    bundle: Bundle, opened: Predictor, tmp_path: Path, delimiter: str, to: str
) -> None:
    target = tmp_path / f"answers{to}"
    assert predict_file(opened, table(tmp_path / "rows.csv", delimiter=delimiter), target) == (4, 0)
    rows, expected = read(target), bundle.predict(TEXTS)
    assert list(rows[0]) == ["id", "sentence", "stars", "prediction", "prediction_score"]
    assert [(row["id"], row["sentence"]) for row in rows] == [(str(n), text) for n, text in enumerate(TEXTS)]
    assert [row["prediction"] for row in rows] == [each.label for each in expected]  # type: ignore[union-attr]
    assert float(rows[0]["prediction_score"]) == expected[0].score  # type: ignore[union-attr]


def test_jsonl_keeps_what_is_nested_and_has_every_score(opened: Predictor, tmp_path: Path) -> None:
    given = [{"sentence": text, "meta": {"tags": [1, "ü"]}} for text in TEXTS]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n\n".join(json.dumps(each) for each in given), encoding="utf-8")
    predict_file(opened, source, tmp_path / "answers.jsonl")
    found = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [{"sentence": each["sentence"], "meta": each["meta"]} for each in found] == given
    assert sum(found[0]["prediction_scores"].values()) == pytest.approx(1.0)


def test_parquet_has_the_same_rows_as_jsonl(opened: Predictor, tmp_path: Path) -> None:
    source = table(tmp_path / "rows.csv")
    predict_file(opened, source, tmp_path / "answers.jsonl")
    predict_file(opened, source, tmp_path / "answers.parquet")
    expected = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    found = pq.read_table(tmp_path / "answers.parquet")
    assert found.to_pylist() == expected
    assert found.schema.field("stars").type == pa.string(), "what is a string stays one"


def test_lines_of_text_become_rows(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a good film\r\n\nbad", encoding="utf-8")
    assert predict_file(opened, tmp_path / "rows.txt", tmp_path / "answers.csv") == (3, 0)
    assert [row["text"] for row in read(tmp_path / "answers.csv")] == ["a good film", "", "bad"]


def test_a_file_is_read_as_it_is_answered(opened: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2 * opened.rows_per_batch + 3
    (tmp_path / "rows.txt").write_text("good\n" * rows, encoding="utf-8")
    sizes, shares = list[int](), list[float]()
    answer = Predictor.answer_columns
    monkeypatch.setattr(
        Predictor, "answer_columns", lambda self, texts: sizes.append(len(texts)) or answer(self, texts)
    )
    done = predict_file(
        opened, tmp_path / "rows.txt", tmp_path / "answers.csv", say=lambda _, share: shares.append(share)
    )
    assert done == (rows, 0)
    assert sizes == [opened.rows_per_batch] * 2 + [3]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_long_texts_are_read_in_smaller_batches(
    opened: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "BATCH_CHARACTERS", 1000)
    (tmp_path / "rows.txt").write_text(f"{'good ' * 80}\n" * 10, encoding="utf-8")
    counts = list[int]()
    predict_file(opened, tmp_path / "rows.txt", tmp_path / "answers.csv", say=lambda rows, _: counts.append(rows))
    assert counts == [3, 6, 9, 10]


def test_an_iterator_is_answered_as_it_is_read(bundle: Bundle) -> None:
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for taken in range(1, 10 * ROWS_PER_BATCH):  # noqa: B007
            yield "a good film"

    answers = bundle.predict(texts())
    assert taken == 0
    assert next(answers) == bundle.predict(["a good film"])[0]
    assert taken == ROWS_PER_BATCH
    assert list(iterate_batches(iter(range(5)), 2)) == [[0, 1], [2, 3], [4]]


BROKEN = [
    (".csv", b"sentence,stars\na film,5\nno\xff,5\nfun,4\n", "line 3, byte 3: 0xff is not UTF-8"),
    (".csv", b"sentence,stars\na film,5\nfun\nfun,4\n", "line 3: 1 cells, not 2 as expected"),
    (
        ".jsonl",
        b'{"sentence": "a film"}\n[1]\n{"sentence": "fun"}\n',
        "line 2: expected an object of column names and values, found list",
    ),
    (".jsonl", b'{"sentence": "a film"}\n{"sentence": []}\n{"sentence": "fun"}\n', "line 2: has a list in 'sentence'"),
    (".ndjson", b'{"sentence": "a film"}\n{"sentence": {"a": 1}}\n{"sentence": "fun"}\n', "line 2: has an object"),
    (".jsonl", b'{"sentence": "a film"}\n{"sent\n{"sentence": "fun"}\n', "line 2: not JSON"),
    (".txt", b"a film\n\xff\nfun\n", "line 2, byte 1: 0xff is not UTF-8"),
]


@pytest.mark.parametrize(("suffix", "content", "message"), BROKEN)
def test_unreadable_rows_stop_or_are_skipped(
    opened: Predictor, tmp_path: Path, suffix: str, content: bytes, message: str
) -> None:
    source, target = tmp_path / f"rows{suffix}", tmp_path / "answers.jsonl"
    source.write_bytes(content)
    with pytest.raises(DataError, match=message.replace("(", r"\(").replace(")", r"\)")):
        predict_file(opened, source, target)
    assert [path.name for path in tmp_path.iterdir()] == [source.name], "nothing half-written"
    assert predict_file(opened, source, target, on_error="skip") == (3, 1)
    first, second, third = map(json.loads, target.read_text().splitlines())
    assert {"prediction"} <= first.keys() & third.keys()
    assert second["prediction_error"] in f"{message} {second['prediction_error']}"
    assert "prediction" not in second


def test_columns_are_found_or_asked_for(opened: Predictor, tmp_path: Path) -> None:
    pair = Task("classification", ("premise", "claim"), "label", ("a", "b"), "accuracy")
    single, source = opened.task, tmp_path / "x.csv"
    assert choose_columns(single, ["id", "sentence"], source, None, pair=False) == ["sentence"]
    assert choose_columns(single, ["id", "text"], source, None, pair=False) == ["text"]
    assert choose_columns(single, ["comment"], source, None, pair=False) == ["comment"]
    assert choose_columns(single, ["id", "comment"], source, ["comment"], pair=False) == ["comment"]
    assert choose_columns(pair, ["id", "claim", "premise"], source, None, pair=False) == ["premise", "claim"]
    assert choose_columns(pair, ["id", "premise"], source, None, pair=True) == ["premise"]
    assert choose_columns(pair, ["claim", "premise"], source, None, pair=False) == ["premise", "claim"]
    assert choose_columns(pair, ["x", "y"], source, None, pair=False) == ["x", "y"]
    with pytest.raises(DataError, match=r"columns id, sentense; expected sentence\. Did you mean 'sentense'"):
        choose_columns(single, ["id", "sentense"], source, None, pair=False)
    for names in (["id", "premise", "x"], ["claim", "asked"], ["x", "premise"]):
        with pytest.raises(DataError, match="both text columns"):
            choose_columns(pair, names, source, None, pair=False)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("rows.xlsx", "a.csv", "--input .*ends in .tsv, .csv, .txt, .jsonl, .ndjson, .json, .parquet"),
        ("rows.csv", "a.txt", "--output .*ends in .csv, .tsv, .jsonl, .parquet, .npy"),
        ("none.csv", "a.csv", "no such file"),
        ("rows.csv", "rows.csv", "--output .*is also an input"),
        ("rows.csv", "nowhere/a.csv", "there is no folder"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, source: str, target: str, message: str) -> None:
    table(tmp_path / "rows.csv")
    table(tmp_path / "rows.xlsx")
    with pytest.raises((DataError, OutputError), match=message):
        row_files.check_files(tmp_path / source, tmp_path / target)


def test_columns_are_not_overwritten(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("sentence,prediction\nfun,mine\n")
    with pytest.raises(DataError, match="line 2: has 'prediction'"):
        predict_file(opened, tmp_path / "rows.csv", tmp_path / "answers.csv")


def test_a_file_without_rows_gives_a_file_without_rows(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert predict_file(opened, tmp_path / "rows.jsonl", tmp_path / "answers.parquet") == (0, 0)
    assert pq.read_table(tmp_path / "answers.parquet").num_rows == 0
    assert predict_file(opened, tmp_path / "rows.jsonl", tmp_path / "answers.jsonl") == (0, 0)
    assert (tmp_path / "answers.jsonl").read_text() == ""


def test_the_command_answers_a_file_and_says_how_many(bundle: Bundle, tmp_path: Path) -> None:
    source, target = table(tmp_path / "rows.csv"), tmp_path / "answers.csv"
    words = ["predict", str(bundle.path), "--input", str(source), "--output", str(target)]
    result = command.run(*words)
    assert result.code == 0
    assert "4 rows, 0 skipped" in result.out
    assert json.loads(command.run(*words, "--json").out)["rows"] == 4
    for more in (["--text", "stars"], ["--text", "sentence"]):
        assert command.run(*words, *more).code == 0
    for wrong in (words[:-2], [*words, "a text"], [words[0], words[1]]):
        result = command.run(*wrong)
        assert (result.code, result.out) == (2, "")
        assert "--input" in result.err


# What training reads, predict reads


def outputs(opened: Predictor, source: Path, **options: Any) -> list[dict[str, Any]]:
    target = source.with_name("answers.jsonl")
    predict_file(opened, source, target, **options)
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


MARKED = ["the film was good", '" very good " , we like it', '"not bad', "a slow story", '"dull', "the light was poor"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_quotation_marks_of_a_tsv_are_text(opened: Predictor, tmp_path: Path, end: str) -> None:
    lines = ["id\ttext", *(f"{n}\t{text}" for n, text in enumerate(MARKED))]
    (tmp_path / "rows.tsv").write_bytes(end.join(lines).encode())
    rows = outputs(opened, tmp_path / "rows.tsv")
    assert [(row["id"], row["text"]) for row in rows] == [(str(n), text) for n, text in enumerate(MARKED)]


def test_nested_columns_numbers_and_nulls(opened: Predictor, tmp_path: Path) -> None:
    given = [{"meta": {"body": "a good film"}, "n": 1}, {"meta": {"body": 5}, "n": 2}, {"meta": {"body": None}, "n": 3}]
    for name, content in (("a.ndjson", "\n".join(map(json.dumps, given))), ("b.json", json.dumps(given))):
        (tmp_path / name).write_text(content)
        rows = outputs(opened, tmp_path / name, columns=["meta.body"])
        assert [{"meta": row["meta"], "n": row["n"]} for row in rows] == given
        expected = opened.predict(["a good film", "5", ""])
        assert [row["prediction_score"] for row in rows] == [each.score for each in expected]  # type: ignore[union-attr]


def test_a_parquet_file_keeps_its_values(opened: Predictor, tmp_path: Path) -> None:
    times = pa.array([datetime.datetime(2020, 1, 2)] * 4)
    columns = {"sentence": pa.array(TEXTS, pa.string_view()), "at": times, "raw": [b"\xff"] * 4, "n": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=3)
    rows = outputs(opened, tmp_path / "rows.parquet")
    assert [row["sentence"] for row in rows] == TEXTS
    assert (rows[0]["at"], rows[0]["raw"], rows[3]["n"]) == ("2020-01-02 00:00:00", "\\xff", 4)


def test_parquet_keeps_its_types(opened: Predictor, tmp_path: Path) -> None:
    rows = 2 * ROWS_PER_BATCH + 5
    columns = {
        "sentence": pa.array((TEXTS * rows)[:rows]),
        "at": pa.array([datetime.datetime(2020, 1, 2)] * rows),
        "meta": pa.array([{"n": n, "tags": [str(n)]} for n in range(rows)]),
        "group": pa.array(["x", None, "y"] * rows)[:rows].dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=100)
    given = pq.read_table(tmp_path / "rows.parquet")
    predict_file(opened, tmp_path / "rows.parquet", tmp_path / "answers.parquet")
    found = pq.read_table(tmp_path / "answers.parquet")
    assert found.select(given.column_names[:3]).equals(given.select(given.column_names[:3]))
    assert found["group"].to_pylist() == given["group"].to_pylist()
    answers = [each.columns() for each in opened.predict(given["sentence"].to_pylist())]
    assert found.select(list(answers[0])).to_pylist() == answers
    assert found.schema.names == [*columns, "prediction", "prediction_score", "prediction_scores"]


def test_a_file_without_a_header_is_not_guessed(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a good film\nso bad\n")
    with pytest.raises(DataError, match=r"cannot tell whether its first row is a header: 'a good film'.*--text 1"):
        outputs(opened, tmp_path / "rows.csv")
    assert [row["1"] for row in outputs(opened, tmp_path / "rows.csv", columns=["1"])] == ["a good film", "so bad"]
    named = outputs(opened, tmp_path / "rows.csv", columns=["a good film"])
    assert [row["a good film"] for row in named] == ["so bad"]


def test_what_is_guessed_is_noted(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('sentence,m\nfun,"[1, 2]"\nso bad,"[3]"\n')
    notes = list[str]()
    rows = outputs(opened, tmp_path / "rows.csv", note=notes.append)
    assert [row["m"] for row in rows] == ["[1, 2]", "[3]"]
    assert notes == ["rows.csv: 'm' has lists, written as text"]


def test_a_row_that_cannot_be_read_takes_no_other_with_it(opened: Predictor, tmp_path: Path) -> None:
    content = 'sentence,n\n"never closed,1\nfun,2\n"so, good",3\n'
    (tmp_path / "rows.csv").write_text(content)
    rows = outputs(opened, tmp_path / "rows.csv", on_error="skip")
    assert [row.get("sentence") for row in rows] == [None, "fun", "so, good"]
    assert rows[0]["prediction_error"].startswith("line 2: ',' expected after")


def test_later_columns_are_not_left_out_of_a_table(opened: Predictor, tmp_path: Path) -> None:
    rows = [{"sentence": "fun"}] * (opened.rows_per_batch + 1) + [{"sentence": "fun", "more": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("answers.csv", "answers.parquet"):
        with pytest.raises(DataError, match="a later row has the column 'more'"):
            predict_file(opened, tmp_path / "rows.jsonl", tmp_path / name)
    assert outputs(opened, tmp_path / "rows.jsonl")[-1]["more"] == 1


def test_text_files_are_read_without_arrow(bundle: Bundle, tmp_path: Path) -> None:
    code = (
        "import sys; from compress.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*{'pyarrow', 'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules))"
    )
    for source in (table(tmp_path / "rows.csv"), table(tmp_path / "rows.tsv", delimiter="\t")):
        words = ["predict", str(bundle.path), "--input", str(source), "--output", str(tmp_path / "a.jsonl")]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize(
    "content",
    [
        "id,sentence\n" + '1,"so ""fine"", and\nfun"\n2,\n3, bad\n' * 300,
        "sentence,n\r\n" + "fun,1\r\n" * 400 + '"so, good",a "b" c\r\n' + "bad,2\r\n" * 400,
        "sentence\tn\n" + "fun\t1\n" * 400 + "one cell too few\n" + "bad\t2\n" * 400,
    ],
    ids=["plain", "from one row on not plain", "a row that cannot be read"],
)
@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_large_text_files_are_read_by_arrow_with_the_same_answers(
    opened: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, to: str
) -> None:
    (tmp_path / "rows.csv").write_text(content, newline="")
    targets = {size: tmp_path / f"{size}.{to}" for size in (2**20, 0)}
    done, shares = list[tuple[int, int]](), list[float]()
    monkeypatch.setattr(delimited_batches, "BLOCK_BYTES", 1000)
    for size, target in targets.items():
        monkeypatch.setattr(delimited, "WORTH_ARROW", size)
        done.append(
            predict_file(
                opened, tmp_path / "rows.csv", target, on_error="skip", say=lambda _, share: shares.append(share)
            )
        )
        assert shares == sorted(shares)
        assert shares.pop() == 1.0
        shares.clear()
    assert done[0] == done[1]
    assert done[0][0] >= 801
    if to == "jsonl":
        assert targets[0].read_bytes() == targets[2**20].read_bytes()
    else:
        assert pq.read_table(targets[0]).equals(pq.read_table(targets[2**20]))


def test_a_first_line_that_is_not_text_is_skipped(opened: Predictor, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"\xff\nfun\n")
    rows = outputs(opened, tmp_path / "rows.txt", on_error="skip")
    assert [row.get("text") for row in rows] == [None, "fun"]


class Fussy:
    """Answers texts as a model does whose tokenizer has no padding token: none for a text without tokens."""

    rows_per_batch = ROWS_PER_BATCH

    def __init__(self, opened: Predictor) -> None:
        self.opened = opened
        self.task = opened.task

    def answer_columns(self, texts: Any) -> Any:
        if "" in texts:
            raise DataError("a text has no tokens")
        return self.opened.answer_columns(texts)

    def answer_schema(self) -> Any:
        return self.opened.answer_schema()


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_text_without_an_answer_is_skipped(opened: Predictor, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"rows.{suffix}"
    rows = {"n": ["1", "2", "3"], "sentence": ["fun", "", "a bad film"]}
    if suffix == "parquet":
        pq.write_table(pa.table(rows), source)
    else:
        lines = [{"n": n, "sentence": text} for n, text in zip(*rows.values(), strict=True)]
        text = "n,sentence\n1,fun\n2,\n3,a bad film\n" if suffix == "csv" else "\n".join(map(json.dumps, lines))
        source.write_text(text, encoding="utf-8")
    target = tmp_path / "answers.jsonl"
    fussy: Any = Fussy(opened)
    with pytest.raises(DataError, match=r"rows.* (row|line) \d: a text has no tokens\. \(Nothing was written"):
        predict_file(fussy, source, target)
    assert not target.exists()
    assert predict_file(fussy, source, target, on_error="skip") == (3, 1)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [row["n"] for row in found] == rows["n"]
    assert [row.get("prediction_error", "")[-21:] for row in found] == ["", "a text has no tokens.", ""]
    assert [row.get("prediction") for row in found[::2]] == opened.answer_columns(["fun", "a bad film"])["prediction"]
    source.with_name("none.txt").write_text("\n\n", encoding="utf-8")
    assert predict_file(fussy, source.with_name("none.txt"), target, on_error="skip") == (2, 2)


def test_a_second_text_for_a_model_of_one_text_is_refused(tmp_path: Path) -> None:
    predictor = tiny.bundle(tmp_path / "bundle").open("fp32")
    (tmp_path / "rows.csv").write_text("sentence\na film\n", encoding="utf-8")
    with pytest.raises(DataError, match="--pair: this model reads one text, not two"):
        predict_file(predictor, tmp_path / "rows.csv", tmp_path / "out.csv", second="a plot")
    assert not (tmp_path / "out.csv").exists()
