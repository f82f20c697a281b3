"""Write and run embedding bundles: an encoder in the layout of sentence-transformers,
with its ONNX files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compress.data.encoder import TextEncoder
from compress.errors import BundleError
from compress.exporters.artifact import FILES, Bundle, writing
from compress.exporters.manifest import Manifest
from compress.records.certificate import Certificate

if TYPE_CHECKING:
    from compress.models.pooling import Pooling

MAX_DROP = 0.01
"""The largest 1 - Spearman's rho of the similarities and fp32's for which an int8 file
is certified."""

Floats = NDArray[np.float32]


def embed(
    folder: Path, file: Path, texts: Sequence[str], max_length: int, threads: int
) -> Floats:
    """Compute `sentence_embedding` for each text, with the tokenizer of the folder; one
    text at a time, as an int8 graph scales activations by the whole batch. Raises
    BundleError for a file that outputs token states only."""
    from compress.exporters.predictor import run_rows
    from compress.exporters.session import open_session

    session = open_session(file, threads=1)
    if "sentence_embedding" not in [node.name for node in session.get_outputs()]:
        raise BundleError(
            f"{folder}: outputs token states only; for a vector per text, export it "
            "again with a pooling"
        )
    rows = TextEncoder.from_folder(folder).encode(texts, max_length)
    vectors = [
        found
        for (found,) in run_rows(
            session, rows, threads=threads, outputs=["sentence_embedding"]
        )
    ]
    return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)


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
    pooling: "Pooling",
    max_length: int,
    card: Mapping[str, Any],
    texts: Sequence[str] = (),
    data: str = "",
    opset: int = 17,
) -> Bundle:
    """Write an encoder: weights, tokenizer, ONNX in fp32 and int8, and the pooling.
    `card` has the fields of `Card`.

    int8 is compared with fp32 on `texts`, of the corpus `data`; the certificate is
    stored in the int8 file. Without a pooling, or without texts, nothing is certified.
    Raises ExportError as `to_onnx` does.
    """
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import as_float32, makes_segments, to_onnx
    from compress.exporters.session import save_certified
    from compress.models.checkpoints import save_checkpoint
    from compress.models.pooling import pooling_of, set_pooling
    from compress.models.sentence_encoder import SentenceEncoder, with_pooling

    if pooling.pool is not None and not isinstance(encoder, SentenceEncoder):
        encoder = with_pooling(encoder, pooling)
    plain = as_float32(encoder)
    if pooling.pool is not None:
        set_pooling(
            plain.config, replace(pooling_of(plain.config), max_length=max_length)
        )
    manifest = Manifest.from_model(plain, max_length, kind="embeddings")
    with writing(path, manifest) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        fp32, int8 = (folder / FILES[precision] for precision in ("fp32", "int8"))
        to_onnx(
            plain,
            fp32,
            opset=opset,
            segments=makes_segments(tokenizer),
            max_length=max_length,
        )
        quantize_dynamic(fp32, int8)
        if pooling.pool is not None and texts:
            exact, small = (
                embed(folder, file, texts, max_length, threads=1)
                for file in (fp32, int8)
            )
            save_certified(int8, int8, _certify(exact, small, data))
        (folder / "README.md").write_text(
            _card(card, manifest, pooling), encoding="utf-8"
        )
    return Bundle.load(path)


def _certify(exact: Floats, small: Floats, data: str) -> Certificate:
    import onnxruntime

    cosine, spearman = similarity(exact, small)
    drop = 1.0 - spearman
    return Certificate(
        artefact=FILES["int8"],
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


CARD = """---
{front}---

# {name}

{model_type} encoder of texts of at most {max_length} tokens: {gives}. Made with compress.

`onnx/model.onnx` is the model in float32, `onnx/model_quantized.onnx` in int8. Inputs: input_ids, attention_mask and,
where the model has segments, token_type_ids.

```python
{load}
```

## Licence

{licence}
"""  # noqa: E501


def _card(fields: Mapping[str, Any], manifest: Manifest, pooling: "Pooling") -> str:
    from compress.exporters.card import Card, escape, front_matter, licence

    card, vectors = Card.parse(fields), pooling.pool is not None
    gives = {
        None: "`last_hidden_state`, a vector for each token",
        "mean": "`sentence_embedding` is the mean of `last_hidden_state` over the "
        "tokens that the mask shows",
        "cls": "`sentence_embedding` is the first token of `last_hidden_state`",
        "max": "`sentence_embedding` holds the largest of each number over the tokens "
        "that the mask shows",
    }[pooling.pool]
    library, pipeline = (
        ("sentence-transformers", "sentence-similarity")
        if vectors
        else ("transformers", "feature-extraction")
    )
    return CARD.format(
        front=front_matter(card, library, pipeline),
        name=escape(card.name),
        model_type=manifest.model_type,
        max_length=manifest.max_length,
        gives=gives + ", of length 1" * pooling.normalise,
        load=VECTORS if vectors else TOKENS,
        licence=licence(card),
    )


VECTORS = """from compress import Bundle
from sentence_transformers import SentenceTransformer

SentenceTransformer(".").encode(["a text"])  # with torch
Bundle.load(".").embed(["a text"])  # int8, without torch"""
TOKENS = """from transformers import AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained("."), AutoTokenizer.from_pretrained(".")
vectors = model(**tokenizer("a text", return_tensors="pt")).last_hidden_state"""
