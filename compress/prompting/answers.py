"""Cache the answers of a language model, so that no prompt is paid for twice.

Shapes: N prompts, A answers.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from compress import io as digest
from compress.arrays import Doubles, Longs
from compress.data.cache import explained, home, locked
from compress.errors import TeacherError
from compress.io import atomic_file, name_disk_errors
from compress.machine import count_processes, process_rank
from compress.progress import Progress, note
from compress.training.processes import (
    check_same,
    gather,
    node_first,
)

FLUSH_SECONDS: Final = 1.0
"""Maximum seconds of answers that a power cut may lose."""

AnswerT = TypeVar("AnswerT")

PROMPT_SHOWN = 60
"""Number of characters from the end of a prompt that a message quotes."""


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
class WrittenText:
    """A text that a model has written after a prompt. finished: False if it reached the
    maximum number of tokens before it ended."""

    text: str
    finished: bool


@dataclass(frozen=True)
class Votes:
    """The texts that a model has written after one prompt, asked several times."""

    texts: tuple[str, ...]


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first of `stop`, without white space around it, and
    whether there was one. White space before the text stops nothing."""
    begun = text.lstrip()
    places = [place for each in stop if (place := begun.find(each)) >= 0]
    return begun[: min(places, default=None)].rstrip(), bool(places)


@dataclass(frozen=True)
class Likelihoods:
    """The likelihoods of many prompts. `asked` were sent to the model now, in
    `seconds`; the others are cached."""

    log_p_NA: Doubles
    tokens_NA: Longs
    absent: int
    asked: int
    seconds: float


class LanguageModel(Protocol):
    """A model that computes how likely answers are to follow a prompt.

    digest      a hash of everything that its answers depend on
    longest     the maximum tokens of prompt and answer that it reads; None: unknown or
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
    def askers(self, processes: int) -> int:
        """Return how many of the processes of a launch may ask at the same time."""
        ...

    def likelihoods(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> Iterator[tuple[int, Likelihood]]:
        """Yield (index of the prompt, its likelihoods) in any order, as soon as they
        are known."""
        ...

    def write(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, WrittenText]]:
        """Yield (index of the prompt, the likeliest text after it) in any order. The
        text ends before the first of `stop`, and has no white space around it."""
        ...


class WantedAnswer(ABC, Generic[AnswerT]):
    """Ask a language model for one form of answer, and keep what it answers."""

    @property
    @abstractmethod
    def key(self) -> list[str]:
        """Return everything that the answers depend on besides model and prompt."""

    @abstractmethod
    def ask(
        self, model: LanguageModel, prompts: Sequence[str]
    ) -> Iterator[tuple[int, AnswerT]]:
        """Yield (index of the prompt, its answer) in any order."""

    @abstractmethod
    def encode(self, key: str, answer: AnswerT) -> "_Line":
        """Return the line of the cache for the answer to a prompt with this key."""

    @abstractmethod
    def decode(self, line: bytes) -> tuple[str, AnswerT] | None:
        """Return the key of the prompt, and the answer; None for a damaged line."""


@dataclass(frozen=True)
class Asked(Generic[AnswerT]):
    """The answers to many prompts. `asked` were sent to the model now, in `seconds`;
    the others are cached."""

    answers: Sequence[AnswerT]
    asked: int
    seconds: float


def ask(
    model: LanguageModel,
    prompts: Sequence[str],
    wanted: WantedAnswer[AnswerT],
    *,
    console: Console,
) -> Asked[AnswerT]:
    """Ask about each of `prompts`. Raises TeacherError for a missing answer.

    Every answer is appended at once to a file under $COMPRESS_HOME/soft-labels, by the
    hash of its prompt: a prompt is asked again only if its answer is damaged there.
    There is one file per model, form of answer and process of a launch, and all of them
    are read.
    """
    known = _read_all(answers_file(model, wanted), wanted)
    keys = [_key(prompt) for prompt in prompts]
    missing = [key for key in dict.fromkeys(keys) if key not in known]
    asked = 0
    seconds = 0.0
    if missing:
        known, asked, seconds = _ask_missing(model, prompts, wanted, missing, console)
    return Asked([known[key] for key in keys], asked, seconds)


def ask_together(
    model: LanguageModel,
    prompts: Sequence[str],
    wanted: WantedAnswer[AnswerT],
    *,
    console: Console,
) -> Asked[AnswerT]:
    """Ask as `ask` does, in all processes of a launch, which get all answers.

    The prompts that no process has cached are shared by the processes that may ask. The
    answers of other machines are kept here too. Raises RunError if the processes have
    different prompts, or if one of them has ended.
    """
    count = count_processes()
    if count == 1:
        return ask(model, prompts, wanted, console=console)
    path = answers_file(model, wanted)
    keys = [_key(prompt) for prompt in prompts]
    check_same({"prompts": digest.hash_value([path.name, *keys])})
    start = time.monotonic()
    known = _read_all(path, wanted)
    missing = gather(set(keys) - known.keys())
    nowhere = set[str].intersection(*missing)
    new = [key for key in dict.fromkeys(keys) if key in nowhere]
    if any(missing):
        rank = process_rank()
        askers = model.askers(count)
        sent = new[rank::askers] if rank < askers else []
        if sent:
            found, _, _ = _ask_missing(model, prompts, wanted, sent, console)
            known |= found
        anywhere = set[str].union(*missing)
        for key in anywhere - nowhere:
            holder = [key in lacks for lacks in missing].index(False)
            if holder == rank:
                sent.append(key)
        for shared in gather({key: known[key] for key in sent}):
            known |= shared
        with node_first():
            _keep(path, {key: known[key] for key in keys}, wanted)
    seconds = time.monotonic() - start
    return Asked([known[key] for key in keys], len(new), seconds)


def _ask_missing(
    model: LanguageModel,
    prompts: Sequence[str],
    wanted: WantedAnswer[AnswerT],
    missing: Sequence[str],
    console: Console,
) -> tuple[dict[str, AnswerT], int, float]:
    """Ask the prompts with these keys, unless their answers have been cached meanwhile.

    Returns all cached answers by their keys, how many were asked, and the seconds for
    them. Raises TeacherError.
    """
    path = answers_file(model, wanted)
    own = _own_file(path)
    keys = [_key(prompt) for prompt in prompts]
    by_key = dict(zip(keys, prompts, strict=True))
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process with the same prompts waits, then finds them answered
        with locked(own):
            known = _repair_all(path, wanted)
            new = {key: by_key[key] for key in missing if key not in known}
            start = time.monotonic()
            with (
                Progress(
                    f"asking {model.name}", len(new), "rows", console=console
                ) as bar,
                name_disk_errors(own),
            ):
                try:
                    for key, answer in _ask(model, new, wanted, own):
                        known[key] = answer
                        bar.advance()
                except UnansweredError as error:
                    row = keys.index(list(new)[error.number])
                    end = prompts[row][-PROMPT_SHOWN:]
                    raise TeacherError(
                        f"row {row + 1:,} of {len(keys):,}, prompt ...{end!r}: {error}"
                    ) from error
            return known, len(new), time.monotonic() - start


@dataclass(frozen=True)
class LikelihoodOf(WantedAnswer[Likelihood]):
    """Ask how likely each of `answers` is to follow."""

    answers: Sequence[str]

    @property
    def key(self) -> list[str]:
        return list(self.answers)

    def ask(
        self, model: LanguageModel, prompts: Sequence[str]
    ) -> Iterator[tuple[int, Likelihood]]:
        return model.likelihoods(prompts, self.answers)

    def encode(self, key: str, answer: Likelihood) -> "_Line":
        return _LikelihoodLine(prompt=key, **asdict(answer))

    def decode(self, line: bytes) -> tuple[str, Likelihood] | None:
        cached = _LikelihoodLine.model_validate_json(line)
        if not len(cached.log_p) == len(cached.tokens) == len(self.answers):
            return None
        if cached.check not in (None, cached.digest()):
            return None
        return cached.prompt, Likelihood(cached.log_p, cached.tokens, cached.absent)


def stack_likelihoods(name: str, found: Asked[Likelihood]) -> Likelihoods:
    """Stack likelihoods into arrays. Raises TeacherError, about the model of this name,
    for any that are not finite."""
    rows = found.answers
    log_p_NA = np.array([row.log_p for row in rows], dtype=np.float64)
    if not np.isfinite(log_p_NA).all():
        bad = int((~np.isfinite(log_p_NA)).any(axis=1).sum())
        raise TeacherError(
            f"teacher {name}: its likelihoods are not finite for {bad} of {len(rows)} "
            "prompts"
        )
    tokens_NA = np.array([row.tokens for row in rows], dtype=np.int64)
    absent = sum(row.absent for row in rows)
    return Likelihoods(
        log_p_NA,
        tokens_NA,
        absent,
        found.asked,
        found.seconds,
    )


@dataclass(frozen=True)
class TextAfter(WantedAnswer[WrittenText]):
    """Ask which text follows: see `LanguageModel.write`."""

    max_new_tokens: int
    stop: Sequence[str]

    @property
    def key(self) -> list[str]:
        return ["text", str(self.max_new_tokens), *self.stop]

    def ask(
        self, model: LanguageModel, prompts: Sequence[str]
    ) -> Iterator[tuple[int, WrittenText]]:
        return model.write(prompts, max_new_tokens=self.max_new_tokens, stop=self.stop)

    def encode(self, key: str, answer: WrittenText) -> "_Line":
        return _TextLine(prompt=key, **asdict(answer))

    def decode(self, line: bytes) -> tuple[str, WrittenText] | None:
        cached = _TextLine.model_validate_json(line)
        if cached.check != cached.digest():
            return None
        return cached.prompt, WrittenText(cached.text, cached.finished)


@dataclass(frozen=True)
class VotesAfter(WantedAnswer[Votes]):
    """Ask for several texts after a prompt. `settings`: what they depend on besides
    model and prompt."""

    vote: Callable[[Sequence[str]], Iterator[tuple[int, Votes]]]
    settings: Sequence[str]

    @property
    def key(self) -> list[str]:
        return ["votes", *self.settings]

    def ask(
        self, model: LanguageModel, prompts: Sequence[str]
    ) -> Iterator[tuple[int, Votes]]:
        return self.vote(prompts)

    def encode(self, key: str, answer: Votes) -> "_Line":
        return _VotesLine(prompt=key, texts=answer.texts)

    def decode(self, line: bytes) -> tuple[str, Votes] | None:
        cached = _VotesLine.model_validate_json(line)
        if cached.check != cached.digest():
            return None
        return cached.prompt, Votes(cached.texts)


def answers_file(model: LanguageModel, wanted: WantedAnswer[AnswerT]) -> Path:
    """Return the cache file of a language model for these answers; processes of a
    launch other than the first write to files next to it."""
    name = digest.hash_value([model.digest, wanted.key])[:24]
    return home() / "soft-labels" / f"{name}.jsonl"


def list_unanswered(
    model: LanguageModel, prompts: Sequence[str], wanted: WantedAnswer[AnswerT]
) -> list[str]:
    """List the prompts without a cached answer, each once."""
    known = _read_all(answers_file(model, wanted), wanted)
    return [prompt for prompt in dict.fromkeys(prompts) if _key(prompt) not in known]


def _key(prompt: str) -> str:
    return blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _ask(
    model: LanguageModel,
    new: Mapping[str, str],
    wanted: WantedAnswer[AnswerT],
    path: Path,
) -> Iterator[tuple[str, AnswerT]]:
    """Send the prompts to the model; append each answer to the file, then yield (key,
    answer)."""
    keys = list(new)
    with path.open("a", encoding="utf-8") as file:
        flushed = time.monotonic()
        try:
            for number, answer in wanted.ask(model, list(new.values())):
                file.write(wanted.encode(keys[number], answer).checked())
                file.flush()
                if time.monotonic() - flushed > FLUSH_SECONDS:
                    os.fsync(file.fileno())
                    flushed = time.monotonic()
                yield keys[number], answer
        finally:
            os.fsync(file.fileno())


class _Line(BaseModel):
    """A line of the cache. `check`: a hash of the other fields; older lines have
    none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants"
    )

    prompt: str
    check: str | None = None

    def checked(self) -> str:
        """Return the line with its check."""
        line = self.model_copy(update={"check": self.digest()})
        return line.model_dump_json() + "\n"

    def digest(self) -> str:
        fields = self.model_dump(exclude={"check"})
        return digest.hash_value(list(fields.values()))[:16]


class _LikelihoodLine(_Line):
    log_p: tuple[float, ...]
    tokens: tuple[int, ...]
    absent: int


class _VotesLine(_Line):
    texts: tuple[str, ...]


class _TextLine(_Line):
    text: str
    finished: bool


def _own_file(path: Path) -> Path:
    """Return the file that this process writes, given the first process's file."""
    rank = process_rank()
    return path.with_suffix(f".{rank}.jsonl") if rank else path


def _files(path: Path) -> list[Path]:
    """List the files of all processes that have written any, now or earlier."""
    others = sorted(path.parent.glob(f"{path.stem}.*.jsonl"))
    return [file for file in (path, *others) if file.is_file()]


def _read_all(path: Path, wanted: WantedAnswer[AnswerT]) -> dict[str, AnswerT]:
    """Read the cached answers of all processes by their keys."""
    known: dict[str, AnswerT] = {}
    for file in _files(path):
        known |= _read(file, wanted)[0]
    return known


def _repair_all(path: Path, wanted: WantedAnswer[AnswerT]) -> dict[str, AnswerT]:
    """Read the cached answers of all processes. Repair this process's file, whose lock
    it holds, and the files that no other process is writing."""
    own = _own_file(path)
    known: dict[str, AnswerT] = {}
    for file in _files(path):
        if file == own:
            known |= _repair(file, wanted)
            continue
        found, damaged = _read(file, wanted)
        known |= found
        if damaged:
            with locked(file, wait=False) as free:
                if free:
                    _repair(file, wanted)
    return known


def _keep(
    path: Path, given: Mapping[str, AnswerT], wanted: WantedAnswer[AnswerT]
) -> None:
    """Append the answers that this machine has not cached."""
    own = _own_file(path)
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(own), name_disk_errors(own):
            known = _repair_all(path, wanted)
            lines = [
                wanted.encode(key, answer).checked()
                for key, answer in given.items()
                if key not in known
            ]
            with own.open("a", encoding="utf-8") as file:
                file.writelines(lines)


def _read(
    path: Path, wanted: WantedAnswer[AnswerT]
) -> tuple[dict[str, AnswerT], list[int]]:
    """Read the cached answers by their keys, and the numbers of the damaged lines."""
    known: dict[str, AnswerT] = {}
    damaged: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                cached = wanted.decode(line)
            except ValidationError:
                cached = None
            if cached is None or not line.endswith(b"\n"):
                damaged.append(number)
            else:
                key, answer = cached
                known[key] = answer
    return known, damaged


def _repair(path: Path, wanted: WantedAnswer[AnswerT]) -> dict[str, AnswerT]:
    """Read the cached answers, and remove the lines that are damaged or incomplete."""
    known, damaged = _read(path, wanted)
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
