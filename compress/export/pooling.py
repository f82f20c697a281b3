"""How an encoder's tokens become one vector, as sentence-transformers' folders say it: modules.json and 1_Pooling."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from compress.errors import ExportError

Pool = Literal["mean", "cls", "max"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MODULES, POOLING, SIZES = "modules.json", "1_Pooling", "sentence_bert_config.json"
UNLIMITED = 10**6
"""What a tokenizer without a limit calls its limit is above this."""


@dataclass(frozen=True)
class Reading:
    """pool        the mean of all tokens, the first token, or the largest of each number; None: tokens only
    normalise   whether the vector is divided by its length
    max_length  tokens a text is cut to, where the folder says so
    """

    pool: Pool | None
    normalise: bool = False
    max_length: int | None = None

    @classmethod
    def of(cls, folder: Path) -> "Reading":
        """What a folder says; a folder without modules.json is an encoder that gives tokens only.

        Raises ExportError for modules besides encoder, pooling and normalising, and for other kinds of pooling.
        """
        if not (folder / MODULES).is_file():
            return cls(None)
        listed = _json(folder / MODULES, list)
        try:
            paths = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
        except (TypeError, KeyError):
            raise ExportError(f"{folder / MODULES}: expected a list of modules, each with a type and a path") from None
        if unknown := sorted(paths.keys() - {"Transformer", "Pooling", "Normalize"}):
            raise ExportError(
                f"{folder / MODULES}: {', '.join(unknown)}: cannot be exported; expected an encoder, its pooling and "
                "perhaps a normalisation"
            )
        if outside := sorted(path for path in paths.values() if path not in ("", PurePath(path).name)):
            raise ExportError(f"{folder / MODULES}: {outside[0]!r}: expected modules in folders of its own folder")
        sizes = _json(folder / SIZES, dict) if (folder / SIZES).is_file() else {}
        pool = _pool(folder / paths["Pooling"] / "config.json") if "Pooling" in paths else None
        return cls(pool, "Normalize" in paths, sizes.get("max_seq_length"))

    def write(self, folder: Path, width: int, max_length: int) -> None:
        """The files that sentence-transformers, of any version, reads this from."""
        prefix = "sentence_transformers.models"
        kinds = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] * self.normalise)]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
            for index, (path, kind) in enumerate(kinds)
        ]
        modes = {
            "pooling_mode_cls_token": self.pool == "cls",
            "pooling_mode_mean_tokens": self.pool == "mean",
            "pooling_mode_max_tokens": self.pool == "max",
            "pooling_mode_mean_sqrt_len_tokens": False,
        }
        for path, _ in kinds[1:]:
            (folder / path).mkdir()
        _write(folder / MODULES, modules)
        _write(folder / POOLING / "config.json", {"word_embedding_dimension": width, **modes})
        _write(folder / SIZES, {"max_seq_length": max_length, "do_lower_case": False})


def _pool(path: Path) -> Pool:
    """Of both forms that sentence-transformers writes: a name, or a yes or no for each."""
    told: Mapping[str, Any] = _json(path, dict)
    found = told.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, chosen in told.items()
        if name.startswith("pooling_mode_") and chosen
    ]
    names = [found] if isinstance(found, str) else list(found)
    if len(names) != 1 or names[0] not in POOLS:
        raise ExportError(
            f"{path}: pooling is {' and '.join(map(str, names)) or 'unknown'}; expected {' or '.join(POOLS)}"
        )
    return names[0]


def _json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, kind):
        raise ExportError(f"{path}: holds a {type(found).__name__}; expected a {kind.__name__}")
    return found


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
