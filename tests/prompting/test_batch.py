"""Requests and answers by the files of a batch, against a script that answers such files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compress.commands import label as labelled
from compress.errors import TeacherError
from compress.prompting import batch
from compress.prompting.batch import AwaitedError
from tests import command
from tests.prompting.endpoint_server import Server
from tests.prompting.test_usage import counted
from tests.prompting.test_votes import rows, write

Line = dict[str, Any]
SERVER = Server(counted, url="http://127.0.0.1:9/openai/v1")


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    return write(folder, SERVER, **settings) | {"batch": str(folder / "batch")}


def requests(folder: Path) -> list[Line]:
    files = sorted((folder / "batch").glob("requests-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def answer(line: Line) -> Line:
    body = json.loads(SERVER.reply(0, line["url"], line["body"])[2])
    return {"id": "b", "custom_id": line["custom_id"], "response": {"status_code": 200, "body": body}, "error": None}


def put(folder: Path, name: str, lines: Sequence[Line]) -> None:
    (folder / "batch" / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_requests_are_written_and_answers_read(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    words = ["label", *(word for name, value in given.items() for word in (f"--{name}", value))]
    first = command.run(*words, "--json")
    assert first.code == 0, first.err
    assert json.loads(first.out)["request_files"] == [str(tmp_path / "batch" / "requests-1.jsonl")]
    assert not Path(given["out"]).exists()
    lines = requests(tmp_path)
    assert len(lines) == 6
    assert set(lines[0]) == {"custom_id", "method", "url", "body"}
    assert (lines[0]["method"], lines[0]["url"]) == ("POST", "/openai/v1/chat/completions")
    assert len({line["custom_id"] for line in lines}) == 6
    assert all(len(line["custom_id"]) <= 64 for line in lines)
    assert lines[0]["body"]["model"] == "m"
    put(tmp_path, "output.jsonl", [answer(line) for line in reversed(lines)])
    second = command.run(*words, "--json")
    assert second.code == 0, second.err
    assert [row["label"] for row in rows(given)] == ["positive", "negative"] * 3
    found = json.loads(second.out)
    assert (found["asked"], found["requests"], found["prompt_tokens"]) == (6, 0, 240)


def test_missing_and_failed_answers_are_named_and_asked_for_again(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError) as awaited:
        labelled.label(**given)
    assert awaited.value.complete
    lines = requests(tmp_path)
    expired = {"custom_id": lines[0]["custom_id"], "response": None, "error": {"code": "batch_expired"}}
    refused = answer(lines[1]) | {"response": {"status_code": 429, "body": {"error": {"message": "slow down"}}}}
    useless = answer(lines[2]) | {"response": {"status_code": 200, "body": {"choices": []}}}
    put(tmp_path, "errors.jsonl", [expired, refused, useless])
    put(tmp_path, "output.jsonl", [answer(line) for line in lines[4:]])
    words = ["label", *(word for name, value in given.items() for word in (f"--{name}", value))]
    shown = command.run(*words)
    assert shown.code == 2
    said = " ".join(shown.err.split())
    assert f"1 requests have no answer: {lines[3]['custom_id']}" in said
    assert "3 requests failed" in said
    assert "batch_expired" in said
    assert "slow down" in said
    left = requests(tmp_path)
    assert {line["custom_id"] for line in left} == {line["custom_id"] for line in lines[:4]}
    put(tmp_path, "output-2.jsonl", [answer(line) for line in left])
    (tmp_path / "batch" / "output.jsonl").unlink()  # what was read is cached
    labelled.label(**given)
    assert len(rows(given)) == 6


def test_answers_to_other_requests_are_not_taken(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    put(tmp_path, "output.jsonl", [answer(line) for line in requests(tmp_path)])
    with pytest.raises(AwaitedError, match="6 requests have no answer"):
        labelled.label(**arguments(tmp_path, model="another"))
    labelled.label(**arguments(tmp_path))


@pytest.mark.parametrize("line", ["{", '{"text": "a good film"}', '{"custom_id": "x", "method": "POST"}', "[]"])
def test_a_file_of_something_else_is_refused(line: str, tmp_path: Path) -> None:
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    (tmp_path / "batch" / "notes.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(TeacherError, match=r"notes.jsonl: line 1: expected an answer with custom_id"):
        labelled.label(**given)


def test_large_batches_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MOST_REQUESTS", 4)
    with pytest.raises(AwaitedError) as awaited:
        labelled.label(**arguments(tmp_path))
    assert [len(file.read_text(encoding="utf-8").splitlines()) for file in awaited.value.files] == [4, 2]


def test_likelihoods_and_content_free_texts_are_one_batch(tmp_path: Path) -> None:
    """All that a prompt needs is asked for in the first batch: a second would take another day."""
    given = arguments(tmp_path, mode="chat")
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    lines = requests(tmp_path)
    assert len(lines) == 6 + 3

    def listed(line: Line) -> Line:
        question = line["body"]["messages"][0]["content"]
        good, bad = "good film" in question, "bad film" in question
        top = [{"token": "good", "logprob": -0.5 - bad}, {"token": "bad", "logprob": -0.5 - good}]
        body = {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
        return answer(line) | {"response": {"status_code": 200, "body": body}}

    put(tmp_path, "output.jsonl", [listed(line) for line in lines])
    labelled.label(**given)
    assert [row["label"] for row in rows(given)] == ["positive", "negative"] * 3


def test_a_plan_writes_no_requests(tmp_path: Path) -> None:
    (asking,) = labelled.forecast_labelling(**arguments(tmp_path)).phases
    assert "about 6 requests" in asking.note
    assert not (tmp_path / "batch").exists()


@pytest.mark.parametrize("name", ["requests-1-output.jsonl", "requests-1.jsonl"])
def test_answers_are_read_and_kept_under_any_name(name: str, tmp_path: Path) -> None:
    """Also under the name of the requests, which are removed when others are written."""
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    lines = requests(tmp_path)
    put(tmp_path, name, [answer(line) for line in lines[1:]])
    paid = (tmp_path / "batch" / name).read_bytes()
    with pytest.raises(AwaitedError, match=f"1 requests have no answer: {lines[0]['custom_id']}"):
        labelled.label(**given)
    if name != "requests-1.jsonl":
        assert (tmp_path / "batch" / name).read_bytes() == paid
    put(tmp_path, "rest.jsonl", [answer(lines[0])])
    labelled.label(**given)
    assert len(rows(given)) == 6


def test_empty_lines_and_a_byte_order_mark_are_no_answers(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    text = "\r\n\r\n".join(json.dumps(answer(line)) for line in requests(tmp_path))
    (tmp_path / "batch" / "output.jsonl").write_text(f"{text}\n\n", encoding="utf-8-sig")
    labelled.label(**given)
    assert len(rows(given)) == 6


def test_a_refusal_for_its_text_is_an_answer_without_a_label(tmp_path: Path) -> None:
    """As over HTTP: a filter of content would refuse it again, for ever."""
    given = arguments(tmp_path)
    with pytest.raises(AwaitedError):
        labelled.label(**given)
    lines = requests(tmp_path)
    filtered = {"status_code": 400, "body": {"error": {"code": "content_filter"}}}
    put(tmp_path, "errors.jsonl", [answer(line) | {"response": filtered} for line in lines])
    with pytest.raises(AwaitedError, match="6 requests failed"):  # all: the fault is not a text's
        labelled.label(**given)
    put(tmp_path, "output.jsonl", [answer(line) for line in lines[2:]])
    put(tmp_path, "errors.jsonl", [answer(lines[0]) | {"response": filtered}])
    with pytest.raises(AwaitedError, match="1 requests have no answer") as awaited:
        labelled.label(**given)
    assert "failed" not in str(awaited.value)
    assert [line["custom_id"] for line in requests(tmp_path)] == [lines[1]["custom_id"]]
    put(tmp_path, "more.jsonl", [answer(lines[1])])
    found = labelled.label(**given)
    assert "content_filter" in " ".join(found.notes)
    assert [row["label"] is None for row in rows(given)] == [True] + [False] * 5
