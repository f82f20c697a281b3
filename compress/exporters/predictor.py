"""Predict with `tokenizers` and onnxruntime alone: neither torch nor transformers is
imported."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.arguments import read_texts
from compress.data import windows
from compress.data.conll import OUTSIDE, entities
from compress.data.encoder import Text, TextEncoder
from compress.data.task import METRICS, Kind, Task
from compress.data.text_files import LONGEST
from compress.data.text_preparation import DOCUMENT, QUERY, count_prompt_tokens, prepend
from compress.data.vector_index import find_nearest
from compress.errors import ArgumentError, BundleError, DataError
from compress.evaluation.qa import Windows, best_spans
from compress.exporters.session import (
    UNOPENED,
    EncodedRow,
    open_session,
    runtime_reason,
)
from compress.models.sentence_folder import SentenceFolder
from compress.models.sentence_modules import VECTOR
from compress.models.sentence_settings import TOKENS_ONLY, SentenceSettings
from compress.progress import show_progress

VECTORS: Mapping[Kind, Sequence[str]] = {"embedding": ("sentence_embedding",)}
"""The outputs of a file that hold the answer, where it has others too."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one text.

    classification  label: the most probable; score: its probability; scores: every
                    label's probability, sum 1
    multilabel      label: all labels with probability >= 0.5, joined by ", " ('' for
                    none); score: the highest probability; scores: every label's own
                    probability
    regression      label: ''; score: the number; scores: empty
    ranking         as for regression: the higher the score, the better the passage
                    answers the query
    """

    label: str
    score: float
    scores: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label}\t{self.score:.4f}" if self.label else f"{self.score:.4f}"


@dataclass(frozen=True)
class Answer:
    """The answer to a question: `text`, the characters `start` to `end` of the context;
    '' for no answer.

    score   the probability of its first times that of its last token, over all tokens
            of the context and "no answer"
    """

    text: str
    score: float
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.text or '(no answer)'}\t{self.score:.4f}"


@dataclass(frozen=True)
class Mark:
    """An entity: `text`, the characters `start` to `end`; `score`, the mean probability
    of its words' tags."""

    text: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Marked:
    """The entities of a text, in order."""

    marks: tuple[Mark, ...]

    def __str__(self) -> str:
        return (
            ", ".join(
                f"{mark.label}: {mark.text} ({mark.score:.4f})" for mark in self.marks
            )
            or "(none)"
        )


@dataclass(frozen=True)
class Vector:
    """The vector of a text."""

    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(f"{number:.6g}" for number in self.numbers)


@dataclass(frozen=True)
class Nearest:
    """The texts nearest to a text, the nearest first, each with its cosine."""

    texts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return " | ".join(f"{text} ({cosine:.4f})" for text, cosine in self.texts)


Outcome = Prediction | Answer | Marked | Vector | Nearest


class Answering(Protocol):
    """Predict for texts: a `Predictor`, or `NearestTexts`."""

    @property
    def task(self) -> Task: ...

    def predict(self, texts: Sequence[Text]) -> Sequence[Outcome]: ...


@dataclass(frozen=True)
class Predictor:
    """An opened bundle: keep it for many calls, from any thread.

    Rows are run one at a time, without padding: an int8 graph scales activations by the
    whole batch, so a row's logits would depend on the others; alone they are what a
    device computes. (Batches of 16 were 15 % faster in int8, 6 layers x 384, 27
    tokens.) `threads` rows run in parallel. `threshold`: qa, the margin over the best
    span from which "no answer" is returned. `sentence`: the settings of a model that
    computes vectors.
    """

    task: Task
    encoder: TextEncoder
    session: onnxruntime.InferenceSession
    max_length: int
    threads: int
    threshold: float = math.inf
    sentence: SentenceSettings = TOKENS_ONLY

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the `tokenizers` library."""
        return self.encoder.backend

    def predict(
        self, texts: Sequence[Text]
    ) -> list[Prediction] | list[Answer] | list[Marked] | list[Vector]:
        """Predict for each text, or pair of texts, in order: an Answer for (question,
        context) pairs, Marked for tagging, a Vector for embedding, a Prediction
        otherwise."""
        checked = list(read_texts(texts, self.task.text, where="Predictor.predict"))
        if self.task.kind == "qa":
            return self._answer([(text[0], text[1]) for text in checked])
        if self.task.kind == "tagging":
            return self._mark([text for text in checked if isinstance(text, str)])
        if self.task.kind == "embedding":
            return [
                Vector(tuple(each))
                for each in self.embed([str(text) for text in checked]).tolist()
            ]
        rows = self.encode(checked)
        return [
            _predict(self.task, *row)
            for row in zip(checked, self.logits(rows), strict=True)
        ]

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> NDArray[np.float32]:
        """Compute the vectors (texts, width).

        prompt_name   the model's prompt to put before each text, such as `query` or
                      `document`; None: its default
        prompt        any other text to put there, "" for nothing

        Raises BundleError for vectors that are not finite, CompressError for a prompt
        that the model does not have.
        """
        if prompt is None:
            prompt = self.sentence.preparation.prompt(prompt_name)
        elif prompt_name is not None:
            raise BundleError(
                f"embed: prompt_name {prompt_name!r} and a prompt were given; expected "
                "one of them"
            )
        rows: Sequence[EncodedRow] = self.encode(prepend(prompt, texts))
        if prompt:
            (alone,) = self.encode([prompt])
            length = count_prompt_tokens(alone["input_ids"], self.encoder.special_ids())
            rows = [{**row, "prompt_length": length} for row in rows]
        vectors = self.logits(rows)
        _check_finite(vectors)
        return vectors

    def with_prompt(self, name: str) -> "Predictor":
        """Return a predictor whose default prompt is the model's prompt of this name.

        Raises BundleError for a model that computes no vectors, CompressError for one
        without such a prompt.
        """
        check_vectors(self)
        preparation = self.sentence.preparation
        preparation.prompt(name)
        return replace(
            self,
            sentence=replace(
                self.sentence, preparation=replace(preparation, default=name)
            ),
        )

    def encode(self, texts: Sequence[Text]) -> Sequence[EncodedRow]:
        """Encode texts, or pairs of texts, for tasks that read a text as one row: see
        `Encoder.encode`."""
        return self.encoder.encode(texts, self.max_length)

    def logits(self, rows: Iterable[EncodedRow]) -> NDArray[np.float32]:
        """Compute the logits (rows, outputs) of encoded rows, in order; columns that
        the file does not read are ignored. For tokenwise tasks (tokens, outputs): those
        of all rows, one row after another.

        Raises BundleError for a row that lacks an input of the file.
        """
        found = run_rows(
            self.session,
            rows,
            threads=self.threads,
            outputs=VECTORS.get(self.task.kind),
        )
        return join_answers(self.task, found)

    def _answer(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Answer (question, context) pairs."""
        if not pairs:
            return []
        questions, contexts = zip(*pairs, strict=True)
        found = self.encoder.questions(questions, contexts, self.max_length)
        rows = [window for each in found for window in each]
        question_R = np.repeat(np.arange(len(found)), [len(each) for each in found])
        lengths_R = np.array([len(window.row.ids) for window in rows])
        where = Windows(
            np.concatenate([window.starts for window in rows]),
            np.concatenate([window.ends for window in rows]),
            lengths_R,
            np.array([window.null for window in rows]),
            question_R,
        )
        values_T2 = _check_finite(
            self.logits(self.encoder.row(window.row) for window in rows)
        )
        spans = best_spans(values_T2, where)
        nulls_T = np.concatenate([[0], np.cumsum(lengths_R)[:-1]]) + where.nulls_R
        possible_T = where.starts_T >= 0
        possible_T[nulls_T] = True
        starts = np.flatnonzero(np.diff(np.repeat(question_R, lengths_R), prepend=-1))
        log_p_T2 = _log_softmax(
            np.where(possible_T[:, None], values_T2, -np.inf), starts
        )
        texts = spans.texts([context for _, context in pairs], self.threshold)
        answers = []
        for n, text in enumerate(texts):
            if text:
                first, last = int(spans.first_Q[n]), int(spans.last_Q[n])
                start = pairs[n][1].index(text, int(spans.starts_Q[n]))
                score = float(np.exp(log_p_T2[first, 0] + log_p_T2[last, 1]))
                answers.append(Answer(text, score, start, start + len(text)))
            else:
                none = nulls_T[question_R == n]
                answers.append(
                    Answer("", float(np.exp(log_p_T2[none].sum(1).max())), 0, 0)
                )
        return answers

    def _mark(self, texts: Sequence[str]) -> list[Marked]:
        """Find the entities of each text, split into words by `windows.WORDS`."""
        words = [
            [match.span() for match in windows.WORDS.finditer(text)] for text in texts
        ]
        split = [
            [text[start:end] for start, end in spans]
            for text, spans in zip(texts, words, strict=True)
        ]
        read = self.encoder.words(split, self.max_length)
        values_TV = _check_finite(
            self.logits(
                self.encoder.row(window.row) for each in read for window in each
            )
        )
        at, answers = 0, []
        for text, spans, each in zip(texts, words, read, strict=True):
            tags, shares = [OUTSIDE] * len(spans), np.ones(len(spans))
            for window in each:
                for word, row_V in zip(
                    window.word, values_TV[at : at + len(window.word)], strict=True
                ):
                    if word >= 0:
                        best = int(row_V.argmax())
                        tags[word], shares[word] = (
                            self.task.labels[best],
                            1 / np.exp(row_V - row_V[best]).sum(),
                        )
                at += len(window.word)
            answers.append(mark(text, spans, tags, shares))
        return answers


def mark(
    text: str,
    words: Sequence[tuple[int, int]],
    tags: Sequence[str],
    shares: NDArray[np.floating],
) -> Marked:
    """Find the entities of a text whose words (first character, end) have these tags
    and probabilities."""
    marks = []
    for label, first, last in entities(tags):
        start, end = words[first][0], words[last - 1][1]
        marks.append(
            Mark(text[start:end], label, float(shares[first:last].mean()), start, end)
        )
    return Marked(tuple(marks))


def join_answers(
    task: Task, found: Sequence[Sequence[NDArray[np.float32]]]
) -> NDArray[np.float32]:
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
) -> list[list[NDArray[np.float32]]]:
    """Run rows one at a time, on `threads` threads; return for each row these outputs
    of the file (None: all), without the batch axis. Columns that the file does not read
    are ignored. For a file of a fixed length rows are padded with attention_mask 0, and
    the padding's part of the outputs is removed.

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

    def run(row: EncodedRow) -> list[NDArray[np.float32]]:
        if missing := [name for name in names if name not in row]:
            raise BundleError(
                f"logits: a row has {', '.join(row)}; expected {', '.join(missing)} too"
            )
        tokens = len(row[names[0]])
        feeds: dict[str, NDArray[np.integer]] = {
            name: np.asarray([row[name]], dtype=np.int64) for name in names
        }
        if fixed is not None and tokens <= fixed:
            feeds = {name: pad(value, fixed) for name, value in feeds.items()}
        feeds |= {
            name: np.asarray([row[name]], dtype=np.int64)
            for name in optional
            if name in row
        }
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
    """Return the number of tokens of a file of fixed length; None for any other."""
    size = session.get_inputs()[0].shape[-1]
    return size if isinstance(size, int) else None


def pad(ids_1L: NDArray[np.integer], length: int) -> NDArray[np.int32]:
    """Pad a row with zeros, in the type that files of a fixed length read."""
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
) -> Predictor:
    """Open the ONNX file with the tokenizer of the folder."""
    encoder = TextEncoder.from_folder(folder)
    if not task.tokenwise:  # long texts are read in several rows there
        encoder.truncate(max_length, pair=task.pair)
    sentence = (
        SentenceFolder.read(folder).settings
        if task.kind == "embedding"
        else TOKENS_ONLY
    )
    return Predictor(
        task,
        encoder,
        open_session(onnx_file, threads=1),
        max_length,
        threads,
        threshold,
        sentence,
    )


def _predict(task: Task, text: Text, logits: NDArray[np.float32]) -> Prediction:
    if not np.isfinite(logits).all():
        raise BundleError(
            f"predict: the model's output for {text!r} is not finite; its weights are "
            "broken"
        )
    if task.numeric:
        return Prediction("", float(logits[0]), {})
    wide = logits.astype(np.float64)
    if task.kind == "multilabel":
        values = 0.5 * (1.0 + np.tanh(0.5 * wide))  # a sigmoid; exp(-x) would overflow
    else:
        powers = np.exp(wide - wide.max())
        values = powers / powers.sum()
    scores = {
        label: float(value) for label, value in zip(task.labels, values, strict=True)
    }
    best = max(scores, key=lambda label: scores[label])
    if task.kind == "multilabel":
        return Prediction(
            ", ".join(label for label in scores if scores[label] >= 0.5),
            scores[best],
            scores,
        )
    return Prediction(best, scores[best], scores)


def _check_finite(values: NDArray[np.float32]) -> NDArray[np.float64]:
    if not np.isfinite(values).all():
        raise BundleError(
            "predict: the model's output is not finite; its weights are broken"
        )
    return values.astype(np.float64)


def _log_softmax(
    values_T2: NDArray[np.float64], starts: NDArray[np.integer]
) -> NDArray[np.float64]:
    """Compute log softmax of each column, over the segments of tokens that begin at
    `starts`."""
    sizes = np.diff(starts, append=len(values_T2))
    shifted = values_T2 - np.repeat(
        np.maximum.reduceat(values_T2, starts), sizes, axis=0
    )
    sums = np.log(np.add.reduceat(np.exp(shifted), starts))
    return np.asarray(shifted - np.repeat(sums, sizes, axis=0))


@dataclass(frozen=True)
class NearestTexts:
    """Find the nearest of `texts` by an exact search over all of them.

    packed_NP  the vectors of `texts`, as `data.vector_index` packs them; they may be
               those of another model of the same space
    """

    predictor: Predictor
    texts: Sequence[str]
    packed_NP: NDArray[Any]
    count: int

    @property
    def task(self) -> Task:
        return self.predictor.task

    @staticmethod
    def from_texts(
        predictor: Predictor, texts: Sequence[str], count: int = 5
    ) -> "NearestTexts":
        """Compute the vectors of `texts`.

        Raises BundleError for a bundle of another task, or whose vectors are not
        compared by their cosine, and for no texts.
        """
        check_search(predictor)
        if not texts:
            raise BundleError("there are no texts to search; expected one per line")
        given = list(read_texts(texts, where="NearestTexts.from_texts"))
        return NearestTexts(
            predictor, given, predictor.embed(given, prompt_name=DOCUMENT), count
        )

    def predict(self, texts: Sequence[Text]) -> list[Nearest]:
        """Find the texts nearest to each text."""
        given = list(read_texts(texts, self.task.text, where="NearestTexts.predict"))
        if not given:
            return []
        queries_QE = self.predictor.embed(
            [str(text) for text in given], prompt_name=QUERY
        )
        nearest, cosines = find_nearest(queries_QE, self.packed_NP, self.count)
        return [
            Nearest(
                tuple(
                    (self.texts[n], cosine)
                    for n, cosine in zip(numbers, row, strict=True)
                )
            )
            for numbers, row in zip(nearest.tolist(), cosines.tolist(), strict=True)
        ]


def check_vectors(predictor: Predictor) -> None:
    """Raise BundleError for a model that does not compute vectors."""
    if predictor.task.kind != "embedding":
        raise BundleError(
            f"this bundle is for {predictor.task.kind}; expected one for embedding, to "
            "compare texts by vectors"
        )


def check_search(predictor: Predictor) -> None:
    """Raise BundleError for a model without vectors, and for one whose vectors are not
    compared by their cosine."""
    check_vectors(predictor)
    sentence = predictor.sentence
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
    """Read lines without their ends; of a line longer than LONGEST only the
    beginning."""
    while line := stream.readline(LONGEST + 2):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST + 2)
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


BATCH = 256
"""Rows of a stream that are read at a time."""
T = TypeVar("T")


def iterate_batches(values: Iterable[T], count: int = BATCH) -> Iterator[list[T]]:
    """Yield lists of at most `count`, read lazily."""
    rest = iter(values)
    while batch := list(islice(rest, count)):
        yield batch


def decode(raw: bytes, where: str) -> str:
    """Decode UTF-8. Raises DataError, naming `where` and the byte, for invalid or too
    long text."""
    if len(raw) > LONGEST:
        raise DataError(
            f"{where}: is longer than {LONGEST:,} bytes; expected one text a line"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; "
            "convert the text, for example with: iconv -f latin1 -t utf-8"
        ) from None


def open_embedder(
    folder: Path, file: Path, max_length: int, threads: int = 1
) -> Predictor:
    """Open a file of vectors with the tokenizer and the prompts of its folder.

    Raises BundleError for a file that outputs token states only.
    """
    task = Task("embedding", ("text",), "similarity", (), METRICS["embedding"][0])
    predictor = open_predictor(
        folder, file, task=task, max_length=max_length, threads=threads
    )
    if VECTOR not in [node.name for node in predictor.session.get_outputs()]:
        raise BundleError(
            f"{folder}: outputs token states only; for a vector per text, export it "
            "again with a pooling"
        )
    return predictor
