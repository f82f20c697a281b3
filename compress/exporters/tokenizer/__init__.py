"""Text in, label out: one ONNX file with the tokenizer inside, of operators that every standard onnxruntime has.

    bundle = text_model(Bundle.load(path))            # onnx/model_text.onnx, or refused
    run_text(bundle.path / TEXT, ["a good film"])

An app gives the file a string and gets a label: no tokenizer library, no vocabulary file, no custom operators, and
the same file runs in onnxruntime for Python, for mobile and for the web. A file is kept only if it reads a list of
hard texts, and all texts that are given, token by token as the bundle's own tokenizer does.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from tokenizers import Tokenizer

from compress.errors import ExportError
from compress.exporters.artifact import Bundle, Precision
from compress.exporters.predictor import Prediction, Text, encode, open_tokenizer
from compress.exporters.session import metadata, open_session, read_model
from compress.exporters.tokenizer import build as frames
from compress.exporters.tokenizer.build import RowTemplate, joined, reader
from compress.exporters.tokenizer.verify import TokenDifference, differences, feeds, torture
from compress.exporters.tokenizer.wordpiece import WordPiece
from compress.io import written

TEXT_KEY: Final = "compress.text"
"""The metadata property that holds the file's `TextProof`, as a JSON object."""

SHOWN = 10
ANSWERED = 64
"""Texts whose logits are compared too: where the rows are equal, so must they be."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class TextProof:
    """What a text file was compared on before it was kept: it reads every one of these texts as the tokenizer does.

    tokenizer      its kind; tokenizers: the version of the library it was compared with
    hard           texts, or pairs, of the list of hard ones; given: of the user's own
    precision      of the file whose answers it gives; max_length: tokens a row is cut to
    kind, labels   of the task
    """

    tokenizer: str
    tokenizers: str
    hard: int
    given: int
    precision: str
    max_length: int
    kind: str
    labels: tuple[str, ...]


def text_model(bundle: Bundle, *, precision: Precision = "int8", texts: Sequence[Text] = ()) -> Bundle:
    """Add `onnx/model_text.onnx` to the bundle, a `text_file` of its file of `precision`."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model_text.onnx"
        text_file(bundle, file, precision=precision, texts=texts)
        return bundle.put("text", file)


def text_file(bundle: Bundle, target: Path, *, precision: Precision = "int8", texts: Sequence[Text] = ()) -> TextProof:
    """Write `target`: `text` (batch,) strings, and `text_pair` for pairs -> label, score, probabilities (see
    `answer.answer`) and logits; it answers as the bundle's file of `precision` does.

    Raises ExportError, and writes nothing, for a task that answers per token, for a tokenizer of another kind than
    WordPiece, and where any of the hard texts, or of `texts`, is read otherwise than by the tokenizer.
    """
    words, frame = _read(bundle)
    bundle.check_has(precision)
    model = read_model(bundle.files()[precision])
    read = reader(_taken_apart(bundle.path, words), frame, model)
    hard = torture(frame)
    verdict = TextProof(
        tokenizer="WordPiece",
        tokenizers=version("tokenizers"),
        hard=len(hard),
        given=len(texts),
        precision=precision,
        max_length=frame.max_length,
        kind=bundle.task.kind,
        labels=bundle.task.labels,
    )
    whole = joined(read, model, bundle.task)
    whole.producer_name, whole.producer_version = model.producer_name, model.producer_version
    onnx.helper.set_model_props(whole, {**metadata(model), TEXT_KEY: json.dumps(asdict(verdict), ensure_ascii=False)})
    onnx.checker.check_model(whole)
    with tempfile.TemporaryDirectory() as scratch:
        front = Path(scratch) / "front.onnx"
        onnx.save_model(read, front)
        if found := differences(open_session(front, threads=1), words, frame, [*hard, *texts]):
            raise ExportError(_refusal(bundle.path, found, len(hard) + len(texts)))
    with written(target) as file:
        onnx.save_model(whole, file)
        _check_logits(bundle, file, precision, [*texts, *hard][:ANSWERED])
    return verdict


def run_text(path: Path, texts: Sequence[Text], *, threads: int = 1) -> list[Prediction]:
    """Predict each text, or pair, with a text file, in their order; each by itself, as `Bundle.predict` does.

    Raises ExportError for a file that `text_model` did not write.
    """
    verdict = verdict_of(path)
    session = open_session(path, threads)
    told = []
    for text in texts:
        answers = {name: value[0] for name, value in _run(session, [text]).items()}
        score = float(answers["score"])
        if verdict.kind == "regression":
            told.append(Prediction("", score, {}))
            continue
        scores = {label: float(value) for label, value in zip(verdict.labels, answers["probabilities"], strict=True)}
        label = answers["label"]
        chosen = label if isinstance(label, str) else ", ".join(each for each in label if each)
        told.append(Prediction(chosen, score, scores))
    return told


def verdict_of(path: Path) -> TextProof:
    """Read what the text file was compared on. Raises ExportError for a file that `text_model` did not write."""
    said = metadata(read_model(path)).get(TEXT_KEY)
    if said is None:
        raise ExportError(f"{path}: no tokenizer inside; expected the {TEXT_KEY!r} entry that `text_model` writes")
    values = json.loads(said)
    return TextProof(**{**values, "labels": tuple(values["labels"])})


def _read(bundle: Bundle) -> tuple[Tokenizer, RowTemplate]:
    """Open the bundle's tokenizer, and read off how its rows are framed."""
    task = bundle.task
    if task.tokenwise:
        raise ExportError(
            f"{bundle.path}: {task.kind} answers per token; a text file gives one answer for a text: expected "
            "classification, multilabel or regression"
        )
    words = open_tokenizer(bundle.path)
    config: dict[str, Any] = json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))
    padding = config.get("pad_token_id") or 0
    return words, frames.read_off(words, pair=task.pair, max_length=bundle.manifest.max_length, padding=padding)


def _taken_apart(path: Path, words: Tokenizer) -> WordPiece:
    """Take the tokenizer apart. Raises ExportError where the graph cannot be made of it."""
    described = json.loads(words.to_str())
    parts = {part: (described[part] or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer")}
    expected = {"model": "WordPiece", "normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer"}
    wrong = [f"{part} {parts[part]} (expected {expected[part]})" for part in parts if parts[part] != expected[part]]
    for token in described["added_tokens"]:
        odd = [name for name in ("single_word", "lstrip", "rstrip", "normalized") if token[name]]
        wrong += [f"added token {token['content']!r} with {', '.join(odd)} (expected none of these)"] if odd else []
    if wrong:
        raise ExportError(
            f"{path / 'tokenizer.json'}: {'; '.join(wrong)}. A text file reads WordPiece as of BERT, DistilBERT, "
            "ELECTRA, MobileBERT and MiniLM; with another tokenizer, tokenise in the app with a library that reads "
            "tokenizer.json, and give the ids to the bundle's other files"
        )
    return WordPiece.of(words, described)


def _run(session: Any, texts: Sequence[Text]) -> dict[str, Any]:
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds(texts)), strict=True))


def _check_logits(bundle: Bundle, file: Path, precision: Precision, texts: Sequence[Text]) -> None:
    """Raise ExportError where the file's logits are not those of the bundle's file for the same text."""
    predictor = bundle.open(precision)
    expected = predictor.logits(encode(predictor.tokenizer, texts))
    session = open_session(file, threads=1)
    found = np.concatenate([_run(session, [text])["logits"] for text in texts])
    difference = float(np.abs(found - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ExportError(
            f"{bundle.path}: the text file's logits differ from those of its {precision} file by {difference:.2g} for "
            "the same texts; nothing was kept. Please report it with the bundle's config.json"
        )


def _refusal(path: Path, found: Sequence[TokenDifference], compared: int) -> str:
    listed = "\n".join(f"  {each}" for each in found[:SHOWN])
    more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        f"{path}: the graph reads {len(found)} of {compared} texts otherwise than tokenizer.json; nothing was kept. "
        f"Expected the same ids:\n{listed}{more}"
    )
