"""A language model teaches an encoder: from a prompt to a measured bundle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import compress
from compress.config.recipe import Recipe
from compress.data import load_task
from compress.errors import PromptError, RecipeError, RunError, TeacherError
from compress.exporters.artifact import Bundle
from compress.prompting.labels import starting_checkpoint
from compress.prompting.prompt import Prompt
from compress.teachers import labelling
from compress.teachers import prompted as teaching
from compress.training import stage as stages
from tests import command, tiny
from tests.prompting import language_models
from tests.prompting.language_models import FakeLanguageModel
from tests.unshipped import Trained

pytestmark = pytest.mark.usefixtures("hastened")

KNOWS = {"good": (-2.5, -0.5), "bad": (-0.5, -2.5)}
PROMPT = """
template: "Review: {{ text }}\\nSentiment: {{ label }}"
labels: {negative: bad, positive: good}
normalise: none
calibrate: none
"""
QUICK = ["stages.0.steps=30", "stages.0.batch=16", "stages.0.max_length=32", "stages.0.lr=5e-3", "stages.0.evaluate=1"]


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> FakeLanguageModel:
    """Whatever the teacher is called, this one answers."""
    model = FakeLanguageModel(KNOWS, (-1.0, -1.0), parameters=1_500_000_000)
    for module in (teaching, labelling):
        monkeypatch.setattr(module, "open_language_model", lambda *_, **__: model)
    return model


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "prompt.yaml").write_text(PROMPT, encoding="utf-8")
    student = tiny.checkpoint(tmp_path / "student")
    return {
        "teacher": "gpt2", "prompt": str(tmp_path / "prompt.yaml"), "recipe": "prompted",
        "data": tiny.reviews(tmp_path / "data"), "out": tmp_path / "run", "precision": "fp32",
        "overrides": [*QUICK, f"student.init={student}"],
    }  # fmt: skip


def unlabelled_but_for_scores(data: str) -> None:
    """The labels of the training split, turned at random: whoever learned from them would learn nothing."""
    train = Path(data) / "train.tsv"
    header, *lines = train.read_text(encoding="utf-8").splitlines()
    texts = [line.split("\t")[0] for line in lines]
    wrong = np.random.default_rng(0).permutation(["negative", "positive"] * (len(texts) // 2))
    train.write_text("\n".join([header, *map("\t".join, zip(texts, wrong, strict=True))]) + "\n", encoding="utf-8")


def test_texts_without_labels_are_rows_of_the_prompts_labels(
    given: dict[str, Any], speaker: FakeLanguageModel, tmp_path: Path
) -> None:
    """Of a file of texts alone: they are labelled first, and a prompt that would choose examples has none."""
    rows = (Path(given["data"]) / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    (tmp_path / "texts.txt").write_text("\n".join(row.split("\t")[0] for row in rows) + "\n", encoding="utf-8")
    given |= {"data": str(tmp_path / "texts.txt"), "prompt": str(tmp_path / "four.yaml")}
    (tmp_path / "four.yaml").write_text(f"{PROMPT}examples: 4\n", encoding="utf-8")
    plan = {name: value for name, value in given.items() if name != "out"}
    assert "asking told" in {phase.name for phase in tiny.call(compress.forecast, **plan).phases}
    bundle = tiny.call(compress.distill, **given)
    assert bundle.task.labels == ("negative", "positive")
    assert [each.label for each in bundle.predict(["a good film", "bad"])] == ["positive", "negative"]
    assert (bundle.report().split, bundle.report().data[:10]) == ("validation", "texts.txt-")


def test_a_student_learns_from_the_model_not_the_labels(
    given: dict[str, Any], speaker: FakeLanguageModel, tmp_path: Path
) -> None:
    unlabelled_but_for_scores(given["data"])
    bundle = tiny.call(compress.distill, **given)
    assert [each.label for each in bundle.predict(["a good film", "bad"])] == ["positive", "negative"]
    report = json.loads((bundle.path / "report.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["majority", "bag of words", "told", "student fp32", "student int8"]
    teacher, student = rows["told"], rows["student fp32"]
    assert teacher["score"]["accuracy"] == 1.0
    assert student["score"]["accuracy"] > 0.9
    assert student["agreement"] == student["score"]["accuracy"]
    assert teacher["parameters"] == 1_500_000_000
    assert (teacher["latency"], teacher["file_mb"]) == (None, None)
    assert student["latency"]
    assert report["teacher"] == "told"
    assert any("told answered" in note for note in report["notes"])
    assert any("asked about train: answers negative 50.0%, positive 50.0%" in note for note in report["notes"])
    assert not (tmp_path / "run" / "teacher").exists()
    assert "told" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    kept = Bundle.load(bundle.path)
    assert "prompt.yaml" in kept.manifest.files
    (tmp_path / "again.yaml").write_text((kept.path / "prompt.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    again = Prompt.load(str(tmp_path / "again.yaml"))
    assert again == Prompt.load(given["prompt"])


def test_the_student_is_trained_on_the_probabilities_of_its_rows(
    given: dict[str, Any], speaker: FakeLanguageModel, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    seen, train = {}, stages.train

    def watched(step: Any, stage: Any, rows: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        batch = context.collate([rows[i] for i in range(5, 25)])
        seen["p"] = step.teacher.signals(batch, frozenset({"logits"})).logits.softmax(-1)
        return train(step, stage, rows, context, *args, **kwargs)

    monkeypatch.setattr(stages, "train", watched)
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
    texts = load_task(given["data"]).train[5:25]["text"]
    expected = torch.tensor([KNOWS["good" if "good" in text else "bad"] for text in texts]).softmax(-1)
    torch.testing.assert_close(seen["p"], expected)


def test_a_resumed_run_asks_nothing_again(given: dict[str, Any], speaker: FakeLanguageModel, unmeasured: None) -> None:
    speaker.stop_after = 60
    with pytest.raises(KeyboardInterrupt):
        tiny.call(compress.distill, **given)
    assert len(speaker.asked) == 60
    speaker.stop_after = None
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given, resume=True)
    assert len(speaker.asked) == len(set(speaker.asked)), "no prompt was asked twice"


def test_the_validation_split_is_labelled_first(given: dict[str, Any], speaker: FakeLanguageModel) -> None:
    speaker.says = {"good": (-0.5, -2.5), "bad": (-2.5, -0.5)}
    with pytest.raises(TeacherError, match=r"teacher told cannot teach this task.*Try other words for the labels"):
        tiny.call(compress.distill, **given)
    texts = set(load_task(given["data"]).validation["text"])
    assert {question.removeprefix("Review: ").partition("\n")[0] for question in speaker.asked} <= texts


def test_another_prompt_is_another_run(given: dict[str, Any], speaker: FakeLanguageModel, unmeasured: None) -> None:
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
    Path(given["prompt"]).write_text(PROMPT.replace("Review", "Text"), encoding="utf-8")
    with pytest.raises(RunError, match="prompt was"):
        tiny.call(compress.distill, **given, resume=True)


@pytest.mark.parametrize(
    ("recipe", "messages"),
    [
        ("hinton", ["student.init: a prompted teacher has no encoder"]),
        ("tinybert", ["student.init", "tinybert.embeddings reads embeddings; this teacher has only logits"]),
        ("tinybert-aug", ["augment: this teacher has only answered the task's own rows"]),
    ],
)
def test_a_recipe_that_asks_for_more_than_probabilities_is_refused_before_anything(
    recipe: str, messages: list[str], given: dict[str, Any], speaker: FakeLanguageModel
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny.call(compress.distill, **given | {"recipe": recipe, "overrides": []})
    assert [part for part in messages if part not in str(caught.value)] == []
    assert not given["out"].exists()
    assert speaker.asked == []


def test_other_recipes_may_have_a_prompted_teacher(
    given: dict[str, Any], speaker: FakeLanguageModel, unmeasured: None
) -> None:
    """The recipe's hard labels are then the data's own: its user's choice."""
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given | {"recipe": "hinton"})


def test_a_prompt_for_another_task_is_refused(given: dict[str, Any], speaker: FakeLanguageModel) -> None:
    with pytest.raises(PromptError, match="lacks the task's label 'negative'"):
        tiny.call(compress.distill, **given | {"prompt": "topic"})
    with pytest.raises(PromptError, match="no prompt 'topics'"):
        tiny.call(compress.distill, **given | {"prompt": "topics"})


def test_a_seq2seq_model_teaches_from_the_command_line(given: dict[str, Any], tmp_path: Path, unmeasured: None) -> None:
    """A random one, which teaches nothing: with a warning."""
    teacher = language_models.saved(tmp_path / "t5", language_models.t5(), language_models.pieces())
    words = ["--teacher", teacher, "--prompt", "sentiment", "--recipe", "prompted", "--data", given["data"]]
    words += ["--out", str(tmp_path / "run"), "--gate", "warn", "--precision", "fp32"]
    settings = [*given["overrides"], "stages.0.steps=2"]
    with pytest.raises(Trained):
        command.run("distill", *words, *(word for each in settings for word in ("--set", each)))
    resolved = yaml.safe_load((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert resolved["prompt"]["examples"] == 4
    assert (tmp_path / "run" / "stages" / "soft-labels" / "model").is_dir()


def test_the_recipe_is_for_the_embedded_student() -> None:
    recipe = Recipe.load("prompted")
    assert starting_checkpoint(recipe) == "minilm"
    (stage,) = recipe.stages
    (term,) = stage.objective
    assert (term.loss, dict(term.options)) == ("hinton.soft_targets", {"temperature": 1.0})


def test_a_training_split_without_labels(given: dict[str, Any], speaker: FakeLanguageModel, unmeasured: None) -> None:
    """Validation alone has them: it names the classes, and scores. Examples must then be written out."""
    train = Path(given["data"]) / "train.tsv"
    lines = [line.split("\t")[0] for line in train.read_text(encoding="utf-8").splitlines()]
    train.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(PromptError, match="cannot be chosen from rows without labels"):
        tiny.call(compress.distill, **given | {"prompt": "sentiment"})
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given)
