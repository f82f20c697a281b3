"""Errors a user can mend. Each message says what, where, what was expected and what to do; the CLI exits with 2."""

import difflib
from collections.abc import Iterable
from pathlib import Path

MOST_SHOWN = 30
"""Choices listed in a message: a folder may hold thousands."""


class CompressError(Exception):
    """The root: anything wrong with what the user gave us, never with our own invariants."""


class RecipeError(CompressError):
    """A recipe that cannot be loaded; `problems` lists every one found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ObjectiveError(CompressError):
    """A loss that cannot compare what this student and this teacher show."""


class DataError(CompressError):
    """A data source that cannot be read, or that is no task we know."""


class TeacherError(CompressError):
    """A teacher that cannot be loaded, or that the gate refuses."""


class PromptError(CompressError):
    """A prompt that cannot be loaded, or that does not fit the task; `problems` lists every one found."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class StudentError(CompressError):
    """A student that cannot be built or initialised as asked."""


class PruneError(CompressError):
    """A model that cannot be sliced, or not to the sizes asked."""


class SearchError(CompressError):
    """A search that has nothing to find, or a study that cannot be opened."""


class RunError(CompressError):
    """A run directory that is locked, foreign, or cannot be written."""


class DamagedError(CompressError):
    """A file or folder of ours that is no longer what was written; `path` names it, `problems` lists what differs."""

    def __init__(self, path: Path, problems: list[str], remedy: str = "") -> None:
        super().__init__(f"{path}: is damaged: {'; '.join(problems)}. {remedy}".rstrip())
        self.path, self.problems = path, problems


class ExportError(CompressError):
    """A model that cannot be exported, or whose file does not compute what the model does."""


class BundleError(CompressError):
    """A bundle that is not one, or whose files do not match its manifest."""


class PushError(CompressError):
    """A bundle that the hub does not take, or a hub that cannot be reached."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or the choices when nothing is close; ready to append to a message."""
    known = sorted(set(choices))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    shown = ", ".join(known[:MOST_SHOWN]) + (f" and {len(known) - MOST_SHOWN} more" if known[MOST_SHOWN:] else "")
    return f" Known: {shown}." if known else ""
