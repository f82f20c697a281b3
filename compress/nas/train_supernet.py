"""The supernet phase: the teacher, its units in order, trained so that every student of the space is a good part."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.config.recipe import Prune, Stage
from compress.config.reference import options
from compress.io import load_json, written
from compress.latency.costs import model_cost
from compress.models import heads
from compress.models.teacher import Teacher
from compress.nas.costs import CostModel, describe_choice
from compress.nas.schedule import TimeBudget, planned
from compress.nas.space import Choice
from compress.nas.supernet import Supernet
from compress.pruning import importance
from compress.pruning.stage import calibration
from compress.records.search_report import Rung
from compress.slicing.cut import rank_units, slice_model
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.sizes import Sizes, inner_weights
from compress.training.context import TrainingContext
from compress.training.logging import curves
from compress.training.run import Run
from compress.training.stage import run_stage
from compress.training.trainer import Score

LADDER = "ladder.json"
BACKWARD = 3.0
"""A training step's operations by those of its forward pass (Kaplan et al. 2020, arXiv:2001.08361, Sec. 2.1)."""
RUNGS, LOOKS = 4, 5
"""Subnets on the ladder, and how often each is scored at least: a curve of size, or of data, needs four points."""
DRAWN = 200
"""Subnets that training draws from, at most."""


@dataclass(frozen=True)
class Ladder:
    """Subnets that are scored whenever the supernet is: the smallest, the largest, and some evenly between."""

    rungs: tuple[Choice, ...]
    costs: CostModel

    @staticmethod
    def of(costs: CostModel, among: Sequence[Choice]) -> "Ladder":
        by_size = sorted(among, key=lambda choice: inner_weights(costs.shapes.sizes(choice)))
        places = (round(at * (len(by_size) - 1) / (RUNGS - 1)) for at in range(RUNGS))
        picked = {describe_choice(each): each for each in map(by_size.__getitem__, places)}
        return Ladder(tuple(picked.values()), costs)

    def score_rungs(self, score: Score) -> Score:
        """Wrap a score of the whole model: return the mean of the rungs' scores, and each of them."""

        def found(student: PreTrainedModel) -> Mapping[str, float]:
            net = Supernet(student)
            each = [score(net.extract(self.costs.shapes.sizes(choice)))["score"] for choice in self.rungs]
            return {"score": fmean(each), **{f"subnet_{at}": value for at, value in enumerate(each)}}

        return found

    def keep(self, file: Path, stage: Stage, flops: float) -> None:
        """Write what the log's scores are of. flops: spent on one example."""
        sizes = [self.costs.cost(choice).body_parameters for choice in self.rungs]
        kept = {"stage": stage.name, "batch": stage.batch, "body_parameters": sizes, "flops": flops}
        with written(file) as partial:
            partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def load_ladder(run: Run) -> tuple[Rung, ...]:
    """Load the ladder's scores while the supernet was trained; none where there was no supernet, or no ladder."""
    file = run.path / LADDER
    if not file.is_file():
        return ()
    kept = load_json(file, "Remove it: the page then shows no ladder")
    return tuple(
        Rung("supernet", size, int(examples), examples * kept["flops"], point[f"eval_subnet_{at}"])
        for point in curves(run.path / "log.jsonl").get(kept["stage"], [])
        if "eval_subnet_0" in point
        for examples in [point["step"] * kept["batch"]]
        for at, size in enumerate(kept["body_parameters"])
    )


def train_supernet(
    costs: CostModel,
    among: Sequence[Choice],
    *,
    task_teacher: Teacher,
    training: TrainingContext,
    run: Run,
    time_budget: TimeBudget,
) -> PreTrainedModel:
    """Train the supernet of this search on subnets drawn from `among`, or load that of an earlier session."""
    said = costs.search.space.supernet
    assert said is not None, "a space of a supernet has its stage"
    if run.done(said.name, training.console):
        return heads.load(run.result(said.name), said.head, training.kind)
    stage = _drawing_from(said, among, costs)
    whole, origin_D = _in_order(costs, stage, task_teacher, training, run.seed)

    def probe(short: Stage, scratch: Run) -> None:
        run_stage(short, copy.deepcopy(whole), task_teacher, training, scratch, origin_D=origin_D)

    (stage,) = time_budget.fit("supernet", [stage], training.data, probe)
    epochs = planned(stage, training.data) * stage.batch / len(training.data.train)
    stage = stage.model_copy(update={"evaluate": max(stage.evaluate, ceil(LOOKS / max(1.0, epochs)))})
    ladder = Ladder.of(costs, among)
    ladder.keep(run.path / LADDER, stage, _flops(costs, among, stage, training))
    return run_stage(stage, whole, task_teacher, training, run, origin_D=origin_D, wrap_score=ladder.score_rungs)


def _drawing_from(stage: Stage, among: Sequence[Choice], costs: CostModel) -> Stage:
    """Let the stage's step draw from these subnets, where it is one that can be told so."""
    step = stage.step
    if step is None or "among" not in options(step.function) or "among" in step.options:
        return stage
    shapes: dict[Sizes, None] = dict.fromkeys(costs.shapes.sizes(choice) for choice in among)
    plain = [{name: count for name, count in each.plain().items() if name != "head_size"} for each in shapes]
    return stage.model_copy(update={"step": replace(step, options={**step.options, "among": plain[:DRAWN]})})


def _in_order(
    costs: CostModel, stage: Stage, task_teacher: Teacher, training: TrainingContext, seed: int
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Put the teacher's units in order, those that matter most first; return which of its dimensions each one is."""
    space = costs.search.space
    prune = Prune.model_validate(
        {"prune": "order", "importance": space.importance, "rows": space.rows, "way": 0.0,
         "batch": stage.batch, "max_length": stage.max_length}
    )  # fmt: skip
    plan = SlicePlan.from_model(task_teacher.model)
    rated = importance.compute_importance(
        space.importance, copy.deepcopy(task_teacher.model).requires_grad_(True), plan,
        calibration(prune, training, seed), training.collate,
        batch=prune.batch, teacher=task_teacher, bf16=training.bf16, console=training.console,
    )  # fmt: skip
    kept = importance.check_agreement(rank_units(plan, rated))
    whole = slice_model(task_teacher.model, kept).requires_grad_(True)
    return whole, kept.indices.get(HIDDEN, torch.arange(plan.sizes.hidden))


def _flops(costs: CostModel, among: Sequence[Choice], stage: Stage, training: TrainingContext) -> float:
    """Spent on an example, at its mean length: the teacher's forward pass, and both passes of a step's subnets."""
    rows = training.rows(stage, 0)
    tokens = fmean(rows["length"][:])
    ends = [costs.cost(choice).flops_per_token for choice in among[:DRAWN]]
    given: Mapping[str, Any] = stage.step.options if stage.step else {}
    whole = model_cost(costs.shapes.teacher, kind=costs.kind).flops_per_token
    subnets = whole * given.get("largest", True) + min(ends) * given.get("smallest", True)
    return tokens * (whole + BACKWARD * (subnets + given.get("random", 2) * fmean(ends)))
