"""Forecast the time and memory of a distillation, by trying each of its stages for a
few steps."""

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from accelerate import PartialState
from datasets import Dataset
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from compress.arguments import (
    DataLike,
    NameLike,
    TeacherLike,
    check_arguments,
    name_of,
    optional_name,
)
from compress.benchmark.local import race
from compress.commands import distill, pretrain
from compress.commands.label import forecast_answers
from compress.config.choices import AUTO, CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import Recipe, Target
from compress.config.reference import Call
from compress.config.reference import options as options_of
from compress.config.stages import AnyStage, Prune, Stage
from compress.data.cache import is_whole
from compress.data.collate import LengthGrouped, Order
from compress.data.objects import teacher_path
from compress.errors import ExportError
from compress.evaluation import embedding
from compress.evaluation.evaluator import Evaluator
from compress.exporters.artifact import Precision
from compress.exporters.int8 import quantize_dynamic
from compress.exporters.onnx import makes_segments
from compress.exporters.predictor import run_rows
from compress.exporters.rewrite.graph import products
from compress.exporters.session import open_session, read_model
from compress.jobs.ship import LENGTHS
from compress.jobs.stages import StageModels
from compress.latency.measure import exported
from compress.models.teacher import RecordedLogits, Teacher
from compress.prompting.labels import (
    PromptedTeacher,
    build_task_prompt,
    list_texts,
    open_language_model,
)
from compress.prompting.prompt import Prompt
from compress.prompting.vectors import CachedVectors, gives_vectors, open_source
from compress.quantization.certify import PROBE
from compress.quantization.certify import ROWS as ROWS_JUDGED
from compress.quantization.select import ALPHAS, CALIBRATION_ROWS
from compress.records.forecast import Forecast, Phase, size_mb, time_call
from compress.records.latency import Setting
from compress.slicing.shape import Shape
from compress.training.augment import asks_language_model, trains_language_model
from compress.training.context import TrainingContext
from compress.training.finetune import cache_folder, is_ready, load_with_head, with_head
from compress.training.objective import Objective
from compress.training.run import Run
from compress.training.stage import (
    Trained,
    batches,
    cache_pays,
    plan_length,
    plan_steps,
    rows_per_query,
    run_stage,
    stage_seed,
    steps_per_epoch,
)
from compress.training.teacher_vectors import VectorSource
from compress.training.trainer import Score, peak_rss_mb

SHORT, LONG = 4, (20, 60)
"""Steps of a short trial, and minimum and maximum of a long one; the difference gives
the time of a step."""
SECONDS = 6.0
"""Seconds that a long trial should take."""
ROWS, SCORED = 64, 256
"""Batches to train on, and rows of the validation split to score, in a trial."""
RACED = 8
"""Rounds of the race in `ship`."""
LIKELY = 0.1
"""The share of the span between its least and its most seconds after which exporting
mostly ends (docs/LOG.md)."""
SHIPPED = 2.25
"""Size of a bundle relative to its weights: these, plus ONNX with four bytes per
number, and with one."""


@check_arguments
def forecast(
    *,
    teacher: TeacherLike,
    data: DataLike,
    recipe: NameLike | Recipe | CandidateRecipes = AUTO,
    corpus: NameLike | None = None,
    prompt: NameLike | Prompt | None = None,
    columns: DataOptions = DataOptions(),
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Forecast:
    """Forecast the minutes and the memory that `compress.distill` would take with the
    same arguments, on this machine.

    Everything is loaded and checked as for a run; then each stage is tried for a few
    steps on a few rows, from untrained weights. A stage that early stopping ends has a
    minimum and a maximum. For a budget of latency, nothing is raced, and stages are
    tried at the teacher's sizes. A prompted teacher answers a few rows, and an endpoint
    gives one batch of vectors; these are kept for the run, as are encoded rows, and
    made-up ones take the place of the others. Raises a CompressError for anything that
    `distill` would refuse before training.
    """
    console, name = console or Console(quiet=True), teacher_path(teacher)
    prompt = (
        prompt
        if prompt is None or isinstance(prompt, Prompt)
        else Prompt.load(name_of(prompt))
    )
    source: VectorSource | None = (
        open_source(name) if gives_vectors(name, prompted=prompt is not None) else None
    )
    if isinstance(source, CachedVectors):
        source = TrialVectors(source)
    with tempfile.TemporaryDirectory() as scratch:
        prepared = distill.prepare(
            teacher=teacher,
            data=data,
            out=Path(scratch) / "run",
            recipe=recipe,
            corpus=optional_name(corpus),
            prompt=prompt,
            columns=columns,
            length=length,
            options=replace(options, resume=False, track=None),
            console=console,
            vectors=source,
        )
        with prepared as (prepared_models, _):
            models, asked = (
                prepared_models,
                source.forecast() if isinstance(source, TrialVectors) else [],
            )
            if prompt is not None:
                models, asked = _try_prompt(name, prompt, models, options, console)
            with console.status("trying each stage"):
                return _forecast_distillation(
                    models, asked, Path(scratch) / "home", length.minutes
                )


@check_arguments
def forecast_pretraining(
    *,
    teacher: TeacherLike,
    recipe: NameLike | Recipe,
    corpus: NameLike | None = None,
    data: DataLike | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Forecast:
    """Forecast the minutes and the memory that `compress.pretrain` would take, like
    `forecast`."""
    console = console or Console(quiet=True)
    with tempfile.TemporaryDirectory() as scratch:
        prepared = pretrain.prepare(
            teacher=teacher,
            recipe=recipe,
            out=Path(scratch) / "run",
            corpus=optional_name(corpus),
            data=data,
            length=length,
            options=replace(options, resume=False, track=None),
            console=console,
        )
        with prepared as models, console.status("trying each stage"):
            trials = Trials(
                replace(models.context, console=Console(quiet=True)),
                models.run,
                Path(scratch) / "home",
            )
            phases = forecast_stages(
                replace(models, context=trials.context), models.recipe.stages, trials
            )
            title = (
                f"{models.recipe.name}: {corpus or data}, tokens of "
                f"{models.base_teacher.name}"
            )
            return Forecast(title, tuple(phases), peak_rss_mb(), length.minutes)


@dataclass
class TrialVectors:
    """Stand in for an endpoint of vectors: ask for one batch of texts, and make up the
    other vectors.

    missing  texts that a run would have to ask for; seconds: what the batch took;
             width: numbers of a vector
    """

    source: CachedVectors
    missing: int = 0
    seconds: float = 0.0
    width: int = 0

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def digest(self) -> str:
        """Return another digest than the source's once vectors are made up, since
        similarities are cached by it."""
        return f"{self.source.digest}-trial" if self.missing else self.source.digest

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float16]:
        """Return the vectors if they are all known, else random ones."""
        left = self.source.list_missing(texts)
        if left and not self.width:
            began, asked = (
                time.perf_counter(),
                left[: self.source.encoder.endpoint.batch],
            )
            self.width = self.source.vectors(asked).shape[1]
            self.seconds, left = time.perf_counter() - began, left[len(asked) :]
        if not left:
            return self.source.vectors(texts)
        self.missing += len(left)
        return (
            np.random.default_rng(0)
            .normal(size=(len(texts), self.width))
            .astype(np.float16)
        )

    def forecast(self) -> list[Phase]:
        """Forecast the requests for the missing texts: all concurrent ones at the same
        time, to one after another."""
        if not self.missing:
            return []
        endpoint = self.source.encoder.endpoint
        seconds = math.ceil(self.missing / endpoint.batch) * self.seconds
        speed, disk_mb = (
            endpoint.batch / self.seconds,
            2 * self.width * self.missing / 1e6,
        )
        times, note = (
            (seconds / endpoint.concurrency, seconds),
            f"{self.missing:,} texts",
        )
        return [Phase(f"asking {self.name}", (0, 0), times, speed, note, disk_mb)]


def _try_prompt(
    name: str,
    prompt: Prompt,
    models: StageModels,
    options: RunOptions,
    console: Console,
) -> tuple[StageModels, list[Phase]]:
    """Return the models with made-up answers of a prompted teacher, and the forecast of
    its own."""
    context, data = models.context, models.context.data
    task_prompt = build_task_prompt(
        prompt, data.task, train=data.train, seed=options.seed
    )
    language_model = open_language_model(
        name, allow_pickle=options.allow_pickle, bf16=context.bf16
    )
    labeller = PromptedTeacher(language_model, task_prompt, console)
    splits = [
        split for split in (data.validation, data.train, data.test) if split is not None
    ]
    texts = [each for split in splits for each in list_texts(split)]
    phases = forecast_answers(labeller, texts, seed=options.seed, console=console)
    logits = {
        split._fingerprint: np.zeros((len(split), data.task.outputs), np.float32)
        for split in splits
    }
    teacher = replace(
        models.base_teacher, name=labeller.name, recorded=RecordedLogits(logits)
    )
    return replace(models, base_teacher=teacher), phases


def _forecast_distillation(
    models: StageModels, asked: Sequence[Phase], home: Path, limit: float | None
) -> Forecast:
    """Try the phases after those in which the teacher is asked."""
    context, run, base_teacher = (
        replace(models.context, console=Console(quiet=True)),
        models.run,
        models.base_teacher,
    )
    recipe, data, raced = (
        models.recipe,
        context.data,
        bool(models.recipe.target.budgets),
    )
    if raced:
        recipe = recipe.model_copy(
            update={
                "target": Target.model_validate(
                    {"layers": base_teacher.model.config.num_hidden_layers}
                )
            }
        )
    trials = Trials(context, run, home)
    phases, teacher = list(asked), base_teacher
    if base_teacher.recorded is None:
        phase, teacher = trials.try_teacher(recipe.teacher, base_teacher)
        phases.append(phase)
    if trains_language_model(recipe):
        phases += _language_model(recipe.teacher_lm, base_teacher, trials)
        brief = recipe.teacher_lm.model_copy(update={"steps": SHORT, "evaluate": 0})
        recipe = recipe.model_copy(update={"teacher_lm": brief})
    models = replace(models, recipe=recipe, task_teacher=teacher, context=context)
    phases += forecast_stages(models, recipe.stages, trials, raced=raced)
    phases.append(trials.try_shipping(teacher, recipe.stages[-1].length))
    title = (
        f"{recipe.name}: {base_teacher.name} on {data.name}, {len(data.train):,} rows"
    )
    return Forecast(title, tuple(phases), peak_rss_mb(), limit)


def forecast_stages(
    models: StageModels,
    stages: Sequence[AnyStage],
    trials: "Trials",
    *,
    raced: bool = False,
) -> list[Phase]:
    """Try the stages one after another. raced: a race would choose the sizes of prune
    stages, which are given here."""
    phases, student = list[Phase](), None
    for stage in stages:
        if isinstance(stage, Prune):
            began = time.perf_counter()
            trials.student = student = models.prune(stage, student)
            seconds, note = (
                time.perf_counter() - began,
                "after a race of files, which is not counted" if raced else "",
            )
            phases.append(Phase(stage.name, seconds=(seconds, seconds), note=note))
            continue
        # a language model that is trained for a trial must not be cached
        with trials.scratch_cache():
            teacher = models.teacher(stage)
        units = models.choose_units(stage, teacher)
        student = models.student(stage, student, teacher, units)
        phase, student = trials.try_stage(
            stage, student, teacher, models.origin(stage, student, units)
        )
        phases.append(phase)
    return phases


def _language_model(stage: Stage, teacher: Teacher, trials: "Trials") -> list[Phase]:
    """Forecast the training of a language model of the teacher, if the checkpoint has
    none."""
    context = trials.context
    found = load_with_head(
        teacher.name,
        teacher.folder,
        "masked_lm",
        kind=context.kind,
        allow_pickle=teacher.pickled,
    )
    if found.trained:
        return []
    text = context.text
    if is_whole(
        cache_folder(
            teacher, (f"lm-{text.name}", text.fingerprint), stage, context, trials.run
        )
    ):
        return [Phase(stage.name, cached=True)]
    return [trials.try_stage(stage, found.model.requires_grad_(True), None)[0]]


@dataclass(frozen=True)
class FewRows(TrainingContext):
    """A TrainingContext whose stages train on the rows `few`."""

    few: Dataset | None = None

    def rows(self, stage: Stage, seed: int, *, held_out: bool = False) -> Dataset:
        """Return these rows; held-out rows are unchanged."""
        return (
            super().rows(stage, seed, held_out=held_out)
            if held_out or self.few is None
            else self.few
        )


@dataclass
class Trials:
    """Tries stages of a run. home: a temporary cache for the trials."""

    context: TrainingContext
    run: Run
    home: Path
    seconds_per_scored_row: float = 0.0
    student_mb: float = 0.0
    student: PreTrainedModel | None = None

    def try_teacher(self, stage: Stage, base_teacher: Teacher) -> tuple[Phase, Teacher]:
        """Forecast the fine-tuning of a teacher; return it with a head for the task,
        trained or not."""
        teacher = base_teacher
        if teacher.trained:
            phase = Phase(stage.name, cached=True, note="has a head for the task")
        elif is_ready(teacher, stage, self.context, self.run):
            phase, teacher = (
                Phase(stage.name, cached=True),
                with_head(teacher, stage, self.context, self.run),
            )
        else:
            phase, _ = self.try_stage(
                stage, copy.deepcopy(teacher.model).requires_grad_(True), None
            )
        teacher.model.to(PartialState().device)
        return phase, teacher

    def try_shipping(self, teacher: Teacher, length: int, students: int = 1) -> Phase:
        """Forecast `ship`, for a number of students like the last one that was tried.

        Both files of the student and one of the teacher are exported, raced, and run on
        few rows, as for choosing, certifying and measuring int8. The minimum assumes
        that int8 is near enough to fp32 as it is written; the maximum, that it is
        smoothed and each product tried in float32. A teacher that cannot be exported,
        or is not a model here, is left out.
        """
        assert self.student is not None, "a stage was tried"
        data, threads, setting = (
            self.context.data,
            os.cpu_count() or 1,
            Setting(1, 1, length),
        )
        split = data.validation if data.test is None else data.test
        rows = (
            Evaluator.from_split(data.task, split, self.context.tokenizer, length)
            .subsample(SCORED)
            .rows
        )
        precisions: dict[str, Precision] = {
            "fp32": "fp32",
            "int8": "int8",
            "teacher": "fp32",
        }
        configs = {
            "fp32": self.student.config,
            "int8": self.student.config,
            "teacher": teacher.model.config,
        }
        segments, seconds, choosing = makes_segments(self.context.tokenizer), 0.0, 0.0
        for names in (("fp32", "int8", "teacher"), ("fp32", "int8"))[
            teacher.recorded is not None :
        ]:
            chosen, began = {name: configs[name] for name in names}, time.perf_counter()
            try:
                export = exported(
                    chosen,
                    setting,
                    precision=precisions,
                    kind=data.task.kind,
                    segments=segments,
                )
                with export as files:
                    seconds = time.perf_counter() - began
                    lengths = dict.fromkeys(min(each, length) for each in LENGTHS)
                    raced = partial(
                        race, files, [Setting(1, 1, each) for each in lengths], rounds=2
                    )
                    seconds += RACED / 2 * time_call(raced)
                    per_row = {}
                    for name, file in files.items():
                        run = partial(
                            run_rows,
                            open_session(file, threads=threads),
                            rows,
                            threads=threads,
                        )
                        judged = (
                            min(ROWS_JUDGED, len(data.validation))
                            if name != "teacher"
                            else 0
                        )
                        per_row[name] = time_call(run) / len(rows)
                        seconds += per_row[name] * (
                            judged + len(split) * (1 if name == "teacher" else 2)
                        )
                    choosing = self._time_choosing(files["fp32"], per_row)
                break
            except ExportError:
                continue
        least, most = students * seconds, students * (seconds + choosing)
        disk_mb = students * SHIPPED * self.student_mb
        return Phase(
            "export and measure", seconds=(least, most), disk_mb=disk_mb, likely=LIKELY
        )

    def _time_choosing(self, source: Path, per_row: Mapping[str, float]) -> float:
        """Estimate the seconds of `keep_score` beyond its first look, from those that
        the fp32 and int8 files take."""
        data, trial = self.context.data, source.with_suffix(".trial.onnx")
        probed, judged = (
            min(PROBE, len(data.validation)),
            min(ROWS_JUDGED, len(data.validation)),
        )
        count = len(products(read_model(source).graph))
        attempt = (
            time_call(partial(quantize_dynamic, source, trial))
            + probed * per_row["int8"]
        )
        trial.unlink()
        observing = min(CALIBRATION_ROWS, len(data.train)) * per_row["fp32"]
        smoothing = observing + len(ALPHAS) * (attempt + probed * per_row["fp32"])
        return (
            smoothing
            + (2 * count + 1) * attempt
            + math.log2(2 * count) * judged * per_row["int8"]
        )

    @contextmanager
    def scratch_cache(self) -> Iterator[None]:
        """Use `home` as the cache."""
        before = os.environ.get("COMPRESS_HOME")
        os.environ["COMPRESS_HOME"] = str(self.home)
        try:
            yield
        finally:
            if before is None:
                del os.environ["COMPRESS_HOME"]
            else:
                os.environ["COMPRESS_HOME"] = before

    def try_stage(
        self,
        stage: Stage,
        student: PreTrainedModel,
        teacher: Teacher | None,
        origin_D: Tensor | None = None,
        wrap_score: Callable[[Score], Score] | None = None,
    ) -> tuple[Phase, PreTrainedModel]:
        """Try a stage for a few steps, with and without scoring, and for more; return
        its forecast and the student.

        origin_D, wrap_score  as for `run_stage`
        """
        notes, variants = (
            ["until the validation score stops improving"] if stage.open_ended else [],
            1,
        )
        if isinstance(stage.augment, Call) and asks_language_model(stage.augment):
            variants += int(
                stage.augment.options.get(
                    "copies", options_of(stage.augment.function)["copies"].default
                )
            )
            notes.append(
                f"on up to {variants - 1} variants of each row, whose making is not "
                "counted"
            )
            stage = stage.model_copy(update={"augment": None})
        rows = self.context.rows(stage, stage_seed(stage, self.run))
        order = batches(stage, rows, self.run.seed)
        per_epoch = variants * steps_per_epoch(stage, order)
        batch = variants * len(rows) / per_epoch
        cached = _caches_outputs(stage, student, teacher, rows, self.context)
        few = sample_rows(
            rows, min(len(rows), math.ceil(ROWS * batch)), math.ceil(batch)
        )
        context, teacher = self._with_few_rows(few, teacher)

        def train(
            name: str, steps: int, model: PreTrainedModel, *, scored: bool
        ) -> tuple[Any, float, float]:
            """Return the trained model, the seconds of its training, and those
            before."""
            length = {
                "name": name,
                "steps": steps,
                "epochs": 1.0,
                "max_epochs": None,
                "evaluate": int(scored),
            }
            trial = stage.model_copy(
                update={**length, "cache_teacher": cached, "improve": False}
            )
            began = time.perf_counter()
            with self.scratch_cache():
                trained = run_stage(
                    trial,
                    model,
                    teacher,
                    context,
                    self.run,
                    origin_D=origin_D,
                    wrap_score=wrap_score,
                )
            seconds = Trained.read(self.run.result(name)).seconds
            return trained, seconds, time.perf_counter() - began - seconds

        outputs_mb = size_mb(self.home / "teacher-outputs")
        # to warm up
        train(f"{stage.name}-first", SHORT, copy.deepcopy(student), scored=True)
        _, short, before = train(
            f"{stage.name}-short", SHORT, copy.deepcopy(student), scored=False
        )
        _, with_score, _ = train(
            f"{stage.name}-scored",
            SHORT,
            copy.deepcopy(student),
            scored=stage.evaluate > 0,
        )
        least, most = LONG
        more = min(most, max(least, round(SECONDS * SHORT / short)))
        student, long, _ = train(stage.name, more, student, scored=False)
        tokens = np.resize(
            count_padded_tokens(batches(stage, few, self.run.seed)), more
        )[SHORT:].mean()
        step = (long - short) / (more - SHORT) if long > short else long / more
        step *= count_padded_tokens(order).mean() / tokens
        scored = len(context.data.validation) if context.task_data else 1
        per_row = max(0.0, with_score - short) / scored
        on_task = stage.data == "task" and stage.head == "task"
        held_out = len(self.context.data.validation) if on_task else 0
        self.seconds_per_scored_row = (
            per_row if on_task else self.seconds_per_scored_row
        )
        if stage.open_ended:
            length = plan_length(
                stage, per_epoch, rows=held_out, per_query=rows_per_query(rows)
            )
            steps, every = (length.least, length.most), length.every
        else:
            steps = (plan_steps(stage, per_epoch),) * 2
            every = max(1, min(steps[0], per_epoch) // max(1, stage.evaluate))
        outputs = before / len(few) * len(rows) if cached else 0.0
        seconds = [
            outputs + count * step + count / every * per_row * max(held_out, scored)
            for count in steps
        ]
        folder = self.run.stage(f"{stage.name}-scored")
        self.student_mb = size_mb(self.run.result(folder.name))
        outputs_mb = (
            (size_mb(self.home / "teacher-outputs") - outputs_mb) / len(few) * len(rows)
        )
        # the newest two checkpoints are kept
        disk = size_mb(folder, folder / "checkpoints") + outputs_mb
        speed = batch / step if step else None
        self.student = student
        return Phase(
            stage.name, steps, (seconds[0], seconds[1]), speed, ", ".join(notes), disk
        ), student

    def _with_few_rows(
        self, rows: Dataset, teacher: Teacher | None
    ) -> tuple[FewRows, Teacher | None]:
        """Return the context with these rows to train on, and few rows to score; and
        the teacher, with as many recorded answers as rows if it has any."""
        values = {
            each.name: getattr(self.context, each.name) for each in fields(self.context)
        }
        if data := self.context.task_data:
            scored = data.validation
            if data.task.kind == "embedding":  # its texts refer to each other by number
                scored = embedding.select(scored, embedding.subsample(scored, SCORED))
            else:
                scored = scored.select(range(min(len(scored), SCORED)))
            values["task_data"] = replace(data, validation=scored)
        if teacher is not None and teacher.recorded is not None:
            split = self.context.data.train
            logits = {
                split._fingerprint: teacher.recorded.for_split(split)[: len(rows)]
            }
            teacher = replace(teacher, recorded=RecordedLogits(logits))
        return FewRows(**values, few=rows), teacher


def count_padded_tokens(order: Order) -> NDArray[np.int64]:
    """Count the tokens of each batch of an epoch, with padding."""
    if not isinstance(order, LengthGrouped):
        return np.ones(len(order), np.int64)
    longest = (
        np.asarray(order.lengths)[list(order)].reshape(-1, order.batch_size).max(1)
    )
    return np.asarray(longest * order.batch_size, np.int64)


def sample_rows(rows: Dataset, count: int, longest: int) -> Dataset:
    """Sample rows, including the longest ones, which take the most memory.

    They are numbered again, because a teacher's cached outputs are looked up by the
    `index` of a row.
    """
    drawn = np.random.default_rng(0).permutation(len(rows))[:count]
    drawn[: min(count, longest)] = np.argsort(
        -np.asarray(rows["length"][:]), kind="stable"
    )[: min(count, longest)]
    table = rows.select(np.unique(drawn)).with_format("arrow")[:]
    at = table.schema.get_field_index("index")
    return Dataset(
        table
        if at < 0
        else table.set_column(at, "index", pa.array(np.arange(len(table))))
    )


def _caches_outputs(
    stage: Stage,
    student: PreTrainedModel,
    teacher: Teacher | None,
    rows: Dataset,
    context: TrainingContext,
) -> bool:
    """Return True if the stage will cache its teacher's outputs."""
    if teacher is not None and teacher.recorded is not None:
        return False
    if stage.cache_teacher != "auto" or teacher is None or not stage.objective:
        return bool(stage.cache_teacher)
    shapes = (Shape.from_config(model.config) for model in (student, teacher.model))
    kind = context.kind if stage.head == "task" else None
    return cache_pays(
        stage, Objective(stage.objective, *shapes, kind=kind), teacher, rows
    )
