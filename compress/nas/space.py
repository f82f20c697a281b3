"""The students of a space that a teacher allows: which there are, how one is drawn, and what it would be.

space = Space.load("width-depth")
shapes = Shapes.of(space, teacher.config)
choice = shapes.suggest(trial)        # {"layers": 3, "hidden": 256, "heads": 8, "ffn": 1024}
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

from compress.config.recipe import StudentSpec
from compress.errors import PruneError, SearchError, StudentError
from compress.models import heads
from compress.models.student import config_for
from compress.nas.config import SIZES, Space, Value
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, resize_config

if TYPE_CHECKING:
    import optuna

Choice = Mapping[str, int | float | str]
"""One student, every size a count: keys as the axes of a space."""

COUPLED = (
    ("layers", "share.attention", "share.ffn", "config.num_hidden_groups"),
    ("hidden", "heads", "embedding", "bottleneck", "config.intra_bottleneck_size", "config.embedding_size"),
)
"""Axes of which one may forbid values of another: widths must divide into heads, groups of layers into layers."""


def architecture_key(choice: Choice) -> str:
    """16 hex digits, the same for the same student in whatever order it is written."""
    canonical = json.dumps(dict(choice), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Block:
    """Axes that are chosen together, and every combination of their values that there is."""

    names: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def suggest(self, trial: "optuna.Trial") -> tuple[Value, ...]:
        """Let the sampler draw a choice; it is always a student that can be. Numbers at even distances are suggested
        as they are, words as words, all else by its place."""
        if len(self.names) == 1:
            values = [row[0] for row in self.rows]
            if steps := _even(values):
                return (trial.suggest_int(self.names[0], steps.start, steps.stop - 1, step=steps.step),)
            if not all(isinstance(value, int | float) for value in values):
                chosen: Value = trial.suggest_categorical(self.names[0], [str(value) for value in values])
                return next(row for row in self.rows if str(row[0]) == chosen)
        return self.rows[trial.suggest_int(f"{'+'.join(self.names)} #", 0, len(self.rows) - 1)]


@dataclass(frozen=True)
class Shapes:
    """A space, held against one teacher.

    dropped   what of the space no student of this teacher can have, in words
    """

    space: Space
    teacher: PreTrainedConfig
    blocks: tuple[Block, ...]
    dropped: tuple[str, ...] = ()

    @staticmethod
    def of(space: Space, teacher: PreTrainedConfig) -> "Shapes":
        """Hold a space against a teacher.

        Raises SearchError, with every problem, for values this teacher cannot have, and for an empty space.
        """
        axes = _count_sizes(space, teacher)
        empty = Shapes(space, teacher, ())
        blocks, dropped = [], []
        for group in _groups(space, axes):
            found, reasons = empty._possible(group)
            if not found:
                raise SearchError(
                    f"{space.name}: the space is empty: no student has {' and '.join(group.names)} as listed: "
                    f"{'; '.join(dict.fromkeys(reasons))}"
                )
            blocks += _independent(group.names, found, tied=group.names in set(space.tied))
            dropped += [
                f"{name} {value}: in no student that {teacher.model_type} allows"
                for at, name in enumerate(group.names)
                for value in dict.fromkeys(row[at] for row in group.rows)
                if value not in {row[at] for row in found}
            ]
        shapes = Shapes(space, teacher, tuple(blocks), tuple(dropped))
        shapes._check_settings()
        return shapes

    def suggest(self, trial: "optuna.Trial") -> Choice:
        """Let the sampler draw a choice; it is always a student that can be."""
        return self._as_counts([block.suggest(trial) for block in self.blocks])

    def key(self, choice: Choice) -> str:
        return architecture_key(choice)

    def size(self) -> int:
        """Count the students."""
        return math.prod(len(block.rows) for block in self.blocks)

    def every(self) -> Iterator[Choice]:
        """Yield all students."""
        for rows in itertools.product(*(block.rows for block in self.blocks)):
            yield self._as_counts(rows)

    def drawn(self, count: int, seed: int) -> list[Choice]:
        """Draw at most `count` different students at random, those of all first and of all last values among them."""
        if self.size() <= count:
            return list(self.every())
        draw = random.Random(seed)
        ends = [self._as_counts([block.rows[at] for block in self.blocks]) for at in (0, -1)]
        found = {architecture_key(choice): choice for choice in ends}
        while len(found) < count:
            choice = self._as_counts([draw.choice(block.rows) for block in self.blocks])
            found[architecture_key(choice)] = choice
        return list(found.values())

    def config(self, choice: Choice) -> PreTrainedConfig:
        """Make the student's transformers config. Raises StudentError or PruneError where there is no such student."""
        if self.space.mode == "supernet":
            return resize_config(self.teacher, self.sizes(choice))
        config = config_for(self.spec(choice), self.teacher)
        inner = getattr(config, "true_hidden_size", None)
        if inner is not None and inner % config.num_attention_heads:
            raise StudentError(f"bottleneck {inner} is not a multiple of {config.num_attention_heads} heads")
        groups, layers = getattr(config, "num_hidden_groups", 1), Shape.from_config(config).layers
        if groups > layers or layers % groups:
            raise StudentError(f"{layers} layers do not divide into {groups} groups")
        return config

    def sizes(self, choice: Choice) -> Sizes:
        """supernet: what of it the student is."""
        return Sizes.from_request(self.teacher, **{name: float(choice[name]) for name in SIZES if name in choice})

    def spec(self, choice: Choice) -> StudentSpec:
        """plain: what to build."""
        sizes = {name: choice[name] for name in SIZES if name in choice}
        settings, shared = (
            {name.removeprefix(prefix): value for name, value in choice.items() if name.startswith(prefix)}
            for prefix in ("config.", "share.")
        )
        student = self.space.student
        tree = student.plain() | sizes
        return StudentSpec.model_validate(
            tree | {"config": student.config | settings, "share": dict(student.share) | shared}
        )

    def _as_counts(self, rows: Sequence[tuple[Value, ...]]) -> Choice:
        """Write every size as the count that it comes to, so that equal students are written alike."""
        asked: dict[str, Value] = {}
        for block, row in zip(self.blocks, rows, strict=True):
            asked |= zip(block.names, row, strict=True)
        return self._settle(asked)

    def _settle(self, asked: Mapping[str, Any]) -> Choice:
        if self.space.mode == "supernet":
            sizes = self.sizes(asked).plain()
            sizes.pop("head_size")
            return {**sizes, **({"precision": asked["precision"]} if "precision" in asked else {})}
        shape = Shape.from_config(self.config(asked))
        sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "ffn")}
        return {**asked, **sizes}

    def _possible(self, group: Block) -> tuple[list[tuple[Value, ...]], list[str]]:
        """Return the rows that make a student, and why the others do not."""
        found, reasons = [], []
        for row in group.rows:
            try:
                self._settle(dict(zip(group.names, row, strict=True)))
            except (PruneError, StudentError) as error:
                reasons.append(str(error))
            else:
                found.append(row)
        return found, reasons

    def _check_settings(self) -> None:
        """Build one student for each value of a `config.` axis: families say only then that they do not know it."""
        problems = []
        for at, block in enumerate(self.blocks):
            if not any(name.startswith(("config.", "share.")) for name in block.names):
                continue
            for row in block.rows:
                rows = [row if other == at else each.rows[0] for other, each in enumerate(self.blocks)]
                if why := self._unbuildable(self._as_counts(rows)):
                    value = ", ".join(f"{name} {value}" for name, value in zip(block.names, row, strict=True))
                    problems.append(f"{self.space.name}: {value}: {why}")
        if problems:
            raise SearchError("\n".join(problems))

    def _unbuildable(self, choice: Choice) -> str | None:
        from compress.models.sharing import share

        try:
            with torch.device("meta"):
                share(heads.create(self.config(choice), "task", "classification"), **self.spec(choice).share)
        except StudentError as error:
            return str(error)
        except (KeyError, ValueError, TypeError) as error:
            return f"transformers refuses it: {' '.join(str(error).split())[:200]}"
        return None


def _count_sizes(space: Space, teacher: PreTrainedConfig) -> dict[str, tuple[Value, ...]]:
    """Turn shares of the teacher into counts. Raises SearchError with every problem."""
    whole, problems = Sizes.from_config(teacher), []
    theirs = whole.plain() | {"embedding": Shape.from_config(teacher).embedding}
    axes: dict[str, tuple[Value, ...]] = {}
    for name, values in space.axes.items():
        if name not in SIZES:
            axes[name] = values
            continue
        has = name in whole.plain() if space.mode == "supernet" else name in theirs
        if not has:
            problems.append(f"{space.name}: axes.{name}: {teacher.model_type} models have no such size")
            continue
        counts = [value if isinstance(value, int) else max(1, round(float(value) * theirs[name])) for value in values]
        if name == "heads" and "hidden" not in space.axes and space.mode == "supernet":
            stream = whole.hidden if whole.bottleneck is None else whole.bottleneck
            counts = [
                _divisor(count, stream, theirs[name]) if isinstance(value, float) else count
                for count, value in zip(counts, values, strict=True)
            ]
        if space.mode == "supernet" and (larger := [count for count in counts if count > theirs[name]]):
            problems.append(
                f"{space.name}: axes.{name}: {larger[-1]} is more than the teacher's {theirs[name]}; a supernet is the "
                "teacher itself, its students are parts of it (mode: plain builds others)"
            )
        axes[name] = tuple(counts) if any(name in names for names in space.tied) else tuple(dict.fromkeys(counts))
    if problems:
        raise SearchError("\n".join(problems))
    return axes


def _divisor(count: int, width: int, most: int) -> int:
    """Find the number of heads nearest to `count` that `width` divides into."""
    return min((n for n in range(1, most + 1) if width % n == 0), key=lambda n: (abs(n - count), -n))


def _groups(space: Space, axes: Mapping[str, tuple[Value, ...]]) -> Iterator[Block]:
    """Group the axes that may constrain each other, with every combination, possible or not."""
    left = dict(axes)
    for names in space.tied:
        yield Block(tuple(names), tuple(dict.fromkeys(zip(*(left.pop(name) for name in names), strict=True))))
    for coupled in COUPLED:
        names = tuple(name for name in coupled if name in left)
        if names:
            yield Block(names, tuple(itertools.product(*(left.pop(name) for name in names))))
    for name, values in left.items():
        yield Block((name,), tuple((value,) for value in values))


def _independent(names: tuple[str, ...], rows: Sequence[tuple[Value, ...]], *, tied: bool) -> list[Block]:
    """Axes of which every combination is possible are chosen one by one."""
    values = [tuple(dict.fromkeys(row[at] for row in rows)) for at in range(len(names))]
    if not tied and len(rows) == math.prod(map(len, values)):
        return [Block((name,), tuple((value,) for value in each)) for name, each in zip(names, values, strict=True)]
    return [Block(names, tuple(rows))]


def _even(values: Sequence[Value]) -> range | None:
    """Return the range that whole numbers are, where they are one."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return None
    whole = [int(value) for value in values]
    step = whole[1] - whole[0] if len(whole) > 1 else 1
    if step > 0 and whole == list(range(whole[0], whole[-1] + 1, step)):
        return range(whole[0], whole[-1] + 1, step)
    return None
