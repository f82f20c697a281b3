"""Test whether a recipe leads its control: statistics and verdicts for benchmarks/recipes_for_real.py.

A seed is the unit. Of S seeds and the same R test rows, the two sides differ by d_sr on row r, the
control's error minus the recipe's. With the mean m of all d_sr, the means m_s of the seeds and m_r of the rows:

    A = sum_s (m_s - m)^2 / (S - 1) / S        what another draw of seeds would change
    B = sum_r (m_r - m)^2 / (R - 1) / R        what another draw of test rows would change, each with its S differences
    t = m / sqrt(A + B)                        with (A + B)^2 / (A^2 / (S - 1) + B^2 / (R - 1)) degrees of freedom

A alone is the t test over seeds. A + B is the error of crossed random effects (Clark 1973, "The
language-as-fixed-effect fallacy", min F'), and counts what is left over of a row in a seed twice: it is never too
small for that. The degrees of freedom are Satterthwaite's (1946). Tests are two-sided; Holm's correction (1979) is
over the verdicts of the whole table. Intervals have 95 % each, without it. A row of a language model's test is a
document.

For a task, each seed has training rows, a teacher and students of its own; for vectors and stages on text, rows and
teacher are the same, so that the effect is that of this teacher. A recipe that was looked at, and then had more seeds,
has had several chances: its p is multiplied by the number of looks (`looks` of its result; Bonferroni). There are at
most three, after 3, 5 and 11 seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05
LEAST_SEEDS = 3
SOURCES = ("command", "date", "machine", "versions", "commit", "clean")
"""What a result must say of itself."""
NOT_YET = "not yet, with these controls"
NEEDS_GPU = "needs a GPU: minutes on one core teach random weights too little"
NOT_RUN: Mapping[str, str] = {
    **dict.fromkeys(("bert", "roberta", "albert", "deberta", "deberta-v3", "xlnet", "xlm", "ib-bert"), NEEDS_GPU),
    **dict.fromkeys(("electra-small", "electra-base", "electra-distill", "mobilebert", "mobilebert-tiny"), NEEDS_GPU),
    "t5-spans": NEEDS_GPU,
    "distilroberta": "needs a GPU, and a RoBERTa as its teacher",
    "margin-mse-vectors": "needs a reranker's scores, which this trial does not make",
    "matryoshka": "its purpose is shortened vectors, which this trial does not score",
    "gpt": "has a trial of its own, benchmarks/gpt_auxiliary.py, which has no result yet",
    "knowledge": "has a trial of its own, benchmarks/knowledge.py",
}
"""Why recipes are not run on a small machine; of the others that have no result: NOT_YET."""


@dataclass(frozen=True)
class Effect:
    """Hold how much less a recipe errs than its control.

    mean        of all differences; above 0 the recipe leads; in the unit of the errors
    low, high   its 95 % interval
    p           of no difference, two-sided, not corrected; freedom: its degrees of freedom
    seeds       the mean difference of each seed; rows: how many rows, or documents, were scored
    """

    mean: float
    low: float
    high: float
    p: float
    freedom: float
    seeds: tuple[float, ...]
    rows: int


def measure(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> Effect:
    """Measure the effect by the errors (R,) of both sides on the same rows, one array for each seed.

    Raises ValueError for fewer than LEAST_SEEDS seeds.
    """
    if len(ours) < LEAST_SEEDS:
        raise ValueError(f"{len(ours)} seeds: expected {LEAST_SEEDS} or more")
    differences_SR = np.stack(theirs).astype(float) - np.stack(ours)
    seeds, rows = differences_SR.shape
    seed_means_S = differences_SR.mean(1)
    mean = float(differences_SR.mean())
    by_seed = float(seed_means_S.var(ddof=1)) / seeds
    by_row = float(differences_SR.mean(0).var(ddof=1)) / rows
    error = math.sqrt(by_seed + by_row)
    found = tuple(float(each) for each in seed_means_S)
    if error == 0:
        return Effect(mean, mean, mean, float(mean == 0), float(seeds - 1), found, rows)
    freedom = error**4 / (by_seed**2 / (seeds - 1) + by_row**2 / (rows - 1))
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom))
    return Effect(mean, mean - half, mean + half, p, freedom, found, rows)


def correct(ps: Mapping[str, float]) -> dict[str, float]:
    """Correct p values for their number (Holm 1979): each step's is at least that of the step before."""
    corrected, largest = dict[str, float](), 0.0
    for step, name in enumerate(sorted(ps, key=lambda name: ps[name])):
        largest = max(largest, min(1.0, (len(ps) - step) * ps[name]))
        corrected[name] = largest
    return corrected


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Load the results of a folder by the names of their recipes."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def judge(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, float]]:
    """Return the verdict on each recipe that was run, and its corrected p: works, no better, or harmful."""
    leads = {name: each["effects"]["control"] for name, each in results.items()}
    corrected = correct({name: lead["p"] * results[name].get("looks", 1) for name, lead in leads.items()})
    verdicts = dict[str, tuple[str, float]]()
    for name in results:
        p = corrected[name]
        verdict = "no better"
        if p < LEVEL:
            verdict = "works" if leads[name]["mean"] > 0 else "harmful"
        verdicts[name] = verdict, p
    return verdicts
