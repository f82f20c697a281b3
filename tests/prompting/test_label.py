"""`compress label`: a file of texts and the probabilities of their labels."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.commands import label as labelled
from compress.data import load_task
from compress.errors import DataError, OutputError, PromptError, TeacherError
from compress.teachers.labelling import load_texts
from tests import command, tiny
from tests.prompting import language_models
from tests.prompting.language_models import FakeLanguageModel

PROMPT = """
template: "Review: {{ text }}\\nSentiment: {{ label }}"
labels: {negative: bad, positive: good}
normalise: none
calibrate: none
"""
KNOWS = {"good": (-3.0, -1.0), "bad": (-1.0, -3.0)}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeLanguageModel:
    """Whatever the teacher is called, this one answers."""
    fake = FakeLanguageModel(KNOWS, (-1.5, -1.0))
    monkeypatch.setattr(labelled, "open_language_model", lambda *_, **__: fake)
    return fake


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    return str(tmp_path / "prompt.yaml")


def label(data: str, prompt: str, out: Path, **changes: Any) -> list[dict[str, Any]]:
    labelled.label(**{"teacher": "told", "prompt": prompt, "data": data, "out": out, **changes})
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def lines(path: Path, *texts: str) -> str:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


def test_every_text_gets_its_probabilities(model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    data = lines(tmp_path / "texts.txt", "a good film", "", "so bad, 'é' {{ text }}", "strange\ttoo")
    found = label(data, prompt, tmp_path / "deep" / "out.jsonl")
    assert [row["text"] for row in found] == ["a good film", "so bad, 'é' {{ text }}", "strange\ttoo"]
    assert [row["label"] for row in found] == ["positive", "negative", "positive"]
    assert found[0]["probabilities"] == pytest.approx({"negative": 0.119203, "positive": 0.880797})
    assert model.asked[1] == "Review: so bad, 'é' {{ text }}\nSentiment:"


def test_the_file_is_training_data(model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    texts = [f"a {word} film {n}" for n in range(10) for word in ("good", "bad")]
    label(lines(tmp_path / "texts.txt", *texts), prompt, tmp_path / "train.jsonl")
    data = load_task(str(tmp_path / "train.jsonl"))
    assert data.task.labels == ("negative", "positive")
    assert all(row["label"] == ("good" in row["text"]) for row in data.train)


def test_labels_in_the_data_score_the_teacher(model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    data = tiny.reviews(tmp_path / "data")
    found = label(data, prompt, tmp_path / "out.jsonl")
    assert len(found) == 96
    assert all(set(row) == {"text", "label", "probabilities"} for row in found)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_tables_without_labels(kind: str, model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    from datasets import Dataset

    rows = {"sentence": ["a good film", "a bad film"], "id": [7, 8]}
    path = tmp_path / f"rows.{kind}"
    table = Dataset.from_dict(rows)
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[kind](str(path))
    assert [row["label"] for row in label(str(path), prompt, tmp_path / "out.jsonl")] == ["positive", "negative"]


def test_pairs(model: FakeLanguageModel, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PROMPT.replace("{{ text }}", "{{ text }} / {{ text_pair }}"), encoding="utf-8")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"premise": "a film", "hypothesis": "is good"}\n', encoding="utf-8")
    (row,) = label(str(path), str(tmp_path / "p.yaml"), tmp_path / "out.jsonl")
    assert (row["text"], row["text_pair"], row["label"]) == ("a film", "is good", "positive")
    assert model.asked == ["Review: a film / is good\nSentiment:"]


def test_a_corpus_is_one_text_a_document(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines(folder / "a.txt", "one line", "and another", "", "second document")
    texts = load_texts(str(folder))
    assert [" ".join(text.split()) for text in texts.rows["text"]] == ["one line and another", "second document"]
    assert texts.labelled is None


def test_a_txt_file_with_columns_is_a_table(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.txt", "text\tlabel", *(f"a film of {n}\t{n % 2}" for n in range(20)))
    assert load_texts(path).labelled is not None
    assert load_texts(path, text=["text"]).rows[0]["text"].startswith("a film of")
    assert load_texts(path, label="label").labelled is not None


def test_useless_teachers_are_refused_or_reported(model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    texts = lines(tmp_path / "texts.txt", *(f"a good film {n}" for n in range(25)))
    with pytest.raises(TeacherError, match="gives every one of 25"):
        label(texts, prompt, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert len(label(texts, prompt, tmp_path / "out.jsonl", gate="warn")) == 25
    model.says = {"good": (-1.0, -3.0), "bad": (-3.0, -1.0)}  # the wrong way round
    model.digest = "wrong"
    with pytest.raises(TeacherError, match=r"accuracy 0\.000 against the labels in the data"):
        label(tiny.reviews(tmp_path / "data"), prompt, tmp_path / "other.jsonl")


def test_equal_probabilities_are_no_answer(model: FakeLanguageModel, prompt: str, tmp_path: Path, capsys: Any) -> None:
    model.otherwise = (-1.5, -1.5)
    texts = [f"a {word} film {n}" for n in range(9) for word in ("good", "bad")]
    found = label(lines(tmp_path / "texts.txt", *texts, "a film"), prompt, tmp_path / "out.jsonl", console=Console())
    assert found[-1] == {"text": "a film", "label": None, "probabilities": None}
    assert all(row["label"] for row in found[:-1])
    assert "did not answer 1 of 19" in capsys.readouterr().out
    with pytest.raises(TeacherError, match="does not answer 3 of 4"):
        label(lines(tmp_path / "few.txt", "a film", "x", "y", "good"), prompt, tmp_path / "few.jsonl")
    assert len(label(str(tmp_path / "few.txt"), prompt, tmp_path / "few.jsonl", gate="warn")) == 4


def test_a_file_that_is_there_is_not_written_over(model: FakeLanguageModel, prompt: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious", encoding="utf-8")
    with pytest.raises(OutputError, match="already exists"):
        label(lines(tmp_path / "t.txt", "x"), prompt, out)
    assert out.read_text() == "precious"
    assert model.asked == []


def test_errors_come_before_the_model_is_opened(tmp_path: Path, prompt: str) -> None:
    with pytest.raises(PromptError):
        label("intents", "sentimet", tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="no such file"):
        label(str(tmp_path / "none.jsonl"), prompt, tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="it contains no text"):
        label(lines(tmp_path / "empty.txt", " "), prompt, tmp_path / "out.jsonl")


def test_from_the_command_line(prompt: str, tmp_path: Path) -> None:
    """With a real (tiny, random) GPT-2; a second time nothing is asked."""
    teacher = language_models.saved(tmp_path / "gpt2", language_models.gpt2(), language_models.byte_bpe())
    data = lines(tmp_path / "texts.txt", "a good film", "a bad film", "another one")
    words = ["label", "--teacher", teacher, "--prompt", prompt, "--data", data, "--precision", "fp32"]
    result = command.run(*words, "--out", str(tmp_path / "out.jsonl"))
    assert result.code == 0, result.err
    assert "3 texts:" in result.out
    assert "3 prompts in" in result.out
    again = command.run(*words, "--out", str(tmp_path / "again.jsonl"))
    assert "prompts in" not in again.out
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()
    refused = command.run(*words, "--out", str(tmp_path / "out.jsonl"))
    assert refused.code == 2
    assert "already exists" in refused.err
