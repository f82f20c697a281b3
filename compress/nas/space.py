"""The students of a space that are possible with a teacher: list them, draw one, and
build its config.

space = Space.load("width-depth")
shapes = Shapes.from_space(space, teacher.config)
choice = shapes.suggest(trial)        # {"layers": 3, "hidden": 256, "heads": 8, "ffn":
                                      1024}
config = shapes.config(choice)
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from compress.config.stages import SIZES, StudentSpec
from compress.errors import PruneError, SearchError, StudentError
from compress.models import heads
from compress.models.sharing import share
from compress.models.student import config_for
from compress.nas.config import SettingValue, SettingValues, Space
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, resize_config

if TYPE_CHECKING:
    import optuna

ShapeChoice = Mapping[str, int | float | str]
"""One student, by the axes of the space, with every size as a count."""

COUPLED = (
    ("layers", "share.attention", "share.ffn", "config.num_hidden_groups"),
    (
        "hidden",
        "heads",
        "embedding",
        "bottleneck",
        "config.intra_bottleneck_size",
        "config.embedding_size",
    ),
)
"""Axes whose values can exclude each other: widths must divide into heads, layers into
groups of layers."""


def architecture_key(choice: ShapeChoice) -> str:
    """Hash a choice to 16 hex digits, regardless of the order of its axes."""
    canonical = json.dumps(dict(choice), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class AxisGroup:
    """Axes that are chosen together, and the possible combinations of their values."""

    names: tuple[str, ...]
    rows: tuple[SettingValues, ...]

    def suggest(self, trial: "optuna.Trial") -> SettingValues:
        """Let the sampler draw a combination: evenly spaced numbers and words as they
        are, others by their index."""
        if len(self.names) == 1:
            values = [row[0] for row in self.rows]
            if steps := _as_range(values):
                return (
                    trial.suggest_int(
                        self.names[0], steps.start, steps.stop - 1, step=steps.step
                    ),
                )
            if not all(isinstance(value, int | float) for value in values):
                chosen: Any = trial.suggest_categorical(self.names[0], values)
                return (chosen,)
        return self.rows[
            trial.suggest_int(f"{'+'.join(self.names)} #", 0, len(self.rows) - 1)
        ]


@dataclass(frozen=True)
class Shapes:
    """The students of a space that are possible with one teacher.

    dropped   values of the space that no student of this teacher can have, in words
    """

    space: Space
    teacher: PreTrainedConfig
    blocks: tuple[AxisGroup, ...]
    dropped: tuple[str, ...] = ()

    @staticmethod
    def from_space(space: Space, teacher: PreTrainedConfig) -> "Shapes":
        """List the possible students.

        Raises SearchError, with every problem, for values that are impossible with this
        teacher, and for an empty space.
        """
        axes = _count_sizes(space, teacher)
        empty = Shapes(space, teacher, ())
        blocks = list[AxisGroup]()
        dropped = list[str]()
        for group in _group_axes(space, axes):
            rows = list[SettingValues]()
            reasons = list[str]()
            for row in group.rows:
                try:
                    empty._resolve(dict(zip(group.names, row, strict=True)))
                except (PruneError, StudentError) as error:
                    reasons.append(str(error))
                else:
                    rows.append(row)
            if not rows:
                raise SearchError(
                    f"{space.name}: the space is empty: no student has "
                    f"{' and '.join(group.names)} as listed: "
                    f"{'; '.join(dict.fromkeys(reasons))}"
                )
            values = [
                tuple(dict.fromkeys(row[at] for row in rows))
                for at in range(len(group.names))
            ]
            if group.names not in set(space.tied) and len(rows) == math.prod(
                map(len, values)
            ):
                # every combination is possible, so each axis is chosen by itself
                blocks += [
                    AxisGroup((name,), tuple((value,) for value in each))
                    for name, each in zip(group.names, values, strict=True)
                ]
            else:
                blocks.append(AxisGroup(group.names, tuple(rows)))
            dropped += [
                f"{name} {value}: not possible in any {teacher.model_type} student"
                for at, name in enumerate(group.names)
                for value in dict.fromkeys(row[at] for row in group.rows)
                if value not in values[at]
            ]
        shapes = Shapes(space, teacher, tuple(blocks), tuple(dropped))
        shapes._check_settings()
        return shapes

    def suggest(self, trial: "optuna.Trial") -> ShapeChoice:
        """Let the sampler draw a choice, which is always a possible student."""
        return self._as_choice([block.suggest(trial) for block in self.blocks])

    def key(self, choice: ShapeChoice) -> str:
        return architecture_key(choice)

    def size(self) -> int:
        """Count the students."""
        return math.prod(len(block.rows) for block in self.blocks)

    def every(self) -> Iterator[ShapeChoice]:
        """Yield all students."""
        for rows in itertools.product(*(block.rows for block in self.blocks)):
            yield self._as_choice(rows)

    def drawn(self, count: int, seed: int) -> list[ShapeChoice]:
        """Draw at most `count` different students at random, including those of all
        first and of all last values."""
        if self.size() <= count:
            return list(self.every())
        draw = random.Random(seed)
        ends = [
            self._as_choice([block.rows[at] for block in self.blocks]) for at in (0, -1)
        ]
        choices = {architecture_key(choice): choice for choice in ends}
        while len(choices) < count:
            choice = self._as_choice([draw.choice(block.rows) for block in self.blocks])
            choices[architecture_key(choice)] = choice
        return list(choices.values())

    def config(self, choice: ShapeChoice) -> PreTrainedConfig:
        """Make the student's transformers config. Raises StudentError or PruneError if
        there is no such student."""
        if self.space.mode == "supernet":
            return resize_config(self.teacher, self.sizes(choice))
        config = config_for(self.spec(choice), self.teacher)
        inner = getattr(config, "true_hidden_size", None)
        if inner is not None and inner % config.num_attention_heads:
            raise StudentError(
                f"bottleneck {inner} is not a multiple of {config.num_attention_heads} "
                "heads"
            )
        groups = getattr(config, "num_hidden_groups", 1)
        layers = Shape.from_config(config).layers
        if groups > layers or layers % groups:
            raise StudentError(f"{layers} layers do not divide into {groups} groups")
        return config

    def sizes(self, choice: ShapeChoice) -> Sizes:
        """Return the sizes of a supernet's student."""
        return Sizes.from_request(
            self.teacher,
            **{name: float(choice[name]) for name in SIZES if name in choice},
        )

    def spec(self, choice: ShapeChoice) -> StudentSpec:
        """Return the specification of a student that is built from scratch."""
        sizes = {name: choice[name] for name in SIZES if name in choice}
        student = self.space.student
        dotted: dict[str, dict[Any, Any]] = {
            "config": dict(student.config),
            "share": dict(student.share),
        }
        for name, value in choice.items():
            group, dot, setting = name.partition(".")
            if dot:
                dotted[group][setting] = value
        return StudentSpec.model_validate(student.plain() | sizes | dotted)

    def _as_choice(self, rows: Sequence[SettingValues]) -> ShapeChoice:
        """Write every size as a count, so that equal students have equal choices."""
        values = dict[str, SettingValue]()
        for block, row in zip(self.blocks, rows, strict=True):
            values |= zip(block.names, row, strict=True)
        return self._resolve(values)

    def _resolve(self, values: Mapping[str, Any]) -> ShapeChoice:
        if self.space.mode == "supernet":
            sizes = self.sizes(values).plain()
            sizes.pop("head_size")
            return sizes | {name: values[name] for name in values if name not in SIZES}
        shape = Shape.from_config(self.config(values))
        sizes = {
            name: getattr(shape, name) for name in ("layers", "hidden", "heads", "ffn")
        }
        return {**values, **sizes}

    def _check_settings(self) -> None:
        """Build one student for each value of a `config.` axis, as families refuse
        unknown values only then."""
        problems = []
        for at, block in enumerate(self.blocks):
            if not any(name.startswith(("config.", "share.")) for name in block.names):
                continue
            for row in block.rows:
                rows = [each.rows[0] for each in self.blocks]
                rows[at] = row
                choice = self._as_choice(rows)
                try:
                    with torch.device("meta"):
                        share(
                            heads.create(self.config(choice), "task", "classification"),
                            **self.spec(choice).share,
                        )
                except StudentError as error:
                    value = ", ".join(
                        f"{name} {value}"
                        for name, value in zip(block.names, row, strict=True)
                    )
                    problems.append(f"{self.space.name}: {value}: {error}")
        if problems:
            raise SearchError("\n".join(problems))


def _count_sizes(
    space: Space,
    teacher: PreTrainedConfig,
) -> dict[str, SettingValues]:
    """Turn shares of the teacher's sizes into counts. Raises SearchError with every
    problem."""
    whole = Sizes.from_config(teacher)
    problems = []
    own = whole.plain() | {"embedding": Shape.from_config(teacher).embedding}
    axes = dict[str, SettingValues]()
    for name, values in space.axes.items():
        if name not in SIZES:
            axes[name] = values
            continue
        if name not in (whole.plain() if space.mode == "supernet" else own):
            problems.append(
                f"{space.name}: axes.{name}: {teacher.model_type} models have no such "
                "size"
            )
            continue
        counts = [
            value if isinstance(value, int) else max(1, round(float(value) * own[name]))
            for value in values
        ]
        if name == "heads" and "hidden" not in space.axes and space.mode == "supernet":
            stream = whole.hidden if whole.bottleneck is None else whole.bottleneck
            divisors = [n for n in range(1, own[name] + 1) if stream % n == 0]
            counts = [
                min(divisors, key=lambda n: (abs(n - count), -n))
                if isinstance(value, float)
                else count
                for count, value in zip(counts, values, strict=True)
            ]
        if space.mode == "supernet" and (
            larger := [count for count in counts if count > own[name]]
        ):
            problems.append(
                f"{space.name}: axes.{name}: {larger[-1]} is more than the teacher's "
                f"{own[name]}; the students of a supernet are parts of the teacher "
                "(mode: plain builds others)"
            )
        axes[name] = (
            tuple(counts)
            if any(name in names for names in space.tied)
            else tuple(dict.fromkeys(counts))
        )
    if problems:
        raise SearchError("\n".join(problems))
    return axes


def _group_axes(
    space: Space,
    axes: Mapping[str, SettingValues],
) -> Iterator[AxisGroup]:
    """Group the axes whose values can exclude each other, with every combination,
    possible or not."""
    left = dict(axes)
    for names in space.tied:
        yield AxisGroup(
            tuple(names),
            tuple(dict.fromkeys(zip(*(left.pop(name) for name in names), strict=True))),
        )
    for coupled in COUPLED:
        names = tuple(name for name in coupled if name in left)
        if names:
            yield AxisGroup(
                names, tuple(itertools.product(*(left.pop(name) for name in names)))
            )
    for name, values in left.items():
        yield AxisGroup((name,), tuple((value,) for value in values))


def _as_range(values: Sequence[SettingValue]) -> range | None:
    """Return the range that holds exactly these whole numbers, if there is one."""
    counts = [value for value in values if type(value) is int]
    if len(counts) < len(values):
        return None
    step = counts[1] - counts[0] if len(counts) > 1 else 1
    steps = range(counts[0], counts[-1] + 1, step)
    return steps if list(steps) == counts else None
