"""Ask an endpoint by files: requests that are sent as a batch, which many endpoints
answer within a day for less, and the answers that come back.

A line of a request file, as OpenAI's Batch API reads it:

    {"custom_id": ID, "method": "POST", "url": "/v1/chat/completions", "body": {...}}

and of an answer file, or of the file of its errors:

    {"custom_id": ID, "response": {"status_code": 200, "body": {...}}, "error": null}

The id is a hash of the request, so that an answer belongs to the same model, prompt and
settings, and to no other.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from pydantic import AliasPath, BaseModel, Field, ValidationError, model_validator

from compress.data.tables import chunks
from compress.errors import TeacherError
from compress.io import atomic_file, make_folder
from compress.terminal import one_line

MOST_REQUESTS: Final = 50_000
MOST_REQUEST_BYTES: Final = 200_000_000
"""Maximum requests and bytes of one file: OpenAI's limits."""
FOR_ITS_TEXT: Final = frozenset({400, 413, 422})
"""The statuses of a refusal that may be for the text of a request: a filter of content,
or a length."""
IDS_SHOWN: Final = 5
"""Maximum ids that a message names."""


class AwaitedError(TeacherError):
    """Requests are written to `files`, and await their answers. `complete`: False if
    answers came back without some of those that were asked for."""

    def __init__(self, message: str, files: Sequence[Path], *, complete: bool) -> None:
        super().__init__(message)
        self.files = tuple(files)
        self.complete = complete


class RefusedError(TeacherError):
    """A request that the endpoint refuses, perhaps for its text; `reason` is the
    status and what the endpoint says."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class BatchFiles:
    """A folder with the files of a batch: requests-1.jsonl and so on, which are written
    here; every other .jsonl file, whatever its name, has answers or errors.

    path    the path of the endpoint's address, such as /v1
    """

    folder: Path
    path: str
    lines: dict[str, bytes] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _answers(self) -> dict[str, Any]:
        """Read all answers by their ids. Raises TeacherError for any other line."""
        found: dict[str, Any] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            if _holds_requests(file):
                continue
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    text = line.removeprefix(BOM_UTF8).strip()
                    if not text:
                        continue
                    try:
                        answer = _Answer.model_validate_json(text)
                    except ValidationError:
                        raise TeacherError(
                            f"{file}: line {number}: expected an answer with "
                            "custom_id, and response or error, found "
                            f"{one_line(line.decode('utf-8', 'replace'), 80)!r}. Keep "
                            "only files of answers here"
                        ) from None
                    if answer.usable or answer.custom_id not in found:
                        found[answer.custom_id] = answer
        return found

    def exchange(self, path: str, body: bytes) -> tuple[str, bytes | None]:
        """Return the id of a request, and the body of its answer; None, after the
        request is noted, if there is none. Raises RefusedError for a request that is
        refused for its text, unless no other was answered."""
        identity = blake2b(path.encode() + b"\n" + body, digest_size=16).hexdigest()
        answer = self._answers.get(identity)
        if answer is not None and answer.usable:
            return identity, json.dumps(answer.body).encode()
        if answer is not None:
            reason = one_line(answer.reason, 120)
            if answer.status_code in FOR_ITS_TEXT and any(
                each.usable for each in self._answers.values()
            ):
                raise RefusedError(f"request {identity}: {reason}", reason)
            self.failed[identity] = reason
        head = {"custom_id": identity, "method": "POST", "url": f"{self.path}/{path}"}
        start = json.dumps(head).removesuffix("}").encode()
        self.lines[identity] = start + b', "body": ' + body + b"}\n"
        return identity, None

    def refuse(self, identity: str, reason: str, path: str, body: bytes) -> None:
        """Note that an answer is unusable, so that it is asked for again."""
        del self._answers[identity]
        self.exchange(path, body)
        self.failed[identity] = reason

    def write(self) -> AwaitedError:
        """Write the requests without an answer, and return the error that says so."""
        make_folder(self.folder)
        for file in filter(_holds_requests, self.folder.glob("*.jsonl")):
            file.unlink()
        lines = self.lines.values()
        longest = max(map(len, lines))
        # a part ends with the line that reaches its limit
        parts = chunks(lines, len, MOST_REQUESTS, MOST_REQUEST_BYTES - longest)
        files = []
        for number, part in enumerate(parts, start=1):
            files.append(self.folder / f"requests-{number}.jsonl")
            with atomic_file(files[-1]) as partial, partial.open("wb") as written:
                written.writelines(part)
        message = (
            f"{len(self.lines):,} requests: {', '.join(map(str, files))}. Send them as "
            f"batches, put the files of answers and errors into {self.folder}, and run "
            "the same command again"
        )
        if not self._answers:
            return AwaitedError(message, files, complete=True)
        missing = [each for each in self.lines if each not in self.failed]
        problems = [
            f"{len(ids):,} requests {what}: {', '.join(ids[:IDS_SHOWN])}"
            + (", ..." if len(ids) > IDS_SHOWN else "")
            for what, ids in (
                ("have no answer", missing),
                ("failed", [f"{key} ({why})" for key, why in self.failed.items()]),
            )
            if ids
        ]
        return AwaitedError("; ".join((*problems, message)), files, complete=False)


def _holds_requests(file: Path) -> bool:
    """Check whether a file holds requests of ours, whatever it is named: answers may
    come back under the name of their requests."""
    with file.open("rb") as lines:
        return b'", "method": "POST", "url": "' in lines.readline(200)


class _Answer(BaseModel):
    custom_id: str
    status_code: int = Field(200, validation_alias=AliasPath("response", "status_code"))
    body: dict[str, Any] | None = Field(
        None, validation_alias=AliasPath("response", "body")
    )
    error: Any = None

    @model_validator(mode="after")
    def _answers(self) -> Self:
        if self.status_code == 200 and self.body is None and self.error is None:
            raise ValueError("neither response nor error")
        return self

    @property
    def usable(self) -> bool:
        return self.status_code == 200 and bool(self.body)

    @property
    def reason(self) -> str:
        return json.dumps(self.error or [self.status_code, self.body])
