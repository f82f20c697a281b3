"""Keep what a language model answers: no question is paid for twice.

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
from compress.data.cache import explained, home, locked, note
from compress.errors import TeacherError
from compress.io import atomic_file, name_disk_errors
from compress.progress import Progress

FLUSH_SECONDS: Final = 1.0
"""A power cut loses the answers of so long at most."""

SHOWN = 60
"""Characters of the end of a prompt that a message repeats, to find its text by."""


class UnansweredError(TeacherError):
    """A prompt that got no answer, by its `number` among those asked."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of each answer after one prompt.

    log_p   natural logarithm of its probability, the sum over its tokens; tokens: how many these are
    absent  how many answers the model did not tell of, so that `log_p` is only the most it can be
    """

    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int = 0


@dataclass(frozen=True)
class Likelihoods:
    """The likelihoods of many prompts. `asked` of them were put to the model now, in `seconds`, the others before."""

    log_p_NA: NDArray[np.float64]
    tokens_NA: NDArray[np.int64]
    absent: int
    asked: int
    seconds: float


class Speaker(Protocol):
    """Whatever tells how likely answers are to follow a prompt.

    digest    of everything that decides what it answers
    longest   the most tokens of prompt and answer that it reads; None: unknown, or any number
    parameters  how many it has; None: unknown
    count     how many tokens a text is, to tell what fits
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
    def likelihoods(self, prompts: Sequence[str], answers: Sequence[str]) -> Iterator[tuple[int, Likelihood]]:
        """Yield (number of the prompt, its answers) in any order, as soon as they are known."""
        ...


def ask(speaker: Speaker, prompts: Sequence[str], answers: Sequence[str], *, console: Console) -> Likelihoods:
    """Ask how likely each of `answers` is to follow each of `prompts`. Raises TeacherError for a row without an answer.

    Every answer is appended to a file under $COMPRESS_HOME/soft-labels as soon as it is known, by the digest of its
    prompt, one file per speaker and set of answers: what was asked before is not asked again, whatever stopped it.
    Only answers that were damaged there are.
    """
    path = answers_file(speaker, answers)
    marks = [_mark(prompt) for prompt in prompts]
    by_mark = dict(zip(marks, prompts, strict=True))
    known, _ = _read(path, len(answers))
    asked, seconds = 0, 0.0
    if by_mark.keys() - known.keys():
        with explained(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path):  # another that asks the same waits, then finds it answered
                known = _mend(path, len(answers))
                new = {mark: prompt for mark, prompt in by_mark.items() if mark not in known}
                began = time.monotonic()
                with (
                    Progress(f"asking {speaker.name}", len(new), "rows", console=console) as bar,
                    name_disk_errors(path),
                ):
                    try:
                        for mark, likelihood in _ask(speaker, new, answers, path):
                            known[mark] = likelihood
                            bar.advance()
                    except UnansweredError as error:
                        row = marks.index(list(new)[error.number])
                        end = prompts[row][-SHOWN:]
                        raise TeacherError(
                            f"row {row + 1:,} of {len(marks):,}, asked with ...{end!r}: {error}"
                        ) from error
                    asked, seconds = len(new), time.monotonic() - began
    found = [known[mark] for mark in marks]
    log_p_NA = np.array([each.log_p for each in found], dtype=np.float64)
    if not np.isfinite(log_p_NA).all():
        bad = int((~np.isfinite(log_p_NA)).any(axis=1).sum())
        raise TeacherError(f"teacher {speaker.name}: its likelihoods are not finite for {bad} of {len(found)} prompts")
    tokens_NA = np.array([each.tokens for each in found], dtype=np.int64)
    return Likelihoods(log_p_NA, tokens_NA, sum(each.absent for each in found), asked, seconds)


def answers_file(speaker: Speaker, answers: Sequence[str]) -> Path:
    """Return the file that keeps what a speaker has told of these answers."""
    return home() / "soft-labels" / f"{digest.hash_value([speaker.digest, list(answers)])[:24]}.jsonl"


def list_unanswered(speaker: Speaker, prompts: Sequence[str], answers: Sequence[str]) -> list[str]:
    """List the prompts, each once, that were not answered before."""
    known, _ = _read(answers_file(speaker, answers), len(answers))
    return [prompt for prompt in dict.fromkeys(prompts) if _mark(prompt) not in known]


def _mark(prompt: str) -> str:
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _ask(
    speaker: Speaker, new: Mapping[str, str], answers: Sequence[str], path: Path
) -> Iterator[tuple[str, Likelihood]]:
    """Put the prompts to the speaker; yield (mark, its answers) once these are in the file."""
    marks = list(new)
    with path.open("a", encoding="utf-8") as file:
        flushed = time.monotonic()
        try:
            for at, likelihood in speaker.likelihoods(list(new.values()), answers):
                line = _Line(prompt=marks[at], **asdict(likelihood))
                file.write(line.model_copy(update={"check": line.digest()}).model_dump_json() + "\n")
                file.flush()
                if time.monotonic() - flushed > FLUSH_SECONDS:
                    os.fsync(file.fileno())
                    flushed = time.monotonic()
                yield marks[at], likelihood
        finally:
            os.fsync(file.fileno())


class _Line(BaseModel):
    """One prompt's answers as they are kept. `check`: of the other fields; older lines have none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")

    prompt: str
    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int
    check: str | None = None

    def digest(self) -> str:
        return digest.hash_value([self.prompt, self.log_p, self.tokens, self.absent])[:16]


def _read(path: Path, answers: int) -> tuple[dict[str, Likelihood], list[int]]:
    """Read what was answered before, and the numbers of the lines that are damaged."""
    known: dict[str, Likelihood] = {}
    damaged: list[int] = []
    if not path.exists():
        return known, damaged
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                kept = _Line.model_validate_json(line)
            except ValidationError:
                damaged.append(number)
                continue
            complete = line.endswith(b"\n") and len(kept.log_p) == len(kept.tokens) == answers
            if complete and kept.check in (None, kept.digest()):
                known[kept.prompt] = Likelihood(kept.log_p, kept.tokens, kept.absent)
            else:
                damaged.append(number)
    return known, damaged


def _mend(path: Path, answers: int) -> dict[str, Likelihood]:
    """Read what was answered before, and remove the lines that are damaged, or that a kill has torn."""
    known, damaged = _read(path, answers)
    if damaged:
        note(f"{path}: line {', '.join(map(str, damaged))} of the kept answers is damaged; asking that again")
        with path.open("rb") as file, atomic_file(path) as partial, partial.open("wb") as mended:
            mended.writelines(line for number, line in enumerate(file, start=1) if number not in damaged)
    return known
