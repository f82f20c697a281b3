"""How a budget becomes a shape: predict a grid, cut what fills the budget, ask each, measure the best."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from accelerate import PartialState
from datasets import Dataset

from compress import importance
from compress.bench.device import open_device
from compress.errors import PruneError
from compress.export.onnx import makes_segments
from compress.pruning import grid
from compress.pruning.clock import Clock
from compress.pruning.decision import WHOLE, Candidate, Decision, setting_of, to_the_user
from compress.pruning.shortlist import last_words, losses, parameters
from compress.pruning.stage import calibration
from compress.recipe import Recipe
from compress.run import Run
from compress.screen import print_note
from compress.search.latency import Estimate, choose_spread
from compress.slicing import Importance, Sizes, SlicePlan, resized
from compress.stages import Material
from compress.teachers import Teacher

SHORTLISTED = 24
"""Shapes that are cut and asked."""
FINALISTS = 4
"""Shapes whose files are measured before the training."""


def decide(recipe: Recipe, tutor: Teacher, material: Material, run: Run) -> Decision | None:
    """The shape that keeps the recipe's budget and answers most as `tutor` does; on the first process only.

    Raises PruneError for a budget that nothing keeps, or that the model itself keeps.
    """
    stage, target = recipe.pruning[0], recipe.target
    model = tutor.model.to(PartialState().device)
    rows = calibration(stage, material, run.seed)
    rated = importance.of(
        stage.importance, model, SlicePlan.of(model), rows, material.collate,
        batch=stage.batch, teacher=tutor, bf16=material.bf16, console=material.console,
    )  # fmt: skip
    if not run.main:
        return None
    with ExitStack() as opened:
        clock = None
        if target.max_latency_ms is not None or target.speedup is not None:
            say = partial(material.console.print, highlight=False, markup=False, soft_wrap=True)
            device = opened.enter_context(open_device(target.device, say=to_the_user(target.device, material.console)))
            segments = makes_segments(material.tokenizer)
            clock = Clock(device, setting_of(recipe), target.precision, material.kind, segments, say)
        return _Choice(recipe, tutor, material, rated, rows, clock).decide()


@dataclass(frozen=True)
class _Choice:
    """`clock` is None where the budget says nothing of time."""

    recipe: Recipe
    tutor: Teacher
    material: Material
    rated: Importance
    rows: Dataset
    clock: Clock | None

    def decide(self) -> Decision:
        if self.clock is None:
            if self.plan.sizes in self.shapes.values():
                raise PruneError(f"max_params: {self.tutor.name} itself has no more: there is nothing to prune")
            ranked = self._ranked(self._largest(self.shapes))
            return self._decision(ranked, ranked[0])
        limit, whole_ms = self._limit(self.clock)
        found = self._raced(self.clock, limit)
        if not _keeping(found, limit):
            over = min(each.ms / limit for each in found if each.ms is not None)
            if any(each.ms <= limit / over for each in self.estimates.values()):
                self.material.console.print(f"the files take {over - 1:.0%} more than predicted: now smaller shapes")
                found = _both(found, self._raced(self.clock, limit / over))
        measured = [each for each in found if each.ms is not None]
        keeping = _keeping(found, limit)
        chosen = keeping[0] if keeping else min(measured, key=lambda each: each.ms or 0.0)
        if not keeping:
            print_note(
                self.material.console,
                f"no measured shape takes {limit:.3g} ms; the fastest, {chosen.name}, is taken, which takes "
                f"{chosen.ms:.3g} ms",
            )
        return replace(self._decision(found, chosen), limit_ms=limit, whole_ms=whole_ms)

    @cached_property
    def plan(self) -> SlicePlan:
        return SlicePlan.of(self.tutor.model)

    @cached_property
    def counted(self) -> dict[str, int]:
        """Parameters of every shape of the grid."""
        found = grid.smaller(self.tutor.model.config, self.plan)
        return {name: parameters(self.tutor.model, self.plan, sizes) for name, sizes in found.items()}

    @cached_property
    def shapes(self) -> dict[str, Sizes]:
        """Those of the grid that have few enough parameters."""
        found, limit = grid.smaller(self.tutor.model.config, self.plan), self.recipe.target.max_params
        within = {name: sizes for name, sizes in found.items() if limit is None or self.counted[name] <= limit}
        if not within:
            least = min(self.counted, key=lambda name: self.counted[name])
            raise PruneError(
                f"max_params {limit:,}: the least that can be left of {self.tutor.name} has {self.counted[least]:,} "
                f"({least}). Its tokens are never pruned: `compress trim` shortens their table"
            )
        return within

    @cached_property
    def configs(self) -> dict[str, Any]:
        return {name: resized(self.tutor.model.config, sizes) for name, sizes in self.shapes.items()}

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        return {} if self.clock is None else self.clock.predicted(self.configs)

    def _limit(self, clock: Clock) -> tuple[float, float]:
        """What one forward may take, and what the unpruned model's takes, in ms."""
        target = self.recipe.target
        whole_ms = clock.measured({WHOLE: self.tutor.model.config})[WHOLE]
        limit = target.max_latency_ms if target.speedup is None else whole_ms / target.speedup
        assert limit is not None, "one of the two is given"
        if whole_ms <= limit and target.max_params is None:
            raise PruneError(
                f"max_latency_ms {limit:g}: {self.tutor.name} itself takes {whole_ms:.3g} ms on {clock.about}: there "
                "is nothing to prune"
            )
        return limit, whole_ms

    def _raced(self, clock: Clock, limit: float) -> list[Candidate]:
        """The shapes that are predicted to fill `limit`, ranked, the first of them measured."""
        fits = {name: self.shapes[name] for name, each in self.estimates.items() if each.ms <= limit}
        if not fits:
            least = min(self.estimates, key=lambda name: self.estimates[name].ms)
            raise PruneError(
                f"{', '.join(self.recipe.target.budgets)}: no shape of {self.tutor.name} takes {limit:.3g} ms on "
                f"{clock.about}. The nearest, {least}, takes about {self.estimates[least].ms:.3g} ms: ask for no less "
                "than that, or for fewer tokens (seq)"
            )
        ranked = self._ranked(self._largest(fits))
        measured = clock.measured({each.name: self.configs[each.name] for each in ranked[:FINALISTS]})
        return [replace(each, ms=measured.get(each.name)) for each in ranked]

    def _largest(self, fits: Mapping[str, Sizes]) -> list[str]:
        """Those that fill the budget; of many, such as lie far apart."""
        names = list(grid.largest(fits))
        if len(names) <= SHORTLISTED:
            return names
        return choose_spread({name: self.configs[name] for name in names}, SHORTLISTED, setting_of(self.recipe))

    def _ranked(self, names: Iterable[str]) -> list[Candidate]:
        """Each cut and asked, the nearest to the whole model's answers first."""
        chosen = {name: self.shapes[name] for name in names}
        self.material.console.print(f"cutting {len(chosen)} shapes that fill the budget, to see what each answers")
        found = losses(
            self.tutor.model, chosen, self.rated, self.rows, self.material.collate,
            layers=self.recipe.pruning[-1].rule, terms=last_words(self.recipe, self.material.kind),
            kind=self.material.kind,
        )  # fmt: skip
        ranked = []
        for name in sorted(chosen, key=lambda each: found[each]):
            estimate = self.estimates.get(name)
            times = (None, None) if estimate is None else (estimate.ms, estimate.error_ms)
            ranked.append(Candidate(name, chosen[name].plain(), self.counted[name], found[name], *times))
        return ranked

    def _decision(self, found: list[Candidate], chosen: Candidate) -> Decision:
        target = self.recipe.target
        where = None if self.clock is None else self.clock.about
        return Decision(target.budgets, where, chosen, tuple(found))


def _both(one: Iterable[Candidate], other: Iterable[Candidate]) -> list[Candidate]:
    """Each shape once, measured where it was, ranked."""
    measured_last = sorted((*one, *other), key=lambda each: each.ms is not None)
    return sorted({each.name: each for each in measured_last}.values(), key=lambda each: each.loss)


def _keeping(found: Iterable[Candidate], limit: float) -> list[Candidate]:
    return [each for each in found if each.ms is not None and each.ms <= limit]
