"""What does a step of a supernet cost, and how many of its shapes are scored in a minute?

    python -m benchmarks.supernet --data DIR --out benchmarks/results/supernet_<hardware>_<yyyymm>.json

The supernet is the 6-layer, 384-wide `minilm`; random weights in its head. Steps are of `dynabert.Sandwich`, whole,
smallest and two others, which learn the teacher's logits and, through a learned map, its hidden states; batches of 32
rows of the data, the tokens in use alone trained, AdamW. Beside it, in turns and on the same batches:

    every token      the same with the gradient of the whole word embedding
    apart            the same four shapes as extracted models with weights of their own: what slicing adds to
    whole            a plain distillation of the whole: one student's step

Each is given as milliseconds of the teacher, the forward passes with their losses, the backward pass and the optimiser:
medians over ROUNDS turns. Then random shapes are scored on 872 rows of the validation split (as many as GLUE's SST-2
has) and on 100 of them: seconds each.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import make_parser, write_result
from compress import load_task
from compress.config.term import Term
from compress.data.collate import Collate, LengthGrouped
from compress.data.tokenize import encode
from compress.evaluation.evaluator import EvaluationBatches, Evaluator
from compress.models import precision
from compress.models import teacher as teachers
from compress.models.checkpoints import resolve
from compress.models.precision import cast_linear_layers
from compress.models.signals import Signals, read
from compress.nas.supernet import Supernet
from compress.papers import dynabert
from compress.slicing.cut import rank_units, slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.select import magnitude
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes
from compress.training.embedding_rows import only_tokens_in_use
from compress.training.objective import Objective
from compress.training.step import Distillation

ROUNDS, SHAPES, MAX_LENGTH = 24, 24, 64
TERMS = (
    Term("hinton.soft_targets"),
    Term("tinybert.embeddings", project="stream"),
    Term("tinybert.hidden", project="stream"),
)
WIDTHS, DEPTHS = [0.25, 0.5, 0.75], [2, 3, 4, 5]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="a folder that compress.load_task reads, such as SST-2's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    data = load_task(args.data)
    teacher = teachers.load("minilm", resolve("minilm"), data.task)
    plan = SlicePlan.from_model(teacher.model)
    whole = slice_model(teacher.model, rank_units(plan, magnitude(teacher.model, plan))).requires_grad_(True)
    bf16 = precision.choose("auto") == "bf16"
    if bf16:
        cast_linear_layers(teacher.model)
    rows, collate = encode(data.train, teacher.tokenizer, MAX_LENGTH), Collate(teacher.tokenizer)
    exam = Evaluator.from_split(data.task, data.validation, teacher.tokenizer, MAX_LENGTH)
    sheets = {f"{count} rows": EvaluationBatches.from_evaluator(exam.subsample(count), collate) for count in (872, 100)}
    found = {
        "threads": args.threads,
        "bf16": bf16,
        "step_ms": time_steps(teacher.model, whole, rows, collate, rounds=args.rounds, bf16=bf16),
        "score": time_scores(whole, sheets, bf16=bf16),
    }
    print(json.dumps({name: found[name] for name in ("step_ms", "score")}, indent=1))
    write_result(args.out, found)


def time_steps(teacher: Any, whole: Any, rows: Any, collate: Collate, *, rounds: int, bf16: bool) -> dict[str, Any]:
    """Every way's parts in milliseconds, and how many tokens a batch has."""
    order_of_rows = list(LengthGrouped(rows["length"], 32, seed=0, whole=True))[32:]  # without the longest
    answered, everything = Answered(teacher), Sizes.from_config(whole.config)
    made = Supernet(whole)
    with ExitStack() as stack:

        def some_tokens(sizes: Sizes) -> Any:
            student = made.extract(sizes)
            stack.enter_context(only_tokens_in_use(student, rows))
            return student

        sandwich = make_sandwich(teacher, some_tokens(everything), answered)
        apart = {
            sizes: make_distillation(teacher, some_tokens(sizes), answered) for sizes in [everything, *sandwich.drawn]
        }
        apart |= {sizes: make_distillation(teacher, some_tokens(sizes), answered) for sizes in sandwich.always.values()}
        ways = {
            "sandwich": Turn([sandwich], bf16),
            "every token": Turn([make_sandwich(teacher, made.extract(everything), answered)], bf16),
            "apart": Turn([*apart.values()], bf16),
            "whole": Turn([make_distillation(teacher, some_tokens(everything), answered)], bf16),
        }
        tokens, draw = [], random.Random(0)
        for number in range(rounds + 2):
            batch = collate([rows[n] for n in order_of_rows[32 * number : 32 * number + 32]])
            tokens.append(int(batch["input_ids"].numel()))
            teaching = answered.ask(batch, bf16)
            for each in ("sandwich", "every token"):
                ways[each].steps[0].begin(number, rounds)
            subnets = [apart[sizes] for _, sizes in sandwich.subnets()]
            for name, turn in draw.sample(sorted(ways.items()), len(ways)):
                took = turn.timed(batch, subnets if name == "apart" else turn.steps)
                if number > 1:  # the optimisers have their moments by then
                    turn.took.append({"teacher": teaching} | took)
    return {"tokens": median(tokens), "rounds": rounds, **{name: turn.medians() for name, turn in ways.items()}}


def make_sandwich(teacher: Any, student: Any, answered: Any) -> dynabert.Sandwich:
    objective = Objective(TERMS, Shape.from_config(student.config), Shape.from_config(teacher.config))
    sizes = dynabert.SubnetOptions(widths=WIDTHS, layers=DEPTHS)
    return dynabert.Sandwich(student, teacher, objective, shown=answered, sizes=sizes)


def make_distillation(teacher: Any, student: Any, answered: Any) -> Distillation:
    return Distillation(
        student, answered, Objective(TERMS, Shape.from_config(student.config), Shape.from_config(teacher.config))
    )


class Answered:
    """The teacher's answers to the last batch."""

    def __init__(self, teacher: Any) -> None:
        self.teacher = teacher.eval()

    @torch.no_grad()
    def ask(self, batch: dict[str, Tensor], bf16: bool) -> float:
        """Milliseconds."""
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            self.shown = read(self.teacher, batch, frozenset({"logits", "embeddings", "layers"}))
        return 1e3 * (time.perf_counter() - begin)

    def signals(self, batch: Mapping[str, Tensor], wants: frozenset[str]) -> Signals:
        return self.shown


class Turn:
    """Steps with an optimiser of their own, and what their turns took."""

    def __init__(self, steps: Sequence[Any], bf16: bool) -> None:
        self.steps, self.bf16 = [step.train() for step in steps], bf16
        parameters = [each for step in steps for each in step.parameters()]
        self.optimiser = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        self.took: list[dict[str, float]] = []

    def timed(self, batch: dict[str, Tensor], steps: Sequence[Any]) -> dict[str, float]:
        """Milliseconds of the parts of one optimiser step."""
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = torch.stack([step(**batch)["loss"] for step in steps]).sum()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        trained = [each for step in steps for each in step.parameters() if each.grad is not None]
        nn.utils.clip_grad_norm_(trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        ends = [begin, forward, backward, time.perf_counter()]
        return {part: 1e3 * (ends[n + 1] - ends[n]) for n, part in enumerate(("forward", "backward", "optimiser"))}

    def medians(self) -> dict[str, float]:
        found = {part: round(median(each[part] for each in self.took), 1) for part in self.took[0]}
        return found | {"all": round(median(sum(each.values()) for each in self.took), 1)}


def time_scores(whole: Any, sheets: Mapping[str, EvaluationBatches], *, bf16: bool) -> dict[str, Any]:
    """Seconds per shape, of random shapes of the steps' grid, and shapes per minute; each shape for the first time."""
    made, draw = Supernet(whole), random.Random(0)
    shapes: list[Sizes] = []
    while len(shapes) < SHAPES:
        heads = draw.randint(3, 12)
        ffn = draw.choice(range(384, 1537, 64))
        sizes = Sizes.from_request(whole.config, layers=draw.randint(2, 6), heads=heads, hidden=32 * heads, ffn=ffn)
        shapes += [sizes] if sizes not in shapes else []
    made.score(Sizes.from_config(whole.config), sheets["100 rows"], bf16=bf16)
    found: dict[str, Any] = {}
    for name, each in sheets.items():
        took = []
        for sizes in shapes:
            begin = time.perf_counter()
            made.score(sizes, each, bf16=bf16)
            took.append(time.perf_counter() - begin)
        found[name] = {
            "rows": len(each.evaluator), "shapes": len(shapes), "seconds, median": round(median(took), 3),
            "slowest": round(max(took), 3), "shapes per minute": round(60 * len(took) / sum(took), 1),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
