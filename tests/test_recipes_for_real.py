"""What each recipe is compared with on real data, and that its trial runs, with tiny teachers."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import effects, trial_data, trial_runs
from benchmarks import recipes_for_real as real
from benchmarks.trial_scores import SPAN, NGram, TwoViews
from compress.config import loader
from compress.config.recipe import Recipe
from compress.errors import CompressError
from compress.jobs.checks import check_kind
from compress.training import schedule
from tests import generative, marked, tiny

COMPARED = [name for name, proof in real.PROOFS.items() if proof.without not in real.UNTRAINED]
TAUGHT = [name for name in COMPARED if real.PROOFS[name].without == "teacher"]


def recipe_and_control(name: str) -> tuple[Recipe, Recipe]:
    proof = real.PROOFS[name]
    recipe = real.adapt(Recipe.load(name), proof)
    return recipe, real.make_control(recipe, proof)


def test_every_recipe_has_a_trial_or_a_reason() -> None:
    assert real.PROOFS.keys() | effects.NOT_RUN.keys() == set(loader.names())


@pytest.mark.parametrize("name", COMPARED)
def test_a_recipe_and_its_control_learn_the_kind_of_task_of_their_rows(name: str) -> None:
    kinds = {"sst2": "classification", "squad": "qa", **trial_runs.KINDS}
    for recipe in recipe_and_control(name):
        check_kind(recipe, kinds[real.PROOFS[name].data])


@pytest.mark.parametrize("name", COMPARED)
def test_a_control_is_a_recipe_of_another_kind(name: str) -> None:
    recipe, control = recipe_and_control(name)
    assert Recipe.model_validate(control.plain()) == control, "it passes the checks of recipes"
    assert control.stages != recipe.stages
    assert control.stages[-1].head == recipe.stages[-1].head


@pytest.mark.parametrize("name", [name for name in TAUGHT if Recipe.load(name).stages[-1].head == "task"])
def test_the_labels_alone_choose_their_own_length(name: str) -> None:
    recipe, control = recipe_and_control(name)
    (stage,) = control.training
    assert (stage.kind, stage.augment, stage.effort) == ("finetune", "auto", "quick")
    assert stage.open_ended
    assert control.student == (recipe.training[0].student or recipe.student)
    assert control.teacher == recipe.teacher


def test_recipes_with_the_same_student_share_a_control() -> None:
    plain = [recipe_and_control(name)[1].plain() for name in ("hinton", "distilbert", "deberta-sift", "pkd")]
    assert plain[0] == plain[1]
    assert {key for key in plain[0] if plain[0][key] != plain[3][key]} == {"student"}, "other layers are copied"


def test_the_control_of_a_student_by_way_of_an_assistant_has_its_sizes() -> None:
    recipe, control = recipe_and_control("minilm-assistant")
    assistant, student, _ = (stage.student for stage in recipe.training)
    (own,) = (stage.student for stage in control.training)
    assert assistant and student and own
    assert (assistant.layers, student.layers, own.layers) == (None, 0.5, 0.5)
    assert (assistant.hidden, student.hidden, own.hidden) == (0.5, None, 0.5)
    assert student.ffn == own.ffn == 768


def test_pruning_at_once_recovers_as_the_recipe_does() -> None:
    recipe, control = recipe_and_control("prune-taylor")
    assert control.target == recipe.target
    assert control.training[-1].objective == recipe.training[-1].objective
    assert control.training[-1].open_ended
    assert [stage.importance.by for stage in control.pruning] == ["li.magnitude"]


def test_a_control_on_text_has_as_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of it takes 0.1 s and the recipe's 0.25 s, so it goes on for 2.5 times the steps."""
    asked = list[Any]()

    def run(recipe: Recipe, trial: Any, corpus: Any) -> dict[str, Any]:
        asked.append(recipe.training[0].steps)
        return {"recipe": ({"seconds": 0.1 * asked[-1], "steps": asked[-1]}, None)}

    monkeypatch.setattr(real, "run", run)
    proof = real.PROOFS["distilgpt2"]
    recipe = real.adapt(Recipe.load("distilgpt2"), proof)
    stage = recipe.training[0].name
    trial: Any = None
    real.run_control(recipe, proof, trial, "text", ({"seconds": 60.0, "steps": 240, "steps_of": {stage: 240}}, None))
    assert asked == [240, 600]


def test_a_bigram_of_spans_reads_the_word_before_the_gap_and_knows_the_sentinels() -> None:
    """The text is 5 6 7 8, of which 6 7 are asked for; 9 and 10 are sentinels, 1 the end."""
    model = NGram([[5, 6, 7, 8]], 11)
    special_V = torch.tensor([True, True, *[False] * 7, True, True])
    batch = {"input_ids": torch.tensor([[5, 9, 8, 1]]), "labels": torch.tensor([[9, 6, 7, 10, 1, -100]])}
    first = -math.log(model.after[5, 6])
    second = -math.log(model.after[6, 7] * (1 - 1 / SPAN))
    assert model.nats_of_spans(batch, special_V) == pytest.approx([0, first, second, math.log(SPAN), 0])


def test_the_better_of_two_lengths_is_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen on the validation split, and the longer one reads no variants."""
    tried = list[Recipe]()

    def run(recipe: Recipe, trial: Any, corpus: Any) -> dict[str, Any]:
        tried.append(recipe)
        return {"recipe": ({"validated": [[0.8, 0.9][len(tried) - 1]]}, len(tried))}

    monkeypatch.setattr(real, "run", run)
    proof = real.PROOFS["hinton"]
    trial: Any = None
    recipe = real.adapt(Recipe.load("hinton"), proof)
    chosen = real.run_control(recipe, proof, trial, None, ({}, np.zeros(1)))
    assert chosen == ({"validated": [0.9]}, 2)
    assert [(each.training[0].effort, each.training[0].augment) for each in tried] == [
        ("quick", "auto"),
        ("normal", None),
    ]


def test_a_control_that_diverges_is_run_again_at_a_lower_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said stands with the result; if that diverges too there is no verdict."""

    def run(recipe: Recipe, trial: Any, corpus: Any) -> dict[str, Any]:
        stage = recipe.training[0]
        if stage.effort == "normal" and stage.lr > most:
            raise CompressError("the loss is nan at step 420")
        return {"recipe": ({"validated": [0.9 if stage.effort == "normal" else 0.8]}, stage.lr)}

    monkeypatch.setattr(real, "run", run)
    _, control = recipe_and_control("mobilebert-task")
    controls = (control, *real.longer_controls(control, real.PROOFS["mobilebert-task"]))
    trial: Any = None
    most = 1e-3
    assert real.best_of(controls, trial, None) == ({"validated": [0.9]}, 5e-4)
    most = 2e-4
    assert real.best_of(controls, trial, None) == (
        {"validated": [0.9], "lost": ["the loss is nan at step 420"]},
        pytest.approx(1e-4),
    )
    most = 0.0
    with pytest.raises(CompressError, match="the loss is nan"):
        real.best_of(controls, trial, None)


def test_sentences_that_answer_a_question() -> None:
    text = "Rollo led them to Normandy in 911. The Seine was their road. They spoke Norse for a while."
    asked = [{"question": "When?", "answers": [{"text": "911"}]}, {"question": "Who?", "answers": []}]
    found = list(trial_data._judged([[{"context": text, "qas": asked}]]))
    assert found == [
        [
            ("When?", "Rollo led them to Normandy in 911.", 1),
            ("When?", "The Seine was their road.", 0),
            ("When?", "They spoke Norse for a while.", 0),
        ]
    ]


def test_two_views_of_a_text() -> None:
    """The loss is that of each text's second vector among all second vectors."""
    vectors = iter(torch.randn(2, 4, 8))
    student = torch.nn.Module()
    student.forward = lambda **inputs: SimpleNamespace(sentence_embedding=next(vectors))  # type: ignore[method-assign]
    one_BD, other_BD = torch.nn.functional.normalize(torch.stack(list(vectors)), dim=-1)
    vectors = iter((one_BD, other_BD))
    loss = TwoViews(student, None, None)(input_ids=torch.ones(4, 3))["loss"]
    expected = 0.0
    for i in range(4):
        scores = [float(one_BD[i] @ other_BD[j]) / 0.05 for j in range(4)]
        expected -= float(torch.tensor(scores).log_softmax(0)[i]) / 4
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny teachers, data and text."""
    folder = tmp_path_factory.mktemp("trial")
    reviews = Path(tiny.reviews(folder / "reviews", train=48, dev=16))
    for seed, split in enumerate(("train", "validation", "test")):
        marked.rankings(folder / f"{split}.tsv", count=12, seed=seed)
    lines = "the story was sharp but slow .\na film is never quite dull .\nthis actor was great and the plot is fun .\n"
    (folder / "texts.txt").write_text(lines * 20, encoding="utf-8")
    (folder / "corpus.txt").write_text("\n".join([lines * 2] * 60), encoding="utf-8")
    lm = generative.gpt2(layers=4)
    for part in (lm, generative.gpt2_tokenizer()):
        part.save_pretrained(folder / "lm")
    for part in (generative.t5(), generative.t5_tokenizer()):
        part.save_pretrained(folder / "t5")
    queries = f"validation={folder}/validation.tsv,test={folder}/test.tsv"
    return {
        "home": str(folder / "home"),
        "minilm": tiny.checkpoint(folder / "minilm", tiny.bert(layers=4, initializer_range=0.1).bert),
        "lm": str(folder / "lm"),
        "t5": str(folder / "t5"),
        "sst2": f"train={reviews}/train.tsv,validation={reviews}/dev.tsv,test={reviews}/dev.tsv",
        "vectors": f"train={folder}/texts.txt,{queries}",
        "ranking": f"train={folder}/train.tsv,{queries}",
        "texts": str(folder / "texts.txt"),
        "corpus": str(folder / "corpus.txt"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hinton", "embed-mse", "gkd", "t5"])
def test_a_recipe_is_compared_on_every_seed(
    name: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_HOME", places["home"])
    monkeypatch.setattr(sys, "argv", ["benchmarks/recipes_for_real.py", name])
    monkeypatch.setattr(schedule, "EPOCHS_OF_ROWS", 2)
    short = {"steps": 4, "batch": 8, "max_length": 16, "micro_batch": None}
    proof = real.PROOFS[name]
    text = {key: {"prompt": 4, "new_tokens": 4} if key == "step" else value for key, value in proof.text.items()}
    proof = replace(proof, text={**text, **short}, task={"max_length": 16}, teacher_lm=short)
    monkeypatch.setattr(real, "PROOFS", {name: proof})
    monkeypatch.setattr(real, "load_made_teacher", lambda teacher, args: places[teacher])
    monkeypatch.setattr(real, "tune_t5", lambda folder, splits, seed: folder)
    distil = trial_runs.DistillRequest

    def request(*, teacher: str, **given: Any) -> Any:
        return distil(teacher=places.get(teacher, teacher), **given)

    monkeypatch.setattr(trial_runs, "DistillRequest", request)
    monkeypatch.setattr(real, "draw", lambda root, data, **given: (places[data], places["texts"]))
    args = argparse.Namespace(
        data=None,
        corpus=places["corpus"],
        rows=48,
        texts=60,
        seeds=[0, 1, 2],
        looks=1,
        longer=1,
        wider=1,
        hidden=None,
        out=tmp_path,
    )
    real.compare(name, args)
    (result,) = effects.load(tmp_path).values()
    figure = {"gkd": "kl"}.get(name, "score")
    assert all(len(runs) == 3 and all(figure in run for run in runs) for runs in result["runs"].values())
    known = {"control", "teacher", "texts"} if name == "hinton" else {"control"}
    assert result["effects"].keys() == known
    ours, theirs = (fmean(run[figure] for run in result["runs"][side]) for side in ("recipe", "control"))
    lead = theirs - ours if figure == "kl" else ours - theirs
    assert result["effects"]["control"]["mean"] == pytest.approx(lead, abs=1e-6)
