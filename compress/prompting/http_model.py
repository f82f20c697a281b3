"""A language model, or one that gives vectors, behind an OpenAI-compatible HTTP endpoint, as a strict YAML file says:

    url: https://api.example.com/v1
    model: davinci-002
    mode: echo                # what the endpoint can tell, see Endpoint
    key: EXAMPLE_API_KEY      # the NAME of the environment variable that holds the key; the key itself is kept nowhere

The key goes into the header of requests to `url` alone: not into files, logs or messages, nor where a redirect leads.
"""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
import numpy as np
from anyio.from_thread import start_blocking_portal
from numpy.typing import NDArray
from pydantic import AliasPath, BaseModel, Field, ValidationError, field_validator
from typing_extensions import TypedDict

from compress import io as digest
from compress.config import loader
from compress.config.recipe import Frozen
from compress.errors import PromptError, RecipeError, TeacherError
from compress.prompting.answers import Likelihood, UnansweredError
from compress.terminal import one_line

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT = 1.0
LONGEST_WAIT = 120.0
"""Seconds: waiting doubles from the first to the longest. An endpoint that asks for more is left alone."""
MOST_BYTES = 2**22
MOST_PER_BYTE = 64
"""Bytes that an answer may have, and how many more for each byte of its request: `echo` tells about 80 bytes of each
token, and a token is seldom one byte."""
BYTES_PER_TOKEN = 3
"""An endpoint's tokenizer is not here: texts are cut as if tokens were this short, English ones are about 4 bytes."""
LEAST = 1e-9
"""The probability that rounding may leave for tokens that were not listed."""
SHOWN = 300
"""Characters of an endpoint's own words that a message repeats."""

Question = TypeVar("Question")
Answer = TypeVar("Answer")
LogP = Annotated[float, Field(strict=True, le=0.01, allow_inf_nan=False)]
"""The logarithm of a probability; the rounding of some endpoints puts a certain token a little above 0."""


class Endpoint(Frozen):
    """The endpoint to ask.

    mode         echo: /completions scores prompt and answer (`echo` with `logprobs`): exact, for answers of any length;
                 top: /completions lists its `top` next tokens; chat: /chat/completions does. For these two an answer
                 must be one token; one not listed counts as the most that is left for it, and is counted;
                 embeddings: /embeddings gives the vectors of texts, `batch` at a time, for a teacher without a prompt
    concurrency  requests under way at a time
    timeout      seconds from the request to the last byte of its answer
    retries      of a request that failed for a reason that may pass, or that was answered with what is no answer
    """

    url: str
    model: str
    mode: Literal["echo", "top", "chat", "embeddings"] = "echo"
    top: int = Field(20, ge=1)
    batch: int = Field(32, ge=1, le=2048)
    key: str | None = None
    concurrency: int = Field(4, ge=1, le=64)
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(6, ge=0)

    @staticmethod
    def load(path: str) -> "Endpoint":
        """Load an endpoint file. Raises PromptError with every problem of it."""
        file = Path(path)
        if not file.is_file():
            raise PromptError([f"{path}: no such endpoint file"])
        try:
            return Endpoint.model_validate(loader.load_yaml(file))
        except RecipeError as error:
            raise PromptError(error.problems) from error
        except ValidationError as error:  # without what was given: it might be the key
            problems = loader.explain(file.name, error, lambda _: Endpoint.model_fields, show=False)
            raise PromptError(problems) from None

    @field_validator("url")
    @classmethod
    def _is_bare(cls, url: str) -> str:
        """Refuse what must not be written into the run's record."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL such as https://api.example.com/v1")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("holds more than an address: a key belongs into the environment variable that `key` names")
        return url.rstrip("/")

    @field_validator("key")
    @classmethod
    def _is_a_name(cls, key: str | None) -> str | None:
        if key is not None and not key.isidentifier():
            raise ValueError("expected the name of an environment variable, not the key itself")
        return key


def open_endpoint(path: str) -> "RemoteModel":
    """Open a language model's endpoint file.

    Raises PromptError for the file, TeacherError where the environment lacks the key.
    """
    endpoint = Endpoint.load(path)
    if endpoint.mode == "embeddings":
        raise PromptError([f"{path}: mode: embeddings gives vectors, which no prompt asks for: leave out --prompt"])
    return RemoteModel(endpoint, _find_key(path, endpoint))


def open_encoder(path: str) -> "RemoteEncoder":
    """Open the endpoint file of a model that gives vectors. Raises as `open_endpoint` does."""
    endpoint = Endpoint.load(path)
    if endpoint.mode != "embeddings":
        raise PromptError(
            [f"{path}: mode: {endpoint.mode} asks a language model: give --prompt, or `mode: embeddings` for vectors"]
        )
    return RemoteEncoder(endpoint, _find_key(path, endpoint))


def _find_key(path: str, endpoint: Endpoint) -> str | None:
    if endpoint.key is None:
        return None
    key = os.environ.get(endpoint.key, "").strip()
    if not key:
        raise TeacherError(f"{path}: the environment variable {endpoint.key} is empty or not set; put the key there")
    if not (key.isascii() and key.isprintable()):
        raise TeacherError(f"{path}: the environment variable {endpoint.key} holds characters that no key may have")
    return key


class _TransientError(Exception):
    """A request that may be answered when it is repeated, after `wait` seconds or more."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _UnusableError(_TransientError):
    """An answer came and is none: the endpoint is not busy, and waiting longer each time would not help."""


@dataclass(frozen=True)
class _Remote(ABC, Generic[Question, Answer]):
    """Whatever answers at an endpoint. Questions are asked `concurrency` at a time; when one fails for good, those
    under way are awaited.

    No answer may be longer, or take longer, than `limit` and `endpoint.timeout` say: whatever the endpoint sends,
    memory stays bounded and the command ends.
    """

    endpoint: Endpoint
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.endpoint.model} at {urlsplit(self.endpoint.url).hostname}"

    @abstractmethod
    def _request(self, question: Question) -> tuple[str, bytes]:
        """Return the path to post to, and what."""

    @abstractmethod
    def _read(self, content: bytes, question: Question) -> Answer:
        """Read an answer. Raises ValidationError, ValueError for what is none."""

    _remedy: ClassVar[str]
    """What may help where answers are none."""

    def _answers(self, questions: Iterable[Question]) -> Iterator[tuple[int, Answer]]:
        """Yield (number of the question, its answer) in any order. Raises UnansweredError."""
        waiting = iter(enumerate(questions))
        under_way: dict[Future[Answer], int] = {}
        failed: UnansweredError | None = None
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._client()) as client:
            over = portal.call(anyio.Event)
            while True:
                for number, question in islice(waiting, 0 if failed else self.endpoint.concurrency - len(under_way)):
                    under_way[portal.start_task_soon(self._answer, client, over, question)] = number
                if not under_way:
                    break
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    number = under_way.pop(future)
                    try:
                        yield number, future.result()
                    except TeacherError as error:
                        failed = failed or UnansweredError(str(error), number)
                        portal.call(over.set)
        if failed is not None:
            raise failed

    def _client(self) -> httpx2.AsyncClient:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}  # what is unpacked has no bounds
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx2.Limits(max_connections=self.endpoint.concurrency)
        return httpx2.AsyncClient(headers=headers, limits=limits, timeout=None, follow_redirects=False)

    async def _answer(self, client: httpx2.AsyncClient, over: anyio.Event, question: Question) -> Answer:
        """Ask one question. Raises TeacherError when it refuses, or does not answer after all
        retries; none is made any more when all is `over`."""
        path, asked = self._request(question)
        for attempt in range(self.endpoint.retries + 1):
            try:
                return self._understand(await self._post(client, path, asked), question)
            except _TransientError as error:
                doubled = FIRST_WAIT if isinstance(error, _UnusableError) else FIRST_WAIT * 2**attempt
                reason, pause = error, max(min(doubled, LONGEST_WAIT), error.wait)
            if pause > LONGEST_WAIT or attempt == self.endpoint.retries:
                break
            with anyio.move_on_after(pause):
                await over.wait()
                break
        raise TeacherError(
            f"teacher {self.name}: no answer after {attempt + 1} requests: {reason}. What was answered before is kept: "
            "the same command goes on from there"
        )

    async def _post(self, client: httpx2.AsyncClient, path: str, body: bytes) -> bytes:
        """Return the bytes of the endpoint's answer. Raises _TransientError; TeacherError when it refuses for good."""
        content, most = bytearray(), MOST_BYTES + MOST_PER_BYTE * len(body)
        try:
            with anyio.fail_after(self.endpoint.timeout):
                async with client.stream("POST", f"{self.endpoint.url}/{path}", content=body) as response:
                    async for chunk in response.aiter_raw():
                        content += chunk
                        if len(content) > most:
                            raise _UnusableError(f"its answer is longer than {most:,} bytes")
        except TimeoutError:
            raise _TransientError(f"its answer took longer than {self.endpoint.timeout:g} s") from None
        except httpx2.HTTPError as error:
            raise _TransientError(self._redact(f"{type(error).__name__}: {error}")) from None
        if response.status_code == HTTPStatus.OK:
            return bytes(content)
        said = self._redact(content.decode("utf-8", "replace")) or response.reason_phrase
        reason = f"HTTP {response.status_code}: {said}"
        if response.status_code in RETRIED:
            raise _TransientError(reason, _retry_after(response.headers.get("Retry-After")))
        raise TeacherError(f"teacher {self.name}: {reason}{_advice(response.status_code)}")

    def _understand(self, content: bytes, question: Question) -> Answer:
        """Read an answer. Raises _UnusableError for what is none, with what is wrong with it."""
        try:
            return self._read(content, question)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            problem = f"{where}: {first['msg']}, not {first['input']!r}" if where else first["msg"]
        except ValueError as error:
            problem = str(error)
        answer = self._redact(content.decode("utf-8", "replace"))
        raise _UnusableError(
            f"its answer {answer!r} is none that `mode: {self.endpoint.mode}` reads ({self._redact(problem)}); "
            f"{self._remedy}"
        )

    def _redact(self, text: str) -> str:
        """Return words of the endpoint's own without the key, as a message may repeat them."""
        return one_line((text.replace(self.key, "***") if self.key else text)[: 10 * SHOWN], SHOWN)


@dataclass(frozen=True)
class RemoteModel(_Remote[tuple[str, Sequence[str]], Likelihood]):
    """A Speaker."""

    longest: None = None
    parameters: None = None
    _remedy = "not every endpoint tells log-probabilities, another mode (echo, top, chat) may do"

    @property
    def digest(self) -> str:
        return digest.hash_value([self.endpoint.url, self.endpoint.model, self.endpoint.mode, self.endpoint.top])

    def count(self, text: str) -> int:
        return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def likelihoods(self, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[tuple[int, Likelihood]]:
        return self._answers((prompt, answers) for prompt in prompts)

    def _request(self, question: tuple[str, Sequence[str]]) -> tuple[str, bytes]:
        (prompt, answers), path = question, "completions"
        asked: dict[str, Any] = {"model": self.endpoint.model, "temperature": 0}
        if self.endpoint.mode == "echo":
            texts = [prompt + answer for answer in answers]
            asked |= {"prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 1}
        elif self.endpoint.mode == "top":
            asked |= {"prompt": prompt, "max_tokens": 1, "logprobs": self.endpoint.top}
        else:
            path, said = "chat/completions", [{"role": "user", "content": prompt}]
            asked |= {"messages": said, "max_tokens": 1, "logprobs": True, "top_logprobs": self.endpoint.top}
        return path, json.dumps(asked).encode()

    def _read(self, content: bytes, question: tuple[str, Sequence[str]]) -> Likelihood:
        prompt, answers = question
        if self.endpoint.mode == "echo":
            return sum_echoed(_Echo.model_validate_json(content).choices, prompt, answers)
        if self.endpoint.mode == "top":
            return listed(_Top.model_validate_json(content).tokens.items(), answers)
        chat = _Chat.model_validate_json(content)
        return listed(((each["token"], each["logprob"]) for each in chat.tokens), answers)


@dataclass(frozen=True)
class RemoteEncoder(_Remote[Sequence[str], NDArray[np.float32]]):
    """A model that gives vectors for texts."""

    _remedy = "expected an OpenAI-compatible list of vectors, one for each text"

    @property
    def digest(self) -> str:
        return digest.hash_value([self.endpoint.url, self.endpoint.model])

    def vectors(self, texts: Sequence[str]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (number of a batch's first text, its vectors (B, E)) in any order. Raises TeacherError."""
        size = self.endpoint.batch
        for number, found in self._answers(texts[at : at + size] for at in range(0, len(texts), size)):
            yield number * size, found

    def _request(self, question: Sequence[str]) -> tuple[str, bytes]:
        asked = {"model": self.endpoint.model, "input": list(question), "encoding_format": "float"}
        return "embeddings", json.dumps(asked).encode()

    def _read(self, content: bytes, question: Sequence[str]) -> NDArray[np.float32]:
        told = sorted(_Embeddings.model_validate_json(content).data, key=lambda each: each["index"])
        if [each["index"] for each in told] != list(range(len(question))):
            raise ValueError(f"data: {len(told)} vectors for {len(question)} texts")
        if len({len(each["embedding"]) for each in told}) != 1:
            raise ValueError("data: the vectors have not all as many numbers")
        return np.array([each["embedding"] for each in told], dtype=np.float32)


class _Tokens(TypedDict):
    text_offset: list[int]
    token_logprobs: list[LogP | None]


class _Choice(TypedDict):
    index: int
    logprobs: _Tokens


class _Listed(TypedDict):
    token: str
    logprob: LogP


class _Embedded(TypedDict):
    index: int
    embedding: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=1)]


class _Embeddings(BaseModel):
    data: list[_Embedded]


class _Echo(BaseModel):
    choices: list[_Choice]


class _Top(BaseModel):
    tokens: dict[str, LogP] = Field(
        min_length=1, validation_alias=AliasPath("choices", 0, "logprobs", "top_logprobs", 0)
    )


class _Chat(BaseModel):
    tokens: list[_Listed] = Field(
        min_length=1, validation_alias=AliasPath("choices", 0, "logprobs", "content", 0, "top_logprobs")
    )


def _advice(code: int) -> str:
    if code in (401, 403):
        return ". Is the key in the environment variable that the endpoint file names, and may it use this model?"
    if code in (301, 302, 303, 307, 308):
        return ". It redirects; give the address it leads to, if you trust it"
    return ". Check url, model and mode in the endpoint file"


def _retry_after(header: str | None) -> float:
    """Read how many seconds the server asks to wait, from a number or a date; 0 where it asks for nothing sensible."""
    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(str(header)) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):  # no date, or one without a time zone
            seconds = 0.0
    return seconds if seconds > 0 else 0.0  # of nan too


def sum_echoed(choices: Sequence[Mapping[str, Any]], prompt: str, answers: Sequence[str]) -> Likelihood:
    """Sum the log-probabilities of each answer's own tokens, of those of prompt and answer.

    A token may span the end of the prompt: then all answers are scored from where it begins. Raises ValueError for
    answers without tokens of their own, or without their log-probabilities.
    """
    if len(choices) != len(answers):
        raise ValueError(f"choices: {len(choices)}, not {len(answers)}")
    spans = []
    for choice, answer in zip(sorted(choices, key=lambda each: each["index"]), answers, strict=True):
        shown, end = choice["logprobs"], len(prompt) + len(answer)
        starts = shown["text_offset"]
        if not starts or len(starts) != len(shown["token_logprobs"]):
            raise ValueError("choices: text_offset and token_logprobs are empty, or differ in length")
        ends = [*starts[1:], max(end, starts[-1])]
        told = zip(starts, ends, shown["token_logprobs"], strict=True)
        spans.append([(start, stop, log_p) for start, stop, log_p in told if start < end and stop > start])
    begin = min((start for tokens in spans for start, stop, _ in tokens if stop > len(prompt)), default=math.inf)
    own = [[log_p for _, stop, log_p in tokens if stop > begin] for tokens in spans]
    if not all(own):
        raise ValueError("choices: an answer without a token")
    log_p = [[each for each in tokens if each is not None] for tokens in own]
    if log_p != own:
        raise ValueError("choices: an answer's token without a log-probability")
    return Likelihood(tuple(map(sum, log_p)), tuple(map(len, log_p)))


def listed(tokens: Any, answers: Sequence[str]) -> Likelihood:
    """Look the answers up among the likeliest next tokens, (token, log-probability); spaces do not matter.

    What is not listed is at most as likely as the last that is, and as all that is left together.
    """
    known = [(str(token).replace("▁", " ").replace("Ġ", " ").strip(), float(log_p)) for token, log_p in tokens]
    left = 1 - math.fsum(math.exp(log_p) for _, log_p in known)
    floor = min(math.log(max(left, LEAST)), *(log_p for _, log_p in known))
    log_p_A, absent = [], 0
    for answer in answers:
        own = [math.exp(log_p) for token, log_p in known if token == answer.strip()]
        absent += not own
        log_p_A.append(math.log(math.fsum(own)) if own and math.fsum(own) > 0 else floor)
    return Likelihood(tuple(log_p_A), (1,) * len(answers), absent)
