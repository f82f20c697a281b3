"""How many samples a second does distillation train on this GPU, how much of the GPU is that, and how much memory?

    python -m benchmarks.gpu_distill --peak 989e12 --out benchmarks/results/gpu_distill_<hardware>_<yyyymm>.json

BERT-base with random weights teaches two students on random tokens: `distilbert` (6 of its layers) and `tinybert`
(4 x 312, all its losses at once), 128 tokens, batch 256, bfloat16, by the tool's own stage. The first steps, in which
kernels are chosen and compiled, are not timed. MFU: the FLOPs of the products, of the teacher's forward pass and of the
student's forward and backward passes (three times the forward), over the seconds and over --peak, the processor's
bfloat16 FLOP/s without sparsity. `compiled`: with the layers of both compiled, as long stages on a GPU have them.
`kept`: the teacher's outputs are read instead of computed; what it takes to write them is told apart. On a processor
without CUDA it runs too, and measures that: --batch 8 --steps 4 shows that it works.
"""

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from benchmarks.common import make_parser, write_result
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.collate import Collate
from compress.models import student as students
from compress.models.checkpoints import resolve
from compress.models.flops import flops_per_token
from compress.slicing.shape import Shape
from compress.training import compilation
from compress.training.context import TrainingContext
from compress.training.objective import Objective
from compress.training.run import Run
from compress.training.stage import train
from compress.training.step import Distillation
from compress.training.teacher_cache import teacher_cache

OBJECTIVES = {
    "distilbert": (
        Term("hinton.soft_targets", 5.0, options={"temperature": 2.0}),
        Term("bert.labels", 2.0),
        Term("distilbert.cosine", 1.0, layers="last"),
    ),
    "tinybert": (
        Term("tinybert.embeddings", project=True),
        Term("tinybert.hidden", layers="uniform", project=True),
        Term("tinybert.attention", layers="uniform"),
        Term("tinybert.prediction"),
    ),
}
WARM_UP = 10


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each row")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", type=float, help="FLOP/s of the processor in bfloat16")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    sides = ["distilbert", "distilbert, compiled", "distilbert, kept", "tinybert"]
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for side in sides:
            recipe, _, how = side.partition(", ")
            found = measure(recipe, args, kept=how == "kept", compiling=how == "compiled")
            runs.setdefault(side, []).append(found)
            print(f"{side:20} " + "  ".join(f"{key} {value:,.2f}" for key, value in found.items()), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {
        "device": device, "batch": args.batch, "tokens": args.tokens, "steps": args.steps, "runs": runs,
    }  # fmt: skip
    write_result(args.out, result, ("compress", "torch", "transformers"))


class Timed(Distillation):
    """A distillation that notes when each optimiser step begins."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: list[float] = []

    def begin(self, step: int, total: int) -> None:
        if step in (WARM_UP, total - 1) and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def measure(name: str, args: argparse.Namespace, *, kept: bool, compiling: bool) -> dict[str, float]:
    """Train one student for some steps, and time those after the first ones."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = BertForSequenceClassification(BertConfig()).eval().requires_grad_(False)
    student = students.build(Recipe.load(name).student, teacher)
    for model in (teacher, student):
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of `to` hides its types
    rows = random_rows(args.batch * max(8, WARM_UP), args.tokens)
    tokenizer = AutoTokenizer.from_pretrained(resolve("minilm"))
    collate = Collate(tokenizer)
    objective = Objective(OBJECTIVES[name], Shape.from_config(student.config), Shape.from_config(teacher.config))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        shown, writing = teacher, 0.0
        if kept:
            began = time.perf_counter()
            layers = sorted({pair[1] for pairs in objective.pairs for pair in pairs})
            shown = teacher_cache(
                teacher,
                rows,
                collate,
                Path(scratch, "outputs"),
                wants=objective.teacher_wants,
                layers=layers,
                bf16=True,
            )
            writing = time.perf_counter() - began
        stage = Stage.model_validate(
            {
                "name": "timed", "kind": "distill", "steps": WARM_UP + args.steps + 1, "batch": args.batch,
                "max_length": args.tokens, "lr": 5e-5, "evaluate": 0, "checkpoint": 10**6,
                "objective": OBJECTIVES[name],
            }
        )  # fmt: skip
        run = Run.open(Path(scratch, stage.name), Recipe.load(name), {"seed": 0})
        step = Timed(student, shown, objective)
        with patch.object(compilation, "LEAST_COMPILED", 0 if compiling else math.inf):
            context = TrainingContext(None, None, tokenizer, collate, True, Console(quiet=True))
            train(step, stage, rows, context, run)
        run.close()
    spent = step.times[-1] - step.times[WARM_UP]
    flops = (0 if kept else flops_per_token(teacher, args.tokens)) + 3 * flops_per_token(student, args.tokens)
    found = {"samples_per_second": args.steps * args.batch / spent, "ms_per_step": 1000 * spent / args.steps}
    if kept:
        found["writing_samples_per_second"] = len(rows) / writing
    if args.peak:
        found["mfu_percent"] = 100 * flops * args.tokens * found["samples_per_second"] / args.peak
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def random_rows(count: int, tokens: int) -> Dataset:
    """Make encoded rows of this length."""
    rng = np.random.default_rng(0)
    return Dataset.from_dict(
        {
            "input_ids": rng.integers(1000, 30_000, (count, tokens)).tolist(), "length": [tokens] * count,
            "labels": rng.integers(0, 2, count).tolist(), "index": list(range(count)),
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
