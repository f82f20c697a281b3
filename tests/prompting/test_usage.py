"""What an endpoint is asked and charges for is counted, and limits stop before they are passed."""

import json
from pathlib import Path
from typing import Any

import pytest

from compress.commands import label as labelled
from compress.errors import ArgumentError
from compress.prompting.usage import LimitError, Meter
from tests import command
from tests.prompting.endpoint_server import Reply
from tests.prompting.test_votes import by_word, chat, rows, write


def counted(number: int, path: str, body: dict[str, Any]) -> Reply:
    status, headers, content = by_word(number, path, body)
    return status, headers, json.dumps(json.loads(content) | {"usage": USAGE}).encode()


USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}


def test_what_is_asked_is_counted() -> None:
    meter = Meter(max_calls=3, max_tokens=250)
    meter.reserve(100)
    meter.settle(100, json.dumps({"usage": USAGE}).encode())
    assert (meter.requests, meter.prompt_tokens, meter.completion_tokens, meter.reserved) == (1, 40, 2, 0)
    meter.reserve(100)
    with pytest.raises(LimitError, match="max_tokens, 250"):
        meter.reserve(109)  # 42 + 100 under way + 109
    meter.settle(100, b"{}")
    assert (meter.requests, meter.uncounted, meter.reserved) == (2, 1, 100), "what is not counted stays estimated"
    meter.reserve(1)
    with pytest.raises(LimitError, match="max_calls, 3"):
        meter.reserve(1)


@pytest.mark.parametrize("usage", [None, "many", {"prompt_tokens": -1}, {"prompt_tokens": None}, []])
def test_usage_that_makes_no_sense_is_none(usage: Any) -> None:
    meter = Meter()
    meter.reserve(10)
    meter.settle(10, json.dumps({"usage": usage}).encode())
    assert (meter.prompt_tokens, meter.uncounted, meter.reserved) == (0, 1, 10)


def test_a_limit_stops_the_command_and_nothing_is_paid_twice(serve: Any, tmp_path: Path) -> None:
    server = serve(counted)
    arguments = write(tmp_path, server, concurrency=2)
    words = ["label", *(word for name, value in arguments.items() for word in (f"--{name}", value))]
    stopped = command.run(*words, "--max-calls", "4")
    assert stopped.code == 2
    assert "the next request would exceed max_calls, 4, after 4 requests" in " ".join(stopped.err.split())
    assert not Path(arguments["out"]).exists()
    assert len(server.seen) == 4
    finished = command.run(*words, "--max-calls", "4", "--json")
    assert finished.code == 0, finished.err
    assert len(server.seen) == 6
    found = json.loads(finished.out)
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (2, 80, 4)
    assert (found["asked"], found["texts"]) == (2, 6)
    assert len(rows(arguments)) == 6


def test_a_limit_of_tokens_is_never_passed(serve: Any, tmp_path: Path) -> None:
    server = serve(counted)
    with pytest.raises(LimitError, match="max_tokens, 200"):
        labelled.label(**write(tmp_path, server), max_tokens=200)
    assert 0 < 42 * len(server.seen) <= 200


def test_a_length_of_the_endpoint_s_own_counts(serve: Any, tmp_path: Path) -> None:
    server = serve(counted)
    settings = {"omit": ["max_tokens"], "extra": {"max_completion_tokens": 2000}}
    with pytest.raises(LimitError, match="max_tokens, 2,000"):
        labelled.label(**write(tmp_path, server, **settings), max_tokens=2000)
    assert server.seen == []


def test_limits_may_stand_in_the_endpoint_s_file(serve: Any, tmp_path: Path) -> None:
    server = serve(counted)
    with pytest.raises(LimitError, match="max_calls, 2"):
        labelled.label(**write(tmp_path, server, max_calls=2))
    assert len(server.seen) == 2


def test_requests_that_fail_count_and_cost_no_tokens(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda number, *rest: (503, {}, b"busy") if number < 3 else counted(number, *rest))
    found = labelled.label(**write(tmp_path, server))
    assert found.counts["requests"] == 9
    assert found.counts["prompt_tokens"] == 240


def test_a_plan_counts_requests_and_tokens(serve: Any, tmp_path: Path) -> None:
    server = serve(counted)
    (asking,) = labelled.forecast_labelling(**write(tmp_path, server)).phases
    assert asking.note == (
        "5 rows, 1 were answered now; about 5 requests, with 200 tokens of prompts and 10 of answers"
    )
    assert len(server.seen) == 1


def test_a_plan_without_usage_counts_the_texts(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda *_: chat("good"))
    (asking,) = labelled.forecast_labelling(**write(tmp_path, server)).phases
    assert "about 5 requests, with " in asking.note
    assert asking.note.endswith("tokens of text")


@pytest.mark.parametrize("limit", [{"max_calls": 3}, {"max_tokens": 3}, {"batch": "requests"}])
def test_models_without_an_endpoint_have_no_limits(limit: dict[str, Any], serve: Any, tmp_path: Path) -> None:
    """Before anything is loaded: there is no such model."""
    arguments = write(tmp_path, serve(counted)) | {"teacher": "no-such-model"}
    with pytest.raises(ArgumentError, match=f"{next(iter(limit))}: expected an endpoint's"):
        labelled.label(**arguments, **limit)


def test_a_file_is_no_folder_of_requests(serve: Any, tmp_path: Path) -> None:
    arguments = write(tmp_path, serve(counted))
    with pytest.raises(ArgumentError, match="batch: expected a folder; found the file"):
        labelled.label(**arguments, batch=arguments["data"])
