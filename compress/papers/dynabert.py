"""Hou et al. 2020, "DynaBERT: Dynamic BERT with Adaptive Width and Depth", arXiv:2004.04037.

Sec. 2.1  Sandwich    step: the whole student and subnets of it learn from one teacher at once
Sec. 2.2              the same with fewer layers too
Sec. 2.1  first       importance that rates what comes first highest: cuts the prefix of a student that was rewired

and the ways of choosing the subnets of a step:
Yu & Huang 2019, "Universally Slimmable Networks and Improved Training Techniques", arXiv:1903.05134: the sandwich rule,
the largest, the smallest and `random` others.
Yin et al. 2021, "AutoTinyBERT: Automatic Hyper-parameter Optimization for Efficient Pre-trained Language Models",
arXiv:2107.13686: one at random (`largest: false, smallest: false, random: 1`), another in every process.
Cai et al. 2020, "Once-for-All: Train One Network and Specialize it for Efficient Deployment", arXiv:1908.09791: of many
shapes; here of those `among` which a search looks, such as the ones within its latency budget.

The student is to be `ordered` before (a `prune` stage with `way: 0`), so that the subnets, its prefixes, are good.

Shapes: B batch, L tokens, D hidden.

Deviations:
- from the paper and the authors' code: a width is the heads' and neurons' share, as there, and the residual stream's
  too, because transformers' BERT has no attention narrower than that. A term on hidden states therefore learns a map
  to the teacher's width (`project: true`), of which a narrower subnet uses the first columns.
- from the authors' code: theirs runs every width and depth at each step, 4 or 12 subnets; here they are drawn.
- from the paper: both stages learn from the fine-tuned teacher; the paper's second one from the width-adaptive student,
  each depth from the teacher of its own width (the authors' code has the full width teach all).
- from the paper: fewer layers are spread evenly, the first and the last among them; `depth: uniform` is its own rule.
- from the authors' code: the teacher is in eval mode; hidden states and embeddings of real tokens count.
- from the authors' code, in recipe `prune-dynabert`: the rows are the task's own; theirs are joined, for width and
  depth, by TinyBERT's variants of them. The last weights are kept; theirs those of the best sum of all
  subnets' scores. The student that is cut out recovers alone and from the teacher; theirs all together, and on labels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ObjectiveError, PruneError, did_you_mean
from compress.models.signals import Signals
from compress.nas.supernet import Lookup, Supernet
from compress.slicing.plan import SlicePlan
from compress.slicing.select import Importance
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, inner_weights, resize_config
from compress.training.objective import Objective, pairs_of_subnet
from compress.training.step import Distillation, WrappedStep
from compress.training.teacher_cache import TeacherCache

AXES = ("layers", "hidden", "heads", "ffn", "embedding", "bottleneck")


def first(student: PreTrainedModel, batches: Iterable[Any], plan: SlicePlan) -> Importance:
    """Rate the first unit of each group highest: what is then cut is what the subnets of `Sandwich` are without."""
    return {group: torch.arange(count, 0, -1).float() for group, count in plan.groups.items() if group.axis != "layers"}


class Sandwich(WrappedStep):
    """step(**batch) -> the sum of `objective` over the largest, the smallest and `random` other subnets of the student.

    widths      shares of hidden (of MobileBERT the bottleneck), heads and neurons together; or each alone:
    hidden, heads, ffn, embedding, bottleneck    counts, or shares below 1, of the student's own
    layers      likewise; which layers these are is `depth`'s rule: even, or uniform, the paper's own
    among       instead of these, the subnets one by one: [{layers: 2, heads: 3, hidden: 96, ffn: 384}, ...]
    largest, smallest    whether the whole student, and its smallest subnet, learn in every step
    power       the loss of a subnet counts (its weights / the whole's, without embeddings) ** power

    Beside what is given each size may stay the student's own (heads, where hidden alone is given, keep their size);
    combinations that no model has are left out. Which subnets a step draws depends on torch's seed when it is made, the
    step's number and the process: `begin` tells it the number. Each layer is compared with
    what it is compared with in the whole student. shown: the teacher's outputs, if kept.
    Raises PruneError for sizes that cannot be, ObjectiveError for terms that cannot compare some subnet with the
    teacher, and without a teacher's objective.
    """

    only_rows = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        words: object = None,
        shown: TeacherCache | None = None,
        widths: Sequence[float] = (),
        layers: Sequence[float] = (),
        hidden: Sequence[float] = (),
        heads: Sequence[float] = (),
        ffn: Sequence[float] = (),
        embedding: Sequence[float] = (),
        bottleneck: Sequence[float] = (),
        among: Sequence[Mapping[str, float]] = (),
        depth: str = "even",
        random: int = 2,
        largest: bool = True,
        smallest: bool = True,
        power: float = 0.0,
    ) -> None:
        super().__init__()
        if objective is None:
            raise ObjectiveError("dynabert.Sandwich minimises an objective on each subnet: give the stage one")
        self.distillation = Distillation(student, shown or teacher, objective)
        self.supernet = Supernet(student, depth=depth)
        axes = dict(zip(AXES, (layers, hidden, heads, ffn, embedding, bottleneck), strict=True))
        asked = list(among) or list(_combine(self.supernet.plan, axes, widths))
        if among and (widths or any(axes.values())):
            raise PruneError("dynabert.Sandwich: `among` names the subnets; leave out the sizes beside it")
        shapes = _shapes(student.config, asked, strict=bool(among))
        self.whole = Sizes.from_config(student.config)
        self.always = {"largest": self.whole} if largest else {}
        if smallest:
            self.always["smallest"] = min(shapes, key=inner_weights)
        self.drawn = [shape for shape in shapes if shape not in self.always.values()]
        self.random, self.power, self.seed, self.step = random, power, torch.initial_seed(), 0
        if not self.always and not (random and self.drawn):
            raise PruneError("dynabert.Sandwich: no subnet would be trained: give sizes, and `random`, or `largest`")
        _check_all_fit(objective, student, teacher, [*self.always.values(), *self.drawn])

    @property
    def objective(self) -> Objective:
        return self.distillation.objective

    def begin(self, step: int, total: int) -> None:
        """Draw what comes next for this optimiser step, for all parts of its batch alike."""
        self.step = step

    def subnets(self) -> list[tuple[str, Sizes]]:
        """Return what this step trains in this process: its part in the log, and its sizes."""
        rank, world = PartialState().process_index, PartialState().num_processes
        draw = np.random.default_rng([self.seed, self.step * world + rank])
        chosen = draw.permutation(len(self.drawn))[: self.random]
        return [*self.always.items(), *(("random", self.drawn[int(n)]) for n in chosen)]

    def forward(self, **batch: Any) -> dict[str, Tensor]:
        items = batch.pop("items", None)
        teacher, lookup = self.distillation.read_teacher(batch), self.supernet.lookup(batch)
        losses: list[Tensor] = []
        logged: dict[str, Tensor] = {}
        subnets = self.subnets()
        for name, sizes in subnets:
            parts = self._parts(sizes, batch, teacher, items, lookup)
            losses.append(self._weight(sizes) * parts.pop("total"))
            alike = sum(each == name for each, _ in subnets)
            for term, part in parts.items():
                mean = part.detach() / alike
                logged[f"{name}.{term}"] = logged.get(f"{name}.{term}", 0.0) + mean
        return {"loss": torch.stack(losses).sum(), **logged}

    def _parts(
        self, sizes: Sizes, batch: Mapping[str, Tensor], teacher: Signals | None, items: Any, lookup: Lookup
    ) -> dict[str, Tensor]:
        layers = self.supernet.layers(sizes)
        at_BL = self.distillation.find_labelled(self.student, batch)
        student = self.supernet.signals(batch, self.objective.student_wants, sizes, lookup=lookup, at_BL=at_BL)
        pairs = [pairs_of_subnet(each, layers) for each in self.objective.pairs]
        return self.objective(student, teacher, batch, items, pairs)

    def _weight(self, sizes: Sizes) -> float:
        return math.pow(inner_weights(sizes) / inner_weights(self.whole), self.power)


def _combine(
    plan: SlicePlan, axes: Mapping[str, Sequence[float]], widths: Sequence[float]
) -> Iterable[Mapping[str, float]]:
    """Combine what is given and the student's own sizes in every way, as `Sizes.from_request` takes them."""
    together = ("hidden" if plan.sizes.bottleneck is None else "bottleneck", "heads", "ffn")
    if widths and any(axes[axis] for axis in together):
        raise PruneError(f"dynabert.Sandwich: `widths` is {', '.join(together)} together; leave them out beside it")
    if wrong := [width for width in widths if not 0 < width <= 1]:
        raise PruneError(
            f"dynabert.Sandwich: widths: {wrong[0]:g}; expected shares of the student's own, above 0 up to 1"
        )
    alone = [[{}, *({axis: size} for size in sizes)] for axis, sizes in axes.items()]
    wide: list[Mapping[str, float]] = [{}, *(dict.fromkeys(together, width) for width in widths if width < 1)]
    for parts in product(wide, *alone):
        yield {axis: size for part in parts for axis, size in part.items()}


def _shapes(config: Any, asked: Iterable[Mapping[str, float]], *, strict: bool) -> list[Sizes]:
    """List the sizes that can be, each once. Raises PruneError where none of a size's combinations can, or one if
    strict."""
    found: dict[Sizes, None] = {}
    problems: dict[tuple[str, float], PruneError] = {}
    used: set[tuple[str, float]] = set()
    for each in asked:
        unknown = [axis for axis in each if axis not in AXES]
        if unknown:
            raise PruneError(f"dynabert.Sandwich: among: no size {unknown[0]!r}.{did_you_mean(unknown[0], AXES)}")
        try:
            found[Sizes.from_request(config, **each)] = None
            used.update(each.items())
        except PruneError as error:
            if strict:
                raise
            problems |= dict.fromkeys(each.items(), error)
    for size, problem in problems.items():
        if size not in used:
            raise problem
    return list(found)


def _check_all_fit(
    objective: Objective, student: PreTrainedModel, teacher: nn.Module | None, shapes: Iterable[Sizes]
) -> None:
    """Check that whatever a term compares is alike in all of them."""
    if teacher is None:
        return
    theirs = Shape.from_config(teacher.config)
    for sizes in {replace(sizes, layers=1, ffn=1): sizes for sizes in shapes}.values():  # which nothing compares
        objective.check_shapes(Shape.from_config(resize_config(student.config, sizes)), theirs)
