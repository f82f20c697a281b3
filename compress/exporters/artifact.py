"""Write and load bundles: one folder in the hub's layout, written as a whole, with the
hash of every file.

    every bundle        config.json  model.safetensors  tokenizer.json
                        tokenizer_config.json  README.md  manifest.json
                        onnx/model.onnx  onnx/model_quantized.onnx
    with a task         recipe.yaml, and optionally report.json  onnx/model_fp16.onnx
                        onnx/model_w8.onnx  onnx/model_q4.onnx  onnx/model_text.onnx
    of vectors          modules.json  1_Pooling/, as sentence-transformers loads them
    a generative model  generation_config.json; T5: onnx/encoder_model.onnx
                        onnx/decoder_model_merged.onnx

Loading and predicting import neither torch nor transformers.
"""

import copy
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from compress import families
from compress.arguments import (
    BundleLike,
    DataLike,
    FileName,
    PathName,
    SeedNumber,
    TextsLike,
    ThreadCount,
    TokenCount,
    check_arguments,
    name_of,
    read_texts,
)
from compress.data.task import Task
from compress.errors import BundleError
from compress.exporters import manifest as manifests
from compress.exporters.manifest import BUNDLE_FILES, Manifest, Precision, Stamp
from compress.io import atomic_file, atomic_folder, hash_files
from compress.outputs import check_output_folder
from compress.provenance import option_of, timestamp
from compress.records.certificate import Certificate, Sensitivity, VariantResult
from compress.records.run_report import REPORT, Report
from compress.values import LikeCheck, NumberCheck, PathCheck, RowsCheck

if TYPE_CHECKING:
    from datasets import Dataset

    from compress.arrays import Floats
    from compress.data.answers import Outcome
    from compress.data.encoder import Text
    from compress.data.task import TaskData
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.arrow import ArrowPredictor
    from compress.exporters.predictor import Predictor
    from compress.exporters.session import EncodedRow
    from compress.exporters.text_generator import TextWriter
    from compress.models.sentence_settings import SentenceSettings

SplitLike = Annotated[
    "Dataset",
    LikeCheck("a split, as `load_data` returns them", ("column_names", "select")),
]
RowsLike = Annotated[
    "Iterable[EncodedRow]", RowsCheck("encoded rows, as an evaluator holds them")
]
ModelObject = Annotated[
    Any, LikeCheck("a model of transformers", ("config", "get_input_embeddings"))
]
WITHOUT_TASK: Mapping[str, str] = {
    "encoder": "it returns a vector for each token. For one of a text, export it again "
    "with a pooling (--pool)",
    "generative": "it writes text (`compress predict`, `Bundle.complete`)",
}
"""The use of a bundle without a task, by its kind."""

TEXT = "onnx/model_text.onnx"
"""Texts in, labels out: the tokenizer is in the graph."""
BUNDLE_CARD = "README.md"
FIXED_FILES = (
    "manifest.json",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that `attach` must not replace, as they define the bundle."""


def _is_onnx(file: Path) -> bool:
    """Return True for a file that begins like ONNX: with field 1 of a protobuf message,
    the version."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(1) == b"\x08"


@check_arguments
@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files match its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    @check_arguments
    def write(
        cls,
        path: PathName,
        *,
        model: ModelObject,
        tokenizer: Any,
        task: Task,
        max_length: TokenCount,
        recipe: str,
        card: Mapping[str, Any],
        keep: Sequence[str] = (),
    ) -> "Bundle":
        """Write a model with a task: weights in float32, tokenizer, ONNX in fp32 and
        int8, card and recipe.

        An existing bundle at `path` is replaced, anything else is refused. Model and
        tokenizer are not changed. `recipe` is YAML text, `card` the fields of `Card`,
        `keep` the graph's nodes that stay float32 in int8. Raises BundleError if model,
        tokenizer and task do not fit together, ExportError from the export.
        """
        from compress.exporters import bundle_files
        from compress.exporters.card import model_card

        tokenizer = copy.deepcopy(tokenizer)  # its backend keeps the last truncation
        bundle_files.check_parts(model, tokenizer, task, max_length)
        manifest = Manifest.from_model(model, max_length, task=task)
        with writing(Path(path), manifest, model_card(card, manifest)) as folder:
            bundle_files.write_encoder(
                folder, model, tokenizer, max_length, task=task, keep=keep
            )
            (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        return cls.load(path)

    @classmethod
    @check_arguments
    def load(cls, path: BundleLike) -> "Bundle":
        """Load a bundle, or the bundle of a run, and check every file against the
        manifest.

        Raises BundleError, with the hashes, for files that are missing, truncated or
        changed.
        """
        given = Path(name_of(path))
        folder = manifests.find_bundle(given) or given
        manifest = Manifest.read(folder)
        manifest.check(folder)
        bundle = cls(folder, manifest)
        if not manifest.vectors:
            return bundle
        task = replace(bundle.task, preparation=bundle.sentence.preparation)
        return cls(folder, replace(manifest, task=task))

    @property
    def task(self) -> Task:
        """Return the model's task. Raises BundleError for a bundle of another kind."""
        if self.manifest.task is None:
            raise BundleError(
                f"{self.path}: is a bundle of kind {self.manifest.kind}; expected one "
                f"with a task: {WITHOUT_TASK[self.manifest.kind]}"
            )
        return self.manifest.task

    @property
    def threshold(self) -> float | None:
        """Return the threshold of answers; None if every question has an answer."""
        return self.manifest.threshold if self.task.unanswerable else None

    @property
    def sentence(self) -> "SentenceSettings":
        """Read what a sentence encoder does after its encoder; other models have no
        such modules."""
        from compress.models.sentence_folder import SentenceFolder
        from compress.models.sentence_settings import TOKENS_ONLY

        if not self.manifest.vectors:
            return TOKENS_ONLY
        return SentenceFolder.read(self.path).settings

    @property
    def leaves_out_prompts(self) -> bool:
        """Check whether vectors leave out the tokens of prompts, whose number files
        read as `prompt_length`."""
        return self.sentence.leaves_out_prompts

    def files(self) -> dict[str, Path]:
        """Map precisions to the ONNX files that read token ids: `fp32`, `int8`, and any
        added later."""
        return {
            precision: self.path / name
            for precision, name in BUNDLE_FILES.items()
            if name in self.manifest.files
        }

    @check_arguments
    def check_has(self, precision: Precision) -> None:
        """Raise BundleError, with the command that makes it, if there is no file of
        this precision."""
        if BUNDLE_FILES[precision] in self.manifest.files:
            return
        words = ["export", str(self.path), "--precision", precision]
        if precision == "int8" and (self.path / REPORT).is_file():
            report = self.report()
            if data := option_of(report.command, "--data") or report.data:
                words = ["quantize", str(self.path), "--data", data]
        make = f"make it with: {shlex.join(['compress', *words])}"
        make = "write or copy the bundle again" if precision == "fp32" else make
        raise BundleError(
            f"{self.path}: has no {precision} file; it has "
            f"{', '.join(self.files()) or 'none'}; {make}"
        )

    @check_arguments
    def open(
        self,
        precision: Precision = "int8",
        *,
        threads: ThreadCount = 1,
    ) -> "Predictor":
        """Open tokenizer and session for many calls; `threads` rows run at a time."""
        from compress.exporters.predictor import open_predictor

        task = self.task
        self.check_has(precision)
        return open_predictor(
            self.path,
            self.path / BUNDLE_FILES[precision],
            task=task,
            max_length=self.manifest.max_length,
            threads=threads,
            threshold=self.manifest.margin,
            layered=families.find(self.manifest.model_type).layered,
        )

    @overload
    def predict(
        self,
        texts: "Sequence[Text]",
        *,
        precision: Precision = "int8",
        threads: int = 1,
    ) -> "list[Outcome]": ...

    @overload
    def predict(
        self,
        texts: "Iterator[Text]",
        *,
        precision: Precision = "int8",
        threads: int = 1,
    ) -> "Iterator[Outcome]": ...

    @check_arguments
    def predict(
        self,
        texts: "Iterable[Text]",
        *,
        precision: Precision = "int8",
        threads: ThreadCount = 1,
    ) -> "list[Outcome] | Iterator[Outcome]":
        """Predict for each text, or pair of texts (a question and its context), in
        order: see `Predictor.predict`.

        texts   a list, a column of a table, or an array; of pairs, if the task has
                pairs. For one text, give a list of one

        Returns a list; for an iterator, such as a generator, it returns an iterator
        that reads a few hundred texts at a time."""
        from compress.exporters.predictor import iterate_batches

        given = read_texts(texts, self.task.text, where="Bundle.predict")
        predictor = self.open(precision, threads=threads)
        if isinstance(given, Iterator):
            return chain.from_iterable(map(predictor.predict, iterate_batches(given)))
        return predictor.predict(given)

    @check_arguments
    def arrow(
        self,
        precision: Precision = "int8",
        *,
        text: Sequence[str] | None = None,
        threads: ThreadCount = 1,
        prompt_name: str | None = None,
    ) -> "ArrowPredictor":
        """Return a function that adds the answers to Arrow tables and batches, for
        engines that send it to their workers: see docs/engines.md.

        text         the columns of the one or two texts; None: those named like the
                     bundle's, or the only one
        threads      how many rows to run at a time in each worker
        prompt_name  for vectors: the model's prompt to put before each text

        Raises BundleError for a bundle without a task, if there is no file of this
        precision, and for a prompt that the model does not have."""
        from compress.exporters.arrow import ArrowPredictor

        tried = self.open(precision)  # what is wrong shows here, not on a cluster
        if prompt_name is not None:
            tried.with_prompt(prompt_name)
        folder = self.path.resolve()
        digest = hash_files([folder / manifests.MANIFEST_FILE])
        return ArrowPredictor(
            partial(_open_once, folder, digest, precision, threads, prompt_name),
            None if text is None else tuple(text),
        )

    @check_arguments
    def logits(
        self,
        rows: RowsLike,
        *,
        precision: Precision = "int8",
        threads: ThreadCount = 1,
    ) -> "Floats":
        """Compute the logits of encoded rows, in order: see `Predictor.logits`."""
        return self.open(precision, threads=threads).logits(rows)

    @check_arguments
    def embed(
        self,
        texts: TextsLike,
        *,
        precision: Precision = "int8",
        threads: ThreadCount = 1,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> "Floats":
        """Compute the vectors (texts, width) of a list or column of texts, as
        sentence-transformers' `encode` does.

        prompt_name   the model's prompt to put before each text: `query` and `document`
                      for those that `encode_query` and `encode_document` choose, or
                      another name; None: the model's default prompt, if it has one
        prompt        any other text to put there, "" for nothing

        Raises BundleError for a model that computes no vectors of texts, CompressError
        for a prompt that the model does not have."""
        predictor = self.open(precision, threads=threads)
        return predictor.embed(list(texts), prompt_name=prompt_name, prompt=prompt)

    @check_arguments
    def complete(
        self,
        texts: TextsLike,
        *,
        precision: Literal["fp32", "int8"] = "int8",
        new: TokenCount = 32,
    ) -> list[str]:
        """Generate at most `new` tokens after each text, or in answer to it, by greedy
        decoding.

        `texts` is a list or column of texts, as for `predict`. Texts are truncated to
        the bundle's `max_length`, or to fewer tokens where the model has no positions
        for `new` more. For sampling and beam search, use optimum or transformers.js.
        """
        return self.open_writer(precision, new=new).complete(list(texts))

    @property
    def generative(self) -> bool:
        """Return True if the bundle generates text."""
        return self.manifest.kind == "generative"

    @check_arguments
    def open_writer(
        self,
        precision: Precision = "int8",
        *,
        new: TokenCount = 32,
        threads: ThreadCount = 1,
    ) -> "TextWriter":
        """Open a language model for many calls: see `complete`. Raises BundleError for
        any other bundle, and for one without a file of this precision."""
        from compress.exporters.text_generator import DECODER_ONLY, TextWriter

        if not self.generative:
            raise BundleError(
                f"{self.path}: is a bundle of kind {self.manifest.kind}; expected "
                "generative"
            )
        if precision not in DECODER_ONLY:
            raise BundleError(
                f"{self.path}: has no {precision} file; language models have "
                f"{' and '.join(DECODER_ONLY)}"
            )
        return TextWriter.open(
            self.path,
            precision,
            max_length=self.manifest.max_length,
            new=new,
            threads=threads,
        )

    @check_arguments
    def load_data(
        self,
        data: DataLike,
        *,
        text: Sequence[str] | None = None,
        label: str | None = None,
        seed: SeedNumber = 0,
        labels: bool = True,
    ) -> "TaskData":
        """Load `data`, named as for `distill`, for the bundle's task. Labels that match
        the bundle's (see `Task.match_labels`) get its names and its order.

        labels   whether they must match; False: only the texts are needed

        Raises BundleError for data of another task, DataError for data that cannot be
        read.
        """
        # imports datasets and pyarrow, which prediction does not need
        from compress.data.load import load_task, use_labels

        task = self.task
        loaded = load_task(
            data, text=text, label=label, kind=task.kind, metric=task.metric, seed=seed
        )
        other = loaded.task
        names = task.labels if labels else other.labels
        places = other.match_labels(names)
        if places is None or (other.kind, other.pair) != (task.kind, task.pair):
            raise BundleError(
                f"{loaded.name}: {_describe(other)}; {self.path} does "
                f"{_describe(task)}. Give the data that the bundle was made from"
            )
        loaded = use_labels(loaded, names, places)
        return replace(loaded, task=replace(loaded.task, width=task.width))

    @check_arguments
    def evaluator(self, split: SplitLike) -> "Evaluator":
        """Encode a split with the bundle's tokenizer, to compute scores from logits."""
        from compress.data.encoder import TextEncoder

        # imports scipy, which prediction does not need
        from compress.evaluation.evaluator import Evaluator

        return Evaluator.from_split(
            self.task,
            split,
            TextEncoder.from_folder(self.path),
            self.manifest.max_length,
        )

    @check_arguments
    def set_threshold(
        self,
        threshold: Annotated[float, NumberCheck(infinite=True)],
    ) -> "Bundle":
        """Set the margin over the best span from which "no answer" is returned (qa);
        infinite: always answer."""
        files = dict(self.manifest.files)
        files.pop(TEXT, None)  # it has a copy of the threshold
        manifest = replace(
            self.manifest,
            threshold=threshold if math.isfinite(threshold) else None,
            files=files,
        )
        manifest.write(self.path)
        (self.path / TEXT).unlink(missing_ok=True)
        return replace(self, manifest=manifest)

    @check_arguments
    def card(self, card: Mapping[str, Any]) -> str:
        """Render a model card, to be attached: `bundle.attach("README.md",
        bundle.card(...))`."""
        from compress.exporters.card import model_card

        return model_card(card, self.manifest)

    @check_arguments
    def attach(
        self,
        name: Annotated[str, PathCheck("a plain name", make=str)],
        text: str,
    ) -> "Bundle":
        """Add or replace the file `name`, such as report.json or README.md.

        If the process is killed, the bundle still loads: the manifest does not list the
        file while it changes.
        """
        if Path(name).name != name or name in FIXED_FILES:
            raise BundleError(
                f"{self.path / name}: cannot be attached; expected a plain name such "
                "as report.json or README.md"
            )
        return self._change(
            {name: lambda partial: partial.write_text(text, encoding="utf-8")}
        )

    @check_arguments
    def put(self, precision: Precision | Literal["text"], source: FileName) -> "Bundle":
        """Copy the ONNX file `source` into the bundle as its file of this precision, as
        safely as `attach`.

        Raises BundleError if it is not such a file.
        """
        if not _is_onnx(Path(source)):
            raise BundleError(
                f"source {source}: no such file; expected an ONNX file to copy into "
                f"{self.path}"
            )
        name = TEXT if precision == "text" else BUNDLE_FILES[precision]
        return self._change({name: lambda partial: shutil.copyfile(source, partial)})

    @check_arguments
    def adopt(self, other: "Bundle", precisions: Iterable[Precision]) -> "Bundle":
        """Copy the files of these precisions from another bundle, with its report and
        card. The manifest lists them only once all are there, as in `attach`."""
        evidence = [
            name for name in (REPORT, BUNDLE_CARD) if name in other.manifest.files
        ]
        names = [*(BUNDLE_FILES[precision] for precision in precisions), *evidence]
        return self._change(
            {name: partial(shutil.copyfile, other.path / name) for name in names}
        )

    def report(self) -> Report:
        """Read the bundle's report; if there is none, return an empty one with the
        bundle's task."""
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
            date=timestamp(),
            versions=dict(self.manifest.versions),
        )

    @check_arguments
    def attach_evidence(
        self,
        *,
        certificates: Sequence[Certificate] = (),
        sensitivity: Sequence[Sensitivity] = (),
        tuning: Sequence[VariantResult] = (),
    ) -> "Bundle":
        """Add this evidence to the bundle's report, and certificates to its card.

        A certificate replaces an older one of the same file on the same device and
        runtime; a race replaces an older one on the same device; sensitivities replace
        all older ones. Raises BundleError for a value that is not finite: JSON cannot
        hold it.
        """
        for each in (*certificates, *sensitivity, *tuning):
            for name, value in asdict(each).items():  # type: ignore[call-overload]  # mypy joins the three to object
                if isinstance(value, float) and not math.isfinite(value):
                    kind = type(each).__name__.lower()
                    raise BundleError(
                        f"{self.path}: {kind}: {name} is {value}; nothing was changed"
                    )
        report = self.report()
        old = {each.artefact: each.sha256 for each in report.certificates}
        proved = {
            (each.artefact, each.device, each.runtime): each
            for each in (*report.certificates, *certificates)
        }
        raced = {each.device for each in tuning}
        report = replace(
            report,
            certificates=tuple(proved.values()),
            sensitivity=tuple(sensitivity) or report.sensitivity,
            tuning=(
                *(each for each in report.tuning if each.device not in raced),
                *tuning,
            ),
        )
        bundle = self.attach(REPORT, report.to_json())
        if not certificates:
            return bundle
        replaced = {
            str(precision): each.artefact
            for each in certificates
            for precision, name in BUNDLE_FILES.items()
            if name == each.artefact and old.get(name, each.sha256) != each.sha256
        }
        return revise_card(bundle, report.certificates, replaced)

    @check_arguments
    def copy_to(self, path: PathName) -> "Bundle":
        """Copy the bundle as a whole. A bundle at `path` is replaced, anything else is
        refused.

        Raises BundleError if its files have changed since it was loaded, or for a
        folder inside it.
        """
        if self.path.resolve() in Path(path).resolve().parents:
            raise BundleError(
                f"path {path}: lies inside the bundle {self.path}; expected another "
                "folder"
            )
        self.manifest.check(self.path)
        with building(Path(path)) as folder:
            for name in self.manifest.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / name, folder / name)
            self.manifest.write(folder)
        return Bundle.load(path)

    def _change(self, writers: Mapping[str, Callable[[Path], object]]) -> "Bundle":
        """Replace files together: each is written to a temporary name, and unlisted
        while it is renamed."""
        others = {
            name: stamp
            for name, stamp in self.manifest.files.items()
            if name not in writers
        }
        copied = self.manifest.files.keys() & set(BUNDLE_FILES.values())
        if copied & writers.keys():  # the file that takes texts has a copy of one
            others.pop(TEXT, None)
        stamps = {}
        with ExitStack() as stack:
            for name, write in writers.items():
                file = stack.enter_context(atomic_file(self.path / name))
                write(file)
                stamps[name] = Stamp.of(file)
            replace(self.manifest, files=others).write(self.path)
        complete = replace(
            self.manifest, files=dict(sorted({**others, **stamps}.items()))
        )
        complete.write(self.path)
        if TEXT in self.manifest.files and TEXT not in complete.files:
            (self.path / TEXT).unlink(missing_ok=True)
        return replace(self, manifest=complete)


def revise_card(
    bundle: Bundle, proofs: Sequence[Certificate], replaced: Mapping[str, str]
) -> Bundle:
    """Replace the certificates in a bundle's card, if it has one: see `card.revise`."""
    from compress.exporters.card import revise

    card = bundle.path / BUNDLE_CARD
    if not card.is_file():
        return bundle
    text = revise(card.read_text(encoding="utf-8"), proofs, replaced)
    return bundle.attach(BUNDLE_CARD, text)


@lru_cache(maxsize=4)
def _open_once(
    folder: Path,
    digest: str,
    precision: Precision,
    threads: int,
    prompt_name: str | None,
) -> "Predictor":
    """Open a bundle that stays open in this process. Raises BundleError unless its
    manifest has this digest."""
    bundle = Bundle.load(folder)
    if hash_files([folder / manifests.MANIFEST_FILE]) != digest:
        raise BundleError(
            f"{folder}: is another bundle on this machine; expected the same files for "
            "every worker: share the folder, or copy it again"
        )
    predictor = bundle.open(precision, threads=threads)
    return predictor if prompt_name is None else predictor.with_prompt(prompt_name)


def _describe(task: Task) -> str:
    labels = task.labels
    of = (
        f" of {len(labels)} labels "
        f"({', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''})"
        if labels
        else ""
    )
    return f"{task.kind}{of} over {'pairs of texts' if task.pair else 'single texts'}"


def check_place(path: Path) -> None:
    """Raise BundleError if the path exists and is not a bundle, OutputError if no
    folder can be written there."""
    check_output_folder(path, "out")
    if path.is_dir() and any(path.iterdir()) and not manifests.is_bundle(path):
        raise BundleError(
            f"{path}: exists and is not a bundle; expected a new folder, or a bundle "
            "to replace"
        )


def check_writable(path: Path) -> None:
    """Raise BundleError, before any work is done, if a bundle cannot be changed in
    place."""
    if not os.access(path, os.W_OK):
        raise BundleError(
            f"{path}: cannot be changed (no permission, or a read-only disk); give "
            "--out a new folder"
        )


def check_destination(bundle: Path, out: Path | None) -> None:
    """Raise BundleError or OutputError, before any work is done, where `out` cannot be
    written or, if it is None, the bundle cannot be changed in place."""
    if out is None:
        check_writable(bundle)
    else:
        check_place(out)


@contextmanager
def writing(path: Path, manifest: Manifest, card: str) -> Iterator[Path]:
    """Yield a folder for the files of a new bundle, with its card; at the end, write
    the manifest with the hash of each file, and replace `path` by the folder."""
    with building(path) as folder:
        (folder / BUNDLE_CARD).write_text(card, encoding="utf-8")
        yield folder
        replace(manifest, files=manifests.stamp_files(folder)).write(folder)


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for a complete bundle; it replaces `path` at the end,
    and is removed if anything fails."""
    check_place(path)
    try:
        with atomic_folder(path) as folder:
            yield folder
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be written ({error.strerror or error}); no part of it was "
            "kept. Free some space, or fix the cause, and write it again: `compress "
            "distill --resume` trains nothing twice"
        ) from error
