"""Errors that a user can fix. A message says what, where, what was expected and what to
do; the CLI exits with 2."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

CHOICES_SHOWN = 30
"""Maximum number of choices that a message lists: a folder may hold thousands."""
LONGEST_REASON = 240
"""Maximum characters of a library's message that ours repeat: a tracer prints the whole
graph."""


class CompressError(Exception):
    """Base of all errors in what the user gave us; our own bugs raise anything else."""


class ArgumentError(CompressError):
    """An argument has a type or a value that the function does not accept.

    name      the parameter, with the place in it, as in `threads[1]`
    expected  what the function takes, as a phrase
    found     the value, or its kind, as a phrase
    remedy    a sentence that says what to give instead; '' if that is obvious
    where     the function or class
    """

    def __init__(
        self, name: str, expected: str, found: str, *, remedy: str = "", where: str = ""
    ) -> None:
        place = f"{where}: " if where else ""
        super().__init__(
            f"{place}{name}: expected {expected}; found "
            f"{found}{remedy and '. ' + remedy}"
        )
        self.name = name
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.where = where

    def of(self, where: str) -> "ArgumentError":
        """Return the same error with the function or class whose argument it is."""
        return ArgumentError(
            self.name, self.expected, self.found, remedy=self.remedy, where=where
        )

    def renamed(self, names: Mapping[str, str]) -> "ArgumentError":
        """Return the same error with another name of the parameter, such as the
        option's, if it has one."""
        parameter, bracket, place = self.name.partition("[")
        if parameter not in names:
            return self
        name = f"{names[parameter]}{bracket}{place}"
        return ArgumentError(name, self.expected, self.found, remedy=self.remedy)


class _ProblemsError(CompressError):
    """A file cannot be loaded; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RecipeError(_ProblemsError):
    """A recipe cannot be loaded."""


class ObjectiveError(CompressError):
    """A loss cannot compare this student with this teacher."""


class DataError(CompressError):
    """A data source cannot be read, or holds no task that we know."""


class TeacherError(CompressError):
    """A teacher cannot be loaded, or is not good enough to teach."""


class PromptError(_ProblemsError):
    """A prompt cannot be loaded, or does not fit the task."""


class StudentError(CompressError):
    """A student cannot be built or initialised as requested."""


class PruneError(CompressError):
    """A model cannot be pruned, or not to the requested sizes."""


class SearchError(CompressError):
    """A search has nothing to find, or its study cannot be opened."""


class OutputError(CompressError):
    """A file or a folder cannot be written where the user wants it."""


class RunError(CompressError):
    """A run directory is locked, belongs to something else, or cannot be written."""


class DamagedError(CompressError):
    """A file or folder that we wrote has changed since; `path` names it, `problems`
    lists what differs."""

    def __init__(self, path: Path, problems: list[str], remedy: str = "") -> None:
        super().__init__(
            f"{path}: is damaged: {'; '.join(problems)}. {remedy}".rstrip()
        )
        self.path = path
        self.problems = problems


class ExportError(CompressError):
    """A model cannot be exported, or its file does not compute what the model does."""


class BundleError(CompressError):
    """A folder is not a bundle, or its files do not match its manifest."""


class PushError(CompressError):
    """The hub refuses a bundle, or cannot be reached."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " Did you mean 'x'?", or the known choices if none is close, to append to
    a message."""
    known = sorted(set(choices))
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {lower[close[0]]!r}?"
    shown = ", ".join(known[:CHOICES_SHOWN]) + (
        f" and {len(known) - CHOICES_SHOWN} more" if known[CHOICES_SHOWN:] else ""
    )
    return f" Known: {shown}." if known else ""


def first_reason(error: BaseException) -> str:
    """Return in one line what a library raised: the type, and the first line of its
    message that says something."""
    message = shorten(str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shorten(message: str) -> str:
    """Return the first line of a library's message that says something, at most
    LONGEST_REASON characters of it."""
    lines = (" ".join(line.split()) for line in message.splitlines())
    first = next((line for line in lines if line), "")
    return first if len(first) <= LONGEST_REASON else f"{first[:LONGEST_REASON]} ..."
