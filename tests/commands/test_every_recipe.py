"""Every recipe of the folder runs, end to end, at tiny size: what its stages name works together."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForPreTraining

import compress
from compress.config.loader import names
from compress.config.recipe import Recipe, Target
from compress.config.stages import Prune, Stage, StudentSpec
from compress.config.term import Term
from compress.errors import RecipeError
from compress.exporters.artifact import Bundle
from compress.jobs.shipping import Ship
from compress.records.run_report import Report
from compress.training.trainer import StepTrainer
from tests import marked, tiny
from tests.unshipped import Trained

GENERATIVE = ("distilgpt2", "gkd", "minillm", "t5", "t5-spans")
"""Recipes that end in a language model: `compress pretrain` runs them."""
PROMPTED = ("prompted",)
"""Recipes whose teacher is a prompted language model: tests/prompting/test_teacher.py runs them."""
KNOWING = ("knowledge",)
"""Recipes whose teacher reads facts: tests/commands/test_knowledge.py runs them."""
EMBEDDING = ("dpr", "embed-mse", "embed-similarity", "leaf", "margin-mse-vectors", "matryoshka")
"""Recipes whose terms serve tasks of sentence vectors only."""
RANKINGS = ("margin-mse", "listnet")
"""Recipes that need queries with passages."""
HERE = [name for name in names() if name not in (*GENERATIVE, *PROMPTED, *KNOWING, *EMBEDDING)]
OTHER_TEACHERS = {
    "distilroberta": ("roberta", AutoModel),
    "electra-distill": ("electra", AutoModelForPreTraining),
    "gpt": ("gpt2", AutoModel),
    "xlnet": ("xlnet", AutoModel),
}
"""Recipes that a BERT cannot teach."""
SHIPPED = {
    "hinton": "bert", "distilbert-general": "distilbert", "distilroberta": "roberta", "electra-small": "electra",
    "deberta": "deberta-v2", "albert-shared": "albert", "xlm": "xlm", "xlnet": "xlnet", "mobilebert-task": "mobilebert",
    "ib-bert": "ib-bert", "static": "static-embedding", "q8bert": "bert", "prune-taylor": "bert", "gpt": "gpt2",
}  # fmt: skip
"""Recipes whose student is exported, quantised and measured too, with its family; other recipes change only weights."""
SMALL = {"layers": 2, "hidden": 16, "ffn": 32, "heads": 2}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("every")
    corpus = folder / "corpus.txt"
    story = "the story was sharp but slow . a film is never quite dull . this actor was great and the plot is fun ."
    corpus.write_text("\n\n".join([f"{story}\n{story}"] * 30), encoding="utf-8")
    for n, split in enumerate(("train", "dev")):
        marked.rankings(folder / "rankings" / f"{split}.tsv", count=16 - 4 * n, seed=n)
    data = {"data": tiny.reviews(folder / "data", train=48, dev=16), "rankings": str(folder / "rankings")}
    for code in ("en", "fr"):
        (folder / "languages" / code).mkdir(parents=True)
        (folder / "languages" / code / "a.txt").write_text(corpus.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "languages" / "en-fr.tsv").write_text("good film\tbad plot\n" * 40, encoding="utf-8")
    return {**data, "corpus": str(corpus), "languages": str(folder / "languages"), "folder": str(folder)}


def teacher(name: str, folder: Path) -> str:
    family, head = OTHER_TEACHERS.get(name, ("bert", AutoModel))
    return tiny.checkpoint(folder / "teacher", tiny.model(family, head=head, layers=4, heads=2))


def shrunk(name: str) -> Recipe:
    """Shrink the students and shorten the stages of a recipe, and change nothing else."""
    recipe = Recipe.load(name)
    stages = tuple(_few(stage) if isinstance(stage, Prune) else _short(stage) for stage in recipe.stages)
    changes: dict[str, Any] = {"teacher": _short(recipe.teacher, steps=4, lr=1e-2), "stages": stages}
    changes |= {"teacher_lm": _short(recipe.teacher_lm), "student": _small(recipe.student)}
    if recipe.pruning:
        changes["target"] = Target.model_validate({"layers": 3, "hidden": 16, "heads": 2, "ffn": 0.5})
    return recipe.model_copy(update=changes)


def _few(stage: Prune) -> Prune:
    return stage.model_copy(update={"rows": 16, "batch": 8, "max_length": 32})


def _short(stage: Stage, *, steps: int = 3, lr: float | None = None) -> Stage:
    changes: dict[str, Any] = {"steps": steps, "batch": 8, "micro_batch": 4, "max_length": 32, "evaluate": 1}
    changes["objective"] = tuple(_fewer_heads(term) for term in stage.objective)
    if stage.student is not None:
        changes["student"] = _small(stage.student)
    return stage.model_copy(update=changes | ({"lr": lr, "batch": 16} if lr else {}))


def _fewer_heads(term: Term) -> Term:
    """Relations between the heads of a tiny model."""
    return replace(term, options={**term.options, "heads": 2}) if "heads" in term.options else term


def _small(spec: StudentSpec) -> StudentSpec:
    sizes = {size: SMALL[size] for size in SMALL if (getattr(spec, size) or 0) >= 1}
    if sizes.get("layers") and not isinstance(spec.copy_layers, str):
        sizes["copy_layers"] = (0, -1)  # type: ignore[assignment]
    if spec.embedding is not None and spec.embedding >= 1:
        sizes["embedding"] = 8
    return spec.model_copy(update=sizes)


def test_every_recipe_is_run_by_some_test() -> None:
    """Here, in tests/commands/test_generative_recipes.py, in tests/prompting/test_teacher.py, or
    in tests/commands/test_knowledge.py."""
    assert {*GENERATIVE, *PROMPTED, *KNOWING, *EMBEDDING} <= set(names())
    assert (len(names()), len(HERE)) == (51, 38)
    serves = {
        name: {kind for stage in Recipe.load(name).training for each in stage.objective for kind in each.only}
        for name in names()
    }
    assert sorted(name for name, kinds in serves.items() if kinds == {"embedding"}) == list(EMBEDDING)


@pytest.mark.gpu
@pytest.mark.parametrize("name", HERE)
def test_a_recipe_ends_in_a_student_that_answers(
    name: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hastened: None
) -> None:
    """All use the same caches: a teacher with the same settings is fine-tuned once."""
    monkeypatch.setenv("COMPRESS_HOME", f"{places['folder']}/home")
    students: list[Any] = []

    ship = Ship.run

    def shipped(phase: Ship, job: Any) -> Any:
        students.append(job.student)
        if name not in SHIPPED:
            raise Trained
        return ship(phase, job)

    monkeypatch.setattr(Ship, "run", shipped)
    data = {"data": places["data"], "corpus": places["corpus"]}
    if name in RANKINGS:
        data = {"data": places["rankings"], "kind": "ranking"}
    with pytest.raises(Trained) if name not in SHIPPED else nullcontext():
        tiny.call(
            compress.distill, teacher=teacher(name, tmp_path), recipe=shrunk(name), out=tmp_path / "run", gate="warn",
            **data,
        )  # fmt: skip
    stages = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8"))["stages"]
    assert len(stages) == len(Recipe.load(name).stages)
    logits = students[0].eval()(**tiny.batch()).logits
    assert logits.shape == (3, 1 if name in RANKINGS else 2) and logits.isfinite().all()
    assert students[0].config.model_type in SHIPPED.values(), "a recipe of each family is shipped"
    if name in SHIPPED:
        bundle = Bundle.load(tmp_path / "run" / "bundle")
        assert {each.label for each in bundle.predict(["good film", "bad plot"])} <= {"negative", "positive"}
        rows = Report.from_json(bundle.path / "report.json").of_role("student")
        assert [row.name for row in rows] == ["student fp32", "student int8"]
        assert bundle.manifest.parameters > 0


@pytest.mark.parametrize("name", ["bert", "electra-small", "deberta-v3", "mobilebert-tiny", "xlnet", "xlm"])
def test_a_mechanism_that_was_interrupted_ends_with_the_same_weights(
    name: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, generators, schedules, languages and copied embeddings resume where they were."""
    recipe = shrunk(name)
    recipe = recipe.model_copy(
        update={"stages": tuple(each.model_copy(update={"steps": 3, "checkpoint": 2}) for each in recipe.stages)}
    )
    corpus = places["languages" if name == "xlm" else "corpus"]
    given: dict[str, Any] = {"teacher": teacher(name, tmp_path), "recipe": recipe, "corpus": corpus}
    given["precision"] = "fp32"
    whole = tiny.call(compress.pretrain, **given, out=tmp_path / "whole")
    compute, calls = StepTrainer.compute_loss, count(1)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return compute(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepTrainer, "compute_loss", interrupt)
        tiny.call(compress.pretrain, **given, out=tmp_path / "halved")
    again = tiny.call(compress.pretrain, **given, out=tmp_path / "halved", resume=True)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_more_languages_than_the_student_tells_apart_are_refused(places: dict[str, str], tmp_path: Path) -> None:
    for code in ("en", "fr", "ta"):
        shutil.copytree(Path(places["languages"]) / "en", tmp_path / "texts" / code)
    given: dict[str, Any] = {"teacher": teacher("xlm", tmp_path), "corpus": str(tmp_path / "texts")}
    with pytest.raises(RecipeError, match=r"3 languages, the student 2: expected --set student\.config\.n_langs=3"):
        tiny.call(compress.pretrain, **given, recipe=shrunk("xlm"), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("train", "kept"), [("all", "nothing"), ("head", "embeddings|encoder"), ("no positions", "position_")]
)
def test_a_teacher_gets_its_language_model_once(train: str, kept: str, places: dict[str, str], tmp_path: Path) -> None:
    """What a stage does not train is as it was; a second run takes the teacher from the cache."""
    source, recipe = teacher("distilbert-general", tmp_path), shrunk("distilbert-general")
    recipe = recipe.model_copy(update={"teacher_lm": recipe.teacher_lm.model_copy(update={"train": train})})
    given: dict[str, Any] = {"teacher": source, "recipe": recipe, "corpus": places["corpus"], "precision": "fp32"}
    tiny.call(compress.pretrain, **given, out=tmp_path / "one")
    trained = tmp_path / "one" / "stages" / "teacher-lm" / "model" / "model.safetensors"
    before, after = load_file(Path(source) / "model.safetensors"), load_file(trained)
    parts = {name: tensor for name, tensor in before.items() if "pooler" not in name}
    same = {name for name, tensor in parts.items() if torch.equal(tensor, after[f"bert.{name}"])}
    assert same == {name for name in parts if re.search(kept, name)}
    tiny.call(compress.pretrain, **given, out=tmp_path / "two")
    assert not (tmp_path / "two" / "stages" / "teacher-lm").exists()
