"""Describe how tokens are pooled into one vector, in the files of
sentence-transformers. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, Literal, cast, get_args

from compress.errors import TeacherError
from compress.models.folder import MODULES, identify_kind

Pool = Literal["mean", "cls", "max"]
POOLS: tuple[Pool, ...] = get_args(Pool)
SIZES, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
SETTINGS: Final = "sentence_embedding"
"""The name of the config's setting that holds a `Pooling`."""
ACTIVATIONS: Final[Mapping[str, str]] = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
}


@dataclass(frozen=True)
class Pooling:
    """Describe how an encoder's tokens become one vector.

    pool        the mean of all tokens, the first token, or the maximum of each
                dimension; None: tokens only
    normalise   whether the vector is divided by its length
    max_length  the tokens to which a text is truncated, if the folder sets them
    width       dimensions of the vector; None: the encoder's own width
    projected   whether a linear map follows the pooling, biased: with a bias, and
                activation: with this activation
    prompts     text to put before a text, by the purpose of the text: `query`,
                `document`, ...
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
        """Read the modules of sentence-transformers; an encoder without modules.json
        returns tokens only.

        Raises TeacherError for other modules than encoder, pooling, one linear map and
        normalisation, and for other kinds of pooling.
        """
        if identify_kind(folder) != "sentence_encoder":
            return cls(None)
        paths = module_paths(folder)
        sizes = _read_json(folder / SIZES, dict) if (folder / SIZES).is_file() else {}
        prompts = (
            _read_json(folder / PROMPTS, dict).get("prompts")
            if (folder / PROMPTS).is_file()
            else None
        )
        pooling = cls(
            _read_pool(folder / paths["Pooling"] / "config.json")
            if "Pooling" in paths
            else None,
            "Normalize" in paths,
            prompts={
                str(name): str(text) for name, text in (prompts or {}).items() if text
            }
            or None,
            max_length=sizes.get("max_seq_length"),
        )
        if "Dense" not in paths:
            return pooling
        where = folder / paths["Dense"] / "config.json"
        dense = _read_json(where, dict)
        known = {name.rpartition(".")[2]: ours for ours, name in ACTIVATIONS.items()}
        name = str(dense.get("activation_function", ACTIVATIONS["tanh"])).rpartition(
            "."
        )[2]
        if name not in known or not isinstance(dense.get("out_features"), int):
            raise TeacherError(
                f"{where}: expected out_features and an activation among "
                f"{', '.join(known)}, not {name}"
            )
        return replace(
            pooling,
            width=dense["out_features"],
            projected=True,
            biased=bool(dense.get("bias", True)),
            activation=known[name],
        )

    def write(self, folder: Path, hidden: int, max_length: int | None = None) -> None:
        """Write the files of sentence-transformers, for any of its versions, without
        the linear map's weights."""
        width = self.width or hidden
        modules: list[tuple[str, dict[str, object] | None]] = [
            ("Transformer", None),
            (
                "Pooling",
                {
                    "word_embedding_dimension": hidden,
                    "pooling_mode_cls_token": self.pool == "cls",
                    "pooling_mode_mean_tokens": self.pool == "mean",
                    "pooling_mode_max_tokens": self.pool == "max",
                    "pooling_mode_mean_sqrt_len_tokens": False,
                },
            ),
        ]
        if self.projected:
            modules.append(
                (
                    "Dense",
                    {
                        "in_features": hidden,
                        "out_features": width,
                        "bias": self.biased,
                        "activation_function": ACTIVATIONS[self.activation],
                    },
                )
            )
        if self.normalise:
            modules.append(("Normalize", None))
        listed = []
        for index, (kind, config) in enumerate(modules):
            path = "" if kind == "Transformer" else f"{index}_{kind}"
            (folder / path).mkdir(exist_ok=True)
            listed.append(
                {
                    "idx": index,
                    "name": str(index),
                    "path": path,
                    "type": f"sentence_transformers.models.{kind}",
                }
            )
            if config is not None:
                _write_json(folder / path / "config.json", config)
        _write_json(folder / MODULES, listed)
        if max_length or self.max_length:
            _write_json(
                folder / SIZES,
                {
                    "max_seq_length": max_length or self.max_length,
                    "do_lower_case": False,
                },
            )
        if self.prompts:
            # it tries other names only without this one
            prompts = {"document": self.document_prompt, **self.prompts}
            _write_json(
                folder / PROMPTS, {"prompts": prompts, "default_prompt_name": None}
            )

    @property
    def document_prompt(self) -> str:
        """Return the prompt of texts that are searched, under any of
        sentence-transformers' names for it."""
        known = self.prompts or {}
        return next(
            (
                known[name]
                for name in ("document", "passage", "corpus")
                if name in known
            ),
            "",
        )


def module_paths(folder: Path) -> dict[str, str]:
    """Read the folders of a sentence-transformers model's modules, by their kind.
    Raises TeacherError."""
    listed = _read_json(folder / MODULES, list)
    try:
        paths = {
            str(module["type"]).rpartition(".")[2]: str(module["path"])
            for module in listed
        }
    except (TypeError, KeyError):
        raise TeacherError(
            f"{folder / MODULES}: expected a list of modules, each with a type and a "
            "path"
        ) from None
    if unknown := sorted(
        paths.keys() - {"Transformer", "Pooling", "Dense", "Normalize"}
    ):
        raise TeacherError(
            f"{folder / MODULES}: {', '.join(unknown)}: cannot be read; expected an "
            "encoder, its pooling, and optionally a linear map and a normalisation"
        )
    if len(paths) < len(listed):
        raise TeacherError(
            f"{folder / MODULES}: has the same module twice; expected each once"
        )
    if outside := sorted(
        path for path in paths.values() if path not in ("", PurePath(path).name)
    ):
        raise TeacherError(
            f"{folder / MODULES}: {outside[0]!r}: expected modules in direct subfolders"
        )
    if paths.get("Transformer"):
        raise TeacherError(
            f"{folder / MODULES}: the encoder is in {paths['Transformer']!r}; expected "
            "it in the folder itself, as sentence-transformers 2 and later save it: "
            "load it there and save it again"
        )
    return paths


def _read_pool(path: Path) -> Pool:
    """Read either form that sentence-transformers writes: a name, or a flag for each
    kind."""
    config: Mapping[str, Any] = _read_json(path, dict)
    modes = config.get("pooling_mode") or [
        name.removeprefix("pooling_mode_")
        .removesuffix("_tokens")
        .removesuffix("_token")
        for name, chosen in config.items()
        if name.startswith("pooling_mode_") and chosen
    ]
    names = [modes] if isinstance(modes, str) else list(modes)
    if len(names) != 1 or names[0] not in POOLS:
        raise TeacherError(
            f"{path}: pooling is {' and '.join(map(str, names)) or 'unknown'}; "
            f"expected {' or '.join(POOLS)}"
        )
    return cast(Pool, names[0])


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TeacherError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, kind):
        raise TeacherError(
            f"{path}: holds a {type(content).__name__}; expected a {kind.__name__}"
        )
    return content


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def pooling_of(config: Any) -> Pooling:
    """Return how a sentence encoder of this config pools; by default the mean, at
    length 1."""
    settings = getattr(config, SETTINGS, None)
    return Pooling(**settings) if settings else Pooling("mean", normalise=True)


def width_of(config: Any) -> int:
    """Return the width of a sentence encoder's vectors."""
    return int(pooling_of(config).width or config.hidden_size)


def prompts_of(config: Any) -> tuple[str, str]:
    """Return a sentence encoder's prompts for queries and for the texts that are
    searched."""
    pooling = pooling_of(config)
    return (pooling.prompts or {}).get("query", ""), pooling.document_prompt


def set_pooling(config: Any, pooling: Pooling) -> None:
    """Make sentence encoders of this config pool in this way."""
    setattr(config, SETTINGS, asdict(pooling))


def keep_width(config: Any, taught: Any) -> None:
    """Make a student of this config return vectors as wide as its teacher's, by a
    linear map if necessary."""
    pooling, width = pooling_of(taught), width_of(taught)
    projected = pooling.projected or width != config.hidden_size
    set_pooling(
        config,
        replace(pooling, width=width if projected else None, projected=projected),
    )
