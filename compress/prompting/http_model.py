"""Query a language or embedding model behind an OpenAI-compatible HTTP endpoint,
described by a strict YAML file:

    url: https://api.example.com/v1
    model: davinci-002
    mode: echo                # what the endpoint can return, see Endpoint
    key: EXAMPLE_API_KEY      # the NAME of the environment variable with the key; the
                              key itself is never stored

The key is sent only in the header of requests to `url`: it is never written to files,
logs or messages, and redirects are not followed."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NotRequired, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
import numpy as np
from anyio.from_thread import start_blocking_portal
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from compress import io as digest
from compress.arrays import Floats
from compress.config import loader
from compress.config.stages import Frozen
from compress.errors import ArgumentError, PromptError, RecipeError, TeacherError
from compress.machine import process_rank
from compress.prompting.answers import (
    LanguageModel,
    Likelihood,
    UnansweredError,
    Votes,
    VotesAfter,
    WrittenText,
    cut_at,
)
from compress.prompting.batch import FOR_ITS_TEXT, BatchFiles, RefusedError
from compress.prompting.usage import LimitError, Meter
from compress.terminal import one_line

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
ADVICE = {
    **dict.fromkeys(
        (401, 403),
        "Is the key in the environment variable that the endpoint file names, and may "
        "it use this model?",
    ),
    **dict.fromkeys(
        (301, 302, 303, 307, 308),
        "It redirects; use the address that it leads to, if you trust it",
    ),
}
"""What to do about a refusal, by the status of the answer."""
NO_LOGPROBS = (
    "`mode: answer` in the endpoint file needs no log-probabilities: it reads the text "
    "of an answer"
)
"""What to do about an endpoint without log-probabilities."""
OWN_KEYS = frozenset(
    (
        *("model", "messages", "prompt", "input", "encoding_format", "stream"),
        *("temperature", "max_tokens", "n", "stop", "echo", "logprobs", "top_logprobs"),
    )
)
"""Keys of a request's body that `extra` may not set."""
FIRST_WAIT = 1.0
LONGEST_WAIT = 120.0
"""Seconds between attempts, doubled from the first wait to the longest. An endpoint
that asks for a longer wait is not asked again."""
MOST_ANSWER_BYTES = 2**22
MOST_PER_BYTE = 64
"""Maximum bytes of an answer, and how many more per byte of the request: `echo` returns
about 80 bytes per token, and a token is seldom one byte."""
BYTES_PER_TOKEN = 3
"""Assumed length of a token, since the endpoint's tokenizer is unknown; English tokens
have about 4 bytes."""
LEAST_MASS = 1e-9
"""The minimum total probability of the tokens that were not listed."""
REPLY_SHOWN = 300
"""Characters of an endpoint's reply that a message quotes."""

PathAndBody = tuple[str, bytes]
"""The path and the body of a request."""
PromptAnswers = tuple[str, Sequence[str]]
"""A prompt, and the answers to choose from."""
PromptVotes = tuple[str, int]
"""A prompt, and the number of votes."""
Question = TypeVar("Question")
Parsed = TypeVar("Parsed")
LogP = Annotated[float, Field(strict=True, le=0.01, allow_inf_nan=False)]
"""The logarithm of a probability; for a certain token, some endpoints round it to a
little above 0."""


class Endpoint(Frozen):
    """The settings of an endpoint.

    mode         echo: /completions scores prompt and answer (`echo` with `logprobs`):
                 exact, for answers of any length; top: /completions lists its `top`
                 next tokens; chat: /chat/completions does. With these two an answer
                 is known by its first token; for one that is not listed, an upper bound
                 of its probability is used. answer: /chat/completions writes an answer,
                 which is read for a label: no log-probabilities are needed. All write
                 texts. embeddings: /embeddings returns the vectors of texts, `batch` at
                 a time, for a teacher without a prompt
    votes        answer: answers to each prompt; the share that names a label is its
                 probability
    temperature  answer: by default 0 for one vote, 1 for several
    answer_tokens  answer: the most tokens of an answer
    extra        settings of the endpoint's own, for the body of every request
    omit         settings of ours that the endpoint refuses
    max_calls, max_tokens  the most requests, and tokens of prompts and answers, of one
                 command
    concurrency  requests in flight at a time
    timeout      seconds from the request to the last byte of its answer
    retries      attempts to repeat a request that failed temporarily or got an unusable
                 answer
    """

    url: str
    model: str
    mode: Literal["echo", "top", "chat", "answer", "embeddings"] = "echo"
    top: int = Field(20, ge=1)
    votes: int = Field(1, ge=1, le=100)
    temperature: float | None = Field(None, ge=0, le=2)
    answer_tokens: int = Field(32, ge=1)
    batch: int = Field(32, ge=1, le=2048)
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    omit: tuple[Literal["temperature", "max_tokens", "n", "stop"], ...] = ()
    max_calls: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    key: str | None = None
    concurrency: int = Field(4, ge=1, le=64)
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(6, ge=0)

    @staticmethod
    def load(path: str) -> "Endpoint":
        """Load an endpoint file. Raises PromptError with every problem in it."""
        file = Path(path)
        if not file.is_file():
            raise PromptError([f"{path}: no such endpoint file"])
        try:
            return Endpoint.model_validate(loader.load_yaml(file))
        except RecipeError as error:
            raise PromptError(error.problems) from error
        except ValidationError as error:  # without the values: one might be the key
            problems = loader.explain(
                file.name, error, lambda _: Endpoint.model_fields, show=False
            )
            raise PromptError(problems) from None

    @field_validator("url")
    @classmethod
    def _is_bare(cls, url: str) -> str:
        """Reject anything that must not be written into the run's record."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL such as https://api.example.com/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "contains more than an address: put a key into the environment "
                "variable that `key` names"
            )
        return url.rstrip("/")

    @field_validator("extra")
    @classmethod
    def _are_not_ours(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := ", ".join(sorted(OWN_KEYS & extra.keys())):
            raise ValueError(
                f"{taken}: set by compress itself. Expected settings of the endpoint's "
                "own; `omit` leaves out temperature, max_tokens, n or stop"
            )
        return extra

    @model_validator(mode="after")
    def _votes_are_written(self) -> "Endpoint":
        own = {"votes", "temperature", "answer_tokens"} & self.model_fields_set
        if own and self.mode != "answer":
            raise ValueError(f"{', '.join(sorted(own))}: only for `mode: answer`")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"votes: {self.votes} answers at temperature 0 are all the same; "
                "leave temperature out"
            )
        return self

    @property
    def chats(self) -> bool:
        """Whether texts are written by /chat/completions."""
        return self.mode in ("chat", "answer")

    @property
    def changes(self) -> list[Any]:
        """List the changes to requests, on which answers depend."""
        return [self.extra, self.omit] if self.extra or self.omit else []

    @property
    def meter(self) -> Meter:
        """Return a new meter with the limits."""
        return Meter(self.max_calls, self.max_tokens)

    @field_validator("key")
    @classmethod
    def _is_a_name(cls, key: str | None) -> str | None:
        if key is not None and not key.isidentifier():
            raise ValueError(
                "expected the name of an environment variable, not the key itself"
            )
        return key


def open_endpoint(path: str) -> "RemoteModel":
    """Open the endpoint file of a language model. Raises PromptError for the file, and
    TeacherError without the key in the process that asks, the first of a launch."""
    endpoint = Endpoint.load(path)
    if endpoint.mode == "embeddings":
        raise PromptError(
            [
                f"{path}: mode: embeddings returns vectors, for which there is no "
                "prompt: omit --prompt"
            ]
        )
    key = None if process_rank() else _find_key(path, endpoint)
    return RemoteModel(endpoint, key, endpoint.meter)


def open_encoder(path: str) -> "RemoteEncoder":
    """Open the endpoint file of an embedding model. Raises as `open_endpoint` does."""
    endpoint = Endpoint.load(path)
    if endpoint.mode != "embeddings":
        raise PromptError(
            [
                f"{path}: mode: {endpoint.mode} is for a language model: give "
                "--prompt, or `mode: embeddings` for vectors"
            ]
        )
    return RemoteEncoder(endpoint, _find_key(path, endpoint), endpoint.meter)


def names_endpoint(name: str) -> bool:
    """Check whether a teacher is named by an endpoint's file."""
    return name.endswith((".yaml", ".yml"))


@dataclass(frozen=True)
class EndpointLimits:
    """Limit what one command asks an endpoint, in addition to the limits in its file.
    batch: the folder of files by which it is asked."""

    max_calls: int | None = None
    max_tokens: int | None = None
    batch: Path | None = None

    def check(self, teacher: str) -> None:
        """Raise ArgumentError for a teacher without an endpoint, or a file as the
        folder."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given and not names_endpoint(teacher):
            raise ArgumentError(
                given[0], "an endpoint's .yaml file as the teacher", teacher
            )
        if self.batch and self.batch.is_file():
            raise ArgumentError("batch", "a folder", f"the file {self.batch}")

    def apply(self, model: LanguageModel) -> LanguageModel:
        """Return the model with these limits."""
        if not isinstance(model, RemoteModel):
            return model
        own = model.meter
        calls = self.max_calls or own.max_calls
        meter = Meter(calls, self.max_tokens or own.max_tokens)
        path = urlsplit(model.endpoint.url).path
        files = BatchFiles(self.batch, path) if self.batch else None
        return replace(model, meter=meter, batch=files)


def spent_on(model: LanguageModel) -> Meter | None:
    """Return what an endpoint has been asked now; None for another model, or if it was
    asked nothing."""
    meter = model.meter if isinstance(model, RemoteModel) else None
    return meter if meter and meter.counts else None


def _find_key(path: str, endpoint: Endpoint) -> str | None:
    if endpoint.key is None:
        return None
    key = os.environ.get(endpoint.key, "").strip()
    if not key:
        raise TeacherError(
            f"{path}: the environment variable {endpoint.key} is empty or not set; put "
            "the key there"
        )
    if not (key.isascii() and key.isprintable()):
        raise TeacherError(
            f"{path}: the environment variable {endpoint.key} holds characters that no "
            "key may have"
        )
    return key


class _TransientError(Exception):
    """A request that may succeed when it is repeated, after at least `wait` seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _AwaitedError(Exception):
    """A request of a batch without an answer."""


class _UnusableError(_TransientError):
    """An unusable answer: the endpoint is not busy, so that longer waits would not
    help."""


@dataclass(frozen=True)
class _Remote(ABC, Generic[Question, Parsed]):
    """A client of an endpoint, with `concurrency` requests in flight; after a permanent
    failure it awaits the rest.

    The size and duration of every answer are limited: whatever the endpoint sends,
    memory stays bounded and the command ends.
    """

    endpoint: Endpoint
    key: str | None = field(default=None, repr=False)
    meter: Meter = field(default_factory=Meter, compare=False)
    batch: BatchFiles | None = None

    @property
    def name(self) -> str:
        return f"{self.endpoint.model} at {urlsplit(self.endpoint.url).hostname}"

    def _encode(self, **body: Any) -> bytes:
        """Return the body of a request, with the endpoint's own settings."""
        own = {key: body[key] for key in body if key not in self.endpoint.omit}
        return json.dumps(
            {"model": self.endpoint.model, **own, **self.endpoint.extra}
        ).encode()

    def _tokens(self, body: bytes) -> int:
        """Estimate the maximum tokens that a request costs."""
        asked = json.loads(body)
        lengths = (asked.get("max_tokens"), asked.get("max_completion_tokens"))
        given = [length for length in lengths if isinstance(length, int)]
        longest = max(given, default=self.endpoint.answer_tokens)
        return len(body) // BYTES_PER_TOKEN + asked.get("n", 1) * longest

    @abstractmethod
    def _request(self, question: Question) -> PathAndBody:
        """Return the path and the body of a request."""

    @abstractmethod
    def _read(self, content: bytes, question: Question) -> Parsed:
        """Parse an answer. Raises ValidationError or ValueError if it is unusable."""

    _remedy: ClassVar[str]
    """Suggest what may help when answers are unusable."""

    def _answers(self, questions: Iterable[Question]) -> Iterator[tuple[int, Parsed]]:
        """Yield (index of the question, its answer) in any order. Raises
        UnansweredError."""
        waiting = iter(enumerate(questions))
        in_flight: dict[Future[Parsed], int] = {}
        failure: TeacherError | None = None
        awaited = False
        # unpacked size has no bounds
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx2.Limits(max_connections=self.endpoint.concurrency)
        async_client = httpx2.AsyncClient(
            headers=headers, limits=limits, timeout=None, follow_redirects=False
        )
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(async_client) as client,
        ):
            stop = portal.call(anyio.Event)
            while True:
                for number, question in islice(
                    waiting,
                    0 if failure else self.endpoint.concurrency - len(in_flight),
                ):
                    in_flight[
                        portal.start_task_soon(self._answer, client, stop, question)
                    ] = number
                if not in_flight:
                    break
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    number = in_flight.pop(future)
                    try:
                        yield number, future.result()
                    except _AwaitedError:
                        awaited = True
                    except LimitError as error:
                        failure = failure or error
                        portal.call(stop.set)
                    except TeacherError as error:
                        failure = failure or UnansweredError(str(error), number)
                        portal.call(stop.set)
        if failure is not None:
            raise failure
        if awaited and self.batch is not None:
            raise self.batch.write()

    async def _answer(
        self, client: httpx2.AsyncClient, stop: anyio.Event, question: Question
    ) -> Parsed:
        """Ask one question, with retries until `stop` is set. Raises TeacherError if it
        is refused or not answered."""
        path, body = self._request(question)
        if self.batch is not None:
            return self._look_up(self.batch, path, body, question)
        for attempt in range(self.endpoint.retries + 1):
            try:
                return self._parse(await self._post(client, path, body), question)
            except _TransientError as error:
                doubled = (
                    FIRST_WAIT
                    if isinstance(error, _UnusableError)
                    else FIRST_WAIT * 2**attempt
                )
                reason = error
                pause = max(min(doubled, LONGEST_WAIT), error.wait)
            if pause > LONGEST_WAIT or attempt == self.endpoint.retries:
                break
            with anyio.move_on_after(pause):
                await stop.wait()
                break
        raise TeacherError(
            f"teacher {self.name}: no answer after {attempt + 1} requests: {reason}. "
            "Earlier answers are cached: rerun the command to continue from there"
        )

    def _look_up(
        self, batch: BatchFiles, path: str, body: bytes, question: Question
    ) -> Parsed:
        """Return the answer in the files of a batch. Raises _AwaitedError if there is
        none yet."""
        identity, content = batch.exchange(path, body)
        if content is None:
            raise _AwaitedError
        try:
            answer = self._parse(content, question)
        except (_TransientError, TeacherError) as error:
            batch.refuse(identity, str(error), path, body)
            raise _AwaitedError from None
        self.meter.settle(0, content)
        return answer

    async def _post(self, client: httpx2.AsyncClient, path: str, body: bytes) -> bytes:
        """Return the body of the answer. Raises _TransientError, or TeacherError if the
        request is refused."""
        content = bytearray()
        most = MOST_ANSWER_BYTES + MOST_PER_BYTE * len(body)
        tokens = self._tokens(body)
        self.meter.reserve(tokens)
        try:
            with anyio.fail_after(self.endpoint.timeout):
                async with client.stream(
                    "POST", f"{self.endpoint.url}/{path}", content=body
                ) as response:
                    async for chunk in response.aiter_raw():
                        content += chunk
                        if len(content) > most:
                            raise _UnusableError(
                                f"its answer is longer than {most:,} bytes"
                            )
        except TimeoutError:
            raise _TransientError(
                f"its answer took longer than {self.endpoint.timeout:g} s"
            ) from None
        except httpx2.HTTPError as error:
            self.meter.reserved -= tokens
            raise _TransientError(
                self._redact(f"{type(error).__name__}: {error}")
            ) from None
        if response.status_code == HTTPStatus.OK:
            self.meter.settle(tokens, bytes(content))
            return bytes(content)
        self.meter.reserved -= tokens  # a refusal costs none
        code = response.status_code
        message = self._redact(content.decode("utf-8", "replace"))
        reason = f"HTTP {code}: {message or response.reason_phrase}"
        if code in RETRIED:
            raise _TransientError(
                reason, _retry_after(response.headers.get("Retry-After"))
            )
        advice = ADVICE.get(code, "Check url, model and mode in the endpoint file")
        if "logprobs" in message:
            advice = NO_LOGPROBS
        message = f"teacher {self.name}: {reason}. {advice}"
        if code in FOR_ITS_TEXT:
            raise RefusedError(message, reason)
        raise TeacherError(message)

    def _parse(self, content: bytes, question: Question) -> Parsed:
        """Parse an answer. Raises _UnusableError with the reason if that fails."""
        try:
            return self._read(content, question)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            problem = (
                f"{where}: {first['msg']}, not {first['input']!r}"
                if where
                else first["msg"]
            )
        except ValueError as error:
            problem = str(error)
        answer = self._redact(content.decode("utf-8", "replace"))
        reason = (
            f"its answer {answer!r} does not fit `mode: {self.endpoint.mode}` "
            f"({self._redact(problem)}); {self._remedy}"
        )
        if _is_paid(content):
            raise TeacherError(f"teacher {self.name}: {reason}")
        raise _UnusableError(reason)

    def _redact(self, text: str) -> str:
        """Shorten a reply of the endpoint for a message, without the key."""
        return one_line(
            (text.replace(self.key, "***") if self.key else text)[: 10 * REPLY_SHOWN],
            REPLY_SHOWN,
        )


@dataclass(frozen=True)
class RemoteModel(_Remote[PromptAnswers, Likelihood]):
    """A language model behind an endpoint, as a LanguageModel."""

    longest: None = None
    parameters: None = None
    _remedy = (
        "not every endpoint returns log-probabilities, and another mode (echo, top, "
        f"chat) may work. {NO_LOGPROBS}"
    )

    @property
    def digest(self) -> str:
        own = self.endpoint
        return digest.hash_value([own.url, own.model, own.mode, own.top, *own.changes])

    def count(self, text: str) -> int:
        return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def askers(self, processes: int) -> int:
        """Return 1: `concurrency` is the limit of the whole launch, and one process
        reaches it."""
        return 1

    def likelihoods(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> Iterator[tuple[int, Likelihood]]:
        return self._answers((prompt, answers) for prompt in prompts)

    def write(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, WrittenText]]:
        writer = RemoteWriter(
            self.endpoint,
            self.key,
            self.meter,
            self.batch,
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        return writer.texts(prompts)

    @property
    def voter(self) -> "RemoteVoter | None":
        """Return the model whose written answers are read for labels; None in other
        modes."""
        if self.endpoint.mode != "answer":
            return None
        return RemoteVoter(self.endpoint, self.key, self.meter, self.batch)

    def _request(self, question: PromptAnswers) -> PathAndBody:
        (prompt, answers) = question
        top = self.endpoint.top
        if self.endpoint.mode == "echo":
            texts = [prompt + answer for answer in answers]
            scored = {"prompt": texts, "echo": True, "logprobs": 1}
            return "completions", self._encode(temperature=0, max_tokens=0, **scored)
        if self.endpoint.mode == "top":
            listed = {"prompt": prompt, "logprobs": top}
            return "completions", self._encode(temperature=0, max_tokens=1, **listed)
        asked = _as_chat(prompt) | {"logprobs": True, "top_logprobs": top}
        return "chat/completions", self._encode(temperature=0, max_tokens=1, **asked)

    def _read(self, content: bytes, question: PromptAnswers) -> Likelihood:
        prompt, answers = question
        if self.endpoint.mode == "echo":
            return sum_echoed(
                _Echo.model_validate_json(content).choices, prompt, answers
            )
        if self.endpoint.mode == "top":
            return find_listed(
                _Top.model_validate_json(content).tokens.items(), answers
            )
        chat = _Chat.model_validate_json(content)
        return find_listed(
            ((each["token"], each["logprob"]) for each in chat.tokens), answers
        )


@dataclass(frozen=True, kw_only=True)
class RemoteWriter(_Remote[str, WrittenText]):
    """A language model behind an endpoint that writes texts: by /chat/completions in
    mode chat, else by /completions."""

    max_new_tokens: int
    stop: Sequence[str]
    _remedy = "expected an OpenAI-compatible completion with a finish_reason"

    def texts(self, prompts: Sequence[str]) -> Iterator[tuple[int, WrittenText]]:
        """Yield (index of the prompt, the text after it) in any order. Raises
        TeacherError."""
        return self._answers(prompts)

    def _request(self, question: str) -> PathAndBody:
        chats = self.endpoint.chats
        asked: dict[str, Any] = _as_chat(question) if chats else {"prompt": question}
        if self.stop:
            asked["stop"] = list(self.stop)
        body = self._encode(temperature=0, max_tokens=self.max_new_tokens, **asked)
        return "chat/completions" if chats else "completions", body

    def _read(self, content: bytes, question: str) -> WrittenText:
        completion = _Completion.model_validate_json(content)
        text, stopped = cut_at(completion.text, self.stop)
        return WrittenText(text, stopped or completion.finish_reason == "stop")


@dataclass(frozen=True)
class RemoteVoter(_Remote[PromptVotes, Votes]):
    """A chat model behind an endpoint that answers a prompt several times."""

    _remedy = "expected an OpenAI-compatible list of choices with a message each"

    @property
    def wanted(self) -> VotesAfter:
        """Return what is asked about each prompt."""
        endpoint = self.endpoint
        settings = (endpoint.votes, self._temperature, endpoint.answer_tokens)
        return VotesAfter(self.votes, list(map(str, settings)))

    def votes(self, prompts: Sequence[str]) -> Iterator[tuple[int, Votes]]:
        """Yield (index of the prompt, its answers) in any order. Raises
        TeacherError."""
        return self._answers((prompt, self.endpoint.votes) for prompt in prompts)

    @property
    def _temperature(self) -> float:
        if self.endpoint.temperature is not None:
            return self.endpoint.temperature
        return 0.0 if self.endpoint.votes == 1 else 1.0

    async def _answer(
        self, client: httpx2.AsyncClient, stop: anyio.Event, question: PromptVotes
    ) -> Votes:
        """Ask again for the answers that are missing because an endpoint ignores `n`.

        A refusal is an answer without a label if other texts of the command were
        answered; before that, it may be one of all texts.
        """
        prompt, left = question
        texts: tuple[str, ...] = ()
        while left > len(texts):
            asked = (prompt, left - len(texts))
            try:
                texts += (await super()._answer(client, stop, asked)).texts
            except RefusedError as error:
                if self.batch is None and not self.meter.answers:
                    with anyio.move_on_after(FIRST_WAIT):  # others may be answered
                        await stop.wait()
                    if not self.meter.answers:
                        raise
                texts += (error.reason,) * (left - len(texts))
        return Votes(texts)

    def _request(self, question: PromptVotes) -> PathAndBody:
        prompt, votes = question
        asked: dict[str, Any] = _as_chat(prompt) | ({"n": votes} if votes > 1 else {})
        body = self._encode(
            temperature=self._temperature,
            max_tokens=self.endpoint.answer_tokens,
            **asked,
        )
        return "chat/completions", body

    def _read(self, content: bytes, question: PromptVotes) -> Votes:
        written = _Votes.model_validate_json(content).choices
        texts = [choice["message"].get("content") or "" for choice in written]
        return Votes(tuple(texts[: question[1]]))


@dataclass(frozen=True)
class RemoteEncoder(_Remote[Sequence[str], Floats]):
    """An embedding model behind an endpoint."""

    _remedy = "expected an OpenAI-compatible list of vectors, one for each text"

    @property
    def digest(self) -> str:
        endpoint = self.endpoint
        return digest.hash_value([endpoint.url, endpoint.model, *endpoint.changes])

    def vectors(self, texts: Sequence[str]) -> Iterator[tuple[int, Floats]]:
        """Yield (index of a batch's first text, its vectors (B, E)) in any order.
        Raises TeacherError."""
        size = self.endpoint.batch
        for number, vectors in self._answers(
            texts[at : at + size] for at in range(0, len(texts), size)
        ):
            yield number * size, vectors

    def _request(self, question: Sequence[str]) -> PathAndBody:
        body = self._encode(input=list(question), encoding_format="float")
        return "embeddings", body

    def _read(self, content: bytes, question: Sequence[str]) -> Floats:
        data = sorted(
            _Embeddings.model_validate_json(content).data,
            key=lambda item: item["index"],
        )
        if [item["index"] for item in data] != list(range(len(question))):
            raise ValueError(f"data: {len(data)} vectors for {len(question)} texts")
        if len({len(item["embedding"]) for item in data}) != 1:
            raise ValueError("data: the vectors differ in length")
        return np.array([item["embedding"] for item in data], dtype=np.float32)


class _Tokens(TypedDict):
    tokens: list[str]
    token_logprobs: list[LogP | None]


class _Choice(TypedDict):
    index: int
    text: NotRequired[str | None]
    logprobs: _Tokens


class _Listed(TypedDict):
    token: str
    logprob: LogP


class _Embedded(TypedDict):
    index: int
    embedding: Annotated[
        list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)
    ]


class _Embeddings(BaseModel):
    data: list[_Embedded]


class _Completion(BaseModel):
    text: str = Field(
        validation_alias=AliasChoices(
            AliasPath("choices", 0, "text"),
            AliasPath("choices", 0, "message", "content"),
        )
    )
    finish_reason: str = Field(
        validation_alias=AliasPath("choices", 0, "finish_reason")
    )


class _Message(TypedDict, total=False):
    content: str | None


class _Vote(TypedDict):
    message: _Message


class _Votes(BaseModel):
    choices: list[_Vote] = Field(min_length=1)


class _Echo(BaseModel):
    choices: list[_Choice]


class _Top(BaseModel):
    tokens: dict[str, LogP] = Field(
        min_length=1,
        validation_alias=AliasPath("choices", 0, "logprobs", "top_logprobs", 0),
    )


class _Chat(BaseModel):
    tokens: list[_Listed] = Field(
        min_length=1,
        validation_alias=AliasPath(
            "choices", 0, "logprobs", "content", 0, "top_logprobs"
        ),
    )


def _as_chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _is_paid(content: bytes) -> bool:
    """Check whether an unusable answer is complete: the endpoint charges for it, and
    would return the same again."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and bool(
        answer.get("choices") or answer.get("data")
    )


def _retry_after(header: str | None) -> float:
    """Parse the seconds that the server asks to wait, from a number or a date; return 0
    if it is neither."""
    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = (
                parsedate_to_datetime(str(header)) - datetime.now(UTC)
            ).total_seconds()
        except (ValueError, TypeError):  # not a date, or one without a time zone
            seconds = 0.0
    return seconds if seconds > 0 else 0.0  # also for nan


def sum_echoed(
    choices: Sequence[Mapping[str, Any]], prompt: str, answers: Sequence[str]
) -> Likelihood:
    """Sum the log-probabilities of each answer's tokens, without the prompt's.

    If a token spans the end of the prompt, all answers are scored from its start.
    Raises ValueError for tokens that are not the answer's, or have no log-probability.
    """
    if len(choices) != len(answers):
        raise ValueError(f"choices: {len(choices)}, not {len(answers)}")
    ordered = sorted(choices, key=lambda each: each["index"])
    texts = [prompt + answer for answer in answers]
    places = list(map(_find_starts, ordered, texts))
    begin = min(
        max([0, *(start for start in starts if start <= len(prompt))])
        for starts in places
    )
    scores = []
    for choice, text, starts in zip(ordered, texts, places, strict=True):
        tokens = choice["logprobs"]["tokens"]
        log_p = choice["logprobs"]["token_logprobs"]
        if len(tokens) != len(log_p):
            raise ValueError("choices: tokens and token_logprobs differ in length")
        own = [at for at, start in enumerate(starts) if begin <= start < len(text)]
        written = _read_spaces("".join(tokens[at] for at in own))
        if written != _read_spaces(text[begin:]):
            raise ValueError(f"choices: tokens {written!r}, not {text[begin:]!r}")
        scores.append([log_p[at] for at in own])
    if any(None in row for row in scores):
        raise ValueError("choices: an answer's token without a log-probability")
    return Likelihood(tuple(map(sum, scores)), tuple(map(len, scores)))


def _find_starts(choice: Mapping[str, Any], text: str) -> list[int]:
    """Find where each token begins in an echoed text. They are counted from its end,
    where the answer is: before it, servers count special tokens, such as <s>, and the
    parts of a character, also in `text_offset`; some give only -1 there."""
    lengths = list(map(len, choice["logprobs"]["tokens"]))
    end = max(len(text), len(choice.get("text") or ""))
    return list(accumulate(lengths, initial=end - sum(lengths)))[:-1]


def _read_spaces(token: str) -> str:
    """Replace the characters that stand for a space in a token."""
    return token.replace("▁", " ").replace("Ġ", " ")


def find_listed(tokens: Any, answers: Sequence[str]) -> Likelihood:
    """Look up the answers among the likeliest next tokens, (token, log-probability),
    ignoring spaces.

    An answer that is not itself a listed token counts by the tokens that begin it and
    no other answer: an upper bound of its probability. If there are none, the bound is
    the probability of the least likely listed token, or all remaining probability if
    less.
    """
    listed = [
        (_read_spaces(str(token)).strip(), float(log_p)) for token, log_p in tokens
    ]
    remaining = 1 - math.fsum(math.exp(log_p) for _, log_p in listed)
    bound = min(math.log(max(remaining, LEAST_MASS)), *(log_p for _, log_p in listed))
    words = [answer.strip() for answer in answers]
    log_p_A = []
    absent = 0
    for word in words:
        others = [other for other in words if other != word]
        whole = [math.exp(log_p) for token, log_p in listed if token == word]
        begun = [
            math.exp(log_p)
            for token, log_p in listed
            if token
            and word.startswith(token)
            and not any(other.startswith(token) for other in others)
        ]
        mass = math.fsum(whole or begun)
        absent += not mass
        log_p_A.append(math.log(mass) if mass > 0 else bound)
    return Likelihood(tuple(log_p_A), (1,) * len(answers), absent)
