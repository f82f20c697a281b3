"""Tagged words from columns: what is detected, rewritten and refused; a file for each split, of any format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from compress.data import load_task
from compress.errors import DataError
from tests import marked
from tests.data.conftest import Folder

WNUT = "EU\tB-org\nrejects\tO\n\nPeter\tB-per\nBlackburn\tI-per\n\t\nBRUSSELS\tB-loc\n"
CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP I-ORG
rejects VBZ B-VP O

Peter NNP B-NP I-PER
Blackburn NNP I-NP I-PER
Paul NNP B-NP B-PER
"""


def test_tabs_and_a_blank_line_of_tabs(folder: Folder) -> None:
    test = "Bonn\tB-loc\n" + WNUT
    data = load_task(folder({"wnut17train.conll": WNUT, "emerging.dev.conll": WNUT, "emerging.test.annotated": test}))
    assert (data.task.kind, data.task.text, data.task.metric) == ("tagging", ("words",), "f1")
    assert data.task.labels == ("O", "B-loc", "I-loc", "B-org", "I-org", "B-per", "I-per")
    assert data.train["words"][:] == [["EU", "rejects"], ["Peter", "Blackburn"], ["BRUSSELS"]]
    assert data.train["tags"][:] == [[3, 0], [5, 6], [1]]
    assert data.test is not None
    assert not any("IOB2" in note for note in data.notes)


def test_columns_of_conll_2003_in_iob1(folder: Folder) -> None:
    data = load_task(folder({"train.txt": CONLL, "dev.txt": CONLL}))
    assert data.train["words"][:] == [["EU", "rejects"], ["Peter", "Blackburn", "Paul"]]
    names = data.task.labels
    assert [[names[n] for n in tags] for tags in data.train["tags"]] == [["B-ORG", "O"], ["B-PER", "I-PER", "B-PER"]]
    assert data.notes[:2] == ("train.txt: its tags are rewritten in IOB2", "dev.txt: its tags are rewritten in IOB2")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_conll_variants(ending: str, folder: Folder) -> None:
    text = "# id 1 domain=en\nA _ _ B-x\nb _ _ E-x\n\n# id 2\n# _ _ O\nC _ _ S-y\n".replace("\n", ending)
    data = load_task(folder({"train.conll": text.encode("utf-8-sig"), "dev.conll": text}))
    assert data.train["words"][:] == [["A", "b"], ["#", "C"]]
    assert data.train["tags"][:] == [[1, 2], [0, 3]]


def test_a_single_file_separated_by_spaces_is_no_list_of_texts(folder: Folder) -> None:
    data = load_task(folder({"train.txt": CONLL + "\n" + CONLL}))
    assert (data.task.kind, data.task.labels) == ("tagging", ("O", "B-ORG", "I-ORG", "B-PER", "I-PER"))


def test_marks_that_may_end_a_line_and_spaces_that_do_not_break_are_words(folder: Folder) -> None:
    text = "a\x85b\tB-x\n\u2028\tI-x\n\u00a0\tO\nend\tO\n"
    data = load_task(folder({"train.txt": text, "dev.txt": text}))
    assert data.train["words"][:] == [["a\x85b", "\u2028", "\u00a0", "end"]]


def test_hashtags_and_spaces_that_do_not_break_belong_to_words(folder: Folder) -> None:
    text = "# sent_id = 1\n#begin document\n#Text=so #x\n#nlp HT\n#ai HT\nrocks VERB\n\n10\u00a0000 NUM\n"
    data = load_task(folder({"train.conll": text, "dev.conll": text}), kind="tagging", metric="accuracy")
    assert data.train["words"][:] == [["#nlp", "#ai", "rocks"], ["10\u00a0000"]]


def test_tags_of_single_words_stay_as_they_are(folder: Folder) -> None:
    text = "the DET\nfilm NOUN\n\nends VERB\n"
    data = load_task(folder({"train.conll": text, "dev.conll": text}), kind="tagging", metric="accuracy")
    assert data.task.labels == ("DET", "NOUN", "VERB")
    with pytest.raises(DataError, match="no training split"):
        load_task(folder({"train.conll": text, "dev.conll": text}))


def test_sentences_are_held_out(tmp_path: Path) -> None:
    data = load_task(str(marked.sentences(tmp_path / "all.bio", count=40)))
    assert (len(data.train), len(data.validation), data.test) == (36, 4, None)
    assert "held out 4 of 40 training rows" in data.notes[0]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"train.conll": "a\tO\nb\tB-x\nlonely\n", "dev.conll": WNUT}, "train.conll, line 3: 'lonely'"),
        ({"train.conll": WNUT, "dev.conll": "x\tB-people\n"}, "dev.conll: the training split has no tag 'B-people'"),
        ({"train.conll": "\n\n", "dev.conll": WNUT}, "train.conll: has no words"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(files: Mapping[str, str], match: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=match):
        load_task(folder(files), kind="tagging")


@pytest.mark.parametrize(
    "text",
    ["text\tlabel\na film\tO\nb\tB-x\n", "a\t1\nb\t0\n", "only one column\n\nand another\n", "a\tO\nb\tO\n"],
    ids=["header", "classes", "text", "nothing tagged"],
)
def test_other_columns_are_no_tagged_words(text: str, tmp_path: Path) -> None:
    from compress.data.conll import is_conll

    (tmp_path / "x.tsv").write_text(text)
    assert not is_conll(tmp_path / "x.tsv")


def test_detection_never_raises(tmp_path: Path) -> None:
    from compress.data.conll import is_conll

    (tmp_path / "train.parquet").write_bytes(b"PAR1\x80\x81\xff")
    assert not is_conll(tmp_path / "train.parquet")


def test_a_file_for_each_split_of_any_format(tmp_path: Path) -> None:
    for name, rows in (("a", "good film\tyes\nbad film\tno\n" * 8), ("b", "good\tyes\nbad\tno\n")):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + rows)
    data = load_task(f"train={tmp_path}/a.tsv,dev={tmp_path}/b.tsv,test={tmp_path}/b.tsv")
    assert (data.task.kind, data.name) == ("classification", "a.tsv + b.tsv + b.tsv")
    assert (len(data.train), len(data.validation), data.test is not None) == (16, 2, True)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("train=nowhere.tsv", "no such file"),
        ("trian=a.tsv", "no split 'trian'. Did you mean 'train'"),
        ("test={here}", "names no training split"),
    ],
)
def test_files_for_splits_that_are_not_there(source: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("x")
    with pytest.raises(DataError, match=match):
        load_task(source.format(here=tmp_path / "a.tsv"))


NAMES = ["O", "B-per", "I-per", "B-loc"]
SENTENCES = {
    "tokens": [["Peter", "Blackburn", "left"], ["Bonn", "."], []],
    "pos_tags": [["PROPN", "PROPN", "VERB"], ["PROPN", "PUNCT"], []],
    "ner_tags": [[1, 2, 0], [3, 0], []],
}


def tagged(**columns: object) -> Dataset:
    """As `datasets` loads wnut_17 and conll2003 from the hub: class ids, whose names the features hold."""
    names = datasets.List(ClassLabel(names=NAMES))
    plain = datasets.List(Value("string"))
    return Dataset.from_dict(SENTENCES | columns, Features({"tokens": plain, "pos_tags": plain, "ner_tags": names}))


def test_lists_of_words_and_of_tags_of_a_table() -> None:
    data = load_task({"train": tagged(), "validation": tagged(), "test": tagged().select([1])})
    assert (data.task.kind, data.task.text) == ("tagging", ("words",))
    assert data.task.labels == ("O", "B-loc", "I-loc", "B-per", "I-per")
    assert data.train["words"][:] == SENTENCES["tokens"][:2]
    assert data.train["tags"][:] == [[3, 4, 0], [1, 0]]
    assert data.test is not None
    parts = load_task({"train": tagged(), "validation": tagged()}, label="pos_tags")
    assert parts.task.labels == ("PROPN", "PUNCT", "VERB")


@pytest.mark.parametrize("kind", [None, "tagging"])
def test_lists_in_csv_whether_or_not_the_kind_is_named(kind: Any, folder: Folder) -> None:
    row = "\"['Peter', 'left']\",\"['B-PER', 'O']\"\n"
    text = f"tokens,ner_tags\n{row * 4}"
    data = load_task(folder({"train.csv": text, "dev.csv": text}), kind=kind)
    assert (data.train["words"][0], data.train["tags"][0]) == (["Peter", "left"], [1, 0])


def test_lists_in_json_lines(tmp_path: Path) -> None:
    def write(rows: Sequence[object], *, name: str = "train") -> str:
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return str(tmp_path)

    good = [{"words": ["Peter", "Blackburn"], "tags": ["I-PER", "I-PER"]}] * 2
    write(good, name="dev")
    data = load_task(write(good))
    assert (data.task.labels, data.train["tags"][0]) == (("O", "B-PER", "I-PER"), [1, 2])
    assert "train.jsonl: its tags are rewritten in IOB2" in data.notes
    with pytest.raises(DataError, match=r"train.jsonl, row 3: 2 words but 1 tags; expected a tag for each word"):
        load_task(write([*good, {"words": ["a", "b"], "tags": ["O"]}]))
    with pytest.raises(DataError, match=r"the tags in 'tags' are numbers without names"):
        load_task(write([{"words": ["a", "b"], "tags": [0, 1]}]))
    with pytest.raises(DataError, match=r"files with a word and its tag in each line, or tables with lists"):
        load_task(write([{"text": "a", "label": "x"}] * 2), kind="tagging")


FORMS: Mapping[str, Mapping[str, str]] = {
    "suffix": {"B-PER": "PER-B", "I-PER": "PER-I", "B-LOC": "LOC-B"},
    "underscore": {"B-PER": "B_PER", "I-PER": "I_PER", "B-LOC": "B_LOC"},
    "colon": {"B-PER": "B:PER", "I-PER": "I:PER", "B-LOC": "B:LOC"},
    "lower case": {"B-PER": "b-PER", "I-PER": "i-PER", "B-LOC": "b-LOC", "O": "o"},
    "middle and end": {"I-PER": "M-PER", "B-LOC": "S-LOC"},
    "zero": {"O": "0"},
    "other": {"O": "OTHER"},
    "an underscore": {"O": "_"},
}
TAGGED = [
    [("the", "O"), ("Anna", "B-PER"), ("Berg", "I-PER"), ("in", "O"), ("Rome", "B-LOC")],
    [("so", "O"), (".", "O")],
]


def columns(changes: Mapping[str, str], *, first: str = "") -> str:
    rows = (f"{first}{word}\t{changes.get(tag, tag)}\n" for word, tag in TAGGED[0])
    return "".join(rows) + "\n" + "".join(f"{first}{word}\t{changes.get(tag, tag)}\n" for word, tag in TAGGED[1])


@pytest.mark.parametrize("kind", [None, "tagging"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tags(form: str, kind: Any, folder: Folder) -> None:
    text = columns(FORMS[form])
    data = load_task(folder({"train.txt": text, "dev.txt": text}), kind=kind)
    assert data.task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert data.train["tags"][:] == [[0, 3, 4, 0, 1], [0, 0]]
    assert any("IOB2" in note or "read as O" in note for note in data.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (columns({"O": "PAD"}), "train.txt, line 1: the tag 'PAD' is neither O nor written like 'B-LOC'"),
        (columns({"B-LOC": "LOC"}), "train.txt, line 5: the tag 'LOC' is neither O"),
        (columns({"B-PER": "PER-B", "I-PER": "PER-I"}), "train.txt, line [25]: the tag"),
        ("B-PER Anna\nO was\n\nO in\n", "its first column has tags"),
        ("1\tAnna\tB-PER\tO\n2\tBerg\tI-PER\tO\n\n1\tRome\tB-LOC\tO\n", "numbers its words and has 4 columns"),
        ("the\tB-x\nend\t\n", "train.txt, line 2: 'end'"),
        ("the\tDET\t_\nend\tNOUN\t_\n", "its last column is _ in every line"),
    ],
)
def test_tags_that_may_be_something_else_are_refused(text: str, message: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=message):
        load_task(folder({"train.txt": text, "dev.txt": text}), kind="tagging")


def test_tags_that_only_say_where_an_entity_begins_are_refused(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"the tag 'B' does not say .* write B-TERM and I-TERM"):
        load_task(folder({"train.txt": "a\tB\nfilm\tI\nwas\tO\n\n" * 4}), kind="tagging")


def test_numbers_of_words_are_left_out(folder: Folder) -> None:
    text = "1\tAnna\tB-PER\n2\tsat\tO\n\n1\tRome\tB-LOC\n"
    data = load_task(folder({"train.txt": text, "dev.txt": text}))
    assert data.train["words"][:] == [["Anna", "sat"], ["Rome"]]


def test_plain_tags_with_another_outside(folder: Folder) -> None:
    text = "the\t0\nAnna\tPER\n\nRome\tLOC\n"
    assert load_task(folder({"train.txt": text, "dev.txt": text}), kind="tagging").task.labels == ("LOC", "O", "PER")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("O", "PER-B", "PER-I"), ("O", "B-PER", "I-PER")),
        (("0", "B-PER", "I-PER"), ("O", "B-PER", "I-PER")),
        (("NOUN", "VERB"), ("NOUN", "VERB")),
        (("LABEL_0", "LABEL_1"), None),
        (("O", "0", "B-PER", "I-PER"), None),
        (("[PAD]", "O", "B-PER"), None),
    ],
)
def test_labels_of_a_model(names: tuple[str, ...], found: tuple[str, ...] | None) -> None:
    from compress.data.conll import standard_labels

    if found is not None:
        assert standard_labels(names, "here") == found
        return
    with pytest.raises(DataError, match="here: "):
        standard_labels(names, "here")
