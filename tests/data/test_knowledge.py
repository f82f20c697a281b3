"""Triples are read from a table, their names found in texts, and their facts written within a length."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from compress.data.encoder import encoder_of
from compress.data.knowledge import Knowledge, add_facts, load_knowledge
from compress.data.tokenize import encode
from compress.errors import DataError
from tests import tiny

TRIPLES = """head\trelation\ttail
New_York\tis\ta city
New York City\tis\ta city
New York City\thas\tfive boroughs
York\tis\ta city
York\tlies_in\tEngland
Łódź\tis\ta city
राम\tis\ta king
Jose\tis\ta name
"""


def table(folder: Path, text: str, name: str = "triples.tsv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.fixture
def knowledge(tmp_path: Path) -> Knowledge:
    return load_knowledge(table(tmp_path, TRIPLES))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from New York City to York", ["New York City", "York"]),
        ("from New York to New_York", ["New York", "New York"]),
        ("New York, York and New  York", ["New York", "York", "New York"]),
        ("York's walls", ["York"]),
        ("Yorkshire, york, Newyork, YORK", []),
        ("in Łódź.", ["Łódź"]),
        ("राम, रामायण", ["राम"]),
        ("Jose\u0301", []),
        ("New", []),
        ("", []),
    ],
)
def test_names_are_whole_words_as_written_longest_first(text: str, names: list[str], knowledge: Knowledge) -> None:
    assert list(map(" ".join, knowledge.find_names(text))) == names


def test_the_facts_that_fewest_heads_share_come_first(knowledge: Knowledge) -> None:
    assert knowledge.list_facts("York is older than New York City, York") == [
        "York lies in England.",
        "New York City has five boroughs.",
        "York is a city.",
        "New York City is a city.",
    ]


def test_a_name_with_underscores_is_the_same_name_and_a_repeated_triple_one_fact(tmp_path: Path) -> None:
    path = table(tmp_path, "head\trelation\ttail\nNew_York\tis\tbig\nNew York\tis\tbig\nNew York\tis_in\tUSA\n")
    knowledge = load_knowledge(path)
    assert knowledge.list_facts("New York") == ["New York is big.", "New York is in USA."]
    assert {fact.heads for facts in knowledge.facts.values() for fact in facts} == {1}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("triples.csv", "tail,head,relation\na city,York,is\n"),
        ("triples.txt", "York\tis\ta city\nLeeds\tis\ta town\n"),
        ("triples.jsonl", '{"head": "York", "relation": "is", "tail": "a city"}\n'),
    ],
)
def test_columns_may_come_in_any_order_and_a_header_may_be_missing(name: str, text: str, tmp_path: Path) -> None:
    assert load_knowledge(table(tmp_path, text, name)).list_facts("York") == ["York is a city."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head\trelation\ttail\tsource\nYork\tis\told\tme\n", "columns are head, relation, tail, source; expected"),
        ("head\trelation\nYork\told\n", "columns are head, relation; expected a table of triples"),
        (
            "head\trelation\ttail\nYork\tis\told\nLeeds\t\tnew\n",
            r"row 3: expected texts as .* found 'Leeds', .*, 'new'",
        ),
        ("head\trelation\ttail\nYork\tis\t_\n", "row 2: expected texts as head, relation and tail"),
        ("head\trelation\ttail\n", "triples.tsv"),
    ],
)
def test_a_table_that_is_not_all_triples_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_knowledge(table(tmp_path, text))


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict(columns)


@pytest.fixture
def films(tmp_path: Path) -> Knowledge:
    return load_knowledge(
        table(tmp_path, "head\trelation\ttail\nfilm\tis\tgood\nplot\tis\tnot so good\nfilm\twas\tfun\n")
    )


def test_facts_are_the_second_text_and_take_no_room_from_the_first(films: Knowledge) -> None:
    encoder = encoder_of(tiny.tokenizer())
    split = rows(text=["the film", "a scene", "the plot and the film"], label=[1, 0, 1])
    for length, counts in ((64, [2, 0, 3]), (16, [2, 0, 1]), (9, [1, 0, 0])):
        informed = add_facts(split, films, encoder, length)
        assert informed["facts"][:] == counts
        assert informed["text"][:] == split["text"][:]
        assert informed["label"][:] == [1, 0, 1]
        whole = encode(informed, encoder, 64)
        assert max(whole["length"][:]) <= length
    assert add_facts(split, films, encoder, 16)["text_pair"][:] == [
        "film is good. film was fun.",
        "",
        "plot is not so good.",
    ]


def test_a_long_fact_gives_way_to_a_shorter_one(films: Knowledge) -> None:
    informed = add_facts(rows(text=["plot film"]), films, encoder_of(tiny.tokenizer()), 9)
    assert informed["text_pair"][:] == ["film is good."]


def test_facts_of_a_pair_follow_its_second_text(films: Knowledge) -> None:
    split = rows(text=["the film", "a"], text_pair=["a plot", "the story"])
    informed = add_facts(split, films, encoder_of(tiny.tokenizer()), 64)
    assert informed["text_pair"][:] == ["a plot film is good. film was fun. plot is not so good.", "the story"]


def test_no_name_goes_on_in_the_second_text(knowledge: Knowledge) -> None:
    assert knowledge.list_facts("Is it new New", "York") == ["York lies in England.", "York is a city."]


def test_another_table_or_length_gives_other_rows(films: Knowledge, tmp_path: Path) -> None:
    split = rows(text=["the film"])
    encoder = encoder_of(tiny.tokenizer())
    other = load_knowledge(table(tmp_path, "film\tis\tbad\nplot\tis\tfun\n", "other.tsv"))
    prints = {
        add_facts(split, known, encoder, length)._fingerprint
        for known, length in ((films, 64), (films, 9), (other, 64))
    }
    assert len(prints) == 3
