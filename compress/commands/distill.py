"""Distil a teacher into a student: check, load, run the recipe's stages, ship and
measure."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from compress.arguments import (
    DataLike,
    NameLike,
    PathName,
    Share,
    TeacherLike,
    check_arguments,
    name_of,
    optional_name,
)
from compress.commands import preflight
from compress.commands.checks import (
    check_kind,
    check_lengths,
    describe_cuts,
    find_reranker,
    join_processes,
    load_functions,
    measure_lengths,
    reads_scores,
)
from compress.commands.ship import BUDGETED_LIMIT, INT8_LIMIT, ship
from compress.config import user_code
from compress.config.choices import AUTO, CandidateRecipes
from compress.config.options import DataOptions, LengthOptions, RunOptions
from compress.config.recipe import WHOLE, Recipe, ancestor, spec_of
from compress.config.reference import Call
from compress.config.stages import AnyStage, Prune, Stage
from compress.console import print_note, warn
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.corpus import load_corpus
from compress.data.masking import Words
from compress.data.objects import data_path, teacher_path
from compress.errors import RecipeError, TeacherError
from compress.exporters.artifact import Bundle, check_parts
from compress.exporters.manifest import kind_of_bundle
from compress.models import checkpoints, heads
from compress.models import precision as precisions
from compress.models import student as students
from compress.models import teacher as teachers
from compress.models.flops import warn_if_larger
from compress.models.folder import identify
from compress.models.loader import load_config, load_result
from compress.models.padding import pads_left
from compress.models.teacher import Teacher
from compress.prompting.labels import prompt_teacher, starting_checkpoint
from compress.prompting.prompt import Prompt
from compress.prompting.vectors import gives_vectors, open_source
from compress.provenance import command_line
from compress.pruning.budget import check_budget, resolve_budget
from compress.pruning.importance import compute_importance
from compress.pruning.stage import check_family, prune_stage, read_record, stage_sizes
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.select import Importance, Kept
from compress.slicing.shape import Shape
from compress.slicing.sizes import resize_config
from compress.training.augment import TEXTS, add_stages, reads_corpus
from compress.training.context import TrainingContext, use_bf16
from compress.training.finetune import (
    TeacherCheck,
    check_head,
    check_logits,
    is_ready,
    load_task_teacher,
    load_with_head,
    with_pretrained_head,
)
from compress.training.reranker import load_reranker, score_passages
from compress.training.run import Run
from compress.training.schedule import TimeLimit
from compress.training.stage import build_objective, run_stage
from compress.training.teacher_vectors import (
    VectorSource,
    with_similarities,
    with_teacher,
    with_vectors,
)
from compress.training.unlabelled import check_texts, takes_texts

if TYPE_CHECKING:
    pass


@check_arguments
def distill(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    recipe: NameLike | Recipe | CandidateRecipes = AUTO,
    corpus: NameLike | None = None,
    prompt: NameLike | Prompt | None = None,
    columns: DataOptions = DataOptions(),
    max_drop: Share | None = None,
    length: LengthOptions = LengthOptions(),
    options: RunOptions = RunOptions(),
    console: Console | None = None,
) -> Bundle:
    """Distil `teacher` into a student by `recipe`, ship it as a bundle in `out`/bundle,
    and measure it.

    teacher    alias (`minilm`, `bert-base`, ...), folder, hub id, or (model,
               tokenizer); fine-tuned first if it has no head for the task. Or
               precomputed vectors of the texts (see `prompting.vectors`), or a
               cross-encoder for vectors that learn from scores: the student is then cut
               out of the checkpoint that the recipe's student names, or else of minilm.
               If the data have a teacher's scores (see `data.ranking`), it only names
               the checkpoint that the student is cut out of
    data       embedded set, folder, hub id, DataFrame, Dataset, or {split: any of
               these}; `columns` name what cannot be detected
    recipe     name, path of a .yaml, or a Recipe; `auto`, or a .yaml of choices,
               chooses one for teacher and task
    corpus     unlabelled text: for stages on text, and as more rows of tasks of single
               texts or their words
    prompt     name or path of a .yaml file: `teacher` is then a language model (or an
               endpoint's .yaml file) that labels the data by answering the prompt; the
               recipe's student names the checkpoint to start from
    out        the run's directory; `options.resume` continues an interrupted run, to
               the same final weights
    max_drop   how much of the score, in its own unit, int8 may lose before products
               stay in float32; default: INT8_LIMIT, or BUDGETED_LIMIT for a student
               that was made for a latency
    length     how long the stages train: see `LengthOptions`
    options    seed, precision, resume and others: see `RunOptions`. A recipe that names
               your own functions runs only with `allow_code`

    Raises a CompressError that says what to do for anything wrong with these.
    """
    console, started = console or Console(quiet=True), time.time()
    prompt = (
        prompt
        if prompt is None or isinstance(prompt, Prompt)
        else Prompt.load(name_of(prompt))
    )
    prepared = prepare(
        teacher=teacher,
        data=data,
        out=out,
        recipe=recipe,
        corpus=optional_name(corpus),
        prompt=prompt,
        columns=columns,
        length=length,
        options=options,
        console=console,
    )
    with prepared as (models, notes):
        recipe, context, run = models.recipe, models.context, models.run
        steps = describe_run(models, prompted=prompt is not None)
        print_note(
            console, f"this run will {steps}; --plan forecasts how long that takes"
        )
        task_teacher, teacher_check = check_teacher(
            models, teacher_path(teacher), prompt, options
        )
        if max_drop is None:
            max_drop = BUDGETED_LIMIT if recipe.target.limits_time else INT8_LIMIT
        for sized in resolve_budget(recipe, task_teacher, context, run):
            sized_models = replace(models, recipe=sized, task_teacher=task_teacher)
            student = sized_models.run_stages(
                sized.stages, teacher_logits=teacher_check.logits
            )
            if run.main:
                bundle = ship(
                    student,
                    task_teacher,
                    context,
                    recipe=sized,
                    run=run,
                    notes=[*notes, *teacher_check.notes],
                    started=started - run.before,
                    int8_limit=max_drop,
                )
                check_budget(bundle, recipe, task_teacher, context, run)
        if run.main:
            run.finish()
        PartialState().wait_for_everyone()
    return Bundle.load(run.path / "bundle")


def describe_run(models: "StageModels", *, prompted: bool) -> str:
    """List the parts of a run that are still to do, in their order, the stages with
    their names."""
    teacher, data, stage = (
        models.base_teacher,
        models.context.data,
        models.recipe.teacher,
    )
    verbs = {
        stage.name: "prune" if isinstance(stage, Prune) else stage.kind
        for stage in models.recipe.stages
    }
    parts = {name: f"{verb} ({name})" for name, verb in verbs.items()}
    if prompted:
        parts = {"": f"ask {teacher.name}", **parts}
    elif teacher.recorded is None and not is_ready(
        teacher, stage, models.context, models.run
    ):
        parts = {stage.name: f"fine-tune {teacher.name}", **parts}
    done = [
        at for at, name in enumerate(parts) if name and models.run.result(name).is_dir()
    ]
    left = [*list(parts.values())[max(done, default=-1) + 1 :], "export to ONNX"]
    scored = data.validation if data.test is None else data.test
    return (
        f"{', '.join(left)}, and measure on {data.task.count_examples(scored):,} "
        f"{data.task.scored_unit(data.task.metric)}"
    )


def check_teacher(
    models: "StageModels", name: str, prompt: Prompt | None, options: RunOptions
) -> tuple[Teacher, TeacherCheck]:
    """Fine-tune or prompt the teacher if it needs that, and check that it is good
    enough. Raises TeacherError."""
    base_teacher, context, run = models.base_teacher, models.context, models.run
    strict = options.gate == "refuse"
    if base_teacher.recorded is not None:
        logits = base_teacher.recorded.for_split(context.data.validation)
        return base_teacher, check_logits(
            base_teacher.name, logits, context.data, strict=strict, remedy=UNFIT
        )
    if prompt is None:
        return load_task_teacher(
            base_teacher, models.recipe, context, run, strict=strict
        )
    # the other processes find its answers in the cache
    with PartialState().main_process_first():
        teacher, teacher_check = prompt_teacher(
            name,
            prompt,
            base_teacher,
            context.data,
            seed=options.seed,
            bf16=context.bf16,
            strict=strict,
            allow_pickle=options.allow_pickle,
            console=context.console,
        )
    run.confirm(teacher=teacher.digest)
    return teacher, teacher_check


UNFIT = (
    "Check that its vectors or scores belong to these texts, and differ. --gate warn "
    "continues with a warning"
)
"""The remedy for a teacher whose recorded answers teach nothing."""
MINILM = "minilm"
"""The checkpoint of students of precomputed vectors, if the recipe names none."""


@contextmanager
def prepare(
    *,
    teacher: TeacherLike,
    data: DataLike,
    out: PathName,
    recipe: NameLike | Recipe | CandidateRecipes,
    corpus: str | None,
    prompt: Prompt | None,
    columns: DataOptions,
    length: LengthOptions,
    options: RunOptions,
    console: Console,
    vectors: VectorSource | None = None,
) -> Iterator[tuple["StageModels", list[str]]]:
    """Check the arguments of `distill`, open the run, and load its models; yield them
    untrained, and warnings.

    vectors: stands in for those that `teacher` names. Raises a CompressError for
    anything wrong with the arguments.
    """
    teacher, data = teacher_path(teacher), data_path(data)
    recipe, prompted = (
        preflight.load_choices(recipe, options.overrides, length),
        prompt is not None,
    )
    vectors_alone = gives_vectors(teacher, prompted=prompted)
    recorded = prompted or vectors_alone
    preflight.check(
        recipe,
        teacher=teacher,
        out=out,
        data=data,
        corpus=corpus,
        prompted=recorded,
        options=options,
    )
    state = join_processes()
    if isinstance(recipe, CandidateRecipes):
        recipe = choose_recipe(
            recipe,
            MINILM if vectors_alone else teacher,
            data,
            columns,
            prompted=prompted,
            recorded=vectors_alone,
            options=options,
            console=console,
        )
    recipe = load_functions(recipe, state.num_processes, options.allow_code)
    columns = replace(columns, kind=columns.kind or recipe.only_kind)
    reranker = (
        None
        if recorded
        else find_reranker(teacher, recipe, allow_pickle=options.allow_pickle)
    )
    default = MINILM if vectors_alone or reranker else None
    checkpoint = (
        starting_checkpoint(recipe, default=default)
        if recorded or reranker
        else teacher
    )
    if default and recipe.student.init == checkpoint:
        recipe = recipe.model_copy(
            update={"student": recipe.student.model_copy(update={"init": "teacher"})}
        )
    number_format = precisions.choose(options.precision)
    identity = {
        "teacher": teacher,
        "prompt": prompt and prompt.model_dump(mode="json"),
        "data": data,
        "corpus": corpus,
        "seed": options.seed,
        "precision": number_format,
        "columns": list(astuple(columns)),
        "code": user_code.digests(recipe),
        "command": command_line(),
        "processes": state.num_processes,
    }
    run = Run.open(
        Path(out),
        recipe,
        identity,
        resume=options.resume,
        main=state.is_main_process,
        track=options.track,
    )
    with closing(run):
        base_teacher, context = load_inputs(
            checkpoint,
            data,
            recipe,
            run,
            corpus=corpus,
            columns=columns,
            unlabelled=prompted,
            number_format=number_format,
            vectors=(vectors or open_source(teacher)) if vectors_alone else None,
            reranker=reranker,
            allow_pickle=options.allow_pickle,
            console=console,
        )
        check_kind(recipe, context.data.task.kind)
        if (
            reads_scores(recipe)
            and context.task.vectors
            and not any(map(len, context.data.train["scores"][:]))
        ):
            raise TeacherError(
                f"{recipe.name} learns from a cross-encoder's scores, and "
                f"{context.data.name} has none: name a cross-encoder as the teacher, "
                "or give each passage its score, in a column teacher_score"
            )
        if reranker:
            print_note(
                console,
                f"{teacher} has scored the passages; the student is cut out of "
                f"{checkpoint}",
            )
        if (
            "teacher" in context.data.train.column_names
            and not prompted
            and not recipe.pruning
        ):
            starting_checkpoint(recipe, default=teacher)
            base_teacher, recorded = (
                teachers.with_scores(base_teacher, context.data),
                True,
            )
            context = replace(context, base_teacher=base_teacher)
            print_note(
                console,
                "the teacher's scores are in the data; the student is cut out of "
                f"{teacher}",
            )
        if not recorded:
            train, reads = context.data.train, takes_texts(context.data, context.corpus)
            # a variant of a passage is none of the query's candidates
            texts = (
                0
                if context.task.ranks
                else sum(name in TEXTS for name in train.column_names)
            )
            recipe = add_stages(recipe, len(train), corpus=reads, texts=texts)
            if any(stage.corpus for stage in recipe.training):
                check_texts(context.data, context.corpus)
        if corpus is not None and not reads_corpus(recipe):
            remedy = "; add these texts to --data" if context.task.vectors else ""
            warn(console, f"no stage of {recipe.name} reads --corpus{remedy}")
        if length.minutes is not None:
            untrained = () if base_teacher.trained or recorded else (recipe.teacher,)
            context = replace(
                context,
                time_limit=limit_time(
                    length.minutes, (*untrained, *recipe.training), run
                ),
            )
        lengths = measure_lengths(context.data, base_teacher, run.seed)
        recipe = recipe.with_length(lengths.fitting)
        check_lengths(recipe, base_teacher, tuned=not recorded)
        models = StageModels(
            recipe,
            base_teacher,
            None,
            compare_texts(base_teacher, context, recipe.stages[-1].length),
            run,
        )
        notes = [*models.check(), *describe_cuts(recipe, lengths)]
        for note in notes:
            warn(console, note)
        yield models, notes


def choose_recipe(
    candidates: CandidateRecipes,
    teacher: str,
    data: str,
    columns: DataOptions,
    *,
    prompted: bool,
    recorded: bool,
    options: RunOptions,
    console: Console,
) -> Recipe:
    """Choose the recipe that fits the family of the teacher, or of the start if vectors
    are `recorded`; print why."""
    with PartialState().main_process_first():
        task_data = load_task(
            data, **asdict(columns), seed=options.seed, unlabelled=prompted
        )
        folder = (
            None
            if prompted
            else checkpoints.resolve(teacher, allow_pickle=options.allow_pickle)
        )
    family = load_config(folder).model_type if folder else ""
    reranker = folder is not None and teachers.is_reranker(
        folder, allow_pickle=options.allow_pickle
    )
    scored = recorded or "teacher" in task_data.train.column_names
    recipe, reason = candidates.decide(
        kind=task_data.task.kind,
        family=family,
        prompted=prompted,
        scored=scored,
        reranker=reranker,
    )
    print_note(console, f"recipe {recipe.name}: {reason}")
    return recipe


TRAINING = 0.8
"""Share of a time limit for training; the rest is for exporting, certifying and
measuring."""


def limit_time(minutes: float, stages: Sequence[Stage], run: Run) -> TimeLimit:
    """Divide the minutes that a run may take over its stages; earlier sessions of the
    run count."""
    ends = time.monotonic() + TRAINING * 60 * minutes - run.before
    return TimeLimit(ends, tuple(stage.name for stage in stages), minutes)


def load_inputs(
    checkpoint: str,
    data: str,
    recipe: Recipe,
    run: Run,
    *,
    corpus: str | None = None,
    columns: DataOptions = DataOptions(),
    unlabelled: bool = False,
    vectors: VectorSource | None = None,
    reranker: Path | None = None,
    number_format: str = "fp32",
    allow_pickle: bool = False,
    console: Console,
) -> tuple[Teacher, TrainingContext]:
    """Load the base teacher and what the stages share. The first process fetches.
    Raises TeacherError, DataError.

    vectors, reranker: teach instead of `checkpoint`, which the student then begins as,
    or is cut out of
    """
    with PartialState().main_process_first():
        folder = checkpoints.resolve(checkpoint, allow_pickle=allow_pickle)
        columns = replace(columns, kind=columns.kind or kind_of_bundle(folder))
        task_data = load_task(
            data, **asdict(columns), seed=run.seed, unlabelled=unlabelled
        )
        base_teacher = teachers.load(
            checkpoint, folder, task_data.task, allow_pickle=allow_pickle
        )
        texts = load_corpus(corpus) if corpus else None
        checkpoint_digest = base_teacher.digest
        if vectors is not None:
            task_data, base_teacher = with_vectors(task_data, vectors, base_teacher)
        elif task_data.task.vectors:
            task_data = with_teacher(task_data, base_teacher)
        scorer = (
            load_reranker(reranker, allow_pickle=allow_pickle) if reranker else None
        )
        if scorer is not None:
            task_data = score_passages(task_data, scorer, bf16=number_format == "bf16")
    source = vectors or scorer
    digests = {
        "student" if unlabelled or source else "teacher": checkpoint_digest,
        "data": task_data.fingerprint,
    }
    if source is not None:
        digests["teacher"] = source.digest
    if texts is not None:
        digests["corpus"] = texts.fingerprint
    run.confirm(**digests)
    for note in task_data.notes:
        print_note(console, note)
    tokenizer = base_teacher.tokenizer
    collate = Collate(tokenizer, left=pads_left(base_teacher.model))
    bf16 = use_bf16(number_format, recipe, base_teacher, console)
    context = TrainingContext(
        task_data,
        texts,
        tokenizer,
        collate,
        bf16,
        console,
        base_teacher=base_teacher,
        masked_lm=lambda: with_pretrained_head(
            base_teacher, "masked_lm", recipe.teacher_lm, context, run
        ),
    )
    return base_teacher, context


def compare_texts(
    base_teacher: Teacher, context: TrainingContext, max_length: int
) -> TrainingContext:
    """Complete data for sentence vectors that have no gold similarities by those of the
    teacher.

    max_length   the tokens of a text that are read when students are scored
    """
    if not context.task.vectors or base_teacher.recorded is not None:
        return context
    with PartialState().main_process_first():  # the others read from the cache
        data = with_similarities(context.data, base_teacher, max_length)
    for note in data.notes[len(context.data.notes) :]:
        print_note(context.console, note)
    return replace(context, task_data=data)


RATED_ROWS = 512
"""Rows on which the importance of the teacher's units is computed."""


@dataclass(frozen=True)
class StageModels:
    """Provides the student and the teacher of each stage of a recipe, and runs the
    stages.

    base_teacher   the teacher as the user named it
    task_teacher   the same with a head for the task; None if the run has no task
    """

    recipe: Recipe
    base_teacher: Teacher
    task_teacher: Teacher | None
    context: TrainingContext
    run: Run

    def run_stages(
        self, stages: Sequence[AnyStage], *, teacher_logits: Any = None
    ) -> PreTrainedModel:
        """Run the unfinished ones of `stages`, and return the model of the last one."""
        result, remaining = self.run.remaining(stages, self.context.console)
        student = (
            None
            if result is None
            else load_result(
                result, stages[-len(remaining) - 1].head, self.context.kind
            )
        )
        for stage in remaining:
            if isinstance(stage, Prune):
                student = self.prune(stage, student)
                continue
            teacher = self.teacher(stage)
            units = self.choose_units(stage, teacher)
            student = self.student(stage, student, teacher, units)
            student = run_stage(
                stage,
                student,
                teacher,
                self.context,
                self.run,
                teacher_logits=teacher_logits,
                origin_D=self.origin(stage, student, units),
            )
        assert student is not None, "a recipe has at least one stage"
        return student

    def teacher(self, stage: Stage) -> Teacher | None:
        """Load the teacher of a stage; None if it learns from text or labels alone."""
        if stage.kind != "distill":
            return None
        if stage.teacher == "task":
            if self.task_teacher is None:
                raise RecipeError(
                    [
                        f"{self.recipe.name}: stage {stage.name} learns from the task "
                        "teacher: give --data"
                    ]
                )
            return self.task_teacher
        if stage.teacher == "general":
            lm_stage = self.recipe.teacher_lm
            teacher = with_pretrained_head(
                self.base_teacher, stage.head, lm_stage, self.context, self.run
            )
        else:
            before = ancestor(self.recipe.stages, stage)
            teacher = load_with_head(
                before.name, self._result(before), stage.head, kind=self.context.kind
            )
        # students that are built from it get the task's head
        for name in ("id2label", "label2id", "problem_type"):
            setattr(
                teacher.model.config,
                name,
                getattr(self.base_teacher.model.config, name),
            )
        teacher.model.to(PartialState().device)
        return teacher

    def student(
        self,
        stage: AnyStage,
        before: PreTrainedModel | None,
        teacher: Teacher | None,
        units: Kept | None = None,
    ) -> PreTrainedModel:
        """Build the student of a stage, or put the stage's head on the model of the
        stage before."""
        # a new head gets the same weights whether the stage before ran just now or
        # earlier
        set_seed(self.run.seed)
        spec = spec_of(self.recipe, stage)
        if spec is None:
            assert before is not None, "only the first stage has none before it"
            return heads.under(before, stage.head, self.context.kind)
        source = self._source(teacher)
        words = (
            Words.from_tokenizer(self.base_teacher.tokenizer)
            if isinstance(spec.init, Call)
            else None
        )
        student = students.build(
            spec,
            source.model,
            head=stage.head,
            kind=self.context.kind,
            words=words,
            kept=units,
            tokenizer=self.base_teacher.tokenizer,
        )
        last = self.recipe.stages[-1]
        if last.head == "task" and self.context.kind is not None:
            check_parts(
                student,
                self.base_teacher.tokenizer,
                self.context.data.task,
                last.length,
            )
        return student

    def choose_units(self, stage: Stage, teacher: Teacher | None) -> Kept | None:
        """Choose the units of the teacher that initialise the student; None if it is
        not cut out of the teacher.

        For a narrower student by Taylor expansion, which chooses better than the norms
        of weights (docs/LOG.md).
        """
        spec, source = spec_of(self.recipe, stage), self._source(teacher)

        def rate() -> Importance:
            labelled = stage.data == "task" and source is self.task_teacher
            return compute_importance(
                Call(
                    "molchanov.taylor", {"targets": "labels" if labelled else "drawn"}
                ),
                source.model.to(PartialState().device),
                SlicePlan.from_model(source.model),
                self.context.sample(
                    stage.data, stage.length, RATED_ROWS, self.run.seed
                ),
                self.context.collate,
                bf16=self.context.bf16,
                console=self.context.console,
            )

        return None if spec is None else students.choose_units(spec, source.model, rate)

    def _source(self, teacher: Teacher | None) -> Teacher:
        """Return the model that a student is built from: the teacher of its stage, or
        else of the run."""
        return teacher or self.task_teacher or self.base_teacher

    def prune(self, stage: Prune, before: PreTrainedModel | None) -> PreTrainedModel:
        """Prune the model to the sizes of this stage; the task teacher teaches it."""
        model = self.student(stage, before, None)
        sizes = stage_sizes(stage, self.recipe, self.base_teacher.model.config)
        last = self._last_pruned(stage)
        record = read_record(self._result(last)) if last is not None else None
        return prune_stage(
            stage,
            model,
            self.task_teacher,
            self.context,
            self.run,
            sizes=sizes,
            before=record,
        )

    def origin(
        self, stage: Stage, student: PreTrainedModel, units: Kept | None
    ) -> Tensor | None:
        """Return which of the teacher's hidden dimensions each dimension of the student
        was cut out of.

        None if the student was not cut out of the teacher in this stage.
        """
        if not self.recipe.pruning:
            return (
                None
                if units is None
                else units.indices.get(HIDDEN, torch.arange(units.sizes.hidden))
            )
        last = self._last_pruned(stage)
        if last is None:
            return torch.arange(Shape.from_config(student.config).hidden)
        return torch.tensor(read_record(self._result(last))["of_teacher"]["hidden"])

    def _last_pruned(self, stage: AnyStage) -> Prune | None:
        """Return the last prune stage before this one."""
        until = self.recipe.stages[: self.recipe.stages.index(stage)]
        return next((each for each in reversed(until) if isinstance(each, Prune)), None)

    def _result(self, stage: AnyStage) -> Path:
        """Return the result folder of an earlier stage; run the stage again if it is
        damaged or gone."""
        if not self.run.done(stage.name, self.context.console):
            self.run_stages(self.recipe.stages[: self.recipe.stages.index(stage) + 1])
        return self.run.result(stage.name)

    def check(self) -> list[str]:
        """Check the student and the teacher of every stage before anything is trained;
        return warnings.

        Raises StudentError or PruneError for a student that cannot be built,
        TeacherError if the teacher lacks a head, ObjectiveError for losses that cannot
        compare the two.
        """
        configs: dict[str, PreTrainedConfig] = {}
        config, notes = self.base_teacher.model.config, list[str]()
        if self.recipe.pruning:
            check_family(self.base_teacher.model)
        for stage in self.recipe.stages:
            if isinstance(stage, Prune):
                # budgets decide the sizes once there is a teacher
                if not self.recipe.target.budgets:
                    sizes = stage_sizes(
                        stage, self.recipe, self.base_teacher.model.config
                    )
                    config = resize_config(config, sizes)
                continue
            if stage.kind == "distill" and stage.teacher == "general":
                check_head(self.base_teacher, stage.head, self.context.kind)
            source, taught = self.base_teacher.model.config, stage.kind == "distill"
            if taught and stage.teacher == "previous":
                source = configs[ancestor(self.recipe.stages, stage).name]
            if (spec := spec_of(self.recipe, stage)) is not None:
                config = students.plan_config(spec, source)
                start = students.check_tokens(spec, self.base_teacher.tokenizer)
                if start is not None:
                    self.run.confirm(**{f"start of {stage.name}": identify(start)})
                # the teacher is another model, a prompted one
                prompted = spec.init == self.base_teacher.name
                if taught and spec != WHOLE and not prompted:
                    notes += warn_if_larger(stage.name, config, source)
            if stage.objective:
                build_objective(
                    stage, config, source if taught else None, kind=self.context.kind
                )
            heads.model_class(config, stage.head, self.context.kind)
            configs[stage.name] = config
        return notes
