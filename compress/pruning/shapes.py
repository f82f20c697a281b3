"""Compare the shapes that a model may be cut to, before any training: how close the
answers of the model cut to each are to its own.

One grid and one comparison for `pruning.budget`, which cuts once to the best shape of
all, and `pruning.path`, which cuts a little, again and again.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedModel

from compress.arrays import whole_numbers
from compress.config.recipe import Recipe
from compress.config.stages import Prune
from compress.config.term import Term
from compress.data.collate import Batching
from compress.errors import PruneError
from compress.kinds import Kind
from compress.latency.measure import choose_spread
from compress.models.sentence_encoder import SentenceEncoder, project
from compress.models.signals import read
from compress.models.teacher import Teacher
from compress.pruning.stage import rate_units, sample_rows
from compress.records.latency import Setting
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan, parameters_of
from compress.slicing.select import Importance, choose, counts
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes, resize_config
from compress.training.context import TrainingContext
from compress.training.objective import Objective, find_loss

COMPARED_BATCH = 32
"""Rows of a forward pass where answers are compared."""

GRID_STEPS = 8
"""Shares of widths, heads and neurons in the grid: eighths of the model's own."""


def shape_grid(config: Any, plan: SlicePlan) -> dict[str, Sizes]:
    """List a grid of shapes by name: every depth, and eighths of every width, with
    heads of the model's size.

    Where attention must be as wide as its stream, the stream shrinks with the heads.
    """
    whole = plan.sizes
    together = "hidden" if whole.bottleneck is None else "bottleneck"
    depths = [whole.layers]
    step = max(1, whole.layers // 12)
    # else layers in groups share weights
    if plan.own_layers or len(plan.blocks("ffn")) == 1:
        depths = [*range(step, whole.layers, step), whole.layers]
    axes: dict[str, Sequence[int]] = {
        "layers": depths,
        "ffn": _shares(whole.ffn),
        "heads": _shares(whole.heads),
    }
    if plan.family.own_width:
        axes["hidden"] = _shares(whole.hidden)
    grid = {}
    for values in product(*axes.values()):
        request: dict[str, int] = dict(zip(axes, values, strict=True))
        if not plan.family.own_width:
            request[together] = request["heads"] * whole.head_size
        with suppress(PruneError):  # some combinations are no shape of this family
            sizes = Sizes.from_request(config, **request)
            grid[str(sizes)] = sizes
    return grid


def largest_shapes(shapes: Mapping[str, Sizes]) -> Iterator[str]:
    """Yield the shapes that no other shape contains: these use up a budget."""
    for name, sizes in shapes.items():
        if not any(other != sizes and sizes.within(other) for other in shapes.values()):
            yield name


def _shares(whole: int) -> list[int]:
    return sorted(
        {max(1, round(whole * step / GRID_STEPS)) for step in range(1, GRID_STEPS + 1)}
    )


def last_terms(recipe: Recipe, kind: Kind | None) -> list[Term]:
    """Return the logit terms of the recipe's last objective that has some."""
    for stage in reversed(recipe.training):
        terms = [
            term
            for term in stage.objective
            if term.serves(kind) and find_loss(term).reading.signal == "logits"
        ]
        if terms:
            return terms
    raise PruneError(
        f"{recipe.name}: a budget compares shapes by an objective on logits, and there "
        "is none; give sizes"
    )


@torch.inference_mode()
def losses(
    model: PreTrainedModel,
    shapes: Mapping[str, Sizes],
    rated: Importance,
    rows: Dataset,
    collate: Batching,
    *,
    layers: str | None,
    terms: Sequence[Term],
    kind: Kind | None,
) -> dict[str, float]:
    """Compute the mean loss of `model` cut to each shape on `rows`, with the uncut
    model as the teacher.

    layers: the rule that selects layers; None: the most important.
    """
    plan = SlicePlan.from_model(model)
    shape = Shape.from_config(model.config)
    objective = Objective(terms, shape, shape, kind=kind)
    # batch rows of similar length
    order = np.argsort(whole_numbers(rows, "length"), kind="stable")
    parts = [
        collate([rows[int(i)] for i in order[at : at + COMPARED_BATCH]])
        for at in range(0, len(order), COMPARED_BATCH)
    ]
    batches = [
        {name: tensor.to(model.device) for name, tensor in part.items()}
        for part in parts
    ]
    answers = [read(model, batch, frozenset({"logits"})) for batch in batches]
    means = {}
    for name, sizes in shapes.items():
        small = slice_model(model, choose(plan, rated, sizes, layers=layers)).eval()
        total = 0.0
        for batch, teacher in zip(batches, answers, strict=True):
            loss = objective(
                read(small, batch, objective.student_wants), teacher, batch
            )["total"]
            total += len(batch["input_ids"]) * float(loss)
        means[name] = total / len(rows)
    return means


def count_parameters(model: PreTrainedModel, plan: SlicePlan, sizes: Sizes) -> int:
    """Count the parameters of this model cut to `sizes`, without cutting it."""
    left: dict[Any, int] = {
        **counts(plan, sizes),
        **dict.fromkeys(plan.heads, sizes.attention),
    }
    left |= dict.fromkeys(plan.heads.values(), sizes.heads)
    # tied ones once
    weights = {
        id(tensor): (name, tensor) for name, tensor in parameters_of(model).items()
    }
    total = 0.0
    for name, tensor in weights.values():
        dims = list(tensor.shape)
        for part in plan.cuts[name].slices:
            width = dims[part.dim] // sum(plan.groups[group] for group in part.groups)
            dims[part.dim] = width * sum(
                left.get(group, plan.groups[group]) for group in part.groups
            )
        # a first layer that differs from the rest is kept
        layer = plan.cuts[name].layer
        first = int(plan.family.own_first_layer)
        stays = layer is None or layer < first
        share = 1 if stays else (sizes.layers - first) / (plan.sizes.layers - first)
        total += math.prod(dims) * share
    return round(total)


@dataclass(frozen=True)
class CutModel:
    """A model that will be cut, with its units rated on the rows of a stage that cuts.

    terms  of the objective that compares answers
    """

    model: PreTrainedModel
    plan: SlicePlan
    stage: Prune
    rows: Dataset
    rated: Importance
    terms: Sequence[Term]
    context: TrainingContext

    @staticmethod
    def open(
        model: PreTrainedModel,
        stage: Prune,
        recipe: Recipe,
        *,
        teacher: Teacher,
        context: TrainingContext,
        seed: int,
    ) -> "CutModel":
        """Rate the units of a model; every process takes part. seed: of the run."""
        if isinstance(model, SentenceEncoder):
            # vectors keep their width, however narrow the shape is
            model = copy.deepcopy(model)
            project(model)
        model.to(PartialState().device)
        plan = SlicePlan.from_model(model)
        rows = sample_rows(stage, context, seed)
        rated = rate_units(stage, model, plan, rows, teacher=teacher, context=context)
        terms = last_terms(recipe, context.kind)
        return CutModel(model, plan, stage, rows, rated, terms, context)

    def config(self, sizes: Sizes) -> Any:
        """Return the config of the model cut to these sizes."""
        return resize_config(self.model.config, sizes)

    def count_parameters(self, sizes: Sizes) -> int:
        """Count the parameters of the model cut to these sizes."""
        return count_parameters(self.model, self.plan, sizes)

    def compare(
        self,
        shapes: Mapping[str, Sizes],
        setting: Setting,
        most: int,
    ) -> dict[str, float]:
        """Compute the losses of the shapes that no other one contains, the closest
        answers first. If there are more than `most`, of some that are far apart at the
        setting."""
        configs = {name: self.config(shapes[name]) for name in largest_shapes(shapes)}
        names = list(configs)
        if len(names) > most:
            names = choose_spread(configs, most, setting)
        console = self.context.console
        console.print(f"cutting to {len(names)} shapes, to compare their answers")
        found = losses(
            self.model,
            {name: shapes[name] for name in names},
            self.rated,
            self.rows,
            self.context.collate,
            layers=self.stage.rule,
            terms=self.terms,
            kind=self.context.kind,
        )
        return dict(sorted(found.items(), key=lambda each: (each[1], each[0])))
