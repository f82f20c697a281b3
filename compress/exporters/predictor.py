"""Predict with `tokenizers` and onnxruntime alone: neither torch nor transformers is imported."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.data import windows
from compress.data.conll import OUTSIDE, entities
from compress.data.task import Kind, Task
from compress.data.text_files import LONGEST
from compress.errors import BundleError, DataError
from compress.evaluation.qa import Windows, best_spans
from compress.exporters.session import UNOPENED, EncodedRow, open_session
from compress.progress import show_progress

Text = str | tuple[str, str]
VECTORS: Mapping[Kind, Sequence[str]] = {"embedding": ("sentence_embedding",)}
"""The outputs of a file that are its answer, where it has others too."""
WORDS = re.compile(r"https?://\S+|[@#]?\w+(?:[-.'’&]\w+)*|[^\w\s]")
"""The pattern of a word: an address, a name with its @ or #, letters and digits held together by single marks; any
other mark alone. Data of tagged words are cut about so."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one text.

    classification  label: the most probable; score: its probability; scores: every label's probability, sum 1
    multilabel      label: all labels with probability >= 0.5, joined by ", " ('' for none); score: the highest
                    probability; scores: every label's own probability
    regression      label: ''; score: the number; scores: empty
    ranking         the same: the higher the score, the better the passage answers the query
    """

    label: str
    score: float
    scores: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label}\t{self.score:.4f}" if self.label else f"{self.score:.4f}"


@dataclass(frozen=True)
class Answer:
    """The answer to a question: `text`, the characters `start` to `end` of the context; '' where that holds no answer.

    score   the probability of its first times that of its last token, over all tokens of the context and "no answer"
    """

    text: str
    score: float
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.text or '(no answer)'}\t{self.score:.4f}"


@dataclass(frozen=True)
class Mark:
    """An entity: `text`, the characters `start` to `end`; score: the mean probability of its words' tags."""

    text: str
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Marked:
    """The entities of a text, in its order."""

    marks: tuple[Mark, ...]

    def __str__(self) -> str:
        return ", ".join(f"{mark.label}: {mark.text} ({mark.score:.4f})" for mark in self.marks) or "(none)"


@dataclass(frozen=True)
class Vector:
    """The vector of a text."""

    numbers: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(f"{number:.6g}" for number in self.numbers)


@dataclass(frozen=True)
class Nearest:
    """The texts nearest to one, the nearest first, each with its cosine."""

    texts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return " | ".join(f"{text} ({cosine:.4f})" for text, cosine in self.texts)


Outcome = Prediction | Answer | Marked | Vector | Nearest
"""What a bundle says of a text."""


class Answering(Protocol):
    """Answer texts, as a `Predictor` does, or one that looks for the nearest others."""

    @property
    def task(self) -> Task: ...

    def predict(self, texts: Sequence[Text]) -> Sequence[Outcome]: ...


@dataclass(frozen=True)
class Predictor:
    """An opened bundle: keep it to answer many calls, each from any thread.

    Every row is run by itself, without padding: an int8 graph scales activations by the whole batch, so in company a
    row's logits would depend on the others; alone they are what a device computes. (Batches of 16 were 15 % faster
    in int8, 6 layers x 384, 27 tokens.) Rows are shared out over `threads` threads, each running one row at a time.
    `threshold`: qa, how much better no answer must score than the best span to be given.
    """

    task: Task
    tokenizer: Tokenizer
    session: onnxruntime.InferenceSession
    max_length: int
    threads: int
    threshold: float = math.inf

    def predict(self, texts: Sequence[Text]) -> list[Prediction] | list[Answer] | list[Marked] | list[Vector]:
        """Predict each text, or pair of texts, in their order: Answer for (question, context) pairs, Marked for texts
        whose words are tagged, Vector for texts whose vectors the model gives, Prediction otherwise."""
        given = [_check(text, self.task) for text in texts]
        if self.task.kind == "qa":
            return self._answer([(text[0], text[1]) for text in given])
        if self.task.kind == "tagging":
            return self._mark([text for text in given if isinstance(text, str)])
        rows = encode(self.tokenizer, given)
        if self.task.kind == "embedding":
            return [Vector(tuple(each)) for each in _finite(self.logits(rows)).tolist()]
        return [_prediction(self.task, *answer) for answer in zip(texts, self.logits(rows), strict=True)]

    def logits(self, rows: Iterable[EncodedRow]) -> NDArray[np.float32]:
        """Compute the logits (rows, outputs) of encoded rows, in their order; columns the file does not read are passed
        over. Of a task that is tokenwise (tokens, outputs): those of all rows, one row after another.

        Raises BundleError for a row that lacks an input of the file.
        """
        found = run_rows(self.session, rows, threads=self.threads, outputs=VECTORS.get(self.task.kind))
        return join_answers(self.task, found)

    def _answer(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Answer each (question, context)."""
        if not pairs:
            return []
        questions, contexts = zip(*pairs, strict=True)
        found = list(windows.read_questions(self.tokenizer, questions, contexts, self.max_length))
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
        values_T2 = _finite(self.logits(map(_feed, (window.row for window in rows))))
        spans = best_spans(values_T2, where)
        nulls_T = np.concatenate([[0], np.cumsum(lengths_R)[:-1]]) + where.nulls_R
        possible_T = where.starts_T >= 0
        possible_T[nulls_T] = True
        cuts = np.flatnonzero(np.diff(np.repeat(question_R, lengths_R), prepend=-1))
        log_p_T2 = _log_shares(np.where(possible_T[:, None], values_T2, -np.inf), cuts)
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
                answers.append(Answer("", float(np.exp(log_p_T2[none].sum(1).max())), 0, 0))
        return answers

    def _mark(self, texts: Sequence[str]) -> list[Marked]:
        """Find the entities of each text, whose words are those of WORDS."""
        words = [[match.span() for match in WORDS.finditer(text)] for text in texts]
        cut = [[text[start:end] for start, end in spans] for text, spans in zip(texts, words, strict=True)]
        read = list(windows.read_words(self.tokenizer, cut, self.max_length))
        values_TV = _finite(self.logits(_feed(window.row) for each in read for window in each))
        at, answers = 0, []
        for text, spans, each in zip(texts, words, read, strict=True):
            tags, shares = [OUTSIDE] * len(spans), np.ones(len(spans))
            for window in each:
                for word, row_V in zip(window.word, values_TV[at : at + len(window.word)], strict=True):
                    if word >= 0:
                        best = int(row_V.argmax())
                        tags[word], shares[word] = self.task.labels[best], 1 / np.exp(row_V - row_V[best]).sum()
                at += len(window.word)
            answers.append(mark(text, spans, tags, shares))
        return answers


def mark(text: str, words: Sequence[tuple[int, int]], tags: Sequence[str], shares: NDArray[np.floating]) -> Marked:
    """Mark the entities of a text whose words (first character, end) have these tags and probabilities."""
    marks = []
    for label, first, last in entities(tags):
        start, end = words[first][0], words[last - 1][1]
        marks.append(Mark(text[start:end], label, float(shares[first:last].mean()), start, end))
    return Marked(tuple(marks))


def join_answers(task: Task, found: Sequence[Sequence[NDArray[np.float32]]]) -> NDArray[np.float32]:
    """Join the outputs of each row to the logits of all: see `Predictor.logits`."""
    answers = [outputs[0] if len(outputs) == 1 else np.stack(outputs, axis=-1) for outputs in found]  # ends of spans
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
    """Run each row by itself, on `threads` threads: for each row these outputs of the file (None: all), without the
    axis of the batch. Columns that the file does not read are passed over. For a file of a fixed length rows are padded
    with attention_mask 0, and what it says of the padding is cut off.

    Raises BundleError for a row that lacks an input of the file, or that it cannot be run on.
    """
    names = [node.name for node in session.get_inputs()]
    fixed = fixed_length(session)
    chosen = [node for node in session.get_outputs() if outputs is None or node.name in outputs]
    per_token = [fixed is not None and answers_tokens(node) for node in chosen]
    count = len(rows) if isinstance(rows, Sized) else None

    def run(row: EncodedRow) -> list[NDArray[np.float32]]:
        if missing := [name for name in names if name not in row]:
            raise BundleError(f"logits: a row has {', '.join(row)}; expected {', '.join(missing)} too")
        tokens = len(row[names[0]])
        feeds: dict[str, NDArray[np.integer]] = {name: np.asarray([row[name]], dtype=np.int64) for name in names}
        if fixed is not None and tokens <= fixed:
            feeds = {name: pad(value, fixed) for name, value in feeds.items()}
        try:
            found = session.run(outputs, feeds)
            return [output[0, :tokens] if cut else output[0] for output, cut in zip(found, per_token, strict=True)]
        except UNOPENED as error:
            told = " ".join(str(error).split())
            raise BundleError(f"the model cannot be run on {tokens} tokens: {told}") from None

    if threads == 1:  # a pool for every text of a stream would cost 0.2 ms each
        return list(show_progress(map(run, rows), "scoring", count, "rows"))
    with ThreadPoolExecutor(threads) as pool:
        return list(show_progress(pool.map(run, rows), "scoring", count, "rows"))


def fixed_length(session: onnxruntime.InferenceSession) -> int | None:
    """Return how many tokens each row has in the file; None where that is open."""
    size = session.get_inputs()[0].shape[-1]
    return size if isinstance(size, int) else None


def pad(ids_1L: NDArray[np.integer], length: int) -> NDArray[np.int32]:
    """Pad a row with zeros, in the type that files of a fixed length read."""
    return np.pad(ids_1L, ((0, 0), (0, length - ids_1L.shape[1]))).astype(np.int32)


def answers_tokens(output: onnxruntime.NodeArg) -> bool:
    """Check that an output has a value, or several, for every token."""
    return len(output.shape) == 3 or output.name.endswith("_logits")


def open_predictor(
    folder: Path, onnx_file: Path, *, task: Task, max_length: int, threads: int, threshold: float = math.inf
) -> Predictor:
    """Open the ONNX file with the tokenizer of the folder, which gives the tokens that transformers gives."""
    cut = None if task.tokenwise else max_length  # tokenwise tasks read what is too long in several rows
    tokenizer = open_tokenizer(folder, cut)
    return Predictor(task, tokenizer, open_session(onnx_file, threads=1), max_length, threads, threshold)


def encode(tokenizer: Tokenizer, texts: Sequence[Text]) -> list[EncodedRow]:
    """Encode texts, or pairs of texts."""
    return [
        {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        for row in tokenizer.encode_batch(list(texts))
    ]


def open_tokenizer(folder: Path, max_length: int | None = None) -> Tokenizer:
    """Open the folder's tokenizer.json; it cuts texts to `max_length` tokens, and pads none.

    Raises BundleError where there is none, or none that can be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BundleError(f"{path}: no such file; expected the tokenizer that belongs to the model")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself for a file that it cannot read, and no other class
        if type(error) is not Exception:
            raise
        raise BundleError(f"{path}: no tokenizer that can be read ({error}); copy the model again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return tokenizer


def _check(text: Text, task: Task) -> Text:
    pair = not isinstance(text, str) and len(text) == 2 and all(isinstance(part, str) for part in text)
    if task.pair and not pair:
        raise BundleError(
            f"predict: {text!r}; expected a pair of texts ({' and '.join(task.text)}); on the command line "
            "the second is --pair"
        )
    if not task.pair and not isinstance(text, str):
        raise BundleError(f"predict: {text!r}; expected one text ({task.text[0]})")
    return text if isinstance(text, str) else (text[0], text[1])


def _prediction(task: Task, text: Text, logits: NDArray[np.float32]) -> Prediction:
    if not np.isfinite(logits).all():
        raise BundleError(f"predict: the model's answer to {text!r} is not finite; its weights are broken")
    if task.numeric:
        return Prediction("", float(logits[0]), {})
    wide = logits.astype(np.float64)
    if task.kind == "multilabel":
        values = 0.5 * (1.0 + np.tanh(0.5 * wide))  # a sigmoid; exp(-x) would overflow
    else:
        powers = np.exp(wide - wide.max())
        values = powers / powers.sum()
    scores = {label: float(value) for label, value in zip(task.labels, values, strict=True)}
    best = max(scores, key=lambda label: scores[label])
    if task.kind == "multilabel":
        return Prediction(", ".join(label for label in scores if scores[label] >= 0.5), scores[best], scores)
    return Prediction(best, scores[best], scores)


def _feed(row: windows.Window) -> dict[str, list[int]]:
    return {"input_ids": row.ids, "attention_mask": [1] * len(row.ids), "token_type_ids": row.types}


def _finite(values: NDArray[np.float32]) -> NDArray[np.float64]:
    if not np.isfinite(values).all():
        raise BundleError("predict: the model's answer is not finite; its weights are broken")
    return values.astype(np.float64)


def _log_shares(values_T2: NDArray[np.float64], cuts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Compute log softmax of each column, over every stretch of tokens that begins at one of `cuts`."""
    sizes = np.diff(cuts, append=len(values_T2))
    shifted = values_T2 - np.repeat(np.maximum.reduceat(values_T2, cuts), sizes, axis=0)
    sums = np.log(np.add.reduceat(np.exp(shifted), cuts))
    shares: NDArray[np.float64] = shifted - np.repeat(sums, sizes, axis=0)
    return shares


@dataclass(frozen=True)
class AnsweredLine:
    """One text of a stream, and what the model says of it; or, in `error`, why it was not asked."""

    text: str
    answer: Outcome | None
    error: str = ""


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Read lines without their ends; of one that is longer than LONGEST, its beginning."""
    while line := stream.readline(LONGEST + 2):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST + 2)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def answer_lines(
    predictor: Answering, texts: Iterable[bytes], *, second: str | None = None, unit: str = "line"
) -> Iterator[AnsweredLine]:
    """Answer each text, or its pair with `second`; `unit` and its number name one that is no text.

    Raises BundleError, naming it too, where the model itself fails.
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
        except BundleError as error:
            raise BundleError(f"{where}: {error}") from error
        yield AnsweredLine(text, answer)


BATCH = 256
"""Rows of a stream that are answered together."""
T = TypeVar("T")


def iterate_batches(given: Iterable[T], count: int = BATCH) -> Iterator[list[T]]:
    """Yield lists of at most `count`, read when they are asked for."""
    rest = iter(given)
    while batch := list(islice(rest, count)):
        yield batch


def decode(raw: bytes, where: str) -> str:
    """Decode UTF-8. Raises DataError, naming `where` and the byte, for what is none, or is too long."""
    if len(raw) > LONGEST:
        raise DataError(f"{where}: is longer than {LONGEST:,} bytes; expected one text a line")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; convert the text, for example "
            "with: iconv -f latin1 -t utf-8"
        ) from None
