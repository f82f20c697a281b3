"""Run a training stage, a function from model to model that minimises an objective."""

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments, set_seed

from compress import io
from compress.arrays import whole_numbers
from compress.config.reference import options
from compress.config.stages import Stage
from compress.console import warn
from compress.data.cache import home
from compress.data.collate import (
    LanguageSampled,
    LengthGrouped,
    Order,
    QueryGrouped,
    Seq2SeqCollate,
    TokenBudget,
)
from compress.data.masking import Words, count_tokens
from compress.errors import DamagedError, ObjectiveError, RecipeError, RunError
from compress.io import atomic_folder, verify
from compress.kinds import Kind
from compress.machine import count_processes
from compress.models.checkpoints import save_tokenizer
from compress.models.heads import fit_new_output
from compress.models.memory import is_dispatched
from compress.models.precision import cast_linear_layers
from compress.models.signals import train_faster
from compress.models.teacher import Teacher
from compress.slicing.shape import Shape
from compress.training.codebook import rounded_table
from compress.training.compilation import compile_layers
from compress.training.context import TrainingContext
from compress.training.embedding_rows import only_tokens_in_use
from compress.training.logging import Journal, forget_after
from compress.training.objective import Objective
from compress.training.processes import (
    forget_received,
    from_first,
    share_folder,
    wait_for_all,
)
from compress.training.run import Run
from compress.training.schedule import (
    AutoLength,
    Length,
    TimeLimit,
    learning_rate,
)
from compress.training.scoring import Scoring, choose_scoring, improves
from compress.training.sharding import (
    ShardedTrainer,
    Sharding,
    gather_weights,
    is_split,
)
from compress.training.step import Distillation, Score, Step
from compress.training.teacher_cache import (
    OUTPUTS_ENCODING,
    TeacherCache,
    cache_logits,
    explain_uncacheable,
    teacher_cache,
)
from compress.training.tracking import report_to_tracker
from compress.training.trainer import (
    Corrupt,
    StepTrainer,
    find_checkpoint,
    read_steps,
)

CHECKPOINT_STEPS = 200
"""Least number of steps between checkpoints: writing, flushing and hashing a checkpoint
takes as long as several steps."""
MOST_CACHED = 2_000_000_000
"""Most bytes of a teacher's hidden states and attention scores, in bfloat16, that
`cache_teacher: auto` caches."""
EPOCHS_OF_TEXT = 40
"""Passes over the same text beyond which nothing is learned: Muennighoff et al. 2023,
arXiv:2305.16264, Sec. 6."""


@dataclass(frozen=True)
class Trained:
    """Record the cost and result of a stage, over all processes that worked on it in
    turn.

    steps, examples     optimiser steps, and examples seen
    seconds             of wall time; peak_rss_mb: the most memory that one process held
    score, best_step    the best score and its step; None if the stage is not scored
    note                the warning of the step when it finished
    measure             what the score is: see `Scoring`
    """

    steps: int
    examples: int
    seconds: float
    score: float | None
    best_step: int | None
    peak_rss_mb: float = 0.0
    note: str | None = None
    measure: str | None = None

    @staticmethod
    def read(folder: Path) -> "Trained":
        """Read the record in a finished stage's folder."""
        return Trained(**io.parse_json(folder / "training.json")["trained"])

    def write(self, folder: Path) -> None:
        """Write the record next to the stage's model."""
        io.write_json(folder / "training.json", {"trained": asdict(self)})


def train(
    step: Step,
    stage: Stage,
    rows: Dataset,
    context: TrainingContext,
    run: Run,
    *,
    corrupt: Corrupt | None = None,
    scoring: Scoring | None = None,
    sharding: Sharding | None = None,
) -> Trained:
    """Minimise `step` over encoded `rows`; its student ends with the weights of the
    best score, or the last ones. With a `sharding`, the student is split.

    Training resumes from the newest intact checkpoint of this stage, and ends with the
    same weights as without the interruption. Raises CompressError if the loss is not
    finite.
    """
    folder = run.stage(stage.name)
    seconds = context.seconds(stage.name)
    notify = partial(warn, context.console)
    train_faster(step.student)
    order = batches(stage, rows, run.seed)
    if stage.lr == "auto":
        stage = stage.model_copy(
            update={"lr": learning_rate(Shape.from_config(step.student.config).hidden)}
        )
    per_epoch = steps_per_epoch(stage, order)
    length = None
    if stage.open_ended or seconds is not None:
        rows_scored, graded = (scoring.rows, scoring.graded) if scoring else (0, False)
        length = Length.plan(
            stage,
            per_epoch,
            rows=rows_scored,
            graded=graded,
            per_query=rows_per_query(rows),
        )
        if not stage.open_ended:
            length = replace(
                length,
                least=plan_steps(stage, per_epoch),
                most=plan_steps(stage, per_epoch),
            )
    scored = scoring is not None and stage.evaluate > 0
    arguments = _arguments(
        step,
        stage,
        per_epoch,
        folder,
        seed=run.seed,
        scored=scored,
        length=length,
        bf16=context.bf16,
    )
    if note := explain_repetition(stage, per_epoch, rows):
        notify(note)
    # a corrupted batch has tokens that are not in the rows; LAMB and Adafactor average
    # over the full table
    partial_table = step.only_rows and corrupt is None and stage.optimizer == "adamw"
    steps = plan_steps(stage, per_epoch)
    with _prepared(step, rows, steps, partial_table, sharding) as trainer_class:
        trainer = trainer_class(
            step,
            stage,
            rows,
            order=order,
            collate=context.collate,
            folder=folder,
            args=arguments,
        )
        trainer.score = scoring.score if scoring else None
        trainer.corrupt = corrupt
        if length is not None:
            trainer.open_end(AutoLength(length, seconds, folder / "limit.json"))
        checkpoint = from_first(lambda: find_checkpoint(folder, notify))
        received = None
        if checkpoint is not None:
            received = share_folder(checkpoint)
            check_processes(stage.name, order, received)
        journal = None
        if run.main:
            # the rest of an interrupted checkpoint
            shutil.rmtree(arguments.output_dir or "", ignore_errors=True)
            forget_after(
                run.path / "log.jsonl",
                stage.name,
                read_steps(checkpoint),
                notify,
            )
            journal = Journal(
                stage.name,
                run.path / "log.jsonl",
                run.path / "tensorboard",
                context.console,
                batch=stage.batch,
                seconds=seconds,
                length=trainer.length,
            )
            trainer.add_callback(journal)
            trainer.on_save = run.save_seconds
        try:
            with report_to_tracker(trainer, stage.name, run, context.console):
                trainer.train_from(received)
            # other processes read the folder that is removed next
            wait_for_all()
            if received is not None and checkpoint is not None:
                forget_received(received, checkpoint)
        finally:
            if journal is not None:
                journal.close()
                shutil.rmtree(str(arguments.output_dir), ignore_errors=True)
        spent = trainer.spent
        steps = trainer.state.global_step
        trainer.restore_best()
        short = context.explain_short(steps, length, spent.seconds)
        notes = [f"{stage.name}: {note}" for note in (short, step.finish()) if note]
        for note in notes:
            notify(note)
        best = trainer.state.best_global_step
        score = trainer.state.best_metric if best else None
        examples = (
            steps * stage.batch
            if isinstance(order, LengthGrouped)
            else round(steps * len(rows) / per_epoch)
        )
        return Trained(
            steps,
            examples,
            spent.seconds,
            score,
            best,
            spent.peak_rss_mb,
            " ".join(notes) or None,
            measure=scoring.measure if scoring and score is not None else None,
        )


@contextmanager
def _prepared(
    step: Step,
    rows: Dataset,
    steps: int,
    partial_table: bool,
    sharding: Sharding | None,
) -> Iterator[type[StepTrainer]]:
    """Split the student for training, or else train only the tokens in use and compile
    its layers; yield the trainer class."""
    if sharding is not None:
        sharding.split(step.student)
        yield ShardedTrainer
        return
    with (
        only_tokens_in_use(step.student, rows) if partial_table else nullcontext(),
        compile_layers(step, steps),
    ):
        yield StepTrainer


def check_processes(stage: str, order: Order, checkpoint: Path) -> None:
    """Raise RunError if a checkpoint was written by another number of processes and the
    rows of a batch depend on that number."""
    began = len(list(checkpoint.glob("rng_state*.pth")))
    now = count_processes()
    if began != now and not isinstance(order, LengthGrouped):
        raise RunError(
            f"stage {stage}: {began} process{'es' * (began > 1)} began it and {now} "
            "would continue it, but its batches depend on that number: expected "
            f"{began} until this stage is done"
        )


def batches(stage: Stage, rows: Dataset, seed: int) -> Order:
    """Choose the order of rows: batches of a fixed size, of one language, of whole
    queries, or within a budget of tokens."""
    if stage.language_sampling is not None and "part" in rows.column_names:
        passes = shares(stage, count_processes())[1] * count_processes()
        text = stage.batch * stage.length
        budgets = (text // passes, (stage.tokens or text) // passes)
        return LanguageSampled(
            rows["part"][:],
            rows["paired"][:],
            whole_numbers(rows, "length"),
            budgets,
            power=stage.language_sampling,
            passes=passes,
            seed=seed,
        )
    if stage.tokens is None and "query" in rows.column_names:
        micro, _ = shares(stage, count_processes())
        if "asker" in rows.column_names:  # a query is kept with its relevant passage
            relevant = (np.asarray(rows["text"][:]) == rows["asker"][:]) | (
                np.asarray(rows["relevance"][:]) > 0
            )
        else:
            relevant = np.asarray(rows["labels"][:]) > 0
        return QueryGrouped(
            rows["query"][:], whole_numbers(rows, "length"), relevant, micro, seed=seed
        )
    if stage.tokens is None:
        return LengthGrouped(
            whole_numbers(rows, "length"), stage.batch, seed=seed, whole=True
        )
    _, accumulation = shares(stage, count_processes())
    return TokenBudget(
        whole_numbers(rows, "length"),
        stage.tokens // (accumulation * count_processes()),
        seed=seed,
    )


def steps_per_epoch(stage: Stage, order: Order) -> int:
    """Count the optimiser steps of an epoch."""
    if isinstance(order, LengthGrouped):
        return len(order) // stage.batch
    _, accumulation = shares(stage, count_processes())
    return max(1, len(order) // (accumulation * count_processes()))


def rows_per_query(rows: Dataset) -> float:
    """Return the mean number of rows of a query; 1 for rows that stand alone."""
    return (
        len(rows) / len(np.unique(rows["query"][:]))
        if "query" in rows.column_names
        else 1.0
    )


def plan_steps(stage: Stage, per_epoch: int) -> int:
    """Count the optimiser steps of a stage, given the steps of an epoch; the most if
    its length is open."""
    if stage.steps is None and stage.epochs == "auto":
        total = Length.plan(stage, per_epoch).most
    else:
        total = stage.steps or max(1, math.ceil(float(stage.epochs) * per_epoch))
    return (
        total
        if stage.max_epochs is None
        else min(total, max(1, math.ceil(stage.max_epochs * per_epoch)))
    )


def explain_repetition(stage: Stage, per_epoch: int, rows: Dataset) -> str:
    """Explain how often the stage's steps repeat a text that is too short for them; ''
    if it is not."""
    steps = stage.steps
    total = plan_steps(stage, per_epoch)
    if stage.data != "text" or steps is None or steps <= EPOCHS_OF_TEXT * per_epoch:
        return ""
    text = (
        f"{stage.name}: {steps:,} steps are {steps / per_epoch:,.0f} passes over "
        f"{whole_numbers(rows, 'length').sum():,} tokens"
    )
    if total < steps:
        return (
            f"{text}: cut to {total:,} steps; add text, or set steps (--set) to keep "
            "all of them"
        )
    return (
        f"{text}, of which those beyond {EPOCHS_OF_TEXT} teach nothing; add text, or "
        "set fewer steps"
    )


def _arguments(
    step: Step,
    stage: Stage,
    per_epoch: int,
    folder: Path,
    *,
    seed: int,
    scored: bool,
    length: Length | None,
    bf16: bool,
) -> TrainingArguments:
    micro, accumulation = shares(stage, count_processes())
    total = plan_steps(stage, per_epoch)
    every = max(1, min(total, per_epoch) // stage.evaluate) if scored else total
    if length is not None:
        every = length.every
    return TrainingArguments(
        output_dir=str(folder / ".partial"),
        max_steps=total,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=float(stage.lr),
        lr_scheduler_type="polynomial" if stage.lr_end else stage.schedule,
        lr_scheduler_kwargs={"power": 1.0, "lr_end": stage.lr_end}
        if stage.lr_end
        else {},
        warmup_steps=math.ceil(total * stage.warmup),
        weight_decay=stage.weight_decay,
        adam_beta1=stage.betas[0],
        adam_beta2=stage.betas[1],
        adam_epsilon=stage.eps,
        max_grad_norm=0.0 if step.clip_groups() else stage.clip,
        optim="adamw_torch_fused",
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        data_seed=seed,
        eval_strategy="steps" if scored else "no",
        eval_steps=every,
        metric_for_best_model="score" if scored else None,
        greater_is_better=True if scored else None,
        save_strategy="steps",
        save_steps=stage.checkpoint or max(CHECKPOINT_STEPS, math.ceil(total / 10)),
        logging_steps=max(1, min(50, total // 100)),
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_find_unused_parameters=not isinstance(step, Distillation)
        or "logits" not in step.objective.student_wants,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def shares(stage: Stage, processes: int) -> tuple[int, int]:
    """Split the stage's batch exactly into (examples per forward pass and process,
    accumulated passes).

    With a budget of tokens: (rows of full length per pass and process, passes that use
    it up). Raises RecipeError if the batch cannot be split.
    """
    total = stage.batch if stage.tokens is None else stage.tokens // stage.length
    # batches of text and of translations differ
    if stage.language_sampling is not None:
        total = max(total, stage.batch)
    share, rest = divmod(total, processes)
    micro = min(stage.micro_batch or share, share)
    problem = ""
    if stage.tokens is not None:
        if not share:
            problem = (
                f"tokens {stage.tokens} hold no row of {stage.length} for each "
                f"process: expected at least {stage.length * processes}"
            )
    elif rest:
        problem = (
            f"batch {stage.batch} cannot be split evenly over {processes} processes: "
            f"expected a multiple of {processes}"
        )
    elif share % micro:
        problem = (
            f"micro_batch {micro} does not divide the {share} examples per process: "
            f"expected a divisor, such as {math.gcd(micro, share)}"
        )
    if problem:
        raise RecipeError([f"stage {stage.name}: {problem}"])
    return micro, share // micro


def stage_seed(stage: Stage, run: Run) -> int:
    """Derive the seed of a stage from the run's seed and the stage's name."""
    return (run.seed + int(io.hash_value(stage.name)[:6], 16)) % 2**32


def run_stage(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    context: TrainingContext,
    run: Run,
    *,
    teacher_logits: Any = None,
    origin_D: Tensor | None = None,
    wrap_score: Callable[[Score], Score] | None = None,
    sharding: Sharding | None = None,
) -> PreTrainedModel:
    """Train `student` on the stage's objective and save the result in the stage's
    folder of the run.

    teacher_logits   of the validation split; they add the agreement to each evaluation
    origin_D         of a student cut out of its teacher: the teacher's dimension that
                     each of its own came from
    wrap_score       decorates the scoring function, for example to score subnets of a
                     supernet; default: `step.wrap_score`
    sharding         how to split the student over the processes; None trains it whole

    The seed is derived from the run's and the stage's name, so that a stage does the
    same whether or not earlier stages ran in this process. Returns the step's student,
    which may be another model after the step has finished."""
    if stage.head == "seq2seq":
        context = replace(context, collate=Seq2SeqCollate(context.tokenizer, student))
    seed = stage_seed(stage, run)
    set_seed(seed)
    rows = context.rows(stage, seed)
    if stage.improve and len(rows) == len(
        context.rows(stage.model_copy(update={"augment": None, "corpus": False}), seed)
    ):
        context.console.print(f"{stage.name}: there are no rows besides the task's own")
        _save_result(stage, student, context, run, Trained(0, 0, 0.0, None, None))
        return student
    words = None
    if stage.corrupt or stage.step:
        words = Words.from_tokenizer(context.tokenizer)
        words = (
            replace(words, counts_V=count_tokens(rows, words.size))
            if stage.corrupt
            else words
        )
        words = words.to(PartialState().device)
    corrupt = partial(stage.corrupt, words=words) if stage.corrupt else None
    if teacher and context.bf16 and not is_dispatched(teacher.model):
        cast_linear_layers(teacher.model)
    unit = 1.0
    if stage.head == "task" and context.task.scaled:
        mean, unit = context.data.label_scale
        fit_new_output(student, mean, unit)
    before = copy.deepcopy(student) if stage.improve else None
    languages = (
        context.corpus.language_count
        if "langs" in rows.column_names and context.corpus
        else 0
    )
    if languages > getattr(student.config, "n_langs", languages):
        raise RecipeError(
            [
                f"stage {stage.name}: the corpus has {languages} languages, the "
                f"student {student.config.n_langs}: expected --set "
                f"student.config.n_langs={languages}"
            ]
        )
    step = _make_step(
        stage,
        student,
        teacher,
        context,
        words=words,
        rows=rows,
        origin_D=origin_D,
        unit=unit,
        seed=seed,
    )
    scoring = choose_scoring(
        stage, step, corrupt, context, seed=seed, teacher_logits=teacher_logits
    )
    if scoring is not None:
        wrap = wrap_score or step.wrap_score
        scoring = replace(scoring, score=wrap(scoring.score))
    with ExitStack() as frozen:
        frozen.enter_context(_without(_NOT_TRAINED[stage.train](student)))
        if stage.table == "codebook":
            frozen.enter_context(rounded_table(student, rows))
        trained = train(
            step,
            stage,
            rows,
            context,
            run,
            corrupt=corrupt,
            scoring=scoring,
            sharding=sharding,
        )
    if before is not None and scoring is not None:
        old = from_first(partial(scoring.score, before))
        new = from_first(partial(scoring.score, step.student))
        if not improves(new, old, scoring.rows):
            context.console.print(
                f"{stage.name}: no better on the validation split: the student is "
                "unchanged"
            )
            step.student.load_state_dict(before.state_dict())
            trained = replace(trained, score=old["score"], best_step=0)
    _save_result(stage, step.student, context, run, trained)
    return step.student


def build_objective(
    stage: Stage,
    student: PreTrainedConfig,
    teacher: PreTrainedConfig | None,
    *,
    kind: Kind | None,
    unit: float = 1.0,
) -> Objective:
    """Build the objective of a stage for these models. Raises ObjectiveError if its
    losses cannot compare them."""
    shapes = Shape.from_config(student), Shape.from_config(teacher) if teacher else None
    try:
        return Objective(
            stage.objective,
            *shapes,
            kind=kind if stage.head == "task" else None,
            unit=unit,
        )
    except ObjectiveError as error:
        raise ObjectiveError(f"stage {stage.name}: {error}") from error


def _make_step(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    context: TrainingContext,
    *,
    words: Words | None,
    rows: Dataset,
    origin_D: Tensor | None,
    unit: float,
    seed: int,
) -> Step:
    objective = None
    if stage.objective:
        taught_by = teacher.model.config if teacher else None
        objective = build_objective(
            stage, student.config, taught_by, kind=context.kind, unit=unit
        )
        if stage.reads_unlabelled:
            objective.teacher_wants |= {"logits"}  # which label the rows without labels
        for map_DS in (
            objective.projections.parameters() if origin_D is not None else ()
        ):
            # instead of a random map, which must first be learned
            map_DS.data = torch.eye(len(map_DS))[:, origin_D]
    model = teacher.model if teacher else None
    parameters = options(stage.step.function) if stage.step else {"shown": None}
    cache = None
    if objective and objective.teacher_wants and teacher and "shown" in parameters:
        if not teacher.answers_any_rows:
            if stage.limit_rows is not None:
                raise RecipeError(
                    [
                        f"stage {stage.name}: has `limit_rows`, but {teacher.name} has "
                        "already answered all rows: leave it out"
                    ]
                )
            # additions to the rows were noted when they were encoded
            quiet = replace(context, console=Console(quiet=True))
            known = teacher.known_answers(quiet.split(stage, seed))
            assert known is not None, "they are recorded"
            cache = cache_logits(
                known[rows["text"][:]] if "asker" in rows.column_names else known, rows
            )
        elif stage.cache_teacher is True or (
            stage.cache_teacher
            and cache_pays(stage, objective, teacher, rows, context.time_limit)
        ):
            cache = _open_cache(stage, objective, teacher, rows, context)
    if stage.step is not None:
        offered = {"words": words, "shown": cache}
        taken = {name: offered[name] for name in offered if name in parameters}
        step = stage.step(student, model, objective, **taken)
        if not isinstance(step, Step):
            raise ObjectiveError(
                f"stage {stage.name}: step {stage.step.by} makes a "
                f"{type(step).__name__}; expected a compress.training.step.Step"
            )
        return step
    assert objective is not None, "the recipe was checked"
    return Distillation(student, cache or model, objective)


def _positions(student: PreTrainedModel) -> Iterable[nn.Parameter]:
    """Return the table of absolute positions; empty if positions are relative or
    rotary."""
    return [
        table
        for name, table in student.named_parameters()
        if name.endswith(("position_embeddings.weight", "wpe.weight"))
    ]


_NOT_TRAINED: Final[
    Mapping[str, Callable[[PreTrainedModel], Iterable[nn.Parameter]]]
] = {
    "all": lambda student: (),
    "head": lambda student: student.base_model.parameters(),
    "no positions": _positions,
}
"""The part that a stage trains -> the parameters that are frozen."""


@contextmanager
def _without(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters in this context."""
    frozen = [each for each in parameters if each.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def load_trained(run: Run, stage: str, console: Console) -> Trained | None:
    """Read the record of a stage; None if the stage did not run, or if its record is
    damaged."""
    folder = run.result(stage)
    if not folder.is_dir():
        return None
    try:
        verify(folder)
    except DamagedError as error:
        warn(console, f"{error} The report lacks the cost of stage {stage}.")
        return None
    return Trained.read(folder)


def _save_result(
    stage: Stage,
    student: PreTrainedModel,
    context: TrainingContext,
    run: Run,
    trained: Trained,
) -> None:
    """Write the stage's result, which marks the stage as done."""
    weights = gather_weights(student) if is_split(student) else None
    if not run.main:
        return
    with atomic_folder(run.result(stage.name), sealed=True) as folder:
        student.save_pretrained(folder, state_dict=weights)
        save_tokenizer(folder, context.tokenizer)
        trained.write(folder)
    run.save_seconds()


def cache_pays(
    stage: Stage,
    objective: Objective,
    teacher: Teacher,
    rows: Dataset,
    limit: TimeLimit | None = None,
) -> bool:
    """Return True if caching the teacher's outputs is likely to save time, leaves most
    of the limit, and takes less than MOST_CACHED bytes."""
    if stage.head not in ("task", "encoder") or stage.corrupt or stage.tokens:
        return False
    if explain_uncacheable(teacher.model, objective.teacher_wants):
        return False
    if limit is not None and not limit.answers_in_time(len(rows)):
        return False
    if torch.cuda.is_available() and objective.teacher_wants - {"logits"}:
        return False  # a GPU computes hidden states sooner than it receives them
    per_epoch = len(rows) // stage.batch
    steps = plan_steps(stage, per_epoch)
    if stage.open_ended:
        steps = Length.plan(stage, per_epoch, per_query=rows_per_query(rows)).least
    wants = objective.teacher_wants
    layers = len({n for pairs in objective.pairs for _, n in pairs})
    lengths = whole_numbers(rows, "length")
    shape = Shape.from_config(teacher.model.config)
    size = (
        2
        * lengths.sum()
        * shape.hidden
        * (("embeddings" in wants) + ("layers" in wants) * layers)
    )
    size += 2 * (lengths**2).sum() * shape.heads * ("scores" in wants) * layers
    return bool(steps > per_epoch and size < MOST_CACHED)


def _open_cache(
    stage: Stage,
    objective: Objective,
    teacher: Teacher,
    rows: Dataset,
    context: TrainingContext,
) -> TeacherCache:
    layers = sorted({n for pairs in objective.pairs for _, n in pairs})
    wants = objective.teacher_wants
    computed = [
        OUTPUTS_ENCODING,
        str(teacher.model.dtype),
        teacher.model.device.type,
        context.bf16,
    ]
    computed += [torch.__version__, transformers.__version__]
    vectors = stage.head == "task" and context.task.vectors
    key = io.hash_value(
        [
            teacher.digest,
            rows._fingerprint,
            stage.length,
            sorted(wants),
            layers,
            *computed,
        ]
    )
    folder = home() / "teacher-outputs" / key[:24]
    context.console.print(f"{stage.name}: teacher outputs are cached in {folder}")
    return teacher_cache(
        teacher.model,
        rows,
        context.collate,
        folder,
        wants=wants,
        layers=layers,
        bf16=context.bf16,
        vectors=vectors,
    )
