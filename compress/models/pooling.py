"""Describe how tokens become one vector, as sentence-transformers writes it into a folder. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal, cast, get_args

from compress.errors import TeacherError

Pool = Literal["mean", "cls", "max"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MODULES, SIZES, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
SETTINGS: Final = "sentence_embedding"
"""The name of the config's setting that holds a `Pooling`."""
ACTIVATIONS: Final[Mapping[str, str]] = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
}


@dataclass(frozen=True)
class Pooling:
    """Describe how an encoder's tokens become one vector.

    pool        the mean of all tokens, the first token, or the largest of each number; None: tokens only
    normalise   whether the vector is divided by its length
    max_length  tokens a text is cut to, where the folder says so
    width       numbers of the vector; None: the encoder's own width
    projected   whether a linear map comes between pooling and vector; biased: whether it adds a bias; activation: what
                follows it
    prompts     what comes before a text, by what the text is for: `query`, `document`, ...
    """

    pool: Pool | None
    normalise: bool = False
    max_length: int | None = None
    width: int | None = None
    projected: bool = False
    biased: bool = False
    activation: str = "identity"
    prompts: Mapping[str, str] | None = None

    @classmethod
    def read(cls, folder: Path) -> "Pooling":
        """Read the modules of sentence-transformers; a folder without modules.json gives tokens only.

        Raises TeacherError for modules besides encoder, pooling, one linear map and normalising, and for other kinds of
        pooling.
        """
        if not (folder / MODULES).is_file():
            return cls(None)
        paths = module_paths(folder)
        sizes = _read_json(folder / SIZES, dict) if (folder / SIZES).is_file() else {}
        prompts = _read_json(folder / PROMPTS, dict).get("prompts") if (folder / PROMPTS).is_file() else None
        found = cls(
            _read_pool(folder / paths["Pooling"] / "config.json") if "Pooling" in paths else None,
            "Normalize" in paths,
            prompts={str(name): str(text) for name, text in (prompts or {}).items() if text} or None,
            max_length=sizes.get("max_seq_length"),
        )
        if "Dense" not in paths:
            return found
        where = folder / paths["Dense"] / "config.json"
        dense = _read_json(where, dict)
        known = {name.rpartition(".")[2]: ours for ours, name in ACTIVATIONS.items()}
        said = str(dense.get("activation_function", ACTIVATIONS["tanh"])).rpartition(".")[2]
        if said not in known or not isinstance(dense.get("out_features"), int):
            raise TeacherError(f"{where}: expected out_features and an activation among {', '.join(known)}, not {said}")
        return replace(
            found, width=dense["out_features"], projected=True, biased=bool(dense.get("bias", True)),
            activation=known[said],
        )  # fmt: skip

    def write(self, folder: Path, hidden: int, max_length: int | None = None) -> None:
        """Write the files that sentence-transformers, of any version, reads this from; not the linear map's weights."""
        width = self.width or hidden
        modules: list[tuple[str, dict[str, object] | None]] = [
            ("Transformer", None),
            ("Pooling", {
                "word_embedding_dimension": hidden,
                "pooling_mode_cls_token": self.pool == "cls",
                "pooling_mode_mean_tokens": self.pool == "mean",
                "pooling_mode_max_tokens": self.pool == "max",
                "pooling_mode_mean_sqrt_len_tokens": False,
            }),
        ]  # fmt: skip
        if self.projected:
            modules.append(("Dense", {
                "in_features": hidden, "out_features": width, "bias": self.biased,
                "activation_function": ACTIVATIONS[self.activation],
            }))  # fmt: skip
        if self.normalise:
            modules.append(("Normalize", None))
        listed = []
        for index, (kind, config) in enumerate(modules):
            path = "" if kind == "Transformer" else f"{index}_{kind}"
            (folder / path).mkdir(exist_ok=True)
            listed.append(
                {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            )
            if config is not None:
                _write_json(folder / path / "config.json", config)
        _write_json(folder / MODULES, listed)
        if max_length or self.max_length:
            _write_json(folder / SIZES, {"max_seq_length": max_length or self.max_length, "do_lower_case": False})
        if self.prompts:
            told = {"document": self.document_prompt, **self.prompts}  # it looks for the other names only without this
            _write_json(folder / PROMPTS, {"prompts": told, "default_prompt_name": None})

    @property
    def document_prompt(self) -> str:
        """Return what comes before a text that is to be found, by any name that sentence-transformers has for it."""
        known = self.prompts or {}
        return next((known[name] for name in ("document", "passage", "corpus") if name in known), "")


def module_paths(folder: Path) -> dict[str, str]:
    """Read where each kind of module of a folder of sentence-transformers is. Raises TeacherError."""
    listed = _read_json(folder / MODULES, list)
    try:
        paths = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
    except (TypeError, KeyError):
        raise TeacherError(f"{folder / MODULES}: expected a list of modules, each with a type and a path") from None
    if unknown := sorted(paths.keys() - {"Transformer", "Pooling", "Dense", "Normalize"}):
        raise TeacherError(
            f"{folder / MODULES}: {', '.join(unknown)}: cannot be read; expected an encoder, its pooling, and perhaps "
            "a linear map and a normalisation"
        )
    if len(paths) < len(listed):
        raise TeacherError(f"{folder / MODULES}: has one module twice; expected each once")
    if outside := sorted(path for path in paths.values() if path not in ("", PurePath(path).name)):
        raise TeacherError(f"{folder / MODULES}: {outside[0]!r}: expected modules in folders of its own folder")
    if paths.get("Transformer"):
        raise TeacherError(
            f"{folder / MODULES}: the encoder is in {paths['Transformer']!r}; expected it in the folder itself, as "
            "sentence-transformers 2 and later save it: load it there and save it again"
        )
    return paths


def _read_pool(path: Path) -> Pool:
    """Read either form that sentence-transformers writes: a name, or a yes or no for each."""
    told: Mapping[str, Any] = _read_json(path, dict)
    found = told.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, chosen in told.items()
        if name.startswith("pooling_mode_") and chosen
    ]
    names = [found] if isinstance(found, str) else list(found)
    if len(names) != 1 or names[0] not in POOLS:
        raise TeacherError(
            f"{path}: pooling is {' and '.join(map(str, names)) or 'unknown'}; expected {' or '.join(POOLS)}"
        )
    return cast(Pool, names[0])


def _read_json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TeacherError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, kind):
        raise TeacherError(f"{path}: holds a {type(found).__name__}; expected a {kind.__name__}")
    return found


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def pooling_of(config: Any) -> Pooling:
    """Return how a sentence encoder of this config pools; where it does not say, by the mean, of length 1."""
    settings = getattr(config, SETTINGS, None)
    return Pooling(**settings) if settings else Pooling("mean", normalise=True)


def width_of(config: Any) -> int:
    """Count the numbers of a sentence encoder's vectors."""
    return int(pooling_of(config).width or config.hidden_size)


def prompts_of(config: Any) -> tuple[str, str]:
    """Return what a sentence encoder reads before a text that asks, and before one that is to be found."""
    pooling = pooling_of(config)
    return (pooling.prompts or {}).get("query", ""), pooling.document_prompt


def set_pooling(config: Any, pooling: Pooling) -> None:
    """Let sentence encoders of this config pool so."""
    setattr(config, SETTINGS, asdict(pooling))


def keep_width(config: Any, taught: Any) -> None:
    """Let a student of this config give vectors as wide as its teacher's, by a linear map if need be."""
    pooling, width = pooling_of(taught), width_of(taught)
    projected = pooling.projected or width != config.hidden_size
    set_pooling(config, replace(pooling, width=width if projected else None, projected=projected))
