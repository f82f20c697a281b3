"""A language model over HTTP, against a server that says what a test has written."""

import json
import math
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from compress.errors import PromptError, TeacherError
from compress.prompting import http_model
from compress.prompting.answers import Likelihood, LikelihoodOf, ask
from compress.prompting.http_model import Endpoint, RemoteModel, find_listed, open_endpoint, sum_echoed
from tests.prompting import language_models
from tests.prompting.endpoint_server import KEY, Reply, Server, ok

ANSWERS = (" Positive", " Negative")


def model(server: Server, **changes: Any) -> RemoteModel:
    return RemoteModel(Endpoint(**{"url": server.url, "model": "m", "key": "TEST_KEY", "retries": 2, **changes}), KEY)


def found(speaker: RemoteModel, prompts: Sequence[str], answers: Sequence[str] = ANSWERS) -> list[Likelihood]:
    known = dict(speaker.likelihoods(prompts, answers))
    return [known[number] for number in range(len(prompts))]


def scripted(log_p: float = -0.5) -> Callable[[int, str, dict[str, Any]], Reply]:
    """Every word, with the space before it, is a token of the same log-probability."""

    def reply(_: int, __: str, body: dict[str, Any]) -> Reply:
        choices = []
        for index, text in enumerate(body["prompt"]):
            tokens = [word if not at else " " + word for at, word in enumerate(text.split(" "))]
            shown = {"tokens": tokens, "token_logprobs": [None, *[log_p] * (len(tokens) - 1)]}
            choices.append({"index": index, "logprobs": shown})
        return ok({"choices": choices[::-1]})

    return reply


def echoed(tokens: list[Any], log_p: list[Any], **more: Any) -> dict[str, Any]:
    return {"index": 0, "logprobs": {"tokens": tokens, "token_logprobs": log_p}, **more}


def told(tokens: list[Any], log_p: list[Any]) -> dict[str, Any]:
    return {"choices": [echoed(tokens, log_p)]}


def test_echo_scores_the_answer_s_tokens_alone(serve: Any) -> None:
    server = serve(scripted())
    (likelihood,) = found(model(server), ["Is it good ?"], (" yes", " not at all"))
    assert likelihood == Likelihood((-0.5, -1.5), (1, 3))
    path, body, _ = server.seen[0]
    assert path == "/v1/completions"
    assert body == {
        "model": "m", "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1,
        "prompt": ["Is it good ? yes", "Is it good ? not at all"],
    }  # fmt: skip


def test_a_model_of_ours_behind_the_endpoint_is_the_model_here(serve: Any) -> None:
    """The server answers from a tiny GPT-2 as such servers do; the likelihoods must be those of the local path."""
    import torch

    tokenizer, lm = language_models.byte_bpe(), language_models.gpt2()

    def reply(_: int, __: str, body: dict[str, Any]) -> Reply:
        choices = []
        for index, text in enumerate(body["prompt"]):
            ids = tokenizer(text)["input_ids"]
            with torch.no_grad():
                logits = lm(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            log_p = [None, *(float(logits[at, token]) for at, token in enumerate(ids[1:]))]
            shown = {"tokens": [tokenizer.decode([i]) for i in ids], "token_logprobs": log_p}
            choices.append({"index": index, "logprobs": shown})
        return ok({"choices": choices})

    answers, prompts = (" Positive", " not so very good", "ly"), ("Review: a film\nSentiment:", "Answer: ver")
    ours = dict(language_models.local(lm, tokenizer).likelihoods(prompts, answers))
    for number, theirs in enumerate(found(model(serve(reply)), prompts, answers)):
        assert theirs.log_p == pytest.approx(ours[number].log_p, abs=1e-3)
        assert theirs.tokens == ours[number].tokens


def test_a_token_across_the_boundary_moves_the_beginning_for_all() -> None:
    # "ab" + "cd": the first is read as a|bcd, the second, "ab" + "xy", as a|b|xy
    one = echoed(["a", "bcd"], [None, -2.0])
    other = echoed(["a", "b", "xy"], [None, -1.0, -3.0], index=1)
    assert sum_echoed([one, other], "ab", ("cd", "xy")) == Likelihood((-2.0, -4.0), (1, 2))


def test_tokens_after_the_answer_are_ignored() -> None:
    shown = echoed(["ab", "cd", "ef"], [None, -1.0, -7.0], text="abcdef")
    assert sum_echoed([shown], "ab", ("cd",)) == Likelihood((-1.0,), (1,))


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="OpenAI"),
        pytest.param(["<|begin_of_text|>"], id="vLLM counts it in text_offset"),
        pytest.param(["<s>", ""], id="vLLM, SentencePiece"),
    ],
)
def test_special_tokens_before_a_text_move_nothing(before: list[str]) -> None:
    """Nor do the parts of a character, which servers write as one character each."""
    head = [*before, "Is", "\ufffd", "\ufffd", "\ufffd", "?"]
    choices = [
        echoed([*head, "▁yes"], [None, *[-5.0] * (len(head) - 1), -0.5]),
        echoed([*head, "Ġn", "o"], [None, *[-5.0] * (len(head) - 1), -1.0, -0.25], index=1),
    ]
    assert sum_echoed(choices, "Is🙂?", (" yes", " no")) == Likelihood((-0.5, -1.25), (1, 2))


def test_every_part_of_a_character_counts() -> None:
    shown = echoed(["a", ":", "", "", "🙂"], [None, -9.0, -1.0, -2.0, -4.0])
    assert sum_echoed([shown], "a:", ("🙂",)) == Likelihood((-7.0,), (3,))


@pytest.mark.parametrize("tokens", [["token_id:7", "token_id:9"], ["a", " other"], []])
def test_tokens_that_are_not_the_answer_s_are_refused(tokens: list[str]) -> None:
    with pytest.raises(ValueError, match="choices: tokens '"):
        sum_echoed([echoed(tokens, [None, -1.0][: len(tokens)])], "a", (" b",))


@pytest.mark.parametrize("mode", ["top", "chat"])
def test_listed_tokens(mode: str, serve: Any) -> None:
    probabilities = {" Positive": math.log(0.6), "▁Positive": math.log(0.1), "the": math.log(0.2)}

    def reply(_: int, path: str, body: dict[str, Any]) -> Reply:
        if path == "/v1/completions":
            assert body["logprobs"] == 5
            return ok({"choices": [{"logprobs": {"top_logprobs": [probabilities]}}]})
        assert body["messages"] == [{"role": "user", "content": "Good?"}]
        listed = [{"token": token, "logprob": log_p} for token, log_p in probabilities.items()]
        return ok({"choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}]})

    (likelihood,) = found(model(serve(reply), mode=mode, top=5), ["Good?"])
    assert likelihood.log_p == pytest.approx((math.log(0.7), math.log(0.1)))
    assert likelihood.absent == 1
    assert likelihood.tokens == (1, 1)


def test_unlisted_answers_get_an_upper_bound() -> None:
    assert find_listed([("a", math.log(0.5)), ("b", math.log(0.4))], (" c",)).log_p[0] == pytest.approx(math.log(0.1))
    assert find_listed([("a", math.log(0.5)), ("b", math.log(0.01))], (" c",)).log_p[0] == pytest.approx(math.log(0.01))
    certain = find_listed([("a", 0.0)], (" a", " c"))
    assert certain.log_p[0] == 0
    assert certain.log_p[1] == pytest.approx(math.log(http_model.LEAST_MASS))
    assert certain.absent == 1


@pytest.mark.parametrize("refusal", [(429, {"Retry-After": "0.02"}), (503, {}), (500, {"Retry-After": "rubbish"})])
def test_a_refusal_that_passes_is_tried_again(refusal: tuple[int, dict[str, str]], serve: Any) -> None:
    answer = scripted()
    server = serve(lambda n, path, body: (*refusal, b"busy") if n < 2 else answer(n, path, body))
    assert found(model(server, concurrency=1), ["a b"])[0].log_p == (-0.5, -0.5)
    assert len(server.seen) == 3


def test_retry_after_is_honoured() -> None:
    assert http_model._retry_after("7") == 7
    assert 1 <= http_model._retry_after(formatdate(usegmt=True, timeval=time.time() + 3)) <= 3
    assert http_model._retry_after("1e999") > http_model.LONGEST_WAIT


@pytest.mark.parametrize(
    "header", ["nan", "-5", "-inf", "0", "soon", "", None, "Thu, 01 Jan 1970 00:00:00 GMT", "9" * 5000]
)
def test_retry_after_that_makes_no_sense_leaves_the_waiting_to_us(header: str | None) -> None:
    assert http_model._retry_after(header) in {0.0, math.inf}


def test_waits_double_whatever_the_endpoint_asks_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that asks for no wait, or for one in the past, was asked again at once."""
    waits: list[float] = []
    move_on_after = anyio.move_on_after
    monkeypatch.setattr(http_model.anyio, "move_on_after", lambda wait: waits.append(wait) or move_on_after(0))
    server = serve(lambda n, *_: (429, {"Retry-After": ["nan", "-5", "0"][n % 3]}, b"busy"))
    with pytest.raises(TeacherError):
        found(model(server, retries=4), ["a"])
    assert waits == pytest.approx([0.01, 0.02, 0.04, 0.08])


def test_an_endpoint_that_asks_for_an_hour_is_left_alone(serve: Any) -> None:
    server = serve(lambda *_: (429, {"Retry-After": "3600"}, b"quota"))
    with pytest.raises(TeacherError, match=r"no answer after 1 requests: HTTP 429: quota\..*continue from there"):
        found(model(server), ["a"])


def test_a_server_that_is_not_there() -> None:
    speaker = RemoteModel(Endpoint(url="http://127.0.0.1:9/v1", model="m", retries=0))
    with pytest.raises(TeacherError, match="no answer after 1 requests"):
        found(speaker, ["a"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"<html>no</html>", "Invalid JSON"),
        (b'{"choices": [', "Invalid JSON"),
        (b"[" * 20_000, "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        ({"choices": [{"index": 0, "logprobs": None}]}, "choices.0.logprobs"),
        ({"error": "no"}, "choices: Field required"),
        ([], "object"),
        ({"choices": []}, "choices: 0, not 1"),
        (told(["a", " b"], [None]), "differ in length"),
        (told([], []), "choices: tokens '', not 'a b'"),
        (told(["a", " b"], [None, None]), "without a log-probability"),
        (told(["a", " b"], [None, 1000]), "not 1000"),
        (told(["a", " b"], [None, math.nan]), "not nan"),
        (told(["a", " b"], [None, -math.inf]), "not -inf"),
        (told(["a", " b"], [None, "-0.5"]), "not '-0.5'"),
        (told(["a", " b"], [None, True]), "not True"),
        (told(["a", 10**400], [None, -1.0]), "tokens.1"),
    ],
)
def test_malformed_answers_are_retried_and_explained(answer: Any, expected: str, serve: Any) -> None:
    server = serve(lambda *_: ok(answer))
    with pytest.raises(TeacherError) as caught:
        found(model(server), ["a"], (" b",))
    assert expected in str(caught.value)
    assert "teacher m at 127.0.0.1" in str(caught.value)
    paid = isinstance(answer, dict) and bool(answer.get("choices"))
    assert len(server.seen) == (1 if paid else 3), "what is paid for would be the same again"
    assert ("no answer after 3 requests" in str(caught.value)) == (not paid)


@pytest.mark.parametrize("mode", ["top", "chat"])
@pytest.mark.parametrize("log_p", [1000, math.nan, "-1", None])
def test_malformed_log_probabilities_are_quoted(mode: str, log_p: Any, serve: Any) -> None:
    top = {"top_logprobs": [{"a": log_p}], "content": [{"top_logprobs": [{"token": "a", "logprob": log_p}]}]}
    server = serve(lambda *_: ok({"choices": [{"logprobs": top}]}))
    with pytest.raises(TeacherError, match=f"m at 127.*not {log_p!r}"):
        found(model(server, mode=mode, retries=0), ["a"])


def test_one_malformed_answer_is_retried(serve: Any) -> None:
    answer = scripted()

    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        status, headers, content = answer(number, path, body)
        return status, headers, content[: len(content) // 2] if number == 1 else content

    server = serve(reply)
    assert len(found(model(server, concurrency=1), ["a b", "c d", "e f"])) == 3
    assert len(server.seen) == 4


@contextmanager
def endless(chunk: bytes, pause: float, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Iterator[str]:
    """The address of a server that sends `head`, then `chunk` for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        connection.sendall(head)
                        while not over.wait(pause):
                            connection.sendall(chunk)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_endpoint_that_never_stops_sending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_model, "MOST_ANSWER_BYTES", 2**20)
    with endless(b" " * 2**16, 0.0) as url:
        speaker = RemoteModel(Endpoint(url=url, model="m", retries=0))
        tracemalloc.start()
        try:
            with pytest.raises(TeacherError, match="longer than"):
                found(speaker, ["a"])
            assert tracemalloc.get_traced_memory()[1] < 2**23
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_the_timeout_is_of_the_whole_answer(head: bytes) -> None:
    """Each byte comes well within it, of the body or of a header."""
    with endless(b" ", 0.02, head) as url:
        began = time.monotonic()
        with pytest.raises(TeacherError, match=r"longer than 0\.2 s"):
            found(RemoteModel(Endpoint(url=url, model="m", retries=0, timeout=0.2)), ["a"])
        assert time.monotonic() - began < 3


def test_an_endpoint_s_words_cannot_speak_to_the_terminal(serve: Any) -> None:
    server = serve(lambda *_: (400, {}, b"\x1b]0;owned\x07\x1b[2J\xc2\x9b" + b"a" * 10_000 + KEY.encode()))
    with pytest.raises(TeacherError) as caught:
        found(model(server), ["a"])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("status", "expected"),
    [(401, "Is the key in the environment variable"), (404, "Check url, model and mode"), (400, "Check url")],
)
def test_a_permanent_refusal_is_reported_without_the_key(status: int, expected: str, serve: Any) -> None:
    server = serve(lambda *_: (status, {}, f"wrong key {KEY}".encode()))
    with pytest.raises(TeacherError, match=rf"HTTP {status}: wrong key \*\*\*") as caught:
        found(model(server), ["a"])
    assert expected in str(caught.value)
    assert KEY not in str(caught.value)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "reply", [(400, {}, b"'logprobs' is not supported with this model"), ok({"choices": [{"logprobs": None}]})]
)
def test_an_endpoint_without_log_probabilities_is_asked_for_answers(reply: Reply, serve: Any) -> None:
    server = serve(lambda *_: reply)
    with pytest.raises(TeacherError, match="`mode: answer` in the endpoint file needs no log-probabilities"):
        found(model(server, mode="chat"), ["a"])
    assert len(server.seen) == 1


def test_settings_of_the_endpoint_s_own(serve: Any) -> None:
    server = serve(scripted())
    changed = model(server, extra={"top_k": 1, "provider": {"order": ["x"]}}, omit=("temperature",))
    found(changed, ["a b"])
    _, body, _ = server.seen[0]
    assert body["top_k"] == 1
    assert body["provider"] == {"order": ["x"]}
    assert "temperature" not in body
    assert len({changed.digest, model(server).digest, model(server, omit=("temperature",)).digest}) == 3


def test_a_redirect_is_not_followed(serve: Any) -> None:
    other = serve(scripted())
    server = serve(lambda *_: (302, {"Location": other.url + "/completions"}, b""))
    with pytest.raises(TeacherError, match="It redirects; use the address that it leads to"):
        found(model(server), ["a"])
    assert other.seen == []


def test_the_key_is_in_the_header_and_nowhere_else(
    serve: Any, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(scripted())
    file = tmp_path / "endpoint.yaml"
    file.write_text(f"url: {server.url}\nmodel: m\nkey: TEST_KEY\n", encoding="utf-8")
    speaker = open_endpoint(str(file))
    ask(speaker, ["a b"], LikelihoodOf(ANSWERS), console=Console())
    _, body, headers = server.seen[0]
    assert headers["Authorization"] == f"Bearer {KEY}"
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("soft-labels" in str(path) for path in kept)
    assert all(KEY.encode() not in path.read_bytes() for path in kept)
    result = capsys.readouterr()
    assert KEY not in json.dumps(body) + repr(speaker) + speaker.name + speaker.digest + result.out + result.err


def test_no_key_no_header(serve: Any) -> None:
    server = serve(scripted())
    found(RemoteModel(Endpoint(url=server.url, model="m")), ["a b"])
    assert "Authorization" not in server.seen[0][2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"url: http://h/v1\nmodel: m\nkey: {KEY}", "key: expected the name of an environment variable"),
        ("url: http://user:word@h/v1\nmodel: m", "url: contains more than an address"),
        ("url: http://h/v1?key=word\nmodel: m", "url: contains more than an address"),
        ("url: ftp://h\nmodel: m", "url: expected a URL such as"),
        ("url: http://h\nmodell: m", "modell: no such setting. Did you mean 'model'?"),
        ("url: http://h\nmode: ehco", "model: is missing"),
        (
            "url: http://h\nmodel: m\nmode: ehco",
            "mode: Input should be 'echo', 'top', 'chat', 'answer' or 'embeddings'",
        ),
        ("[]", "valid dictionary"),
        ("url: http://h\nmodel: m\nextra: {temperature: 0.3, top_k: 4}", "temperature: set by compress itself"),
        ("url: http://h\nmodel: m\nextra: {day: 2020-01-01}", "extra.day"),
        ("url: http://h\nmodel: m\nomit: [messages]", "omit[0]: Input should be"),
        ("url: http://h\nmodel: m\nvotes: 3", "votes: only for `mode: answer`"),
        ("url: http://h\nmodel: m\nmode: answer\nvotes: 3\ntemperature: 0", "are all the same"),
        ("url: http://h\nmodel: m\nmax_calls: 0", "max_calls"),
    ],
)
def test_an_endpoint_file_with_a_mistake(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PromptError) as caught:
        Endpoint.load(str(tmp_path / "e.yaml"))
    assert expected in str(caught.value)
    assert KEY not in str(caught.value)
    assert "word@" not in str(caught.value)


def test_a_missing_key_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "e.yaml").write_text("url: http://h\nmodel: m\nkey: NO_SUCH_KEY", encoding="utf-8")
    with pytest.raises(TeacherError, match="NO_SUCH_KEY is empty or not set"):
        open_endpoint(str(tmp_path / "e.yaml"))
    with pytest.raises(PromptError, match="no such endpoint file"):
        open_endpoint(str(tmp_path / "f.yaml"))


def test_requests_are_under_way_together(serve: Any) -> None:
    together = threading.Barrier(3, timeout=5)
    answer = scripted()

    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        together.wait()  # passes when three requests are here at once
        return answer(number, path, body)

    assert len(found(model(serve(reply), concurrency=3), ["a b", "c d", "e f"])) == 3


def test_answers_before_a_failure_are_cached(serve: Any) -> None:
    """The third prompt fails for good: the others are kept, and a second run asks for it alone."""
    answer, broken = scripted(), threading.Event()
    broken.set()

    def reply(number: int, path: str, body: dict[str, Any]) -> Reply:
        if broken.is_set() and body["prompt"][0].startswith("third"):
            return 400, {}, b"content filter"
        return answer(number, path, body)

    server, prompts = serve(reply), ["first a", "second b", "third c"]
    speaker = model(server, concurrency=1)
    with pytest.raises(TeacherError, match=r"row 3 of 3.*third c.*content filter"):
        ask(speaker, prompts, LikelihoodOf(ANSWERS), console=Console(quiet=True))
    broken.clear()
    before = len(server.seen)
    found = ask(speaker, prompts, LikelihoodOf(ANSWERS), console=Console(quiet=True))
    assert [body["prompt"][0] for _, body, _ in server.seen[before:]] == ["third c Positive"]
    assert [each.log_p for each in found.answers] == [(-0.5, -0.5)] * 3


def test_a_failure_stops_waiting_requests(serve: Any) -> None:
    server = serve(lambda *_: (400, {}, b"no"))
    with pytest.raises(TeacherError):
        found(model(server, concurrency=2), [f"p {n}" for n in range(200)])
    assert len(server.seen) < 50


def test_tokens_are_estimated_from_bytes() -> None:
    speaker = RemoteModel(Endpoint(url="http://h", model="m"))
    assert speaker.count("four") == 2
    assert speaker.count("字字") == 2
    assert speaker.longest is None


def test_the_page_lists_every_field_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "labelling.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page.partition("## The endpoint file")[2], re.MULTILINE))
    missing = []
    for name, field in Endpoint.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if field.is_required() else f"`{default:g}`" if type(default) in (int, float) else None
        if name not in listed or (shown and listed[name] != shown):
            missing.append((name, shown))
    assert missing == []
