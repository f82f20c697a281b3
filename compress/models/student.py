"""Build a student from its spec and its teacher."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

import compress.models.families  # noqa: F401  # transformers knows the families of ours from here on
from compress.config.recipe import INITS, Head, StudentSpec
from compress.config.reference import Call, options
from compress.data.masking import Words
from compress.data.task import Kind
from compress.errors import StudentError, TeacherError, did_you_mean
from compress.models import heads
from compress.models.checkpoints import resolve
from compress.models.init_weights import (
    APART,
    KNOWN,
    SLICED,
    WHOLE,
    Weight,
    copy_units,
    copy_whole,
    cuts,
    keep_units,
    narrow_weights,
    weight_of,
)
from compress.models.pooling import SETTINGS, keep_width
from compress.models.sharing import share, share_again
from compress.models.teacher import explain_load_errors, load_config
from compress.slicing.plan import HIDDEN
from compress.slicing.rules import FIRST_IS_OWN, GROUPED, ROTARY
from compress.slicing.select import Importance, Kept, check_layers
from compress.slicing.shape import Shape, setting_name
from compress.slicing.sizes import fits_rotary, layer_kinds, select_layers

_SHARED = (
    "vocab_size",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "label2id",
    "problem_type",
)
_UNDECLARED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"deberta-v2": ("share_att_key", "position_buckets", "norm_rel_ebd", "conv_kernel_size", "conv_groups", "conv_act")}
)
"""Settings that a family's model reads although its config class does not declare them."""


def config_for(spec: StudentSpec, teacher: Any) -> PreTrainedConfig:
    """Make the student's config: the teacher's, resized, or another family's with the teacher's vocabulary and labels.

    Raises StudentError naming the size that does not fit, PruneError for layers that cannot stand where they come to.
    """
    family = teacher.model_type if spec.family == "teacher" else spec.family
    if family not in CONFIG_MAPPING:
        raise StudentError(f"student.family: no model family {family!r}.{did_you_mean(family, CONFIG_MAPPING)}")
    if family == teacher.model_type:
        config = copy.deepcopy(teacher)
        config._attn_implementation = None  # the fastest that the family has, whatever the teacher was opened with
    else:
        config = _of_family(family, teacher)
    theirs = Shape.from_config(teacher)
    for size in ("layers", "hidden", "ffn", "heads", "embedding"):
        wanted = getattr(spec, size)
        try:
            name = setting_name(config, size)
        except KeyError:
            if wanted is None:
                continue
            if size != "ffn" or not hasattr(config, "n_inner"):  # GPT-2 leaves it out where it is four times its width
                raise StudentError(f"student.{size}: {family} models have no such size") from None
            name = "n_inner"
        if size == "embedding" and wanted is None:
            if family == teacher.model_type and theirs.embedding == theirs.hidden:
                config.embedding_size = Shape.from_config(config).hidden
            continue
        setattr(config, name, _count(size, wanted, getattr(theirs, size)))
    if theirs.decoder_layers is not None and config.is_encoder_decoder:
        setattr(config, setting_name(config, "decoder_layers"), _count("layers", spec.layers, theirs.decoder_layers))
    if family in GROUPED:
        _set_groups(config, teacher, given="num_key_value_heads" in spec.config)
    _set_further(config, spec.config)
    shape = Shape.from_config(config)
    _set_derived(spec, teacher, config, shape)
    if shape.hidden % shape.heads:
        raise StudentError(
            f"student: hidden {shape.hidden} is not a multiple of heads {shape.heads}: expected heads of equal width; "
            "change one of the two, as by --set student.heads=4"
        )
    return config


def _set_groups(config: Any, teacher: Any, *, given: bool) -> None:
    """Let heads keep the teacher's size, and as many share keys and values; all have their own after another family.

    given: the number of heads of keys and values comes from the recipe.
    """
    heads = Shape.from_config(config).heads
    if teacher.model_type not in GROUPED:
        config.head_dim, config.num_key_value_heads = config.hidden_size // heads, heads
        return
    together = teacher.num_attention_heads // teacher.num_key_value_heads
    if heads % together and not given:
        raise StudentError(
            f"student.heads: {heads}: {together} heads share each head of keys and values in this teacher; expected a "
            f"multiple of {together}, or `config: {{num_key_value_heads: ...}}`"
        )
    config.head_dim, config.num_key_value_heads = Shape.from_config(teacher).head_size, heads // together


def _set_derived(spec: StudentSpec, teacher: Any, config: Any, shape: Shape) -> None:
    """Set the kinds of attention, one for each layer, the sizes that some families write down a second time, and the
    width of a sentence encoder's vectors."""
    if hasattr(teacher, SETTINGS):
        keep_width(config, teacher)
    if getattr(config, "layer_types", None):
        config.layer_types = _layer_kinds(spec, teacher, config, shape)
    if hasattr(config, "pooler_hidden_size"):  # DeBERTa's second name for the same width
        config.pooler_hidden_size = shape.hidden
    if hasattr(config, "d_head"):  # XLNet's second name for the width of a head
        config.d_head = shape.hidden // shape.heads


def _layer_kinds(spec: StudentSpec, teacher: PreTrainedConfig, config: Any, shape: Shape) -> list[str]:
    """List the kind of attention of each layer: of the teacher's layers that are copied, else in the same rhythm."""
    kinds = list(config.layer_types)
    if "layer_types" in spec.config:
        if len(kinds) != shape.layers:
            raise StudentError(f"student.config: layer_types names {len(kinds)} layers; the student has {shape.layers}")
        return kinds
    copied = spec.init == "teacher" or (spec.init == "auto" and _can_cut(spec, teacher, config))
    if copied and teacher.model_type == shape.family:
        layers = select_layers(spec.copy_layers, shape.layers, Shape.from_config(teacher).layers)
        check_layers(shape.family, layers)
        return layer_kinds(teacher, layers) or kinds
    rhythm = next((n for n, kind in enumerate(kinds) if n and kind == kinds[0] != kinds[n - 1]), len(kinds))
    return [kinds[n] if n < len(kinds) else kinds[n % rhythm] for n in range(shape.layers)]


POSITIONS = 512
"""The positions of a student whose teacher has no limit (XLNet, T5): as many as BERT has."""


def _of_family(family: str, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """Make a config of another family, with what it shares with the teacher's."""
    if teacher.model_type == "xlnet":
        raise StudentError(
            "student.family: XLNet's rows are padded before the text and end in [CLS], which no other family reads; "
            "use family: teacher"
        )
    chosen: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    settable = [name for name in _SHARED if not isinstance(getattr(chosen, name, None), property)]  # XLNet's length
    config = chosen(**{name: getattr(teacher, name) for name in settable if getattr(teacher, name, None) is not None})
    if "max_position_embeddings" in settable:
        known = getattr(teacher, "max_position_embeddings", -1) - _offset(teacher)
        config.max_position_embeddings = (known if known > 0 else POSITIONS) + _offset(config)
    if getattr(config, "type_vocab_size", 0):  # what the teacher's tokenizer makes: ERNIE's has four
        config.type_vocab_size = max(2, getattr(teacher, "type_vocab_size", 0))
    if family == "xlnet":  # it sums up the last token, [CLS] in its own vocabulary's rows alone
        config.summary_type = "first"
    if config.is_encoder_decoder:  # T5's answers begin with the padding token
        config.decoder_start_token_id = config.pad_token_id
    return config


def _set_further(config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        undeclared = _UNDECLARED.get(config.model_type, ())
        if not hasattr(config, name) and name not in undeclared:
            known = [*config.to_dict(), *undeclared]
            raise StudentError(f"student.config: {config.model_type} has no {name!r}.{did_you_mean(name, known)}")
        setattr(config, name, value)
    if config.model_type == "mobilebert":  # the width its blocks work in, which it sees to only when it is made
        config.true_hidden_size = config.intra_bottleneck_size if config.use_bottleneck else config.hidden_size


def _count(size: str, wanted: float | None, theirs: int) -> int:
    if wanted is None:
        return theirs
    count = round(wanted * theirs) if wanted < 1 else wanted
    if count != int(count) or count < 1:
        raise StudentError(f"student.{size}: {wanted} is neither a whole number nor a share of the teacher's {theirs}")
    return int(count)


def build(
    spec: StudentSpec,
    teacher: PreTrainedModel,
    *,
    head: Head = "task",
    kind: Kind | None = "classification",
    words: Words | None = None,
    kept: Kept | None = None,
) -> PreTrainedModel:
    """Build a plain transformers model with the teacher's labels and vocabulary, and a `head` for this `kind` of task.

    words: the tokenizer's, for an init function that takes them. kept: the teacher's units that the student begins as,
    see `choose_units`, which is asked where it is left out. Weights that are not copied (see StudentSpec.init) are
    drawn from torch's global generator: seed it first. Raises StudentError.
    """
    spec = resolve_init(spec, teacher.config)
    if isinstance(spec.init, str) and spec.init not in INITS:
        return _from_checkpoint(spec.init, teacher, heads.auto(head, kind))
    config = config_for(spec, teacher.config)
    heads.model_class(config, head, kind)
    student = heads.create(config, head, kind)
    if spec.init == "teacher":
        kept = kept or choose_units(spec, teacher)
        _carry(spec, teacher, student, kept)
        _begin_projection(student, teacher, kept)
    elif isinstance(spec.init, Call):
        with torch.no_grad():
            spec.init(student, teacher, **({"words": words} if "words" in options(spec.init.function) else {}))
    share(student, **spec.share)
    return student


def resolve_init(spec: StudentSpec, teacher: Any) -> StudentSpec:
    """Say what `init: auto` is with this teacher. Raises StudentError naming the size that does not fit."""
    if spec.init != "auto":
        return spec
    config = config_for(spec, teacher)
    return spec.model_copy(update={"init": "teacher" if _can_cut(spec, teacher, config) else "scratch"})


def _can_cut(spec: StudentSpec, teacher: Any, config: Any) -> bool:
    """Check that a student of this config can be cut out of its teacher."""
    mine, theirs = Shape.from_config(config), Shape.from_config(teacher)
    sizes = ("layers", "hidden", "embedding", "heads", "head_size", "ffn")
    if any(getattr(mine, size) > getattr(theirs, size) for size in sizes) or not cuts(theirs.family, mine.family):
        return False
    if theirs.family in GROUPED:
        together = mine.heads * teacher.num_key_value_heads == theirs.heads * config.num_key_value_heads
        return together and mine.head_size == theirs.head_size
    if theirs.family in ROTARY and not fits_rotary(teacher, mine.head_size):
        return False
    return theirs.family not in FIRST_IS_OWN or select_layers(spec.copy_layers, mine.layers, theirs.layers)[0] == 0


def choose_units(
    spec: StudentSpec, teacher: PreTrainedModel, rate: Callable[[], Importance] | None = None
) -> Kept | None:
    """Choose the units of its teacher that a student of `init: teacher` begins as; None where it begins otherwise.

    rate: tells the importance of the teacher's units, and is asked where the student is narrower; None: the norms of
    their weights tell. Raises StudentError where the student is larger than its teacher.
    """
    spec = resolve_init(spec, teacher.config)
    if spec.init != "teacher":
        return None
    mine, theirs = Shape.from_config(config_for(spec, teacher.config)), Shape.from_config(teacher.config)
    if not cuts(theirs.family, mine.family):
        return None
    narrower = any(getattr(mine, size) != getattr(theirs, size) for size in ("hidden", "embedding", "heads", "ffn"))
    layers = select_layers(spec.copy_layers, mine.layers, theirs.layers)
    return keep_units(teacher, mine, layers, rate() if rate and narrower else None)


def plan_config(spec: StudentSpec, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """Make the config of the student that `build` will make, also of one that begins as a checkpoint.

    Raises StudentError, TeacherError for a checkpoint that cannot be read.
    """
    if not isinstance(spec.init, str) or spec.init in INITS:
        return config_for(spec, teacher)
    return load_config(Path(find_checkpoint(spec.init)))


def find_checkpoint(init: str) -> str:
    """Find the folder of a checkpoint that students begin as, by its path or its name. Raises StudentError."""
    if Path(init, "config.json").is_file():
        return init
    try:
        return str(resolve(init))
    except TeacherError as error:
        raise StudentError(
            f"student.init: {init!r} is neither scratch, teacher, nor a folder with a config.json; {error}"
        ) from error


def _from_checkpoint(folder: str, teacher: PreTrainedModel, auto: Any) -> PreTrainedModel:
    folder = find_checkpoint(folder)
    labels = {name: getattr(teacher.config, name) for name in ("id2label", "label2id", "problem_type")}
    config = load_config(Path(folder))
    for name, value in labels.items():
        setattr(config, name, value)
    with explain_load_errors(Path(folder)):
        student: PreTrainedModel = auto.from_pretrained(
            folder, config=config, ignore_mismatched_sizes=True, use_safetensors=True
        )
    if student.config.vocab_size != teacher.config.vocab_size:
        raise StudentError(
            f"student.init: {folder} has {student.config.vocab_size} tokens, the teacher {teacher.config.vocab_size}: "
            "student and teacher must share a vocabulary"
        )
    share_again(student)
    return student


@torch.no_grad()
def _carry(spec: StudentSpec, teacher: PreTrainedModel, student: PreTrainedModel, kept: Kept | None) -> None:
    """Copy every weight that both models have: of the units that are kept, or whole layers where they are not cut."""
    if kept is None:
        theirs, mine = Shape.from_config(teacher.config), Shape.from_config(student.config)
        if mine.family == theirs.family and (mine.family in WHOLE or mine.layers == theirs.layers):
            return copy_whole(student, teacher, spec.copy_layers)
        raise StudentError(
            f"student.init: teacher knows the weights of {', '.join((*KNOWN, *APART, *SLICED, *WHOLE))}, not of "
            f"{theirs.family} -> {mine.family}; use init: scratch, the folder of a checkpoint, or leave out every size"
        )
    if student.config.model_type in SLICED:
        return copy_units(student, teacher, kept)
    source = narrow_weights(teacher, kept)
    for weight, parameter in _weights(student).items():
        tensor = source.get(weight)
        if tensor is None or (weight.role == "classifier" and tensor.shape[0] != parameter.shape[0]):
            continue
        if weight.role == "types":  # one in RoBERTa, two in BERT: what there is, and the last for the rest
            tensor = tensor[torch.arange(len(parameter)).clamp(max=len(tensor) - 1)]
        if weight.role == "positions":
            tensor = tensor[_offset(teacher.config) :]
            parameter[_offset(student.config) :].copy_(tensor)
        elif tensor.shape == parameter.shape:
            parameter.copy_(tensor)
    types, own = Weight("types", None, "weight"), _weights(student)
    if types in source and types not in own:  # DistilBERT gets type 0 with its positions, so that it embeds as before
        own[Weight("positions", None, "weight")].add_(source[types][0])


@torch.no_grad()
def _begin_projection(student: Any, teacher: Any, kept: Kept | None) -> None:
    """Let a narrower sentence encoder's linear map put each number where its teacher, which has no map, has it."""
    mine = getattr(student, "projection", None)
    if mine is not None and getattr(teacher, "projection", None) is None and kept is not None:
        places = kept.indices.get(HIDDEN, torch.arange(mine.in_features))
        mine.weight.copy_(torch.eye(mine.out_features)[:, places])


def _weights(model: PreTrainedModel) -> dict[Weight, Tensor]:
    named: dict[Weight, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weight = weight_of(name, model.config.model_type)
        if weight is not None:
            named[weight] = parameter.data
    return named


def _offset(config: Any) -> int:
    """Count the rows of positions that are never used: RoBERTa's start after the padding index."""
    return config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
