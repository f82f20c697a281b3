"""Build a student from its spec and its teacher."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import compress.models.own_classes  # noqa: F401  # registers our models with transformers
from compress import families
from compress.arguments import check_arguments
from compress.config.reference import Call, options
from compress.config.stages import INITS, Head, StudentSpec
from compress.data.masking import Words
from compress.errors import ArgumentError, StudentError, TeacherError, did_you_mean
from compress.kinds import Kind
from compress.models import heads
from compress.models.checkpoints import resolve
from compress.models.init_weights import copy_from_teacher, first_position
from compress.models.loader import (
    compare_tokens,
    load_config,
    load_model,
    load_tokenizer,
)
from compress.models.memory import is_dispatched
from compress.models.padding import hide_padding, reads_last_token
from compress.models.sentence_settings import SETTINGS_KEY
from compress.models.sharing import share, share_again
from compress.slicing.cut import copy_generation_config
from compress.slicing.plan import SlicePlan
from compress.slicing.select import Importance, Kept, check_layers, choose, magnitude
from compress.slicing.shape import Shape, find_setting, set_size
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
    SETTINGS_KEY,  # so that its vectors lie in the same space
)
"""Settings that a student of another family takes from its teacher."""
_SIZES = ("layers", "hidden", "embedding", "heads", "head_size", "ffn")
POSITIONS = 512
"""The positions of a student whose teacher has no limit (XLNet, T5): as many as BERT
has."""


def config_for(spec: StudentSpec, teacher: Any) -> PreTrainedConfig:
    """Make the student's config: the teacher's config, resized, or another family's
    with the teacher's vocabulary and labels.

    Raises StudentError, which names the size that does not fit, and PruneError for
    layers that cannot be at their positions.
    """
    family = teacher.model_type if spec.family == "teacher" else spec.family
    if family not in CONFIG_MAPPING:
        raise StudentError(
            "student.family: no model family "
            f"{family!r}.{did_you_mean(family, CONFIG_MAPPING)}"
        )
    if family == teacher.model_type:
        config = copy.deepcopy(teacher)
        # the fastest of the family, however the teacher was opened
        config._attn_implementation = None
    else:
        config = _convert_config(family, teacher)
    _set_sizes(config, spec, teacher)
    if hasattr(config, "num_key_value_heads"):
        _set_groups(config, teacher, given="num_key_value_heads" in spec.config)
    _apply_settings(config, spec)
    shape = Shape.from_config(config)
    if getattr(config, "layer_types", None):
        config.layer_types = _choose_layer_types(spec, teacher, config, shape)
    if family == teacher.model_type:
        _cut_lists(config, spec, Shape.from_config(teacher).layers, shape.layers)
    # DeBERTa's second name for the same width
    if hasattr(config, "pooler_hidden_size"):
        config.pooler_hidden_size = shape.hidden
    if hasattr(config, "d_head"):  # XLNet's second name for the width of a head
        config.d_head = shape.hidden // shape.heads
    if shape.hidden % shape.heads:
        raise StudentError(
            f"student: hidden {shape.hidden} is not a multiple of heads {shape.heads}: "
            "expected heads of equal width; change one of the two, as by --set "
            "student.heads=4"
        )
    return config


def _cut_lists(config: Any, spec: StudentSpec, theirs: int, layers: int) -> None:
    """Choose the entries of settings that have one for each layer, as layers are
    copied."""
    of_layers = [
        name
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == theirs != layers
        if name not in (*spec.config, "layer_types", "architectures")
        if not name.endswith("_token_id")
    ]
    for name in of_layers:
        chosen = select_layers(spec.copy_layers, layers, theirs)
        setattr(config, name, [getattr(config, name)[layer] for layer in chosen])
    if kinds := getattr(config, "attention_layers", None):  # GPT-Neo derives it
        config.attention_types = [[[kind], 1] for kind in kinds]


def _set_sizes(config: Any, spec: StudentSpec, teacher: Any) -> None:
    theirs = Shape.from_config(teacher)
    for size in ("layers", "hidden", "ffn", "heads", "embedding"):
        wanted = getattr(spec, size)
        name = find_setting(config, size)
        if name is None:
            if wanted is None:
                continue
            raise StudentError(
                f"student.{size}: {config.model_type} models have no such size"
            )
        # GPT-2's neurons, which then follow from the width
        if wanted is None and getattr(config, name) is None:
            continue
        if size == "embedding" and wanted is None:
            if (
                config.model_type == teacher.model_type
                and theirs.embedding == theirs.hidden
            ):
                config.embedding_size = Shape.from_config(config).hidden
            continue
        set_size(config, size, _count(size, wanted, getattr(theirs, size)))
    if theirs.decoder_layers is not None and config.is_encoder_decoder:
        layers = _count("layers", spec.layers, theirs.decoder_layers)
        set_size(config, "decoder_layers", layers)


def _count(size: str, wanted: float | None, theirs: int) -> int:
    """Resolve a size: a count, a share of the teacher's size, or by default the
    teacher's size."""
    if wanted is None:
        return theirs
    count = round(wanted * theirs) if wanted < 1 else wanted
    if count != int(count) or count < 1:
        raise StudentError(
            f"student.{size}: {wanted} is neither a whole number nor a share of the "
            f"teacher's {theirs}"
        )
    return int(count)


def _apply_settings(config: Any, spec: StudentSpec) -> None:
    """Apply the further settings of `spec.config`."""
    family = families.find(config.model_type)
    for name, value in spec.config.items():
        if not hasattr(config, name) and name not in family.undeclared:
            known = [*config.to_dict(), *family.undeclared]
            raise StudentError(
                f"student.config: {config.model_type} has no "
                f"{name!r}.{did_you_mean(name, known)}"
            )
        with heads.naming_refusals(config):
            setattr(config, name, value)
    # the width inside its blocks, which the config computes only when it is created
    if family.bottleneck:
        config.true_hidden_size = (
            config.intra_bottleneck_size
            if config.use_bottleneck
            else config.hidden_size
        )


def _set_groups(config: Any, teacher: Any, *, given: bool) -> None:
    """Keep the teacher's head size and its number of heads per key and value head; if
    it has no groups, every head has its own keys and values.

    given: the recipe sets the number of key and value heads.
    """
    heads = Shape.from_config(config).heads
    if not hasattr(teacher, "num_key_value_heads"):
        config.head_dim = config.hidden_size // heads
        config.num_key_value_heads = heads
        return
    together = teacher.num_attention_heads // teacher.num_key_value_heads
    if heads % together and not given:
        raise StudentError(
            f"student.heads: {heads}: {together} heads share each head of keys and "
            f"values in this teacher; expected a multiple of {together}, or `config: "
            "{num_key_value_heads: ...}`"
        )
    config.head_dim = Shape.from_config(teacher).head_size
    config.num_key_value_heads = heads // together


def _choose_layer_types(
    spec: StudentSpec, teacher: PreTrainedConfig, config: Any, shape: Shape
) -> list[str]:
    """Choose the kind of attention of each layer: as in the copied teacher layer, else
    by the family's pattern."""
    kinds = list(config.layer_types)
    if "layer_types" in spec.config:
        if len(kinds) != shape.layers:
            raise StudentError(
                f"student.config: layer_types names {len(kinds)} layers; the student "
                f"has {shape.layers}"
            )
        return kinds
    copied = spec.init == "teacher" or (
        spec.init == "auto" and _can_cut(spec, teacher, config)
    )
    if copied and teacher.model_type == shape.family:
        layers = select_layers(
            spec.copy_layers, shape.layers, Shape.from_config(teacher).layers
        )
        check_layers(families.find(shape.family), layers)
        return layer_kinds(teacher, layers) or kinds
    period = next(
        (n for n, kind in enumerate(kinds) if n and kind == kinds[0] != kinds[n - 1]),
        len(kinds),
    )
    return [
        kinds[n] if n < len(kinds) else kinds[n % period] for n in range(shape.layers)
    ]


def _convert_config(family: str, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """Make a config of another family, with the settings that it shares with the
    teacher's config."""
    if families.find(teacher.model_type).summary == "last":
        raise StudentError(
            f"student.family: rows of {teacher.model_type} are padded before the text "
            "and end in [CLS], which no other family reads; use family: teacher"
        )
    chosen: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    # XLNet's length
    settable = [
        name
        for name in _SHARED
        if not isinstance(getattr(chosen, name, None), property)
    ]
    config = chosen(
        **{
            name: getattr(teacher, name)
            for name in settable
            if getattr(teacher, name, None) is not None
        }
    )
    if "max_position_embeddings" in settable:
        usable = getattr(teacher, "max_position_embeddings", -1) - first_position(
            teacher
        )
        config.max_position_embeddings = (
            usable if usable > 0 else POSITIONS
        ) + first_position(config)
    # as many as the teacher's tokenizer uses: four in ERNIE
    if getattr(config, "type_vocab_size", 0):
        config.type_vocab_size = max(2, getattr(teacher, "type_vocab_size", 0))
    # which is [CLS] only with its own tokenizer
    if families.find(family).summary == "last":
        config.summary_type = "first"
    if config.is_encoder_decoder:  # T5's answers begin with the padding token
        config.decoder_start_token_id = config.pad_token_id
    return config


@check_arguments
def build(
    spec: StudentSpec,
    teacher: PreTrainedModel,
    *,
    head: Head = "task",
    kind: Kind | None = "classification",
    words: Words | None = None,
    kept: Kept | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Build a plain transformers model with the teacher's labels, vocabulary and
    settings of generation, and a `head` for this `kind` of task.

    words: the tokenizer's, for init functions that take them. kept: the teacher's units
    that the student consists of, by default what `choose_units` returns. tokenizer:
    makes the rows that the student will read; a checkpoint that it is initialised from
    must have the same tokens. Weights that are not copied (see StudentSpec.init) are
    drawn from torch's global generator: seed it first. Raises StudentError.
    """
    if head == "task" and kind is None:
        raise ArgumentError(
            "kind", "a kind of task, for `head: task`", "None", where="build"
        )
    spec = resolve_init(spec, teacher.config)
    if isinstance(spec.init, str) and spec.init not in INITS:
        if tokenizer is not None:
            check_tokens(spec, tokenizer)
        return _load_student(spec.init, teacher, head, kind)
    config = config_for(spec, teacher.config)
    student = heads.create(config, head, kind)
    if spec.init != "scratch" and is_dispatched(teacher):
        raise StudentError(
            f"student.init: {spec.init} copies weights of the teacher, which does not "
            "fit into this machine's memory; expected scratch, or a checkpoint to "
            "initialise from: --set student.init=FOLDER"
        )
    if spec.init == "teacher":
        copy_from_teacher(
            student, teacher, spec.copy_layers, kept or choose_units(spec, teacher)
        )
    elif isinstance(spec.init, Call):
        with torch.no_grad():
            spec.init(
                student,
                teacher,
                **({"words": words} if "words" in options(spec.init.function) else {}),
            )
    share(student, **spec.share)
    copy_generation_config(student, teacher)
    return student


def resolve_init(spec: StudentSpec, teacher: Any) -> StudentSpec:
    """Resolve `init: auto` for this teacher. Raises StudentError, which names the size
    that does not fit."""
    if spec.init != "auto":
        return spec
    config = config_for(spec, teacher)
    return spec.model_copy(
        update={"init": "teacher" if _can_cut(spec, teacher, config) else "scratch"}
    )


def _can_cut(spec: StudentSpec, teacher: Any, config: Any) -> bool:
    """Return True if a student of this config can be cut out of its teacher."""
    mine = Shape.from_config(config)
    theirs = Shape.from_config(teacher)
    if any(getattr(mine, size) > getattr(theirs, size) for size in _SIZES):
        return False
    family = families.find(theirs.family)
    if not families.find(mine.family).is_cut_from(family):
        same = all(getattr(mine, size) == getattr(theirs, size) for size in _SIZES[1:])
        return same and mine.family == theirs.family
    if family.grouped:
        together = (
            mine.heads * teacher.num_key_value_heads
            == theirs.heads * config.num_key_value_heads
        )
        return together and mine.head_size == theirs.head_size
    if family.rotary and not fits_rotary(teacher, mine.head_size):
        return False
    return (
        not family.own_first_layer
        or select_layers(spec.copy_layers, mine.layers, theirs.layers)[0] == 0
    )


def choose_units(
    spec: StudentSpec,
    teacher: PreTrainedModel,
    rate: Callable[[], Importance] | None = None,
) -> Kept | None:
    """Choose the units of its teacher that a student of `init: teacher` consists of;
    None for any other `init`.

    rate: computes the importance of the teacher's units, and is called only for a
    narrower student; by default the norms of their weights decide. Raises StudentError
    if the student is larger than its teacher.
    """
    spec = resolve_init(spec, teacher.config)
    if spec.init != "teacher":
        return None
    mine = Shape.from_config(config_for(spec, teacher.config))
    theirs = Shape.from_config(teacher.config)
    family = families.find(theirs.family)
    if not families.find(mine.family).is_cut_from(family):
        return None
    layers = select_layers(spec.copy_layers, mine.layers, theirs.layers)
    for size in _SIZES[1:]:
        if getattr(mine, size) > getattr(theirs, size):
            raise StudentError(
                f"student: init: teacher can only narrow, but {size} "
                f"{getattr(mine, size)} is more than the teacher's "
                f"{getattr(theirs, size)}; make it smaller (hidden = heads x head "
                "size) or use init: scratch"
            )
    if family.rotary and not fits_rotary(teacher.config, mine.head_size):
        raise StudentError(
            f"student: init: teacher cannot make heads of {mine.head_size} out of "
            f"{theirs.family}'s heads of {theirs.head_size}: rotary positions need "
            "that size, a multiple or a divisor; choose hidden and heads accordingly "
            "(hidden = heads x head size), or use init: scratch"
        )
    plan = SlicePlan.from_model(teacher)
    sizes = replace(
        plan.sizes,
        layers=len(layers),
        hidden=mine.hidden,
        heads=mine.heads,
        head_size=mine.head_size,
        ffn=mine.ffn,
        embedding=None if plan.sizes.embedding is None else mine.embedding,
    )
    if teacher.device.type == "meta":  # a listing builds students only for their sizes
        return Kept(sizes, tuple(layers), {})
    narrower = any(
        getattr(mine, size) != getattr(theirs, size)
        for size in ("hidden", "embedding", "heads", "ffn")
    )
    importance = rate() if rate and narrower else None
    return choose(plan, importance or magnitude(teacher, plan), sizes, layers=layers)


def plan_config(spec: StudentSpec, teacher: PreTrainedConfig) -> PreTrainedConfig:
    """Make the config of the student that `build` will make, also if it is initialised
    from a checkpoint.

    Raises StudentError, and TeacherError for a checkpoint that cannot be read.
    """
    if not isinstance(spec.init, str) or spec.init in INITS:
        return config_for(spec, teacher)
    return load_config(_find_checkpoint(spec.init))


def _find_checkpoint(init: str) -> Path:
    if Path(init, "config.json").is_file():
        return Path(init)
    try:
        return resolve(init)
    except TeacherError as error:
        raise StudentError(
            f"student.init: {init!r} is neither scratch, teacher, nor a folder with a "
            f"config.json; {error}"
        ) from error


def check_tokens(spec: StudentSpec, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Check that the checkpoint that initialises the student has the teacher's tokens,
    with the same ids.

    The student is trained on the teacher's rows. Returns the checkpoint's folder; None
    for any other `init`. Raises StudentError, and TeacherError for a tokenizer that
    cannot be read.
    """
    if not isinstance(spec.init, str) or spec.init in INITS:
        return None
    folder = _find_checkpoint(spec.init)
    difference = compare_tokens(load_tokenizer(folder), tokenizer)
    if difference:
        raise StudentError(
            f"student.init: {folder} has another tokenizer than the teacher: "
            f"{difference}; expected the same tokens with the same ids. Choose a "
            "checkpoint with the teacher's tokenizer, or init: teacher or scratch"
        )
    return folder


def _load_student(
    init: str, teacher: PreTrainedModel, head: Head, kind: Kind | None
) -> PreTrainedModel:
    """Load a checkpoint as the student, with the teacher's labels."""
    folder = _find_checkpoint(init)
    config = load_config(folder)
    for name in ("id2label", "label2id", "problem_type"):
        setattr(config, name, getattr(teacher.config, name))
    if reads_last_token(config.model_type):  # of the rows, which its tokenizer made
        config.pad_token_id = teacher.config.pad_token_id
    loaded = load_model(
        folder, heads.auto(head, kind), config, new="head", drop_heads=True
    )
    hide_padding(loaded.model)
    student: PreTrainedModel = loaded.model.requires_grad_(True)
    if (
        head in heads.LANGUAGE
        and student.config.vocab_size != teacher.config.vocab_size
    ):
        raise StudentError(
            f"student.init: {folder} has {student.config.vocab_size} tokens, the "
            f"teacher {teacher.config.vocab_size}: student and teacher must share a "
            "vocabulary"
        )
    share_again(student)
    return student
