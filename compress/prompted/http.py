"""A language model behind an OpenAI-compatible HTTP endpoint. What it is, is written in a strict YAML file:

    url: https://api.example.com/v1
    model: davinci-002
    mode: echo                # what the endpoint can tell, see Endpoint
    key: EXAMPLE_API_KEY      # the NAME of the environment variable that holds the key; the key itself is kept nowhere

The key goes into the header of requests to `url` alone: not into files, logs or messages, nor where a redirect leads.
"""

import http.client
import json
import math
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from compress import digest, recipe_file
from compress.errors import PromptError, RecipeError, TeacherError, did_you_mean
from compress.prompted.answers import Likelihood
from compress.recipe import Frozen

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_WAIT = 1.0
LONGEST_WAIT = 120.0
"""Seconds: waiting doubles from the first to the longest. An endpoint that asks for more is left alone."""
BYTES_PER_TOKEN = 3
"""An endpoint's tokenizer is not here: texts are cut as if tokens were this short, English ones are about 4 bytes."""
LEAST = 1e-9
"""The probability that rounding may leave for tokens that were not listed."""


class Endpoint(Frozen):
    """Where to ask.

    mode         echo: /completions scores prompt and answer (`echo` with `logprobs`): exact, for answers of any length;
                 top: /completions lists its `top` next tokens; chat: /chat/completions does. For these two an answer
                 must be one token; one not listed counts as the most that is left for it, and is counted
    concurrency  requests under way at a time
    timeout      seconds an answer may take; retries: of a request that failed for a reason that may pass
    """

    url: str
    model: str
    mode: Literal["echo", "top", "chat"] = "echo"
    top: int = Field(20, ge=1)
    key: str | None = None
    concurrency: int = Field(4, ge=1, le=64)
    timeout: float = Field(60.0, gt=0)
    retries: int = Field(6, ge=0)

    @staticmethod
    def load(path: str) -> "Endpoint":
        """Raises PromptError with every problem of the file."""
        file = Path(path)
        if not file.is_file():
            raise PromptError([f"{path}: no such endpoint file"])
        try:
            return Endpoint.model_validate(recipe_file.parsed(file.read_bytes(), file.name))
        except RecipeError as error:
            raise PromptError(error.problems) from error
        except ValidationError as error:  # without what was given: it might be the key
            raise PromptError([_problem(file.name, each) for each in error.errors()]) from None

    @field_validator("url")
    @classmethod
    def _is_bare(cls, url: str) -> str:
        """The URL is written into the run's record."""
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


def _problem(file: str, error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{file}: {where}: no such setting.{did_you_mean(where, Endpoint.model_fields)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{file}: {where + ': ' if where else ''}{'is missing' if error['type'] == 'missing' else message}"


def open_endpoint(path: str) -> "RemoteModel":
    """Raises PromptError for the file, TeacherError where the environment lacks the key."""
    endpoint = Endpoint.load(path)
    if endpoint.key is not None and not os.environ.get(endpoint.key):
        raise TeacherError(f"{path}: the environment variable {endpoint.key} is empty or not set; put the key there")
    return RemoteModel(endpoint, os.environ.get(endpoint.key) if endpoint.key else None)


class _Stay(urllib.request.HTTPRedirectHandler):
    """A redirect would take question and key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class RemoteModel:
    """A Speaker. Questions are asked `concurrency` at a time; when one fails for good, those under way are awaited."""

    endpoint: Endpoint
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.endpoint.model} at {urlsplit(self.endpoint.url).hostname}"

    @property
    def digest(self) -> str:
        return digest.of_value([self.endpoint.url, self.endpoint.model, self.endpoint.mode, self.endpoint.top])

    @property
    def longest(self) -> int | None:
        return None

    @property
    def parameters(self) -> int | None:
        return None

    def count(self, text: str) -> int:
        return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)

    def likelihoods(self, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[tuple[int, Likelihood]]:
        over, failed = threading.Event(), None
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            asked = {pool.submit(self._likelihood, text, answers, over): number for number, text in enumerate(prompts)}
            try:
                for future in as_completed(asked):
                    error = future.exception()
                    if error is None:
                        yield asked[future], future.result()
                    else:
                        failed = failed or error
                        over.set()
            finally:
                over.set()
        if failed is not None:
            raise failed

    def _likelihood(self, prompt: str, answers: Sequence[str], over: threading.Event) -> Likelihood:
        path, asked = "completions", {"model": self.endpoint.model, "temperature": 0}
        if self.endpoint.mode == "echo":
            texts = [prompt + answer for answer in answers]
            asked |= {"prompt": texts, "max_tokens": 0, "echo": True, "logprobs": 1}
        elif self.endpoint.mode == "top":
            asked |= {"prompt": prompt, "max_tokens": 1, "logprobs": self.endpoint.top}
        else:
            path, said = "chat/completions", [{"role": "user", "content": prompt}]
            asked |= {"messages": said, "max_tokens": 1, "logprobs": True, "top_logprobs": self.endpoint.top}
        found = self._post(path, asked, over)
        try:
            if self.endpoint.mode == "echo":
                return echoed(found["choices"], prompt, answers)
            shown = found["choices"][0]["logprobs"]
            if self.endpoint.mode == "top":
                return listed(shown["top_logprobs"][0].items(), answers)
            return listed(((each["token"], each["logprob"]) for each in shown["content"][0]["top_logprobs"]), answers)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TeacherError(
                f"teacher {self.name}: its answer lacks what `mode: {self.endpoint.mode}` reads ({error!r}): "
                f"{self._redacted(json.dumps(found))[:300]}. Not every endpoint tells log-probabilities; try another "
                "mode (echo, top, chat)"
            ) from error

    def _post(self, path: str, body: Mapping[str, Any], over: threading.Event) -> Any:
        """The endpoint's answer, decoded. Raises TeacherError when it refuses, does not answer after all retries, or
        when all is `over` before it was asked."""
        if over.is_set():
            raise TeacherError(f"teacher {self.name}: was not asked any more")
        request = urllib.request.Request(f"{self.endpoint.url}/{path}", json.dumps(body).encode(), method="POST")
        request.add_header("Content-Type", "application/json")
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        opener = urllib.request.build_opener(_Stay)
        for attempt in range(self.endpoint.retries + 1):
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
            try:
                with opener.open(request, timeout=self.endpoint.timeout) as answer:
                    return self._decoded(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    reason = self._reason(error)
                    if error.code not in RETRIED:
                        raise TeacherError(f"teacher {self.name}: {reason}{_advice(error.code)}") from None
                    wait = _retry_after(error.headers.get("Retry-After"), wait)
            except (OSError, http.client.HTTPException) as error:
                reason = self._redacted(f"{type(error).__name__}: {error}")
            if wait > LONGEST_WAIT or attempt == self.endpoint.retries or over.wait(wait):
                break
        raise TeacherError(
            f"teacher {self.name}: no answer after {attempt + 1} requests ({reason}). What was answered "
            "before is kept: the same command goes on from there"
        )

    def _decoded(self, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except ValueError as error:
            shown = self._redacted(answer[:200].decode("utf-8", "replace"))
            raise TeacherError(f"teacher {self.name}: its answer is not JSON ({error}): {shown!r}") from error

    def _reason(self, error: urllib.error.HTTPError) -> str:
        try:
            said = error.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = ""
        return f"HTTP {error.code}: {' '.join(self._redacted(said).split())[:300] or error.reason}"

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def _advice(code: int) -> str:
    if code in (401, 403):
        return ". Is the key in the environment variable that the endpoint file names, and may it use this model?"
    if code in (301, 302, 303, 307, 308):
        return ". It redirects; give the address it leads to, if you trust it"
    return ". Check url, model and mode in the endpoint file"


def _retry_after(header: str | None, otherwise: float) -> float:
    """Seconds that the server asks to wait: a number, or a date."""
    if header is None:
        return otherwise
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return otherwise


def echoed(choices: Sequence[Mapping[str, Any]], prompt: str, answers: Sequence[str]) -> Likelihood:
    """From the log-probabilities of every token of prompt and answer, of each answer.

    A token may span the end of the prompt: then all answers are scored from where it begins. Raises what a dictionary
    of another form raises.
    """
    spans = []
    for choice, answer in zip(sorted(choices, key=lambda each: each["index"]), answers, strict=True):
        shown, end = choice["logprobs"], len(prompt) + len(answer)
        starts = shown["text_offset"]
        ends = [*starts[1:], max(end, starts[-1])]
        told = zip(starts, ends, shown["token_logprobs"], strict=True)
        spans.append([(start, stop, log_p) for start, stop, log_p in told if start < end and stop > start])
    begin = min(start for tokens in spans for start, stop, _ in tokens if stop > len(prompt))
    own = [[float(log_p) for _, stop, log_p in tokens if stop > begin] for tokens in spans]
    if not all(own):
        raise ValueError("an answer without a token")
    return Likelihood(tuple(map(sum, own)), tuple(map(len, own)))


def listed(tokens: Any, answers: Sequence[str]) -> Likelihood:
    """From (token, log-probability) of the likeliest next tokens; spaces around a token do not matter.

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
