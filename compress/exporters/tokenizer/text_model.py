"""Build one ONNX file that takes a text and returns its answer, with the tokenizer
inside, from operators that every standard build of onnxruntime has.

    # adds onnx/model_text.onnx, or raises ExportError
    bundle = text_model(Bundle.load(path))
    run_text(bundle.path / TEXT, ["a good film"])

An app passes a string to the file and gets a label, the words of a text with their
labels, or the answer to a question: no tokenizer library, no vocabulary file, no custom
operators, and the same file runs in onnxruntime for Python, mobile and the web.
A file is written only if it tokenises a list of hard texts, and all given texts,
exactly as the bundle's own tokenizer does."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final
from unicodedata import unidata_version

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from pydantic import TypeAdapter
from tokenizers import Tokenizer

from compress import families
from compress.arguments import read_texts
from compress.data.answers import Outcome
from compress.data.cache import digest, home, load_or_create
from compress.data.encoder import TOKENIZER_JSON, Text, TextEncoder
from compress.data.task import Task
from compress.data.text_preparation import count_prompt_tokens, prepend
from compress.data.windows import word_pattern
from compress.errors import ExportError
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import Precision
from compress.exporters.predictor import join_answers
from compress.exporters.session import (
    PROMPT_LENGTH,
    check_opset,
    metadata,
    open_session,
    read_model,
)
from compress.exporters.tokenizer import build as frames
from compress.exporters.tokenizer.build import (
    MODELS,
    Pieces,
    RowTemplate,
    join_reader,
    reader,
)
from compress.io import atomic_file, parse_json
from compress.kinds import find

TEXT_KEY: Final = "compress.text"
"""The metadata property that holds the file's `TextProof`, as a JSON object."""

SHOWN = 10
ANSWERED = 64
"""The most texts whose logits are compared too: equal rows must have equal logits."""
TOLERANCE = 1e-4

TEXTS: Final[tuple[str, ...]] = tuple(
    parse_json(Path(__file__).with_name("hard_texts.json"))
)
"""Texts that tokenizers read in different ways: white space, accents, scripts, emoji,
invisible characters, punctuation, long words, special tokens whole and broken, and
plain texts; some are longer than any row, to test truncation."""

PAIRS: Final[tuple[tuple[str, str], ...]] = (
    *zip(TEXTS, (*TEXTS[1:], TEXTS[0]), strict=True),
    *((TEXTS[-1], text) for text in TEXTS),
)
"""Pairs of every text with the next one, and of a short text with every text."""

TOGETHER = 16
"""Texts per compared batch, so that it has rows of different length."""


@dataclass(frozen=True)
class TextProof:
    """Record what a text file was compared on before it was written.

    tokenizer      its type; tokenizers: the version of the library
    hard           the number of texts, or pairs, of the hard list; given: of the user's
                   own
    precision      of the model inside; max_length: tokens that a row is truncated to
    kind, labels   of the task
    words          of the vocabulary, each one token, to make texts of any length
    prompt         the text that the file puts before each text
    """

    tokenizer: str
    tokenizers: str
    hard: int
    given: int
    precision: str
    max_length: int
    kind: str
    labels: tuple[str, ...]
    words: tuple[str, ...] = ()
    prompt: str = ""


def text_model(
    bundle: Bundle, *, precision: Precision = "int8", texts: Sequence[Text] = ()
) -> Bundle:
    """Add `onnx/model_text.onnx` to the bundle, a `text_file` of its file of
    `precision`."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model_text.onnx"
        text_file(bundle, file, precision=precision, texts=texts)
        return bundle.put("text", file)


def text_file(
    bundle: Bundle,
    target: Path,
    *,
    precision: Precision = "int8",
    texts: Sequence[Text] = (),
    prompt: str | None = None,
) -> TextProof:
    """Write `target`: `text` (batch,) strings, and `text_pair` for pairs -> label,
    score, probabilities (see `forms.label`) and logits, as from the bundle's file of
    `precision`. For tagging and questions, whose logits are per token, also `offsets`,
    the characters of the text, or context, that each token covers; for tagging `words`,
    for questions `answer` (see `forms.span`). Long texts are truncated.

    prompt   the text that the file puts before each text; None: the model's default
             prompt, as in `Bundle.predict`

    Raises ExportError, and writes nothing, for a tokenizer that `MODELS` do not
    support, and if any of the hard texts, or of `texts`, is tokenised differently.
    """
    texts = list(read_texts(texts, bundle.task.text, where="text_file"))
    prompt = bundle.task.preparation.prompt() if prompt is None else prompt
    encoder, frame = _read(bundle, prompt)
    bundle.check_has(precision)
    model = read_model(bundle.files()[precision])
    check_opset(model, bundle.files()[precision], 16, "a text file")
    _set_prompt_length(model, encoder, frame)
    read = _reader(encoder, frame, model)
    hard = list_hard_texts(frame)
    proof = TextProof(
        tokenizer=type(encoder.backend.model).__name__,
        tokenizers=version("tokenizers"),
        hard=len(hard),
        given=len(texts),
        precision=precision,
        max_length=frame.max_length,
        kind=bundle.task.kind,
        labels=bundle.task.labels,
        words=tuple(list_words(encoder.backend)),
        prompt=prompt,
    )
    whole = join_reader(read, model, bundle.task, bundle.manifest.margin)
    whole.producer_name = model.producer_name
    whole.producer_version = model.producer_version
    onnx.helper.set_model_props(
        whole,
        {**metadata(model), TEXT_KEY: json.dumps(asdict(proof), ensure_ascii=False)},
    )
    onnx.checker.check_model(whole)
    with tempfile.TemporaryDirectory() as scratch:
        front = Path(scratch) / "front.onnx"
        onnx.save_model(read, front)
        if found := find_differences(
            open_session(front, threads=1), encoder, frame, [*hard, *texts]
        ):
            listed = "\n".join(f"  {each}" for each in found[:SHOWN])
            more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ExportError(
                f"{bundle.path}: the graph tokenises {len(found)} of "
                f"{len(hard) + len(texts)} texts differently from tokenizer.json; "
                f"nothing was written. Expected the same tokens:\n{listed}{more}"
            )
    with atomic_file(target) as file:
        onnx.save_model(whole, file)
        _check_logits(bundle, file, precision, [*texts, *hard][:ANSWERED], prompt)
    return proof


def run_text(path: Path, texts: Sequence[Text], *, threads: int = 1) -> list[Outcome]:
    """Predict for each text, or pair, with a text file, in order, as `Bundle.predict`
    does; but long texts are truncated, where `Bundle.predict` splits words and contexts
    into several rows.

    Raises ExportError for a file that `text_model` did not write, ArgumentError for
    what are no texts, or no pairs.
    """
    proof = read_proof(path)
    session = open_session(path, threads)
    predictions = list[Outcome]()
    task: type[Task] = find(proof.kind)
    for text in read_texts(texts, session.get_inputs(), where="run_text"):
        outputs = {name: value[0] for name, value in _run(session, [text]).items()}
        predictions.append(task.read_graph(text, outputs, proof.labels))
    return predictions


def read_proof(path: Path) -> TextProof:
    """Read a text file's proof. Raises ExportError for a file that `text_model` did not
    write."""
    entry = metadata(read_model(path)).get(TEXT_KEY)
    if entry is None:
        raise ExportError(
            f"{path}: no tokenizer inside; expected the {TEXT_KEY!r} entry that "
            "`text_model` writes"
        )
    return TypeAdapter(TextProof).validate_json(entry)


MOST_WORDS = 100


def list_words(tokenizer: Tokenizer) -> list[str]:
    """List the first words of a vocabulary that are one token each, at the beginning of
    a text and inside it; single letters only if there are no others."""
    vocabulary = tokenizer.get_vocab()
    letters = [
        token.lstrip("Ġ▁") for token in sorted(vocabulary, key=vocabulary.__getitem__)
    ]
    letters = sorted(
        (each for each in dict.fromkeys(letters) if each.isalpha()),
        key=lambda each: len(each) == 1,
    )
    whole = (
        each
        for each in letters
        if len(tokenizer.encode(f"{each} {each}", add_special_tokens=False).ids) == 2
    )
    return list(islice(whole, MOST_WORDS))


def _read(bundle: Bundle, prompt: str = "") -> tuple[TextEncoder, RowTemplate]:
    """Open the bundle's tokenizer, and read the template of its rows, which begin with
    `prompt`."""
    task = bundle.task
    encoder = TextEncoder.from_folder(bundle.path)
    config: dict[str, Any] = parse_json(bundle.path / "config.json")
    summary = config.get(
        "summary_type", families.find(config.get("model_type", "")).summary
    )
    if not task.tokenwise and not task.vectors and summary != "first":
        raise ExportError(
            f"{bundle.path}: summary_type in config.json is {summary}: the model reads "
            "the last place of a row, or all of them, padding too, and a text file "
            "pads the shorter texts of a batch. Expected first; tokenise in the app, "
            "and pass one row at a time to the bundle's other files"
        )
    frame = frames.read_template(
        encoder, pair=task.pair, max_length=bundle.manifest.max_length, kind=task.kind
    )
    if frame.question is not None and frame.parts[0].token is None:
        raise ExportError(
            f"{bundle.path}: no special token before a question; expected one, which "
            'means "no answer"'
        )
    return encoder, replace(frame, prompt=prompt)


def _set_prompt_length(
    model: onnx.ModelProto, encoder: TextEncoder, frame: RowTemplate
) -> None:
    """Pass the number of the prompt's tokens to a model that leaves them out of its
    vectors."""
    if not frame.prompt:
        return
    (row,) = encoder.encode([frame.prompt], frame.max_length)
    count = count_prompt_tokens(row["input_ids"], encoder.settings.special_ids)
    for tensor in model.graph.initializer:
        if tensor.name == PROMPT_LENGTH:
            tensor.CopyFrom(
                onnx.numpy_helper.from_array(np.array([count], np.int64), PROMPT_LENGTH)
            )


def _reader(
    encoder: TextEncoder, frame: RowTemplate, like: onnx.ModelProto
) -> onnx.ModelProto:
    """Build the graph of a tokenizer, or load it from the cache, which saves several
    seconds."""
    opsets = [f"{each.domain} {each.version}" for each in like.opset_import]
    code = sorted(Path(__file__).parent.glob("*.py"))
    # defined outside this package
    others = [word_pattern().pattern, unidata_version]
    own = encoder.fingerprint()
    key = digest(
        own,
        repr(frame),
        *opsets,
        str(like.ir_version),
        version("tokenizers"),
        *others,
        *code,
    )

    def build(folder: Path) -> None:
        onnx.save_model(
            reader(take_apart(encoder), frame, like), folder / "reader.onnx"
        )

    return onnx.load(load_or_create(home() / "readers" / key, build) / "reader.onnx")


def take_apart(encoder: TextEncoder) -> Pieces:
    """Read the parts of a tokenizer. Raises ExportError for one that the graph does not
    support."""
    described = json.loads(encoder.backend.to_str())
    if encoder.settings.split_special_tokens:  # their names in a text are ordinary text
        described["added_tokens"] = [
            token for token in described["added_tokens"] if not token["special"]
        ]
    kind = described["model"]["type"]
    pieces = MODELS.get(kind)
    wrong = (
        pieces.list_unsupported(described)
        if pieces
        else [f"model {kind} (expected {', '.join(MODELS)})"]
    )
    if not pieces or wrong:
        raise ExportError(
            f"{encoder.name}: {TOKENIZER_JSON}: {'; '.join(wrong)}. A text file "
            "supports WordPiece (BERT, DistilBERT, ELECTRA, MobileBERT, MiniLM), "
            "byte-level BPE (RoBERTa, GPT-2, ModernBERT) and Unigram (ALBERT, "
            "DeBERTa-v3, XLM-RoBERTa, T5); for other tokenizers, tokenise in the app "
            "with a library that reads tokenizer.json, and pass the ids to the "
            "bundle's other files"
        )
    return pieces.from_tokenizer(encoder.backend, described)


def _run(session: Any, texts: Sequence[Text]) -> dict[str, Any]:
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, make_feeds(texts)), strict=True))


def _check_logits(
    bundle: Bundle, file: Path, precision: Precision, texts: Sequence[Text], prompt: str
) -> None:
    """Raise ExportError if the file's logits for a text differ from the logits of the
    bundle's file."""
    predictor = bundle.open(precision)
    if bundle.task.vectors:
        expected = predictor.embed([str(text) for text in texts], prompt=prompt)
    else:
        expected = predictor.logits(read_rows(*_read(bundle), texts))
    session = open_session(file, threads=1)
    names = bundle.task.graph_outputs
    answers = (_run(session, [text]) for text in texts)
    found = join_answers(
        bundle.task, [[each[name][0] for name in names] for each in answers]
    )
    difference = float(np.abs(found - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ExportError(
            f"{bundle.path}: the text file's logits differ from those of its "
            f"{precision} file by {difference:.2g} for the same texts; nothing was "
            "written. Please report it with the bundle's config.json"
        )


@dataclass(frozen=True)
class TokenDifference:
    """A text that the graph tokenises differently: the name of the array, such as
    input_ids, the position of the first difference, and the values from there on."""

    text: Text
    name: str
    at: int
    expected: tuple[Any, ...]
    found: tuple[Any, ...]

    def __str__(self) -> str:
        shown = (
            f"{self.text!r}" if len(f"{self.text!r}") < 80 else f"{self.text!r:.77}..."
        )
        expected = list(self.expected[:5])
        found = list(self.found[:5])
        return (
            f"{shown} at token {self.at}: expected {self.name} {expected}, found "
            f"{found}"
        )


def list_hard_texts(frame: RowTemplate) -> list[Text]:
    """List the texts, or pairs of texts, that every file is compared on."""
    # also texts with about as many tokens as a row holds, and about half as many
    room = frame.room
    counts = {
        1,
        room // 2 - 1,
        room // 2,
        room // 2 + 1,
        room - 1,
        room,
        room + 1,
        2 * room,
    }
    if frame.question is not None:
        counts |= {frame.question - 1, frame.question, frame.question + 1}
    edges = ["a " * count for count in sorted(counts)]
    if frame.pair:
        return [*PAIRS, *((one, other) for one in edges for other in edges)]
    return [*TEXTS, *edges]


def find_differences(
    session: onnxruntime.InferenceSession,
    encoder: TextEncoder,
    frame: RowTemplate,
    texts: Sequence[Text],
) -> list[TokenDifference]:
    """Find the texts whose rows differ, in a session of a graph of `reader`."""
    names = [node.name for node in session.get_outputs()]
    found = []
    for first in range(0, len(texts), TOGETHER):
        batch = texts[first : first + TOGETHER]
        expected = read_rows(encoder, frame, batch)
        for size in sorted({1, len(batch)}):
            parts = (
                batch[start : start + size] for start in range(0, len(batch), size)
            )
            rows = [
                row
                for part in parts
                for row in zip(*session.run(names, make_feeds(part)), strict=True)
            ]
            for text, whole, row in zip(batch, expected, rows, strict=True):
                found.append(
                    _compare(
                        text,
                        whole,
                        dict(zip(names, map(np.ndarray.tolist, row), strict=True)),
                        frame,
                    )
                )
    return list({each.text: each for each in found if each is not None}.values())


def read_rows(
    encoder: TextEncoder, frame: RowTemplate, texts: Sequence[Text]
) -> Sequence[Mapping[str, Sequence[Any]]]:
    """Encode texts as `Bundle.predict` does, but always with token types, as the graph
    does."""
    if frame.prompt:
        texts = prepend(frame.prompt, map(str, texts))
    typed = replace(encoder, settings=replace(encoder.settings, token_types=True))
    return [frame.task.graph_row(typed, frame, text) for text in texts]


def make_feeds(texts: Sequence[Text]) -> dict[str, NDArray[np.object_]]:
    """Build the inputs of a text file: `text`, and `text_pair` for pairs."""
    columns = zip(
        *([text] if isinstance(text, str) else text for text in texts), strict=True
    )
    return {
        name: np.array(column, dtype=object)
        for name, column in zip(("text", "text_pair"), columns, strict=False)
    }


def _compare(
    text: Text,
    expected: Mapping[str, Sequence[Any]],
    found: Mapping[str, list[Any]],
    frame: RowTemplate,
) -> TokenDifference | None:
    """Compare a row; None where it equals the tokenizer's, followed by padding."""
    beyond = len(found["input_ids"]) - len(expected["input_ids"])
    filling: dict[str, Any] = {"input_ids": frame.padding} | {
        name: [0, 0] for name in frame.outputs
    }
    whole = {
        name: [*values, *[filling.get(name, 0)] * beyond]
        for name, values in expected.items()
    }
    name = next((name for name, values in whole.items() if values != found[name]), None)
    if name is None:
        return None
    same = [
        ours == theirs for ours, theirs in zip(found[name], whole[name], strict=False)
    ]
    at = sum(takewhile(bool, same))
    return TokenDifference(
        text, name, at, tuple(whole[name][at:]), tuple(found[name][at:])
    )
