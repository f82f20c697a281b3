"""What a language model answers, and where it is kept: no question is paid for twice.

Shapes: N prompts, A answers.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from compress import digest
from compress.data.cache import home
from compress.errors import TeacherError
from compress.files import naming

SHOWN = 60
"""Characters of the end of a prompt that a message repeats, to find its text by."""


class UnansweredError(TeacherError):
    """A prompt that got no answer, by its `number` among those asked."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Likelihood:
    """How likely each answer is to follow one prompt.

    log_p   natural logarithm of its probability, the sum over its tokens; tokens: how many these are
    absent  how many answers the model did not tell of, so that `log_p` is only the most it can be
    """

    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int = 0


@dataclass(frozen=True)
class Likelihoods:
    """Of many prompts. `asked` of them were put to the model now, in `seconds`; the others were answered before."""

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
        """(number of the prompt, its answers) in any order, as soon as they are known."""
        ...


def ask(speaker: Speaker, prompts: Sequence[str], answers: Sequence[str], *, console: Console) -> Likelihoods:
    """Ask how likely each of `answers` is to follow each of `prompts`. Raises TeacherError for a row without an answer.

    Every answer is appended to a file under $COMPRESS_HOME/soft-labels as soon as it is known, by the digest of its
    prompt, one file per speaker and set of answers: what was asked before is not asked again, whatever stopped it.
    """
    path = home() / "soft-labels" / f"{digest.of_value([speaker.digest, list(answers)])[:24]}.jsonl"
    marks = [blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() for prompt in prompts]
    with _opened(path, console) as file, naming(path):
        known = _read(file, len(answers))
        new = {mark: prompt for mark, prompt in zip(marks, prompts, strict=True) if mark not in known}
        new_marks = list(new)
        with _progress(console, speaker.name, len(new)) as bar:
            try:
                for at, likelihood in speaker.likelihoods(list(new.values()), answers):
                    file.write(json.dumps({"prompt": new_marks[at], **asdict(likelihood)}) + "\n")
                    file.flush()
                    known[new_marks[at]] = likelihood
                    bar.advance(bar.task_ids[0])
            except UnansweredError as error:
                row = marks.index(new_marks[error.number])
                end = prompts[row][-SHOWN:]
                raise TeacherError(f"row {row + 1:,} of {len(marks):,}, asked with ...{end!r}: {error}") from error
            seconds = bar.tasks[0].elapsed or 0.0
    found = [known[mark] for mark in marks]
    log_p_NA = np.array([each.log_p for each in found], dtype=np.float64)
    if not np.isfinite(log_p_NA).all():
        bad = int((~np.isfinite(log_p_NA)).any(axis=1).sum())
        raise TeacherError(f"teacher {speaker.name}: its likelihoods are not finite for {bad} of {len(found)} prompts")
    tokens_NA = np.array([each.tokens for each in found], dtype=np.int64)
    return Likelihoods(log_p_NA, tokens_NA, sum(each.absent for each in found), len(new), seconds)


@contextmanager
def _opened(path: Path, console: Console) -> Iterator[IO[str]]:
    """For reading and appending, by one process at a time: another that asks the same waits, then finds it answered."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"another process asks the same; waiting for {path}", highlight=False)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _read(file: IO[str], answers: int) -> dict[str, Likelihood]:
    """What was answered before. A last line that a kill has torn is cut off."""
    known: dict[str, Likelihood] = {}
    file.seek(0)
    whole = 0
    for line in file:
        if not line.endswith("\n"):
            break
        whole += len(line)
        kept = json.loads(line)
        known[kept["prompt"]] = Likelihood(tuple(kept["log_p"]), tuple(kept["tokens"]), kept["absent"])
        assert len(kept["log_p"]) == answers, "the file's name is made from the answers"
    file.truncate(whole)  # ASCII: characters are bytes
    file.seek(0, 2)
    return known


def _progress(console: Console, name: str, questions: int) -> Progress:
    bar = Progress(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not questions or console.quiet,
    )  # fmt: skip
    bar.add_task(f"asking {name}", total=questions)
    return bar
