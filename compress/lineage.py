"""From stage to stage: which model a stage is given, and which it learns from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from compress import call as calling
from compress import heads, students
from compress.call import Call
from compress.errors import RecipeError
from compress.export.bundle import check_parts
from compress.general import general, load
from compress.precision import FLOAT32_ONLY
from compress.recipe import Recipe, Stage, StudentSpec
from compress.run import Run
from compress.stages import Material, run_stage
from compress.teachers import Teacher

_GIVEN = {"rows": ("max_length", "rng"), "corrupt": (), "step": ("words",), "augment": ("rng",)}
"""What the frame itself gives to each kind of function that a recipe names."""
_LABELS = ("id2label", "label2id", "problem_type")


@dataclass(frozen=True)
class Lineage:
    """The models of a run.

    given   the teacher as the user named it
    tutor   it, with a head for the task; None where the run has no task
    """

    recipe: Recipe
    given: Teacher
    tutor: Teacher | None
    material: Material
    run: Run

    def train(self, stages: Sequence[Stage], *, teacher_logits: Any = None) -> PreTrainedModel:
        """Run what is left of `stages`, and return the model that the last one leaves."""
        done, remaining = self.run.remaining(stages)
        student = None
        if done is not None:
            last = stages[len(stages) - len(remaining) - 1]
            student = heads.load(done, last.head, self.material.kind)
        for stage in remaining:
            teacher = self.teacher(stage)
            student = self._student(stage, teacher, student)
            student = run_stage(stage, student, teacher, self.material, self.run, teacher_logits=teacher_logits)
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
            found = load(before.name, self.run.result(before.name), stage.head, kind=self.material.kind)
        for name in _LABELS:  # students built from it end in the task's head
            setattr(found.model.config, name, getattr(self.given.model.config, name))
        found.model.to(PartialState().device)
        return found

    def _student(self, stage: Stage, teacher: Teacher | None, before: PreTrainedModel | None) -> PreTrainedModel:
        spec = spec_of(self.recipe, stage)
        if spec is None:
            assert before is not None, "only a first stage has none before it"
            return heads.under(before, stage.head, self.material.kind)
        set_seed(self.run.seed)
        source = teacher or self.tutor or self.given
        student = students.build(spec, source.model, head=stage.head, kind=self.material.kind)
        last = self.recipe.stages[-1]
        if last.head == "task" and self.material.kind is not None:
            check_parts(student, self.given.tokenizer, self.material.data.task, last.max_length)
        return student

    def check(self) -> None:
        """Raise StudentError before anything is trained, where a stage's student cannot be built."""
        configs: dict[str, PreTrainedConfig] = {}
        config = self.given.model.config
        for stage in self.recipe.stages:
            spec = spec_of(self.recipe, stage)
            if spec is not None and (not isinstance(spec.init, str) or spec.init in ("scratch", "teacher")):
                previous = stage.teacher == "previous" and stage.kind == "distill"
                source = configs[ancestor(self.recipe.stages, stage).name] if previous else self.given.model.config
                config = students.config_for(spec, source)
            heads.model_class(config, stage.head, self.material.kind)
            configs[stage.name] = config


def in_bf16(number_format: str, recipe: Recipe, given: Teacher, console: Console) -> bool:
    """Whether this run computes in bfloat16: as asked, but for families that cannot, which is said."""
    specs = [spec for stage in recipe.stages if (spec := spec_of(recipe, stage))]
    unfit = {given.model.config.model_type, *(spec.family for spec in specs)} & set(FLOAT32_ONLY)
    if number_format == "bf16" and unfit:
        console.print(f"[yellow]note[/] {', '.join(unfit)} models run in float32 only: this run is slower for it")
    return number_format == "bf16" and not unfit


def spec_of(recipe: Recipe, stage: Stage) -> StudentSpec | None:
    """What this stage builds anew: its own student, the recipe's in the first stage, else nothing."""
    if stage.student is not None:
        return stage.student
    return recipe.student if stage is recipe.stages[0] else None


def ancestor(stages: Sequence[Stage], stage: Stage) -> Stage:
    """The stage that left what `teacher: previous` means: the one before the latest that began with a new student."""
    until = stages[: stages.index(stage) + 1]
    new = max((at for at, each in enumerate(until) if each.student is not None), default=0)
    if new == 0:
        raise RecipeError(
            [f"stage {stage.name}: `teacher: previous` needs a stage with `student:` after another stage"]
        )
    return stages[new - 1]


def check(recipe: Recipe) -> list[str]:
    """Every problem of a recipe's functions, and of who learns from whom, that shows without models."""
    problems = []
    calls = [
        (f"stages[{at}].{name}", getattr(stage, name), given)
        for at, stage in enumerate(recipe.stages)
        for name, given in _GIVEN.items()
    ]
    specs = [
        ("student", recipe.student),
        *((f"stages[{at}].student", each.student) for at, each in enumerate(recipe.stages)),
    ]
    calls += [(f"{where}.init", spec.init, ()) for where, spec in specs if spec and isinstance(spec.init, Call)]
    for where, call, given in calls:
        if call is not None:
            problems += calling.check(call, f"{recipe.name}: {where}", given=given)
    for at, stage in enumerate(recipe.stages):
        if stage.teacher == "previous" and stage.kind == "distill":
            try:
                ancestor(recipe.stages, stage)
            except RecipeError as error:
                problems += [f"{recipe.name}: stages[{at}]: {problem}" for problem in error.problems]
    return problems
