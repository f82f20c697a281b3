"""Texts in, answers out, with `tokenizers` and onnxruntime alone: neither torch nor transformers is imported."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.data.task import Task
from compress.data.text_files import LONGEST
from compress.data.windows import plain
from compress.errors import BundleError, DataError
from compress.exporters.answers import Answer, Marked, answered, marked
from compress.exporters.session import UNOPENED, open_session

Text = str | tuple[str, str]
Row = Mapping[str, Sequence[int]]
"""One encoded text: input_ids, attention_mask and, where the model has segments, token_type_ids."""


@dataclass(frozen=True)
class Prediction:
    """What the model says of one text.

    classification  label: the most probable; score: its probability; scores: every label's probability, sum 1
    multilabel      label: all labels with probability >= 0.5, joined by ", " ('' for none); score: the highest
                    probability; scores: every label's own probability
    regression      label: ''; score: the number; scores: empty
    """

    label: str
    score: float
    scores: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label}\t{self.score:.4f}" if self.label else f"{self.score:.4f}"


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

    def predict(self, texts: Sequence[Text]) -> list[Prediction] | list[Answer] | list[Marked]:
        """What the model says of each text, or pair of texts, in their order: Answer for (question, context) pairs,
        Marked for texts whose words are tagged, Prediction otherwise."""
        given = [_checked(text, self.task) for text in texts]
        if self.task.kind == "qa":
            pairs = [(text[0], text[1]) for text in given]
            return answered(pairs, self.tokenizer, self.logits, max_length=self.max_length, threshold=self.threshold)
        if self.task.kind == "tagging":
            lines = [text for text in given if isinstance(text, str)]
            return marked(lines, self.task.labels, self.tokenizer, self.logits, max_length=self.max_length)
        rows = rows_of(self.tokenizer, given)
        return [_prediction(self.task, *answer) for answer in zip(texts, self.logits(rows), strict=True)]

    def logits(self, rows: Iterable[Row]) -> NDArray[np.float32]:
        """Logits (rows, outputs) of encoded rows, in their order; columns that the file does not read are passed over.
        Of a task that is tokenwise (tokens, outputs): those of all rows, one row after another.

        Raises BundleError for a row that lacks an input of the file.
        """
        names = [node.name for node in self.session.get_inputs()]

        def run(row: Row) -> NDArray[np.float32]:
            if missing := [name for name in names if name not in row]:
                raise BundleError(f"logits: a row has {', '.join(row)}; expected {', '.join(missing)} too")
            feeds = {name: np.asarray([row[name]], dtype=np.int64) for name in names}
            try:
                found = [output[0] for output in self.session.run(None, feeds)]
            except UNOPENED as error:
                told = " ".join(str(error).split())
                raise BundleError(f"the model cannot be run on {len(row[names[0]])} tokens: {told}") from None
            return found[0] if len(found) == 1 else np.stack(found, axis=-1)  # starts and ends of spans

        if self.threads == 1:  # a pool for every text of a stream would cost 0.2 ms each
            answers = [run(row) for row in rows]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                answers = list(pool.map(run, rows))
        if not answers:
            return np.empty((0, self.task.outputs), np.float32)
        return np.concatenate(answers) if self.task.tokenwise else np.stack(answers)


def open_predictor(
    folder: Path, onnx_file: Path, *, task: Task, max_length: int, threads: int, threshold: float = math.inf
) -> Predictor:
    """Opens the ONNX file with the tokenizer of the folder, which gives the tokens transformers gives."""
    tokenizer: Any = plain(open_tokenizer(folder))
    if not task.tokenwise:  # these read what is too long in several rows
        tokenizer.enable_truncation(max_length, strategy="longest_first")
    return Predictor(task, tokenizer, open_session(onnx_file, threads=1), max_length, threads, threshold)


def rows_of(tokenizer: Tokenizer, texts: Sequence[Text]) -> list[Row]:
    """Texts, or pairs of texts, as the tokenizer encodes them."""
    return [
        {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
        for row in tokenizer.encode_batch(list(texts))
    ]


def open_tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer.json. Raises BundleError where there is none, or none that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BundleError(f"{path}: no such file; expected the tokenizer that belongs to the model")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        if type(error) is not Exception:  # which is what the library raises for any file that it cannot read
            raise
        raise BundleError(f"{path}: no tokenizer that can be read ({error}); copy the model again") from None


def _checked(text: Text, task: Task) -> Text:
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
    if task.kind == "regression":
        return Prediction("", float(logits[0]), {})
    values = (_sigmoid if task.kind == "multilabel" else _softmax)(logits.astype(np.float64))
    scores = {label: float(value) for label, value in zip(task.labels, values, strict=True)}
    best = max(scores, key=lambda label: scores[label])
    if task.kind == "multilabel":
        return Prediction(", ".join(label for label in scores if scores[label] >= 0.5), scores[best], scores)
    return Prediction(best, scores[best], scores)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))  # exp(-x) would overflow


@dataclass(frozen=True)
class Answered:
    """One text of a stream, and what the model says of it; or, in `error`, why it was not asked."""

    text: str
    answer: Prediction | Answer | Marked | None
    error: str = ""


def lines(stream: BinaryIO) -> Iterator[bytes]:
    """Read lines without their ends; of one that is longer than LONGEST, its beginning."""
    while line := stream.readline(LONGEST + 2):
        rest = line
        while len(rest) > LONGEST and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST + 2)
        yield line.removesuffix(b"\n").removesuffix(b"\r")


def answers(
    predictor: Predictor, texts: Iterable[bytes], *, second: str | None = None, unit: str = "line"
) -> Iterator[Answered]:
    """Answer each text, or its pair with `second`; `unit` and its number name one that is no text.

    Raises BundleError, naming it too, where the model itself fails.
    """
    for number, raw in enumerate(texts, start=1):
        where = f"{unit} {number:,}"
        try:
            text = decode(raw, where)
        except DataError as error:
            yield Answered("", None, str(error))
            continue
        try:
            (answer,) = predictor.predict([text if second is None else (text, second)])
        except BundleError as error:
            raise BundleError(f"{where}: {error}") from error
        yield Answered(text, answer)


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
