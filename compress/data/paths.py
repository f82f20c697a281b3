"""Where data lies, told by names alone: what a source is, and which of its files is which split.

Light enough to be asked before anything else is imported: `check` and `check_corpus` tell a wrong name in no time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from compress.data import documents
from compress.data.text_files import reading, refuse_special
from compress.errors import DataError, did_you_mean

Role = Literal["train", "validation", "test"]
CorpusKind = Literal["pydoc", "parallel", "local", "hub"]

EMBEDDED: Final = ("intents",)
WORDS: Final[tuple[tuple[str, Role], ...]] = (
    ("train", "train"),
    ("validation", "validation"),
    ("valid", "validation"),
    ("val", "validation"),
    ("dev", "validation"),
    ("test", "test"),
)
DELIMITED: Final = (".tsv", ".csv", ".txt")
RECORDS: Final = (".jsonl", ".ndjson", ".json", ".parquet")
SUFFIXES: Final = (*DELIMITED, *RECORDS)


def check(source: str) -> None:
    """Refuse a source of labelled data that cannot be one: nothing there, an empty file, a folder without a split.

    What its rows hold shows when `load_task` reads them, and whether the hub has it when it is asked.
    """
    if source in EMBEDDED or named_files(source):
        return
    path = local(source)
    with reading(source):
        if path.is_dir():
            entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
            train = [entry for entry in entries if split_word(entry.stem) == "train"]
            if not train:
                raise no_training_split(path.resolve().name, holds(path, entries))
            for entry in train:
                if entry.suffix.lower() in SUFFIXES and not entry.is_dir():
                    _refuse_empty(entry)
        elif path.exists():
            _refuse_empty(path)
        elif is_missing(source):
            raise missing(source)
        elif not is_hub_id(source):
            raise no_source(source)


def check_corpus(source: str) -> None:
    """Refuse a source of unlabelled text that cannot be one. Whether there is text in it shows when it is read."""
    if corpus_kind(source) == "local":
        with reading(source):
            for file in documents.find(local(source)):
                refuse_special(file)


def corpus_kind(source: str) -> CorpusKind:
    """Tell what an unlabelled source is. DataError where it is nothing that is there."""
    if source == "pydoc":
        return "pydoc"
    path = local(source)
    with reading(source):
        if documents.find_parallel(path):
            return "parallel"
        if path.exists():
            return "local"
    if is_hub_id(source) and documents.kind(path.name) is None and not source.startswith("."):
        return "hub"
    raise missing(source)


def is_hub_id(source: str) -> bool:
    """Tell whether a source is spelled as the hub spells data sets: `name`, `owner/name`, `owner/name:part`."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source) is not None


def local(source: str) -> Path:
    """The path that a source names, if it names one. DataError for what can be no path."""
    if not source.strip() or "\0" in source:
        raise no_source(source)
    try:
        return Path(source).expanduser()
    except RuntimeError as error:  # ~somebody, who has no home here
        raise DataError(f"{source}: there is no such folder: {error}") from None


def named_files(source: str) -> dict[Role, Path]:
    """The files of a source that names one for each split, `train=a.tsv,test=b.tsv`; none for any other source.

    DataError for a split or file that there is not, and without a training split.
    """
    if not re.match(r"\w+=", source):
        return {}
    roles, files = dict(WORDS), {}
    for part in re.split(r",(?=\w+=)", source):
        word, _, name = part.partition("=")
        if word not in roles:
            raise DataError(f"{source}: no split {word!r}.{did_you_mean(word, roles)}")
        if roles[word] in files:
            raise DataError(f"{source}: names two files for the {roles[word]} split; expected one.")
        files[roles[word]] = path = local(name)
        with reading(name):
            if not path.exists():
                raise DataError(f"{source}: {name}: there is no such file.{_neighbours(path)}")
            _refuse_empty(path)
    if "train" not in files:
        raise DataError(f"{source}: names no training split; expected train=FILE among them.")
    return files


def local_files(source: str) -> tuple[str, dict[Role, list[Path]]] | None:
    """The name of a source that is here, and its files for each split, the preferred first, whatever they hold."""
    if files := named_files(source):
        return joint_name(files), {role: [path] for role, path in files.items()}
    path = local(source)
    with reading(source):
        if source in EMBEDDED or not path.exists():
            return None
        if not path.is_dir():
            return path.name, {"train": [path]}
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_file())
    order = [word for word, _ in WORDS]
    words = [(order.index(word), entry) for entry in entries if (word := split_word(entry.stem)) is not None]
    found: dict[Role, list[Path]] = {}
    for rank, entry in sorted(words):
        found.setdefault(WORDS[rank][1], []).append(entry)
    return path.resolve().name, found


def joint_name(files: Mapping[Role, Path]) -> str:
    return " + ".join(path.name for path in files.values())


def split_word(name: str) -> str | None:
    """The split's word in a file or split name."""
    known = {word for word, _ in WORDS}
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in known]
    return words[-1] if words else None


def is_missing(source: str) -> bool:
    """Whether a source that does not exist was meant as a path: it looks like one, or begins in a folder here."""
    path = Path(source)
    if source.startswith((".", "~")) or source.endswith("/") or path.is_absolute() or path.suffix.lower() in SUFFIXES:
        return True
    return len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())


def missing(source: str) -> DataError:
    """The error for a path that does not exist."""
    return DataError(f"{source}: there is no such file or folder.{_neighbours(local(source))}")


def no_source(source: str) -> DataError:
    """The error for a name that can be neither a path nor an id."""
    return DataError(
        f"{source!r} is no data source: expected a folder, a file, a hub id such as glue/sst2, or 'intents'."
    )


def no_training_split(name: str, found: str) -> DataError:
    """The error for a source whose splits do not include one to train on."""
    return DataError(
        f"{name}: no training split; {found}. Expected a file with 'train' as a word of its name, "
        f"ending in {', '.join(SUFFIXES)}."
    )


def holds(folder: Path, entries: Sequence[Path]) -> str:
    """Say what a folder has in it, for messages."""
    return f"{folder} holds {', '.join(entry.name for entry in entries[:20]) or 'nothing'}"


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" Neither is there a folder {path.parent}."
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])


def _refuse_empty(path: Path) -> None:
    refuse_special(path)
    if not path.stat().st_size:
        raise DataError(f"{path} is empty: it needs rows of a text and a label.")
