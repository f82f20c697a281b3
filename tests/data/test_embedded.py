"""The embedded sets: `intents` keeps its splits apart and is hard for a bag of words; `pydoc` is prose."""

import hashlib
import json
import sys
from collections import Counter
from functools import cache
from itertools import combinations, islice

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from benchmarks.intents import generate as intents
from compress.data import load_task, pydoc
from compress.errors import DataError

SPLITS = tuple(intents.ROWS)


@cache
def rows() -> dict[str, list[dict[str, str]]]:
    return intents.splits()


def test_generated_rows_are_unchanged() -> None:
    """On any machine and Python; whoever changes the set measures it anew and says so in the changelog."""
    assert hashlib.sha256(json.dumps(rows()).encode()).hexdigest()[:16] == "4aeb68dd9425d28d"


def test_packaged_files_have_the_generated_rows() -> None:
    data = load_task("intents")
    for split in SPLITS:
        found = getattr(data, split)
        assert found["text"][:] == [row["text"] for row in rows()[split]]
        assert [data.task.labels[label] for label in found["label"]] == [row["label"] for row in rows()[split]]


def test_splits_are_balanced() -> None:
    for split, count in intents.ROWS.items():
        share = Counter(row["label"] for row in rows()[split])
        assert sum(share.values()) == count
        assert set(share) == set(intents.phrasebook("train").templates)
        assert len(share) == 25
        assert set(share.values()) == {count // 25}


@pytest.mark.parametrize(("one", "other"), list(combinations(SPLITS, 2)))
def test_splits_share_no_template_or_slot_value(one: str, other: str) -> None:
    left, right = intents.phrasebook(one), intents.phrasebook(other)
    assert left.templates.keys() == right.templates.keys()
    assert left.slots.keys() == right.slots.keys()
    mine, theirs = ({t for every in book.templates.values() for t in every} for book in (left, right))
    assert not mine & theirs
    for name in left.slots:
        assert not {value.lower() for value in left.slots[name]} & {value.lower() for value in right.slots[name]}, name


def test_intents_are_hard_for_a_bag_of_words() -> None:
    """A 6-layer MiniLM, fine-tuned for three epochs at 1e-4, scores 0.91."""
    train, test = (([row["text"] for row in rows()[s]], [row["label"] for row in rows()[s]]) for s in ("train", "test"))
    words = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10))
    assert 0.5 < words.fit(*train).score(*test) < 0.78


def test_pydoc_is_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = pydoc._modules()
    assert len(modules) > 300
    monkeypatch.setattr(pydoc, "_modules", lambda: modules[::8])
    documents = list(pydoc.documents())
    assert documents[:100] == list(islice(pydoc.documents(), 100))
    assert len(documents) > 120
    assert sum(len(document.split()) for document in documents) > 60_000
    for line in (line for document in documents for line in document.split("\n")):
        assert line.rstrip(")\"'”’")[-1] in ".:!?", line
        assert ">>>" not in line
        assert "::=" not in line


def test_pydoc_starts_with_a_topic() -> None:
    first = next(pydoc.documents())
    assert first.startswith("Assert statements are a convenient way to insert debugging assertions into a program:\n")
    assert "assert_stmt" not in first
    assert "if __debug__" not in first


def test_markup_is_removed() -> None:
    text = """
    Title
    *****

    The *first* of ``two`` things is :class:`~abc.ABC` and "None" [5], in
    "plain quoted words" as **bold** as `they' come.

       >>> code = 1  # is not prose, ever.

    * a bullet that is a whole sen-
      tence stays as one::

    term
       Its definition is a sentence of its own.
    """
    assert list(pydoc.paragraphs(text)) == [
        'The first of two things is abc.ABC and None, in "plain quoted words" as bold as they come.',
        "a bullet that is a whole sen-tence stays as one:",
        "Its definition is a sentence of its own.",
    ]


def test_python_without_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"no documentation topics .* Use a text file"):
        pydoc.fingerprint()
