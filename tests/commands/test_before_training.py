"""What is settled before anything is trained: heads that the teacher has, students that are smaller, steps worth it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import GPT2Config

from compress import kinds
from compress.commands.distill import distill
from compress.commands.pretrain import pretrain
from compress.config.choices import CandidateRecipes
from compress.config.recipe import Recipe
from compress.config.stages import Stage
from compress.errors import RecipeError, TeacherError
from compress.jobs.checks import check_kind, check_lengths
from compress.kinds import Kind
from compress.models.flops import warn_if_larger
from compress.training.stage import explain_repetition, plan_steps
from tests import command, generative, tiny


@pytest.mark.parametrize("recipe", ["gkd", "distilgpt2", "minillm"])
def test_an_encoder_cannot_teach_generation(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("the film was good\n" * 20, encoding="utf-8")
    monkeypatch.setattr("compress.jobs.stages.run_stage", lambda *_, **__: pytest.fail("was trained"))
    with pytest.raises(TeacherError, match="causal_lm head"):
        pretrain(
            teacher=tiny.checkpoint(tmp_path / "teacher", tiny.bert(max_position_embeddings=1024).bert), recipe=recipe,
            out=tmp_path / "run", corpus=str(tmp_path / "corpus.txt"),
        )  # fmt: skip
    assert not (tmp_path / "run" / "stages").exists()


@pytest.mark.parametrize("recipe", ["gkd", "t5", "distilgpt2"])
def test_a_recipe_without_a_task_is_not_distilled(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="compress pretrain"):
        distill(teacher="minilm", recipe=recipe, data="intents", out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "kind", "losses"),
    [("dpr", "classification", "karpukhin.in_batch"), ("hinton", "embedding", "bert.labels")],
)
def test_a_recipe_for_another_kind_of_task(recipe: str, kind: Kind, losses: str) -> None:
    with pytest.raises(RecipeError) as refused:
        check_kind(Recipe.load(recipe), kind)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{recipe}: stages[0]")
    assert losses in problem
    assert "--recipe auto" in problem


@pytest.mark.parametrize(("new_tokens", "fits"), [(64, True), (65, False)])
def test_a_prompt_and_what_is_written_after_it_fit_the_positions(new_tokens: int, fits: bool) -> None:
    model = generative.gpt2(n_positions=128)
    teacher: Any = SimpleNamespace(model=model, name="small", trained=True)
    lengths = [f"stages.{at}.max_length=64" for at in (0, 1)]
    recipe = Recipe.load("minillm", [*lengths, f"stages.1.step.new_tokens={new_tokens}"])
    if fits:
        check_lengths(recipe, teacher)
        return
    with pytest.raises(RecipeError, match=r"stages\[1\]\.step needs 129 positions .* small has 128"):
        check_lengths(recipe, teacher)


@pytest.mark.parametrize("kind", kinds.names())
@pytest.mark.parametrize("family", ["bert", "albert"])
@pytest.mark.parametrize("scored", [False, True])
def test_auto_chooses_a_recipe_for_the_kind_of_task(kind: Kind, family: str, scored: bool) -> None:
    recipe, _ = CandidateRecipes.load("auto").decide(kind=kind, family=family, prompted=False, scored=scored)
    check_kind(recipe, kind)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"layers": 1}, ""),
        ({"layers": 4}, "larger than"),
        ({"layers": 1, "vocab_size": 500}, "larger than"),  # in parameters alone
        ({}, "as large as"),
    ],
)
def test_large_students_are_noted(sizes: dict[str, Any], expected: str) -> None:
    notes = warn_if_larger("only", tiny.config("bert", **sizes), tiny.config("bert"))
    assert [expected in note and "only" in note for note in notes] == ([True] if expected else [])


def test_a_decoder_is_sized() -> None:
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32, "pad_token_id": 1}
    small, big = (GPT2Config(n_layer=layers, **sizes) for layers in (1, 3))
    assert "larger than" in warn_if_larger("only", big, small)[0]
    assert (warn_if_larger("only", small, big), big.pad_token_id) == ([], 1)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a run where it would begin to fine-tune its teacher: exit code 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.teachers.checkpoint.with_head", interrupt)


@pytest.mark.usefixtures("interrupted")
def test_notes_come_before_training(tmp_path: Path) -> None:
    shelf = command.Shelf.fill(tmp_path)
    result = command.run(*shelf.distill(tmp_path / "run", "--set", "student.hidden=64"))
    assert result.code == 130
    assert "larger than its teacher" in " ".join(result.out.split())


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("layers", "code", "expected"),
    [
        (2, 130, "Continue with:"),
        (3, 2, "stages[0] (intermediate): layers: uniform maps each of the 3"),
    ],
)
def test_losses_that_cannot_compare_the_models(layers: int, code: int, expected: str, tmp_path: Path) -> None:
    """A student deeper than its teacher has no layers to learn from by TinyBERT's map."""
    shelf = command.Shelf.fill(tmp_path)
    result = command.run(*shelf.distill(tmp_path / "run", "--set", f"student.layers={layers}", recipe="tinybert"))
    assert result.code == code
    assert expected in " ".join(result.err.split())


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("setting", "code", "expected"),
    [
        ("max_position_embeddings=32", 130, "Continue with:"),
        ("max_position_embeddings=31", 2, "the student has 31 positions: --set stages.intermediate.max_length=31"),
        ("hidden_act=glue", 2, "cannot build a bert with these settings: 'glue'"),
    ],
)
def test_settings_that_the_student_cannot_have(setting: str, code: int, expected: str, tmp_path: Path) -> None:
    shelf = command.Shelf.fill(tmp_path)
    result = command.run(*shelf.distill(tmp_path / "run", "--set", f"student.config.{setting}"))
    assert result.code == code
    assert expected in " ".join(result.err.split())


def stage(**given: Any) -> Stage:
    return Stage.model_validate({"pretrain": "x", "lr": 1e-3, "objective": [], "step": "q8bert.Step"} | given)


def test_steps_are_cut_for_little_text() -> None:
    default = Recipe.load("tinybert-aug").teacher_lm
    rows = Dataset.from_dict({"length": [128] * 54})
    assert plan_steps(default, 4) == 160
    assert plan_steps(default, 2000) == 1000
    note = explain_repetition(default, 4, rows)
    assert "1,000 steps" in note
    assert "6,912 tokens" in note
    assert "160 steps" in note
    assert explain_repetition(default, 2000, rows) == ""


@pytest.mark.parametrize(("line", "steps"), [("steps=1000", 1000), ("steps=5000", 5000), ("epochs=2", 8)])
def test_steps_of_the_users_own_are_kept(line: str, steps: int) -> None:
    asked = Recipe.load("tinybert-aug", [f"teacher_lm.{line}"]).teacher_lm
    assert plan_steps(asked, 4) == steps
    again = Recipe.load("tinybert-aug", [f"teacher_lm.{line}"])
    assert again.teacher_lm == asked


def test_many_passes_are_noted() -> None:
    rows = Dataset.from_dict({"length": [32] * 8})
    assert "125 passes" in explain_repetition(stage(steps=500), 4, rows)
    assert explain_repetition(stage(steps=100), 4, rows) == ""
    assert explain_repetition(stage(epochs=500), 4, rows) == "", "passes are what was asked for"
