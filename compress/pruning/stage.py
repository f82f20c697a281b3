"""The prune stage: cut the least important units of a model, and record which units
were kept.

stages/<name>/model/               the smaller model, a plain transformers checkpoint
stages/<name>/model/kept.json      sizes before and after, and the units kept: of this
                                   stage's model, and (layers, hidden) of the teacher
stages/<name>/model/importance.safetensors    a vector for each group of units, by its
                                              name
stages/<name>/model/training.json  the seconds it took
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import save_file
from transformers import PreTrainedModel, set_seed

from compress import families, io
from compress.config.recipe import Recipe
from compress.config.stages import Prune
from compress.console import print_note
from compress.errors import PruneError
from compress.io import atomic_folder
from compress.models.checkpoints import save_tokenizer
from compress.models.sentence_encoder import SentenceEncoder, project
from compress.models.teacher import Teacher
from compress.pruning import importance
from compress.slicing.cut import rank_units, slice_model
from compress.slicing.plan import HIDDEN, LAYERS, SlicePlan
from compress.slicing.select import Importance, Kept, check_layers, choose
from compress.slicing.sizes import Sizes, is_whole_factor, select_layers
from compress.training.context import TrainingContext
from compress.training.run import Run
from compress.training.stage import Trained

KEPT_UNITS = "kept.json"


def check_family(model: PreTrainedModel) -> None:
    """Raise PruneError, with an alternative, for a model without a slice plan."""
    try:
        SlicePlan.from_model(model)
    except PruneError as error:
        if families.find(model.config.model_type).rules:
            raise
        raise PruneError(
            f"{error}. `compress.pruning.torch_pruning` cuts some other families from "
            "Python, by one share for all sizes; any recipe with --set "
            "student.init=FOLDER then trains the result"
        ) from None


def stage_sizes(stage: Prune, recipe: Recipe, config: Any) -> Sizes:
    """Compute the sizes that this stage leaves of a teacher with this config. Raises
    PruneError."""
    if stage.to is not None:
        return Sizes.from_request(config, **stage.to.sizes)
    wanted = recipe.target.sizes
    if not wanted:
        raise PruneError(
            f"{recipe.name}: has no target: give sizes, as in --set target.ffn=0.5, or "
            "a budget, as in --set target.max_latency_ms=5 (`compress prune` has "
            "options for both)"
        )
    whole = Sizes.from_config(config)
    target = Sizes.from_request(config, **wanted)
    family = families.find(config.model_type)
    together = whole.heads // config.num_key_value_heads if family.grouped else None
    sizes = interpolate_sizes(
        whole,
        target,
        stage.way,
        tied=not family.own_width,
        rotary=family.rotary,
        together=together,
    )
    if stage.rule is not None:
        check_layers(family, select_layers(stage.rule, sizes.layers, whole.layers))
    return sizes


def interpolate_sizes(
    whole: Sizes,
    target: Sizes,
    way: float,
    *,
    tied: bool = True,
    rotary: bool = False,
    together: int | None = None,
) -> Sizes:
    """Interpolate between two sizes by the share `way`, rounded to sizes that a model
    can have.

    tied: attention is as wide as its stream, so heads get the size that comes nearest
    to all interpolated values. rotary: the size of heads changes by whole factors
    (`sizes.fits_rotary`). together: the number of heads that share keys and values; the
    number of heads divides the stream.
    """
    if way == 1:
        return target
    begin = whole.plain()
    end = target.plain()
    exact = {name: size + way * (end[name] - size) for name, size in begin.items()}
    between: dict[str, Any] = {name: round(size) for name, size in exact.items()}
    stream = "hidden" if whole.bottleneck is None else "bottleneck"
    if tied:
        fitting = (
            {"heads": heads, "head_size": size, stream: heads * size}
            for heads in range(begin["heads"], end["heads"] - 1, -1)
            for size in range(1, begin[stream] // heads + 1)
            if end[stream] <= heads * size
            and (size == begin["head_size"] or end["head_size"] != begin["head_size"])
            if not rotary
            or (
                is_whole_factor(begin["head_size"], size)
                and is_whole_factor(end["head_size"], size)
            )
        )
        nearest = min(
            fitting,
            key=lambda each: round(
                sum(abs(each[name] / exact[name] - 1) for name in each), 6
            ),
        )
        between |= nearest
    elif together is not None:
        possible = [
            {"heads": heads, "hidden": width}
            for heads in range(begin["heads"], end["heads"] - 1, -together)
            for width in range(
                -(-end["hidden"] // heads) * heads, begin["hidden"] + 1, heads
            )
        ]
        nearest = min(
            possible,
            key=lambda each: sum(abs(each[name] / between[name] - 1) for name in each),
        )
        between |= nearest
    return replace(whole, **between)


def rating_seed(stage: Prune, seed: int) -> int:
    """Derive the seed of a stage from that of its run and the stage's name."""
    return seed + int(io.hash_value(stage.name)[:6], 16)


def sample_rows(stage: Prune, context: TrainingContext, seed: int) -> Dataset:
    """Sample the rows on which a stage rates units. seed: of the run."""
    return context.sample(stage, stage.rows, rating_seed(stage, seed))


def rate_units(
    stage: Prune,
    model: PreTrainedModel,
    plan: SlicePlan,
    rows: Dataset,
    *,
    teacher: Teacher | None,
    context: TrainingContext,
) -> Importance:
    """Rate the units of a model by a stage's importance, or take the cached result for
    the same weights and rows."""
    return importance.compute_importance(
        stage.importance,
        model,
        plan,
        rows,
        context.collate,
        batch=stage.batch,
        teacher=teacher,
        bf16=context.bf16,
        console=context.console,
    )


def prune_stage(
    stage: Prune,
    model: PreTrainedModel,
    task_teacher: Teacher | None,
    context: TrainingContext,
    run: Run,
    *,
    sizes: Sizes,
    before: Mapping[str, Any] | None,
) -> PreTrainedModel:
    """Cut `model` to `sizes` by the stage's importance, and write the result to the
    stage's folder of the run.

    before: the record of the previous prune stage, or None. Every process keeps the
    same units.
    """
    started = time.perf_counter()
    set_seed(rating_seed(stage, run.seed))
    if isinstance(model, SentenceEncoder) and sizes.hidden < model.config.hidden_size:
        project(model)
    plan = SlicePlan.from_model(model)
    rows = sample_rows(stage, context, run.seed)
    model.to(PartialState().device)
    rated = rate_units(stage, model, plan, rows, teacher=task_teacher, context=context)
    if sizes.layers < plan.sizes.layers and stage.rule is None and LAYERS not in rated:
        context.console.print(
            f"{stage.name}: {stage.importance.by} does not rate layers; keeping evenly "
            "spread ones"
        )
    kept = (
        choose(plan, rated, sizes, layers=stage.rule)
        if stage.way
        else rank_units(plan, rated)
    )
    small = slice_model(model, kept)
    importance.check_agreement(kept)
    note = make_record(stage, plan, kept, before)
    if run.main:
        with atomic_folder(run.result(stage.name), sealed=True) as folder:
            small.save_pretrained(folder)
            save_tokenizer(folder, context.tokenizer)
            (folder / KEPT_UNITS).write_text(json.dumps(note) + "\n", encoding="utf-8")
            vectors = {
                str(group): vector.float().cpu().contiguous()
                for group, vector in rated.items()
            }
            save_file(vectors, folder / "importance.safetensors")
            seconds = time.perf_counter() - started
            Trained(
                steps=0, examples=0, seconds=seconds, score=None, best_step=None
            ).write(folder)
    context.console.print(
        f"{stage.name}: {plan.sizes} -> {sizes}", highlight=False, soft_wrap=True
    )
    if sizes.heads < plan.sizes.heads and sizes.attention == plan.sizes.attention:
        print_note(
            context.console,
            "attention stays as wide as its stream, so fewer heads are larger heads; "
            "for a smaller model, give hidden too (MobileBERT: bottleneck)",
        )
    return small


def make_record(
    stage: Prune,
    plan: SlicePlan,
    kept: Kept,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Describe the kept units for kept.json; -1 is a new unit."""
    layers = list(kept.layers)
    hidden = kept.indices.get(HIDDEN, torch.arange(plan.sizes.hidden)).tolist()
    if before is not None:
        layers = [before["of_teacher"]["layers"][layer] for layer in layers]
        hidden = [before["of_teacher"]["hidden"][unit] for unit in hidden]
    return {
        "importance": stage.importance.plain(),
        "sizes": {"before": plan.sizes.plain(), "after": kept.sizes.plain()},
        "of_teacher": {"layers": layers, "hidden": hidden},
        "layers": list(kept.layers),
        "kept": {
            str(group): indices.tolist() for group, indices in kept.indices.items()
        },
    }


def read_record(folder: Path) -> dict[str, Any]:
    """Read the kept.json of a finished prune stage."""
    record: dict[str, Any] = json.loads(
        (folder / KEPT_UNITS).read_text(encoding="utf-8")
    )
    return record
