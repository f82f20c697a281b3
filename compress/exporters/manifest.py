"""Read and write `manifest.json`: what a bundle holds, how it was made, and the hash of
every other file in it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from compress.data.task import Task
from compress.errors import BundleError, CompressError
from compress.io import sha256, write_hub_json
from compress.kinds import Kind, find, is_kind, is_own, names
from compress.provenance import versions

MANIFEST_FILE = "manifest.json"
FORMER = "contents.json"
"""The manifest's name in bundles without a task of version 0.1."""
MOST_LENGTH = 2**24
"""The largest `max_length`, in tokens; the tokenizers library rejects numbers beyond a
machine word."""
PACKAGES = ("compress", "torch", "transformers", "tokenizers", "onnx", "onnxruntime")

BundleKind = Literal["task", "encoder", "generative", "embeddings"]
Precision = Literal["int8", "fp32", "fp16", "w8", "q4"]
"""The precision of the weights; w8 and q4 store only the weights in 8 and 4 bits, to
save space."""

BUNDLE_FILES: Mapping[Precision, str] = {
    "fp32": "onnx/model.onnx",
    "int8": "onnx/model_quantized.onnx",
    "fp16": "onnx/model_fp16.onnx",
    "w8": "onnx/model_w8.onnx",
    "q4": "onnx/model_q4.onnx",
}
"""The names that transformers.js and optimum look for (`w8` is our own). Every bundle
has the first two files."""


@dataclass(frozen=True)
class Stamp:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """Compute the stamp of a file."""
        return cls(path.stat().st_size, sha256(path))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`.

    task        kind, columns, labels in the order of the logits, metric; None if the
                bundle has no task
    max_length  tokens that a text (or a pair) is truncated to, special tokens included
    model_type, parameters   transformers' name of the architecture, and its size (0:
                             unknown)
    threshold   qa: the margin over the best span from which "no answer" is returned;
                None: a span is always returned
    versions    package -> version, of the packages that made the bundle
    files       path inside the bundle, with forward slashes -> stamp; all files except
                the manifest
    kind        task: a model that answers texts; encoder: one that returns a vector for
                each token; generative: a language model; embeddings: an encoder as
                earlier versions wrote it, which `read` converts to one of the others
    """

    task: Task | None = None
    max_length: int
    model_type: str
    parameters: int = 0
    versions: Mapping[str, str]
    files: Mapping[str, Stamp]
    format: Literal[1] = 1
    threshold: float | None = None
    kind: BundleKind = "task"

    def __post_init__(self) -> None:
        if not 0 < self.max_length <= MOST_LENGTH:
            raise ValueError(
                f"max_length {self.max_length}: expected 1 to {MOST_LENGTH} tokens"
            )
        if self.parameters < 0:
            raise ValueError(f"parameters {self.parameters}: expected no less than 0")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"threshold {self.threshold}: expected a finite number")
        if (self.task is not None) != (self.kind == "task"):
            raise ValueError(
                f"kind {self.kind}: expected a task in bundles of kind task, and in no "
                "others"
            )
        if self.task is not None:
            self._check_task(self.task)

    def _check_task(self, task: Task) -> None:
        """Raise ValueError for a task that no model can have; convert a task read from
        JSON to the class of its kind."""
        if not is_kind(task.kind):
            raise ValueError(f"task: no kind {task.kind!r} among {', '.join(names())}")
        own = Task(**vars(task))
        object.__setattr__(self, "task", own)
        texts = len(own.text)
        labels = len(own.labels)
        if not 0 < texts <= 2 or (own.has_labels and not labels):
            raise ValueError(f"task: {own.kind} of {texts} texts and {labels} labels")

    @property
    def vectors(self) -> bool:
        """Check whether the model answers a text with a vector."""
        return self.task is not None and self.task.vectors

    @property
    def margin(self) -> float:
        """Return the threshold, infinite if there is none."""
        return math.inf if self.threshold is None else self.threshold

    @classmethod
    def from_model(
        cls,
        model: Any,
        max_length: int,
        *,
        kind: BundleKind = "task",
        task: Task | None = None,
    ) -> "Manifest":
        """Describe a transformers model; `files` is empty."""
        return cls(
            task=task,
            max_length=max_length,
            model_type=model.config.model_type,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            versions=versions(PACKAGES),
            files={},
            kind=kind,
        )

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a folder's manifest. Raises BundleError if it is missing or invalid."""
        from pydantic import TypeAdapter, ValidationError

        path = folder / MANIFEST_FILE
        if not path.is_file():
            path = folder / FORMER
        try:
            manifest = TypeAdapter(cls).validate_json(path.read_bytes(), strict=True)
        except CompressError as error:  # of the user's own kind of task
            raise BundleError(f"{path}: {error}") from error
        except FileNotFoundError:
            raise BundleError(
                f"{folder}: has no {MANIFEST_FILE}; expected the folder of a bundle"
            ) from None
        except NotADirectoryError:
            raise BundleError(
                f"{folder}: is a file; expected the folder of a bundle"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            wrong = first["msg"].removeprefix("Value error, ")
            if first["loc"]:
                wrong = (
                    f"{'.'.join(map(str, first['loc']))}: {wrong}, found "
                    f"{first['input']!r:.60}"
                )
            raise BundleError(
                f"{path}: {wrong}; the bundle is damaged, or of another version of "
                "compress: write or copy it again"
            ) from None
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise BundleError(
                    f"{path}: lists {name!r}; expected only paths inside the bundle: "
                    "copy it again"
                )
        if manifest.kind == "embeddings":
            return manifest._with_task(folder)
        return manifest

    def _with_task(self, folder: Path) -> "Manifest":
        """Convert an encoder of an earlier version to one for the task `embedding`, or
        to one that returns a vector for each token."""
        from compress.models.sentence_folder import SentenceFolder

        settings = SentenceFolder.read(folder).settings
        if not settings.embeds:
            return replace(self, kind="encoder")
        task = find("embedding").from_settings(settings)
        return replace(self, kind="task", task=task)

    def write(self, folder: Path) -> None:
        """Write the folder's manifest."""
        content = asdict(self)
        if self.task is not None:
            del content["kind"]  # the default, which no version has written
            # the files of sentence-transformers hold it
            del content["task"]["preparation"]
        write_hub_json(folder / MANIFEST_FILE, content)

    def check(self, folder: Path) -> None:
        """Raise BundleError with every file that is missing or differs from its
        stamp."""
        problems = []
        for name, stamp in self.files.items():
            expected = f"expected {stamp.bytes} bytes, sha256 {stamp.sha256}"
            if not (folder / name).is_file():
                problems.append(f"{folder / name}: missing; {expected}")
            elif (found := Stamp.of(folder / name)) != stamp:
                problems.append(
                    f"{folder / name}: {found.bytes} bytes, sha256 {found.sha256}; "
                    f"{expected}"
                )
        if problems:
            raise BundleError(
                "\n".join(
                    (
                        *problems,
                        f"{folder}: the bundle is damaged; write or copy it again",
                    )
                )
            )


def is_bundle(folder: Path) -> bool:
    """Check that a folder has a manifest."""
    return any((folder / name).is_file() for name in (MANIFEST_FILE, FORMER))


def find_bundle(folder: Path, kind: BundleKind | None = None) -> Path | None:
    """Return the folder itself if it is a bundle, or the bundle of a run; None if it is
    neither.

    Raises BundleError for a bundle without its manifest, which would look like a
    checkpoint.
    """
    for place in (folder, folder / "bundle"):
        if is_bundle(place):
            return place if kind is None or Manifest.read(place).kind == kind else None
        if (place / "config.json").is_file() and (place / "recipe.yaml").is_file():
            raise BundleError(
                f"{place / MANIFEST_FILE}: is missing, so the bundle is incomplete; "
                "write or copy it again"
            )
    return None


def list_input_files(paths: Iterable[Path]) -> list[Path]:
    """List the files of the paths that are bundles or runs, and all other paths
    unchanged."""
    files = []
    for path in paths:
        folder = find_bundle(path)
        names = [] if folder is None else [MANIFEST_FILE, *Manifest.read(folder).files]
        files += [path] if folder is None else [folder / name for name in names]
    return files


def kind_of_bundle(folder: Path) -> Kind | None:
    """Return the kind of a bundle's task if its rows could be mistaken for another
    kind's; None otherwise."""
    place = find_bundle(folder, "task")
    task = Manifest.read(place).task if place else None
    if task is None or (task.shows and not is_own(task.kind)):
        return None
    return task.kind


def stamp_files(folder: Path) -> dict[str, Stamp]:
    """Compute the stamps of all files in the folder except the manifest, sorted by
    path."""
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST_FILE
    )
    return {path.relative_to(folder).as_posix(): Stamp.of(path) for path in paths}
