"""Does a recipe beat its control on real data, in minutes of a small machine?

    python -m benchmarks.recipes_for_real hinton tinybert-general bert gkd --data ../shared/data/sst2 --corpus wikipedia

`--corpus` is text, such as the folder of a Wikipedia-extractor dump. PROOFS says of every recipe what stands in the
place of its own numbers, which ask for days, and what it is compared with. What is scored:

    accuracy    on 7,607 rows, after a task's last stage; of `q8bert` with the int8 file's rounding, of questions the
                F1, of rankings and vectors the nDCG@10
    nats        for a token of held-out text, after a stage on text: a language model beside an n-gram of the rows that
                it read, or beside the same student without its teacher; for telling whether a generator has replaced
                a token, beside how often that same token is a replacement elsewhere
    KL          to the teacher, for a token that the student itself writes: recipes that learn from their own writing

The teacher is `minilm`, fine-tuned once, or one of those that are trained here once, for 500 to 2,000 steps of 1,024
tokens, and know little: `lm`, a GPT-2 of 4 x 192, `answering`, the same after 8,000 steps on the task's other rows,
each a prompt with its answer, `electra` and `t5`, both 3 x 128, the latter fine-tuned. What begins with random weights
has a vocabulary of 2,000 pieces that is made here. A recipe works where it leads its control by more than 1.645 of the
standard errors of the paired differences over all rows, or tokens, and seeds (95 %, one-sided). Results are written
one JSON file a recipe, with the curve of its stage on text; the site's page "Recipes on real data" shows them, and
`why` of each that does not lead its control, which is added to its file by hand. A GPU reads 64 times the text in as
many minutes: `--longer 4 --wider 16 --hidden 256`.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
from datasets import concatenate_datasets
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

import compress
from benchmarks.common import make_parser, write_result
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe, Target
from compress.config.reference import Call
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data import load_task
from compress.data.cache import home
from compress.data.collate import Seq2SeqCollate
from compress.data.constants import IGNORE_INDEX
from compress.data.corpus import load_corpus
from compress.data.masking import Words, count_tokens
from compress.data.objects import data_path
from compress.data.task import TaskData
from compress.evaluation import metrics
from compress.evaluation.evaluator import Evaluator
from compress.evaluation.perplexity import logits_at
from compress.io import atomic_folder, hash_value
from compress.jobs.job import Job
from compress.jobs.phase import Phase, run_phases
from compress.jobs.request import DistillRequest
from compress.jobs.stages import StageModels
from compress.models.signals import evaluating
from compress.papers import q8bert
from compress.prompting.labels import label_names
from compress.prompting.prompt import Prompt
from compress.slicing.shape import Shape
from compress.teachers.inputs import open_job
from compress.training import stage as training_stage
from compress.training.generation import sample_continuations
from compress.training.objective import Objective
from compress.training.stage import Trained, stage_seed

SURE = 1.645
UNTRAINED = ("n-gram", "majority", "rate")
"""Controls that are no other student."""
TARGET = Target.model_validate({"layers": 0.67, "ffn": 0.5})
"""The sizes that recipes which prune are given, those of `--recipe auto`."""
PIECES, SPANS = 2000, 100
TEXTS = 12_000
"""Rows whose texts are what `--unlabelled` adds."""
SMALL = {"layers": 3, "hidden": 128, "ffn": 512, "heads": 4}
BATCH: Mapping[str, Any] = {"micro_batch": None, "tokens": None, "max_length": 64, "warmup": 0.05}
SCRATCH = {**BATCH, "steps": 500, "batch": 16, "lr": 1e-3, "lr_end": 0.0, "evaluate": 5, "limit_tokens": 1_100_000}
GENERAL = {**BATCH, "steps": 300, "batch": 16, "lr": 1e-3, "evaluate": 2, "limit_tokens": 1_000_000}
SHORT = {**BATCH, "epochs": 3.0, "steps": None, "batch": 32, "lr": "auto", "evaluate": 2, "cache_teacher": False}
LIKE_LM = {"layers": 2}


@dataclass(frozen=True)
class Proof:
    """Say how a recipe is tried.

    without   what its control lacks: `teacher`, `training` but for a step, stages on `text`, a `step`, `variants` of
              the rows, or the `importance` of what is cut; in its place `n-gram` is another model, `majority` the
              most frequent class, `rate` how often each token is a replacement
    teacher   minilm, lm, answering, electra, t5, or `vocabulary`: nothing but tokens
    student   sizes in the place of its own; text, task, teacher_lm: numbers of its stages on text, of its last
              stage on a task, and of the head for masked words that its teacher gets
    stages    which of its stages are run; None: all
    int8      score what is trained with the rounding of its int8 file
    """

    without: str
    teacher: str = "minilm"
    student: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=lambda: {"max_length": 64})
    stages: Sequence[int] | None = None
    prompt: Prompt | None = None
    int8: bool = False
    teacher_lm: Mapping[str, Any] = field(default_factory=lambda: {**BATCH, "steps": 300, "batch": 16})

    def enlarge(self, args: argparse.Namespace) -> "Proof":
        """Return the proof with the steps on text, their rows and the width that the command line asks for."""
        times, sizes = {"steps": args.longer, "batch": args.wider, "limit_tokens": args.wider}, dict(self.student)
        text, teacher_lm = (
            {name: round(value * times[name]) if name in times else value for name, value in each.items()}
            for each in (self.text, self.teacher_lm)
        )
        if args.hidden and self.teacher == "vocabulary":
            sizes |= {"hidden": args.hidden} | ({"ffn": 4 * args.hidden} if sizes.get("ffn") else {})
        return replace(self, text=text, student=sizes, teacher_lm=teacher_lm)


def scratch(without: str, stages: Sequence[int] | None = None, **numbers: Any) -> Proof:
    """Try the stages of a recipe that train on text from random weights."""
    sizes = SMALL | numbers.pop("student", {})
    return Proof(without, "vocabulary", sizes, SCRATCH | numbers, stages=stages)


def general(**student: Any) -> Proof:
    """Try a recipe with a general student, taught on text."""
    return Proof("text", student=student, text=GENERAL, task=SHORT)


VARIANTS = Call("tinybert.near_words", {"copies": 5, "probability": 0.4, "candidates": 15})
ON_OWN_TEXT = {"prompt": 16, "new_tokens": 32}
PROOFS: Mapping[str, Proof] = {
    **dict.fromkeys(("hinton", "distilbert", "pkd", "tinybert", "mobilebert-task", "albert-shared"), Proof("teacher")),
    **dict.fromkeys(("static", "deberta-sift"), Proof("teacher")),
    **dict.fromkeys(("margin-mse", "listnet"), Proof("teacher")),
    **dict.fromkeys(("embed-mse", "embed-similarity", "leaf", "matryoshka"), Proof("training")),
    **dict.fromkeys(("dpr", "margin-mse-vectors"), Proof("training")),
    **dict.fromkeys(("prune-taylor", "prune-minitron", "prune-cofi", "prune-dynabert"), Proof("importance")),
    **dict.fromkeys(("minilm", "minilm-v1", "tinybert-general"), general(layers=3, hidden=192, ffn=768)),
    "minilm-assistant": general(ffn=768),
    # what begins as layers of its teacher is spoiled by 1e-3: distilroberta lost 2.7 points
    **dict.fromkeys(("distilbert-general", "distilroberta"), replace(general(), text=GENERAL | {"lr": 2e-4})),
    "tinybert-6": general(layers=3, hidden=384, ffn=1536),
    "deberta-v3": scratch("rate", (0,)),
    **dict.fromkeys(("bert", "roberta"), scratch("n-gram", (0,))),
    "xlm": scratch("n-gram", (0,), student={"ffn": None}),
    **dict.fromkeys(("xlnet", "deberta"), scratch("n-gram", (0,), steps=1000)),
    **dict.fromkeys(("albert", "ib-bert"), scratch("n-gram", (0,), student={"embedding": 128}, lr=3e-3)),
    "t5-spans": scratch(
        "n-gram", student={"family": "t5"}, lr=1e-2, corrupt={"sentinel": PIECES + SPANS - 1, "end": 3}
    ),
    **dict.fromkeys(("electra-small", "electra-base"), scratch("rate", (0,), student={"embedding": 128})),
    **dict.fromkeys(("mobilebert", "mobilebert-tiny"), scratch("step", (0, 1, 2), steps=500, lr=3e-3)),
    # the teacher must have read much more than the student: labels alone go past one that has read twice as much
    "distilgpt2": Proof("teacher", "lm", LIKE_LM, SCRATCH | {"steps": 60}),
    "gkd": Proof("step", "lm", LIKE_LM, SCRATCH | {"steps": 500, "lr": 3e-4, "step": ON_OWN_TEXT}),
    "minillm": Proof("step", "lm", LIKE_LM, SCRATCH | {"steps": 500, "lr": 3e-4, "step": ON_OWN_TEXT}),
    "q8bert": Proof("step", int8=True),
    "tinybert-aug": Proof("variants", task={"max_length": 64, "epochs": 2.0, "augment": VARIANTS}),
    "electra-distill": Proof("text", "electra", text=GENERAL, task=SHORT | {"lr": 3e-4}),
    "t5": Proof("teacher", "t5", {"layers": 2}, task={"epochs": 6.0, "max_length": 64}),
    "prompted": Proof("majority", "answering", prompt=Prompt.load("sentiment").model_copy(update={"examples": 0})),
    "distilbert-squad": Proof("teacher", task={"max_length": 192, "epochs": 2.0}),
}  # fmt: skip
LM = Proof(
    "n-gram", "vocabulary", {"family": "gpt2", "layers": 4, "hidden": 192, "heads": 4},
    SCRATCH | {"steps": 2000, "limit_tokens": 2_100_000},
)  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipes", nargs="+", choices=sorted(PROOFS), metavar="RECIPE", help=", ".join(sorted(PROOFS)))
    parser.add_argument(
        "--data",
        required=True,
        help="a folder that compress.load_task reads, such as SST-2's, or train=FILE,validation=FILE,test=FILE",
    )
    parser.add_argument("--rows", type=int, default=2000, help="train on so many labelled rows, drawn once")
    parser.add_argument("--corpus", help="text for stages on text")
    parser.add_argument("--unlabelled", action="store_true", help="12,000 other rows' texts are a task recipe's corpus")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--effort", choices=["quick", "normal", "best"], default="quick")
    parser.add_argument("--longer", type=float, default=1, help="take as many times the steps on text")
    parser.add_argument("--wider", type=int, default=1, help="read as many times the rows in a step on text")
    parser.add_argument(
        "--hidden", type=int, help="the width of students that begin with random weights, instead of 128"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recipes"), help="the folder of results")
    args = parser.parse_args()
    splits, others = split_rows(args.data, args.rows)
    for name in args.recipes:
        proof, runs = PROOFS[name].enlarge(args), dict[str, list[dict[str, Any]]](recipe=[], control=[])
        recipe = adapt(Recipe.load(name), proof)
        errors: dict[str, list[NDArray[Any]]] = {"recipe": [], "control": []}
        corpus = args.corpus if reads_text(recipe) else others if args.unlabelled else None
        teacher = proof.teacher if proof.teacher == "minilm" else load_made_teacher(proof.teacher, args)
        teacher = tune_t5(teacher, splits) if proof.teacher == "t5" else teacher
        for seed in args.seeds:
            for side in runs:
                alone = side == "control" and proof.without in UNTRAINED
                tried = control(recipe, proof, runs["recipe"][-1]) if side == "control" and not alone else recipe
                text = corpus if side == "recipe" or reads_text(tried) else None
                setting = {"seed": seed, "effort": args.effort, "untrained": alone}
                if alone and proof.without == "rate":
                    took, wrong = guess_by_rate(runs["recipe"][-1].pop("tokens"))
                else:
                    took, wrong = run(tried, proof, splits, teacher=teacher, corpus=text, **setting)
                runs[side].append(took)
                errors[side].append(wrong)
                print(f"{name}, seed {seed}, {side}: {took}", flush=True)
        report(name, proof, runs, errors, args)


def split_rows(data: str, rows: int) -> tuple[Any, str]:
    """Draw the rows to train on and 800 to validate on; test on all that others validate or test on.

    Returns the splits and a file of the other rows' texts. Files for each split stay as they are.
    """
    if "=" in data:
        return data, ""
    whole, order = draw(data)
    test = [each for each in (whole.validation, whole.test) if each is not None]
    splits = {"train": whole.train.select(np.sort(order[:rows])),
              "validation": whole.train.select(np.sort(order[rows : rows + 800])),
              "test": concatenate_datasets(test)}  # fmt: skip
    if whole.task.kind == "qa":
        splits = {name: split.map(to_squad, remove_columns=["starts"]) for name, split in splits.items()}
    others = Path(tempfile.mkdtemp()) / "texts.txt"
    if "text" in whole.train.column_names:
        texts = whole.train.select(np.sort(order[rows + 800 : rows + 800 + TEXTS]))["text"][:]
        others.write_text("\n".join(texts), encoding="utf-8")
    return splits, str(others)


def draw(data: str) -> tuple[TaskData, NDArray[Any]]:
    """Load a task, and return the order in which its rows are drawn."""
    whole = load_task(data)
    return whole, np.random.default_rng(0).permutation(len(whole.train))


def to_squad(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"answers": {"text": row["answers"], "answer_start": row["starts"]}}


def reads_text(recipe: Recipe) -> bool:
    return any(stage.data == "text" for stage in recipe.stages)


def adapt(recipe: Recipe, proof: Proof) -> Recipe:
    """Return the recipe at the sizes and lengths of its proof."""

    def numbers(stage: Any, *, last: bool) -> dict[str, Any]:
        """Return what changes in a stage; of the stages on a task, all follow one on text as the last does."""
        shorter = stage.data == "task" and (last or proof.without in ("text", "variants"))
        found = dict(proof.text if stage.data == "text" else proof.task if shorter else {})
        for line in ("corrupt", "step"):
            call, options = getattr(stage, line), found.pop(line, None)
            if call is not None and options:
                found[line] = Call(call.by, dict(call.options) | options)
        if stage.student is not None:
            found["student"] = stage.student.model_copy(update=dict(proof.student))
        rows_alone = proof.without == "importance" or (shorter and proof.without == "text")
        return found | ({"augment": None} if rows_alone else {})

    chosen = [recipe.stages[at] for at in proof.stages or range(len(recipe.stages))]
    stages = tuple(
        stage.model_copy(update=numbers(stage, last=stage is chosen[-1])) if isinstance(stage, Stage) else stage
        for stage in chosen
    )
    student, lm = (
        recipe.student.model_copy(update=dict(proof.student)),
        recipe.teacher_lm.model_copy(update=dict(proof.teacher_lm)),
    )
    update: dict[str, Any] = {"stages": stages, "student": student, "teacher_lm": lm}
    return recipe.model_copy(update=update | ({"target": TARGET} if recipe.pruning else {}))


def control(recipe: Recipe, proof: Proof, took: Mapping[str, Any]) -> Recipe:
    """Return the recipe without what its proof says, trained as long in all."""
    last = recipe.stages[-1]
    match proof.without:
        case "text":
            stages = [stage for stage in recipe.stages if stage.data == "task"]
            first = next((stage.student for stage in recipe.training if stage.student), None)
            stages[0] = stages[0].model_copy(update={"student": getattr(stages[0], "student", None) or first})
        case "step":
            stages = [
                stage.model_copy(update={"step": None}) if has_mechanism(stage) else stage for stage in recipe.stages
            ]
        case "importance":
            at_once = {"importance": Call("li.magnitude"), "way": 1.0, "copy_layers": "uniform"}
            cut = (recipe.pruning or Recipe.load("prune-taylor").pruning)[-1].model_copy(update=at_once)
            if not recipe.pruning:  # its gates are held to sizes of their own
                gates = next(stage.step for stage in recipe.training if stage.step is not None)
                recipe = recipe.model_copy(update={"target": Target.model_validate(gates.options["sizes"])})
            last = recipe.training[-1].model_copy(update={"augment": None, "steps": took["steps"], "epochs": 1.0})
            stages = [cut, last]
        case "variants":
            stages = [
                stage.model_copy(update={"augment": None, "steps": took["steps_of"][stage.name], "epochs": 1.0})
                for stage in recipe.training
            ]
        case "training":
            stages = [last.model_copy(update={"steps": 1, "epochs": 1.0})]
        case "teacher":
            alone = {"kind": "finetune" if last.head == "task" else "pretrain", "cache_teacher": False, "augment": None}
            labels = (Term("bert.labels" if last.head == "task" else "bert.masked_lm"),)
            student = recipe.training[0].student
            numbers = {**alone, "objective": labels, "student": student, "steps": took["steps"], "epochs": 1.0}
            stages = [last.model_copy(update=numbers)]
    return recipe.model_copy(update={"stages": tuple(stages)})


def has_mechanism(stage: Any) -> bool:
    """Return True of the stages whose mechanism is what a proof is of."""
    return isinstance(stage, Stage) and stage.step is not None and not stage.step.by.endswith("WithoutDropout")


def run(
    recipe: Recipe,
    proof: Proof,
    splits: Any,
    *,
    teacher: str,
    corpus: str | None,
    seed: int,
    effort: Any,
    untrained: bool,
) -> tuple[dict[str, Any], NDArray[Any]]:
    """Run the recipe's stages; return what was found and the error of every row or token that is scored."""
    began = time.perf_counter()
    stages, last = recipe.stages, recipe.stages[-1]
    if last.head != "task":  # what follows is not run
        after = Stage.model_validate({"finetune": "task-after-it", "lr": "auto", "max_length": 64})
        recipe = recipe.model_copy(update={"stages": (*stages, after)})
    with tempfile.TemporaryDirectory() as folder:
        request = DistillRequest(
            teacher=teacher, data=data_path(splits), out=Path(folder) / "run", recipe=recipe.with_effort(effort),
            corpus=corpus, prompt=proof.prompt, columns=DataOptions(), length=LengthOptions(),
            options=RunOptions(seed=seed, gate="warn"), console=Console(),
        )  # fmt: skip
        with open_job(request) as (job, teacher_phases):
            models = job.models
            if last.head != "task":
                found, wrong = score_text(models, models.recipe.stages[: len(stages)], proof, untrained=untrained)
            else:
                found, wrong = score_task(job, teacher_phases, proof, untrained=untrained)
            trained = {stage.name: Trained.read(models.run.result(stage.name)) for stage in models.recipe.training
                       if models.run.result(stage.name).is_dir()}  # fmt: skip
            curve = [line for line in read_log(Path(folder) / "run" / "log.jsonl") if "eval_score" in line]
    texts = {stage.name for stage in recipe.training if stage.data == "text"}
    found["curve"] = [[line["step"], round(line["eval_score"], 4)] for line in curve if line["stage"] in texts]
    found["steps_of"] = {stage: each.steps for stage, each in trained.items()}
    found |= {
        "steps": sum(found["steps_of"].values()),
        "seconds": round(sum(each.seconds for each in trained.values())),
    }
    return found | {"minutes": round((time.perf_counter() - began) / 60, 1)}, wrong


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def score_task(
    job: Job, teacher_phases: Sequence[Phase[Job]], proof: Proof, *, untrained: bool
) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return the accuracy on the test split, and 1 for each row of it that is answered wrong; of questions 1 - F1."""
    context = job.models.context
    data = context.data
    assert data.test is not None
    if untrained:
        wrong = np.asarray(data.test["label"][:]) != np.bincount(data.train["label"][:]).argmax()
        return {"score": 1 - wrong.mean()}, wrong.astype(float)
    if proof.prompt is not None or proof.teacher in ("minilm", "electra"):
        job = run_phases(teacher_phases, job)
    models, task_teacher = job.models, job.models.task_teacher
    student = models.run_stages(models.recipe.stages, teacher_logits=job.teacher_logits)
    exam = Evaluator.from_split(data.task, data.test, context.tokenizer, models.recipe.stages[-1].length)
    if proof.int8:
        rows = context.rows(models.recipe.training[-1], models.run.seed)
        round_to_int8(student, context.collate(list(rows.select(range(256)))))
    scored = [(student, context.bf16 and not proof.int8)]
    if task_teacher is not None and not proof.prompt:
        scored.append((task_teacher.model, context.bf16))  # its linear layers may be in bfloat16
    scores = [
        exam.example_scores(metrics.logits(model, exam.rows, context.collate, bf16=bf16)) for model, bf16 in scored
    ]
    wrong = [1 - each for each in scores if each is not None]
    found = {"score": 1 - wrong[0].mean(), "parameters": student.num_parameters()}
    return found | ({"teacher": 1 - wrong[1].mean()} if len(wrong) > 1 else {}), wrong[0]


def round_to_int8(student: Any, batch: Mapping[str, Tensor]) -> None:
    """Let a model compute as its int8 file will, with the ranges that it shows on a batch."""
    labels = Objective((Term("bert.labels"),), Shape.from_config(student.config), kind="classification")
    step = q8bert.QuantizationAware(student, None, labels)
    with torch.no_grad():
        step.train()(**batch)


def score_text(
    models: StageModels, stages: Sequence[Any], proof: Proof, *, untrained: bool
) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return nats for a token of held-out text, or the KL to the teacher on own text; and those of each token."""
    last, context = stages[-1], models.context
    if untrained:
        wrong = nats(models, last)
        return {"nats": wrong.mean()}, wrong
    with patch.object(training_stage, "train", wraps=training_stage.train) as train:
        student = models.run_stages(stages)
    if proof.without == "rate":
        tokens, wrong = detect(train.call_args.args[0], models, last)
        return {"nats": wrong.mean(), "parameters": student.num_parameters(), "tokens": tokens}, wrong
    if proof.without == "step" and proof.teacher == "lm":
        teacher = models.teacher(last)
        assert teacher is not None
        rows = context.rows(last, stage_seed(last, models.run), held_out=True)
        wrong = kl_on_own_text(student, teacher.model, rows, context.collate, pad=context.tokenizer.pad_token_id)
        return {"kl": wrong.mean()}, wrong
    wrong = nats(models, last, student)
    found = {"nats": wrong.mean(), "parameters": student.num_parameters()}
    if proof.without == "teacher" and (teacher := models.teacher(last)) is not None:
        found["teacher"] = nats(models, last, teacher.model).mean()
    return found, wrong


def nats(models: StageModels, stage: Stage, student: Any = None) -> NDArray[Any]:
    """Return -log p of each token of held-out text that the stage's corruption asks for.

    None as the student: an n-gram of the rows that the stage reads.
    """
    context, seed, corrupt = models.context, stage_seed(stage, models.run), stage.corrupt
    words, read = Words.from_tokenizer(context.tokenizer), context.rows(stage, seed)
    words = replace(words, counts_V=count_tokens(read, words.size))
    held_out = context.rows(stage, seed, held_out=True)
    held_out = held_out.select(range(min(len(held_out), 1500)))
    collate = context.collate
    if student is not None and stage.head == "seq2seq":
        collate = Seq2SeqCollate(context.tokenizer, student)
    model = None
    if student is None and corrupt is not None:
        seen = read.select(range(min(len(read), (stage.steps or 1) * stage.batch)))
        texts = [targets(corrupt(collate([row]), words=words)) for row in seen] if stage.head == "seq2seq" else None
        model = NGram(texts or seen["input_ids"], words.size)
    found = []
    torch.manual_seed(0)
    for start in range(0, len(held_out), 32):
        batch = collate(list(held_out.select(range(start, min(start + 32, len(held_out))))))
        batch = corrupt(batch, words=words) if corrupt is not None else batch
        batch = batch if student is None else {name: value.to(student.device) for name, value in batch.items()}
        at_BL = batch["labels"] != IGNORE_INDEX
        if model is not None:
            found.append(model.nats(batch, words.mask))
        else:
            with evaluating(student), torch.no_grad(), torch.random.fork_rng():
                logits_RV = logits_at(student, batch, at_BL).float()
            found.append(cross_entropy(logits_RV, batch["labels"][at_BL], reduction="none").cpu().numpy())
    return np.concatenate(found)


def detect(step: Any, models: StageModels, stage: Stage) -> tuple[NDArray[Any], NDArray[Any]]:
    """Let a step's generator replace tokens of held-out text, and its discriminator tell which.

    Returns each token with 1 where it is a replacement, (2, tokens), and -log p of the discriminator for it.
    """
    context, corrupt, words = models.context, stage.corrupt, Words.from_tokenizer(models.context.tokenizer)
    assert corrupt is not None
    rows = context.rows(stage, stage_seed(stage, models.run), held_out=True)
    rows = rows.select(range(min(len(rows), 1500)))
    detector, seen = step.discriminate.student, dict[str, Any]()
    step.discriminate.register_forward_pre_hook(lambda module, args, batch: seen.update(batch), with_kwargs=True)
    detector.register_forward_hook(lambda module, args, out: seen.update(logits=out.logits))
    tokens, found = [], []
    torch.manual_seed(0)
    with evaluating(step), torch.no_grad():
        for start in range(0, len(rows), 32):
            batch = corrupt(context.collate(list(rows.select(range(start, min(start + 32, len(rows)))))), words=words)
            step(**{name: value.to(detector.device) for name, value in batch.items()})
            real_BL, replaced_BL = seen["attention_mask"].bool(), seen["labels"]
            wrong_BL = binary_cross_entropy_with_logits(seen["logits"].float(), replaced_BL.float(), reduction="none")
            tokens.append(torch.stack([seen["input_ids"][real_BL], replaced_BL[real_BL]]).cpu().numpy())
            found.append(wrong_BL[real_BL].cpu().numpy())
    return np.concatenate(tokens, 1), np.concatenate(found)


def guess_by_rate(tokens: NDArray[Any]) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return -log p by how often the same token is a replacement at all other places."""
    ids, replaced = tokens
    times, of_them = np.bincount(ids), np.bincount(ids, replaced)
    p = (of_them[ids] - replaced + replaced.mean()) / times[ids]
    wrong = -np.log(np.where(replaced > 0, p, 1 - p))
    return {"nats": wrong.mean()}, wrong


def kl_on_own_text(student: Any, teacher: Any, rows: Any, collate: Any, *, pad: int) -> NDArray[Any]:
    """Return KL(student || teacher) in nats at every token that the student writes after 16 tokens of 256 rows."""
    torch.manual_seed(0)
    found = []
    for start in range(0, 256, 64):
        first = collate(list(rows.select(range(start, start + 64))))
        batch = {name: value[:, :16].to(student.device) for name, value in first.items() if value.ndim == 2}
        with evaluating(student), torch.no_grad():
            text = sample_continuations(student, batch, prompt=16, new_tokens=32, pad=pad, temperature=1.0)
            own, his = (model(input_ids=text["input_ids"], attention_mask=text["attention_mask"]).logits.log_softmax(-1)
                        for model in (student, teacher))  # fmt: skip
        found.append((own.exp() * (own - his)).sum(-1)[text["labels"] != IGNORE_INDEX].cpu().numpy())
    return np.concatenate(found)


def targets(batch: Mapping[str, Tensor]) -> list[int]:
    """Return what a decoder is given and then asked for, of a batch of one row."""
    return [int(batch["decoder_input_ids"][0, 0]), *batch["labels"][0].tolist()]


class NGram:
    """A bigram model of both neighbours: P(w | left, right) ~ P(w | left) P(right | w); Witten and Bell's smoothing."""

    def __init__(self, texts: Any, size: int) -> None:
        pairs = np.zeros((size, size))
        for ids in texts:
            np.add.at(pairs, (np.asarray(ids[:-1]), np.asarray(ids[1:])), 1)
        self.single = (pairs.sum(0) + 1) / (pairs.sum() + size)
        kinds = (pairs > 0).sum(1, keepdims=True)
        self.after = (pairs + np.maximum(kinds, 1) * self.single) / (pairs.sum(1, keepdims=True) + np.maximum(kinds, 1))

    def nats(self, batch: Mapping[str, Tensor], mask: int | None) -> NDArray[Any]:
        """Return -log P of each label, given its neighbours as far as they are to be seen."""
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        found = []
        for row, at in zip(*np.nonzero(labels != IGNORE_INDEX), strict=True):
            left = right = None
            if "decoder_input_ids" in batch:
                left = batch["decoder_input_ids"][row, at].item()
            elif "target_mapping" in batch:  # places of the targets, whose neighbours may be targets too
                place = int(batch["target_mapping"][row, at].argmax())
                targets = set(batch["target_mapping"][row].argmax(-1)[batch["labels"][row] != IGNORE_INDEX].tolist())
                left = ids[row, place - 1] if place - 1 not in targets else None
                right = ids[row, place + 1] if place + 1 < ids.shape[1] and place + 1 not in targets else None
            elif mask in ids:
                left = ids[row, at - 1] if ids[row, at - 1] != mask else None
                right = ids[row, at + 1] if at + 1 < ids.shape[1] and ids[row, at + 1] != mask else None
            else:
                left = ids[row, at]
            p_V = self.single if left is None else self.after[left]
            p_V = p_V if right is None else p_V * self.after[:, right]
            found.append(-math.log(p_V[labels[row, at]] / p_V.sum()))
        return np.array(found)


def pretrained(folder: Path, corpus: str | None, recipe: Recipe, *, teacher: str, data: Any = None) -> None:
    """Run a recipe's stages up to a task's head into `folder`."""
    with tempfile.TemporaryDirectory() as out:
        run = Path(out) / "run"
        compress.pretrain(teacher=teacher, recipe=recipe, corpus=corpus, data=data, out=run, console=Console())
        for file in (run / "student").iterdir():
            if file.name != "checksums.json":
                file.rename(folder / file.name)


def from_scratch(name: str, proof: Proof, args: argparse.Namespace, folder: Path) -> None:
    """Train the first stage of a recipe from random weights into `folder`."""
    recipe = adapt(Recipe.load(name), replace(proof.enlarge(args), stages=(0,)))
    student = recipe.student.model_copy(update={"init": "scratch"})
    teacher = load_made_teacher("vocabulary", args)
    pretrained(folder, args.corpus, recipe.model_copy(update={"student": student}), teacher=teacher)


def _teach_answers(args: argparse.Namespace, folder: Path) -> None:
    """Let the language model read prompts with their answers, of all rows that no student is given."""
    whole, order = draw(args.data)
    prompt = PROOFS["prompted"].prompt
    assert prompt is not None
    words = [prompt.labels[name][0] for name in label_names(prompt, whole.task.labels)]
    others = whole.train.select(np.sort(order[args.rows + 800 :]))
    with tempfile.TemporaryDirectory() as made:
        text = Path(made) / "answers.txt"
        rows = (prompt.render(row["text"], None, words[row["label"]]) for row in others)
        text.write_text("\n\n".join(" ".join(row.split()) for row in rows), encoding="utf-8")
        proof = replace(LM, student={"layers": None}, text={**LM.text, "steps": 8000}, stages=(0,))
        pretrained(folder, str(text), adapt(Recipe.load("minillm"), proof), teacher=load_made_teacher("lm", args))


def _make_vocabulary(args: argparse.Namespace, folder: Path) -> None:
    texts = load_corpus(args.corpus).documents()
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=PIECES, special_tokens=special, show_progress=False)
    made.train_from_iterator((text for text, _ in zip(texts, range(2000), strict=False)), trainer)
    spans = [f"<extra_id_{number}>" for number in reversed(range(SPANS))]
    known = made.get_vocab()
    pieces = {piece: at for at, piece in enumerate([*sorted(known, key=lambda piece: known[piece]), *spans])}
    tokenizer = BertTokenizer(
        vocab=pieces, do_lower_case=True, model_max_length=128, additional_special_tokens=spans, eos_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=len(pieces), max_position_embeddings=128, hidden_size=128, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


MADE: Mapping[str, Callable[[argparse.Namespace, Path], None]] = {
    "vocabulary": _make_vocabulary,
    "lm": partial(from_scratch, "minillm", LM),
    "answering": _teach_answers,
    "electra": partial(from_scratch, "electra-small", PROOFS["electra-small"]),
    "t5": partial(from_scratch, "t5-spans", PROOFS["t5-spans"]),
}


def load_made_teacher(name: str, args: argparse.Namespace) -> str:
    """Return the folder of a teacher that is made here, kept from an earlier run where there is one."""
    if args.corpus is None:
        sys.exit(f"{name}: give --corpus")
    enlarged = (1, 1, None) if name == "vocabulary" else (args.longer, args.wider, args.hidden)
    size = "" if enlarged == (1, 1, None) else "-{:g}-{}-{}".format(*enlarged)
    if name == "answering":  # it must not have read the rows of another draw
        size += f"-{hash_value([args.data, args.rows])[:12]}"
    folder = home() / "recipes-for-real" / f"{name}-{load_corpus(args.corpus).fingerprint[:12]}{size}"
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            MADE[name](args, made)
    return str(folder)


def tune_t5(folder: str, splits: Mapping[str, Any]) -> str:
    """Fine-tune a T5 to answer the task as text; return its folder, beside `folder`."""
    answers = Path(f"{folder}-tuned-{len(splits['train'])}")
    if not answers.is_dir():
        recipe = adapt(Recipe.load("t5"), PROOFS["t5"])
        recipe = control(recipe, PROOFS["t5"], {"steps": 1000})
        student = recipe.student.model_copy(update={"layers": None})
        with atomic_folder(answers) as made:
            pretrained(made, None, recipe.model_copy(update={"student": student}), teacher=folder, data=dict(splits))
    return str(answers)


def report(name: str, proof: Proof, runs: dict[str, Any], errors: dict[str, Any], args: argparse.Namespace) -> None:
    """Compare the sides row by row, and write what was found."""
    ours, theirs = (np.concatenate(errors[side]) for side in ("recipe", "control"))
    lead = float((theirs - ours).mean())
    error = float((theirs - ours).std() / math.sqrt(len(ours)))
    rows = None if "=" in args.data else args.rows
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    verdict = "works" if lead > SURE * error else "no better than the control"
    found = {
        "recipe": name, "control": proof.without if proof.without in UNTRAINED else f"without {proof.without}",
        "labelled": rows, "unlabelled": args.unlabelled, "effort": args.effort, "seeds": args.seeds,
        "longer": args.longer, "wider": args.wider, "hidden": args.hidden, "gpu": gpu,
        "scored": len(ours), "lead": lead, "standard_error": error, "verdict": verdict, "runs": runs,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    write_result(args.out / f"{name}.json", found, ("compress", "torch", "transformers"))
    print(f"{name}: {verdict}: leads by {lead:.4f} (standard error {error:.4f})", flush=True)


if __name__ == "__main__":
    main()
