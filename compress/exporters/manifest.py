"""`manifest.json`: what a bundle predicts, how it was made, and the hash of every other file in it."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from compress.data.task import Task
from compress.errors import BundleError, ExportError
from compress.io import filled, written
from compress.provenance import versions

NAME = "manifest.json"
LONGEST = 2**24
"""Tokens; tokenizers take no number that does not fit into a machine's word."""
PACKAGES = ("compress", "torch", "transformers", "tokenizers", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Stamp:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    task        kind, columns, labels in the order of the logits, metric
    max_length  tokens a text (or a pair) is cut to, special tokens included
    model_type, parameters   the architecture by transformers' name, and its size
    threshold   qa: how much better no answer must score than the best span to be given; none: something is always
                answered
    versions    package -> version, of those that made the bundle
    files       path inside the bundle, with forward slashes -> stamp; all files but the manifest
    """

    task: Task
    max_length: int
    model_type: str
    parameters: int
    versions: Mapping[str, str]
    files: Mapping[str, Stamp]
    format: Literal[1] = 1
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_length <= LONGEST:
            raise ValueError(f"max_length {self.max_length}: expected 1 to {LONGEST} tokens")
        if self.parameters < 0:
            raise ValueError(f"parameters {self.parameters}: expected no less than 0")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"threshold {self.threshold}: expected a finite number")
        kind, texts, labels = self.task.kind, len(self.task.text), len(self.task.labels)
        if not 0 < texts <= 2 or (kind not in ("regression", "qa") and not labels):
            raise ValueError(f"task: {kind} of {texts} texts and {labels} labels")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a folder's manifest. Raises BundleError where there is none, or none that can be understood."""
        from pydantic import TypeAdapter, ValidationError

        path = folder / NAME
        try:
            manifest = TypeAdapter(cls).validate_json(path.read_bytes(), strict=True)
        except FileNotFoundError:
            raise BundleError(f"{folder}: no {NAME} in it; expected the folder of a bundle") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise BundleError(
                f"{path}: {where}: {first['msg']}; the bundle is damaged, or of another version of compress: "
                "write or copy it again"
            ) from None
        check_inside(path, manifest.files)
        return manifest

    def write(self, folder: Path) -> None:
        """Replaces the folder's manifest as a whole."""
        with written(folder / NAME) as partial:
            text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
            partial.write_text(text + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Raises BundleError naming every file that is missing or is not the one that was written."""
        check_files(folder, self.files)


def located(folder: Path) -> Path | None:
    """Find the bundle in a bundle's own folder, or in its run's; None where there is none.

    Raises BundleError for a bundle without its manifest, which would pass for a checkpoint.
    """
    for place in (folder, folder / "bundle"):
        if (place / NAME).is_file():
            return place
        if (place / "config.json").is_file() and (place / "recipe.yaml").is_file():
            raise BundleError(f"{place / NAME}: is missing, so the bundle is not whole; write or copy it again")
    return None


def check_inside(path: Path, names: Iterable[str]) -> None:
    """Raises BundleError for a name in the list at `path` that leads out of its folder."""
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}: lists {name!r}; expected paths inside the bundle only")


def check_files(folder: Path, files: Mapping[str, Stamp]) -> None:
    """Raises BundleError naming every file of the folder that is missing or is not the one with this stamp."""
    problems = [problem for name, stamp in files.items() if (problem := _problem(folder / name, stamp))]
    if problems:
        raise BundleError("\n".join((*problems, f"{folder}: the bundle is damaged; write or copy it again")))


def stamps(folder: Path) -> dict[str, Stamp]:
    """The stamp of every file below the folder but the manifest, sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / NAME)
    return {path.relative_to(folder).as_posix(): Stamp.of(path) for path in paths}


def _problem(path: Path, expected: Stamp) -> str:
    if not path.is_file():
        return f"{path}: missing; expected {expected.bytes} bytes, sha256 {expected.sha256}"
    found = Stamp.of(path)
    if found == expected:
        return ""
    return (
        f"{path}: {found.bytes} bytes, sha256 {found.sha256}; expected {expected.bytes} bytes, sha256 {expected.sha256}"
    )


CONTENTS_NAME = "contents.json"


@dataclass(frozen=True)
class Contents:
    """kind        sentence embeddings, or a model that writes text
    model_type  the architecture by transformers' name
    max_length  tokens a text is cut to, special tokens included
    versions    package -> version, of those that made the folder
    files       path inside the folder, with forward slashes -> stamp; all files but this one
    """

    kind: Literal["embeddings", "generative"]
    model_type: str
    max_length: int
    versions: Mapping[str, str]
    files: Mapping[str, Stamp]
    format: Literal[1] = 1

    @classmethod
    def read(cls, folder: Path, kind: Literal["embeddings", "generative"]) -> "Contents":
        """Raises BundleError for a folder that is none of this kind, and for files that are not what was written."""
        from pydantic import TypeAdapter, ValidationError

        try:
            found = TypeAdapter(cls).validate_json((folder / CONTENTS_NAME).read_bytes())
        except FileNotFoundError:
            raise BundleError(
                f"{folder}: no {CONTENTS_NAME} in it; expected a folder that `compress export` wrote"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BundleError(
                f"{folder / CONTENTS_NAME}: {first['loc']}: {first['msg']}; write or copy it again"
            ) from None
        if found.kind != kind:
            raise BundleError(f"{folder}: holds {found.kind}; expected {kind}")
        check_inside(folder / CONTENTS_NAME, found.files)
        check_files(folder, found.files)
        return found


@contextmanager
def made(path: Path, kind: Literal["embeddings", "generative"], model_type: str, max_length: int) -> Iterator[Path]:
    """A folder to fill, which takes the name `path` with its contents written down at the end, or is not there.

    A folder of this sort that is there already is replaced; raises ExportError for anything else.
    """
    if (path.is_dir() and any(path.iterdir()) and not (path / CONTENTS_NAME).is_file()) or path.is_file():
        raise ExportError(f"{path}: exists and is none of ours; expected a new folder, or an exported one to replace")
    with filled(path) as folder:
        yield folder
        found = Contents(kind, model_type, max_length, versions(PACKAGES), stamps(folder))
        (folder / CONTENTS_NAME).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
