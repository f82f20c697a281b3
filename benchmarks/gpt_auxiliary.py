"""Does the language model's loss beside the labels help a decoder that is fine-tuned on few rows?

    python -m benchmarks.gpt_auxiliary SST2 --teacher FOLDER --work FOLDER [--layers 10] [--seeds 0 1 2] [--out JSON]

The recipe `gpt` on the first layers of a decoder as it was pre-trained, with the paper's weight of 0.5 for the language
model's loss and with 0, all else equal. SST2 has train.tsv and dev.tsv; a seed draws the training rows out of the
former, the new head and the order of the rows. The last weights are scored once, on rows of the latter that are drawn
once: accuracy of 0 to 1. The result is written after each seed.
"""

import os
import random
import time
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import log, make_parser, write_result
from compress.commands.preflight import distill_request
from compress.config.options import DataOptions, RunOptions
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.jobs.phase import run_phases
from compress.jobs.request import ForecastArguments
from compress.jobs.train import RunStages
from compress.teachers.inputs import open_job

WEIGHTS = (0.5, 0.0)
UNUSED = 64
"""Rows of the validation split, which a run must have; nothing is chosen by them."""


def write_splits(sst2: Path, folder: Path, rows: int, scored: int, seed: int) -> None:
    """Draw the rows of the splits."""
    folder.mkdir(parents=True, exist_ok=True)
    header, *train = (sst2 / "train.tsv").read_text(encoding="utf-8").splitlines()
    test = (sst2 / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    drawn = random.Random(seed).sample(train, rows + UNUSED)
    splits = {"train": drawn[UNUSED:], "dev": drawn[:UNUSED], "test": random.Random(0).sample(test, scored)}
    for name, lines in splits.items():
        (folder / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


def tune(folder: Path, teacher: str, layers: int, seed: int, weight: float) -> NDArray[np.bool_]:
    """Fine-tune a student; return which rows of the test split it gets right."""
    changes = [f"student.layers={layers}", "student.copy_layers=first", "stages.0.evaluate=0"]
    arguments = ForecastArguments(
        teacher=teacher,
        data=str(folder / "data"),
        recipe="gpt",
        columns=DataOptions(kind="classification"),
        options=RunOptions(seed=seed, precision="fp32", overrides=[*changes, f"stages.0.step.weight={weight}"]),
    )
    with open_job(distill_request(arguments, folder / f"weight-{weight}")) as (opened, _):
        job = run_phases([RunStages()], opened)
    context = job.models.context
    test = context.data.test
    assert test is not None and job.student is not None
    exam = Evaluator.from_split(context.data.task, test, context.tokenizer, job.models.recipe.stages[-1].length)
    logits_NC = partial(metrics.logits, encoded=exam.rows, collate=context.collate)(job.student)
    right_N: NDArray[np.bool_] = logits_NC.argmax(1) == np.asarray(test["label"][:])
    return right_N


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("sst2", type=Path)
    parser.add_argument("--teacher", required=True, help="the folder of a decoder whose output layer is its table")
    parser.add_argument("--work", type=Path, required=True, help="a folder for data, cache and runs")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--scored", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    os.environ["COMPRESS_HOME"] = str(given.work / "home")
    began = time.perf_counter()
    seeds: dict[str, Any] = {}
    leads = []
    errors = []
    for seed in given.seeds:
        folder = given.work / f"seed{seed}"
        write_splits(given.sst2, folder / "data", given.rows, given.scored, seed)
        right = {weight: tune(folder, given.teacher, given.layers, seed, weight) for weight in WEIGHTS}
        seeds[str(seed)] = {str(weight): float(each.mean()) for weight, each in right.items()}
        pairs_N = right[0.5].astype(float) - right[0.0]
        leads.append(float(pairs_N.mean()))
        errors.append(float(pairs_N.std() / len(pairs_N) ** 0.5))
        seconds = time.perf_counter() - began
        log(f"seed {seed}: {seeds[str(seed)]}, {seconds:.0f} s")
        lead = {
            "mean": fmean(leads),
            "deviation over seeds": stdev(leads) if len(leads) > 1 else None,
            "error over rows of each seed": errors,
        }
        facts = {"seeds": seeds, "lead": lead, "seconds": seconds}
        write_result(given.out, facts, ("compress", "torch", "transformers", "datasets", "numpy"))
        print(lead)


if __name__ == "__main__":
    main()
