"""Draw the rows that benchmarks/recipes_for_real.py trains and tests on."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import concatenate_datasets
from numpy.typing import NDArray

from compress.data import load_task
from compress.data.cache import home
from compress.data.task import TaskData
from compress.io import atomic_folder, hash_value

SPECS: Mapping[str, str] = {
    "sst2": "{root}/sst2",
    "squad": "train={root}/squad2_half_dev/dev-v2.0.json,test={root}/mlqa_en_dev/dev-context-en-question-en.json",
}
"""Data sets of the folder `root`; every other name is of questions and the sentences that answer them."""
VALIDATED = 400
TESTED = 4000
"""Rows that are drawn once, for all seeds, to test on."""
POOL = 24_000
"""Rows out of which seeds draw theirs; a language model that learns to answer prompts reads the others."""
QUESTIONS = 640
"""Questions that a reranker, or vectors, learn from."""
OF_A_QUESTION = 8
"""Sentences that a question is judged with."""


def load_whole(root: Path, name: str) -> tuple[TaskData, NDArray[Any]]:
    """Load a task of the folder of data, and return an order of its rows, of which the first POOL are for students."""
    whole = load_task(SPECS[name].format(root=root))
    return whole, np.random.default_rng(0).permutation(len(whole.train))


def draw(root: Path, name: str, *, rows: int, texts: int, seed: int) -> tuple[Any, str | None]:
    """Draw the rows of a seed to train and to validate on; test on TESTED of those that others validate or test on.

    Returns the splits, and a file with the texts of so many other rows, or None. Of questions that find sentences the
    rows are the same for every seed.
    """
    if name not in SPECS:
        return find_sentences(root, name), None
    whole, order = load_whole(root, name)
    order = np.random.default_rng(seed).permutation(order[:POOL])
    whole_test = concatenate_datasets([each for each in (whole.validation, whole.test) if each is not None])
    test = np.random.default_rng(0).permutation(len(whole_test))[:TESTED]
    bounds = [0, rows, rows + VALIDATED, rows + VALIDATED + texts]
    train, validation, others = (whole.train.select(np.sort(order[start:end])) for start, end in pairwise(bounds))
    splits = {"train": train, "validation": validation, "test": whole_test.select(np.sort(test))}
    if whole.task.kind == "qa":
        splits = {part: split.map(_to_squad, remove_columns=["starts"]) for part, split in splits.items()}
    if "text" not in others.column_names or not len(others):
        return splits, None
    words = "\n".join(others["text"][:])
    folder = home() / "recipes-for-real" / f"texts-{hash_value(words)[:12]}"
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            (made / "texts.txt").write_text(words, encoding="utf-8")
    return splits, str(folder / "texts.txt")


def _to_squad(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"answers": {"text": row["answers"], "answer_start": row["starts"]}}


def find_sentences(root: Path, kind: str) -> str:
    """Write questions with the sentences of their paragraphs, of which one has the answer; return the splits.

    SQuAD's articles train, but every fifth, which validates; MLQA's test. Of `vectors` texts train, without judgements.
    """
    folder = home() / "recipes-for-real" / f"questions-{QUESTIONS}"
    if not folder.is_dir():
        squad = _articles(root / "squad2_half_dev/dev-v2.0.json")
        mlqa = _articles(root / "mlqa_en_dev/dev-context-en-question-en.json")
        with atomic_folder(folder) as made:
            _write(made / "train.tsv", list(_judged(each for at, each in enumerate(squad) if at % 5))[:QUESTIONS])
            _write(made / "validation.tsv", list(_judged(squad[::5]))[:300])
            _write(made / "test.tsv", list(_judged(mlqa))[:848])
            learned = [
                _sentences(paragraph["context"]) for at, each in enumerate(squad) if at % 5 for paragraph in each
            ]
            texts = [sentence for paragraph in learned for sentence in paragraph]
            (made / "texts.txt").write_text("\n".join(dict.fromkeys(texts)), encoding="utf-8")
    train = "texts.txt" if kind == "vectors" else "train.tsv"
    return f"train={folder}/{train},validation={folder}/validation.tsv,test={folder}/test.tsv"


def _articles(file: Path) -> list[Any]:
    return [article["paragraphs"] for article in json.loads(file.read_text(encoding="utf-8"))["data"]]


def _sentences(paragraph: str) -> list[str]:
    return [each for each in re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", " ".join(paragraph.split())) if len(each) > 20]


def _judged(articles: Iterable[Sequence[Any]]) -> Iterator[list[tuple[str, str, int]]]:
    """Yield of each question its sentences, with 1 for the one that has the answer and its words around it."""
    for paragraphs in articles:
        for paragraph in paragraphs:
            sentences = _sentences(paragraph["context"])
            for question in paragraph["qas"]:
                texts = {answer["text"] for answer in question["answers"]}
                having = [each for each in sentences if any(text in each for text in texts)]
                others = [each for each in sentences if each not in having]
                if len(having) == 1 and others:
                    rows = [*having, *others[: OF_A_QUESTION - 1]]
                    yield [(question["question"], text, int(text == having[0])) for text in rows]


def _write(file: Path, questions: Iterable[list[tuple[str, str, int]]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, delimiter="\t")
        table.writerow(("query", "passage", "relevance"))
        for rows in questions:
            table.writerows(rows)
