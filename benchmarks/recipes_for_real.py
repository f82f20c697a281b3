"""Does a recipe for a task beat its control on real data?

    python benchmarks/recipes_for_real.py hinton pkd --data ../shared/data/sst2 --rows 5000 --unlabelled --seeds 0 1 2

Each recipe distils `minilm` with nothing set by hand but the teacher, which is fine-tuned once. Its control is the same
student, begun the same way and trained for the same number of steps, without `--unlabelled` texts:

    without its teacher    on the labels alone (recipes that distil)
    cut at once            by the size of the weights, then recovered by the recipe's last stage (recipes that prune)

Both answer the test split; what counts is the rows that one has right and the other wrong, over all seeds. A recipe
works where that difference is more than 1.645 of its standard errors above 0 (95 %, one-sided), and is no better than
its control otherwise. Results are written beside each other, one JSON file a recipe.
"""

import argparse
import json
import math
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import compress
from compress.benchmark.local import machine
from compress.config.options import LengthOptions, RunOptions
from compress.config.recipe import Prune, Recipe, Stage, Target
from compress.config.reference import Call
from compress.config.term import Term
from compress.data import load_task
from compress.data.task import TaskData
from compress.provenance import versions
from compress.training.stage import Trained

SURE = 1.645
TARGET = Target.model_validate({"layers": 0.67, "ffn": 0.5})
"""The sizes that recipes which prune are given, those of `--recipe auto`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="names of recipes for a task")
    parser.add_argument("--data", required=True, help="a folder that compress.load_task reads, such as SST-2's")
    parser.add_argument("--rows", type=int, help="train on so many rows, drawn once")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--unlabelled", action="store_true", help="the other rows' texts are the recipe's corpus")
    parser.add_argument("--effort", choices=["quick", "normal", "best"], default="normal")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recipes"), help="the folder of results")
    args = parser.parse_args()
    data = load_task(args.data)
    splits = {"train": data.train, "validation": data.validation, "test": data.test or data.validation}
    order = np.random.default_rng(0).permutation(len(data.train))
    splits["train"] = data.train.select(np.sort(order[: args.rows]))
    others = data.train.select(np.sort(order[len(splits["train"]) :]))["text"][:] if args.unlabelled else []
    for name in args.recipes:
        ours, control, how = sides(Recipe.load(name))
        runs: dict[str, list[dict[str, Any]]] = {"recipe": [], "control": []}
        for seed in args.seeds:
            for side, found in runs.items():
                recipe = ours if side == "recipe" else of_length(control, runs["recipe"][-1]["steps"])
                corpus = others if side == "recipe" else []
                found.append(run(recipe, splits, data, seed=seed, effort=args.effort, corpus=corpus))
                print(
                    f"{name}, seed {seed}, {side}: {found[-1]['score']:.4f}, {found[-1]['minutes']:.1f} min", flush=True
                )
        facts = {"recipe": name, "control": how, "data": data.name, "rows": len(splits["train"])}
        facts["unlabelled"] = len(others)
        report(facts | {"metric": data.task.metric}, runs, args.out)


def sides(recipe: Recipe) -> tuple[Recipe, Recipe, str]:
    """Return the recipe with a target where it prunes, its control, and what that is."""
    labels = (Term("bert.labels"),)
    if recipe.pruning:
        recipe = recipe.model_copy(update={"target": TARGET})
        last = recipe.training[-1].model_copy(update={"augment": None})
        cut = recipe.pruning[-1].model_copy(
            update={"importance": Call("li.magnitude"), "way": 1.0, "copy_layers": "uniform"}
        )
        return recipe, recipe.model_copy(update={"stages": (cut, last)}), "cut at once by the size of the weights"
    final = recipe.stages[-1]
    if isinstance(final, Prune) or final.kind != "distill" or final.step is not None:
        sys.exit(f"{recipe.name}: has no control here: its last stage is no plain distillation")
    alone = {"kind": "finetune", "objective": labels, "cache_teacher": False, "augment": None}
    student = recipe.stages[0].student if isinstance(recipe.stages[0], Stage) else None
    only = final.model_copy(update={**alone, "student": final.student or student})
    return recipe, recipe.model_copy(update={"stages": (only,)}), "without its teacher"


def of_length(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe, the last stage of which trains for as many steps as the other side's stages did together."""
    *before, last = recipe.stages
    return recipe.model_copy(update={"stages": (*before, last.model_copy(update={"steps": steps, "epochs": 1.0}))})


def run(
    recipe: Recipe, splits: dict[str, Any], data: TaskData, *, seed: int, effort: Any, corpus: list[str]
) -> dict[str, Any]:
    """Distil, and say which rows of the test split the float32 file answers right."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder, "texts.txt")
        texts.write_text("\n".join(corpus), encoding="utf-8")
        bundle = compress.distill(
            teacher="minilm", data=splits, corpus=str(texts) if corpus else None, recipe=recipe,
            out=Path(folder) / "run", length=LengthOptions(effort=effort), options=RunOptions(seed=seed),
            console=Console(),
        )  # fmt: skip
        trained = [Trained.read(path.parent) for path in Path(folder).glob("run/stages/*/model/training.json")
                   if path.parent.parent.name != recipe.teacher.name]  # fmt: skip
        report = bundle.report()
        rows = {row.name: report.score(row) for row in report.rows}
        answers: Any = bundle.predict(splits["test"]["text"][:], precision="fp32")
    labels = [data.task.labels[label] for label in splits["test"]["label"][:]]
    return {
        "score": rows["student fp32"], "teacher": rows["minilm"], "bag_of_words": rows.get("bag of words"),
        "parameters": next(row.parameters for row in report.rows if row.name == "student fp32"),
        "steps": sum(each.steps for each in trained), "seconds": sum(each.seconds for each in trained),
        "minutes": (time.perf_counter() - began) / 60,
        "right": [answer.label == label for answer, label in zip(answers, labels, strict=True)],
    }  # fmt: skip


def report(facts: dict[str, Any], runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Compare the sides row by row, and write what was found."""
    ours, control = (np.array([one.pop("right") for one in runs[side]], dtype=float).ravel() for side in runs)
    lead = float((ours - control).mean())
    error = float((ours - control).std() / math.sqrt(len(ours)))
    verdict = "works" if lead > SURE * error else "no better than the control"
    found = facts | {
        "tested": len(ours), "lead": lead, "standard_error": error, "verdict": verdict, "runs": runs,
        "command": shlex.join(["python", *sys.argv]), "machine": machine(),
        "versions": versions(("compress", "torch", "transformers")), "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{facts['recipe']}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    points = f"{100 * lead:+.1f} points (standard error {100 * error:.1f})"
    print(f"{facts['recipe']}: {verdict}: {points} over a student {facts['control']}", flush=True)


if __name__ == "__main__":
    main()
