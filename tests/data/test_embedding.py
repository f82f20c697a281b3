"""Texts whose vectors are learned: which files say what, what is held out, what is left out, what is refused."""

import json
from pathlib import Path

import pytest

from compress.data import load_task
from compress.data.task import TaskData
from compress.errors import DataError

PAIRS = [("a film", "a movie", 4.5), ("the plot", "the story", 4), ("a dull scene", "a sharp actor", 0.5)]


def tsv(path: Path, *rows: tuple[object, ...]) -> Path:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def load(source: object, **options: str) -> TaskData:
    return load_task(str(source), kind="embedding", **options)  # type: ignore[arg-type]


def judged(data: TaskData, split: str = "validation") -> dict[tuple[str, str], float]:
    rows = getattr(data, split)
    words = rows["text"][:]
    return {
        (words[n], words[other]): gain
        for n, (others, gains) in enumerate(zip(rows["related"][:], rows["relevance"][:], strict=True))
        for other, gain in zip(others, gains, strict=True)
    }


def test_pairs_and_texts_alone(tmp_path: Path) -> None:
    lines = texts(tmp_path / "train.txt", "warm and fun", "  ", "warm and fun", "a film", "so sad", "quite slow")
    pairs = tsv(tmp_path / "dev.tsv", ("sentence1", "sentence2", "score"), *PAIRS)
    data = load(f"train={lines},dev={pairs}")
    assert data.train["text"][:] == ["warm and fun", "so sad", "quite slow"]  # once, without what is compared later
    assert judged(data) == {(one, other): gain for one, other, gain in PAIRS}
    assert (data.task.kind, data.task.metric, data.task.text) == ("embedding", "spearman", ("text",))
    assert data.notes[0] == "train: left out 1 empty texts"


def test_text_file_is_an_embedding_task(tmp_path: Path) -> None:
    data = load_task(str(texts(tmp_path / "texts.txt", *(f"text number {n}" for n in range(200)))))
    assert data.task.kind == "embedding"
    assert (len(data.train), len(data.validation)) == (150, 50)
    assert not set(data.train["text"]) & set(data.validation["text"])
    assert "held out 50 of 200 texts" in " ".join(data.notes)


def test_who_asks_and_what_answers(tmp_path: Path) -> None:
    rows = [{"anchor": f"question {n}", "positive": f"answer {n}", "negative": f"other {n}"} for n in range(20)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(file)
    assert data.task.metric == "ndcg@10"
    asked = judged(data)
    assert len(asked) == 2  # a tenth of those who ask
    assert all(one.replace("question", "answer") == other and gain == 1 for (one, other), gain in asked.items())
    passages = [text for text, one in zip(data.validation["text"], data.validation["passage"], strict=True) if one]
    assert len(passages) == 40  # all that there are, as an index has them
    assert set(passages) <= set(data.train["text"])
    assert not {one for one, _ in asked} & set(data.train["text"])


def test_two_texts_are_query_and_passage(tmp_path: Path) -> None:
    rows = [(f"what is {n}", f"it is {n}") for n in range(12)]
    data = load(tsv(tmp_path / "train.tsv", ("question", "passage"), *rows))
    assert data.task.metric == "ndcg@10"
    assert judged(data).popitem()[1] == 1.0


def test_passages_without_relevance_are_in_the_index_alone(tmp_path: Path) -> None:
    rows = [(f"what is {n}", f"it is {m}", f"{(m == n) + (m == n == 3)}") for n in range(12) for m in (n, (n + 1) % 12)]
    file = tsv(tmp_path / "dev.tsv", ("query", "passage", "relevance"), *rows)
    data = load(f"train={texts(tmp_path / 'train.txt', 'one', 'two', 'three')},dev={file}")
    assert data.task.metric == "ndcg@10"
    assert judged(data) == {(f"what is {n}", f"it is {n}"): 1.0 + (n == 3) for n in range(12)}
    assert sum(data.validation["passage"][:]) == 12
    renamed = tsv(tmp_path / "named.tsv", ("relevance", "found", "asked"), *[row[::-1] for row in rows])
    named = load_task(f"train={tmp_path / 'train.txt'},dev={renamed}", kind="embedding", text=["asked", "found"])
    assert judged(named) == judged(data)
    with pytest.raises(DataError, match="'yes' in 'relevance' is not a number; expected the relevance of the passage"):
        load(f"train={tmp_path / 'train.txt'},dev={tsv(file, ('query', 'passage', 'relevance'), ('a', 'b', 'yes'))}")


def test_the_passage_that_a_teacher_scores_highest_is_relevant(tmp_path: Path) -> None:
    rows = [(f"what is {n}", f"it is {m}", f"{-abs(n - m) - 1.5}") for n in range(12) for m in range(12)]
    file = tsv(tmp_path / "dev.tsv", ("query", "passage", "teacher_score"), *rows)
    data = load(f"train={texts(tmp_path / 'train.txt', 'one', 'two', 'three')},dev={file}")
    assert data.task.metric == "ndcg@10"
    assert judged(data) == {(f"what is {n}", f"it is {n}"): 1.0 for n in range(12)}
    assert sum(data.validation["passage"][:]) == 12


def test_the_folder_of_beir(tmp_path: Path) -> None:
    corpus = [{"_id": f"d{n}", "title": "t", "text": f"passage {n}"} for n in range(5)]
    queries = [{"_id": f"q{n}", "text": f"query {n}"} for n in range(3)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "qrels").mkdir()
    tsv(tmp_path / "qrels/dev.tsv", ("query-id", "corpus-id", "score"), ("q0", "d1", 1), ("q0", "d2", 0))
    tsv(tmp_path / "qrels/test.tsv", ("query-id", "corpus-id", "score"), ("q1", "d3", 2))
    data = load(tmp_path)
    assert judged(data) == {("query 0", "t passage 1"): 1.0}
    assert judged(data, "test") == {("query 1", "t passage 3"): 2.0}
    assert data.train["text"][:] == [f"t passage {n}" for n in range(5)]


def test_questions_find_their_paragraphs(tmp_path: Path) -> None:
    def paragraph(n: int) -> dict[str, object]:
        answers = [{"text": "Oslo", "answer_start": 0}]
        return {"context": f"Oslo, part {n}.", "qas": [{"id": str(n), "question": f"where {n}?", "answers": answers}]}

    file = tmp_path / "train-v1.json"
    file.write_text(json.dumps({"data": [{"title": "x", "paragraphs": [paragraph(n) for n in range(10)]}]}))
    data = load(file)
    assert judged(data).keys() <= {(f"where {n}?", f"Oslo, part {n}.") for n in range(10)}
    assert sum(data.validation["passage"]) == 10


def test_documents_are_cut_into_passages(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("First sentence here. " * 60 + "\n\nAnother document.\n")
    (tmp_path / "two.txt").write_text("\n\n".join(f"Document number {n}." for n in range(30)))
    data = load(tmp_path)
    lengths = [len(text) for text in (*data.train["text"], *data.validation["text"])]
    assert max(lengths) <= 420
    assert len(lengths) > 30


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["one"], "too few to hold some out"),
        (["same", "same", "same"], "too few to hold some out"),
        (["", " "], "is no text in it|too few|is empty"),
    ],
)
def test_too_few_texts_are_refused(lines: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        load(texts(tmp_path / "texts.txt", *lines))


def test_a_single_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a single judged text cannot be held out"):
        load(tsv(tmp_path / "train.tsv", ("sentence1", "sentence2", "score"), *PAIRS[:1], *PAIRS[:1]))


def test_invalid_similarity(tmp_path: Path) -> None:
    rows = [("sentence1", "sentence2", "score"), *PAIRS, ("a", "b", "nan")]
    with pytest.raises(DataError, match="row 5: 'nan' in 'score' is not a number"):
        load(tsv(tmp_path / "train.tsv", *rows))


def test_words_that_say_how_two_texts_relate_are_no_similarity(tmp_path: Path) -> None:
    rows = [(f"text {n}", f"other {n}", ("entailment", "contradiction")[n % 2]) for n in range(8)]
    file = tsv(tmp_path / "train.tsv", ("sentence1", "sentence2", "label"), *rows)
    with pytest.raises(DataError, match="the label 'label' is not a number; expected the similarity"):
        load(file)
    named = load_task(file, kind="embedding", text=["sentence1", "sentence2"])
    assert named.task.metric == "ndcg@10"


def test_splits_with_other_metrics(tmp_path: Path) -> None:
    pairs = tsv(tmp_path / "pairs.tsv", ("sentence1", "sentence2", "score"), *PAIRS)
    asks = tsv(tmp_path / "asks.tsv", ("question", "passage"), ("what is it", "it is that"), ("what", "that"))
    with pytest.raises(DataError, match="is scored by spearman, the test split by ndcg@10"):
        load(f"train={texts(tmp_path / 'train.txt', 'x', 'y', 'z')},validation={pairs},test={asks}")
    with pytest.raises(DataError, match="metric 'ndcg@10' does not score these texts"):
        load(pairs, metric="ndcg@10")


def test_only_columns_of_texts_are_passages(tmp_path: Path) -> None:
    names = ("query", "positive", "negative_1", "negatives_2", "positive_score", "negative_score", "positive_id")
    rows = [(f"what is {n}", f"it is {n}", f"no {n}", f"never {n}", 0.9, 0.1, n) for n in range(20)]
    data = load(tsv(tmp_path / "train.tsv", names, *rows))
    found = {text for split in (data.train, data.validation) for text in split["text"][:]}
    assert found == {text for row in rows for text in row[:4]}


def test_the_highest_judgement_counts_and_none_of_a_text_and_itself(tmp_path: Path) -> None:
    names = ("query", "passage", "relevance")
    dev = tsv(tmp_path / "dev.tsv", names, ("a", "p", 2), ("a", "p", 1), ("a", "a", 1), ("a", "q", 0))
    data = load(f"train={tsv(tmp_path / 'train.tsv', names, ('b', 'p', 1), ('c', 'q', 1))},dev={dev}")
    assert judged(data) == {("a", "p"): 2.0}
    assert "validation: left out 1 judgements of a text and itself" in data.notes


@pytest.mark.parametrize("split_files", [False, True])
def test_what_is_held_out_is_not_trained_on_in_the_other_direction(split_files: bool, tmp_path: Path) -> None:
    """Paraphrases: each text is a query and a passage."""
    pairs = [(f"how to {n}", f"ways to {n}") for n in range(40)]
    rows = [("query", "positive"), *pairs, *(pair[::-1] for pair in pairs)]
    source: object = tsv(tmp_path / "train.tsv", *rows)
    if split_files:
        source = f"train={source},validation={tsv(tmp_path / 'dev.tsv', *rows[:5], *rows[41:45])}"
    data = load(source)
    scored, trained = judged(data), judged(data, "train")
    assert len(scored) == 8
    assert not trained.keys() & {*scored, *(pair[::-1] for pair in scored)}
    assert not {query for query, _ in scored} & {*data.train["text"]}
    assert len(trained) == 80 - 2 * len(set(map(frozenset, scored)))


def test_a_query_that_is_a_passage_too_is_a_row_as_each(tmp_path: Path) -> None:
    rows = [("query", "positive", "negative"), ("a", "b", "a"), ("b", "a", "c"), ("d", "e", "b")]
    data = load(f"train={tsv(tmp_path / 'train.tsv', *rows)},dev={tsv(tmp_path / 'dev.tsv', rows[0], ('x', 'y', 'x'))}")
    found = list(zip(data.train["text"], data.train["passage"], strict=True))
    assert sorted(found) == sorted([*((text, True) for text in "abce"), *((text, False) for text in "abd")])
    assert judged(data, "train") == {("a", "b"): 1, ("b", "a"): 1, ("b", "c"): 0, ("d", "e"): 1, ("d", "b"): 0}
    assert judged(data) == {("x", "y"): 1}
    assert "train: left out 1 judgements of a text and itself" in data.notes
