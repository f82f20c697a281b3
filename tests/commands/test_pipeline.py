"""The straight line, end to end at tiny size: a teacher without a head in, a measured bundle out."""

import json
import shutil
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModel

import compress
from compress.config.loader import names
from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.errors import RunError, TeacherError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES
from compress.io import verify
from compress.jobs.stages import StageModels
from compress.models.folder import identify
from compress.records.run_report import Report
from compress.reporting import compare
from compress.reporting.compare import Basis
from compress.training import finetune
from compress.training import stage as stages
from compress.training.run import Run
from tests import learning, tiny
from tests.damage import damaged
from tests.unshipped import Trained

pytestmark = pytest.mark.usefixtures("hastened")

PARTS = {
    "teacher": {"bert.labels"},
    "intermediate": {"tinybert.hidden", "minilm.value_relations"},
    "prediction": {"hinton.soft_targets", "bert.labels"},
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without dropout, so that only what is under test makes a difference."""
    folder = tmp_path_factory.mktemp("given")
    teacher = tiny.checkpoint(folder / "teacher", tiny.bert(initializer_range=0.1, **learning.NO_DROPOUT).bert)
    return {
        "teacher": teacher,
        "recipe": tiny.recipe(folder),
        "data": tiny.reviews(folder / "data"),
        "precision": "fp32",
    }


@pytest.fixture(scope="module")
def shipped(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's directory."""
    folder = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        with (folder / "printed.txt").open("w", encoding="utf-8") as printed:
            bundle = tiny.call(compress.distill, **given, out=folder / "run", console=Console(file=printed, width=200))
    assert bundle.path == folder / "run" / "bundle"
    return folder / "run"


def trained(given: dict[str, Any], out: Path, **changes: Any) -> Path:
    with pytest.raises(Trained):
        tiny.call(compress.distill, **given | changes, out=out)
    return out


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def result(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run / "stages" / stage / "model" / "model.safetensors")


def test_the_bundle_is_the_last_stages_student(shipped: Path) -> None:
    bundle = Bundle.load(shipped / "bundle")
    ours, last = load_file(bundle.path / "model.safetensors"), result(shipped, "prediction")
    assert all(torch.equal(ours[name], tensor) for name, tensor in last.items())
    assert [each.label for each in bundle.predict(["a good film", "bad"])] == ["positive", "negative"]


def test_stages_log_losses_and_scores(shipped: Path) -> None:
    for stage, parts in PARTS.items():
        entries = [entry for entry in logged(shipped) if entry["stage"] == stage]
        losses = [entry for entry in entries if "loss" in entry]
        assert losses
        assert all(parts < entry.keys() for entry in losses)
        scored = [entry.keys() for entry in entries if "eval_score" in entry]
        assert bool(scored) == (stage != "intermediate")
        assert all(("eval_agreement" in keys) == (stage == "prediction") for keys in scored)


def test_the_report(shipped: Path) -> None:
    report = json.loads((shipped / "bundle" / "report.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    scores = {name: row["score"]["accuracy"] for name, row in rows.items()}
    student, teacher = scores["student fp32"], scores.pop(report["teacher"])
    assert scores["majority"] == 0.5
    assert teacher > 0.9
    assert student > 0.9
    best = max(
        entry["eval_score"] for entry in logged(shipped) if entry["stage"] == "prediction" and "eval_score" in entry
    )
    assert student == pytest.approx(best, abs=0.03), "of the best weights, from the ONNX file"
    assert report["split"] == "validation"
    assert set(report["stage_seconds"]) == set(PARTS)


def test_measuring_prints_a_line_per_file(shipped: Path) -> None:
    printed = (shipped.parent / "printed.txt").read_text(encoding="utf-8")
    measuring = printed[printed.index("measuring on") :].splitlines()
    assert [line.split()[:1] for line in measuring[:5]] == [["measuring"], *[["scoring"]] * 3, ["timing"]]
    assert "scoring student int8" in measuring
    assert "pass 1 of 2" not in printed, "that is for terminals"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_report_has_the_load(shipped: Path) -> None:
    report = Report.from_json(shipped / "bundle" / "report.json")
    times = [(at, one) for row in report.rows for at, one in (row.latency or {}).items()]
    assert times
    assert all(one.other_load is not None for _, one in times)
    disturbed = {at for at, one in times if one.noisy or one.busy}
    assert all(at in (report.noise or "") for at in disturbed), "a footnote names its setting"


def test_the_comparison_is_of_the_shipped_files(shipped: Path) -> None:
    report = Report.from_json(shipped / "bundle" / "report.json")
    stamps = Bundle.load(shipped / "bundle").manifest.files
    assert {row.name: row.sha256 for row in report.of_role("student")} == {
        f"student {which}": stamps[BUNDLE_FILES[which]].sha256
        for which in ("fp32", "int8")  # type: ignore[index]
    }
    (proof,) = report.certificates
    assert (proof.sha256, proof.exact_sha256) == (
        stamps[BUNDLE_FILES["int8"]].sha256,
        stamps[BUNDLE_FILES["fp32"]].sha256,
    )
    choice = compare.compare([shipped])
    assert all([one.label for one in row.classes] == ["negative", "positive"] for row in report.rows[2:])
    card = (shipped / "bundle" / "README.md").read_text(encoding="utf-8")
    assert "| macro F1 |" in card and "| negative | 20 |" in card
    by_precision = {one.precision: one for one in choice.candidates}
    int8, row = by_precision["int8"], report.rows[-1]
    assert choice.basis == Basis(report.data, report.split, report.split_rows)
    assert (choice.score(int8), int8.size_mb) == (report.score(row), row.file_mb)
    assert choice.view is not None
    row_p50 = (row.latency or {})[str(choice.view.setting)].p50_ms
    assert int8.median_ms(choice.view) == row_p50
    fp32 = by_precision["fp32"]
    if choice.score(fp32) == choice.score(int8) and (fp32.median_ms(choice.view) or 0) > row_p50:
        assert compare.pick(choice, compare.Limits()).candidate == int8


def test_the_resolved_recipe_says_all_there_is_to_know(shipped: Path, given: dict[str, Any]) -> None:
    for file in (shipped / "recipe.yaml", shipped / "bundle" / "recipe.yaml"):
        assert Recipe.load(str(file)).plain() | {"name": "tiny"} == Recipe.load(given["recipe"]).plain()


def test_a_second_run_uses_the_cached_teacher_and_rows(
    given: dict[str, Any], tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even its files are equal: a tokenizer that has just encoded has a truncation, one whose rows were cached not."""
    first = trained(given, tmp_path / "first")
    monkeypatch.setattr(finetune, "run_stage", None)
    second = trained(given, tmp_path / "second")
    assert {entry["stage"] for entry in logged(second)} == {"intermediate", "prediction"}
    for stage in ("intermediate", "prediction"):
        ours, theirs = result(second, stage), result(first, stage)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    files = [path.relative_to(second) for path in second.glob("stages/*/model/*token*")]
    assert len(files) == 4, "of two stages: the teacher was cached"
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.parametrize(("stage", "name"), [("prediction", "model.safetensors"), ("teacher", "training.json")])
def test_damaged_results_are_recreated(
    given: dict[str, Any], tmp_path: Path, unmeasured: None, stage: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's where the one kept for all runs is gone, too."""
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    run, console = trained(given, tmp_path / "run"), Console(file=(expected := StringIO()), width=1000)
    before = {each: tensor.clone() for each, tensor in result(run, stage).items()}, logged(run)  # no longer mapped
    shutil.rmtree(tmp_path / "home")
    damaged(run / "stages" / stage / "model" / name, "bit")
    trained(given, run, resume=True, console=console)
    after = result(run, stage)
    assert all(torch.equal(tensor, after[each]) for each, tensor in before[0].items())
    assert logged(run) == before[1]
    warnings = [line for line in expected.getvalue().splitlines() if line.startswith("warning")]
    assert [name in line and str(run / "stages" / stage) in line for line in warnings] == [True]
    verify(run / "stages" / stage / "model")


def test_a_changed_teacher_is_not_resumed(given: dict[str, Any], tmp_path: Path, unmeasured: None) -> None:
    teacher = shutil.copytree(given["teacher"], tmp_path / "teacher")
    run = trained(given, tmp_path / "run", teacher=str(teacher))
    tiny.checkpoint(teacher, tiny.bert(initializer_range=0.1, seed=1, **learning.NO_DROPOUT).bert)
    with pytest.raises(RunError, match="has changed since the run began") as caught:
        tiny.call(compress.distill, **given | {"teacher": str(teacher)}, out=run, resume=True)
    assert str(teacher) in str(caught.value)
    assert identify(teacher) in str(caught.value)


def test_new_heads_are_deterministic(tmp_path: Path) -> None:
    text = tiny.RECIPE.replace("  - distill: intermediate\n", "  - distill: intermediate\n    head: encoder\n")
    recipe = Recipe.load(tiny.recipe(tmp_path, text))
    context: Any = SimpleNamespace(kind="classification")
    line = StageModels(recipe, None, None, context, Run(tmp_path, 0, main=True))  # type: ignore[arg-type]
    drawn = []
    for seed in (1, 2):
        before = tiny.model("bert", head=AutoModel)
        torch.manual_seed(seed)
        student: Any = line.student(recipe.stages[1], before, None)
        drawn.append(student.classifier.weight)
    assert torch.equal(*drawn)


def test_a_cached_teacher_teaches_the_same(
    given: dict[str, Any], tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits; a second run finds them. Relations of values are not kept, so the first stage asks the teacher."""
    settings = ["stages.1.eps=1e-4", "stages.1.steps=8"]
    online = trained(given, tmp_path / "online", overrides=settings)
    cached = [*settings, "stages.1.cache_teacher=true"]
    for out in ("cached", "again"):
        run = trained(given, tmp_path / out, overrides=cached)
        ours, theirs = result(run, "prediction"), result(online, "prediction")
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
        monkeypatch.setattr("compress.training.teacher_cache.read", None)
    assert len(list((tmp_path / "home" / "teacher-outputs").iterdir())) == 1


def test_a_stage_on_text_takes_the_corpus(
    given: dict[str, Any], tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(["the story was sharp but slow . " * 8] * 30), encoding="utf-8")
    seen, train = {}, stages.train

    def watched(step: Any, stage: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        seen[stage.name] = (len(rows), "labels" in rows.column_names)
        return train(step, stage, rows, *args, **kwargs)

    monkeypatch.setattr(stages, "train", watched)
    text = tiny.RECIPE.replace("distill: intermediate", "distill: intermediate\n    data: text")
    recipe = tiny.recipe(tmp_path / "recipes", text)
    trained(given, tmp_path / "with", recipe=recipe, corpus=str(corpus))
    assert seen.pop("teacher") == seen.pop("prediction") == (96, True)
    rows, labelled = seen.pop("intermediate")
    assert not labelled
    assert rows != 96
    trained(given, tmp_path / "without", recipe=recipe)
    assert seen["intermediate"][0] == 96, "the task's own sentences"


def test_a_refused_teacher_trains_no_student_but_may_with_a_warning(
    given: dict[str, Any], tmp_path: Path, unmeasured: None
) -> None:
    with pytest.raises(TeacherError, match="cannot teach this task"):
        tiny.call(compress.distill, **given, out=tmp_path / "run", overrides=["teacher.steps=1"])
    assert {entry["stage"] for entry in logged(tmp_path / "run")} == {"teacher"}
    trained(given, tmp_path / "run", overrides=["teacher.steps=1"], resume=True, gate="warn")


# Plain recipes on other kinds of task than classification, on which tests/commands/test_every_recipe.py runs them all


def rated_pairs(folder: Path) -> str:
    rows = [f"the film was {word}\tthat movie was {word}\t{i % 11 / 2}" for i, word in enumerate(tiny.WORDS[12:28] * 2)]
    return splits(folder, "sentence1\tsentence2\tscore", rows)


def tagged(folder: Path) -> str:
    rows = [f"a {word} story\t{i % 2}\t{i % 3 // 2}\t{(i + 1) % 2}" for i, word in enumerate(tiny.WORDS[12:28] * 2)]
    return splits(folder, "text\tfast\tloud\tfunny", rows)


def splits(folder: Path, header: str, rows: list[str]) -> str:
    folder.mkdir()
    for split, lines in (("train", rows), ("dev", rows[:16])):
        (folder / f"{split}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return str(folder)


TASKS = {
    "regression": (rated_pairs, 1, {"kind": "regression"}),
    "multilabel": (tagged, 3, {"kind": "multilabel", "label": "fast,loud,funny"}),
}


def tiny_sizes(recipe: Recipe) -> list[str]:
    """Two layers of a teacher's four, four heads as it has, and two steps a stage."""
    sizes = ["student.layers=2"]
    if recipe.student.hidden is not None:
        sizes += ["student.hidden=16", "student.ffn=32", "student.heads=4"]
    for i, stage in enumerate(recipe.stages):
        sizes += [f"stages.{i}.{number}" for number in ("steps=2", "max_length=32", "batch=8", "micro_batch=null")]
        sizes += [
            f"stages.{i}.objective.{j}.heads=4" for j, term in enumerate(stage.objective) if "heads" in term.options
        ]
    return [*sizes, "teacher.max_length=32"]


def plain(recipe: Recipe) -> bool:
    """Whether a recipe is made of objectives alone; tests/commands/test_every_recipe.py runs the others."""
    return (
        recipe.name != "prompted"
        and not recipe.pruning
        and recipe.only_kind is None  # others have a kind of task of their own
        and not recipe.needs_knowledge
        and all(
            not (stage.step or isinstance(stage.augment, Call) or stage.rows or stage.corrupt or stage.student)
            and stage.head in ("task", "encoder")
            and isinstance(recipe.student.init, str)
            for stage in recipe.stages
        )
    )


PLAIN = [name for name in names() if plain(Recipe.load(name))]


def test_most_task_recipes_are_plain() -> None:
    assert {"distilbert", "hinton", "minilm", "minilm-v1", "pkd", "tinybert"} <= set(PLAIN)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", PLAIN)
def test_plain_recipes_train_on_every_kind_of_task(name: str, kind: str, tmp_path: Path, unmeasured: None) -> None:
    write, outputs, columns = TASKS[kind]
    recipe = Recipe.load(name)
    teacher = tiny.checkpoint(tmp_path / "teacher", tiny.bert(outputs, layers=4))
    data = write(tmp_path / "data")
    changes = {"teacher": teacher, "recipe": name, "data": data, "overrides": tiny_sizes(recipe), "gate": "warn"}
    run = trained({"precision": "fp32"}, tmp_path / "run", **changes, **columns)
    for stage in recipe.stages:
        steps = [entry for entry in logged(run) if entry["stage"] == stage.name and "loss" in entry]
        assert [entry["step"] for entry in steps] == [1, 2]
        assert set(steps[0]) - {"stage", "step", "loss", "grad_norm", "learning_rate", "epoch"} == {
            term.name for term in stage.objective if term.serves(kind)
        }


def test_a_bundle_appears_when_it_is_measured(
    shipped: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(shipped, tmp_path / "run"))
    before = Bundle.load(run / "bundle")

    def interrupted(bundle: Bundle, *_: Any, **__: Any) -> None:
        assert bundle.path != run / "bundle"
        assert Bundle.load(run / "bundle") == before, "the one before is whole all the time"
        raise KeyboardInterrupt

    monkeypatch.setattr("compress.jobs.shipping.measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.call(compress.distill, **given, out=run, resume=True)
    assert Bundle.load(run / "bundle") == before
    assert [path.name for path in run.iterdir() if "bundle" in path.name] == ["bundle"]
