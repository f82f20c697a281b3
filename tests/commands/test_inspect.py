"""`compress inspect`: what a thing is, what is in it, whether it is whole, and commands that can be pasted."""

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import BertTokenizer

import compress
from compress.cli import start
from compress.commands.inspect import detect_form
from compress.config.options import DataOptions
from compress.config.recipe import Recipe
from compress.errors import CompressError
from compress.io import seal
from compress.provenance import option_of, resume_command
from compress.records.inspection import INSPECTION_SCHEMA, Coverage, Inspection, Overlap, SplitFacts, Spread
from compress.records.run_report import Report, ReportRow
from compress.records.search_report import SearchReport, TrialRecord
from compress.training.run import Run
from tests import command, tiny
from tests.command import check_parses

ROWS = {
    "train": ["good film\tpositive", "Good  film\tnegative", "bad film\tnegative", "dull zzz\tnegative"],
    "dev": ["bad film\tnegative", "great story\tpositive"],
    "test": ["a great story\tpositive", "a sad plot\tnegative"],
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    folder = tmp_path / "films"
    folder.mkdir()
    for split, rows in ROWS.items():
        (folder / f"{split}.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n", encoding="utf-8")
    (folder / "LICENSE.txt").write_text("\nCC0 1.0 Universal\n...\n", encoding="utf-8")
    return str(folder)


def test_data_is_described(data: str) -> None:
    found = compress.inspect(data)
    train, validation, test = found.splits
    assert (train.name, train.rows, train.repeated, train.conflicting) == ("train", 4, 1, 2)
    assert train.classes == {"negative": 0.75, "positive": 0.25}
    assert train.words == Spread(2, 2, 2)
    assert (test.repeated, test.words.longest) == (0, 3)
    assert found.overlaps == (Overlap("train", "validation", 1, 0.5),)
    assert (validation.rows, found.labels, found.licence) == (2, ("negative", "positive"), "CC0 1.0 Universal")
    assert any("are in train too" in note for note in found.notes)
    for words in found.next:
        check_parses(words)


def test_texts_to_write_are_learned_by_a_model_that_writes(tmp_path: Path) -> None:
    rows = [f"what is {n}\tit is the number {n}" for n in range(20)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("\n".join(["text\tanswer", *rows]) + "\n", encoding="utf-8")
    found = compress.inspect(str(tmp_path))
    assert found.next[1] == f"compress pretrain --teacher t5-small --recipe t5 --data {tmp_path}"
    for words in found.next:
        check_parses(words)


@pytest.mark.parametrize("name", ["t5", "knowledge", "distilgpt2", "t5-spans"])
def test_no_command_is_suggested_that_lacks_what_a_recipe_needs(name: str) -> None:
    assert compress.inspect(name).next == (f"compress recipes {name}",)


def test_a_tokenizer_is_tried_on_data(data: str, tmp_path: Path) -> None:
    teacher = tiny.checkpoint(tmp_path / "teacher")
    limit = BertTokenizer.from_pretrained(teacher).model_max_length
    seen = compress.inspect(data, teacher=teacher).coverage
    assert seen == Coverage(
        teacher, texts=4, unknown=1 / 8, pieces=1.0, tokens=Spread(4, 4, 4), limit=limit if limit < 2**24 else None,
        cut=0.0 if limit < 2**24 else None,
    )  # fmt: skip


def test_columns_of_data(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    lines = ["a,b,c", *(f"text {n},{'yes' if n % 2 else 'no'},other {n}" for n in range(20))]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = compress.inspect(str(file), columns=DataOptions(text=["c"], label="b"))
    assert (found.facts["text"], found.facts["label"]) == ("c", "b")
    assert all("--text c --label b" in words for words in found.next if words.startswith("compress distill"))


def test_a_checkpoint_is_described(tmp_path: Path) -> None:
    model = tiny.bert(3, hidden=32)
    model.config.id2label = {0: "x", 1: "y", 2: "z"}
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n", encoding="utf-8")
    found = compress.inspect(tmp_path / "model")
    assert (found.form, found.licence, found.labels) == ("checkpoint", "mit", ("x", "y", "z"))
    assert found.facts["parameters"] == sum(each.numel() for each in model.parameters())
    assert (found.facts["layers"], found.facts["hidden"], found.facts["number formats"]) == (2, 32, "F32")
    assert found.facts["predicts"] == "classes or a number of a text"
    assert (found.verified, found.problems) == (None, ())


@pytest.mark.parametrize(
    ("family", "name", "predicts"),
    [
        ("llama", "LlamaForCausalLM", "the next word"),
        ("bert", "BertForNextSentencePrediction", None),
        ("bert", "BertModel", "nothing: an encoder without a head"),
        ("dpr", "DPRQuestionEncoder", "nothing: an encoder without a head"),
    ],
)
def test_what_a_head_predicts_is_not_guessed(family: str, name: str, predicts: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "architectures": [name]}))
    assert compress.inspect(str(tmp_path)).facts.get("predicts") == predicts


def test_licences_are_named_as_their_card_does(data: str) -> None:
    for front, licence in (
        ("license:\n- mit\n- cc-by-4.0", "mit, cc-by-4.0"),
        ("license: other\nlicense_name: llama3", "llama3"),
        ("license: mit", "mit"),
        ("tags: []", "CC0 1.0 Universal"),
        ("license: {", "CC0 1.0 Universal"),
    ):
        (Path(data) / "README.md").write_text(f"---\n{front}\n---\n# Films\n", encoding="utf-8")
        assert compress.inspect(data).licence == licence


def test_a_head_is_described_by_its_tensors(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path / "model", tiny.bert(3, id2label={0: "x", 1: "y", 2: "z"}))
    path = tmp_path / "model" / "config.json"
    for architectures in (None, ["MyBertForTokenClassification"]):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))
        found = compress.inspect(tmp_path / "model")
        assert found.facts["class"] == "BertForSequenceClassification"
        assert (found.facts["predicts"], found.labels) == ("classes or a number of a text", ("x", "y", "z"))


def test_what_is_wrong_with_a_checkpoint_is_a_problem(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path / "model", tiny.bert(3))
    path = tmp_path / "model" / "config.json"
    wrong = {"id2label": {"1": "a", "2": "b", "3": "c"}, "position_embedding_type": "relative_key"}
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    problems = compress.inspect(tmp_path / "model").problems
    assert len(problems) == 2
    assert all(f"{path}: {name}" in problem for name, problem in zip(reversed(wrong), problems, strict=True))
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in command.run("inspect", str(tmp_path / "model")).err


def test_a_folder_of_modules_is_a_checkpoint_wherever_its_encoder_is(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path / "0_Transformer")
    listed = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in listed]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32}')
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    found = compress.inspect(tmp_path)
    assert (found.form, found.facts["predicts"], found.problems) == ("checkpoint", "vectors of texts", ())
    modules[1]["type"] = "sentence_transformers.models.CNN"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (problem,) = compress.inspect(tmp_path).problems
    assert "CNN: cannot be read" in problem


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    tiny.bert().config.save_pretrained(tmp_path)
    result = command.run("inspect", str(tmp_path))
    assert result.code == 2
    assert "the weights are missing" in " ".join(result.out.split())


def test_a_bundle_is_described(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    rows = (ReportRow("student int8", "student", {"accuracy": 0.75}, file_mb=1.5),)
    report = replace(
        bundle.report(), rows=rows, data="films", command="compress distill --data '/data/my films' --out x"
    )
    bundle.attach("report.json", report.to_json())
    result = command.run("inspect", str(bundle.path), "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert (found["schema"], found["form"], found["verified"]) == (INSPECTION_SCHEMA, "bundle", True)
    assert found["labels"] == ["negative", "positive"]
    assert found["scores"] == [
        {"name": "student int8", "role": "student", "accuracy": 0.75, "parameters": None, "MB": 1.5, "ms": None}
    ]
    assert {"model.safetensors", "onnx/model.onnx", "onnx/model_quantized.onnx"} < found["files"].keys()
    assert f"compress quantize {bundle.path} --data '/data/my films'" in found["next"]
    for words in found["next"]:
        check_parses(words)


def test_a_damaged_bundle(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    (bundle.path / "config.json").write_text("{}", encoding="utf-8")
    (bundle.path / "tokenizer.json").unlink()
    found = compress.inspect(bundle.path)
    assert (found.verified, len(found.problems), found.next) == (False, 2, ())
    result = command.run("inspect", str(bundle.path))
    assert result.code == 2
    assert "config.json" in result.out
    assert "missing" in result.out


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Recipe]:
    """A run of two stages, of which the first is done."""
    folder, recipe = tmp_path / "my run", Recipe.load("tinybert")
    typed = f"compress distill --teacher minilm --recipe tinybert --data intents --out {shlex.quote(str(folder))}"
    identity = {"teacher": "minilm", "data": "intents", "seed": 0, "precision": "fp32", "command": typed}
    run = Run.open(folder, recipe, identity)
    run.result("intermediate").mkdir(parents=True)
    (run.result("intermediate") / "model.safetensors").write_bytes(b"weights")
    seal(run.result("intermediate"))
    run.close()
    return folder, recipe


def test_an_unfinished_run(begun: tuple[Path, Recipe]) -> None:
    found = compress.inspect(begun[0])
    assert (found.form, found.verified, found.facts["seed"]) == ("run", True, 0)
    assert "not finished" in found.title
    assert (found.facts["stages done"], found.facts["stages"]) == ("intermediate", "intermediate, prediction")
    (go_on,) = found.next
    assert shlex.split(go_on)[-3:] == ["--out", str(begun[0]), "--resume"]
    check_parses(go_on)


@pytest.mark.parametrize(
    ("data", "corpus", "expected"), [(None, "pydoc", "pydoc"), ("intents", "pydoc", "intents and pydoc")]
)
def test_a_run_is_titled_by_what_it_reads(data: str | None, corpus: str, expected: str, tmp_path: Path) -> None:
    identity = {
        "teacher": "minilm",
        "data": data,
        "corpus": corpus,
        "seed": 0,
        "precision": "fp32",
        "command": "compress",
    }
    Run.open(tmp_path / "run", Recipe.load("tinybert"), identity).close()
    assert compress.inspect(tmp_path / "run").title == f"a run, not finished: minilm on {expected}"


def test_a_damaged_run(begun: tuple[Path, Recipe]) -> None:
    (begun[0] / "stages/intermediate/model/model.safetensors").write_bytes(b"others")
    found = compress.inspect(begun[0])
    assert (found.verified, found.facts["stages done"]) == (False, "none")
    assert "model.safetensors has changed" in found.problems[0]


def test_a_finished_run(begun: tuple[Path, Recipe]) -> None:
    folder, recipe = begun
    run = Run.open(folder, recipe, json.loads((folder / "run.json").read_text()), resume=True)
    tiny.bundle(folder / "bundle")
    run.finish()
    run.close()
    found = compress.inspect(folder)
    assert "finished on" in found.title
    assert found.verified
    assert found.labels == ("negative", "positive")
    assert shlex.join(["compress", "clean", str(folder), "--dry-run"]) in found.next
    assert not any("--resume" in words for words in found.next)
    for words in found.next:
        check_parses(words)


def test_a_search_is_described(tmp_path: Path) -> None:
    def trial(number: int, score: float, ms: float) -> TrialRecord:
        return TrialRecord(number, {"layers": 2}, "complete", {"subnet": score}, predicted_ms=ms, parameters=1000)

    report = SearchReport(
        title="students", study=str(tmp_path), teacher="minilm", data="intents", metric="accuracy", teacher_score=0.9,
        device="local", setting="1 thread, batch 1, 32 tokens", budgets={"latency": 2.0},
        objectives=("score", "latency"), points=(trial(0, 0.7, 1.0), trial(1, 0.8, 1.5), trial(2, 0.9, 3.0)),
        command="compress search", date="2026-01-01", front=(0, 1),
    )  # fmt: skip
    (tmp_path / "search.json").write_text(report.to_json(), encoding="utf-8")
    (tmp_path / "search.yaml").write_text("{}", encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps({"teacher": "minilm", "data": "intents", "command": "x.py"}))
    tiny.bundle(tmp_path / "bundle", task=replace(tiny.SENTIMENT, text=("premise", "hypothesis")))
    found = compress.inspect(tmp_path)
    assert f"compress predict {tmp_path}/bundle 'a text' --pair 'its second text'" in found.next
    assert (found.form, found.facts["trials"], found.facts["budgets"]) == ("study", "3 complete", "latency 2")
    assert [row["name"] for row in found.scores] == ["trial 0", "trial 1"]
    assert any(words.startswith(f"compress search show {tmp_path} 1 --bundle") for words in found.next)
    for words in found.next:
        check_parses(words)


@pytest.mark.parametrize("name", ["tinybert", "prune-taylor", "bert", "auto", "albert-shared"])
def test_a_recipe_is_described(name: str) -> None:
    found = compress.inspect(name)
    assert (found.form, found.verified) == ("recipe", None)
    assert found.facts
    for words in found.next:
        check_parses(words)


@pytest.mark.parametrize(
    ("name", "form", "other"),
    [("minilm", "checkpoint", "recipe"), ("distilbert", "recipe", "checkpoint"), ("intents", "data", None)],
)
def test_an_ambiguous_name_has_one_form_and_notes_the_other(name: str, form: str, other: Any) -> None:
    found = compress.inspect(name)
    assert found.form == form
    notes = [note for note in found.notes if " --as " in note]
    assert [note.rpartition(" ")[2] for note in notes] == ([other] if other else [])
    if other == "recipe":
        assert compress.inspect(name, form="recipe").form == "recipe"


def test_named_splits_are_data() -> None:
    assert detect_form("train=a.tsv,dev=b.tsv") == "data"


def test_an_unknown_form_is_refused_in_python() -> None:
    wrong: Any = "film"
    with pytest.raises(CompressError, match="expected checkpoint"):
        compress.inspect("minilm", form=wrong)


def test_a_report_is_not_needed(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "bundle")
    assert not (bundle.path / "report.json").exists()
    assert compress.inspect(bundle.path).scores == ()
    assert isinstance(bundle.report(), Report)


def test_the_command_that_continues_a_run() -> None:
    typed = "compress distill --data 'a b'"
    assert resume_command("runs/x", typed) == "compress distill --data 'a b' --out runs/x --resume"
    assert resume_command("runs/x", f"{typed} --out=runs/x --resume") == f"{typed} --out=runs/x --resume"
    assert resume_command("y", "python -m compress prune m --out y") == "python -m compress prune m --out y --resume"
    assert resume_command("y", "train.py") == "", "it was begun from Python"
    assert option_of("compress quantize b --data=x", "--data") == "x"
    assert option_of("compress quantize 'b", "--data") is None


def test_tables_fit_80_columns_and_lose_nothing() -> None:
    name = "student " * 12 + "bert-base-multilingual-cased"
    result = Inspection(
        thing="data", form="data", title="data",
        splits=(SplitFacts("validation", 1234567, 123456, 12345, Spread(23, 123, 12345), {"a": 0.1, "b": 0.551}),),
        coverage=Coverage(name, 2000, 0.123, 1.25, Spread(23, 123, 12345), 512, 0.5),
        scores=({"name": name, "role": "student", "accuracy": 0.9123, "parameters": 14.5e6, "MB": 14.4, "ms": 3.21},),
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO(), record=True)
    for table in start._tables(result):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("1,234,567", "123,456", "10.0 to 55.1", "12.30%", "50.0%", "0.9123", "14.5 M", "3.21"):
        assert word in text
