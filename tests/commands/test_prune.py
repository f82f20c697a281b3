"""Pruning a model end to end at tiny size: results, resumed runs, refusals, families, processes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import compress
from compress.exporters.artifact import Bundle
from compress.jobs.stages import StageModels
from compress.pruning.stage import read_record
from compress.slicing.plan import HIDDEN
from tests import children, command, generative, pruning_given, tiny, unshipped
from tests.pruning_given import pruned

pytestmark = pytest.mark.usefixtures("hastened")

STAGES = ("half", "between", "all", "recover")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pruning_given.given(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to the end of its stages: half the width and heads, 24 neurons, 3 layers; its output is beside it."""
    folder = tmp_path_factory.mktemp("whole")
    console = Console(file=io.StringIO(), record=True, width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        run = pruned(given, folder / "run", layers=3, hidden=0.5, heads=0.5, ffn=24, console=console)
    console.save_text(str(folder / "output.txt"))
    return run


def result(run: Path, stage: str) -> Path:
    return run / "stages" / stage / "model"


def weights(run: Path, stage: str) -> dict[str, torch.Tensor]:
    return load_file(result(run, stage) / "model.safetensors")


def words(given: dict[str, Any], out: Path, *more: str) -> list[str]:
    """`compress prune` of what is given into `out`."""
    options = ("--recipe", given["recipe"], "--data", given["data"], "--precision", "fp32", "--gate", "warn")
    return ["prune", given["model"], *command.keep_last([*options, "--out", str(out), *more])]


# Results


@pytest.fixture(scope="module")
def shipped(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        unshipped.hasten(patch)
        told = command.run(*words(given, folder / "run", "--layers", "0.5", "--hidden", "0.75", "--ffn", "40"))
    assert told.code == 0, told.err
    assert "half: 4 layers, hidden 32, 4 heads of 8, ffn 64 -> 3 layers, hidden" in told.out
    return folder / "run"


@pytest.mark.gpu
def test_the_bundle_is_a_plain_checkpoint_of_the_requested_sizes(shipped: Path) -> None:
    bundle = Bundle.load(shipped / "bundle")
    model = AutoModelForSequenceClassification.from_pretrained(bundle.path).eval()
    config = model.config
    assert type(model).__module__.startswith("transformers.")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 24, 3)
    assert config.intermediate_size == 40
    texts = ["a good film", "the plot is quite dull and cold !"]
    encoded = AutoTokenizer.from_pretrained(bundle.path)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits
    rows = [AutoTokenizer.from_pretrained(bundle.path)(text) for text in texts]
    assert logits.numpy() == pytest.approx(bundle.logits(rows, precision="fp32"), abs=1e-5)
    last = weights(shipped, "recover")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in last.items())


def test_the_bundle_records_target_and_result(shipped: Path) -> None:
    recipe = (shipped / "bundle" / "recipe.yaml").read_text(encoding="utf-8")
    assert "target:\n  layers: 0.5\n  hidden: 0.75\n  ffn: 40.0\n" in recipe
    report = json.loads((shipped / "bundle" / "report.json").read_text(encoding="utf-8"))
    rows = {row["role"]: row for row in report["rows"]}
    assert rows["student"]["parameters"] < 0.7 * rows["teacher"]["parameters"]
    assert set(report["stage_seconds"]) == set(STAGES), "pruning takes time too"


def test_minitron_prunes_a_llama_classifier(tmp_path: Path) -> None:
    """The heads go in the groups that share keys and values; the bundle answers as the model does."""
    model = generative.llama(layers=3).model
    model.save_pretrained(tmp_path / "model")
    generative.gpt2_tokenizer(pad=False).save_pretrained(tmp_path / "model")
    short = {"steps": 3, "batch": 8, "max_length": 32, "lr": 1e-3, "evaluate": 1}
    lines = [f"{stage}.{name}={value}" for stage in ("teacher", "stages.1") for name, value in short.items()]
    bundle = tiny.call(compress.prune,
        model=str(tmp_path / "model"), recipe="prune-minitron", data=tiny.reviews(tmp_path / "data", train=32, dev=12),
        out=tmp_path / "run", layers=2, hidden=0.5, heads=0.5, ffn=0.5, gate="warn", precision="fp32",
        overrides=[*lines, "stages.0.rows=16", "stages.0.batch=8", "stages.0.max_length=32"],
    )  # fmt: skip
    small = AutoModelForSequenceClassification.from_pretrained(bundle.path).eval()
    config = small.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 16, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    tokenizer = AutoTokenizer.from_pretrained(bundle.path)
    for text in ("a good film", "the plot is quite dull and cold !"):
        with torch.no_grad():
            expected = small(**tokenizer(text, return_tensors="pt")).logits.numpy()
        assert bundle.logits([tokenizer(text)], precision="fp32") == pytest.approx(expected, abs=1e-4)


def test_fewer_heads_alone_print_a_note(whole: Path, given: dict[str, Any], tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), record=True, width=200)
    pruned(given, tmp_path / "run", console=console, heads=0.5)
    assert "fewer heads are larger heads" in console.export_text()
    assert "fewer heads are larger heads" not in (whole.parent / "output.txt").read_text()


def test_a_bundle_can_be_pruned_again(shipped: Path, given: dict[str, Any], tmp_path: Path) -> None:
    run = pruned({**given, "model": str(shipped / "bundle")}, tmp_path / "run", ffn=0.5)
    assert read_record(result(run, "all"))["sizes"]["after"]["ffn"] == 20


# Prune stages


def test_records_name_the_units_kept_of_model_and_teacher(whole: Path, given: dict[str, Any]) -> None:
    first, second = (read_record(result(whole, stage)) for stage in ("half", "all"))
    assert first["sizes"]["before"] == {"layers": 4, "hidden": 32, "heads": 4, "head_size": 8, "ffn": 64}
    assert second["sizes"]["after"] == {"layers": 3, "hidden": 16, "heads": 2, "head_size": 8, "ffn": 24}
    assert first["sizes"]["after"] == second["sizes"]["before"]
    assert first["of_teacher"] == {"layers": first["layers"], "hidden": first["kept"]["hidden"]}
    assert second["of_teacher"]["hidden"] == [first["kept"]["hidden"][unit] for unit in second["kept"]["hidden"]]
    assert second["of_teacher"]["layers"] == [first["layers"][layer] for layer in second["layers"]]
    assert first["importance"] == {"by": "molchanov.taylor"}


def test_weights_are_those_of_the_kept_units(whole: Path, given: dict[str, Any]) -> None:
    teacher = load_file(Path(given["model"]) / "model.safetensors")
    name = "bert.embeddings.word_embeddings.weight"
    for stage, before in (("half", teacher), ("all", weights(whole, "between"))):
        kept = read_record(result(whole, stage))["kept"]["hidden"]
        assert torch.equal(weights(whole, stage)[name], before[name][:, kept])


def test_the_kept_units_are_the_most_important(whole: Path) -> None:
    note, rated = read_record(result(whole, "half")), load_file(result(whole, "half") / "importance.safetensors")
    for group, kept in note["kept"].items():
        if group.startswith(("ffn", "hidden", "heads")):
            assert sorted(kept) == sorted(rated[group].topk(len(kept)).indices.tolist()), group
    assert note["layers"] == sorted(rated["layers"].topk(len(note["layers"])).indices.tolist())


def test_layers_follow_a_rule_and_projections_begin_as_the_kept_dimensions(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.training.run.Run.finish", lambda _: None)  # which removes the checkpoints
    overrides = [f"stages.{stage}.{key}" for stage in ("between", "recover") for key in ("lr=1e-30", "steps=1")]
    overrides += [f"stages.{stage}.copy_layers=last" for stage in ("half", "all")]
    run = pruned(given, tmp_path / "run", layers=2, hidden=0.5, overrides=overrides)
    assert read_record(result(run, "all"))["of_teacher"]["layers"] == [2, 3]
    for stage, cut in (("between", "half"), ("recover", "all")):
        (checkpoint,) = (run / "stages" / stage / "checkpoints").iterdir()
        saved = load_file(checkpoint / "model.safetensors")
        (map_DS,) = (tensor for name, tensor in saved.items() if "projections" in name)
        origin = read_record(result(run, cut))["of_teacher"]["hidden"]
        assert torch.equal(map_DS, torch.eye(32)[:, origin])


# Resumed runs


class Killed(BaseException):
    """Like a signal, it is caught by nothing."""


def test_a_run_killed_before_every_stage_ends_with_the_same_weights(
    whole: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, sizes = StageModels.student, {"layers": 3, "hidden": 0.5, "heads": 0.5, "ffn": 24}
    for number, stage in enumerate(STAGES):

        def die(self: StageModels, at: Any, *rest: Any, stage: str = stage) -> Any:
            if at.name == stage:
                raise Killed
            return student(self, at, *rest)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(StageModels, "student", die)
            pruned(given, tmp_path / "run", **sizes, resume=number > 0)
    run = pruned(given, tmp_path / "run", **sizes, resume=True)
    for stage in STAGES:
        ours, expected = weights(run, stage), weights(whole, stage)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items()), stage


def test_a_run_is_not_continued_to_other_sizes(given: dict[str, Any], tmp_path: Path) -> None:
    pruned(given, tmp_path / "run", ffn=0.5)
    told = command.run(*words(given, tmp_path / "run", "--ffn", "0.25", "--resume"))
    assert told.code == 2
    assert "is another run: the recipe differs" in told.err


# Refusals


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", ["no target", "--layers", "--max-latency-ms"]),
        ("--layers 2 --speedup 2", ["--layers and --speedup", "give one of the two"]),
        ("--layers 9", ["layers: 9 is more than the model's 4"]),
        ("--hidden 30 --heads 4", ["hidden: 30 is not a multiple of 4 heads", "28, 32"]),
        ("--embedding 8", ["embedding: this bert model has no such size"]),
        ("--ffn 1.5", ["ffn: 1.5; expected a whole number, or a share of the model's 64"]),
        ("--ffn 0.5 --recipe hinton", ["recipe hinton: has no stage that prunes", "prune-taylor"]),
        ("--ffn 0.5 --recipe prune-tailor", ["Did you mean 'prune-taylor'?"]),
        ("--ffn 0.5 --set stages.half.importance=molchanov.tailor", ["Did you mean 'molchanov.taylor'?"]),
        ("--speedup 2 --device toaster", ["--device toaster: no such device"]),
    ],
)
def test_impossible_requests_are_refused_before_any_training(
    asked: str, said: list[str], given: dict[str, Any], tmp_path: Path
) -> None:
    told = command.run(*words(given, tmp_path / "run", *asked.split()))
    assert command.refused(told, tmp_path / "run", *said)
    assert not (tmp_path / "run" / "stages").exists()


def test_a_family_without_a_plan_is_refused_with_an_alternative(given: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "model", tiny.model("xlnet", labels=2))
    told = command.run(*words({**given, "model": model}, tmp_path / "run", "--ffn", "0.5"))
    assert command.refused(
        told, tmp_path / "run", "no slice plan for 'xlnet'", "bert", "compress.pruning.torch_pruning"
    )


# Other families


FAMILIES = {
    **{name: {"hidden": 16, "heads": 2} for name in ("deberta-v2", "modernbert")},
    "albert": {"hidden": 16, "heads": 2, "embedding": 8},
    "mobilebert": {"bottleneck": 8, "heads": 2},
    "llama": {"hidden": 16, "heads": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_pruned_along_their_own_axes(family: str, given: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.checkpoint(tmp_path / "model", tiny.model(family, labels=2, layers=3))
    asked = {"layers": 2, "ffn": 0.5, **FAMILIES[family]}
    run = pruned({**given, "model": model}, tmp_path / "run", **asked)
    after = read_record(result(run, "all"))["sizes"]["after"]
    assert after == {**after, **asked, "ffn": 32}
    assert AutoModelForSequenceClassification.from_pretrained(result(run, "recover")).config.model_type == family


# Two processes


@pytest.mark.slow
def test_two_processes_keep_the_same_units_as_one(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over rows are those of both; the weights differ by the order of summing alone."""
    arguments = words(given, tmp_path)
    at = arguments.index("--out")
    arguments = [*arguments[:at], "--layers", "3", "--hidden", "0.5", "--ffn", "24"]
    assert children.run(arguments, tmp_path / "one", children.does_not_ship) == 0, children.said(tmp_path / "one")
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home-of-two"))  # where no importance is kept
    started = children.start_together(arguments, tmp_path / "two", children.does_not_ship, processes=2)
    assert [children.finish(child) for child in started] == [0, 0], children.said(tmp_path / "two")
    for stage in ("half", "all"):
        one, two = (read_record(result(tmp_path / run, stage)) for run in ("one", "two"))
        assert one == two
    for name, tensor in weights(tmp_path / "one", "recover").items():
        assert torch.allclose(weights(tmp_path / "two", "recover")[name], tensor, atol=2e-3), name


def test_a_narrower_student_starts_as_the_most_important_part_of_its_teacher(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the importance that pruning goes by; its projections begin as the dimensions that are left."""
    seen: dict[str, Any] = {}

    class BegunError(Exception):
        pass

    def begin(stage: Any, student: Any, teacher: Any, *_: Any, origin_D: torch.Tensor, **__: Any) -> None:
        seen.update(student=student, teacher=teacher.model, origin=origin_D)
        raise BegunError

    monkeypatch.setattr("compress.jobs.stages.run_stage", begin)
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    recipe = "\n".join(
        [
            *pruning_given.RECIPE.split("student:")[0].splitlines(),
            "student: {hidden: 0.5, heads: 0.5, init: teacher}",
            "stages:",
            "  - {distill: only, steps: 3, max_length: 32, lr: 1.0e-3,",
            "     objective: [{loss: tinybert.hidden, project: true}]}",
        ]
    )
    with pytest.raises(BegunError):
        tiny.call(
            compress.distill, teacher=given["model"], recipe=tiny.recipe(tmp_path, recipe), data=given["data"],
            out=tmp_path / "run", precision="fp32", gate="warn",
        )  # fmt: skip
    (rated,) = (tmp_path / "home" / "importance").glob("*/importance.safetensors")
    widths = load_file(rated)[str(HIDDEN)]
    assert seen["origin"].tolist() == sorted(widths.topk(16).indices.tolist())
    mine, theirs = (seen[name].get_input_embeddings().weight for name in ("student", "teacher"))
    assert torch.equal(mine, theirs[:, seen["origin"]])
