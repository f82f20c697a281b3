"""Hou et al. 2020, "DynaBERT: Dynamic BERT with Adaptive Width and Depth",
arXiv:2004.04037.

Sec. 2.1  Sandwich    step: the whole student and some of its subnets learn from one
                      teacher at once
Sec. 2.2              the same with fewer layers too
Sec. 2.1  first       importance that ranks units by their order, which keeps the prefix
                      of a rewired student

and the ways of choosing the subnets of a step: Yu & Huang 2019, "Universally Slimmable
Networks and Improved Training Techniques", arXiv:1903.05134: the sandwich rule, the
largest, the smallest and `random` others. Yin et al. 2021, "AutoTinyBERT: Automatic
Hyper-parameter Optimization for Efficient Pre-trained Language Models",
arXiv:2107.13686: one at random (`largest: false, smallest: false, random: 1`), another
in every process. Cai et al. 2020, "Once-for-All: Train One Network and Specialize it
for Efficient Deployment", arXiv:1908.09791: of many shapes; here `among` lists the
shapes that a search chooses from, such as those within its latency budget.

The student should be `ordered` first (a `prune` stage with `way: 0`), so that its
prefixes, the subnets, are good.

Shapes: B batch, L tokens, D hidden.

Deviations:
- from the paper and the authors' code: a width applies to heads and neurons, as there,
  and to the residual stream too, because transformers' BERT cannot have narrower
  attention. A term on hidden states therefore learns a map to the teacher's width
  (`project: true`), of which a narrower subnet uses the first columns.
- from the authors' code: theirs runs every width and depth at each step, 4 or 12
  subnets; here they are drawn.
- from the paper: both stages learn from the fine-tuned teacher; the paper's second one
  from the width-adaptive student, each depth from the teacher of its own width (the
  authors' code has the full width teach all).
- from the paper: fewer layers are spread evenly, the first and the last among them;
  `depth: uniform` is its own rule.
- from the authors' code: the teacher is in eval mode; hidden states and embeddings of
  real tokens count.
- from the authors' code, in recipe `prune-dynabert`: words are replaced by near
  vectors, not by a language model, and not in all rows of large data. The student that
  is cut out recovers alone and from the teacher; theirs all together, and on labels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.config.reference import OptionGroup
from compress.config.stages import SIZES
from compress.errors import ObjectiveError, PruneError, did_you_mean
from compress.models.signals import Signals
from compress.nas.supernet import Lookup, Supernet, score_subnets
from compress.slicing.plan import SlicePlan
from compress.slicing.select import Importance
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, inner_weights, resize_config
from compress.tensors import TensorDict, Tensors
from compress.training.objective import Objective, pairs_of_subnet
from compress.training.step import Distillation, Score, WrappedStep
from compress.training.teacher_cache import TeacherCache


def first(
    student: PreTrainedModel,
    batches: Iterable[Any],
    plan: SlicePlan,
) -> Importance:
    """Rank the units of each group by their order, so that cutting keeps the units of
    `Sandwich`'s subnets."""
    return {
        group: torch.arange(count, 0, -1).float()
        for group, count in plan.groups.items()
        if group.axis != "layers"
    }


@dataclass(frozen=True, kw_only=True)
class SubnetOptions(OptionGroup):
    """List the sizes of the subnets.

    widths      shares of hidden (of MobileBERT the bottleneck), heads and neurons
                together; or each separately:
    hidden, heads, ffn, embedding, bottleneck    counts, or shares below 1, of the
                                                 student's own
    layers      counts, or shares below 1; `depth` selects them: even, or uniform (the
                paper's rule)
    among       instead of these, a list of subnets: [{layers: 2, heads: 3, hidden: 96,
                ffn: 384}, ...]
    """

    widths: Sequence[float] = ()
    layers: Sequence[float] = ()
    hidden: Sequence[float] = ()
    heads: Sequence[float] = ()
    ffn: Sequence[float] = ()
    embedding: Sequence[float] = ()
    bottleneck: Sequence[float] = ()
    among: Sequence[Mapping[str, float]] = ()
    depth: str = "even"

    def combine(self, plan: SlicePlan) -> list[Mapping[str, float]]:
        """List `among`, or all combinations of the sizes and the student's own, as
        arguments of `Sizes.from_request`. Raises PruneError for sizes that exclude
        each other."""
        axes: dict[str, Sequence[float]] = {axis: getattr(self, axis) for axis in SIZES}
        if self.among:
            if self.widths or any(axes.values()):
                raise PruneError(
                    "dynabert.Sandwich: `among` lists the subnets; remove the other "
                    "sizes"
                )
            return list(self.among)
        width = "hidden" if plan.sizes.bottleneck is None else "bottleneck"
        together = (width, "heads", "ffn")
        if self.widths and any(axes[axis] for axis in together):
            raise PruneError(
                f"dynabert.Sandwich: `widths` is {', '.join(together)} together; "
                "remove those"
            )
        if wrong := [width for width in self.widths if not 0 < width <= 1]:
            raise PruneError(
                f"dynabert.Sandwich: widths: {wrong[0]:g}; expected shares of the "
                "student's own, above 0 up to 1"
            )
        shares = (width for width in self.widths if width < 1)
        wide: list[Mapping[str, float]] = [
            {},
            *(dict.fromkeys(together, share) for share in shares),
        ]
        alone = [
            [{}, *({axis: size} for size in sizes)] for axis, sizes in axes.items()
        ]
        return [
            {axis: size for part in parts for axis, size in part.items()}
            for parts in product(wide, *alone)
        ]


class Sandwich(WrappedStep):
    """step(**batch) -> the sum of `objective` over the largest, the smallest and
    `random` other subnets of the student.

    largest, smallest    whether the whole student, and its smallest subnet, learn in
                         every step
    power       the loss of a subnet is multiplied by (its weights / the whole's,
                without embeddings) ** power
    shown       the teacher's cached outputs, if any

    Sizes are combined with each other and with the student's own (heads keep their size
    if only hidden is given); combinations that no model can have are left out. The
    subnets of a step depend on torch's seed at construction, the number of the step,
    which `begin` sets, and the process. Each layer is compared with the same teacher
    layers as in the whole student. Raises PruneError for impossible sizes, and
    ObjectiveError without an objective or for terms that cannot compare some subnet
    with the teacher.
    """

    only_rows = True

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: nn.Module | None,
        objective: Objective | None,
        *,
        shown: TeacherCache | None = None,
        sizes: SubnetOptions,
        random: int = 2,
        largest: bool = True,
        smallest: bool = True,
        power: float = 0.0,
    ) -> None:
        super().__init__()
        if objective is None:
            raise ObjectiveError(
                "dynabert.Sandwich minimises an objective on each subnet: give the "
                "stage one"
            )
        self.distillation = Distillation(student, shown or teacher, objective)
        self.supernet = Supernet(student, depth=sizes.depth)
        shapes = _resolve_sizes(
            student.config,
            sizes.combine(self.supernet.plan),
            strict=bool(sizes.among),
        )
        self.whole = Sizes.from_config(student.config)
        self.always = {"largest": self.whole} if largest else {}
        if smallest:
            self.always["smallest"] = min(shapes, key=inner_weights)
        self.drawn = [shape for shape in shapes if shape not in self.always.values()]
        self.random = random
        self.power = power
        self.seed = torch.initial_seed()
        self.step = 0
        if not self.always and not (random and self.drawn):
            raise PruneError(
                "dynabert.Sandwich: no subnet would be trained: set sizes, and "
                "`random` or `largest`"
            )
        if teacher is not None:
            shape = Shape.from_config(teacher.config)
            # no term compares the number of layers, nor neurons
            compared = {
                replace(each, layers=1, ffn=1): each
                for each in (*self.always.values(), *self.drawn)
            }
            for each in compared.values():
                objective.check_shapes(
                    Shape.from_config(resize_config(student.config, each)), shape
                )

    @property
    def objective(self) -> Objective:
        return self.distillation.objective

    def begin(self, step: int, total: int) -> None:
        """Set the number of the optimiser step, which determines the subnets for all
        parts of its batch."""
        self.step = step

    def wrap_score(self, score: Score) -> Score:
        """Return the mean score of all subnets, which decides which weights are
        kept."""
        return score_subnets(
            score, [*self.always.values(), *self.drawn], depth=self.supernet.depth
        )

    def subnets(self) -> list[tuple[str, Sizes]]:
        """Return (name in the log, sizes) of the subnets that this step trains in this
        process."""
        rank = PartialState().process_index
        world = PartialState().num_processes
        draw = np.random.default_rng([self.seed, self.step * world + rank])
        chosen = draw.permutation(len(self.drawn))[: self.random]
        return [*self.always.items(), *(("random", self.drawn[int(n)]) for n in chosen)]

    def forward(self, **batch: Any) -> TensorDict:
        items = batch.pop("items", None)
        teacher = self.distillation.read_teacher(batch)
        lookup = self.supernet.lookup(batch)
        losses = list[Tensor]()
        logged: TensorDict = {}
        subnets = self.subnets()
        for name, sizes in subnets:
            parts = self._parts(sizes, batch, teacher, items, lookup)
            losses.append(self._weight(sizes) * parts.pop("total"))
            count = sum(other == name for other, _ in subnets)
            for term, part in parts.items():
                mean = part.detach() / count
                logged[f"{name}.{term}"] = logged.get(f"{name}.{term}", 0.0) + mean
        return {"loss": torch.stack(losses).sum(), **logged}

    def _parts(
        self,
        sizes: Sizes,
        batch: Tensors,
        teacher: Signals | None,
        items: Any,
        lookup: Lookup,
    ) -> TensorDict:
        layers = self.supernet.layers(sizes)
        at_BL = self.distillation.find_labelled(self.student, batch)
        student = self.supernet.signals(
            batch, self.objective.student_wants, sizes, lookup=lookup, at_BL=at_BL
        )
        pairs = [pairs_of_subnet(each, layers) for each in self.objective.pairs]
        return self.objective(student, teacher, batch, items, pairs)

    def _weight(self, sizes: Sizes) -> float:
        return math.pow(inner_weights(sizes) / inner_weights(self.whole), self.power)


def _resolve_sizes(
    config: Any,
    requests: Iterable[Mapping[str, float]],
    *,
    strict: bool,
) -> list[Sizes]:
    """List the possible sizes without repetition.

    Raises PruneError if all combinations of a requested size are impossible, or if
    `strict` for the first impossible one.
    """
    possible = dict[Sizes, None]()
    problems = dict[tuple[str, float], PruneError]()
    used = set[tuple[str, float]]()
    for request in requests:
        for axis in request:
            if axis not in SIZES:
                raise PruneError(
                    "dynabert.Sandwich: among: no size "
                    f"{axis!r}.{did_you_mean(axis, SIZES)}"
                )
        try:
            possible[Sizes.from_request(config, **request)] = None
            used.update(request.items())
        except PruneError as error:
            if strict:
                raise
            problems |= dict.fromkeys(request.items(), error)
    for size, problem in problems.items():
        if size not in used:
            raise problem
    return list(possible)
