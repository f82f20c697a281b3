"""Endpoints without log-probabilities: a written answer, or several, is read for a label."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from compress.commands import label as labelled
from compress.errors import PromptError, TeacherError
from compress.prompting.http_model import Endpoint, RemoteModel
from compress.prompting.labels import TaskPrompt
from compress.prompting.prompt import Prompt
from compress.prompting.votes import LabelReader, VotingTeacher, prompted_teacher
from tests.prompting.endpoint_server import Reply, Server, ok

PROMPT = """
instruction: Answer with positive or negative alone.
template: "Review: {{ text }}\\nSentiment: {{ label }}"
labels: {negative: bad, positive: [good, very good]}
"""


def prompt_of(labels: dict[str, Any], **settings: Any) -> TaskPrompt:
    made = Prompt(name="p", template="{{ text }} {{ label }}", labels=labels, **settings)
    names = [made.aliases.get(name, name) for name in labels]
    return TaskPrompt.from_prompt(made, names, (), pair=False)


def chat(*texts: str | None, usage: dict[str, int] | None = None) -> Reply:
    """Answer as chat endpoints do, with a choice for each text."""
    choices = [{"index": at, "message": {"content": text}, "finish_reason": "stop"} for at, text in enumerate(texts)]
    return ok({"choices": choices, **({"usage": usage} if usage else {})})


def write(folder: Path, server: Server, **settings: Any) -> dict[str, Any]:
    """Write a prompt, texts and the endpoint's file; return the arguments of `label`."""
    (folder / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    texts = [f"a {word} film {n}" for n in range(3) for word in ("good", "bad")]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    content = {"url": server.url, "model": "m", "mode": "answer", "concurrency": 1, **settings}
    (folder / "endpoint.yaml").write_text(json.dumps(content), encoding="utf-8")
    files = {"teacher": "endpoint.yaml", "prompt": "prompt.yaml", "data": "texts.txt", "out": "out.jsonl"}
    return {name: str(folder / file) for name, file in files.items()}


def rows(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(arguments["out"]).read_text(encoding="utf-8").splitlines()]


def by_word(_: int, __: str, body: dict[str, Any]) -> Reply:
    question = body["messages"][0]["content"]
    return chat("Positive." if "good film" in question else '"NEGATIVE"', usage={"prompt_tokens": 30})


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("positive", 1), ("POSITIVE", 1), ('"Positive."', 1), ("**positive**\n\nThe review praises", 1), ("bad", 0),
        ("very good", 1), ("Very  GOOD!", 1), ("Sentiment: negative", 0), ('{"label": "negative"}', 0), ("0", 0),
        ("Positive (the reviewer loved it)", 1), ("negative - it is slow", 0), ("<think>good?</think>\nbad", 0),
        ("neg", 0), ("", None), ("I cannot tell", None), ("not good", None), ("positive: negative", None),
        ("positive or negative", None), ("goodness", None), ("very", None),
    ],
)  # fmt: skip
def test_an_answer_is_read_for_a_label(answer: str, label: int | None) -> None:
    words = {"negative": "bad", "positive": ["good", "very good"]}
    reader = LabelReader(prompt_of(words, aliases={"0": "negative", "neg": "negative"}))
    assert reader.read(answer) == label


@pytest.mark.parametrize(
    ("labels", "answers"),
    [
        (("c", "c++", "c#"), {"c": 0, "C++": 1, "c#": 2, "'c++'": None, "C.": 0}),
        (("+", "-"), {"+": 0, "-": 1, "?": None}),
        (("us", "US"), {"us": 0, "US": 1, "Us": None}),
        (("card_payment_fee", "top-up"), {"Card payment fee": 0, "top up": 1, "top_up.": 1}),
        (("1", "2", "10"), {"1": 0, "10.": 2, "2 stars": None}),
        (("日本", "中国"), {"日本。": 0, "「中国」": 1}),
        (("0", "1"), {"0.8": None, "0.": 0, "-1": None, "- 1": 1, "1: sure": 1}),
        (("3", "4"), {"3.7/5": None, "4.5": None, "4 (of 5)": 1}),
        (
            ("spam", "ham"),
            {"Spam: no": None, "Spam: 0": None, "spam: false": None, "Spam: it sells": 0, "Is it? ham": None},
        ),
        (("positive", "negative"), {'{"positive": 0.1, "negative": 0.9}': None, "Positive: 10%, negative: 90%": None}),
    ],
)
def test_names_that_differ_in_marks_alone_are_kept_apart(labels: tuple[str, ...], answers: dict[str, Any]) -> None:
    reader = LabelReader(prompt_of({label: label for label in labels}))
    assert {answer: reader.read(answer) for answer in answers} == answers


def test_one_answer_is_a_certain_label(serve: Any, tmp_path: Path) -> None:
    server = serve(by_word)
    arguments = write(tmp_path, server)
    found = labelled.label(**arguments)
    assert [row["label"] for row in rows(arguments)] == ["positive", "negative"] * 3
    assert rows(arguments)[0]["probabilities"] == {"negative": 0.0, "positive": 1.0}
    assert len(server.seen) == 6, "nothing is calibrated, and no answer is asked for twice"
    path, body, _ = server.seen[0]
    assert path == "/v1/chat/completions"
    assert {name: body[name] for name in body if name != "messages"} == {
        "model": "m", "temperature": 0.0, "max_tokens": 32,
    }  # fmt: skip
    assert found.counts["requests"] == 6
    assert found.counts["prompt_tokens"] == 180


def test_the_shares_of_several_answers_are_probabilities(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda *_: chat("good", "good", "bad", None, "I am not sure"))
    arguments = write(tmp_path, server, votes=5)
    labelled.label(**arguments, gate="warn")
    assert server.seen[0][1]["n"] == 5
    assert server.seen[0][1]["temperature"] == 1.0
    assert rows(arguments)[0]["probabilities"] == pytest.approx({"negative": 1 / 3, "positive": 2 / 3}, abs=1e-6)


def test_an_endpoint_that_ignores_the_number_of_answers_is_asked_again(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda number, *_: chat(["good", "bad", "good"][number % 3]))
    arguments = write(tmp_path, server, votes=3, omit=["n"])
    labelled.label(**arguments, gate="warn")
    assert len(server.seen) == 18
    assert "n" not in server.seen[0][1]
    assert rows(arguments)[0]["probabilities"] == pytest.approx({"negative": 1 / 3, "positive": 2 / 3}, abs=1e-6)


def test_answers_without_a_label_are_counted_and_quoted(serve: Any, tmp_path: Path) -> None:
    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        return chat("It depends, says the\x1b[2J model") if number == 5 else by_word(number, path, body)

    server = serve(reply)
    arguments = write(tmp_path, server)
    found = labelled.label(**arguments)
    assert rows(arguments)[-1]["label"] is None
    assert any("1 of 6 answers of m at 127.0.0.1 name no label: 'It depends, says the" in note for note in found.notes)
    assert len(server.seen) == 6, "temperature 0 answers the same again"
    other = write(tmp_path, serve(lambda *_: chat("No idea")), model="n") | {"out": str(tmp_path / "other.jsonl")}
    with pytest.raises(TeacherError, match=r"6 of 6 answers .* name no label: 'No idea' \(6\)\. Let the prompt name"):
        labelled.label(**other)


def test_other_words_for_the_labels_cost_nothing(serve: Any, tmp_path: Path) -> None:
    """The texts are cached, not what was read in them."""
    server = serve(lambda *_: chat("Splendid!"))
    arguments = write(tmp_path, server)
    with pytest.raises(TeacherError, match="name no label"):
        labelled.label(**arguments)
    asked = len(server.seen)
    (tmp_path / "prompt.yaml").write_text(PROMPT.replace("very good", "splendid"), encoding="utf-8")
    labelled.label(**arguments, gate="warn")
    assert len(server.seen) == asked
    assert {row["label"] for row in rows(arguments)} == {"positive"}


def test_an_answer_without_a_message_is_not_paid_for_again(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda *_: ok({"choices": [{"text": "good"}]}))
    with pytest.raises(TeacherError, match="choices with a message each"):
        labelled.label(**write(tmp_path, server))
    assert len(server.seen) == 1


def test_probabilities_are_finite(serve: Any) -> None:
    endpoint = Endpoint(url=serve(by_word).url, model="m", mode="answer", votes=1)
    teacher = prompted_teacher(
        RemoteModel(endpoint), prompt_of({"negative": "bad", "positive": "good"}), Console(quiet=True)
    )
    assert isinstance(teacher, VotingTeacher)
    soft = teacher.label([("a good film",), ("x",)])
    assert np.isfinite(soft.log_p_NC).all()
    assert np.exp(soft.log_p_NC).sum(axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert soft.entropy == pytest.approx(0, abs=1e-4)


def test_vectors_are_no_answers(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("url: http://h\nmodel: m\nmode: embeddings\nvotes: 3", encoding="utf-8")
    with pytest.raises(PromptError, match="only for `mode: answer`"):
        Endpoint.load(str(tmp_path / "e.yaml"))


def test_a_refused_text_is_unanswered(serve: Any, hastened: None, tmp_path: Path) -> None:
    """A filter of contents stops no table; what refuses all texts stops at once."""

    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        refused = "good film 2" in body["messages"][0]["content"]
        return (400, {}, b"content_filter") if refused else by_word(number, path, body)

    arguments = write(tmp_path, serve(reply))
    done = labelled.label(**arguments, console=Console(quiet=True))
    assert any("name no label: 'HTTP 400: content_filter' (1)" in note for note in done.notes)
    found = {row["text"]: row["label"] for row in rows(arguments)}
    assert found.pop("a good film 2") is None
    assert set(found.values()) == {"negative", "positive"}
    server = serve(lambda *_: (400, {}, b"no such setting"))
    Path(arguments["out"]).unlink()
    with pytest.raises(TeacherError, match="no such setting"):
        labelled.label(**write(tmp_path, server), console=Console(quiet=True))
    assert len(server.seen) == 1
