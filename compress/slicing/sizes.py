"""Read how large a transformer is along each axis that can be cut, and resolve requests for smaller sizes."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from compress.errors import PruneError, StudentError
from compress.slicing.rules import GROUPED, ROTARY
from compress.slicing.shape import Shape, setting_name

OWN_WIDTH = ("t5", *GROUPED)
"""Families whose attention need not be as wide as the stream it writes to."""


@dataclass(frozen=True)
class Sizes:
    """layers N, hidden D, heads H of head_size K, ffn F; embedding E and bottleneck where the family has them.

    Except in OWN_WIDTH, attention is as wide as the stream it writes to: H K = D (MobileBERT's: the bottleneck). Heads
    that are turned by the tokens' places keep their size, or it goes by a whole factor (`fits_rotary`). In
    `rules.GROUPED` the heads are those of queries; as many as before share each head of keys and values.
    """

    layers: int
    hidden: int
    heads: int
    head_size: int
    ffn: int
    embedding: int | None = None
    bottleneck: int | None = None

    @staticmethod
    def from_config(config: Any) -> "Sizes":
        """Read the sizes from a transformers config."""
        shape = Shape.from_config(config)
        return Sizes(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            head_size=shape.head_size,
            ffn=shape.ffn,
            embedding=shape.embedding if _is_factorised(config, shape) else None,
            bottleneck=config.true_hidden_size if config.model_type == "mobilebert" else None,
        )

    @staticmethod
    def from_request(
        config: Any,
        *,
        layers: float | None = None,
        hidden: float | None = None,
        heads: float | None = None,
        ffn: float | None = None,
        embedding: float | None = None,
        bottleneck: float | None = None,
    ) -> "Sizes":
        """Replace some of the model's sizes: by counts, or by shares below 1 of the model's own.

        Where hidden is given without heads, heads keep their size as far as it divides; a share of hidden is rounded
        to whole heads, one of heads to those that share keys and values. Raises PruneError naming the size that cannot
        be, with the nearest that can.
        """
        whole = Sizes.from_config(config)
        wanted = {
            "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "embedding": embedding,
            "bottleneck": bottleneck,
        }  # fmt: skip
        family = str(config.model_type)
        counts: dict[str, Any] = {
            name: _count(name, value, getattr(whole, name), family)
            for name, value in wanted.items()
            if value is not None
        }
        found = replace(whole, **counts)
        if found.embedding == found.hidden and family in _PROJECTS_IF_DIFFERENT:
            raise PruneError(
                f"hidden {found.hidden}: is the embedding's width too, where {family} has no projection between them "
                f"and this model has; ask for another hidden, or an embedding below {found.hidden}"
            )
        if family in GROUPED:
            return _fit_groups(found, whole, config, shared={each for each in wanted if 0 < (wanted[each] or 0) < 1})
        if family in OWN_WIDTH:
            return found
        stream = "hidden" if whole.bottleneck is None else "bottleneck"
        asked = {"hidden": hidden, "bottleneck": bottleneck}[stream]
        shared = asked is not None and asked < 1
        if family in ROTARY:
            return _fit_rotary(config, found, whole, given=heads is not None, shared=shared)
        return _fit_heads(found, whole, stream, given=heads is not None, shared=shared)

    @property
    def attention(self) -> int:
        """Return H K, the width of queries, keys and values."""
        return self.heads * self.head_size

    def plain(self) -> dict[str, int]:
        """Return the sizes that the family has, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def within(self, other: "Sizes") -> bool:
        """Check that nothing is larger than in `other`, but for the size of heads."""
        mine, theirs = self.plain(), other.plain()
        return mine.keys() == theirs.keys() and all(mine[name] <= theirs[name] for name in mine.keys() - {"head_size"})

    def __str__(self) -> str:
        """Say `4 layers, hidden 312, 12 heads of 26, ffn 1200`."""
        more = [f"{name} {value}" for name in ("embedding", "bottleneck") if (value := getattr(self, name)) is not None]
        parts = [f"{self.layers} layers", f"hidden {self.hidden}", f"{self.heads} heads of {self.head_size}"]
        return ", ".join([*parts, f"ffn {self.ffn}", *more])


NAMES = tuple(each.name for each in fields(Sizes) if each.name != "head_size")
"""The sizes that can be requested."""


_PROJECTS_IF_DIFFERENT = ("electra", "deberta-v2")


def _is_factorised(config: Any, shape: Shape) -> bool:
    return config.model_type in ("albert", "mobilebert") or shape.embedding != shape.hidden


def _count(name: str, wanted: float, theirs: int | None, family: str) -> int:
    if theirs is None:
        raise PruneError(f"{name}: this {family} model has no such size; leave it out")
    count = round(wanted * theirs) if 0 < wanted < 1 else wanted
    if count != int(count) or wanted <= 0:
        raise PruneError(f"{name}: {wanted}; expected a whole number, or a share of the model's {theirs} below 1")
    if count > theirs:
        raise PruneError(f"{name}: {wanted:g} is more than the model's {theirs}; pruning can only take away")
    return max(1, int(count))


def _fit_heads(found: Sizes, whole: Sizes, stream: str, *, given: bool, shared: bool) -> Sizes:
    """Choose heads and their size such that they fill the stream, whose width a share may round."""
    width, before = getattr(found, stream), whole.head_size
    if given:
        if shared:
            width = max(found.heads, round(width / found.heads) * found.heads)
    elif shared and width >= before:
        width = round(width / before) * before
    if width == getattr(whole, stream) and not given:
        return replace(found, heads=whole.heads, head_size=before)
    if not given:
        fitting = [heads for heads in range(1, whole.heads + 1) if width % heads == 0]
        heads = min(fitting, key=lambda each: (width // each > before, abs(width // each - before), -each))
        found = replace(found, heads=heads)
    if width % found.heads:
        down, up = max(1, width // found.heads) * found.heads, -(-width // found.heads) * found.heads
        near = sorted({down, up} if up <= getattr(whole, stream) else {down})
        raise PruneError(
            f"{stream}: {width} is not a multiple of {found.heads} heads, as this family needs; the nearest that are: "
            f"{', '.join(map(str, near))}"
        )
    return replace(found, head_size=width // found.heads, **{stream: width})


def fits_rotary(config: Any, head_size: int) -> bool:
    """Check that heads of this size turn by the tokens' places at speeds that the model's own heads have, or theirs.

    Row i of K turns at base^(-2 i / K): heads of K / n rows turn as every n-th row of these does, heads of n K rows
    have these among theirs. Other sizes turn at other speeds, and so do all where the speeds are scaled anew.
    """
    mine = Shape.from_config(config).head_size
    if head_size == mine:
        return True
    plain = all((each or {}).get("rope_type") == "default" for each in (config.rope_parameters or {}).values())
    return plain and head_size % 2 == 0 and not (mine % head_size and head_size % mine)


def _fit_rotary(config: Any, found: Sizes, whole: Sizes, *, given: bool, shared: bool) -> Sizes:
    """Choose heads and their size such that they fill the stream, whose width a share may round."""
    fitting = [
        replace(found, heads=heads, head_size=size, hidden=heads * size)
        for heads in ([found.heads] if given else range(1, whole.heads + 1))
        for size in range(1, whole.hidden // heads + 1)
        if fits_rotary(config, size)
    ]
    nearest = sorted({each.hidden for each in fitting}, key=lambda width: (abs(width - found.hidden), width))
    width = nearest[0] if shared else found.hidden
    filling = [each for each in fitting if each.hidden == width]
    if not filling:
        raise PruneError(
            f"hidden: {width} is no multiple of heads of {whole.head_size}, which turn by the tokens' places and keep "
            f"their size, or change it by a whole factor{f', with {found.heads} heads' if given else ''}; the nearest "
            f"that are: {', '.join(map(str, sorted(nearest[:2])))}"
        )
    return min(filling, key=lambda each: (abs(each.head_size - whole.head_size), each.head_size))


def _fit_groups(found: Sizes, whole: Sizes, config: Any, *, shared: Collection[str]) -> Sizes:
    """Round the sizes that were given as shares so that no group of heads is cut through, and heads divide the stream,
    as LlamaConfig demands; refuse counts that do not."""
    together = whole.heads // config.num_key_value_heads
    for name, unit, why in (
        ("heads", together, f"{together} heads share each head of keys and values"),
        ("hidden", None, "the number of heads divides it in this family"),
    ):
        count, step = getattr(found, name), unit or found.heads
        if name in shared:
            found = replace(found, **{name: max(1, round(count / step)) * step})
        elif count % step:
            near = [
                each for each in (count // step * step, -(-count // step) * step) if 0 < each <= getattr(whole, name)
            ]
            raise PruneError(
                f"{name}: {count} is not a multiple of {step}: {why}; the nearest that are: {', '.join(map(str, near))}"
            )
    return found


def layer_kinds(config: Any, layers: Sequence[int]) -> list[str] | None:
    """Tell the kind of attention (local or global) of these layers of a model; None where all layers are of one."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else [kinds[layer] for layer in layers]


def resize_config(config: Any, sizes: Sizes, *, layers: Sequence[int] | None = None) -> Any:
    """Make the config of a model of these sizes, with everything else as it is.

    layers: which of the model's these are, where layers are of several kinds; None: evenly spread.
    """
    whole, config = Shape.from_config(config), copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = layer_kinds(config, layers or select_layers("even", sizes.layers, whole.layers))
    config._attn_implementation = None  # the fastest there is, whatever the source was opened with
    if getattr(config, "activation_ranges", None):
        config.activation_ranges = None  # learned for other layers
    named: Mapping[str, int | None] = {
        "layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads, "ffn": sizes.ffn,
        "embedding": sizes.hidden if sizes.embedding is None else sizes.embedding,
    }  # fmt: skip
    for size, value in named.items():
        try:
            name = setting_name(config, size)
        except KeyError:
            if size == "ffn":  # GPT-2 leaves it out where it is four times its width
                config.n_inner = value
            continue
        setattr(config, name, value)
    if config.model_type in GROUPED:
        config.num_key_value_heads = sizes.heads * config.num_key_value_heads // whole.heads
        config.head_dim = sizes.head_size
    if sizes.bottleneck is not None:
        config.intra_bottleneck_size = config.true_hidden_size = sizes.bottleneck
    if hasattr(config, "pooler_hidden_size"):  # DeBERTa's second name for the same width
        config.pooler_hidden_size = sizes.hidden
    return config


def select_layers(rule: str | Sequence[int], students: int, teachers: int) -> list[int]:
    """Choose the 0-based teacher layer for each student layer. Raises StudentError.

    even     first, last and evenly between, halves rounded to even: 6 of 12 are DistilBERT's 0 2 4 7 9 11
    uniform  every N/M-th, ending with the last: what TinyBERT's hidden map compares
    first    0 .. M-1; last: N-M .. N-1
    """
    if not isinstance(rule, str):
        layers = [layer % teachers if -teachers <= layer < teachers else -1 for layer in rule]
        if len(layers) != students or -1 in layers:
            raise StudentError(
                f"student.copy_layers: {list(rule)} must name {students} layers, each of 0..{teachers - 1}"
            )
        return layers
    if students > teachers:
        raise StudentError(
            f"student.copy_layers: {rule}: the student's {students} layers cannot all come from the teacher's "
            f"{teachers}; list the layers to copy (one may be named twice), or use init: scratch"
        )
    if rule == "even":
        return [round(m * (teachers - 1) / max(students - 1, 1)) for m in range(students)]
    if rule == "uniform":
        return [(m + 1) * teachers // students - 1 for m in range(students)]
    return list(range(students)) if rule == "first" else list(range(teachers - students, teachers))


def inner_weights(sizes: Sizes) -> int:
    """Count the weights of the layers' products: queries, keys, values, attention's output, and the two of the FFN."""
    stream = sizes.bottleneck or sizes.hidden
    return sizes.layers * stream * (4 * sizes.attention + 2 * sizes.ffn)
