"""The prune stage: model -> smaller model. What matters least is cut, what is kept is written down beside the result.

stages/<name>/model/               the smaller model, a plain transformers checkpoint
stages/<name>/model/kept.json      sizes before and after, and the units kept: of this stage's model, and (layers,
                                   hidden) of the teacher's
stages/<name>/model/importance.safetensors    one vector for each group of units, by its name
stages/<name>/model/training.json  the seconds it took
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from compress import io
from compress.config.recipe import Prune, Recipe
from compress.console import print_note
from compress.data.corpus import encode_corpus
from compress.data.tokenize import encode
from compress.errors import PruneError
from compress.io import filled
from compress.models.saving import save_tokenizer
from compress.models.teacher import Teacher
from compress.models.uneven import CLASSES, CONFIGS, kept_layerwise, to_uneven
from compress.pruning import importance
from compress.slicing.cut import order, sliced
from compress.slicing.plan import HIDDEN, LAYERS, Group, SlicePlan
from compress.slicing.rules import FAMILIES
from compress.slicing.select import Importance, Kept, choose, most, of_heads
from compress.slicing.sizes import Sizes
from compress.training.context import TrainingContext
from compress.training.run import Run
from compress.training.stage import Trained


def check_form(model: PreTrainedModel) -> None:
    """Raises PruneError for a model that has no form in which its layers differ."""
    if type(model) not in CLASSES:
        raise PruneError(
            f"{type(model).__name__}: layers cannot differ in size; they can in {', '.join(CONFIGS)}. Leave out "
            "--heterogeneous"
        )


def cut_unevenly(
    model: PreTrainedModel, rated: Importance, sizes: Sizes, *, layers: str | None
) -> tuple[PreTrainedModel, Kept]:
    """The model with this many layers and widths; heads and neurons are `sizes.heads` and `sizes.ffn` on average over
    the layers, the most important of all of them. Heads keep their size.

    layers: the rule by which layers stay; None: the most important. What is kept is by the places in `model`. Raises
    PruneError for families whose layers cannot differ (`models.uneven`).
    """
    plan = SlicePlan.of(model)
    depth = choose(plan, rated, replace(plan.sizes, layers=sizes.layers), layers=layers)
    shallow = sliced(model, depth) if sizes.layers < plan.sizes.layers else model
    heads = _best([of_heads(plan, rated, Group("heads", str(layer))) for layer in depth.layers], sizes.heads)
    ffn = _best([rated[Group("ffn", str(layer))] for layer in depth.layers], sizes.ffn)
    hidden = most(rated[HIDDEN], sizes.hidden) if sizes.hidden < plan.sizes.hidden else None
    small = to_uneven(shallow, kept_layerwise(SlicePlan.of(shallow), heads=heads, ffn=ffn, hidden=hidden))
    indices = {Group(axis, str(layer)): units
               for axis, each in (("heads", heads), ("ffn", ffn))
               for layer, units in zip(depth.layers, each, strict=True)}  # fmt: skip
    if hidden is not None:
        indices[HIDDEN] = hidden
    return small, replace(depth, sizes=sizes, indices=indices)


def _best(rated: Sequence[Tensor], average: int) -> list[Tensor]:
    """Of each layer those of its units that are among the best of all, in their order; `average` of each layer."""
    best = torch.zeros(sum(map(len, rated)), dtype=torch.bool)
    best[most(torch.cat([vector.float().cpu() for vector in rated]), average * len(rated))] = True
    return [part.nonzero().flatten() for part in best.split([len(vector) for vector in rated])]


KEPT = "kept.json"


def check_family(model: PreTrainedModel, *, uneven: bool) -> None:
    """Raises PruneError for a model that has no slice plan, with what can be done; uneven: or no uneven form."""
    if uneven:
        check_form(model)
    try:
        SlicePlan.of(model)
    except PruneError as error:
        if model.config.model_type in FAMILIES:
            raise
        raise PruneError(
            f"{error}. `compress.slicing.torch_pruning` cuts some others from Python, by one share for all; what it "
            "leaves recovers by any recipe that has --set student.init=FOLDER"
        ) from None


def sizes_of(stage: Prune, recipe: Recipe, config: Any) -> Sizes:
    """What this stage leaves of a teacher with this config. Raises PruneError.

    Of a heterogeneous target, heads and neurons are means over the layers, and only the last stage makes it so.
    """
    target, whole = recipe.target, Sizes.of(config)
    if not target.sizes:
        raise PruneError(
            f"{recipe.name}: does not say what is to be left: give sizes, as in --set target.ffn=0.5, or a budget, as "
            "in --set target.max_latency_ms=5 (`compress prune` has options for both)"
        )
    if not target.uneven:
        tied = config.model_type != "t5"
        return on_the_way(whole, Sizes.asked(config, **target.sizes), stage.way, tied=tied)
    uneven = Sizes.uneven(config, target.sizes)
    if stage.way == 1:
        return uneven
    even = on_the_way(whole, uneven, stage.way, tied=False)
    heads = max(uneven.heads, math.ceil(even.hidden / whole.head_size))  # none is lost that the last stage keeps
    return replace(even, heads=heads, hidden=heads * whole.head_size)


def on_the_way(whole: Sizes, target: Sizes, way: float, *, tied: bool = True) -> Sizes:
    """Sizes this share of the way from one to the other, rounded to such as can be.

    tied: attention is as wide as the stream it is in; heads are then of the size that is nearest to all that is wanted.
    """
    if way == 1:
        return target
    begin, end = whole.plain(), target.plain()
    between: dict[str, Any] = {name: round(size + way * (end[name] - size)) for name, size in begin.items()}
    stream = "hidden" if whole.bottleneck is None else "bottleneck"
    if tied:
        wanted = {name: begin[name] + way * (end[name] - begin[name]) for name in ("heads", "head_size", stream)}
        fitting = (
            {"heads": heads, "head_size": size, stream: heads * size}
            for heads in range(begin["heads"], end["heads"] - 1, -1)
            for size in range(1, begin[stream] // heads + 1)
            if end[stream] <= heads * size and (size == begin["head_size"] or end["head_size"] != begin["head_size"])
        )
        between |= min(fitting, key=lambda each: round(sum(abs(each[name] / wanted[name] - 1) for name in wanted), 6))
    return replace(whole, **between)


def prune_stage(
    stage: Prune,
    model: PreTrainedModel,
    task_teacher: Teacher | None,
    context: TrainingContext,
    run: Run,
    *,
    sizes: Sizes,
    uneven: bool,
    before: Mapping[str, Any] | None,
) -> PreTrainedModel:
    """Cut `model` down to `sizes` by the stage's importance, and keep the result in the run's directory of this stage.

    uneven: layers may differ. before: what the prune stage before this one has kept, if there was one. Every process
    gets the same units.
    """
    started = time.perf_counter()
    seed = run.seed + int(io.of_value(stage.name)[:6], 16)
    set_seed(seed)
    plan = SlicePlan.of(model)
    rated = importance.of(
        stage.importance, model.to(PartialState().device), plan, calibration(stage, context, seed), context.collate,
        batch=stage.batch, teacher=task_teacher, bf16=context.bf16, console=context.console,
    )  # fmt: skip
    rule = stage.rule
    if sizes.layers < plan.sizes.layers and rule is None and LAYERS not in rated:
        context.console.print(f"{stage.name}: {stage.importance.by} rates no layers; the kept ones are spread evenly")
    if uneven:
        small, kept = cut_unevenly(model, rated, sizes, layers=rule)
    else:
        kept = choose(plan, rated, sizes, layers=rule) if stage.way else order(plan, rated)
        small = sliced(model, kept)
    importance.agreed(kept)
    note = record(stage, plan, kept, before)
    if run.main:
        with filled(run.result(stage.name), sealed=True) as folder:
            small.save_pretrained(folder)
            save_tokenizer(folder, context.tokenizer)
            _write(folder, note, rated, seconds=time.perf_counter() - started)
    _say(context.console, stage.name, plan.sizes, sizes)
    return small


def _say(console: Console, name: str, before: Sizes, after: Sizes) -> None:
    console.print(f"{name}: {before} -> {after}", highlight=False, soft_wrap=True)
    if after.heads < before.heads and after.attention == before.attention:
        print_note(
            console,
            "fewer heads are larger ones where attention is as wide as its stream: to make it smaller give hidden too "
            "(MobileBERT: bottleneck), or --heterogeneous",
        )


def calibration(stage: Prune, context: TrainingContext, seed: int) -> Dataset:
    """So many of the training rows, drawn from the seed; the longest text comes wherever chance puts it."""
    with PartialState().main_process_first():
        if stage.data == "text":
            limit = stage.rows * stage.max_length
            rows = encode_corpus(context.text, context.tokenizer, stage.max_length, limit_tokens=limit)
        else:
            rows = encode(context.data.train, context.tokenizer, stage.max_length)
    if len(rows) <= stage.rows:
        return rows
    return rows.select(np.sort(np.random.default_rng(seed).choice(len(rows), stage.rows, replace=False)))


def record(stage: Prune, plan: SlicePlan, kept: Kept, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is kept, as JSON holds it; -1 is a unit that there was not before."""
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
        "kept": {str(group): indices.tolist() for group, indices in kept.indices.items()},
    }


def recorded(folder: Path) -> dict[str, Any]:
    """What a finished prune stage has kept."""
    found: dict[str, Any] = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    return found


def _write(folder: Path, note: Mapping[str, Any], rated: Importance, *, seconds: float) -> None:
    (folder / KEPT).write_text(json.dumps(note) + "\n", encoding="utf-8")
    save_file(
        {str(group): vector.float().cpu().contiguous() for group, vector in rated.items()},
        folder / "importance.safetensors",
    )
    Trained(steps=0, examples=0, seconds=seconds, score=None, best_step=None).write(folder)
