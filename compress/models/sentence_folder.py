"""Read and write folders of sentence-transformers: the modules in order, with every
setting of version 6.2.

No other module knows these files. Nothing in them is skipped: a setting is read, or
refused by its name and file. Imports no torch.

    modules.json                        the modules: classes and folders
    config_sentence_transformers.json   prompts, similarity, width of the answer
    sentence_bert_config.json           how the encoder reads texts; in the encoder's
                                        folder, under any of ENCODER_FILES
    1_Pooling/config.json, ...          the settings of a module; its weights are in
                                        model.safetensors next to it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from compress.data.text_preparation import TextPreparation
from compress.errors import TeacherError
from compress.io import write_hub_json
from compress.models.folder import (
    MODULE_SETTINGS,
    MODULES,
    ModuleEntry,
    identify_kind,
    list_modules,
    open_keys,
)
from compress.models.json_keys import JsonKeys
from compress.models.sentence_modules import (
    MODULE_CLASSES,
    TOKEN_FEATURE,
    VECTOR,
    SentenceModule,
)
from compress.models.sentence_settings import (
    TOKENS_ONLY,
    SentenceSettings,
    check_modules,
)

ENCODER_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""The names of the encoder's file; the first that holds anything is read."""
NO_LENGTH_LIMIT: Final = 10**6
"""A tokenizer without a limit has a `model_max_length` of at least this."""

_MODULE_HOMES: Final[Mapping[str, tuple[str, ...]]] = {
    "Transformer": ("base.modules", "base.modules.transformer"),
    "Dense": ("base.modules", "base.modules.dense"),
    "Normalize": (
        "base.modules",
        "base.modules.normalize",
        "sentence_transformer.modules.normalize",
    ),
    "Pooling": ("sentence_transformer.modules.pooling",),
    "LayerNorm": ("sentence_transformer.modules.layer_norm",),
    "Dropout": ("sentence_transformer.modules.dropout",),
}
"""The packages of version 6 that define the classes, besides the paths that `_is_known`
knows."""

_OTHER_MODULES: Final[Mapping[str, str]] = {
    "Asym": "it has a model for each purpose of a text; save the one that you want as "
    "a folder of its own",
    "BoW": "it counts words and has no encoder",
    "CLIPModel": "it embeds images too; save its text encoder as a folder of its own",
    "CNN": "its vectors depend on the other texts of a batch, through their padding",
    "LSTM": "it reads the encoder's tokens one after another; expected pooling",
    "LogitScore": "it scores pairs of texts and returns no vectors; it is a reranker",
    "MLMTransformer": "it makes sparse vectors, of the size of the vocabulary",
    "MultiVectorMask": "it keeps a vector for each token (late interaction); expected "
    "one for each text",
    "Router": "it has a model for each purpose of a text; save the one that you want "
    "as a folder of its own",
    "SparseAutoEncoder": "it makes sparse vectors, of the size of its dictionary",
    "SparseStaticEmbedding": "it makes sparse vectors, of the size of the vocabulary",
    "SpladePooling": "it makes sparse vectors, of the size of the vocabulary",
    "StaticEmbedding": "it has word vectors and no encoder; --recipe static makes such "
    "a student of an encoder",
    "TokenPooling": "it keeps a vector for each token (late interaction); expected one "
    "for each text",
    "WeightedLayerPooling": "it reads the states of all layers; expected a Pooling, "
    "which reads only the last",
    "WordEmbeddings": "it has word vectors and no encoder; --recipe static makes such "
    "a student of an encoder",
    "WordWeights": "it weights words by a table; expected pooling",
}
"""The other classes of sentence-transformers, and why they are not read."""

_SIMILARITIES: Final = ("cosine", "dot", "euclidean", "manhattan")


class EncoderTask(NamedTuple):
    """The output of a Transformer module, by its names in the settings.

    name     `transformer_task`
    output   the output of the model of transformers that it reads
    feature  `module_output_name`, the feature that it writes
    """

    name: str
    output: str
    feature: str


_TASKS: Final[Mapping[str, EncoderTask]] = {
    "sentence_encoder": EncoderTask(
        "feature-extraction", "last_hidden_state", TOKEN_FEATURE
    ),
    "cross_encoder": EncoderTask("sequence-classification", "logits", "scores"),
}
"""The outputs that the Transformer of each kind of folder must compute."""


@dataclass(frozen=True)
class EncoderSettings:
    """Describe how the encoder of a folder reads texts.

    path               the encoder's folder inside the folder, "" for the folder itself
    max_length         the most tokens of a text, special tokens included; None: as many
                       as tokenizer and model allow
    lower_case         whether texts are lower-cased, whatever the tokenizer does by
                       itself
    tokenizer_options  arguments for `AutoTokenizer.from_pretrained`
    config_options     arguments for `AutoConfig.from_pretrained`
    """

    path: str = ""
    max_length: int | None = None
    lower_case: bool = False
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    config_options: Mapping[str, Any] = field(default_factory=dict)

    def prepare_tokenizer(self, tokenizer: Any) -> None:
        """Let a tokenizer of transformers lower-case its texts, if the folder asks for
        it.

        Special tokens in a text are unchanged, as in sentence-transformers 6. Raises
        TeacherError for a tokenizer that cannot be changed.
        """
        if not self.lower_case:
            return
        if not tokenizer.is_fast:
            raise TeacherError(
                f"{tokenizer.name_or_path}: do_lower_case is set next to it, but "
                f"{type(tokenizer).__name__} cannot be made to lower-case texts; "
                "expected a fast tokenizer, with a tokenizer.json"
            )
        from tokenizers.normalizers import Lowercase, Sequence

        before: Any = tokenizer.backend_tokenizer.normalizer
        steps = [] if before is None else [before]
        if isinstance(before, Sequence):
            steps = list(iter(before))
        if not any(isinstance(step, Lowercase) for step in steps):
            tokenizer.backend_tokenizer.normalizer = Sequence([Lowercase(), *steps])

    def choose_length(self, tokenizer: Any, positions: int | None) -> int | None:
        """Return the most tokens of a text: the limit of the folder, or else of the
        tokenizer, but no more than the model has positions for; None without a
        limit."""
        limits = [positions] if positions is not None else []
        if self.max_length is not None:
            limits.append(self.max_length)
        elif tokenizer.model_max_length < NO_LENGTH_LIMIT:
            limits.append(int(tokenizer.model_max_length))
        return min(limits, default=None)


@dataclass(frozen=True)
class SentenceFolder:
    """A folder of sentence-transformers.

    places   the folder of each of the settings' modules, inside the folder
    """

    path: Path
    encoder: EncoderSettings
    settings: SentenceSettings
    places: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder; without modules.json it is a plain encoder, which returns
        tokens only.

        Raises TeacherError, with the name of the setting, for anything that is not
        supported.
        """
        where = folder / MODULES
        if not where.is_file():
            return cls(folder, EncoderSettings(), TOKENS_ONLY, ())
        listed = list_modules(folder)
        for entry in listed:
            _check_class(where, entry)
        _check_encoder(where, listed)
        encoder = _read_encoder(folder, listed[0].path, _TASKS["sentence_encoder"])
        modules = tuple(
            MODULE_CLASSES[entry.kind].from_config(
                open_keys(folder / entry.path / "config.json")
            )
            for entry in listed[1:]
        )
        settings = _read_model(folder / MODULE_SETTINGS, modules)
        if modules and not settings.embeds:
            raise TeacherError(
                f"{where}: no module computes {VECTOR}, so each token keeps its own "
                "vector, as in late interaction (ColBERT); expected a Pooling"
            )
        return cls(
            folder,
            encoder,
            replace(settings, max_length=encoder.max_length),
            tuple(entry.path for entry in listed[1:]),
        )

    @property
    def is_listed(self) -> bool:
        """Check whether the folder lists its modules."""
        return (self.path / MODULES).is_file()

    def check_width(self, hidden: int) -> None:
        """Raise TeacherError unless the modules fit an encoder of this width, and each
        other."""
        try:
            check_modules(self.settings.modules, hidden)
        except ValueError as error:
            raise TeacherError(
                f"{self.path / MODULES}: {error}; correct the file, or save the model "
                "again"
            ) from None

    def weights(self, number: int) -> Path:
        """Return the folder of the weights of the module of this number."""
        return self.path / self.places[number]


def read_encoder(folder: Path) -> EncoderSettings:
    """Read how the encoder of a folder reads texts, whatever modules follow it; without
    modules.json, return the defaults.

    Raises TeacherError for settings that are not supported.
    """
    if not (folder / MODULES).is_file():
        return EncoderSettings()
    listed = list_modules(folder)
    _check_encoder(folder / MODULES, listed)
    return _read_encoder(folder, listed[0].path, _TASKS[identify_kind(folder)])


def write(settings: SentenceSettings, folder: Path) -> tuple[Path, ...]:
    """Write the files of sentence-transformers, for versions 2 to 6, without the
    encoder and the modules' weights.

    Returns the folders of the modules, in order; those with weights hold them in
    model.safetensors. If texts are lower-cased, the folder's tokenizer does it.
    """
    listed = [_write_entry(0, "Transformer", "")]
    places = []
    for number, module in enumerate(settings.modules, start=1):
        place = f"{number}_{module.kind}"
        listed.append(_write_entry(number, module.kind, place))
        (folder / place).mkdir(exist_ok=True)
        if config := module.to_config():
            write_hub_json(folder / place / "config.json", config)
        places.append(folder / place)
    write_hub_json(folder / MODULES, listed)
    if settings.max_length is not None:
        write_hub_json(
            folder / ENCODER_FILES[0],
            {"max_seq_length": settings.max_length, "do_lower_case": False},
        )
    model = dict[str, Any]()
    if settings.preparation.prompts or settings.preparation.default is not None:
        model["prompts"] = dict(settings.preparation.prompts)
        model["default_prompt_name"] = settings.preparation.default
    if settings.similarity is not None:
        model["similarity_fn_name"] = settings.similarity
    if settings.truncate_dim is not None:
        model["truncate_dim"] = settings.truncate_dim
    if model:
        write_hub_json(folder / MODULE_SETTINGS, model)
    return tuple(places)


def _write_entry(number: int, kind: str, path: str) -> dict[str, Any]:
    return {
        "idx": number,
        "name": str(number),
        "path": path,
        "type": f"sentence_transformers.models.{kind}",
    }


def _is_known(entry: ModuleEntry) -> bool:
    """Check whether sentence-transformers has a class under this path."""
    own = _MODULE_HOMES.get(entry.kind, ())
    homes = ("models", f"models.{entry.kind}", "sentence_transformer.modules", *own)
    return bool(own) and entry.dotted in {
        f"sentence_transformers.{home}.{entry.kind}" for home in homes
    }


def _check_encoder(where: Path, listed: Sequence[ModuleEntry]) -> None:
    """Raise TeacherError unless the encoder, and nothing else, is the first module."""
    for entry in listed[:1]:
        _check_class(where, entry)
    if [
        number for number, entry in enumerate(listed) if entry.kind == "Transformer"
    ] != [0]:
        kinds = ", ".join(entry.kind for entry in listed) or "no modules"
        raise TeacherError(
            f"{where}: has {kinds}; expected one Transformer, at the beginning"
        )


def _check_class(where: Path, entry: ModuleEntry) -> None:
    """Raise TeacherError, with the path and what to do, for a class that cannot be
    read."""
    if not entry.dotted.startswith("sentence_transformers."):
        raise TeacherError(
            f"{where}: {entry.dotted}: is a custom class, whose code is never run; "
            "expected modules of sentence-transformers: "
            f"{', '.join(('Transformer', *MODULE_CLASSES))}"
        )
    if not _is_known(entry):
        unknown = "it is not a module of sentence-transformers 6.2"
        raise TeacherError(
            f"{where}: {entry.dotted}: cannot be read: "
            f"{_OTHER_MODULES.get(entry.kind, unknown)}; expected modules of the kinds "
            f"{', '.join(('Transformer', *MODULE_CLASSES))}"
        )


def _read_encoder(folder: Path, place: str, task: EncoderTask) -> EncoderSettings:
    """Read the encoder's file, under the first of its names that holds anything."""
    if not (folder / place / "config.json").is_file():
        raise TeacherError(
            f"{folder / place / 'config.json'}: no such file; {MODULES} names this "
            "folder for the encoder"
        )
    opened = [open_keys(folder / place / name) for name in ENCODER_FILES]
    keys = next((each for each in opened if each.left), opened[-1])
    max_length = keys.take(
        "max_seq_length",
        int,
        None,
        expected="a number of tokens, or null",
    )
    lower_case = keys.take("do_lower_case", bool, False)
    _read_model_options(keys)
    tokenizer_options = _read_tokenizer_options(keys)
    config_options = dict(_take_either(keys, "config_args", "config_kwargs"))
    config_options.pop("trust_remote_code", None)
    keys.refuse("transformer_task", task.name, f"expected {task.name!r}")
    text = {"method": "forward", "method_output_name": task.output}
    keys.refuse(
        "modality_config",
        {"text": text},
        f"only texts are read here, as they are (not in a chat template, which "
        f"'message' stands for), and only {task.output} of the model",
    )
    keys.refuse("module_output_name", task.feature, f"expected {task.feature!r}")
    # whether a batch is padded, which changes no vector
    keys.take("unpad_inputs", bool, None)
    for name in ("query_length", "document_length"):
        keys.refuse(
            name, None, "all texts have the same limit here; use max_seq_length"
        )
    keys.refuse(
        "query_expansion", None, "it belongs to late interaction models (ColBERT)"
    )
    keys.refuse(
        "tokenizer_name_or_path",
        None,
        "the tokenizer is read from the encoder's folder; save it there",
    )
    called = _read_processing(keys)
    keys.finish()
    limits = (called, tokenizer_options.pop("model_max_length", None), max_length)
    length = next((limit for limit in limits if limit is not None), None)
    if length is not None and length < 1:
        raise TeacherError(
            f"{keys.path}: the limit is {length} tokens; expected at least 1"
        )
    return EncoderSettings(place, length, lower_case, tokenizer_options, config_options)


def _take_either(keys: JsonKeys, old: str, new: str) -> Mapping[str, Any]:
    """Take a group of arguments under its old or its new name; the old one takes
    precedence, as in sentence-transformers."""
    older = keys.take(old, dict, None)
    newer = keys.take(new, dict, {})
    return newer if older is None else older


def _read_model_options(keys: JsonKeys) -> None:
    """Read the arguments of the encoder. None of the accepted ones changes a vector:
    numbers are float32, all implementations of attention compute the same, a pooler is
    never used, and no code of the folder runs."""
    accepted = (
        "add_pooling_layer",
        "attn_implementation",
        "dtype",
        "low_cpu_mem_usage",
        "torch_dtype",
    )
    given = _take_either(keys, "model_args", "model_kwargs")
    if odd := sorted(given.keys() - {*accepted, "trust_remote_code"}):
        raise TeacherError(
            f"{keys.path}: model_args has {odd[0]!r}, which is not supported; expected "
            f"{', '.join(accepted)}. Save the model with this setting in its "
            "config.json"
        )


def _read_tokenizer_options(keys: JsonKeys) -> dict[str, Any]:
    """Read the arguments of the tokenizer."""
    accepted = (
        "model_max_length",
        "padding_side",
        "truncation_side",
        "do_lower_case",
        "strip_accents",
        "tokenize_chinese_chars",
        "add_prefix_space",
        "clean_up_tokenization_spaces",
    )
    given = dict(_take_either(keys, "tokenizer_args", "processor_kwargs"))
    given.pop("trust_remote_code", None)
    if given.pop("use_fast", True) is not True:
        raise TeacherError(
            f"{keys.path}: tokenizer_args has 'use_fast': false; expected a fast "
            "tokenizer"
        )
    if odd := sorted(given.keys() - {*accepted}):
        raise TeacherError(
            f"{keys.path}: tokenizer_args has {odd[0]!r}, which is not supported; "
            f"expected {', '.join(accepted)}. Save the tokenizer with this setting"
        )
    JsonKeys(keys.path, given).take(
        "model_max_length", int, None, expected="a number of tokens"
    )
    return given


def _read_processing(keys: JsonKeys) -> int | None:
    """Read the arguments with which the tokenizer is called; return the limit of
    tokens, if one is given."""
    kinds = JsonKeys(keys.path, keys.take("processing_kwargs", dict, {}))
    for name in ("audio", "image", "video"):  # of which a text has none
        kinds.take(name, dict, {})
    found = None
    for name in ("text", "common"):
        group = JsonKeys(keys.path, kinds.take(name, dict, {}))
        found = group.take("max_length", (int, type(None)), found)
        group.take("return_tensors", str, "pt")
        for option, usual in {
            "padding": (True, "longest"),
            "truncation": (True, "longest_first"),
        }.items():
            value = group.take(option, (bool, str), True)
            if value not in usual:
                raise TeacherError(
                    f"{keys.path}: processing_kwargs: {option!r} is {value!r}, which "
                    "is not supported; expected true"
                )
        group.finish()
    kinds.finish()
    return found


def _read_model(path: Path, modules: tuple[SentenceModule, ...]) -> SentenceSettings:
    """Read the settings of the whole model."""
    keys = open_keys(path)
    keys.take("__version__", dict, {})
    keys.refuse(
        "model_type",
        "SentenceTransformer",
        "expected a model with a vector for each text",
    )
    _check_requirements(keys)
    texts = _take_prompts(keys)
    default = keys.take("default_prompt_name", str, None)
    preparation = TextPreparation(texts, default)
    if default is not None and default not in preparation.names:
        raise TeacherError(
            f"{path}: default_prompt_name is {default!r}; expected one of "
            f"{', '.join(preparation.names)}"
        )
    similarity = keys.take("similarity_fn_name", str, None)
    if similarity is not None and similarity not in _SIMILARITIES:
        raise TeacherError(
            f"{path}: similarity_fn_name is {similarity!r}; expected one of "
            f"{', '.join(_SIMILARITIES)}"
        )
    truncate_dim = keys.take_width("truncate_dim", None)
    keys.finish()
    return SentenceSettings(modules, preparation, None, similarity, truncate_dim)


def _check_requirements(keys: JsonKeys) -> None:
    """Raise TeacherError if an installed package does not have a version that the
    folder asks for."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    wanted = keys.take("requirements", dict, None) or {}
    for package, requirement in wanted.items():
        name = {"pytorch": "torch"}.get(package, package)
        specifier = (
            requirement.get("specifier", "")
            if isinstance(requirement, dict)
            else requirement
        )
        try:
            found = version(name)
            fits = SpecifierSet(str(specifier))
        except (PackageNotFoundError, InvalidSpecifier):
            raise TeacherError(
                f"{keys.path}: requires {package} {specifier}, which is not installed "
                "or not a valid version; install it, or correct the requirement"
            ) from None
        if not fits.contains(found, prereleases=True):
            raise TeacherError(
                f"{keys.path}: requires {package} {specifier}; {found} is installed"
            )


def _take_prompts(keys: JsonKeys) -> dict[str, str]:
    prompts = keys.take("prompts", dict, None) or {}
    for name, text in prompts.items():
        if not isinstance(text, str | None):
            raise TeacherError(
                f"{keys.path}: prompt {name!r} is {text!r}; expected a text"
            )
    return {name: text or "" for name, text in prompts.items()}


def read_prompts(folder: Path) -> list[str]:
    """Read the texts that a model of sentence-transformers may put before others,
    whatever its modules are. Raises TeacherError."""
    prompts = _take_prompts(open_keys(folder / MODULE_SETTINGS))
    return [prompt for prompt in prompts.values() if prompt]
