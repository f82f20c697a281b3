"""Random classifiers, taggers and cross-encoders with tokenizers of the hub: `predict` answers as their own libraries.

Classifiers are compared with transformers' pipeline, cross-encoders with sentence-transformers, taggers with the tags
of the model at the first token of each word. The rows of training and scoring give the same logits as `predict`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)
from transformers.utils import logging

from compress.data.collate import Collate
from compress.data.encoder import Text, encoder_of
from compress.data.windows import find_words
from compress.errors import CompressError
from compress.evaluation import metrics
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import load_source
from compress.models import teacher as teachers
from compress.models.padding import pads_left
from compress.tasks.tagging import find_entities
from tests import tiny
from tests.campaign import cases, foreign
from tests.campaign.cases import Record

MODELS = 300 if cases.WHOLE else 15
PARTS = 8 if cases.WHOLE else 1
TEXTS = 3
TOLERANCE = 1e-4
KINDS = ("classifier", "classifier", "pairs", "multilabel", "cross-encoder", "tagger")
FAMILIES = (
    "bert", "bert", "distilbert", "roberta", "xlm-roberta", "electra", "albert", "mobilebert", "deberta", "deberta-v2",
    "ernie", "modernbert", "xlnet", "llama", "mistral",
)  # fmt: skip
NAMES = ("good", "bad", "NEUTRAL", "none", "0", "very bad", "ja", "Ü")


@pytest.fixture(autouse=True)
def silent() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)


def write_model(folder: Path, draw: foreign.Draw, kind: str) -> str:
    """Write a random checkpoint; return its family."""
    foreign.write(folder, draw)
    family: str = draw.one(*FAMILIES)
    (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = 1 if kind == "cross-encoder" else draw.one(2, 3, 5)
    names = draw.rng.sample(NAMES, labels)
    if kind == "tagger":
        names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"][:labels]
    sizes: dict[str, Any] = {
        "vocab_size": max(tokenizer.get_vocab().values()) + 1 + draw.one(0, 0, 7),
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        "id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)},
        "layers": 1, "labels": labels,
    }  # fmt: skip
    if family != "xlnet":
        sizes["max_position_embeddings"] = draw.one(40, 66)
    if family in ("bert", "ernie", "electra"):
        sizes["type_vocab_size"] = draw.one(1, 2)
    if family == "deberta":  # as of real ones: beyond their distances the file is refused
        sizes["max_relative_positions"] = -1
    if kind == "multilabel":
        sizes["problem_type"] = "multi_label_classification"
    if kind == "cross-encoder" and draw.often(0.5):
        sizes["problem_type"] = "regression"
    auto: Any = AutoModelForTokenClassification if kind == "tagger" else AutoModelForSequenceClassification
    torch.manual_seed(draw.rng.randrange(1000))
    model = auto.from_config(tiny.config(family, **sizes)).to(draw.one(torch.float32, torch.float16, torch.bfloat16))
    model.save_pretrained(folder, max_shard_size=draw.one("5GB", "5GB", "20KB"))
    return family


@pytest.mark.parametrize("part", range(PARTS))
def test_predict_answers_as_the_checkpoints_own_library(part: int, tmp_path: Path, record_property: Record) -> None:
    faults: dict[str, object] = {}
    refused = tried = 0
    for number in range(part, MODELS, PARTS):
        draw = foreign.Draw(f"{cases.SEED} model {number}")
        kind: str = KINDS[number % len(KINDS)]
        folder = tmp_path / str(number)
        try:
            family = write_model(folder, draw, kind)
        except (TypeError, ValueError, AssertionError):  # transformers cannot make such a tokenizer or model
            continue
        tried += 1
        try:
            bundle = load_source(str(folder), pair=kind == "pairs").write(tmp_path / f"{number} out")
        except CompressError as error:
            refused += 1
            if not any(name in str(error) for name in ("truncation_strategy", "pad_token", "token types", "types")):
                faults[f"{number}, {kind}, {family}"] = str(error)
            continue
        assert isinstance(bundle, Bundle)
        if problem := COMPARISONS[kind](bundle, folder, draw):
            faults[f"{number}, {kind}, {family}"] = problem
    assert refused <= max(1, 0.2 * tried)
    cases.record(record_property, "models of the hub, beside their library", tried, faults)


def readable(bundle: Bundle, folder: Path, texts: Sequence[Text]) -> list[Text]:
    """Leave out texts without tokens, on which transformers cannot run a model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = ([text] if isinstance(text, str) else list(text) for text in texts)
    kept = (bool(tokenizer(*([each] for each in parts))["input_ids"][0]) for parts in columns)
    return [text for text, keep in zip(texts, kept, strict=True) if keep]


def models_of(folder: Path, auto: Any) -> tuple[Any, Any]:
    """Load model and tokenizer with transformers; the model reads no token types that it does not have."""
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if getattr(model.config, "type_vocab_size", 2) == 1:
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    return model, tokenizer


def compare_classifier(bundle: Bundle, folder: Path, draw: foreign.Draw) -> object:
    texts: list[Text] = list(draw.texts(TEXTS))
    pair = bundle.task.pair
    if pair:
        texts = [(str(one), str(other) or "a") for one, other in zip(texts, reversed(texts), strict=True)]
    texts = readable(bundle, folder, texts)
    model, tokenizer = models_of(folder, AutoModelForSequenceClassification)
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    length = bundle.manifest.max_length
    together = bundle.predict(texts, precision="fp32")
    for text, found in zip(texts, together, strict=True):
        given = {"text": text[0], "text_pair": text[1]} if pair else text
        (scored,) = pipe([given], truncation=True, max_length=length)
        expected = {each["label"]: each["score"] for each in scored}
        (alone,) = bundle.predict([text], precision="fp32")
        for answer in (found, alone):
            scores: Mapping[str, float] = answer.scores  # type: ignore[union-attr]
            if far(scores, expected):
                return [text, scores, expected]
    return compare_scores(bundle, folder, texts)


def far(scores: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    """Check whether probabilities differ, by more than rounding, or their labels."""
    if scores.keys() != expected.keys():
        return True
    return max(abs(scores[label] - expected[label]) for label in expected) > TOLERANCE


def compare_cross_encoder(bundle: Bundle, folder: Path, draw: foreign.Draw) -> object:
    """An exported cross-encoder reads a text, or a pair; sentence-transformers caps a row at the model's positions."""
    from sentence_transformers import CrossEncoder

    texts: list[Text] = readable(bundle, folder, list(draw.texts(TEXTS)))
    model, tokenizer = models_of(folder, AutoModelForSequenceClassification)
    length = bundle.manifest.max_length
    rows = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt") for text in texts]
    with torch.no_grad():
        expected = [float(model(**row).logits) for row in rows]
    found = [answer.score for answer in bundle.predict(texts, precision="fp32")]  # type: ignore[union-attr]
    if not np.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE):
        return [texts, found, expected]
    try:
        paired = load_source(str(folder), pair=True).write(bundle.path.with_name(f"{bundle.path.name} pairs"))
    except CompressError as error:
        return None if "truncation_strategy" in str(error) else str(error)
    pairs = readable(paired, folder, list(zip(texts, reversed(texts), strict=True)))
    options = {"dtype": torch.float32}
    identity = torch.nn.Identity()
    scorer = CrossEncoder(str(folder), device="cpu", activation_fn=identity, max_length=length, model_kwargs=options)
    if scorer.tokenizer.pad_token is None:  # it pads even a single pair
        scorer.tokenizer.pad_token = scorer.tokenizer.unk_token
    if getattr(model.config, "type_vocab_size", 2) == 1:
        scorer.tokenizer.model_input_names = tokenizer.model_input_names
    wanted = [float(scorer.predict([pair], batch_size=1)[0]) for pair in pairs]
    found = [answer.score for answer in paired.predict(pairs, precision="fp32")]  # type: ignore[union-attr]
    if not np.allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE):
        return [pairs, found, wanted]
    return compare_scores(paired, folder, pairs)


def compare_tagger(bundle: Bundle, folder: Path, draw: foreign.Draw) -> object:
    model, tokenizer = models_of(folder, AutoModelForTokenClassification)
    length = bundle.manifest.max_length
    for text in draw.texts(TEXTS):
        spans = find_words(text)
        words = [f" {text[start:end]}" for start, end in spans]
        if not words or len(tokenizer(words, is_split_into_words=True)["input_ids"]) > length:
            continue  # windows are compared in test_tokenizers
        row = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        if not row["input_ids"].numel():
            continue
        with torch.no_grad():
            shares_LV = model(**row).logits[0].softmax(-1).numpy()
        tags, scores = ["O"] * len(words), np.ones(len(words))
        for at, word in reversed(list(enumerate(row.word_ids()))):
            if word is not None:
                tags[word] = bundle.task.labels[int(shares_LV[at].argmax())]
                scores[word] = shares_LV[at].max()
        (found,) = bundle.predict([text], precision="fp32")
        expected = find_entities(text, spans, tags, scores)
        ours = [(each.text, each.label, each.start, each.end) for each in found.marks]  # type: ignore[union-attr]
        theirs = [(each.text, each.label, each.start, each.end) for each in expected.marks]
        gaps = [abs(a.score - b.score) for a, b in zip(found.marks, expected.marks, strict=False)]  # type: ignore[union-attr]
        if ours != theirs or max(gaps, default=0.0) > TOLERANCE:
            return [text, ours, theirs, gaps]
    return None


def compare_scores(bundle: Bundle, folder: Path, texts: Sequence[Text]) -> object:
    """Compare the logits of `predict` with those of scoring, and with those of training, whose rows are padded."""
    if not texts:
        return None
    predictor = bundle.open("fp32")
    answered = predictor.logits(predictor.encode(texts))
    columns = [texts] if isinstance(texts[0], str) else list(map(list, zip(*texts, strict=True)))
    split = Dataset.from_dict(dict(zip(("text", "text_pair"), columns, strict=False)))
    evaluator = bundle.evaluator(split)
    if not np.array_equal(bundle.logits(evaluator.rows, precision="fp32"), answered):
        return "scoring reads other rows"
    teacher = teachers.load(str(folder), folder, bundle.task)
    read = encoder_of(teacher.tokenizer).encode(texts, bundle.manifest.max_length)
    if [row["input_ids"] for row in read] != [row["input_ids"] for row in predictor.encode(texts)]:
        return "training reads other rows"
    collate = Collate(teacher.tokenizer, left=pads_left(teacher.model))
    trained = metrics.logits(teacher.model, evaluator.rows, collate, batch=len(texts))
    if not np.allclose(trained, answered, atol=TOLERANCE, rtol=TOLERANCE):
        return ["training's batches differ by", float(np.abs(trained - answered).max())]
    return None


COMPARISONS: Mapping[str, Any] = {
    "classifier": compare_classifier,
    "pairs": compare_classifier,
    "multilabel": compare_classifier,
    "cross-encoder": compare_cross_encoder,
    "tagger": compare_tagger,
}
