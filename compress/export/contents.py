"""`contents.json`: what is in a folder that is shipped but is no bundle, as nothing in it is scored by a task."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from compress.errors import BundleError, ExportError
from compress.export import manifest
from compress.export.manifest import Stamp
from compress.files import filled
from compress.provenance import versions

NAME = "contents.json"


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
            found = TypeAdapter(cls).validate_json((folder / NAME).read_bytes())
        except FileNotFoundError:
            raise BundleError(f"{folder}: no {NAME} in it; expected a folder that `compress export` wrote") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise BundleError(f"{folder / NAME}: {first['loc']}: {first['msg']}; write or copy it again") from None
        if found.kind != kind:
            raise BundleError(f"{folder}: holds {found.kind}; expected {kind}")
        manifest.check_inside(folder / NAME, found.files)
        manifest.check_files(folder, found.files)
        return found


@contextmanager
def made(path: Path, kind: Literal["embeddings", "generative"], model_type: str, max_length: int) -> Iterator[Path]:
    """A folder to fill, which takes the name `path` with its contents written down at the end, or is not there.

    A folder of this sort that is there already is replaced; raises ExportError for anything else.
    """
    if (path.is_dir() and any(path.iterdir()) and not (path / NAME).is_file()) or path.is_file():
        raise ExportError(f"{path}: exists and is none of ours; expected a new folder, or an exported one to replace")
    with filled(path) as folder:
        yield folder
        found = Contents(kind, model_type, max_length, versions(manifest.PACKAGES), manifest.stamps(folder))
        (folder / NAME).write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
