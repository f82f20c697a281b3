"""Odd inputs in Python: values of a wrong type inside others, swapped arguments, paths that are something else, names
that are nearly right. Each is refused with a CompressError that names the argument and what was found, and writes
nothing, or is taken as documented, which the case says."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import compress
from compress.errors import CompressError
from tests import tiny
from tests.command import Shelf

NAN = float("nan")
WORDS = ["film", "plot", "actor", "scene", "music", "story", "ending", "cast"]


@dataclass(frozen=True)
class Things:
    """What the cases use. `out` does not exist, `spare` is a bundle that a case may change."""

    shelf: Shelf
    bundle: compress.Bundle
    folder: Path
    model: Any

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def file(self) -> Path:
        return self.folder / "file.txt"

    def row(self, *tokens: int) -> dict[str, list[int]]:
        return {"input_ids": [*tokens], "attention_mask": [1] * len(tokens), "token_type_ids": [0] * len(tokens)}

    def shapes(self) -> tuple[compress.Shape, compress.Shape]:
        shape = compress.Shape.from_config(self.model.config)
        return shape, shape

    def spare(self) -> compress.Bundle:
        return self.bundle.copy_to(self.folder / "spare")

    def distill(self, **changed: Any) -> Any:
        right = {"teacher": self.shelf.teacher, "data": self.shelf.data, "recipe": self.shelf.recipe, "out": self.out}
        return compress.distill(**{**right, **changed})

    def prune(self, **target: Any) -> Any:
        return compress.prune(
            model=self.shelf.teacher, data=self.shelf.data, out=self.out, target=compress.PruneOptions(**target)
        )

    def search(self, **changed: Any) -> Any:
        right = {"teacher": self.shelf.teacher, "data": self.shelf.data, "out": self.out}
        return compress.search(**{**right, **changed})


def table(rows: int = 40, **columns: Any) -> pd.DataFrame:
    """Make a table of `rows` films with two labels; `columns` replace or add some."""
    text = [f"the {WORDS[at % 8]} of {at} {WORDS[at // 8 % 8]}" for at in range(rows)]
    return pd.DataFrame({"text": text, "label": ["good", "bad"] * (rows // 2), **columns})


def first(value: Any) -> list[Any]:
    """Return the texts of `table` with another first one."""
    return [value, *table()["text"][1:]]


Case = tuple[str, Callable[[Things], Any], Any]
"""What it is; the call; the parts of the error's message, or a function that checks the result that is documented."""


def refused(*parts: str) -> tuple[str, ...]:
    return parts


load = compress.load_task
TABLES: list[Case] = [
    ("no columns", lambda _: load(pd.DataFrame()), refused("DataFrame")),
    ("no rows", lambda _: load(table(0)), refused("DataFrame")),
    ("one row", lambda _: load(table(2).head(1)), refused("DataFrame")),
    ("texts all NaN", lambda _: load(table(text=[NAN] * 40)), refused("text")),
    (
        "texts all numbers",
        lambda _: load(table(text=range(40)), text="text", label="label"),
        lambda t: t.train[0]["text"].isdigit(),
    ),
    ("a text is None", lambda _: load(table(text=first(None))), lambda t: any("empty" in note for note in t.notes)),
    (
        "a text is bytes",
        lambda _: load(table(text=first(b"bytes"))),
        lambda t: "bytes" in [*t.train["text"], *t.validation["text"]],
    ),
    ("a text is a dictionary", lambda _: load(table(text=first({"a": 1}))), refused("text")),
    ("a text is a list", lambda _: load(table(text=first(["a", "b"]))), refused("text")),
    ("labels all None", lambda _: load(table(label=[None] * 40)), refused("label")),
    ("a label is NaN", lambda _: load(table(label=[NAN, *["good", "bad"] * 19, "good"])), refused("label")),
    ("labels are bools", lambda _: load(table(label=[True, False] * 20)), lambda t: t.task.kind == "classification"),
    ("labels of two types", lambda _: load(table(label=[1, "a"] * 20)), refused("label")),
    ("labels are dictionaries", lambda _: load(table(label=[{"a": 1}] * 40)), refused("label")),
    ("labels are infinite", lambda _: load(table(label=[float("inf"), 1.5] * 20)), refused("label")),
    ("one label", lambda _: load(table(label="good")), refused("label")),
    ("a column twice", lambda _: load(pd.concat([table(), table()], axis=1)), refused("Duplicate column names")),
    ("columns are numbers", lambda _: load(table().set_axis([0, 1], axis=1)), lambda t: t.task.text == ("0",)),
    (
        "columns in Cyrillic",
        lambda _: load(table().set_axis(["текст", "метка"], axis=1), text="текст", label="метка"),
        lambda t: len(t.task.labels) == 2,
    ),
    (
        "a column's name ends in a space",
        lambda _: load(table().rename(columns={"label": "label "}), label="label"),
        refused("label"),
    ),
    (
        "an index of several levels",
        lambda _: load(table().set_index([list(range(40)), list(range(40))])),
        lambda t: len(t.train) > 1,
    ),
    ("a list of rows", lambda _: load(table().to_dict("records")), refused("source", "list")),
    ("an array", lambda _: load(table().to_numpy()), refused("source")),
    ("a column", lambda _: load(table()["text"]), refused("source")),
    ("a generator of rows", lambda _: load(row for row in table().to_dict("records")), refused("source")),
    ("no training split", lambda _: load({"test": table()}), refused("train")),
    ("a split's name misspelt", lambda _: load({"trian": table()}), refused("trian")),
    ("a split's name is a number", lambda _: load({1: table()}), refused("1")),
    ("a split is None", lambda _: load({"train": table(), "test": None}), refused("source")),
    ("a split is a path", lambda w: load({"train": w.file}), refused("source")),
    (
        "splits of other columns",
        lambda _: load({"train": table(), "validation": table().rename(columns={"text": "words"})}),
        refused("text"),
    ),
    ("text and label swapped", lambda _: load(table(), text="label", label="text"), refused("text")),
]
ARGUMENTS: list[Case] = [
    ("one name for a list", lambda _: load(table(), text="text"), lambda t: t.task.text == ("text",)),
    ("a tuple", lambda _: load(table(), text=("text",)), lambda t: t.task.text == ("text",)),
    ("an array of names", lambda _: load(table(), text=np.array(["text"])), lambda t: t.task.text == ("text",)),
    (
        "a generator of names",
        lambda _: load(table(), text=(each for each in ["text"])),
        lambda t: t.task.text == ("text",),
    ),
    ("a name twice", lambda _: load(table(), text=["text", "text"]), refused("text")),
    ("three names", lambda _: load(table(), text=["text", "label", "text"]), refused("text")),
    ("no names", lambda _: load(table(), text=[]), refused("text")),
    ("None in a list", lambda _: load(table(), text=["text", None]), refused("text", "None")),
    ("a dictionary for a list", lambda _: load(table(), text={"text": 1}), refused("text")),
    ("a list for a name", lambda _: load(table(), label=["label"]), refused("label", "a list")),
    ("an empty name", lambda _: load(table(), label=""), refused("''")),
    ("a comma", lambda _: load(table(), label=","), refused("''")),
    ("a space after a name", lambda _: load(table(), label="label "), lambda t: t.task.label == "label"),
    ("text and label the same", lambda _: load(table(), text="text", label="text"), refused("both text and label")),
    ("a kind in capitals", lambda _: load(table(), kind="Classification"), refused("kind", "Classification")),
    ("a kind with a space", lambda _: load(table(), kind=" classification"), refused("kind", " classification")),
    ("a list of kinds", lambda _: load(table(), kind=["classification"]), refused("kind")),
    ("a metric in capitals", lambda _: load(table(), metric="Accuracy"), refused("Accuracy", "accuracy")),
    ("a metric of another kind", lambda _: load(table(), metric="pearson"), refused("pearson")),
    ("a bool for a seed", lambda _: load(table(), seed=True), refused("seed", "True")),
    ("a whole float for a seed", lambda _: load(table(), seed=1.0), refused("seed", "1.0")),
    ("a seed of numpy", lambda _: load(table(), seed=np.int64(3)), lambda t: len(t.train) > 1),
    ("a huge seed", lambda _: load(table(), seed=2**32), refused("seed", "4294967296")),
    ("a text for a bool", lambda _: load(table(), unlabelled="yes"), refused("unlabelled", "yes")),
    ("a bool of numpy", lambda _: load(table(), unlabelled=np.bool_(False)), lambda t: len(t.train) > 1),
    ("an unknown keyword", lambda _: load(table(), lable="label"), refused("lable", "label")),
    ("a keyword twice", lambda _: load(table(), source="intents"), refused("source")),
    ("no argument", lambda _: load(), refused("source")),
    ("too many arguments", lambda _: load(table(), ["text"]), refused("arguments")),
]
PREDICTIONS: list[Case] = [
    ("one text", lambda w: w.bundle.predict("the film"), refused("texts", "the film", "[text]")),
    ("no text", lambda w: w.bundle.predict([]), lambda found: found == []),
    ("an empty text", lambda w: w.bundle.predict([""]), lambda found: len(found) == 1),
    ("a text of spaces", lambda w: w.bundle.predict(["  \n"]), lambda found: len(found) == 1),
    ("a long text", lambda w: w.bundle.predict(["film " * 20_000]), lambda found: len(found) == 1),
    ("a zero byte", lambda w: w.bundle.predict(["the\0film"]), lambda found: len(found) == 1),
    ("a tuple of texts", lambda w: w.bundle.predict(("a", "b")), lambda found: len(found) == 2),
    ("an array of texts", lambda w: w.bundle.predict(np.array(["a", "b"])), lambda found: len(found) == 2),
    (
        "a column of texts",
        lambda w: w.bundle.predict(pd.Series(["a", "b"], index=[7, 3])),
        lambda found: len(found) == 2,
    ),
    (
        "a generator of texts",
        lambda w: list(w.bundle.predict(each for each in ("a", "b"))),
        lambda found: len(found) == 2,
    ),
    ("None", lambda w: w.bundle.predict(None), refused("texts", "None")),
    ("a number", lambda w: w.bundle.predict(3), refused("texts", "3")),
    ("bytes", lambda w: w.bundle.predict(b"film"), refused("texts")),
    ("a path", lambda w: w.bundle.predict(w.file), refused("texts")),
    ("a table", lambda w: w.bundle.predict(table()), refused("texts")),
    ("a dictionary", lambda w: w.bundle.predict({"text": "film"}), refused("texts")),
    ("a set", lambda w: w.bundle.predict({"film"}), refused("texts")),
    ("None among texts", lambda w: w.bundle.predict(["a", None]), refused("texts[1]", "None")),
    ("NaN among texts", lambda w: w.bundle.predict(["a", NAN]), refused("texts[1]", "nan")),
    ("a number among texts", lambda w: w.bundle.predict(["a", 1]), refused("texts[1]", "1")),
    ("bytes among texts", lambda w: w.bundle.predict(["a", b"b"]), refused("texts[1]")),
    ("a pair among texts", lambda w: w.bundle.predict(["a", ("b", "c")]), refused("texts[1]")),
    ("half a character", lambda w: w.bundle.predict(["a", "\ud800"]), refused("texts[1]")),
    ("None from a generator", lambda w: list(w.bundle.predict(each for each in ("a", None))), refused("texts", "None")),
    ("a precision in capitals", lambda w: w.bundle.predict(["a"], precision="INT8"), refused("precision", "INT8")),
    ("a list of precisions", lambda w: w.bundle.predict(["a"], precision=["int8"]), refused("precision")),
    ("a bool for threads", lambda w: w.bundle.predict(["a"], threads=True), refused("threads", "True")),
    ("threads of numpy", lambda w: w.bundle.predict(["a"], threads=np.int64(1)), lambda found: len(found) == 1),
    ("no threads", lambda w: w.bundle.predict(["a"], threads=0), refused("threads", "0")),
    ("an unknown keyword", lambda w: w.bundle.predict(["a"], presicion="int8"), refused("presicion", "precision")),
    ("rows are None", lambda w: w.bundle.logits(None), refused("rows")),
    ("rows of another kind", lambda w: w.bundle.logits([{"words": ["a"]}]), refused("words", "input_ids")),
    ("rows without tokens", lambda w: w.bundle.logits([w.row()]), refused("0 tokens")),
    ("rows of unknown tokens", lambda w: w.bundle.logits([w.row(10**6)]), refused("1000000")),
    ("rows of negative tokens", lambda w: w.bundle.logits([w.row(-1)]), refused("-1")),
    ("vectors of a classifier", lambda w: w.bundle.embed(["a"]), refused("vectors")),
    ("texts of a classifier", lambda w: w.bundle.complete(["a"]), refused("generative")),
    ("a split's name for a split", lambda w: w.bundle.evaluator("validation"), refused("split", "validation")),
    ("a table for a split", lambda w: w.bundle.evaluator(table()), refused("split")),
    ("a threshold without unanswerable questions", lambda w: w.spare().set_threshold(NAN), refused("threshold")),
    ("a name in another folder", lambda w: w.spare().attach("../README.md", "text"), refused("name", "../README.md")),
    ("the manifest's own name", lambda w: w.spare().attach("manifest.json", "text"), refused("name", "manifest.json")),
    ("the name of a model", lambda w: w.spare().attach("onnx/model.onnx", "text"), refused("name")),
    ("a file that is no model", lambda w: w.spare().put("int8", w.file), refused("source")),
    ("a folder for a file", lambda w: w.spare().put("int8", w.folder), refused("source")),
    (
        "the same precision twice",
        lambda w: w.spare().adopt(w.bundle, ["int8", "int8"]),
        lambda found: "int8" in found.files(),
    ),
    ("one precision for a list", lambda w: w.spare().adopt(w.bundle, "int8"), lambda found: "int8" in found.files()),
    ("a path for a bundle", lambda w: w.spare().adopt(w.bundle.path, ["int8"]), refused("other")),
    ("into itself", lambda w: w.bundle.copy_to(w.bundle.path), lambda found: found.predict(["a"])),
    ("into a file", lambda w: w.bundle.copy_to(w.file), refused("file.txt")),
    ("into a folder of its own", lambda w: w.bundle.copy_to(w.bundle.path / "copy"), refused("copy")),
    (
        "a name in Cyrillic",
        lambda w: compress.Bundle.load(w.bundle.copy_to(w.folder / "копия")),
        lambda found: found.path.name == "копия",
    ),
    ("a space after a path", lambda w: compress.Bundle.load(f"{w.bundle.path} "), refused("manifest.json")),
    ("a file for a bundle", lambda w: compress.Bundle.load(w.file), refused("file.txt")),
    ("data for a bundle", lambda w: compress.Bundle.load(w.shelf.data), refused("manifest.json")),
    ("a teacher for a bundle", lambda w: compress.Bundle.load(w.shelf.teacher), refused("manifest.json")),
]
OPTIONS: list[Case] = [
    ("a bool for a seed", lambda _: compress.RunOptions(seed=True), refused("seed", "True")),
    ("a bool as text", lambda _: compress.RunOptions(resume="no"), refused("resume", "no")),
    ("0 for a bool", lambda _: compress.RunOptions(resume=0), refused("resume", "0")),
    (
        "one change for a list",
        lambda _: compress.RunOptions(overrides="stages.0.lr=1"),
        lambda o: o.overrides == ["stages.0.lr=1"],
    ),
    ("a dictionary of changes", lambda _: compress.RunOptions(overrides={"stages.0.lr": 1}), refused("overrides")),
    ("a gate in capitals", lambda _: compress.RunOptions(gate="Warn"), refused("gate", "Warn")),
    (
        "a tracker's name misspelt",
        lambda w: w.distill(options=compress.RunOptions(track="wandbb")),
        refused("track", "wandbb"),
    ),
    ("a position", lambda _: compress.RunOptions(1), refused("arguments")),
    ("an unknown option", lambda _: compress.RunOptions(sed=1), refused("sed", "seed")),
    ("no minutes", lambda _: compress.LengthOptions(minutes=0), refused("minutes", "0")),
    ("minutes are NaN", lambda _: compress.LengthOptions(minutes=NAN), refused("minutes", "nan")),
    ("an effort between two", lambda _: compress.LengthOptions(effort="medium"), refused("effort", "medium")),
    ("a sampler misspelt", lambda _: compress.StudyOptions(sampler="tpee"), refused("sampler", "tpee")),
    ("no trials", lambda _: compress.StudyOptions(trials=0), refused("trials", "0")),
    ("half a winner", lambda _: compress.StudyOptions(winners=0.5), refused("winners", "0.5")),
    ("a second of a search", lambda _: compress.StudyOptions(minutes=0.01), refused("minutes", "0.01")),
    ("one objective", lambda _: compress.StudyOptions(objective="latency"), lambda o: o.objective == ["latency"]),
    (
        "an objective misspelt",
        lambda w: w.search(study=compress.StudyOptions(objective=["latancy"])),
        refused("objective", "latancy"),
    ),
    ("a latency of 0", lambda w: w.search(budget=compress.Budget(max_latency_ms=0)), refused("--max-latency-ms 0")),
    (
        "a latency below 0",
        lambda w: w.search(budget=compress.Budget(max_latency_ms=-1)),
        refused("--max-latency-ms -1"),
    ),
    ("a bool for a latency", lambda _: compress.Budget(max_latency_ms=True), refused("max_latency_ms")),
    ("a latency as text", lambda _: compress.Budget(max_latency_ms="4"), refused("max_latency_ms", "4")),
    ("a speed-up below 1", lambda w: w.search(budget=compress.Budget(speedup=0.5)), refused("speedup", "0.5")),
    ("a dictionary for a budget", lambda w: w.search(budget={"speedup": 2}), refused("budget")),
    ("no layers", lambda w: w.prune(layers=0), refused("layers", "0")),
    ("layers below 0", lambda w: w.prune(layers=-1), refused("layers", "-1")),
    ("layers are NaN", lambda w: w.prune(layers=NAN), refused("layers", "nan")),
    ("one layer and a half", lambda w: w.prune(layers=1.5), refused("layers", "1.5")),
    ("more layers than there are", lambda w: w.prune(layers=3), refused("layers", "3")),
    ("a bool for layers", lambda w: w.prune(layers=True), refused("layers", "True")),
    ("layers as text", lambda w: w.prune(layers="1"), refused("layers", "1")),
    ("a share above 1", lambda w: w.prune(keep=101), refused("keep", "101")),
    ("a size and a budget", lambda w: w.prune(layers=1, speedup=2), refused("layers", "speedup")),
    ("a speed-up out of reach", lambda w: w.prune(speedup=1e6), refused("speedup", "1e+06")),
    ("a timeout of 0", lambda _: compress.DeviceOptions(timeout=0), refused("timeout", "0")),
    ("a number for a device", lambda _: compress.DeviceOptions(device=1), refused("device", "1")),
    (
        "a device misspelt",
        lambda w: compress.bench([w.bundle], device=compress.DeviceOptions(device="locl")),
        refused("device", "locl"),
    ),
    ("a column for a list", lambda _: compress.ColumnOptions(text="a"), lambda o: o.text == ["a"]),
    ("a number for a column", lambda _: compress.ColumnOptions(label=1), refused("label", "1")),
    ("a weight below 0", lambda _: compress.Term("hinton.soft_targets", weight=-1), refused("weight", "-1")),
    ("a weight is NaN", lambda _: compress.Term("hinton.soft_targets", weight=NAN), refused("weight", "nan")),
    ("a map misspelt", lambda _: compress.Term("tinybert.hidden", layers="unifrom"), refused("layers", "unifrom")),
    ("a pair of one", lambda _: compress.Term("tinybert.hidden", layers=[(0,)]), refused("layers")),
    (
        "a loss of no paper",
        lambda w: compress.Objective((compress.Term("tinybrt.hidden"),), *w.shapes()),
        refused("tinybrt"),
    ),
    ("no terms", lambda w: compress.Objective((), *w.shapes()), refused("terms")),
    (
        "an unknown option of a loss",
        lambda w: compress.Objective((compress.Term("hinton.soft_targets", temprature=2),), *w.shapes()),
        refused("temprature", "temperature"),
    ),
    (
        "a model for a shape",
        lambda w: compress.Objective((compress.Term("hinton.soft_targets"),), w.model, w.model),
        refused("student"),
    ),
    ("a dictionary for a config", lambda _: compress.Shape.from_config({"hidden_size": 3}), refused("config")),
    ("a size of a student is 0", lambda _: compress.StudentSpec(layers=0), refused("layers", "0")),
    ("a bool for a size", lambda _: compress.StudentSpec(layers=True), refused("layers", "True")),
    ("an unknown size", lambda _: compress.StudentSpec(layer=3), refused("layer", "layers")),
    (
        "a student of another family",
        lambda w: compress.build(compress.StudentSpec(family="brt"), w.model),
        refused("family", "brt"),
    ),
    ("a name for a model", lambda w: compress.build(compress.StudentSpec(), w.shelf.teacher), refused("teacher")),
    ("a recipe with a space", lambda _: compress.Recipe.load("tinybert "), refused("tinybert ")),
    ("a recipe in capitals", lambda _: compress.Recipe.load("TinyBERT"), refused("TinyBERT", "tinybert")),
    ("a folder for a recipe", lambda w: compress.Recipe.load(str(w.folder)), refused(".yaml")),
    ("a text for a report", lambda _: compress.Report.from_json("[]"), refused("report")),
]
COMMANDS: list[Case] = [
    (
        "teacher and data swapped",
        lambda w: w.distill(teacher=w.shelf.data, data=w.shelf.teacher),
        refused("config.json"),
    ),
    (
        "a bundle's data for a teacher",
        lambda w: w.search(teacher=w.shelf.data, data=w.shelf.teacher),
        refused("config.json"),
    ),
    ("a file for a teacher", lambda w: w.distill(teacher=w.file), refused("file.txt")),
    ("a teacher for data", lambda w: w.distill(data=w.shelf.teacher), refused("training split")),
    ("a bundle for data", lambda w: w.distill(data=w.bundle.path), refused("training split")),
    ("a list for a teacher", lambda w: w.distill(teacher=[w.shelf.teacher]), refused("teacher")),
    ("a model without its tokenizer", lambda w: w.distill(teacher=w.model), refused("teacher")),
    ("tokenizer and model swapped", lambda w: w.distill(teacher=(tiny.tokenizer(), w.model)), refused("teacher")),
    ("a space after a teacher", lambda w: w.distill(teacher="minilm "), refused("minilm ")),
    ("a teacher of spaces", lambda w: w.distill(teacher=" "), refused("teacher")),
    ("an empty recipe", lambda w: w.distill(recipe=""), refused("recipe")),
    ("a dictionary for a recipe", lambda w: w.distill(recipe={"name": "x"}), refused("recipe")),
    ("a list of recipes", lambda w: w.distill(recipe=["tinybert"]), refused("recipe")),
    ("a dictionary of options", lambda w: w.distill(options={"seed": 1}), refused("options")),
    ("the data's folder to write", lambda w: w.distill(out=w.shelf.data), refused("reviews")),
    ("the teacher's folder to write", lambda w: w.distill(out=w.shelf.teacher), refused("teacher")),
    ("a file to write", lambda w: w.distill(out=w.file), refused("file.txt")),
    ("below a file to write", lambda w: w.distill(out=w.file / "run"), refused("file.txt")),
    ("a name of spaces to write", lambda w: w.distill(out=" "), refused("out")),
    ("an empty name to write", lambda w: w.distill(out=""), refused("out")),
    (
        "a teacher to quantise",
        lambda w: compress.quantize(w.shelf.teacher, data=w.shelf.data),
        refused("manifest.json"),
    ),
    (
        "bundle and data swapped",
        lambda w: compress.quantize(w.shelf.data, data=w.bundle.path),
        refused("manifest.json"),
    ),
    ("data to export", lambda w: compress.export(w.shelf.data, w.out), refused("config.json")),
    ("a format in capitals", lambda w: compress.export(w.bundle, w.out, to="ONNX"), refused("ONNX", "onnx")),
    (
        "one precision to export",
        lambda w: compress.export(w.bundle, w.out, to="text", precisions="int9"),
        refused("int9"),
    ),
    ("an opset of 0", lambda w: compress.export(w.bundle, w.out, opset=0), refused("opset", "0")),
    ("data to trim", lambda w: compress.trim(w.shelf.data, w.out, data=w.shelf.data), refused("config.json")),
    ("nothing to trim by", lambda w: compress.trim(w.bundle, w.out), refused("--data")),
    (
        "a count of 0",
        lambda w: compress.trim(w.bundle, w.out, data=w.shelf.data, min_count=0),
        refused("min_count", "0"),
    ),
    ("one bundle for a list", lambda w: compress.bench(w.shelf.data), refused("manifest.json")),
    ("no bundle", lambda _: compress.bench([]), refused("files")),
    ("a drop without data", lambda w: compress.gate(w.bundle, w.bundle, max_drop=0.1), refused("data")),
    ("data for an old model", lambda w: compress.gate(w.shelf.data, w.bundle), refused("manifest.json")),
    ("data to show", lambda w: compress.demo(w.shelf.data, w.out), refused("manifest.json")),
    ("a repository without an owner", lambda w: compress.push(w.bundle, "small", dry_run=True), refused("small")),
    (
        "a repository with a space",
        lambda w: compress.push(w.bundle, "team/small ", dry_run=True),
        refused("team/small "),
    ),
    (
        "a teacher that labels nothing",
        lambda w: compress.label(teacher=w.shelf.data, prompt="sentiment", data=w.file, out=w.out),
        refused("config.json"),
    ),
    (
        "a prompt with a space",
        lambda w: compress.label(teacher=w.shelf.teacher, prompt="sentiment ", data=w.file, out=w.out),
        refused("sentiment "),
    ),
    (
        "a folder to label into",
        lambda w: compress.label(teacher=w.shelf.teacher, prompt="sentiment", data=w.file, out=w.folder),
        refused("folder"),
    ),
    (
        "a corpus that is a table's column",
        lambda w: compress.pretrain(teacher=w.shelf.teacher, recipe="tinybert-general", corpus=["a"], out=w.out),
        refused("corpus"),
    ),
    ("a number to inspect", lambda _: compress.inspect(3.5), refused("thing", "3.5")),
    ("a form of another thing", lambda w: compress.inspect(w.shelf.data, form="recipe"), refused("reviews")),
]
GROUPS = {"table": TABLES, "argument": ARGUMENTS, "bundle": PREDICTIONS, "option": OPTIONS, "command": COMMANDS}
CASES = [(f"{group}: {name}", call, expected) for group, cases in GROUPS.items() for name, call, expected in cases]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory, shelf: Shelf) -> Iterator[Things]:
    folder = tmp_path_factory.mktemp("odd")
    bundle = tiny.bundle(folder / "bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(folder / "home"))
        patch.chdir(folder)
        yield Things(shelf, bundle, folder, tiny.bert())


def test_there_are_more_than_a_hundred() -> None:
    assert len(CASES) == len({name for name, _, _ in CASES}) > 150


@pytest.mark.parametrize(("call", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_odd_inputs_are_refused_by_name_or_taken_as_documented(
    things: Things, call: Callable[[Things], Any], expected: Any
) -> None:
    for name in ("spare", "копия", "out"):
        shutil.rmtree(things.folder / name, ignore_errors=True)
    things.file.write_text("some text\n", encoding="utf-8")
    before = sorted(things.folder.iterdir())
    if callable(expected):
        assert expected(call(things))
        return
    with pytest.raises(CompressError) as caught:
        call(things)
    missing = [part for part in expected if part not in str(caught.value)]
    assert not missing, str(caught.value)
    made = set(things.folder.iterdir()) - {*before, things.folder / "home", things.folder / "spare"}
    assert made == set()
