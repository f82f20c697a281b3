"""Write and run embedding bundles: an encoder in the layout of sentence-transformers,
with its ONNX files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.exporters.artifact import BUNDLE_FILES, Bundle, writing
from compress.exporters.manifest import Manifest
from compress.exporters.predictor import open_embedder
from compress.models.sentence_modules import Normalize, Pooling
from compress.models.sentence_settings import SentenceSettings
from compress.records.certificate import Certificate

MAX_DROP = 0.01
"""The largest 1 - Spearman's rho of the similarities and fp32's for which an int8 file
is certified."""

Floats = NDArray[np.float32]


def similarity(one: Floats, other: Floats) -> tuple[float, float]:
    """Compare two embeddings (texts, hidden) of three texts or more: return the mean
    cosine of a text's two vectors, and Spearman's rho of the cosines of all pairs of
    texts."""
    from scipy.stats import rankdata

    wide = [vectors.astype(np.float64) for vectors in (one, other)]
    a, b = (
        vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        for vectors in wide
    )
    upper = np.triu_indices(len(a), 1)
    ranks = [rankdata((vectors @ vectors.T)[upper]) for vectors in (a, b)]
    return float((a * b).sum(1).mean()), float(np.corrcoef(*ranks)[0, 1])


def write(
    path: Path,
    *,
    encoder: Any,
    tokenizer: Any,
    settings: SentenceSettings,
    max_length: int,
    card: Mapping[str, Any],
    texts: Sequence[str] = (),
    data: str = "",
    opset: int = 17,
) -> Bundle:
    """Write an encoder: weights, tokenizer, ONNX in fp32 and int8, and its modules.
    `card` has the fields of `Card`.

    int8 is compared with fp32 on `texts`, of the corpus `data`; the certificate is
    stored in the int8 file. Without vectors, or without texts, nothing is certified.
    Raises ExportError as `to_onnx` does.
    """
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import as_float32, makes_segments, to_onnx
    from compress.exporters.session import save_certified
    from compress.models.checkpoints import save_checkpoint
    from compress.models.sentence_encoder import SentenceEncoder, with_settings
    from compress.models.sentence_settings import set_settings

    settings = replace(settings, max_length=max_length)
    if settings.embeds and not isinstance(encoder, SentenceEncoder):
        encoder = with_settings(encoder, settings)
    plain = as_float32(encoder)
    if settings.embeds:
        set_settings(plain.config, settings)
    manifest = Manifest.from_model(plain, max_length, kind="embeddings")
    with writing(path, manifest) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        fp32 = folder / BUNDLE_FILES["fp32"]
        int8 = folder / BUNDLE_FILES["int8"]
        to_onnx(
            plain,
            fp32,
            opset=opset,
            segments=makes_segments(tokenizer),
            max_length=max_length,
        )
        quantize_dynamic(fp32, int8)
        if settings.embeds and texts:
            exact = open_embedder(folder, fp32, max_length).embed(texts)
            small = open_embedder(folder, int8, max_length).embed(texts)
            save_certified(int8, int8, _certify(exact, small, data))
        (folder / "README.md").write_text(
            _card(card, manifest, settings), encoding="utf-8"
        )
    return Bundle.load(path)


def _certify(exact: Floats, small: Floats, data: str) -> Certificate:
    import onnxruntime

    cosine, spearman = similarity(exact, small)
    drop = 1.0 - spearman
    return Certificate(
        artefact=BUNDLE_FILES["int8"],
        method="dynamic int8",
        metric="spearman of similarities with fp32's",
        before=1.0,
        after=spearman,
        max_drop=MAX_DROP,
        agreement=cosine,
        max_logit_difference=float(np.abs(exact - small).max()),
        rows=len(exact),
        split="",
        data=data,
        device="local",
        runtime=f"onnxruntime {onnxruntime.__version__}",
        certified=drop <= MAX_DROP,
        reason=f"mean cosine with fp32 {cosine:.4f}; the order of similarities changes "
        f"by {drop:.4f}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


POOLED: Mapping[str, str] = {
    "cls": "the first token",
    "max": "the largest of each number over all tokens",
    "mean": "the mean of all tokens",
    "mean_sqrt_len_tokens": "the sum of all tokens divided by the square root of their "
    "number",
    "weightedmean": "the mean of all tokens, each weighted by its place",
    "lasttoken": "the last token",
}
"""The ways of `sentence_modules.MODES` to pool, in words."""


def _describe(settings: SentenceSettings) -> str:
    """Say what a file outputs."""
    if not settings.embeds:
        return "`last_hidden_state`, a vector for each token"
    pooling = next(module for module in settings.modules if isinstance(module, Pooling))
    ways = " and ".join(POOLED[mode] for mode in pooling.modes)
    others = [
        module.kind
        for module in settings.modules
        if not isinstance(module, Pooling | Normalize)
    ]
    after = f", followed by {' and '.join(others)}" if others else ""
    return (
        f"`sentence_embedding` is {ways} of "
        f"`last_hidden_state`{after}{', of length 1' * settings.normalises}"
    )


def _card(
    fields: Mapping[str, Any], manifest: Manifest, settings: SentenceSettings
) -> str:
    from compress.exporters.card import Card, file_card

    about = (
        f"{manifest.model_type} encoder of texts of at most {manifest.max_length} "
        f"tokens: {_describe(settings)}. Made with compress."
    )
    inputs = """`onnx/model.onnx` is the model in float32, `onnx/model_quantized.onnx` in int8. Inputs: input_ids, attention_mask and,
where the model has segments, token_type_ids."""  # noqa: E501
    card = Card.parse(fields)
    shown = [about, inputs]
    if settings.embeds:
        library = "sentence-transformers"
        return file_card(
            card, library, "sentence-similarity", about=shown, load=VECTORS
        )
    return file_card(
        card, "transformers", "feature-extraction", about=shown, load=TOKENS_EXAMPLE
    )


VECTORS = """from compress import Bundle
from sentence_transformers import SentenceTransformer

SentenceTransformer(".").encode(["a text"])  # with torch
Bundle.load(".").embed(["a text"])  # int8, without torch"""
TOKENS_EXAMPLE = """from transformers import AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained("."), AutoTokenizer.from_pretrained(".")
vectors = model(**tokenizer("a text", return_tensors="pt")).last_hidden_state"""
