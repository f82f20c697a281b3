"""Load configs, tokenizers and models of checkpoints. No other module of compress calls
`from_pretrained`.

Opening a tokenizer imports no model: imports that only models need are in the functions
that load one.

A model is loaded in float32 unless asked otherwise, whatever the number format of its
files: a bfloat16 model hardly moves at the usual learning rates, and float16 overflows.
Under `--precision bf16` its linear layers compute in bfloat16 by autocast. Nothing in
the files is dropped silently: tensors that are missing, have another shape or have no
place in the model are named in one error, except those of `models.tensors.COMPUTED`,
the heads and poolers of the family's own pre-training, and, if a new head is wanted,
the heads of other tasks. docs/what-is-read.md lists them.
"""

from collections.abc import Collection
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from compress.errors import TeacherError
from compress.kinds import Kind
from compress.models import heads
from compress.models.folder import MOST_LAYERS, ModelFolder, explain_load_errors
from compress.models.memory import pass_on, plan_placement
from compress.models.padding import align_padding
from compress.models.sentence_folder import read_encoder
from compress.slicing.shape import token_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compress.config.stages import Head
    from compress.models.fit import LoadedModel, New

# Configs


def load_config(folder: Path) -> Any:
    """Load a checkpoint's config, without settings that choose code to download or run.

    Its labels are complete: those of config.json if they can be right, else LABEL_0,
    LABEL_1, ...; code that shows labels to a user calls `ModelFolder.labels`, which
    raises for wrong ones.

    Raises TeacherError for a config that cannot be read, describes quantised weights,
    has an impossible size, or a setting that changes what the model computes and that
    this version of transformers ignores.
    """
    import compress.models.own_classes  # noqa: F401  # registers our models with transformers

    source = ModelFolder(folder)
    source.check()
    options = read_encoder(folder).config_options
    source.check_ignored(options)
    with explain_load_errors(folder):
        config = AutoConfig.from_pretrained(
            source.encoder, trust_remote_code=False, **options
        )
    unknown = sorted(name for name in options if not hasattr(config, name))
    if unknown:
        raise TeacherError(
            f"{source.encoder}: {unknown[0]!r} is set for its config in a file next to "
            f"it, but {config.model_type} has no such setting: remove it"
        )
    layers = getattr(config, "num_hidden_layers", 0)
    if not isinstance(layers, int) or not 0 <= layers <= MOST_LAYERS:
        raise TeacherError(
            f"{folder}: its config.json has {layers!r} layers; expected 0 to "
            f"{MOST_LAYERS:,}: correct it, or download it again"
        )
    try:
        names = source.labels()
    except TeacherError:  # told where the names are needed
        names = tuple(f"LABEL_{index}" for index in range(source.outputs))
    set_labels(config, names)
    config.return_dict = True
    config.output_attentions = config.output_hidden_states = False
    # let the library choose
    config._attn_implementation = config._experts_implementation = None
    return config


def set_labels(config: Any, names: Collection[str]) -> None:
    """Name the outputs of a config's head, in their order."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}


# Tokenizers


def load_tokenizer(folder: Path, config: Any = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint; with a `config`, make the two fit each other.

    Options and lower-casing are those of the folder of sentence-transformers, and for a
    cross-encoder its limit of tokens (for vectors, that limit is in
    `SentenceSettings`). A tokenizer without a padding token gets one
    (`padding.align_padding`). A tokenizer with two token types makes none for a model
    that knows only one: such a model reads pairs without types (klue/roberta,
    AlephBERT). Raises TeacherError.
    """
    source = ModelFolder(folder)
    encoder = read_encoder(folder)
    with explain_load_errors(folder):
        if source.tokenizer_settings().get("auto_map"):
            raise TeacherError(
                f"{source.encoder / 'tokenizer_config.json'}: the tokenizer has its "
                "own code (auto_map), which is never run. Choose another checkpoint; "
                "or, if transformers' own class is meant, remove auto_map"
            )
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.encoder, trust_remote_code=False, **encoder.tokenizer_options
        )
    encoder.prepare_tokenizer(tokenizer)
    if encoder.max_length is not None and source.kind == "cross_encoder":
        tokenizer.model_max_length = encoder.max_length
    if config is not None:
        _make_fit(folder, tokenizer, config)
    return tokenizer


def _make_fit(folder: Path, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Let tokenizer and config agree on the padding token, and leave out token types
    that the model does not know."""
    align_padding(tokenizer, config)
    if tokenizer.pad_token is None:
        raise TeacherError(
            f"{folder}: its tokenizer has no pad_token and no eos_token to pad with; "
            "expected one: set pad_token in tokenizer_config.json"
        )
    if getattr(config, "type_vocab_size", None) == 1:
        tokenizer.model_input_names = [
            name for name in tokenizer.model_input_names if name != "token_type_ids"
        ]


def check_vocabulary(
    folder: Path, tokenizer: PreTrainedTokenizerBase, model: "PreTrainedModel"
) -> None:
    """Raise TeacherError for a tokenizer without tokens, or with tokens or token types
    that the model does not have."""
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or limit < 1:
        raise TeacherError(
            f"{folder}: model_max_length {limit!r} of its tokenizer is not a number "
            "above 0: correct it in tokenizer_config.json, or download it again"
        )
    known = token_rows(model)
    # the library invents one
    if len(tokenizer.get_vocab()) <= len(set(tokenizer.all_special_tokens)):
        raise TeacherError(
            f"{folder}: has no tokenizer; expected tokenizer.json, or the family's own "
            "file; download all its files, or save its tokenizer there"
        )
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if known is not None and highest >= known:
        raise TeacherError(
            f"{folder}: its tokenizer makes token ids up to {highest}, the model knows "
            f"{known}: they do not belong together; use the tokenizer that the model "
            "was trained with"
        )


def check_token_types(
    folder: Path, tokenizer: PreTrainedTokenizerBase, config: Any
) -> None:
    """Raise TeacherError for a tokenizer that gives a pair of texts more token types
    than the model has."""
    # without any, the model does not read them
    known = getattr(config, "type_vocab_size", 0)
    types = tokenizer("a", "a").get("token_type_ids", [0])
    if known and max(types) >= known:
        raise TeacherError(
            f"{folder}: its tokenizer emits token_type_id {max(types)} for the second "
            f"text of a pair, but the model has only {known} token types; use the "
            "tokenizer that the model was trained with"
        )


def compare_tokens(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> str:
    """Describe how two tokenizers differ in their tokens, ids and special tokens; '' if
    they do not."""
    ours = tokenizer.get_vocab()
    theirs = other.get_vocab()
    every = ours.keys() | theirs.keys()
    differing = sorted(token for token in every if ours.get(token) != theirs.get(token))
    if differing:
        example = differing[0]
        first, second = (
            f"id {each[example]}" if example in each else "absent"
            for each in (ours, theirs)
        )
        return (
            f"{len(differing):,} of {len(every):,} tokens have different ids, such as "
            f"{example!r} ({first}, {second})"
        )
    for name, token in tokenizer.special_tokens_map.items():
        known = other.special_tokens_map.get(name, token)
        if known != token:
            return f"{name} is {token!r} in the first and {known!r} in the second"
    return ""


# Models


def load_model(
    folder: Path,
    auto: Any,
    config: Any = None,
    *,
    new: "New" = "nothing",
    drop_heads: bool = False,
    allow_pickle: bool = False,
    dtype: torch.dtype | None = torch.float32,
    frozen: bool = False,
) -> "LoadedModel":
    """Load a model from a checkpoint.

    auto        the Auto class of its head, or the model's own class
    config      its config, if the caller has changed it
    new         what may be drawn at random: nothing; the pooler of an encoder whose
                tokens are read; a head
    drop_heads  heads of the family for other tasks may be dropped, because the caller
                has no use for them
    dtype       number format of the weights; None: as in the files
    frozen      the model will not be trained: if it does not fit into free memory, its
                layers are read from the files as they are needed (see `models.memory`)

    Raises TeacherError for files that are damaged or missing, and for tensors that are
    missing, have another shape or have no place in the model; StudentError for a family
    without such a head."""
    from compress.models.fit import LoadedModel, account, check_formats, judge
    from compress.models.sentence_encoder import (
        AutoModelForSentenceEmbedding,
        SentenceEncoder,
    )
    from compress.models.tensors import SavedTensors

    config = load_config(folder) if config is None else config
    if auto is AutoModelForSentenceEmbedding:
        config = AutoModelForSentenceEmbedding.configure(folder, config)
    model_class: Any = heads.class_for(auto, config)
    source = ModelFolder(folder)
    saved = SavedTensors(source.weights(allow_pickle=allow_pickle))
    number_format = saved.dtype if dtype is None else dtype
    placement = dict[str, Any]()
    if frozen and not saved.weights.pickled:
        placement = plan_placement(saved.count * number_format.itemsize)
    with explain_load_errors(folder):
        check_formats(folder, saved)
        model, info = model_class.from_pretrained(
            source.encoder,
            config=config,
            use_safetensors=None if saved.weights.pickled else True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            dtype=number_format,
            **placement,
        )
        fit = account(model, saved, info)
        if isinstance(model, SentenceEncoder):
            model.load_modules(folder, allow_pickle=allow_pickle)
        if placement:
            pass_on(model, "tap")  # of `models.signals`
        dropped = judge(folder, model, fit, saved, new=new, drop_heads=drop_heads)
    model.eval().requires_grad_(False)
    return LoadedModel(model, fit.missing | fit.mismatched.keys(), dropped)


def load_gguf(file: Path) -> tuple["PreTrainedModel", PreTrainedTokenizerBase]:
    """Load a language model in float32, and its tokenizer, from a GGUF file alone; no
    file next to it is read. Raises TeacherError."""
    with (
        explain_load_errors(file),
        TemporaryDirectory() as empty,
        redirect_stderr(StringIO()),  # of a bar that no setting turns off
    ):
        path = str(file.resolve())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(empty, gguf_file=path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            empty, gguf_file=path, dtype=torch.float32, output_loading_info=True
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise TeacherError(
            f"{file}: has no weights for {len(missing)} tensors of a "
            f"{type(model).__name__}, such as {missing[0]}; download it again"
        )
    # a model that is marked as quantised cannot be saved
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    return model, tokenizer


def load_result(folder: Path, head: "Head", kind: Kind | None) -> Any:
    """Load the model that a stage of a run saved, with gradients, and restore the
    sharing of its layers."""
    from compress.models.sharing import share_again

    config = load_config(folder)
    loaded = load_model(
        folder, heads.auto(head, kind), heads.adapt_labels(config, head)
    )
    model = loaded.model.requires_grad_(True)
    share_again(model)
    return heads.restore_labels(config, model)


def load_as_saved(folder: Path, *, allow_pickle: bool = False) -> "LoadedModel":
    """Load a checkpoint in the class that saved it and in the number format of its
    files, to write it again.

    Raises TeacherError if its class is unknown, or lacks a head that is in the files.
    """
    import transformers

    from compress.models.saved_head import explain_unknown_head, find_head, write_names

    source = ModelFolder(folder)
    config = load_config(folder)
    head = find_head(source, config, allow_pickle=allow_pickle)
    if head.part == "unknown":
        raise TeacherError(explain_unknown_head(source, head))
    own = getattr(transformers, head.name, None)
    auto = own if isinstance(own, type) else getattr(transformers, head.autos[0])
    loaded = load_model(
        folder, auto, config, new="pooler", allow_pickle=allow_pickle, dtype=None
    )
    loaded.remove_new_pooler()
    lost = sorted(loaded.dropped_heads)
    if lost:
        raise TeacherError(
            f"{source.where}: a {head.name} does not have {len(lost)} tensors of the "
            f"files, such as {write_names(lost)}, which would be lost; name the class "
            "that saved them in architectures"
        )
    return loaded
