"""Choose the cuts on a path of ever smaller shapes of a model.

Every cut is chosen anew: the units of the model as it is now are rated, it is cut to
shapes of about the same cost, and the shape whose answers are closest to its own before
the cut is next.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from accelerate import PartialState
from transformers import PreTrainedModel

from compress.config.recipe import Recipe
from compress.latency.measure import choose_spread
from compress.latency.model import model_cost
from compress.models.sentence_encoder import SentenceEncoder, project
from compress.models.teacher import Teacher
from compress.pruning import importance
from compress.pruning.budget import (
    WHOLE_SHAPE,
    budget_setting,
    count_parameters,
    largest_shapes,
    last_terms,
    losses,
    open_timer,
    shape_grid,
)
from compress.records.path import Least
from compress.slicing.plan import SlicePlan
from compress.slicing.sizes import Sizes, resize_config
from compress.training.context import TrainingContext

FIRST_CUT = 1.8
CUT = 1.4
"""How many times less the first shape costs than the model, and each other one than the
shape before it."""
CUT_ROWS = 512
"""Rows on which units are rated and shapes compared before each cut."""
SHAPES_COMPARED = 12
"""Shapes of about the same cost that are compared before each cut."""


@dataclass(frozen=True)
class ShapeCosts:
    """The costs of a model's shapes, in the unit of what is to be least.

    where    the device, its setting and the precision of latencies; '' for other costs
    costs    by the names of the shapes; whole: of the model itself
    """

    where: str
    costs: Mapping[str, float]
    whole: float


def _predict_latencies(
    configs: Mapping[str, Any], recipe: Recipe, context: TrainingContext
) -> tuple[str, dict[str, float]]:
    with open_timer(recipe, context) as timer:
        found = timer.predict(configs)
        return timer.about, {name: each.ms for name, each in found.items()}


def _estimate_sizes(
    configs: Mapping[str, Any], recipe: Recipe, context: TrainingContext
) -> tuple[str, dict[str, float]]:
    cost = partial(
        model_cost,
        precision=recipe.target.precision,
        kind=context.kind,
    )
    return "", {name: cost(config).file_mb for name, config in configs.items()}


def _count_all(
    configs: Mapping[str, Any], recipe: Recipe, context: TrainingContext
) -> tuple[str, dict[str, float]]:
    cost = partial(
        model_cost,
        precision=recipe.target.precision,
        kind=context.kind,
    )
    return "", {name: cost(config).parameters for name, config in configs.items()}


_COSTS: Final[Mapping[Least, Callable[..., tuple[str, dict[str, float]]]]] = {
    "latency": _predict_latencies,
    "mb": _estimate_sizes,
    "params": _count_all,
}


def compute_costs(
    model: PreTrainedModel, recipe: Recipe, context: TrainingContext
) -> ShapeCosts:
    """Compute what the recipe wants least, for the shapes of the model's grid."""
    grid = shape_grid(model.config, SlicePlan.from_model(model))
    configs = {name: resize_config(model.config, sizes) for name, sizes in grid.items()}
    configs[WHOLE_SHAPE] = model.config
    where, costs = _COSTS[recipe.target.least](
        configs,
        recipe,
        context,
    )
    whole = costs.pop(WHOLE_SHAPE)
    return ShapeCosts(where, costs, whole)


@dataclass(frozen=True)
class ChosenCut:
    """A shape that a model can be cut to."""

    sizes: Sizes
    parameters: int
    cost: float
    file_mb: float


@dataclass(frozen=True)
class Cutter:
    """Chooses cuts. teacher: of which the shapes are."""

    recipe: Recipe
    teacher: Teacher
    context: TrainingContext
    costs: ShapeCosts
    seed: int

    def next(self, model: PreTrainedModel, limit: float) -> ChosenCut | None:
        """Choose the shape within the model whose cost fills the limit, and whose
        answers are closest to the model's; None if every shape costs more.

        Every process takes part, and gets the same shape.
        """
        if isinstance(model, SentenceEncoder):
            # vectors keep their width however narrow the shape is
            model = copy.deepcopy(model)
            project(model)
        model.to(PartialState().device)
        plan = SlicePlan.from_model(model)
        grid = shape_grid(
            self.teacher.model.config, SlicePlan.from_model(self.teacher.model)
        )
        fits = {
            name: sizes
            for name, sizes in grid.items()
            if self.costs.costs[name] <= limit and sizes.within(plan.sizes)
        }
        if not fits:
            return None
        names = list(largest_shapes(fits))
        if len(names) > SHAPES_COMPARED:
            configs = {name: resize_config(model.config, fits[name]) for name in names}
            names = choose_spread(
                configs,
                SHAPES_COMPARED,
                budget_setting(self.recipe),
            )
        found = self._compare(
            model,
            plan,
            {name: fits[name] for name in names},
        )
        best = min(names, key=lambda name: (found[name], name))
        sizes = fits[best]
        config = resize_config(model.config, sizes)
        precision = self.recipe.target.precision
        size = model_cost(
            config,
            precision,
            kind=self.context.kind,
        ).file_mb
        parameters = count_parameters(model, plan, sizes)
        return ChosenCut(
            sizes,
            parameters,
            self.costs.costs[best],
            size,
        )

    def _compare(
        self, model: PreTrainedModel, plan: SlicePlan, shapes: Mapping[str, Sizes]
    ) -> dict[str, float]:
        """Compute the loss of the model cut to each shape against itself."""
        stage = self.recipe.pruning[-1]
        rows = self.context.sample(
            stage.data,
            stage.length,
            CUT_ROWS,
            self.seed,
        )
        rated = importance.compute_importance(
            stage.importance,
            model,
            plan,
            rows,
            self.context.collate,
            batch=stage.batch,
            teacher=self.teacher,
            bf16=self.context.bf16,
            console=self.context.console,
        )
        return losses(
            model,
            shapes,
            rated,
            rows,
            self.context.collate,
            layers=stage.rule,
            terms=last_terms(self.recipe, self.context.kind),
            kind=self.context.kind,
        )
