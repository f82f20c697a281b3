"""A teacher reads each text with the facts about the names in it, and a student learns its answers from the text."""

import io
import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console

import compress
from compress.commands.distill import forecast
from compress.data import load_task
from compress.data.collate import Collate
from compress.data.knowledge import load_knowledge
from compress.errors import CompressError, DataError, RecipeError, RunError
from compress.jobs.shipping import Ship
from compress.teachers.knowledge import InformedTeacher
from compress.training import stage as stages
from tests import marked, tiny
from tests.unshipped import Trained

pytestmark = pytest.mark.usefixtures("hastened")

SAYS = ("bad", "good")
NAMES = [" ".join(words) for words in permutations(tiny.WORDS[4:12], 2)]
"""Names that say nothing of themselves."""
QUICK = [
    "teacher.steps=60", "teacher.batch=16", "teacher.lr=5e-3", "teacher.max_length=16", "teacher.evaluate=1",
    "stages.0.steps=20", "stages.0.batch=16", "stages.0.lr=5e-3", "stages.0.max_length=16", "stages.0.evaluate=1",
]  # fmt: skip


def write(folder: Path) -> tuple[str, str]:
    """Write texts that each name a thing, which is good or bad, and a table that says which; return both paths."""
    draw = random.Random(0)
    names = draw.sample(NAMES, len(NAMES))
    known = {name: number % 2 for number, name in enumerate(names)}
    (folder / "data").mkdir()
    for split, chosen in (("train", names[:40]), ("dev", names[40:])):
        rows = [
            (f"{before} {name} was {after}", ("negative", "positive")[known[name]])
            for name in chosen
            for before, after in (("a", "slow"), ("that", "sharp"))
        ]
        lines = ["text\tlabel", *map("\t".join, rows)]
        (folder / "data" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    triples = [f"{name.replace(' ', '_')}\tis\t{SAYS[sign]}" for name, sign in known.items()]
    (folder / "triples.tsv").write_text("\n".join(["head\trelation\ttail", *triples]) + "\n", encoding="utf-8")
    return str(folder / "data"), str(folder / "triples.tsv")


def write_corpus(folder: Path) -> Path:
    """Write a text without a label on each name."""
    texts = [f"this {name} was slow" for name in NAMES]
    (folder / "corpus.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return folder / "corpus.txt"


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    data, triples = write(tmp_path)
    return {
        "teacher": tiny.checkpoint(tmp_path / "teacher"), "data": data, "knowledge": triples, "recipe": "knowledge",
        "out": tmp_path / "run", "precision": "fp32", "overrides": [*QUICK, "stages.0.augment=null"],
    }  # fmt: skip


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stages of a run learn from: the texts, and the teacher's logits of all rows, by stage."""
    seen = dict[str, Any]()
    train = stages.train

    def watched(step: Any, stage: Any, rows: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        if stage.kind == "distill":
            batch = context.collate(list(rows))
            seen["tokens"] = batch["input_ids"].shape[1]
            seen["logits"] = step.teacher.signals(batch, frozenset({"logits"})).logits.numpy()
            seen["rows"] = len(rows)
        return train(step, stage, rows, context, *args, **kwargs)

    monkeypatch.setattr(stages, "train", watched)
    return seen


def test_the_teacher_reads_facts_and_the_bundle_the_text_alone(given: dict[str, Any]) -> None:
    bundle = tiny.call(compress.distill, **given)
    report = json.loads((bundle.path / "report.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    teacher = rows[report["teacher"]]
    assert report["teacher"] == f"{given['teacher']} with triples.tsv"
    assert teacher["score"]["accuracy"] == 1.0, "the facts decide"
    assert rows["student fp32"]["score"]["accuracy"] < 0.9, "new names say nothing"
    assert (teacher["latency"], teacher["file_mb"]) == (None, None)
    assert any("the student is given the text alone. 80 of 80 training texts" in note for note in report["notes"])
    assert "this model is given the text alone" in (bundle.path / "README.md").read_text(encoding="utf-8")
    assert bundle.manifest.max_length == 16
    assert {each.label for each in bundle.predict(["a film story was slow"])} <= {"negative", "positive"}


def test_the_student_learns_the_answers_to_texts_with_facts(
    given: dict[str, Any], taught: dict[str, Any], unmeasured: None
) -> None:
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
    labels = np.array(load_task(given["data"]).train["label"][:])
    assert taught["tokens"] == 7, "a text has five words"
    assert (taught["logits"].argmax(axis=1) == labels).mean() == 1.0


def informed(given: dict[str, Any], model: Any, *, pair: bool = False) -> InformedTeacher:
    return InformedTeacher(
        "told", Path(given["teacher"]), model, tiny.tokenizer(), f"digest {pair}", trained=True,
        knowledge=load_knowledge(Path(given["knowledge"])), max_length=40,
        collate=Collate(tiny.tokenizer()), bf16=False,
    )  # fmt: skip


@pytest.mark.parametrize("pair", [False, True])
def test_its_answers_are_those_of_the_model_to_a_pair(pair: bool, given: dict[str, Any]) -> None:
    model = tiny.bert()
    texts = [f"a {NAMES[0]} was slow", "the story", NAMES[1]]
    others = ["a plot", NAMES[2], "so"]
    columns = {"text": texts, "text_pair": others} if pair else {"text": texts}
    knowledge = load_knowledge(Path(given["knowledge"]))
    (zero,), (one,), (two,) = map(knowledge.list_facts, NAMES[:3])
    seconds = [f"a plot {zero}", f"{NAMES[2]} {two}", f"so {one}"] if pair else [zero, "", one]
    tokens = tiny.tokenizer()(texts, seconds, padding=True, return_tensors="pt")
    expected = model(**tokens).logits
    found = informed(given, model, pair=pair).known_answers(Dataset.from_dict(columns))
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_it_answers_once(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    split = Dataset.from_dict({"text": [f"a {NAMES[0]}"]})
    teacher = informed(given, tiny.bert())
    first = teacher.known_answers(split)
    monkeypatch.setattr("compress.evaluation.metrics.logits", None)
    assert (teacher.known_answers(split) == first).all()


def test_it_labels_the_texts_of_a_corpus_by_their_facts(
    given: dict[str, Any], taught: dict[str, Any], unmeasured: None, tmp_path: Path
) -> None:
    given["overrides"] += ["stages.0.corpus=true"]
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given | {"console": console}, corpus=str(write_corpus(tmp_path)))
    assert console.file.getvalue().count("texts of the corpus") == 1  # type: ignore[attr-defined]
    assert taught["rows"] == 80 + len(NAMES)
    counts = np.bincount(taught["logits"][80:].argmax(axis=1), minlength=2)
    assert counts.tolist() == [len(NAMES) // 2] * 2, "half of the names are good"


def test_it_answers_variants_of_the_texts(given: dict[str, Any], taught: dict[str, Any], unmeasured: None) -> None:
    variants = "{by: tinybert.near_words, copies: 2}"
    given["overrides"] = [*QUICK, f"stages.0.augment={variants}"]
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
    assert taught["rows"] > 80
    assert len(taught["logits"]) == taught["rows"]


def test_auto_chooses_the_recipe_if_there_is_knowledge(given: dict[str, Any], unmeasured: None) -> None:
    recipe = given["out"] / "recipe.yaml"
    with pytest.raises(Trained):
        tiny.call(compress.distill, **(given | {"recipe": "auto"}))
    assert "name: knowledge\n" in recipe.read_text(encoding="utf-8")
    assert "needs_knowledge: true\n" in recipe.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", ["hinton", "knowledge"])
def test_any_recipe_that_learns_answers_works(recipe: str, given: dict[str, Any], unmeasured: None) -> None:
    with pytest.raises(Trained):
        tiny.call(compress.distill, **(given | {"recipe": recipe}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"knowledge": None}, RecipeError, "knowledge: its teacher reads facts with each text: give --knowledge"),
        ({"knowledge": "none.tsv"}, DataError, "--knowledge none.tsv: expected a file of triples"),
        ({"prompt": "sentiment"}, RecipeError, "only a checkpoint reads facts, not a prompted model"),
        (
            {"recipe": "tinybert", "overrides": ["student.layers=2"]},
            RecipeError,
            "tinybert.hidden reads layers; this teacher has only logits",
        ),
        (
            {"recipe": "deberta-sift", "overrides": ["stages.0.max_length=64"]},
            RecipeError,
            "step: this teacher has only answered the task's own rows",
        ),
        ({"recipe": "prune-taylor"}, RecipeError, "prune-taylor: prunes the teacher itself, which --knowledge lets"),
    ],
)
def test_what_cannot_use_facts_is_refused_by_name(
    changes: dict[str, Any], error: type[CompressError], message: str, given: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        tiny.call(compress.distill, **(given | {"overrides": None} | changes))
    assert not given["out"].exists()


def test_tags_have_no_facts(given: dict[str, Any], tmp_path: Path) -> None:
    tags = str(marked.sentences(tmp_path / "tags" / "train.conll"))
    with pytest.raises(DataError, match=r"--knowledge: train\.conll is a task of tagging; expected texts"):
        tiny.call(compress.distill, **(given | {"data": tags, "overrides": None}))


def test_texts_without_a_name_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("head\trelation\ttail\nFilm\tis\tgood\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no training text of data contains a name from other\.tsv"):
        tiny.call(compress.distill, **(given | {"knowledge": str(tmp_path / "other.tsv")}))


def test_the_facts_belong_to_a_run(given: dict[str, Any], unmeasured: None) -> None:
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
    with pytest.raises(RunError, match=r"knowledge was '.*triples.tsv', now None"):
        tiny.call(compress.distill, **(given | {"recipe": "hinton", "knowledge": None}), resume=True)
    path = Path(given["knowledge"])
    path.write_text(path.read_text(encoding="utf-8").replace("good", "fine"), encoding="utf-8")
    with pytest.raises(RunError, match=r"the knowledge .* has changed since the run began"):
        tiny.call(compress.distill, **given, resume=True)


def test_a_forecast_has_the_teacher_with_its_facts(
    given: dict[str, Any], tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ship, "estimate", lambda _, job: (job, []))
    del given["out"]
    given["overrides"] += ["stages.0.corpus=true"]
    phases = tiny.call(forecast, **given, corpus=str(write_corpus(tmp_path))).phases
    assert [each.name for each in phases] == ["teacher", f"asking {given['teacher']} with triples.tsv", "soft-targets"]
    assert phases[1].note == f"{80 + 32 + len(NAMES)} rows", "both splits and the corpus"
    assert phases[1].seconds[0] > 0
    kept = {folder.name for folder in home.iterdir() if any(folder.rglob("*.*"))}
    assert kept <= {"data", "encoded", "facts", "unlabelled"}, "rows, and nothing that an untrained teacher said"
