"""Write and load bundles: one folder in the hub's layout, whole or not there, that can prove what is in it.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json  README.md  manifest.json
    onnx/model.onnx  onnx/model_quantized.onnx
    a model with a task        recipe.yaml, and where made: report.json  onnx/model_fp16.onnx  onnx/model_w8.onnx
                               onnx/model_q4.onnx  onnx/model_text.onnx
    embeddings                 modules.json  1_Pooling/  as sentence-transformers loads them
    a model that writes text   generation_config.json; T5: onnx/encoder_model.onnx  onnx/decoder_model_merged.onnx

Loading and predicting import neither torch nor transformers.
"""

import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters import manifest as manifests
from compress.exporters.card import model_card, revise
from compress.exporters.manifest import Manifest, Stamp
from compress.io import atomic_file, atomic_folder
from compress.models.heads import PROBLEMS, count_outputs, output_names
from compress.models.pooling import pooling_of, set_pooling
from compress.provenance import option_of
from compress.records.certificate import Certificate, Sensitivity, VariantResult
from compress.records.run_report import REPORT, Report
from compress.slicing.shape import positions

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from compress.data.objects import DataLike
    from compress.data.task import TaskData
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.predictor import Answer, Marked, Outcome, Prediction, Predictor, Text, Vector
    from compress.exporters.session import EncodedRow

Precision = Literal["int8", "fp32", "fp16", "w8", "q4"]
"""The numbers that the weights are stored in; w8, q4: weights alone in 8 and 4 bits, for size."""

FILES: Mapping[Precision, str] = {
    "fp32": "onnx/model.onnx",
    "int8": "onnx/model_quantized.onnx",
    "fp16": "onnx/model_fp16.onnx",
    "w8": "onnx/model_w8.onnx",
    "q4": "onnx/model_q4.onnx",
}
"""The names transformers.js and optimum look for, `w8` apart. Every bundle has the first two."""

TEXT = "onnx/model_text.onnx"
CARD = "README.md"
"""Texts in, labels out: the tokenizer is in the graph."""

FIXED = ("manifest.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files that `attach` must not touch: to change these is to write another bundle."""


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk, checked."""

    path: Path
    manifest: Manifest

    @classmethod
    def write(
        cls,
        path: Path,
        *,
        model: Any,
        tokenizer: Any,
        task: Task,
        max_length: int,
        recipe: str,
        card: Mapping[str, Any],
        keep: Sequence[str] = (),
    ) -> "Bundle":
        """Write a model with a task: weights in float32, tokenizer, ONNX in fp32 and int8, card and recipe.

        The folder is built beside and renamed as a whole; a bundle already there is replaced, anything else there is
        refused. Model and tokenizer stay as they were. `recipe` is YAML text, `card` the fields of `Card`, `keep`
        the graph's nodes that the int8 file leaves in float32.
        Raises BundleError when model, tokenizer and task do not belong together, ExportError from the export.
        """
        check_parts(model, tokenizer, task, max_length)
        manifest = Manifest.from_model(model, max_length, task=task)
        with writing(path, manifest) as folder:
            _write_model(folder, model, tokenizer, task, max_length, keep=keep)
            (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
            (folder / "README.md").write_text(model_card(card, manifest), encoding="utf-8")
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> "Bundle":
        """Open a bundle, or that of a run's folder, after checking every file against its manifest.

        Raises BundleError naming the files that are missing, cut short or changed, with found and expected hashes.
        """
        path = manifests.find_bundle(path) or path
        manifest = Manifest.read(path)
        manifest.check(path)
        return cls(path, manifest)

    @property
    def task(self) -> Task:
        """Return the model's task. Raises BundleError for a bundle of another kind."""
        if self.manifest.task is None:
            raise BundleError(f"{self.path}: holds {self.manifest.kind}; expected a model with a head for a task")
        return self.manifest.task

    def files(self) -> dict[str, Path]:
        """List the ONNX files that read token ids, by precision: `fp32` and `int8`, and those that were made
        besides."""
        return {precision: self.path / name for precision, name in FILES.items() if name in self.manifest.files}

    def check_has(self, precision: Precision) -> None:
        """Raise BundleError, with what to do, where there is no file of this precision."""
        if FILES[precision] not in self.manifest.files:
            words = ["export", str(self.path), "--precision", precision]
            if precision == "int8" and (self.path / REPORT).is_file():
                report = self.report()
                if data := option_of(report.command, "--data") or report.data:
                    words = ["quantize", str(self.path), "--data", data]
            make = "write or copy the bundle again"
            make = make if precision == "fp32" else f"make it with: {shlex.join(['compress', *words])}"
            raise BundleError(
                f"{self.path}: has no {precision} file; it has {', '.join(self.files()) or 'none'}; {make}"
            )

    def open(self, precision: Precision = "int8", *, threads: int = 1) -> "Predictor":
        """Open tokenizer and session for many calls; `threads` rows run at a time."""
        from compress.exporters.predictor import open_predictor

        task, made = self.task, self.manifest
        self.check_has(precision)
        return open_predictor(
            self.path,
            self.path / FILES[precision],
            task=task,
            max_length=made.max_length,
            threads=threads,
            threshold=math.inf if made.threshold is None else made.threshold,
        )

    @overload
    def predict(
        self, texts: "Sequence[Text]", *, precision: Precision = "int8", threads: int = 1
    ) -> "list[Prediction] | list[Answer] | list[Marked] | list[Vector]": ...

    @overload
    def predict(
        self, texts: "Iterator[Text]", *, precision: Precision = "int8", threads: int = 1
    ) -> "Iterator[Outcome]": ...

    def predict(
        self, texts: "Iterable[Text]", *, precision: Precision = "int8", threads: int = 1
    ) -> "list[Prediction] | list[Answer] | list[Marked] | list[Vector] | Iterator[Outcome]":
        """Predict each text, or pair of texts (a question and its context), in their order: see `Predictor.predict`.

        Returns a list; of an iterator, such as a generator, an iterator, which reads some hundred texts at a time.
        """
        from compress.exporters.predictor import iterate_batches

        predictor = self.open(precision, threads=threads)
        if isinstance(texts, Iterator):
            return chain.from_iterable(map(predictor.predict, iterate_batches(texts)))
        return predictor.predict(list(texts))

    def logits(
        self, rows: "Iterable[EncodedRow]", *, precision: Precision = "int8", threads: int = 1
    ) -> "NDArray[np.float32]":
        """Compute the logits of encoded rows, in their order: see `Predictor.logits`."""
        return self.open(precision, threads=threads).logits(rows)

    def embed(self, texts: Sequence[str], *, precision: Precision = "int8", threads: int = 1) -> "NDArray[np.float32]":
        """Compute a vector (texts, hidden) for each text. Raises BundleError where the bundle gives none."""
        from compress.exporters.embeddings import embed

        if self.manifest.task is None or self.manifest.task.kind != "embedding":
            self._check_kind("embeddings")
        self.check_has(precision)
        return embed(self.path, self.path / FILES[precision], texts, self.manifest.max_length, threads)

    def complete(
        self, texts: Sequence[str], *, precision: Literal["fp32", "int8"] = "int8", new: int = 32
    ) -> list[str]:
        """Write at most `new` tokens after each text, or in answer to it, always the likeliest one.

        Texts are cut to the bundle's `max_length`. Sampling and beams are for optimum and transformers.js.
        """
        from compress.exporters.generation import complete

        self._check_kind("generative")
        return complete(self.path, texts, precision, max_length=self.manifest.max_length, new=new)

    def _check_kind(self, expected: manifests.BundleKind) -> None:
        if self.manifest.kind != expected:
            raise BundleError(f"{self.path}: is a bundle of kind {self.manifest.kind}; expected {expected}")

    def load_data(
        self, data: "DataLike", *, text: Sequence[str] | None = None, label: str | None = None, seed: int = 0
    ) -> "TaskData":
        """Load `data`, named as for `distill`, as the bundle's task. Raises BundleError where it holds another task,
        DataError where it cannot be read."""
        from compress.data import load_task  # datasets and pyarrow, without which a bundle predicts

        mine = self.task
        found = load_task(data, text=text, label=label, kind=mine.kind, metric=mine.metric, seed=seed)
        theirs = found.task
        if (theirs.kind, theirs.labels, len(theirs.text)) != (mine.kind, mine.labels, len(mine.text)):
            raise BundleError(
                f"{found.name}: {_describe(theirs)}; {self.path} does {_describe(mine)}. Give the data that the "
                "bundle was made from"
            )
        return replace(found, task=replace(theirs, width=mine.width))

    def evaluator(self, split: "Dataset") -> "Evaluator":
        """Encode a split with the bundle's tokenizer, to score logits on it."""
        from transformers import AutoTokenizer  # seconds to import, and not needed to predict

        from compress.evaluation.evaluator import Evaluator

        return Evaluator.from_split(
            self.task, split, AutoTokenizer.from_pretrained(self.path), self.manifest.max_length
        )

    def set_threshold(self, threshold: float) -> "Bundle":
        """Set how much better no answer must score than the best span to be given (qa); infinite: always answer."""
        manifest = replace(self.manifest, threshold=threshold if math.isfinite(threshold) else None)
        manifest.write(self.path)
        return replace(self, manifest=manifest)

    def card(self, card: Mapping[str, Any]) -> str:
        """Render the model card anew, as for `bundle.attach("README.md", bundle.card(...))`."""
        return model_card(card, self.manifest)

    def attach(self, name: str, text: str) -> "Bundle":
        """Add or replace the file `name` (report.json, a fuller README.md).

        Killed at any moment, it leaves a bundle that loads: the file is unlisted while it changes.
        """
        if Path(name).name != name or name in FIXED:
            raise BundleError(
                f"{self.path / name}: cannot be attached; expected a plain name such as report.json or README.md"
            )
        return self._change({name: lambda partial: partial.write_text(text, encoding="utf-8")})

    def put(self, precision: Precision | Literal["text"], source: Path) -> "Bundle":
        """Add the finished ONNX file `source` as the file of this precision, or replace that.

        `source` stays where it is. Killed at any moment, it leaves a bundle that loads, as `attach` does: for an
        instant it has no file of this precision.
        """
        name = TEXT if precision == "text" else FILES[precision]
        return self._change({name: lambda partial: shutil.copyfile(source, partial)})

    def adopt(self, other: "Bundle", precisions: Iterable[Precision]) -> "Bundle":
        """Take the files of these precisions from another bundle, with its report and card, all of them together.

        Killed at any moment, it leaves a bundle that loads, as `attach` does: none is listed until all are there.
        """
        evidence = [name for name in (REPORT, CARD) if name in other.manifest.files]
        names = [*(FILES[precision] for precision in precisions), *evidence]
        return self._change({name: partial(shutil.copyfile, other.path / name) for name in names})

    def report(self) -> Report:
        """Read the report in the bundle; where there is none, return an empty one that says what the bundle is."""
        if (self.path / REPORT).is_file():
            return Report.from_json(self.path / REPORT)
        task = self.task
        return Report(
            title=self.path.name,
            recipe="",
            teacher="",
            data="",
            kind=task.kind,
            metric=task.metric,
            labels=len(task.labels),
            split="",
            split_rows=0,
            rows=(),
            command="",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=dict(self.manifest.versions),
        )

    def attach_evidence(
        self,
        *,
        certificates: Sequence[Certificate] = (),
        sensitivity: Sequence[Sensitivity] = (),
        tuning: Sequence[VariantResult] = (),
    ) -> "Bundle":
        """Keep this evidence in the bundle's report.

        A certificate takes the place of an older one of the same file on the same device and runtime; a race takes the
        place of an older one on the same device; sensitivities, of all older ones. Raises BundleError for a figure
        that is not finite: JSON cannot hold it.
        """
        given: tuple[Certificate | Sensitivity | VariantResult, ...] = (*certificates, *sensitivity, *tuning)
        for each in given:
            for name, value in asdict(each).items():
                if isinstance(value, float) and not math.isfinite(value):
                    kind = type(each).__name__.lower()
                    raise BundleError(f"{self.path}: {kind}: {name} is {value}; nothing was kept")
        report, card = self.report(), self.path / CARD
        old = {each.artefact: each.sha256 for each in report.certificates}
        proved = {(each.artefact, each.device, each.runtime): each for each in (*report.certificates, *certificates)}
        raced = {each.device for each in tuning}
        report = replace(
            report,
            certificates=tuple(proved.values()),
            sensitivity=tuple(sensitivity) or report.sensitivity,
            tuning=(*(each for each in report.tuning if each.device not in raced), *tuning),
        )
        bundle = self.attach(REPORT, report.to_json())
        if not certificates or not card.is_file():
            return bundle
        replaced = {
            str(precision): each.artefact for each in certificates for precision, name in FILES.items()
            if name == each.artefact and old.get(name, each.sha256) != each.sha256
        }  # fmt: skip
        return bundle.attach(CARD, revise(card.read_text(encoding="utf-8"), report.certificates, replaced))

    def copy_to(self, path: Path) -> "Bundle":
        """Copy the bundle: whole, or not at all. A bundle at `path` is replaced, anything else refused."""
        with building(path) as folder:
            for name in self.manifest.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, folder / name)
            self.manifest.write(folder)
        return Bundle.load(path)

    def _change(self, writers: Mapping[str, Callable[[Path], object]]) -> "Bundle":
        """Change files together: written beside first, and unlisted while they get their names."""
        others = {name: stamp for name, stamp in self.manifest.files.items() if name not in writers}
        stamps = {}
        with ExitStack() as beside:
            for name, write in writers.items():
                file = beside.enter_context(atomic_file(self.path / name))
                write(file)
                stamps[name] = Stamp.of(file)
            replace(self.manifest, files=others).write(self.path)
        complete = replace(self.manifest, files=dict(sorted({**others, **stamps}.items())))
        complete.write(self.path)
        return replace(self, manifest=complete)


def _describe(task: Task) -> str:
    labels = task.labels
    of = f" of {len(labels)} labels ({', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''})" if labels else ""
    return f"{task.kind}{of} over {'pairs of texts' if task.pair else 'single texts'}"


def check_parts(model: Any, tokenizer: Any, task: Task, max_length: int) -> None:
    """Raise BundleError unless model, tokenizer and task can become one bundle; quick, so ask before training."""
    kind, words = type(model).__name__, type(tokenizer).__name__
    outputs = count_outputs(model.config, task.kind)
    if outputs != task.outputs:
        raise BundleError(f"{kind}: {outputs} outputs; the task has {task.outputs}")
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise BundleError(
            f"{words}: has no tokenizer.json form, which the bundle predicts with; expected a fast tokenizer, as "
            "AutoTokenizer gives for all common models"
        )
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise BundleError(f"{kind}: embeds {known} tokens, the tokenizer has {len(tokenizer)}; they do not match")
    limit = positions(model)
    if limit is not None and max_length > limit:
        raise BundleError(f"{kind}: max_length {max_length}; this model has {limit} positions")


def _write_model(
    folder: Path, model: Any, tokenizer: Any, task: "Task", max_length: int, *, keep: Sequence[str]
) -> None:
    """Write weights, config, tokenizer and both ONNX files."""
    from compress.exporters.int8 import quantize_dynamic, quantize_learned, read_learned_ranges
    from compress.exporters.onnx import as_float32, makes_segments, to_onnx
    from compress.models.checkpoints import save_checkpoint

    plain = as_float32(model)
    labels = (task.label,) if task.numeric else output_names(task)
    plain.config.problem_type = PROBLEMS.get(task.kind)
    plain.config.id2label = dict(enumerate(labels))
    plain.config.label2id = {label: index for index, label in enumerate(labels)}
    if task.kind == "embedding":
        set_pooling(plain.config, replace(pooling_of(plain.config), max_length=max_length))
    if task.kind == "ranking":  # else sentence-transformers puts the score through a sigmoid
        plain.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    save_checkpoint(folder, plain, tokenizer, max_length)
    to_onnx(plain, folder / FILES["fp32"], segments=makes_segments(tokenizer))
    if learned := read_learned_ranges(plain.config):
        quantize_learned(folder / FILES["fp32"], folder / FILES["int8"], learned, keep=keep)
    else:
        quantize_dynamic(folder / FILES["fp32"], folder / FILES["int8"], keep=keep)


def check_place(path: Path) -> None:
    """Raise BundleError where something is that is no bundle."""
    foreign = path.is_dir() and any(path.iterdir()) and not manifests.is_bundle(path)
    if foreign or (path.exists() and not path.is_dir()):
        raise BundleError(f"{path}: exists and is no bundle; expected a new folder, or a bundle to replace")


def check_writable(path: Path) -> None:
    """Raise BundleError where a bundle cannot be changed in place, before any work is done for it."""
    if not os.access(path, os.W_OK):
        raise BundleError(f"{path}: cannot be changed (no permission, or a read-only disk); give --out a new folder")


@contextmanager
def writing(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield a folder to write a new bundle's files into; at the end it gets this manifest, with the hash of each file,
    and takes the place of `path`."""
    with building(path) as folder:
        yield folder
        replace(manifest, files=manifests.stamp_files(folder)).write(folder)


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to write a bundle into and finish; it takes the name and the place of `path` at the
    end, and is removed if anything fails."""
    check_place(path)
    try:
        with atomic_folder(path) as folder:
            yield folder
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be written ({error.strerror or error}); nothing of it was kept. Make room, or mend what "
            "is in its way, and write it again: `compress distill --resume` trains nothing twice"
        ) from error
