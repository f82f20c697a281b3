"""What the documents show as Python, YAML and commands runs as it stands there."""

import ast
import importlib
import inspect
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import onnxruntime
import pytest
import torch
import transformers

import compress
from benchmarks import effects
from compress import Distillation, Term, families
from compress.config import loader
from compress.config.choices import Choices
from compress.config.loader import folder
from compress.config.recipe import Recipe
from compress.records.bench_result import BenchResult
from compress.records.latency import Setting
from compress.records.run_report import Report, ReportRow
from tests import command, learning, tiny
from tests.latencies import steady

ROOT = folder().parent
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the documents are in a checkout only")


def section(file: str, heading: str = "") -> str:
    """The text of a document, or of one of its sections."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def models() -> dict[str, Any]:
    """What a loop of one's own has: a student, its teacher, and batches."""
    teacher = tiny.bert(3, layers=4, seed=2)
    student = tiny.bert(3, hidden=16, seed=1)
    loader = [learning.collate()(list(learning.rows(4)))]
    return {"torch": torch, "student": student, "teacher": teacher, "loader": loader, "batch": loader[0]}


def test_the_table_of_families() -> None:
    lines = [line for line in section("docs/concepts.md", "What each family can").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    rows = {family: row[1:] for row in cells for family in row[0].split(", ")}

    def saying(column: int, *words: str) -> set[str]:
        return {family for family, row in rows.items() if row[column].startswith(words)}

    def having(fact: str) -> set[str]:
        return {family for family in rows if getattr(families.find(family), fact)}

    assert rows.keys() >= {family.name for family in families.known() if family.rules or family.kin}
    assert saying(1, "layers and units") == having("kin")
    assert saying(1, "whole layers") == rows.keys() - having("kin")
    assert saying(2, "yes") == having("has_roles")
    assert saying(3, "yes") == having("rules")
    assert saying(4, "yes") == having("gates")
    assert {family for family, row in rows.items() if "in windows" in row[0]} == having("rotary")


def test_the_readme_lists_recipes_by_their_verdicts() -> None:
    verdicts = effects.judge(effects.load(ROOT / "benchmarks/results/recipes"))
    listed = re.findall(r"^- (works|no better|harmful): (.*(?:\n  .*)*)", section("README.md", "Recipes"), re.MULTILINE)
    for verdict, names in listed:
        assert re.findall(r"`([\w-]+)`", names) == [name for name, (found, _) in verdicts.items() if found == verdict]
    assert [verdict for verdict, _ in listed] == ["works", "no better", "harmful"]


def test_the_page_of_recipes_on_real_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe stands in it, with a result or with a reason."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("reference").tried()
    assert set(re.findall(r"`([\w-]+)`", page)) >= set(loader.names())


def test_no_recipe_that_does_harm_is_chosen() -> None:
    verdicts = effects.judge(effects.load(ROOT / "benchmarks/results/recipes"))
    harmful = {name for name, (verdict, _) in verdicts.items() if verdict == "harmful"}
    assert not harmful & {choice.recipe for choice in Choices.load("auto").choices}


def test_an_own_sentence_by_the_ways_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the lines stand there, but for the page that is served."""
    monkeypatch.chdir(tmp_path)
    own = section("README.md", "Use it")
    (commands,), (lines,) = blocks(own, ""), blocks(own, "python")
    bundle = tiny.bundle(tmp_path / "runs" / "demo" / "bundle")
    asked, served, exported = (shlex.split(line, comments=True)[1:] for line in commands.splitlines())
    assert served == ["demo", "runs/demo/bundle", "--serve"]
    terminal, made = command.run(*asked), command.run(*exported)
    assert (terminal.code, made.code) == (0, 0), terminal.err + made.err
    notebook, plain = (eval(line, {"compress": compress, "onnxruntime": onnxruntime}) for line in lines.splitlines())
    (answer,) = notebook
    assert answer.label in bundle.task.labels
    assert plain[0].tolist() == [answer.label]
    assert answer.label in terminal.out


def test_a_bundle_in_python_by_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bundle, names = tiny.bundle(tmp_path / "runs" / "first" / "bundle"), dict[str, Any]()
    (code,) = blocks(section("docs/quickstart.md", "Use it"), "python")
    exec(code, names)
    assert names["answer"].label in bundle.task.labels


def test_every_path_that_the_api_takes_may_be_a_string() -> None:
    public = [getattr(compress, name) for name in compress.__all__]
    classes = [each for each in public if inspect.isclass(each)]
    methods = [value for each in classes for name, value in inspect.getmembers(each) if not name.startswith("_")]
    for function in [*public, *methods]:
        ours = getattr(function, "__module__", "").startswith("compress.")
        if ours and (inspect.isfunction(function) or inspect.ismethod(function)):
            for parameter in inspect.signature(function).parameters.values():
                kinds = str(parameter.annotation)
                assert "Path" not in kinds or "str" in kinds, f"{function.__qualname__}: {parameter}"


def test_the_loop_of_the_readme() -> None:
    (loop,) = blocks(section("README.md", "In your own loop"), "python")
    scores = torch.randn(2, 2, 4, 5, 5)
    names = models() | {"student_scores": scores[0], "teacher_scores": scores[1], "mask": torch.ones(2, 5)}
    before = names["student"].bert.encoder.layer[0].output.dense.weight.clone()
    exec(loop, names)
    assert not torch.equal(before, names["student"].bert.encoder.layer[0].output.dense.weight)


def test_a_step_is_a_model_for_transformers_own_trainer(tmp_path: Path) -> None:
    """With its defaults, which drop the columns that the model's forward does not name."""
    names = models()
    step = Distillation(
        names["student"], names["teacher"], [Term("tinybert.hidden", project=True), Term("bert.labels")]
    )
    before = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True
    )
    trainer = transformers.Trainer(
        model=step,
        args=arguments,
        train_dataset=learning.rows(8),
        data_collator=transformers.DataCollatorWithPadding(tiny.tokenizer()),
    )
    trainer.train()
    changed = {name for name, tensor in step.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"student.classifier.weight", "objective.projections.tinybert_hidden.weight"} <= changed


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The document on own losses, with the files that it shows in the working folder."""
    text = section("docs/own-loss.md")
    monkeypatch.chdir(tmp_path)
    Path("mylosses").mkdir()
    Path("mylosses/margin.py").write_text(blocks(text, "python")[0], encoding="utf-8")
    Path("mine.yaml").write_text(blocks(text, "yaml")[0], encoding="utf-8")
    path = list(sys.path)
    yield text
    sys.path[:] = path
    sys.modules.pop("margin", None)


def test_an_own_loss_by_the_command(own: str, tmp_path: Path, hastened: None) -> None:
    """The command as it is written, with a tiny teacher and data, and fewer steps."""
    (words,) = (shlex.split(line) for line in own.splitlines() if line.startswith("compress distill "))
    changed = {"--teacher": tiny.checkpoint(tmp_path / "teacher"), "--data": tiny.reviews(tmp_path / "data")}
    line = [changed.get(before, word) for before, word in pairwise(words)]
    short = ["stages.0.steps=2", "stages.1.steps=2", "teacher.steps=2"]
    lengths = ["stages.0.max_length=32", "stages.1.max_length=32", "teacher.max_length=32", "student.layers=1"]
    more = [word for setting in (*short, *lengths) for word in ("--set", setting)]
    assert command.run(*(word for word in line if word not in ("--allow-code", "mylosses")), *more).code == 2
    result = command.run(*line, *more, "--gate", "warn")
    assert result.code == 0, result.err
    assert "next: compress predict runs/mine/bundle 'a text'" in (result.out + result.err).splitlines()
    log = Path("runs/mine/log.jsonl").read_text(encoding="utf-8")
    assert '"margin.absolute"' in log
    assert '"margin.margin"' in log
    again = [*line, *more, "--gate", "warn", "--resume"]
    assert command.run(*again).code == 0
    Path("mylosses/margin.py").write_text("# changed\n" + Path("mylosses/margin.py").read_text(), encoding="utf-8")
    assert "code was" in command.run(*again).err


def test_an_own_loss_in_python(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("mylosses")
    names = models()
    exec(blocks(own, "python")[1], names)
    assert torch.isfinite(names["step"](**names["batch"])["margin.margin"])
    assert names["student"].classifier.weight.grad is not None
    loaded = Recipe.load("mine.yaml", allow_code="mylosses")
    assert [term.code is not None for stage in loaded.training for term in stage.objective] == [True, True, False]


@pytest.mark.usefixtures("hastened")
def test_the_five_calls_and_commands_of_assistants(
    shelf: command.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, with a tiny teacher, data and recipe, and little time to measure in.

    The second run is a copy of the first.
    """
    monkeypatch.chdir(tmp_path)
    text = section("docs/assistants.md").replace('"minilm"', repr(shelf.teacher)).replace('"intents"', repr(shelf.data))
    (calls,) = blocks(text, "python")
    default = compress.distill
    few = [f"{stage}.steps=4" for stage in ("teacher", "stages.0", "stages.1")]

    def distill(**given: Any) -> compress.Bundle:
        made = default(**given, recipe=shelf.recipe, options=compress.RunOptions(gate="warn", overrides=few))
        shutil.copytree("runs/first", "runs/second")
        return made

    monkeypatch.setattr(compress, "distill", distill)
    monkeypatch.setattr(compress, "bench", partial(compress.bench, rounds=2, runs=1, seq=[8]))
    gate: Any = compress.gate  # without the check of its arguments, which allows no shorter time than six seconds
    monkeypatch.setattr(compress, "gate", partial(gate.__wrapped__, minutes=0.001))
    names: dict[str, Any] = {}
    exec(calls, names)
    assert names["answers"][0].label in ("negative", "positive")
    assert names["report"].shipped.score[names["report"].metric] >= 0
    assert {"fp32", "int8"} <= {each.name.rpartition(":")[2] for each in names["measured"].latencies}
    assert names["verdict"].outcome in ("passed", "failed", "cannot be told")
    table = section("docs/assistants.md", "Five commands")
    lines = [line.split(" | ")[1].strip("| `") for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert [line.split()[1] for line in lines] == ["doctor", "distill", "predict", "bench", "gate"]
    result = command.run(*shlex.split(lines[2])[1:])
    assert (result.code, json.loads(result.out)["schema"]) == (0, "compress.predict/1")


def test_llms_txt_links_to_pages_that_there_are() -> None:
    generated = {"recipes", "tried", "gallery", "cli", "api"}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | generated
    links = re.findall(r"\]\(([\w-]+)\.html\)", section("docs/llms.txt"))
    assert len(links) > 10
    assert set(links) <= pages


@pytest.mark.slow
@pytest.mark.usefixtures("hastened")
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel, whose packages are many: the code cells one by one, with the value of the last line.

    With half of its epochs, and files that are not run for their times.
    """
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8")
    for whole, half in {"teacher.epochs=4": "teacher.epochs=2", "stages.0.epochs=8": "stages.0.epochs=4"}.items():
        assert whole in text
        text = text.replace(whole, half)
    notebook = json.loads(text)
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "what was measured elsewhere is not shown"
        if cell["cell_type"] == "code":
            *lines, last = ast.parse("".join(cell["source"])).body
            ends_in_value = isinstance(last, ast.Expr)
            exec(compile(ast.Module(lines if ends_in_value else [*lines, last], []), cell["id"], "exec"), names)
            if isinstance(last, ast.Expr):
                output = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
    assert list(output["model"]) == ["majority", "bag of words", "minilm", "student fp32", "student int8"]
    assert output["accuracy"].iloc[-1] > output["accuracy"].iloc[0], "better than guessing"
    assert names["quantized"].proof.after > names["quantized"].proof.before - 0.1


def test_the_log_of_experiments() -> None:
    """Each experiment begins with the same four lines; groups are in the contents, their newest experiments first."""
    lines = ["Machine", "Command", "Result", "Verdict"]
    text = section("docs/LOG.md")
    contents, *groups = re.split(r"^## (?!Contents$)", text, flags=re.MULTILINE)
    listed = re.findall(r"^- \[(.+)\]\(#.+\) \((\d+)\)$", contents, flags=re.MULTILINE)
    found = []
    for group in groups:
        title, *experiments = re.split(r"^### ", group, flags=re.MULTILINE)
        found.append((title.splitlines()[0], str(len(experiments))))
        dates = []
        for experiment in experiments:
            name, header, *rest = experiment.split("\n\n")
            assert re.findall(r"^- \*\*(\w+):\*\* \S", header, flags=re.MULTILINE) == lines, name
            assert len(re.findall(r"^- ", header, flags=re.MULTILINE)) == len(lines), name
            assert not rest or not rest[0].startswith("- "), f"{name}: the list would become a part of the header"
            date = re.match(r"- \*\*Machine:\*\* (\d{4}-\d\d-\d\d)[;,]", header)
            assert date, name
            dates.append(date[1])
        assert dates == sorted(dates, reverse=True), title
    assert found == listed


def test_links_of_the_log_lead_somewhere() -> None:
    text = section("docs/LOG.md")
    titles = re.findall(r"^##+ (.+)$", text, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(anchors)) == len(anchors)
    assert [anchor for anchor in anchors if "--" in anchor] == [], "the site would name it otherwise"
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)
    files = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert [file for file in files if not (ROOT / "docs" / file).is_file()] == []


DOCUMENTS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.yaml"), *ROOT.glob("*.md")]
COMMANDS = [
    f"{file.name}: {line}"
    for file in sorted(DOCUMENTS)
    if file.name != "LOG.md"  # its commands were run elsewhere
    for line in re.findall(
        r"^(?:#?\s*(?:torchrun .* -m )?|.* \| `)(compress [a-z].*?)(?:` \|)?$", file.read_text("utf-8"), re.MULTILINE
    )
    if " ..." not in line and not line.startswith("compress is ")
]


def test_shown_commands_parse() -> None:
    assert len(COMMANDS) > 100
    for line in COMMANDS:
        try:
            command.check_parses(line.partition(": ")[2])
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_python_in_documents_imports_and_calls_what_exists() -> None:
    """Blocks that need files or a phone are not run, but their imports and the arguments of their calls are checked."""
    calls = 0
    for file in sorted(DOCUMENTS):
        for block in blocks(file.read_text("utf-8"), "python") if file.suffix == ".md" else []:
            tree, names = ast.parse(block), dict[str, Any]()
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom) and "compress" in ast.unparse(node):
                    exec(ast.unparse(node), names)
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(node.func)):
                    continue
                first, *rest = ast.unparse(node.func).split(".")
                if first in names:
                    function = reduce(getattr, rest, names[first])
                    arguments = {each.arg: None for each in node.keywords if each.arg}
                    inspect.signature(function).bind(*node.args, **arguments)
                    calls += 1
    assert calls > 30


def test_the_gallery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reports that there are, and one of a student that was measured on a phone as well."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    reference = importlib.import_module("reference")
    gallery = importlib.import_module("benchmarks.gallery")
    assert re.findall(r"^## (.+)$", reference.gallery(), re.MULTILINE) == list(reference.shipped())
    for line in gallery.STUDENTS.values():
        command.check_parses(f"compress {line} --out runs/one")
    output = reference.gallery()
    for name, report in reference.shipped().items():
        assert gallery.STUDENTS[name] in report.command, "by the command that stands in the script"
        assert not re.search(r"(^| )/", report.command), "no place of one machine"
        part = output.split(f"## {name}\n")[1].split("\n## ")[0]
        assert all(f"| {row.name} | " in part for row in report.rows)
        scores = {each.name: each.score.get(report.metric) or 0.0 for each in report.rows}
        beaten = scores["student int8"] < scores["bag of words"]
        assert ("worse than the baseline bag of words" in part) is beaten, "a bad student has a caption"
        assert ("worse than" in output.split(f"| [{name}](#{name}) |")[1].splitlines()[0]) is beaten
    row = ReportRow("student int8", "student", {"accuracy": 0.5}, file_mb=1.5)
    result = {"split": "test", "split_rows": 10, "command": "compress distill", "date": "2026-11-23"}
    report = Report("bad", "r", "t", "d", "classification", "accuracy", 2, rows=(row,), **result)
    timed = BenchResult(
        "a phone", {}, "2026-11-23", "compress bench", (steady("bundle:int8", Setting(1, 1, 32), 7.25),)
    )
    for name, each in {"bad": report, "bad@phone": timed}.items():
        (tmp_path / f"{name}.json").write_text(each.to_json(), encoding="utf-8")
    monkeypatch.setattr(reference, "GALLERY", tmp_path)
    output = reference.gallery()
    assert "| student int8 | 0.500 | 1.50 |" in output
    assert "| median, ms | 1 thread, batch 1, 32 tokens |" in output
    assert "| int8 on a phone | 7.25 |" in output


def test_a_release_is_told_in_25_lines() -> None:
    releases = section("CHANGELOG.md").split("\n## ")[1:]
    assert releases[0].startswith(f"[{compress.__version__}]")
    for release in releases:
        told = release.strip().splitlines()
        assert len(told) <= 25, told[0]
        assert max(map(len, told)) <= 140, told[0]
        assert any(line.startswith("- **Breaking**: ") for line in told), told[0]
