"""Cache the answers of a language model, so that no prompt is paid for twice.

Shapes: N prompts, A answers.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from compress import io as digest
from compress.data.cache import explained, home, locked
from compress.errors import TeacherError
from compress.io import atomic_file, name_disk_errors
from compress.progress import Progress, note

FLUSH_SECONDS: Final = 1.0
"""The most seconds of answers that a power cut may lose."""

PROMPT_SHOWN = 60
"""Characters from the end of a prompt that a message quotes."""


class UnansweredError(TeacherError):
    """A prompt without an answer. `number`: its index among the prompts."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of each answer after one prompt.

    log_p   natural logarithm of its probability, summed over its tokens; tokens: their
            number
    absent  how many answers the model did not report, so that their `log_p` is an upper
            bound
    """

    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int = 0


@dataclass(frozen=True)
class Likelihoods:
    """The likelihoods of many prompts. `asked` were sent to the model now, in
    `seconds`; the others are cached."""

    log_p_NA: NDArray[np.float64]
    tokens_NA: NDArray[np.int64]
    absent: int
    asked: int
    seconds: float


class LanguageModel(Protocol):
    """A model that computes how likely answers are to follow a prompt.

    digest      a hash of everything that its answers depend on
    longest     the most tokens of prompt and answer that it reads; None: unknown or
                unlimited
    parameters  their number; None: unknown
    count       counts the tokens of a text
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def longest(self) -> int | None: ...
    @property
    def parameters(self) -> int | None: ...
    def count(self, text: str) -> int: ...
    def likelihoods(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> Iterator[tuple[int, Likelihood]]:
        """Yield (index of the prompt, its likelihoods) in any order, as soon as they
        are known."""
        ...


def ask(
    model: LanguageModel,
    prompts: Sequence[str],
    answers: Sequence[str],
    *,
    console: Console,
) -> Likelihoods:
    """Compute how likely each of `answers` is to follow each of `prompts`. Raises
    TeacherError for a missing answer.

    Every answer is appended at once to a file under $COMPRESS_HOME/soft-labels, by the
    hash of its prompt, one file per model and set of answers: a prompt is asked again
    only if its answer is damaged there.
    """
    path = answers_file(model, answers)
    keys = [_key(prompt) for prompt in prompts]
    by_key = dict(zip(keys, prompts, strict=True))
    known, _ = _read(path, len(answers))
    asked = 0
    seconds = 0.0
    if by_key.keys() - known.keys():
        with explained(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            # another process with the same prompts waits, then finds them answered
            with locked(path):
                known = _repair(path, len(answers))
                new = {
                    key: prompt for key, prompt in by_key.items() if key not in known
                }
                start = time.monotonic()
                with (
                    Progress(
                        f"asking {model.name}", len(new), "rows", console=console
                    ) as bar,
                    name_disk_errors(path),
                ):
                    try:
                        for key, likelihood in _ask(model, new, answers, path):
                            known[key] = likelihood
                            bar.advance()
                    except UnansweredError as error:
                        row = keys.index(list(new)[error.number])
                        end = prompts[row][-PROMPT_SHOWN:]
                        raise TeacherError(
                            f"row {row + 1:,} of {len(keys):,}, prompt ...{end!r}: "
                            f"{error}"
                        ) from error
                    asked = len(new)
                    seconds = time.monotonic() - start
    rows = [known[key] for key in keys]
    log_p_NA = np.array([row.log_p for row in rows], dtype=np.float64)
    if not np.isfinite(log_p_NA).all():
        bad = int((~np.isfinite(log_p_NA)).any(axis=1).sum())
        raise TeacherError(
            f"teacher {model.name}: its likelihoods are not finite for {bad} of "
            f"{len(rows)} prompts"
        )
    tokens_NA = np.array([row.tokens for row in rows], dtype=np.int64)
    return Likelihoods(
        log_p_NA, tokens_NA, sum(row.absent for row in rows), asked, seconds
    )


def answers_file(model: LanguageModel, answers: Sequence[str]) -> Path:
    """Return the cache file of a language model for these answers."""
    return (
        home()
        / "soft-labels"
        / f"{digest.hash_value([model.digest, list(answers)])[:24]}.jsonl"
    )


def list_unanswered(
    model: LanguageModel, prompts: Sequence[str], answers: Sequence[str]
) -> list[str]:
    """List the prompts, each once, that have no cached answer."""
    known, _ = _read(answers_file(model, answers), len(answers))
    return [prompt for prompt in dict.fromkeys(prompts) if _key(prompt) not in known]


def _key(prompt: str) -> str:
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _ask(
    model: LanguageModel, new: Mapping[str, str], answers: Sequence[str], path: Path
) -> Iterator[tuple[str, Likelihood]]:
    """Send the prompts to the model; append each answer to the file, then yield (key,
    answer)."""
    keys = list(new)
    with path.open("a", encoding="utf-8") as file:
        flushed = time.monotonic()
        try:
            for number, likelihood in model.likelihoods(list(new.values()), answers):
                line = _Line(prompt=keys[number], **asdict(likelihood))
                file.write(
                    line.model_copy(update={"check": line.digest()}).model_dump_json()
                    + "\n"
                )
                file.flush()
                if time.monotonic() - flushed > FLUSH_SECONDS:
                    os.fsync(file.fileno())
                    flushed = time.monotonic()
                yield keys[number], likelihood
        finally:
            os.fsync(file.fileno())


class _Line(BaseModel):
    """A line of the cache. `check`: a hash of the other fields; older lines have
    none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"
    )

    prompt: str
    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int
    check: str | None = None

    def digest(self) -> str:
        return digest.hash_value([self.prompt, self.log_p, self.tokens, self.absent])[
            :16
        ]


def _read(path: Path, answers: int) -> tuple[dict[str, Likelihood], list[int]]:
    """Read the cached answers by their keys, and the numbers of the damaged lines."""
    known: dict[str, Likelihood] = {}
    damaged: list[int] = []
    if not path.exists():
        return known, damaged
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                cached = _Line.model_validate_json(line)
            except ValidationError:
                damaged.append(number)
                continue
            complete = (
                line.endswith(b"\n")
                and len(cached.log_p) == len(cached.tokens) == answers
            )
            if complete and cached.check in (None, cached.digest()):
                known[cached.prompt] = Likelihood(
                    cached.log_p, cached.tokens, cached.absent
                )
            else:
                damaged.append(number)
    return known, damaged


def _repair(path: Path, answers: int) -> dict[str, Likelihood]:
    """Read the cached answers, and remove the lines that are damaged or incomplete."""
    known, damaged = _read(path, answers)
    if damaged:
        note(
            f"{path}: line {', '.join(map(str, damaged))} of the cached answers is "
            "damaged; asking again"
        )
        with (
            path.open("rb") as file,
            atomic_file(path) as partial,
            partial.open("wb") as mended,
        ):
            mended.writelines(
                line
                for number, line in enumerate(file, start=1)
                if number not in damaged
            )
    return known
