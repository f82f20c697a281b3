"""Provide the student and the teacher of each stage of a recipe, and run the stages."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from compress.config.recipe import TEACHER_ITSELF, Recipe, ancestor, spec_of
from compress.config.reference import Call
from compress.config.stages import AnyStage, Prune, Stage
from compress.data.masking import Words
from compress.errors import RecipeError, StudentError
from compress.exporters.bundle_files import check_parts
from compress.models import heads
from compress.models import student as students
from compress.models.flops import warn_if_larger
from compress.models.folder import identify
from compress.models.loader import load_result
from compress.models.teacher import Teacher
from compress.pruning.importance import compute_importance
from compress.pruning.stage import check_family, prune_stage, read_record, stage_sizes
from compress.slicing.plan import HIDDEN, SlicePlan
from compress.slicing.select import Importance, Kept
from compress.slicing.shape import Shape, positions
from compress.slicing.sizes import resize_config
from compress.training.context import TrainingContext
from compress.training.finetune import (
    check_head,
    load_with_head,
    with_pretrained_head,
)
from compress.training.processes import share_folder
from compress.training.run import Run
from compress.training.stage import build_objective, run_stage

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

    @staticmethod
    def from_teacher(
        recipe: Recipe, task_teacher: Teacher, context: TrainingContext, run: Run
    ) -> "StageModels":
        """Create it with the base teacher of the context, or with the task teacher for
        both if the context has none."""
        base_teacher = context.base_teacher or task_teacher
        return StageModels(recipe, base_teacher, task_teacher, context, run)

    def run_stages(
        self, stages: Sequence[AnyStage], *, teacher_logits: Any = None
    ) -> PreTrainedModel:
        """Run the unfinished stages of `stages`, and return the model of the last
        one."""
        done, remaining = self.run.remaining(stages, self.context.console)
        student = (
            None
            if done is None
            else load_result(
                share_folder(done),
                stages[-len(remaining) - 1].head,
                self.context.kind,
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
        """Load the teacher of a stage, or return None if it learns from text or labels
        alone."""
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
        source = self._source(stage, teacher)
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

    def build_untrained(self) -> PreTrainedModel | None:
        """Build the student of the first stage that trains one, as it is before
        training, or None unless it is cut out of the teacher."""
        stages = self.recipe.stages
        first = next(stage for stage in stages if isinstance(stage, Stage))
        earlier = stages[: stages.index(first)]
        spec = spec_of(self.recipe, stages[0])
        if spec is None or spec.init != "teacher":
            return None
        before = None
        if earlier:
            last = earlier[-1]
            before = load_result(self._result(last), last.head, self.context.kind)
        teacher = self.teacher(first)
        units = self.choose_units(first, teacher)
        return self.student(first, before, teacher, units)

    def choose_units(self, stage: Stage, teacher: Teacher | None) -> Kept | None:
        """Choose the units of the teacher that initialise the student, or return None
        if it is not cut out of the teacher.

        For a narrower student they are chosen by Taylor expansion, which works better
        than the norms of weights (docs/LOG.md).
        """
        spec = spec_of(self.recipe, stage)
        source = self._source(stage, teacher)

        def rate() -> Importance:
            labelled = stage.data == "task" and source is self.task_teacher
            return compute_importance(
                Call(
                    "molchanov.taylor", {"targets": "labels" if labelled else "drawn"}
                ),
                source.model.to(PartialState().device),
                SlicePlan.from_model(source.model),
                self.context.sample(stage, RATED_ROWS, self.run.seed),
                self.context.collate,
                bf16=self.context.bf16,
                console=self.context.console,
            )

        return None if spec is None else students.choose_units(spec, source.model, rate)

    def _source(self, stage: AnyStage, teacher: Teacher | None) -> Teacher:
        """Return the model that a student is built from: the teacher of its stage, or
        else of the run, as pre-trained if the stage says so."""
        if isinstance(stage, Stage) and stage.teacher == "general":
            return teacher or self.base_teacher
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
        """Return the teacher's hidden dimension that each dimension of the student was
        cut out of.

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
        """Return the result folder of an earlier stage, on this node; run the stage
        again if it is damaged or gone."""
        if not self.run.done(stage.name, self.context.console):
            self.run_stages(self.recipe.stages[: self.recipe.stages.index(stage) + 1])
        return share_folder(self.run.result(stage.name))

    def check(self) -> list[str]:
        """Check the student and the teacher of every stage before anything is trained;
        return warnings.

        Raises StudentError or PruneError for a student that cannot be built,
        TeacherError if the teacher lacks a head, ObjectiveError for losses that cannot
        compare the two.
        """
        configs = dict[str, PreTrainedConfig]()
        config = self.base_teacher.model.config
        notes = list[str]()
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
            source = self.base_teacher.model.config
            taught = stage.kind == "distill"
            if taught and stage.teacher == "previous":
                source = configs[ancestor(self.recipe.stages, stage).name]
            if (spec := spec_of(self.recipe, stage)) is not None:
                config = students.plan_config(spec, source)
                start = students.check_tokens(spec, self.base_teacher.tokenizer)
                if start is not None:
                    self.run.confirm(**{f"start of {stage.name}": identify(start)})
                # the teacher is another model, a prompted one
                prompted = spec.init == self.base_teacher.name
                if taught and spec != TEACHER_ITSELF and not prompted:
                    notes += warn_if_larger(stage.name, config, source)
            if stage.objective:
                build_objective(
                    stage, config, source if taught else None, kind=self.context.kind
                )
            with torch.device("meta"):
                student = heads.create(
                    copy.deepcopy(config), stage.head, self.context.kind
                )
            limit = positions(student)
            if limit is not None and stage.length > limit:
                raise StudentError(
                    f"stage {stage.name}: max_length is {stage.length}, and the "
                    f"student has {limit} positions: --set "
                    f"stages.{stage.name}.max_length={limit}"
                )
            configs[stage.name] = config
        return notes
