"""Predict with `tokenizers` and onnxruntime alone, without importing torch or
transformers."""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.arguments import read_texts
from compress.arrays import Array, Floats, Ints
from compress.data.answers import (
    AnswerColumns,
    Nearest,
    Outcome,
    check_finite,
    join_columns,
)
from compress.data.encoder import Text, TextEncoder
from compress.data.task import Task
from compress.data.text_files import LONGEST_LINE, likely_encoding
from compress.data.text_preparation import (
    DOCUMENT_PROMPT,
    QUERY,
    count_prompt_tokens,
    prepend,
)
from compress.data.vector_index import find_nearest
from compress.errors import ArgumentError, BundleError, DataError
from compress.exporters.batch_session import BatchSession
from compress.exporters.session import (
    UNOPENED,
    EncodedRow,
    open_session,
    runtime_reason,
)
from compress.progress import show_progress

if TYPE_CHECKING:
    import pyarrow as pa

    from compress.models.sentence_settings import SentenceSettings

ROWS_PER_BATCH = 256
"""Rows of a stream that are read at a time."""


class Answering(Protocol):
    """Predict for texts: a `Predictor`, `NearestTexts`, or a `TextWriter`."""

    @property
    def task(self) -> Task: ...

    @property
    def rows_per_batch(self) -> int: ...

    def predict(self, texts: Sequence[Text]) -> Sequence[Outcome]: ...

    def answer_columns(self, texts: Sequence[Text]) -> AnswerColumns: ...

    def answer_schema(self) -> "pa.Schema": ...


@dataclass(frozen=True)
class Predictor:
    """An opened bundle, for many calls from any thread.

    Rows are run alone, or in batches if their logits stay the same bit by bit
    (`batch_session`): an int8 graph may scale activations by the whole batch, so that a
    row's logits would depend on the others; a device computes each row alone. `threads`
    rows, or batches, run in parallel. `threshold`: qa, the margin over the best span
    from which "no answer" is returned. `sentence`: the settings of a sentence encoder.
    `lookups`: the ONNX file of a static embedding model.
    """

    task: Task
    encoder: TextEncoder
    session: onnxruntime.InferenceSession
    max_length: int
    threads: int
    threshold: float = math.inf
    sentence: "SentenceSettings | None" = None
    lookups: Path | None = None

    @property
    def rows_per_batch(self) -> int:
        """Return how many rows of a file to answer at a time."""
        return (4 if self.lookups is None else 32) * ROWS_PER_BATCH

    @cached_property
    def batches(self) -> BatchSession | None:
        """Open a session for batches; None if rows get other answers in batches than
        alone."""
        outputs = self.task.answer_outputs
        made = ["input_ids", "attention_mask"]
        if self.encoder.settings.token_types:
            made.append("token_type_ids")
        read = {node.name for node in self.session.get_inputs()}
        written = outputs or self.session.get_outputs()
        usual = read <= set(made) and len(written) == 1
        if not usual or fixed_length(self.session) is not None:
            return None
        found = (
            BatchSession.from_session(self.session, outputs)
            if self.lookups is None
            else BatchSession.from_file(self.lookups, outputs)
        )
        size = self.tokenizer.get_vocab_size()
        return found if found and found.agrees(self.logits, size) else None

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the `tokenizers` library."""
        return self.encoder.backend

    def predict(self, texts: Sequence[Text]) -> list[Outcome]:
        """Predict for each text, or pair of texts, in order: an Answer for (question,
        context) pairs, Marked for tagging, a Vector for embedding, a Prediction
        otherwise."""
        checked = list(read_texts(texts, self.task.text, where="Predictor.predict"))
        return self.task.predict(self, checked)

    def answer_columns(self, texts: Sequence[Text]) -> AnswerColumns:
        """Predict for texts like `predict`, but return the columns of a file of
        answers, without an object for each text."""
        return self.task.answer_columns(self, texts)

    def answer_schema(self) -> "pa.Schema":
        """Return the Arrow types of `answer_columns`."""
        return self.task.answer_schema()

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Floats:
        """Compute the vectors (texts, width).

        prompt_name   the model's prompt to put before each text, such as `query` or
                      `document`; None: its default
        prompt        any other text to put there, "" for nothing

        Raises BundleError for a model without vectors and for vectors that are not
        finite, CompressError for a prompt that the model does not have."""
        preparation = sentence_of(self).preparation
        if prompt is None:
            prompt = preparation.prompt(prompt_name)
        elif prompt_name is not None:
            raise BundleError(
                f"embed: prompt_name {prompt_name!r} and a prompt were given; expected "
                "one of them"
            )
        prompted = prepend(prompt, texts)
        if prompt:
            (alone,) = self.encode([prompt])
            length = count_prompt_tokens(
                alone["input_ids"], self.encoder.settings.special_ids
            )
            rows = self.encode(prompted)
            vectors = self.logits([{**row, "prompt_length": length} for row in rows])
        else:
            vectors = self.text_logits(prompted)
        check_finite(vectors)
        return vectors

    def with_prompt(self, name: str) -> "Predictor":
        """Return a predictor that uses the model's prompt of this name by default.
        Raises BundleError for a model that computes no vectors, CompressError for a
        model without such a prompt.
        """
        sentence = sentence_of(self)
        sentence.preparation.prompt(name)
        preparation = replace(sentence.preparation, default=name)
        return replace(self, sentence=replace(sentence, preparation=preparation))

    def encode(self, texts: Sequence[Text]) -> Sequence[EncodedRow]:
        """Encode texts, or pairs of texts, for tasks that read a text as one row: see
        `Encoder.encode`."""
        return self.encoder.encode(texts, self.max_length)

    def text_logits(self, texts: Sequence[Text]) -> Floats:
        """Compute the logits (rows, outputs) of texts, or pairs of texts, for tasks
        that read a text as one row."""
        if len(texts) < ROWS_PER_BATCH or self.batches is None:
            return self.logits(self.encode(texts))
        return self.batches.run(
            self.encoder.arrays(texts, self.max_length), self.threads
        )

    def logits(self, rows: Iterable[EncodedRow]) -> Floats:
        """Compute the logits (rows, outputs) of encoded rows, in order; columns that
        the file does not read are ignored. For tokenwise tasks, return (tokens,
        outputs), with the tokens of all rows one after another.

        Raises BundleError for a row that lacks an input of the file.
        """
        found = run_rows(
            self.session,
            rows,
            threads=self.threads,
            outputs=self.task.answer_outputs,
        )
        return join_answers(self.task, found)


def join_answers(task: Task, found: Sequence[Sequence[Floats]]) -> Floats:
    """Join the outputs of all rows to logits: see `Predictor.logits`."""
    # two for qa
    answers = [
        outputs[0] if len(outputs) == 1 else np.stack(outputs, axis=-1)
        for outputs in found
    ]
    if not answers:
        return np.empty((0, task.outputs), np.float32)
    return np.concatenate(answers) if task.tokenwise else np.stack(answers)


def run_rows(
    session: onnxruntime.InferenceSession,
    rows: Iterable[EncodedRow],
    *,
    threads: int,
    outputs: Sequence[str] | None = None,
) -> list[list[Floats]]:
    """Run rows one at a time, on `threads` threads; return the requested outputs of
    each row (None: all), without the batch axis. Columns that the file does not read
    are ignored. For a file of a fixed length, rows are padded with attention_mask 0,
    and the outputs at the padding are removed.

    Raises BundleError for a row that lacks an input of the file, or that the file
    cannot be run on.
    """
    names = [node.name for node in session.get_inputs()]
    optional = [node.name for node in session.get_overridable_initializers()]
    fixed = fixed_length(session)
    chosen = [
        node
        for node in session.get_outputs()
        if outputs is None or node.name in outputs
    ]
    per_token = [fixed is not None and answers_tokens(node) for node in chosen]
    count = len(rows) if isinstance(rows, Sized) else None

    def run(row: EncodedRow) -> list[Floats]:
        if missing := [name for name in names if name not in row]:
            raise BundleError(
                f"logits: a row has {', '.join(row)}; expected {', '.join(missing)} too"
            )
        tokens = len(row[names[0]])
        feeds: dict[str, Ints] = {
            name: np.asarray([row[name]], dtype=np.int64) for name in names
        }
        if fixed is not None and tokens <= fixed:
            feeds = {name: pad(value, fixed) for name, value in feeds.items()}
        feeds |= {
            name: np.asarray([row[name]], dtype=np.int64)
            for name in optional
            if name in row
        }
        # onnxruntime would count them from the end of the vocabulary
        for name, value in feeds.items():
            if (value < 0).any():
                raise BundleError(
                    f"logits: a row has {value.min()} in {name}; expected no number "
                    "below 0"
                )
        try:
            found = session.run(outputs, feeds)
            return [
                output[0, :tokens] if cut else output[0]
                for output, cut in zip(found, per_token, strict=True)
            ]
        except UNOPENED as error:
            raise BundleError(
                f"the model cannot be run on {tokens} tokens: {runtime_reason(error)}"
            ) from None

    if threads == 1:  # a pool for every text of a stream would cost 0.2 ms each
        return list(show_progress(map(run, rows), "scoring", count, "rows"))
    with ThreadPoolExecutor(threads) as pool:
        return list(show_progress(pool.map(run, rows), "scoring", count, "rows"))


def fixed_length(session: onnxruntime.InferenceSession) -> int | None:
    """Return the number of tokens that a file of fixed length takes; None for any other
    file."""
    size = session.get_inputs()[0].shape[-1]
    return size if isinstance(size, int) else None


def pad(ids_1L: Ints, length: int) -> NDArray[np.int32]:
    """Pad a row with zeros, in the integer type that files of a fixed length read."""
    return np.pad(ids_1L, ((0, 0), (0, length - ids_1L.shape[1]))).astype(np.int32)


def answers_tokens(output: onnxruntime.NodeArg) -> bool:
    """Check whether an output has values for every token."""
    return len(output.shape) == 3 or output.name.endswith("_logits")


def open_predictor(
    folder: Path,
    onnx_file: Path,
    *,
    task: Task,
    max_length: int,
    threads: int,
    threshold: float = math.inf,
    layered: bool = True,
) -> Predictor:
    """Open the ONNX file with the tokenizer of the folder.

    layered   False for a static embedding model, which can answer in batches
    """
    encoder = TextEncoder.from_folder(folder)
    if not task.tokenwise:  # long texts are read in several rows there
        encoder.truncate(max_length, pair=task.pair)
    session = open_session(onnx_file, threads=1)
    predictor = Predictor(
        task,
        encoder,
        session,
        max_length,
        threads,
        threshold,
        lookups=None if layered else onnx_file,
    )
    if not task.vectors:
        return predictor
    from compress.models.sentence_folder import SentenceFolder

    return replace(predictor, sentence=SentenceFolder.read(folder).settings)


@dataclass(frozen=True)
class NearestTexts:
    """Find the nearest of `texts` by an exact search over all of them.

    packed_NP  the vectors of `texts`, as `data.vector_index` packs them; another model
               with the same vector space may have computed them
    ids        names of `texts` in the answers; empty: their positions, from 1
    """

    predictor: Predictor
    texts: Sequence[str]
    packed_NP: Array
    count: int
    ids: Sequence[str] = ()

    @property
    def task(self) -> Task:
        return self.predictor.task

    @property
    def rows_per_batch(self) -> int:
        return self.predictor.rows_per_batch

    @staticmethod
    def from_texts(
        predictor: Predictor,
        texts: Sequence[str],
        count: int = 5,
        ids: Sequence[str] = (),
    ) -> "NearestTexts":
        """Compute the vectors of `texts`, which have these ids.

        Raises BundleError for a bundle of another task, for one whose vectors are not
        compared by cosine, and if there are no texts.
        """
        check_search(predictor)
        if not texts:
            raise BundleError("there are no texts to search; expected one per line")
        given = list(read_texts(texts, where="NearestTexts.from_texts"))
        vectors = predictor.embed(given, prompt_name=DOCUMENT_PROMPT)
        return NearestTexts(predictor, given, vectors, count, ids)

    def predict(self, texts: Sequence[Text]) -> list[Nearest]:
        """Find the texts nearest to each text."""
        given = list(read_texts(texts, self.task.text, where="NearestTexts.predict"))
        if not given:
            return []
        queries_QE = self.predictor.embed(
            [str(text) for text in given], prompt_name=QUERY
        )
        nearest, cosines = find_nearest(queries_QE, self.packed_NP, self.count)
        ids = self.ids or range(1, len(self.texts) + 1)
        answers = []
        for numbers, row in zip(nearest.tolist(), cosines.tolist(), strict=True):
            found = [self.texts[n] for n in numbers]
            names = tuple(str(ids[n]) for n in numbers)
            answers.append(Nearest(tuple(zip(found, row, strict=True)), names))
        return answers

    def answer_columns(self, texts: Sequence[Text]) -> AnswerColumns:
        return join_columns(self.predict(texts))

    def answer_schema(self) -> "pa.Schema":
        import pyarrow as pa

        fields = {"id": pa.string(), "text": pa.string(), "score": pa.float64()}
        nearest = pa.struct(fields)
        return pa.schema({"prediction": pa.list_(nearest)})


def sentence_of(predictor: Predictor) -> "SentenceSettings":
    """Return the settings of a sentence encoder. Raises BundleError for any other
    model."""
    if predictor.sentence is None:
        raise BundleError(
            f"this bundle is for {predictor.task.kind}; expected one for embedding, to "
            "compare texts by vectors, or to give a prompt_name"
        )
    return predictor.sentence


def check_search(predictor: Predictor) -> None:
    """Raise BundleError for a model without vectors, and for one whose vectors are not
    compared by cosine."""
    sentence = sentence_of(predictor)
    if not sentence.ranks_by_cosine:
        raise BundleError(
            f"similarity_fn_name of this model is {sentence.similarity}, and its "
            "vectors are not of length 1: a search compares them by their cosine, "
            "which would rank texts differently. Write the vectors with --output and "
            "compare them in a library that knows this function"
        )


@dataclass(frozen=True)
class AnsweredLine:
    """One text of a stream with the model's answer, or with the error for which it was
    skipped."""

    text: str
    answer: Outcome | None
    error: str = ""


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Read lines without their line ends; of a line longer than LONGEST_LINE, only the
    beginning."""
    while line := stream.readline(LONGEST_LINE + 2):
        rest = line
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST_LINE + 2)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def answer_lines(
    predictor: Answering,
    texts: Iterable[bytes],
    *,
    second: str | None = None,
    unit: str = "line",
) -> Iterator[AnsweredLine]:
    """Predict for each text, or its pair with `second`; errors name the text by `unit`
    and its number.

    Raises BundleError where the model itself fails.
    """
    for number, raw in enumerate(texts, start=1):
        where = f"{unit} {number:,}"
        try:
            text = decode(raw, where)
        except DataError as error:
            yield AnsweredLine("", None, str(error))
            continue
        try:
            (answer,) = predictor.predict([text if second is None else (text, second)])
        except DataError as error:  # a text that has no tokens
            yield AnsweredLine(text, None, f"{where}: {error}")
            continue
        except (BundleError, ArgumentError) as error:
            raise BundleError(f"{where}: {error}") from error
        yield AnsweredLine(text, answer)


T = TypeVar("T")


def iterate_batches(
    values: Iterable[T], count: int = ROWS_PER_BATCH
) -> Iterator[list[T]]:
    """Yield lists of at most `count` items, read lazily."""
    rest = iter(values)
    while batch := list(islice(rest, count)):
        yield batch


def decode(raw: bytes, where: str) -> str:
    """Decode UTF-8. Raises DataError, naming `where` and the byte, for invalid or too
    long text."""
    if len(raw) > LONGEST_LINE:
        raise DataError(
            f"{where}: is longer than {LONGEST_LINE:,} bytes; expected one text per "
            "line"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; "
            "convert the text, for example with: iconv -f "
            f"{likely_encoding(raw[error.start])} -t utf-8"
        ) from None
