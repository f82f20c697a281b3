"""A prompted language model in the place of a fine-tuned teacher: asked about every row before anybody is trained."""

from dataclasses import replace

import yaml
from rich.console import Console

from compress.config.recipe import INITS, Recipe, Stage
from compress.data.task import TaskData
from compress.errors import ObjectiveError, RecipeError
from compress.models.teacher import RecordedLogits, Teacher
from compress.prompting.labels import (
    PromptedTeacher,
    open_speaker,
    questions_for,
    refuse_unusable,
)
from compress.prompting.prompt import Prompt
from compress.training.finetune import TeacherCheck, check_logits
from compress.training.objective import find_loss

REMEDY = (
    "Try other words for the labels, more examples, calibration or a larger model; --gate warn goes on all the same"
)


def starting_checkpoint(recipe: Recipe) -> str:
    """Name the checkpoint that the student begins as, with its tokenizer and vocabulary: a language model has others.

    Raises RecipeError for all that such a recipe cannot ask of a teacher that only gives probabilities of labels.
    """
    problems = []
    init = recipe.student.init
    if not isinstance(init, str) or init in INITS:
        problems.append(
            f"{recipe.name}: student.init: a prompted teacher has no encoder to build a student from; name the "
            "checkpoint it begins as: --set student.init=minilm"
        )
    for at, stage in enumerate(recipe.training):
        problems += [f"{recipe.name}: stages[{at}].{problem}" for problem in _problems(stage)]
    if problems:
        raise RecipeError(problems)
    return str(init)


def _problems(stage: Stage) -> list[str]:
    if stage.kind != "distill" or stage.teacher != "task":
        return []
    problems = [
        f"{name}: a prompted teacher has answered for the task's own rows only; remove it"
        for name in ("augment", "corpus", "rows", "step")
        if getattr(stage, name) not in (None, False, "auto")
    ]
    if stage.data != "task" or stage.head != "task":
        problems.append("data, head: a prompted teacher teaches the task: expected `task` for both")
    for term in stage.objective:
        try:
            reading = find_loss(term).reading
        except ObjectiveError:  # told with all other problems of objectives
            continue
        if reading.against == "teacher" and reading.signal != "logits":
            problems.append(f"objective: {term.name} reads {reading.signal}; a prompted teacher shows logits only")
    return problems


def prompt_teacher(
    name: str,
    prompt: Prompt,
    base_teacher: Teacher,
    data: TaskData,
    *,
    seed: int,
    bf16: bool,
    strict: bool,
    allow_pickle: bool,
    console: Console,
) -> tuple[Teacher, TeacherCheck]:
    """Return `base_teacher` with the answers of the language model `name` for its own, and what the gate saw of them.

    The validation split is asked about first: a model that is no teacher costs no more than that. Labels in the
    training split serve as examples, where the prompt wants some, and for nothing else. Raises CompressError.
    """
    questions = questions_for(prompt, data.task, train=data.train, seed=seed)
    speaker = open_speaker(name, allow_pickle=allow_pickle, bf16=bf16)
    prompted = PromptedTeacher(speaker, questions, console)
    soft = {"validation": prompted.label_split(data.validation)}
    seen = check_logits(prompted.name, soft["validation"].log_p_NC, data, strict=strict, remedy=REMEDY)
    soft["train"] = prompted.label_split(data.train)
    unusable = refuse_unusable(soft["train"], prompted.name, "training", strict=strict)
    if data.test is not None:
        soft["test"] = prompted.label_split(data.test)
    splits = {"validation": data.validation, "train": data.train, "test": data.test}
    logits = {splits[each]._fingerprint: found.log_p_NC for each, found in soft.items()}
    settings = yaml.safe_dump(prompt.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    notes = [
        *seen.notes,
        *unusable,
        *(f"{each}: {note}" for each, found in soft.items() for note in found.notes),
        *(soft[each].balance(f"{prompted.name}, asked about {each}") for each in ("train", "validation")),
    ]
    asked, seconds = sum(each.asked for each in soft.values()), sum(each.seconds for each in soft.values())
    if asked:
        notes.append(f"{prompted.name} answered {asked:,} prompts in {seconds:.0f} s, {seconds / asked:.3f} s each.")
    recorded = RecordedLogits(logits, settings, speaker.parameters)
    teacher = replace(base_teacher, name=prompted.name, digest=prompted.digest, recorded=recorded)
    return teacher, replace(seen, notes=tuple(notes))
