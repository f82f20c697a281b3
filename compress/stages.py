"""Run the stages of a recipe, training and pruning alike: which model each is given, and which it learns from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from compress.config import reference as calling
from compress.config.recipe import WHOLE, AnyStage, Prune, Recipe, Stage, ancestor, spec_of
from compress.config.reference import Call
from compress.data.masking import Words
from compress.errors import RecipeError
from compress.exporters.artifact import check_parts
from compress.models import heads
from compress.models import student as students
from compress.models.flops import larger
from compress.models.teacher import Teacher
from compress.pruning.stage import check_family, prune_stage, recorded, sizes_of
from compress.slicing.shape import Shape
from compress.slicing.sizes import resized
from compress.training.finetune import check_head, general, load_general
from compress.training.run import Run
from compress.training.stage import TrainingContext, run_stage

_GIVEN = {"rows": ("max_length", "rng"), "corrupt": (), "step": ("words", "shown"), "augment": ("rng",)}


_GIVEN_TO_PRUNE: dict[str, tuple[str, ...]] = {"importance": ()}
"""What the frame itself gives to each kind of function that a recipe names."""


_LABELS = ("id2label", "label2id", "problem_type")


@dataclass(frozen=True)
class StageModels:
    """The models of a run.

    given   the teacher as the user named it
    tutor   it, with a head for the task; None where the run has no task
    """

    recipe: Recipe
    given: Teacher
    tutor: Teacher | None
    material: TrainingContext
    run: Run

    def resume(self, stages: Sequence[AnyStage]) -> tuple[PreTrainedModel | None, list[AnyStage]]:
        """Load the model of the last of `stages` that the run has finished (None: of none); list those still to run."""
        done, remaining = self.run.remaining(stages, self.material.console)
        if done is None:
            return None, remaining
        return heads.load(done, stages[-len(remaining) - 1].head, self.material.kind), remaining

    def run_stage(
        self, stage: AnyStage, student: PreTrainedModel | None, *, teacher_logits: Any = None
    ) -> PreTrainedModel:
        """Run one stage on the model that the stage before left (None: a first stage builds its own)."""
        if isinstance(stage, Prune):
            return self._pruned(stage, self._student(stage, None, student))
        teacher = self.teacher(stage)
        student = self._student(stage, teacher, student)
        return run_stage(
            stage, student, teacher, self.material, self.run,
            teacher_logits=teacher_logits, origin_D=self._origin(stage, student),
        )  # fmt: skip

    def run_stages(self, stages: Sequence[AnyStage], *, teacher_logits: Any = None) -> PreTrainedModel:
        """Run what is left of `stages`, and return the model that the last one leaves."""
        student, remaining = self.resume(stages)
        for stage in remaining:
            student = self.run_stage(stage, student, teacher_logits=teacher_logits)
        assert student is not None, "a recipe has a stage"
        return student

    def teacher(self, stage: Stage) -> Teacher | None:
        """Whom this stage learns from; None where it learns from text or labels alone."""
        if stage.kind != "distill":
            return None
        if stage.teacher == "task":
            if self.tutor is None:
                raise RecipeError(
                    [f"{self.recipe.name}: stage {stage.name} learns from the task's teacher: give --data"]
                )
            return self.tutor
        if stage.teacher == "general":
            found = general(self.given, stage.head, self.recipe.teacher_lm, self.material, self.run)
        else:
            before = ancestor(self.recipe.stages, stage)
            found = load_general(before.name, self._result(before), stage.head, kind=self.material.kind)
        for name in _LABELS:  # students built from it end in the task's head
            setattr(found.model.config, name, getattr(self.given.model.config, name))
        found.model.to(PartialState().device)
        return found

    def _pruned(self, stage: Prune, student: PreTrainedModel) -> PreTrainedModel:
        """Cut down to the sizes this stage goes to. The teacher is the model that its first stage was given."""
        sizes = sizes_of(stage, self.recipe, self.given.model.config)
        uneven = self.recipe.target.uneven and stage.way == 1
        last = self._last_pruned(stage)
        before = recorded(self._result(last)) if last is not None else None
        return prune_stage(
            stage, student, self.tutor, self.material, self.run, sizes=sizes, uneven=uneven, before=before
        )

    def _last_pruned(self, stage: AnyStage) -> Prune | None:
        """The last prune stage before this one."""
        until = self.recipe.stages[: self.recipe.stages.index(stage)]
        return next((each for each in reversed(until) if isinstance(each, Prune)), None)

    def _origin(self, stage: Stage, student: PreTrainedModel) -> Tensor | None:
        """Of a student that was cut out of its teacher, the teacher's dimension for each one of its width."""
        if not self.recipe.pruning:
            return None
        last = self._last_pruned(stage)
        if last is None:
            return torch.arange(Shape.of(student.config).hidden)
        return torch.tensor(recorded(self._result(last))["of_teacher"]["hidden"])

    def _result(self, stage: AnyStage) -> Path:
        """Find the folder that an earlier stage left; where it is damaged, or gone, the stage makes it again."""
        if not self.run.done(stage.name, self.material.console):
            self.run_stages(self.recipe.stages[: self.recipe.stages.index(stage) + 1])
        return self.run.result(stage.name)

    def _student(self, stage: AnyStage, teacher: Teacher | None, before: PreTrainedModel | None) -> PreTrainedModel:
        spec = spec_of(self.recipe, stage)
        if spec is None:
            assert before is not None, "only a first stage has none before it"
            set_seed(self.run.seed)  # a new head's weights do not depend on whether the stage before ran just now
            return heads.under(before, stage.head, self.material.kind)
        set_seed(self.run.seed)
        source = teacher or self.tutor or self.given
        words = Words.of(self.given.tokenizer) if isinstance(spec.init, Call) else None
        student = students.build(spec, source.model, head=stage.head, kind=self.material.kind, words=words)
        last = self.recipe.stages[-1]
        if last.head == "task" and self.material.kind is not None:
            check_parts(student, self.given.tokenizer, self.material.data.task, last.max_length)
        return student

    def check(self) -> list[str]:
        """Check every stage's student and teacher before anything is trained; return warnings of those that can be.

        Raises StudentError or PruneError where a student cannot be made, TeacherError where the teacher lacks a head.
        """
        configs: dict[str, PreTrainedConfig] = {}
        config, notes = self.given.model.config, list[str]()
        if self.recipe.pruning:
            check_family(self.given.model, uneven=self.recipe.target.uneven)
        for stage in self.recipe.stages:
            if isinstance(stage, Prune):
                if not self.recipe.target.budgets:  # which decide the sizes once there is a teacher
                    sizes = sizes_of(stage, self.recipe, self.given.model.config)
                    config = config if self.recipe.target.uneven else resized(config, sizes)
                continue
            if stage.kind == "distill" and stage.teacher == "general":
                check_head(self.given, stage.head, self.material.kind)
            if (spec := spec_of(self.recipe, stage)) is not None:
                previous = stage.teacher == "previous" and stage.kind == "distill"
                source = configs[ancestor(self.recipe.stages, stage).name] if previous else self.given.model.config
                config = students.planned(spec, source)
                prompted = spec.init == self.given.name  # the teacher is another model, which answers in words
                if stage.kind == "distill" and spec != WHOLE and not prompted:
                    notes += larger(stage.name, config, source)
            heads.model_class(config, stage.head, self.material.kind)
            configs[stage.name] = config
        return notes


def check_functions(recipe: Recipe, *, absent: bool = False) -> list[str]:
    """List every problem of a recipe's functions, and of who learns from whom, that shows without models.

    absent: functions of the user's that have not been imported are passed over.
    """
    problems = []
    calls = [
        (f"stages[{at}].{name}", getattr(stage, name), given)
        for at, stage in enumerate(recipe.stages)
        for name, given in (_GIVEN if isinstance(stage, Stage) else _GIVEN_TO_PRUNE).items()
    ]
    specs = [
        ("student", recipe.student),
        *((f"stages[{at}].student", each.student) for at, each in enumerate(recipe.stages) if isinstance(each, Stage)),
    ]
    calls += [(f"{where}.init", spec.init, ("words",)) for where, spec in specs if spec and isinstance(spec.init, Call)]
    for where, call, given in calls:
        if call is not None and not (absent and call.absent):
            problems += calling.check(call, f"{recipe.name}: {where}", given=given)
    for at, stage in enumerate(recipe.stages):
        if isinstance(stage, Stage) and stage.teacher == "previous" and stage.kind == "distill":
            try:
                ancestor(recipe.stages, stage)
            except RecipeError as error:
                problems += [f"{recipe.name}: stages[{at}]: {problem}" for problem in error.problems]
    return problems
