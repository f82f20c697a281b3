"""Texts in, labels out, with `tokenizers` and onnxruntime alone: neither torch nor transformers is imported."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from compress.data.task import Task
from compress.errors import BundleError
from compress.export.session import open_session

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


@dataclass(frozen=True)
class Predictor:
    """An opened bundle: keep it to answer many calls, each from any thread.

    Every row is run by itself, without padding: an int8 graph scales activations by the whole batch, so in company a
    row's logits would depend on the others; alone they are what a device computes. (Batches of 16 were 15 % faster
    in int8, 6 layers x 384, 27 tokens.) Rows are shared out over `threads` threads, each running one row at a time.
    """

    task: Task
    tokenizer: Tokenizer
    session: onnxruntime.InferenceSession
    threads: int

    def predict(self, texts: Sequence[Text]) -> list[Prediction]:
        """One prediction per text (per pair of texts for a pair task), in their order."""
        encodings = self.tokenizer.encode_batch([_checked(text, self.task) for text in texts])
        rows = [
            {"input_ids": row.ids, "attention_mask": row.attention_mask, "token_type_ids": row.type_ids}
            for row in encodings
        ]
        return [_prediction(self.task, *answer) for answer in zip(texts, self.logits(rows), strict=True)]

    def logits(self, rows: Iterable[Row]) -> NDArray[np.float32]:
        """Logits (rows, outputs) of encoded rows, in their order; columns that the file does not read are passed over.

        Raises BundleError for a row that lacks an input of the file.
        """
        names = [node.name for node in self.session.get_inputs()]

        def run(row: Row) -> NDArray[np.float32]:
            if missing := [name for name in names if name not in row]:
                raise BundleError(f"logits: a row has {', '.join(row)}; expected {', '.join(missing)} too")
            feeds = {name: np.asarray([row[name]], dtype=np.int64) for name in names}
            return self.session.run(["logits"], feeds)[0][0]

        with ThreadPoolExecutor(self.threads) as pool:
            answers = list(pool.map(run, rows))
        return np.stack(answers) if answers else np.empty((0, self.task.outputs), np.float32)


def open_predictor(folder: Path, onnx_file: Path, *, task: Task, max_length: int, threads: int) -> Predictor:
    """Opens the ONNX file with the tokenizer of the folder, which gives the tokens transformers gives."""
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    tokenizer.no_padding()
    return Predictor(task, tokenizer, open_session(onnx_file, threads=1), threads)


def _checked(text: Text, task: Task) -> Text:
    pair = not isinstance(text, str) and len(text) == 2 and all(isinstance(part, str) for part in text)
    if task.pair and not pair:
        raise BundleError(f"predict: {text!r}; expected a pair of texts ({' and '.join(task.text)})")
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
