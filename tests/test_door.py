"""Every public function takes each argument as it is meant, or refuses it with a CompressError that names it.

Every parameter of every function is given each of VALUES, the others being right. What a function accepts runs until
work would begin: `Reached` stands for that.
"""

import inspect
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest

import compress
from compress.errors import ArgumentError, CompressError
from compress.records.run_report import ReportRow
from compress.slicing.shape import Shape
from tests import tiny
from tests.campaign.cases import WHOLE
from tests.command import Shelf

PER_PARAMETER = 4
"""Values that are drawn for each parameter; the whole campaign tries all of them."""


class Reached(Exception):  # noqa: N818
    """Raised where the work of a function would begin."""


def reach(*_: Any, **__: Any) -> Any:
    raise Reached


BEGINNINGS = (
    "compress.training.run.Run.open", "compress.exporters.artifact.Bundle.load_data",
    "compress.exporters.bundle_files.write_encoder", "compress.exporters.export.export",
    "compress.commands.bench.measure", "compress.commands.bench.export_formats",
    "compress.commands.gate.compare_latency", "compress.commands.demo.load_runtime",
    "compress.commands.label.build_task_prompt", "compress.jobs.trim.trimming",
    "compress.jobs.trim.trim_checkpoint", "compress.jobs.trim.chunks",
    "compress.commands.doctor.ThreadPoolExecutor",
    "compress.commands.prune.open_device", "compress.data.load.data_path",
)  # fmt: skip
"""Functions that begin the work, after the arguments were checked."""


@dataclass(frozen=True)
class Door:
    """A public function with arguments that are right."""

    name: str
    function: Callable[..., Any]
    right: Mapping[str, Any]

    def parameters(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        given = inspect.signature(self.function).parameters.values()
        return [each.name for each in given if each.kind not in kinds and each.name not in ("self", "cls")]


class OwnPath:
    """A path of somebody else's making."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


def values(folder: Path) -> dict[str, Any]:
    """Make the values to try, in a folder of their own: what they are -> the value."""
    (folder / "file").write_text("text\n")
    (folder / "folder").mkdir()
    (folder / "circle").symlink_to("circle")
    return {
        "None": None, "nan": float("nan"), "infinity": float("inf"), "True": True, "minus one": -1, "zero": 0,
        "huge": 10**30, "huge float": 1e300, "half": 0.5, "numpy bool": np.bool_(True), "numpy nan": np.float64("nan"),
        "numpy minus one": np.int64(-1), "empty": "", "word": "wrnog", "number as text": "3", "bytes": b"bytes",
        "half a character": "\ud800", "zero byte": "zero\0byte", "long": "x" * 300, "empty list": [],
        "list of None": [None], "list of numbers": [1, 2], "nested": [[1, 2], ["a"]], "empty tuple": (),
        "dictionary": {"a": 1}, "set": {"a"}, "object": object(), "class": Exception,
        "table": pd.DataFrame({"text": ["a"]}), "column": pd.Series([1.5, None]), "array": np.zeros((2, 2)),
        "missing file": folder / "missing", "file": folder / "file", "folder": folder / "folder",
        "below a file": folder / "file" / "below", "circle": folder / "circle",
        "own path": OwnPath(str(folder / "none")), "of no user": "~nobody-of-this-name/file",
        "text of several": "int8,fp64", "generator": None,
    }  # fmt: skip


def doors(shelf: Shelf, bundle: compress.Bundle, out: Path) -> list[Door]:
    """List every public function with arguments that are right."""
    run = {"teacher": shelf.teacher, "data": shelf.data, "recipe": shelf.recipe}
    short = compress.RunOptions(overrides=["stages.0.max_length=16", "student.layers=2"])
    text = run | {"recipe": "tinybert-general", "corpus": "pydoc", "options": short}
    quiet = {"say": lambda _: None}
    place, new = bundle.path, out / "new"
    terms = (compress.Term("hinton.soft_targets"),)
    model, shape = tiny.bert(), Shape.from_config(tiny.bert().config)
    row = ReportRow("student", "student", {"accuracy": 0.5})
    report = replace(bundle.report(), rows=(row,))
    found = [
        ("distill", run | {"out": new}),
        ("forecast", run),
        ("pretrain", text | {"out": new}),
        ("forecast_pretraining", text),
        ("prune", {"model": shelf.teacher, "data": shelf.data, "out": new, "target": compress.PruneOptions(ffn=0.5)}),
        ("search", {"teacher": shelf.teacher, "data": shelf.data, "out": new}),
        ("forecast_search", {"teacher": shelf.teacher, "data": shelf.data, "out": new}),
        ("quantize", {"bundle": place, "data": shelf.data}),
        ("forecast_quantization", {"bundle": bundle, "data": shelf.data}),
        ("export", {"model": place, "out": new, "to": "ort"} | quiet),
        ("bench", {"files": [place]} | quiet),
        ("gate", {"old": place, "new": bundle, "data": shelf.data} | quiet),
        ("demo", {"bundle": place, "out": new} | quiet),
        ("push", {"bundle": place, "repo": "team/small", "dry_run": True}),
        ("inspect", {"thing": "tinybert"}),
        ("label", {"teacher": shelf.teacher, "prompt": "sentiment", "data": shelf.data, "out": out / "new.jsonl"}),
        ("forecast_labelling", {"teacher": shelf.teacher, "prompt": "sentiment", "data": shelf.data,
                                "out": out / "new.jsonl"}),
        ("trim", {"model": place, "out": new, "data": shelf.data}),
        ("forecast_trimming", {"model": place, "out": new, "data": shelf.data}),
        ("doctor", {}),
        ("load_task", {"source": shelf.data}),
        ("reads", {"signal": "logits"}),
        ("build", {"spec": compress.StudentSpec(), "teacher": model}),
        ("Objective", {"terms": terms, "student": shape, "teacher": shape}),
        ("Distillation", {"student": model, "teacher": tiny.bert(), "objective": terms}),
        ("Term", {"loss": "tinybert.hidden"}),
        ("Task", {"kind": "classification", "text": ("text",), "label": "label", "labels": ("a", "b"), "metric": "f1"}),
        ("Shape", {field.name: getattr(shape, field.name) for field in fields(shape)}),
        ("Bundle", {"path": place, "manifest": bundle.manifest}),
        ("StudentSpec", {}),
    ]  # fmt: skip
    methods = [
        (bundle, {
            "load": {"path": place}, "check_has": {"precision": "int8"}, "open": {}, "predict": {"texts": ["a"]},
            "arrow": {}, "logits": {"rows": []}, "embed": {"texts": ["a"]}, "complete": {"texts": ["a"]},
            "open_writer": {},
            "load_data": {"data": shelf.data}, "evaluator": {"split": []},
            "card": {"card": {"name": "x"}}, "copy_to": {"path": new},
            "write": {"path": new, "model": model, "tokenizer": tiny.tokenizer(), "task": bundle.task,
                      "max_length": 12, "recipe": "name: x", "card": {"name": "x"}},
        }),
        (bundle.copy_to(out.parent / "changing"), {
            "set_threshold": {"threshold": 0.5}, "attach": {"name": "README.md", "text": "text"},
            "put": {"precision": "int8", "source": place / "onnx" / "model.onnx"},
            "adopt": {"other": bundle, "precisions": ["int8"]}, "attach_evidence": {},
        }),
        (compress.Recipe.load("tinybert"), {
            "load": {"name": "tinybert"}, "free_suffix": {"suffix": "x"}, "with_length": {"fitting": 12},
            "with_effort": {"effort": "quick"},
        }),
        (report, {
            "from_json": {"source": report.to_json()}, "of_role": {"role": "student"}, "score": {"row": row},
            "latency": {"row": row}, "macro_f1": {"row": row}, "fallen": {"row": row},
        }),
        (terms[0], {"serves": {"kind": "qa"}}),
        (shape, {"from_config": {"config": model.config}, "stack": {"signal": "layers"}}),
    ]  # fmt: skip
    options = [
        (name, {}) for name in compress.__all__
        if name.endswith("Options") or name == "Budget"
    ]  # fmt: skip
    listed = [Door(name, getattr(compress, name), right) for name, right in (*found, *options)]
    for thing, each in methods:
        kind = type(thing).__name__
        listed += [Door(f"{kind}.{name}", getattr(thing, name), right) for name, right in each.items()]
    return listed


RESULTS = {"Recipe", "Report", "Signals", "TaskData", "CompressError"}
"""Public classes that the functions make, or that have a file of their own to check them."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, shelf: Shelf) -> Iterator[tuple[list[Door], dict[str, Any], Path]]:
    """The doors, the values, and the folder in which nothing may be written."""
    folder = tmp_path_factory.mktemp("door")
    bundle = tiny.bundle(folder / "bundle")
    out = folder / "out"
    out.mkdir()
    (folder / "values").mkdir()
    here = Path.cwd()
    os.chdir(out)
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("COMPRESS_HOME", str(folder / "home"))
        listed = doors(shelf, bundle, out)
        for name in BEGINNINGS:
            stack.enter_context(mock.patch(name, reach))
        yield listed, values(folder / "values"), out
    os.chdir(here)


def test_no_public_function_is_forgotten(opened: tuple[list[Door], dict[str, Any], Path]) -> None:
    listed = {door.name.partition(".")[0] for door in opened[0]}
    assert set(compress.__all__) - RESULTS <= listed
    methods = {name for name, thing in vars(compress.Bundle).items() if not name.startswith("_") and callable(thing)}
    methods |= {name for name, thing in vars(compress.Bundle).items() if isinstance(thing, classmethod)}
    tried = {door.name.partition(".")[2] for door in opened[0] if door.name.startswith("Bundle.")}
    assert methods - tried <= {"task", "files", "report"}, "those without parameters"


def names(error: CompressError, parameter: str, value: Any) -> bool:
    """Return True if an error names the parameter, as in Python or on the command line, or the value."""
    if isinstance(error, ArgumentError):
        return error.name.partition("[")[0] == parameter
    shown = str(os.fspath(value) if isinstance(value, os.PathLike) else value)
    words = (parameter, f"--{parameter.replace('_', '-')}", shown, "is a bundle of kind", "not a report of this tool")
    return any(word in str(error) for word in words)


def test_every_argument_is_taken_or_refused_by_name(
    opened: tuple[list[Door], dict[str, Any], Path],
) -> None:
    listed, tried, out = opened
    cases = [(door, parameter, what) for door in listed for parameter in door.parameters() for what in tried]
    if not WHOLE:
        drawn = random.Random(0)
        cases = [
            (door, parameter, what)
            for door in listed
            for parameter in door.parameters()
            for what in drawn.sample([*tried], PER_PARAMETER)
        ]
    counts = {"refused": 0, "taken": 0}
    faults = []
    for door, parameter, what in cases:
        value = (each for each in (1, "a")) if what == "generator" else tried[what]
        try:
            door.function(**{**door.right, parameter: value})
            outcome = "taken"
        except Reached:
            outcome = "taken"
        except CompressError as error:
            outcome = "refused"
            if not names(error, parameter, value):
                faults.append(f"{door.name}({parameter}: {what}) is not named: {error}")
        except Exception as error:
            outcome = "refused"
            faults.append(f"{door.name}({parameter}: {what}): {type(error).__name__}: {error}"[:300])
        counts[outcome] += 1
        if outcome == "refused" and (left := sorted(each.name for each in out.iterdir())):
            faults.append(f"{door.name}({parameter}: {what}) left {left}")
        for each in out.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    print(f"{len(cases):,} arguments of {len(listed)} functions: {counts}")
    assert not faults, "\n".join(faults)
