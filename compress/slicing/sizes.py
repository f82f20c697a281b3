"""Read the sizes of a transformer along each axis that can be cut, and resolve requests
for smaller sizes."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from compress import families
from compress.errors import PruneError, StudentError
from compress.slicing.shape import Shape, find_setting, set_size


@dataclass(frozen=True)
class Sizes:
    """layers N, hidden D, heads H of head_size K, ffn F; embedding E and bottleneck if
    the family has them.

    Except in families of `own_width`, attention is as wide as the stream it writes to:
    H K = D (in MobileBERT the bottleneck). With rotary positions the size of heads can
    only change by a whole factor (`fits_rotary`). In `grouped` families, heads are
    query heads; the number of them that share a head of keys and values stays the same.
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
        family = families.find(config.model_type)
        factorised = family.factorised or shape.embedding != shape.hidden
        return Sizes(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            head_size=shape.head_size,
            ffn=shape.ffn,
            embedding=shape.embedding if factorised else None,
            bottleneck=config.true_hidden_size if family.bottleneck else None,
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
        """Replace some of the model's sizes by counts, or by shares below 1 of the
        model's own.

        With hidden but without heads, heads keep their size as far as it divides
        hidden; a share of hidden is rounded to whole heads, one of heads to groups that
        share keys and values. Raises PruneError, which names the impossible size and
        the nearest possible one.
        """
        whole = Sizes.from_config(config)
        family = families.find(config.model_type)
        wanted = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "ffn": ffn,
            "embedding": embedding,
            "bottleneck": bottleneck,
        }
        request = {name: value for name, value in wanted.items() if value is not None}
        counts = dict[str, Any]()
        for name, value in request.items():
            if (own := getattr(whole, name)) is None:
                raise PruneError(
                    f"{name}: this {family.name} model has no such size; leave it out"
                )
            counts[name] = count_size(name, value, own)
        sizes = replace(whole, **counts)
        shares = {name for name, value in request.items() if value < 1}
        if sizes.embedding == sizes.hidden and family.projects_if_different:
            raise PruneError(
                f"hidden {sizes.hidden}: equals the width of the embedding, but "
                f"{family.name} has no projection between equal widths, as this model "
                f"has; choose another hidden, or an embedding below {sizes.hidden}"
            )
        if family.grouped:
            return _fit_groups(sizes, whole, config, shares)
        if family.own_width:
            return sizes
        stream = "hidden" if whole.bottleneck is None else "bottleneck"
        if family.rotary:
            return _fit_rotary(
                config, sizes, whole, given="heads" in request, shared=stream in shares
            )
        return _fit_heads(
            sizes, whole, stream, given="heads" in request, shared=stream in shares
        )

    @property
    def attention(self) -> int:
        """Return H K, the width of queries, keys and values."""
        return self.heads * self.head_size

    def plain(self) -> dict[str, int]:
        """Return the sizes that the family has, by name."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    def within(self, other: "Sizes") -> bool:
        """Return whether no size is larger than in `other`, apart from the size of
        heads."""
        own = self.plain()
        limits = other.plain()
        return own.keys() == limits.keys() and all(
            own[name] <= limits[name] for name in own.keys() - {"head_size"}
        )

    def __str__(self) -> str:
        """Format as `4 layers, hidden 312, 12 heads of 26, ffn 1200`."""
        more = [
            f"{name} {value}"
            for name in ("embedding", "bottleneck")
            if (value := getattr(self, name)) is not None
        ]
        parts = [
            f"{self.layers} layers",
            f"hidden {self.hidden}",
            f"{self.heads} heads of {self.head_size}",
        ]
        return ", ".join([*parts, f"ffn {self.ffn}", *more])


def count_size(name: str, wanted: float, whole: int) -> int:
    """Resolve a requested count, or share of the model's. Raises PruneError for more
    than the model has."""
    count = round(wanted * whole) if 0 < wanted < 1 else wanted
    if count != int(count) or wanted <= 0:
        raise PruneError(
            f"{name}: {wanted}; expected a whole number, or a share of the model's "
            f"{whole} below 1"
        )
    if count > whole:
        raise PruneError(
            f"{name}: {wanted:g} is more than the model's {whole}; pruning can only "
            "make it smaller"
        )
    return max(1, int(count))


def _fit_heads(
    sizes: Sizes, whole: Sizes, stream: str, *, given: bool, shared: bool
) -> Sizes:
    """Choose the number of heads (unless `given`) and their size to fill the stream,
    rounded if it is a share."""
    width = getattr(sizes, stream)
    head_size = whole.head_size
    if given and shared:
        width = max(sizes.heads, round(width / sizes.heads) * sizes.heads)
    elif shared and width >= head_size:
        width = round(width / head_size) * head_size
    if width == getattr(whole, stream) and not given:
        return replace(sizes, heads=whole.heads, head_size=head_size)
    heads = sizes.heads
    if not given:
        divisors = [heads for heads in range(1, whole.heads + 1) if width % heads == 0]
        heads = min(
            divisors,
            key=lambda n: (width // n > head_size, abs(width // n - head_size), -n),
        )
    if width % heads:
        below = max(1, width // heads) * heads
        above = -(-width // heads) * heads
        nearest = sorted({below, above} if above <= getattr(whole, stream) else {below})
        raise PruneError(
            f"{stream}: {width} is not a multiple of {heads} heads, as this family "
            f"needs; the nearest that are: {', '.join(map(str, nearest))}"
        )
    return replace(sizes, heads=heads, head_size=width // heads, **{stream: width})


def fits_rotary(config: Any, head_size: int) -> bool:
    """Return whether heads of this size rotate at speeds that the model's own heads
    share.

    Row i of K rotates at base^(-2 i / K): the rows of heads of K / n rotate like every
    n-th row of these, and heads of n K rows contain these rows. Other sizes rotate at
    other speeds, and so do all sizes with rescaled frequencies.
    """
    own = Shape.from_config(config).head_size
    if head_size == own:
        return True
    plain = all(
        (each or {}).get("rope_type") == "default"
        for each in (config.rope_parameters or {}).values()
    )
    return plain and is_whole_factor(own, head_size)


def is_whole_factor(size: int, other: int) -> bool:
    """Return whether rotary heads of one size can contain heads of the other. Sizes are
    even, because rows turn in pairs."""
    return size == other or (other % 2 == 0 and not (size % other and other % size))


def _fit_rotary(
    config: Any, sizes: Sizes, whole: Sizes, *, given: bool, shared: bool
) -> Sizes:
    """Choose the number of heads (unless `given`) and their size to fill the stream,
    rounded if it is a share."""
    fitting = [
        replace(sizes, heads=heads, head_size=size, hidden=heads * size)
        for heads in ([sizes.heads] if given else range(1, whole.heads + 1))
        for size in range(1, whole.hidden // heads + 1)
        if fits_rotary(config, size)
    ]
    nearest = sorted(
        {each.hidden for each in fitting},
        key=lambda width: (abs(width - sizes.hidden), width),
    )
    width = nearest[0] if shared else sizes.hidden
    filling = [each for each in fitting if each.hidden == width]
    if not filling:
        raise PruneError(
            f"hidden: {width} is not a multiple of heads of {whole.head_size}, whose "
            "rotary positions let their size only change by a whole "
            f"factor{f', with {sizes.heads} heads' if given else ''}; the nearest that "
            f"are: {', '.join(map(str, sorted(nearest[:2])))}"
        )
    return min(
        filling,
        key=lambda each: (abs(each.head_size - whole.head_size), each.head_size),
    )


def _fit_groups(
    sizes: Sizes, whole: Sizes, config: Any, shares: Collection[str]
) -> Sizes:
    """Round `shares` so that groups of heads stay whole and heads divide the stream, as
    LlamaConfig requires; refuse counts that do not."""
    together = whole.heads // config.num_key_value_heads
    for name, reason in (
        ("heads", f"{together} heads share each head of keys and values"),
        ("hidden", "the number of heads divides it in this family"),
    ):
        count = getattr(sizes, name)
        step = together if name == "heads" else sizes.heads
        if name in shares:
            sizes = replace(sizes, **{name: max(1, round(count / step)) * step})
        elif count % step:
            nearest = [
                n
                for n in (count // step * step, -(-count // step) * step)
                if 0 < n <= getattr(whole, name)
            ]
            raise PruneError(
                f"{name}: {count} is not a multiple of {step}: {reason}; the nearest "
                f"that are: {', '.join(map(str, nearest))}"
            )
    return sizes


def layer_kinds(config: Any, layers: Sequence[int]) -> list[str] | None:
    """Return the kind of attention (local or global) of these layers, or None if all
    layers are of one kind."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else [kinds[layer] for layer in layers]


def resize_config(
    config: Any, sizes: Sizes, *, layers: Sequence[int] | None = None
) -> Any:
    """Make the config of a model of these sizes that is otherwise equal.

    layers: the model's layers that it keeps, if they are of several kinds; None: evenly
    spread.
    """
    whole = Shape.from_config(config)
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = layer_kinds(
            config, layers or select_layers("even", sizes.layers, whole.layers)
        )
    config._attn_implementation = None  # the fastest one, whatever the source uses
    if getattr(config, "activation_ranges", None):
        config.activation_ranges = None  # learned for other layers
    named: Mapping[str, int | None] = {
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "ffn": sizes.ffn,
        "embedding": sizes.hidden if sizes.embedding is None else sizes.embedding,
    }
    for size, value in named.items():
        if find_setting(config, size) is not None:
            set_size(config, size, value)
    if families.find(config.model_type).grouped:
        config.num_key_value_heads = (
            sizes.heads * config.num_key_value_heads // whole.heads
        )
        config.head_dim = sizes.head_size
    if sizes.bottleneck is not None:
        config.intra_bottleneck_size = config.true_hidden_size = sizes.bottleneck
    # DeBERTa's second name for the same width
    if hasattr(config, "pooler_hidden_size"):
        config.pooler_hidden_size = sizes.hidden
    return config


def select_layers(rule: str | Sequence[int], students: int, teachers: int) -> list[int]:
    """Choose the 0-based teacher layer of each student layer, by a rule or a list.
    Raises StudentError.

    even     first, last and evenly between, halves rounded to even: 6 of 12 are
             DistilBERT's 0 2 4 7 9 11
    uniform  every N/M-th, ending with the last, as in TinyBERT's layer map
    first    0 .. M-1; last: N-M .. N-1
    """
    if not isinstance(rule, str):
        layers = [
            layer % teachers if -teachers <= layer < teachers else -1 for layer in rule
        ]
        if len(layers) != students or -1 in layers:
            raise StudentError(
                f"student.copy_layers: {list(rule)} must name {students} layers, each "
                f"of 0..{teachers - 1}"
            )
        return layers
    if students > teachers:
        raise StudentError(
            f"student.copy_layers: {rule}: the student's {students} layers cannot all "
            f"come from the teacher's {teachers}; list the layers to copy (one may be "
            "named twice), or use init: scratch"
        )
    if rule == "even":
        return [
            round(m * (teachers - 1) / max(students - 1, 1)) for m in range(students)
        ]
    if rule == "uniform":
        return [(m + 1) * teachers // students - 1 for m in range(students)]
    return (
        list(range(students))
        if rule == "first"
        else list(range(teachers - students, teachers))
    )


def inner_weights(sizes: Sizes) -> int:
    """Count the weights in the layers' matrices: queries, keys, values, attention's
    output, and the two of the FFN."""
    stream = sizes.bottleneck or sizes.hidden
    return sizes.layers * stream * (4 * sizes.attention + 2 * sizes.ffn)
