"""From stage to stage: which model a stage is given, and which it learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import PartialState
from rich.console import Console

from compress.config.recipe import Recipe, spec_of
from compress.console import print_note, warn
from compress.data import load_task
from compress.data.collate import Collate, encode
from compress.data.corpus import load_corpus
from compress.data.task import Kind
from compress.models import checkpoints, teacher
from compress.models.precision import FLOAT32_ONLY
from compress.models.teacher import Teacher
from compress.training import teacher_check
from compress.training.finetune import general, with_head
from compress.training.run import Run
from compress.training.stage import TrainingContext
from compress.training.teacher_check import TeacherCheck


def in_bf16(number_format: str, recipe: Recipe, given: Teacher, console: Console) -> bool:
    """Whether this run computes in bfloat16: as asked, but for families that cannot, which is said."""
    specs = [spec for stage in recipe.stages if (spec := spec_of(recipe, stage))]
    unfit = {given.model.config.model_type, *(spec.family for spec in specs)} & set(FLOAT32_ONLY)
    if number_format == "bf16" and unfit:
        print_note(console, f"{', '.join(unfit)} models run in float32 only: this run is slower for it")
    return number_format == "bf16" and not unfit


@dataclass(frozen=True)
class Opened:
    """The teacher as named, and all else that stages work on."""

    given: Teacher
    material: TrainingContext


def opened(
    checkpoint: str,
    data: str,
    recipe: Recipe,
    run: Run,
    *,
    corpus: str | None = None,
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: Kind | None = None,
    metric: str | None = None,
    unlabelled: bool = False,
    number_format: str = "fp32",
    allow_pickle: bool = False,
    console: Console,
) -> Opened:
    """Teacher and data, loaded, each file fetched by the first process. Raises TeacherError, DataError."""
    with PartialState().main_process_first():
        folder = checkpoints.resolve(checkpoint, allow_pickle=allow_pickle)
        task_data = load_task(
            data, text=text, label=label, kind=kind, metric=metric, seed=run.seed, unlabelled=unlabelled
        )
        given = teacher.load(checkpoint, folder, task_data.task, allow_pickle=allow_pickle)
        texts = load_corpus(corpus) if corpus else None
    read = {"student" if unlabelled else "teacher": given.digest, "data": task_data.fingerprint}
    run.confirm(**read, **({"corpus": texts.fingerprint} if texts else {}))
    for note in task_data.notes:
        print_note(console, note)
    material = TrainingContext(
        task_data, texts, given.tokenizer, Collate(given.tokenizer), in_bf16(number_format, recipe, given, console),
        console, masked_lm=lambda: general(given, "masked_lm", recipe.teacher_lm, material, run), given=given,
    )  # fmt: skip
    return Opened(given, material)


def tutored(found: Opened, recipe: Recipe, run: Run, *, strict: bool) -> tuple[Teacher, TeacherCheck]:
    """The teacher with a head for the task, fine-tuned by `recipe.teacher` where it has none, and past the gate.

    Raises TeacherError where it is no better than the majority answer, and `strict`. What the gate notes is printed.
    """
    tutor = with_head(found.given, recipe.teacher, found.material, run)
    tutor.model.to(PartialState().device)
    material = found.material
    rows = encode(material.data.validation, tutor.tokenizer, recipe.stages[-1].max_length)
    seen = teacher_check.check_teacher(tutor, material.data, rows, material.collate, bf16=material.bf16, strict=strict)
    for note in seen.notes:
        warn(material.console, note)
    return tutor, seen
