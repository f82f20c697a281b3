"""Describe the folder of a saved model, and which of its files are read. Imports
neither torch nor transformers.

Which weights are read is decided as transformers decides it: model.safetensors, else
the shards that model.safetensors.index.json lists, else (if pickled weights are
allowed) the same two of pytorch_model.bin. Other weight files in the folder
(consolidated.safetensors, onnx/, an optimizer's state) are neither read nor hashed.
"""

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, Final, Literal, NamedTuple

from compress.errors import CompressError, TeacherError
from compress.io import CHECKSUMS, parse_json, sha256
from compress.models.json_keys import JsonKeys

FolderKind = Literal["transformers", "sentence_encoder", "cross_encoder"]
"""What a folder is: a plain checkpoint of transformers, or what sentence-transformers
saved for vectors of texts or for scores of pairs."""

CONFIG: Final = "config.json"
SAFETENSORS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
MODULES: Final = "modules.json"
MODULE_SETTINGS: Final = "config_sentence_transformers.json"
ADAPTER: Final = "adapter_config.json"
PROBLEM_TYPES: Final = (
    "regression",
    "single_label_classification",
    "multi_label_classification",
)
IGNORED: Final[Mapping[str, tuple[Any, str, tuple[str, ...]]]] = {
    "position_embedding_type": (
        "absolute",
        "relative positions, which transformers 5 no longer computes",
        ("esm", "granitemoehybrid", "modernbert", "modernbert-decoder"),
    ),
    "pruned_heads": (
        {},
        "attention heads that transformers 4 removed when it loaded the model",
        (),
    ),
    "tie_encoder_decoder": (
        False,
        "one set of weights for encoder and decoder, which transformers 5 does not tie",
        (),
    ),
    "adapters": (
        {},
        "adapters inside the layers, which only the library `adapters` computes",
        (),
    ),
    "use_conv": (False, "convolutions that no class of transformers computes", ()),
}
"""Settings that change what a model computes and that transformers 5 ignores: name ->
(the value without effect, what other values mean, the families that honour them)."""
RISING: Final = ("Identity", "Sigmoid", "Softmax", "Tanh")
"""The classes of torch.nn that keep the order of a cross-encoder's logits in its
scores."""
MOST_LAYERS: Final = 1000
MOST_OUTPUTS: Final = 100_000


class TensorInfo(NamedTuple):
    """The shape and the number format of a tensor in a file; formats are written as in
    safetensors (F32, BF16, I64)."""

    shape: tuple[int, ...]
    format: str


class ModuleEntry(NamedTuple):
    """An entry of modules.json: a module's class, its dotted path, and its folder
    inside the folder, "" for itself."""

    kind: str
    dotted: str
    path: str


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a folder that transformers reads, and the index that lists
    them, if they are shards."""

    files: tuple[Path, ...]
    index: Path | None = None

    @property
    def pickled(self) -> bool:
        return not self.files[0].name.endswith(".safetensors")


def identify_kind(folder: Path) -> FolderKind:
    """Find out what a folder is, from the types of its modules rather than from the
    presence of modules.json.

    Raises TeacherError for folders that no command can read: adapters without their
    base model, SetFit classifiers, sparse and late-interaction encoders, and
    cross-encoders with more modules than a sequence classifier.
    """
    if (folder / ADAPTER).is_file():
        raise TeacherError(
            f"{folder / ADAPTER}: the folder holds adapters (LoRA, PEFT), which are "
            "not applied here; expected the full weights. Merge them into their base "
            "model (merge_and_unload of peft), save it, and pass that folder"
        )
    for name in ("config_setfit.json", "model_head.pkl", "model_head.joblib"):
        if (folder / name).is_file():
            raise TeacherError(
                f"{folder / name}: the folder is a SetFit classifier, whose head is "
                "pickled Python code and is never loaded; without it the model only "
                "returns vectors. To use those, copy the folder without "
                "model_head.pkl and config_setfit.json"
            )
    if not (folder / MODULES).is_file():
        return "transformers"
    listed = list_modules(folder)
    late = [module.dotted for module in listed if module.dotted.startswith("pylate.")]
    settings = open_keys(folder / MODULE_SETTINGS)
    saved_by = (
        late[0] if late else settings.left.get("model_type", "SentenceTransformer")
    )
    if saved_by == "SentenceTransformer":
        return "sentence_encoder"
    types = [module.kind for module in listed]
    if saved_by != "CrossEncoder":
        where = (
            f"{folder / MODULES}:"
            if late
            else f"{folder / MODULE_SETTINGS}: its model_type says that"
        )
        raise TeacherError(
            f"{where} the folder is a {saved_by} of the modules {', '.join(types)}, "
            "which is not supported; expected a SentenceTransformer (one vector for a "
            "text), a CrossEncoder, or a checkpoint of transformers"
        )
    if types != ["Transformer"]:
        raise TeacherError(
            f"{folder / MODULES}: a cross-encoder of the modules {', '.join(types)} is "
            "not supported; expected one Transformer, a sequence classifier"
        )
    _check_scores(settings)
    return "cross_encoder"


def _check_scores(keys: JsonKeys) -> None:
    """Raise TeacherError for settings of a cross-encoder that change the order of its
    logits, or its texts."""
    keys.take("__version__", dict, {})
    keys.take("model_type", str)
    keys.take("keep_in_fp32_modules", list, None)  # everything is float32
    prompts = keys.take("prompts", dict, None) or {}
    prompt = prompts.get(keys.take("default_prompt_name", str, None))
    if prompt:
        raise TeacherError(
            f"{keys.path}: default_prompt_name puts {prompt!r} before the texts of "
            "this cross-encoder, which is not supported; expected none. Put the prompt "
            "into your texts, and set default_prompt_name to null"
        )
    _check_activation(keys, "activation_fn")
    keys.finish()


def _check_activation(keys: JsonKeys, key: str) -> None:
    """Raise TeacherError for an activation that changes the order of a cross-encoder's
    logits."""
    name = keys.take(key, str, None) or "torch.nn.Identity"
    if not name.startswith("torch.nn.") or name.rpartition(".")[2] not in RISING:
        raise TeacherError(
            f"{keys.path}: {key} is {name!r}, which is not supported, "
            "since logits are read as scores; expected a class of torch.nn that keeps "
            f"their order: {', '.join(RISING)}"
        )


def list_modules(folder: Path) -> tuple[ModuleEntry, ...]:
    """List the modules in modules.json, of whatever kind. Raises TeacherError for
    entries that cannot be read."""
    path = folder / MODULES
    listed = _parse(path)
    if not isinstance(listed, list):
        raise TeacherError(
            f"{path}: holds a {type(listed).__name__}; expected a list of modules; "
            "download it again"
        )
    entries = list[ModuleEntry]()
    names = list[str]()
    for each in listed:
        if not isinstance(each, dict) or not {"type", "path"} <= each.keys():
            raise TeacherError(
                f"{path}: has {each!r}; expected modules, each with a type and a path"
            )
        keys = JsonKeys(path, each)
        keys.take("idx", int, 0)
        names.append(keys.take("name", str, str(len(names))))
        dotted = keys.take("type", str)
        place = keys.take("path", str)
        keys.refuse(
            "kwargs",
            [],
            "the modules that are read here are never called with further arguments",
        )
        keys.finish()
        windows = PureWindowsPath(place)
        if windows.anchor or ".." in windows.parts or "\0" in place:
            raise TeacherError(
                f"{path}: {place!r}: expected modules in folders inside this one"
            )
        entries.append(
            ModuleEntry(
                dotted.rpartition(".")[2], dotted, "" if place == "." else place
            )
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TeacherError(
            f"{path}: has two modules named {twice!r}, of which only one would be "
            "read; rename one"
        )
    return tuple(entries)


@contextmanager
def explain_load_errors(folder: Path) -> Iterator[None]:
    """Re-raise as TeacherError what libraries raise for a broken folder."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise TeacherError(
            f"{folder}: its weights are damaged or cut short ({error}); download them "
            "again"
        ) from error
    except pickle.UnpicklingError as error:
        raise TeacherError(
            f"{folder}: its pickled weights are damaged, or hold more than tensors, "
            "which could run code and is not loaded; save them as safetensors"
        ) from error
    except CompressError:
        raise
    except Exception as error:
        # a value of a wrong type or size may fail anywhere in the libraries
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if "custom code" in reason:
            raise TeacherError(
                f"{folder}: its model or tokenizer needs its own code, which is never "
                "run; expected a family that is part of transformers. Choose another "
                "checkpoint"
            ) from error
        raise TeacherError(
            f"{folder}: cannot be loaded: {reason}. Its config, tokenizer or weights "
            "are damaged, or do not belong together; download them again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises TeacherError for a file that holds anything else."""
    content = _parse(path)
    if not isinstance(content, dict):
        raise TeacherError(
            f"{path}: holds a {type(content).__name__}; expected an object: download "
            "it again"
        )
    return content


def open_keys(path: Path) -> JsonKeys:
    """Open a JSON object to take its keys; a missing file counts as {}. Raises
    TeacherError."""
    return JsonKeys(path, read_json(path) if path.is_file() else {})


def _parse(path: Path) -> Any:
    try:
        return parse_json(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TeacherError(
            f"{path}: cannot be read ({reason}); download it again"
        ) from None


def find_weights(folder: Path, *, allow_pickle: bool = False) -> WeightFiles:
    """Find the weight files that transformers reads. Raises TeacherError if there are
    none, or if shards are missing.

    allow_pickle: also find pytorch_model.bin, if there is no safetensors file.
    """
    chosen = _explicit_weights(folder)
    names = [chosen] if chosen else [SAFETENSORS, f"{SAFETENSORS}.index.json"]
    if allow_pickle and not chosen:
        names += [PICKLED, f"{PICKLED}.index.json"]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise TeacherError(_explain_no_weights(folder, allow_pickle=allow_pickle))
    if not path.name.endswith(".index.json"):
        return WeightFiles((path,))
    return WeightFiles(_list_shards(path), path)


def _explicit_weights(folder: Path) -> str | None:
    """Return the weight file that config.json names in the rare setting
    `transformers_weights`."""
    if not (folder / CONFIG).is_file():
        return None
    name = read_json(folder / CONFIG).get("transformers_weights")
    if name is None:
        return None
    if (
        not isinstance(name, str)
        or PurePath(name).name != name
        or ".safetensors" not in name
    ):
        raise TeacherError(
            f"{folder / CONFIG}: transformers_weights is {name!r}; expected the name "
            "of a safetensors file in the same folder"
        )
    return name


def _explain_no_weights(folder: Path, *, allow_pickle: bool) -> str:
    """Describe what the folder has instead of readable weights."""
    if not allow_pickle and list(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: has only pickled weights, which can run code when loaded. Save "
            "them as safetensors, or pass --allow-pickle if you trust their source "
            "(they are then read with weights_only)"
        )
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards:
        return (
            f"{folder}: has no {SAFETENSORS}.index.json, which lists its shards "
            f"({shards[0]}, ...): download all files of the checkpoint again"
        )
    others = sorted(
        path.name
        for end in ("bin", "gguf", "h5", "msgpack", "safetensors")
        for path in folder.glob(f"*.{end}")
    )
    beside = f"; {others[0]} is not read" if others else ""
    return (
        f"{folder}: has no {SAFETENSORS}: the weights are missing; expected them next "
        f"to config.json{beside}. Download all files of the checkpoint"
    )


def _list_shards(index: Path) -> tuple[Path, ...]:
    """Read the shards that an index lists. Raises TeacherError for missing ones."""
    listed = read_json(index).get("weight_map")
    if (
        not isinstance(listed, dict)
        or not listed
        or not all(isinstance(name, str) for name in listed.values())
    ):
        raise TeacherError(
            f"{index}: has no weight_map of tensors to files; download it again"
        )
    names = sorted(set(listed.values()))
    outside = [name for name in names if PurePath(name).name != name]
    if outside:
        raise TeacherError(
            f"{index}: lists {outside[0]!r}; expected names of files in the same folder"
        )
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise TeacherError(
            f"{index}: lists {len(names)} files, of which {len(absent)} are missing, "
            f"such as {absent[0]}: the checkpoint is incomplete; download it again"
        )
    return tuple(index.parent / name for name in names)


@dataclass(frozen=True)
class ModelFolder:
    """A folder of a saved model, as its files describe it. Nothing of it is loaded."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json as written. Raises TeacherError for one that cannot
        describe a model."""
        if not self.where.is_file():
            raise TeacherError(
                f"{self.encoder}: has no config.json; expected a folder saved by "
                "transformers' save_pretrained"
            )
        return read_json(self.where)

    @cached_property
    def kind(self) -> FolderKind:
        """Return what the folder is. Raises TeacherError as `identify_kind` does."""
        return identify_kind(self.path)

    @cached_property
    def encoder(self) -> Path:
        """Return the folder of config, weights and tokenizer: that of the first module,
        if the folder lists modules.

        Raises TeacherError for a modules.json that cannot be read.
        """
        listed = list_modules(self.path) if (self.path / MODULES).is_file() else ()
        return self.path / listed[0].path if listed else self.path

    @property
    def where(self) -> Path:
        return self.encoder / CONFIG

    @property
    def reads_pairs(self) -> bool:
        """Return whether the files say that it reads pairs of texts: sentence-
        transformers adds a key to the config of each cross-encoder that it saves."""
        added = {"sentence_transformers", "sbert_ce_default_activation_function"}
        return self.kind == "cross_encoder" or not added.isdisjoint(self.config)

    @property
    def architecture(self) -> str:
        """Return the name of the saved class, or '' if config.json names none.

        Raises TeacherError if `architectures` is not a list of names.
        """
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(
            name is None or isinstance(name, str) for name in names
        ):
            raise TeacherError(
                f"{self.where}: architectures is {names!r}; expected a list of class "
                "names: correct it"
            )
        return (names[0] or "") if names else ""

    def tokenizer_settings(self) -> dict[str, Any]:
        """Return tokenizer_config.json as written, {} if it is missing. Raises
        TeacherError if it is not an object."""
        return open_keys(self.encoder / "tokenizer_config.json").left

    def check(self) -> None:
        """Raise TeacherError for a folder that no command reads, as `identify_kind`
        says, and for a config.json that needs code of its own, describes quantised
        weights, or has impossible labels or ignored settings."""
        for folder in (self.path, self.encoder):
            identify_kind(folder)
        config = self.config
        where = self.where
        keys = JsonKeys(where, config)
        of_library = keys.take("sentence_transformers", dict, None) or {}
        _check_activation(JsonKeys(where, of_library), "activation_fn")
        # the key before sentence-transformers 4
        _check_activation(keys, "sbert_ce_default_activation_function")
        if config.get("auto_map"):
            raise TeacherError(
                f"{where}: the model has its own code (auto_map), which is never run. "
                "Choose another checkpoint; or, if transformers' own class of this "
                "family is meant, remove auto_map"
            )
        for key in ("quantization_config", "compression_config"):
            if config.get(key) is not None:
                raise TeacherError(
                    f"{self.path}: its config.json has a {key}; expected float "
                    "weights, which compress quantises at the end. Use the checkpoint "
                    "that this one was quantised from"
                )
        for name in ("quantize_config.json", "quant_config.json"):
            if (self.encoder / name).is_file():
                raise TeacherError(
                    f"{self.encoder / name}: the weights are quantised (GPTQ, AWQ); "
                    "expected float weights. Use the checkpoint that this one was "
                    "quantised from"
                )
        problem = config.get("problem_type")
        if problem not in (None, *PROBLEM_TYPES):
            raise TeacherError(
                f"{where}: problem_type is {problem!r}; expected null, "
                f"{', '.join(PROBLEM_TYPES[:-1])} or {PROBLEM_TYPES[-1]}: correct it"
            )
        outputs = config.get("num_labels")
        if outputs is not None and not (
            isinstance(outputs, int) and 0 <= outputs <= MOST_OUTPUTS
        ):
            raise TeacherError(
                f"{self.path}: its config.json has num_labels {outputs!r}; expected 0 "
                f"to {MOST_OUTPUTS:,}: correct it, or download it again"
            )
        self._ids()
        self.check_ignored(config)

    def check_ignored(self, settings: Mapping[str, Any]) -> None:
        """Raise TeacherError for a setting that changes what the model computes and
        that transformers ignores."""
        family = self.config.get("model_type")
        for name, (neutral, meaning, honoured_by) in IGNORED.items():
            value = settings.get(name)
            if (
                value is None
                or value == neutral
                or family in honoured_by
                or _is_empty(value)
            ):
                continue
            raise TeacherError(
                f"{self.where}: {name} is {value!r}: {meaning}, so that a {family} "
                f"model would compute something else; expected {neutral!r}. Choose "
                "another checkpoint"
            )

    def _ids(self) -> dict[int, Any] | None:
        """Read id2label; None if config.json has none. Raises TeacherError unless it is
        a map from whole numbers."""
        given = self.config.get("id2label")
        if given is None:
            return None
        if not isinstance(given, dict):
            raise TeacherError(
                f"{self.where}: id2label is a {type(given).__name__}; expected an "
                "object with the name of each output, "
                'such as {"0": "negative", "1": "positive"}: write it so'
            )
        unusable = [
            key
            for key in given
            if not key.isascii() or not key.isdigit() or str(int(key)) != key
        ]
        if unusable:
            raise TeacherError(
                f"{self.where}: id2label has the id {unusable[0]!r}; expected the "
                "numbers of the outputs, from 0 on, "
                'such as {"0": "negative", "1": "positive"}: correct it'
            )
        return {int(key): name for key, name in given.items()}

    @property
    def outputs(self) -> int:
        """Return the number of outputs that config.json states; 2 by default, as in
        transformers."""
        ids = self._ids()
        stated = self.config.get("num_labels")
        if ids is None:
            return 2 if stated is None else int(stated)
        return len(ids)

    def labels(self) -> tuple[str, ...]:
        """Return the names of the head's outputs, in their order; LABEL_0, LABEL_1, ...
        if config.json has none.

        They come from id2label, which transformers' pipelines read; label2id may lack
        them but not contradict them. Raises TeacherError for names that cannot be
        right: not one per output from 0 on, duplicates, or a contradicting num_labels
        or label2id.
        """
        ids = self._ids()
        where = self.where
        if ids is None:
            return tuple(f"LABEL_{index}" for index in range(self.outputs))
        stated = self.config.get("num_labels")
        if stated is not None and stated != len(ids):
            raise TeacherError(
                f"{where}: num_labels is {stated}, but id2label names {len(ids)} "
                "outputs; expected the same number: correct the wrong one"
            )
        if sorted(ids) != list(range(len(ids))):
            raise TeacherError(
                f"{where}: id2label has the ids {_shorten(sorted(ids))}; expected "
                f"{_shorten(range(len(ids)))}, the numbers of the head's outputs: "
                "correct id2label"
            )
        names = [ids[index] for index in range(len(ids))]
        for index, name in enumerate(names):
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise TeacherError(
                    f"{where}: id2label names output {index} {name!r}; expected a "
                    "text: correct id2label"
                )
        labels = tuple(str(name) for name in names)
        for index, label in enumerate(labels):
            first = labels.index(label)
            if first != index:
                raise TeacherError(
                    f"{where}: id2label gives the outputs {first} and {index} the same "
                    f"name {label!r}; expected a different name for each: correct "
                    "id2label"
                )
        self._check_reverse(labels)
        return labels

    def _check_reverse(self, labels: tuple[str, ...]) -> None:
        """Raise TeacherError if label2id and id2label give a label different
        numbers."""
        reverse = self.config.get("label2id")
        for label, number in reverse.items() if isinstance(reverse, dict) else ():
            if label in labels and str(number) != str(labels.index(label)):
                raise TeacherError(
                    f"{self.where}: id2label names output {labels.index(label)} "
                    f"{label!r}, and label2id gives it the number {number!r}; expected "
                    "the same number: correct the wrong one"
                )

    def weights(self, *, allow_pickle: bool = False) -> WeightFiles:
        """Return the weight files that are read. Raises TeacherError as `find_weights`
        does."""
        return find_weights(self.encoder, allow_pickle=allow_pickle)

    def files(self) -> list[Path]:
        """List the files that a loader reads.

        These are the weights, every module of a sentence-transformers folder, and all
        other files except other weights, documentation, and files that training and our
        own commands write next to a model.
        """
        weights = self.weights(allow_pickle=True)
        found = {*weights.files, *self.module_files()}
        for path in self.encoder.iterdir():
            if path.is_file() and not _is_unread(path.name):
                found.add(path)
        return sorted(found)

    def module_files(self) -> Iterator[Path]:
        """List the files that sentence-transformers adds to a checkpoint, if it saved
        the folder."""
        if not (self.path / MODULES).is_file():
            return
        named = (
            self.path / MODULES,
            self.path / MODULE_SETTINGS,
            *self.encoder.glob("sentence_*_config.json"),
        )
        yield from (path for path in named if path.is_file())
        for module in list_modules(self.path):
            folder = self.path / module.path
            if folder != self.encoder and folder.is_dir():
                found = folder.iterdir() if folder == self.path else folder.rglob("*")
                yield from (path for path in found if path.is_file())


UNREAD_ENDS: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".tflite",
    ".md",
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".svg",
    ".pdf",
    ".html",
    ".log",
    ".jsonl",
    ".csv",
    ".yaml",
    ".yml",
)
"""Endings of files that no loader reads, besides the weights that `find_weights`
returns."""
UNREAD_NAMES: Final = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    ".gitattributes",
    ".gitignore",
    CHECKSUMS,
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "manifest.json",
    "report.json",
    "export.json",
)
"""Documentation, and files that training and our own commands write next to a model."""


def _is_unread(name: str) -> bool:
    return (
        name in UNREAD_NAMES or name.endswith(UNREAD_ENDS) or name.startswith("README")
    )


def _is_empty(value: Any) -> bool:
    """Check whether a setting is a map without entries, such as the adapters of a model
    that has none."""
    return isinstance(value, dict) and all(
        not each or _is_empty(each) for each in value.values()
    )


def identify(folder: Path) -> str:
    """Compute the digest of everything that is read of a model's folder, by name and
    content, as a hex string."""
    total = hashlib.sha256()
    for path in ModelFolder(folder).files():
        total.update(path.relative_to(folder).as_posix().encode() + b"\0")
        total.update(bytes.fromhex(sha256(path)))
    return total.hexdigest()


def read_tensor_infos(weights: WeightFiles) -> dict[str, TensorInfo]:
    """Read names, shapes and number formats of the tensors in safetensors files, from
    their headers.

    Raises TeacherError for damaged files, and for shards that disagree with their
    index.
    """
    from safetensors import SafetensorError, safe_open

    found = dict[str, TensorInfo]()
    for file in weights.files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping
                    part = tensors.get_slice(name)
                    if name in found:
                        raise TeacherError(
                            f"{file}: holds {name}, which another shard holds too: the "
                            "files are of different checkpoints; download them again"
                        )
                    found[name] = TensorInfo(
                        tuple(part.get_shape()), str(part.get_dtype())
                    )
        except SafetensorError as error:
            raise TeacherError(
                f"{file.parent}: its weights are damaged or cut short ({file.name}: "
                f"{error}); download them again"
            ) from error
    if weights.index is not None:
        absent = sorted(read_json(weights.index)["weight_map"].keys() - found.keys())
        if absent:
            raise TeacherError(
                f"{weights.index}: lists {len(absent)} tensors that no shard holds, "
                f"such as {absent[0]}: the files are of different checkpoints; "
                "download them again"
            )
    return found


def _shorten(numbers: Any) -> str:
    """List numbers; of many, only the first and the last."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:4], "...", shown[-1]])
