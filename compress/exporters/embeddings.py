"""Write and run bundles that turn texts into vectors: an encoder in the layout of sentence-transformers, with its ONNX
files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from compress.errors import BundleError, ExportError
from compress.exporters.artifact import FILES, Bundle, writing
from compress.exporters.manifest import Manifest
from compress.records.certificate import Certificate

Pool = Literal["mean", "cls", "max"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MODULES, POOLING, SIZES = "modules.json", "1_Pooling", "sentence_bert_config.json"
UNLIMITED = 10**6
"""A tokenizer without a limit gives as its limit a number above this."""
MAX_DROP = 0.01
"""The most that the order of similarities may differ from fp32's (1 - Spearman) for an int8 file to be certified."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pooling:
    """Describes how an encoder's tokens become one vector.

    pool        the mean of all tokens, the first token, or the largest of each number; None: tokens only
    normalise   whether the vector is divided by its length
    max_length  tokens a text is cut to, where the folder says so
    """

    pool: Pool | None
    normalise: bool = False
    max_length: int | None = None

    @classmethod
    def read(cls, folder: Path) -> "Pooling":
        """Read the modules of sentence-transformers; a folder without modules.json gives tokens only.

        Raises ExportError for modules besides encoder, pooling and normalising, and for other kinds of pooling.
        """
        if not (folder / MODULES).is_file():
            return cls(None)
        listed = _json(folder / MODULES, list)
        try:
            paths = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
        except (TypeError, KeyError):
            raise ExportError(f"{folder / MODULES}: expected a list of modules, each with a type and a path") from None
        if unknown := sorted(paths.keys() - {"Transformer", "Pooling", "Normalize"}):
            raise ExportError(
                f"{folder / MODULES}: {', '.join(unknown)}: cannot be exported; expected an encoder, its pooling and "
                "perhaps a normalisation"
            )
        if outside := sorted(path for path in paths.values() if path not in ("", PurePath(path).name)):
            raise ExportError(f"{folder / MODULES}: {outside[0]!r}: expected modules in folders of its own folder")
        sizes = _json(folder / SIZES, dict) if (folder / SIZES).is_file() else {}
        pool = _pool(folder / paths["Pooling"] / "config.json") if "Pooling" in paths else None
        return cls(pool, "Normalize" in paths, sizes.get("max_seq_length"))

    def write(self, folder: Path, width: int, max_length: int) -> None:
        """Write the files that sentence-transformers, of any version, reads this from."""
        kinds = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] * self.normalise)]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(kinds)
        ]
        modes = {
            "pooling_mode_cls_token": self.pool == "cls",
            "pooling_mode_mean_tokens": self.pool == "mean",
            "pooling_mode_max_tokens": self.pool == "max",
            "pooling_mode_mean_sqrt_len_tokens": False,
        }
        for path, _ in kinds[1:]:
            (folder / path).mkdir()
        contents: dict[str, object] = {
            MODULES: modules,
            f"{POOLING}/config.json": {"word_embedding_dimension": width, **modes},
            SIZES: {"max_seq_length": max_length, "do_lower_case": False},
        }
        for name, content in contents.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _pool(path: Path) -> Pool:
    """Read either form that sentence-transformers writes: a name, or a yes or no for each."""
    told: Mapping[str, Any] = _json(path, dict)
    found = told.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, chosen in told.items()
        if name.startswith("pooling_mode_") and chosen
    ]
    names = [found] if isinstance(found, str) else list(found)
    if len(names) != 1 or names[0] not in POOLS:
        raise ExportError(
            f"{path}: pooling is {' and '.join(map(str, names)) or 'unknown'}; expected {' or '.join(POOLS)}"
        )
    return names[0]


def _json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, kind):
        raise ExportError(f"{path}: holds a {type(found).__name__}; expected a {kind.__name__}")
    return found


def embed(folder: Path, file: Path, texts: Sequence[str], max_length: int, threads: int) -> Floats:
    """Compute `sentence_embedding` of an ONNX file for each text, with the tokenizer of the folder; each by itself, as
    an int8 graph scales activations by the whole batch. Raises BundleError for a file that gives token states only."""
    from compress.exporters.predictor import encode, open_tokenizer, run_rows
    from compress.exporters.session import open_session

    session = open_session(file, threads=1)
    if "sentence_embedding" not in [node.name for node in session.get_outputs()]:
        raise BundleError(
            f"{folder}: gives token states only; to get a vector per text, export it again with a pooling"
        )
    rows = encode(open_tokenizer(folder, max_length), texts)
    vectors = [found for (found,) in run_rows(session, rows, threads=threads, outputs=["sentence_embedding"])]
    return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)


def similarity(one: Floats, other: Floats) -> tuple[float, float]:
    """Compare two embeddings (texts, hidden) of the same texts, three or more: the mean cosine of a text's two vectors;
    and Spearman's rho of the cosines of all pairs of texts, or whether the same texts are near each other."""
    from scipy.stats import rankdata

    wide = [vectors.astype(np.float64) for vectors in (one, other)]
    a, b = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12) for vectors in wide)
    upper = np.triu_indices(len(a), 1)
    ranks = [rankdata((vectors @ vectors.T)[upper]) for vectors in (a, b)]
    return float((a * b).sum(1).mean()), float(np.corrcoef(*ranks)[0, 1])


def write(
    path: Path,
    *,
    encoder: Any,
    tokenizer: Any,
    pooling: Pooling,
    max_length: int,
    card: Mapping[str, Any],
    texts: Sequence[str] = (),
    data: str = "",
    opset: int = 17,
) -> Bundle:
    """Write an encoder: weights, tokenizer, ONNX in fp32 and int8, and how to pool. `card`: the fields of `Card`.

    `texts`, of the corpus `data`: what int8 is compared with fp32 on; its certificate goes into the file. Without a
    pooling, or without texts, nothing is certified. Raises ExportError as `to_onnx` does.
    """
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import Pooled, as_float32, makes_segments, to_onnx
    from compress.exporters.session import certified
    from compress.models.checkpoints import save_checkpoint

    plain = as_float32(encoder)
    manifest = Manifest.from_model(plain, max_length, kind="embeddings")
    with writing(path, manifest) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        if pooling.pool is not None:
            pooling.write(folder, plain.config.hidden_size, max_length)
        fp32, int8 = (folder / FILES[precision] for precision in ("fp32", "int8"))
        to_onnx(Pooled(plain, pooling), fp32, opset=opset, segments=makes_segments(tokenizer))
        quantize_dynamic(fp32, int8)
        if pooling.pool is not None and texts:
            exact, small = (embed(folder, file, texts, max_length, threads=1) for file in (fp32, int8))
            certified(int8, int8, _compare(exact, small, data))
        (folder / "README.md").write_text(_card(card, manifest, pooling), encoding="utf-8")
    return Bundle.load(path)


def _compare(exact: Floats, small: Floats, data: str) -> Certificate:
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
        reason=f"mean cosine with fp32 {cosine:.4f}; the order of similarities changes by {drop:.4f}",
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
"""


def _card(fields: Mapping[str, Any], manifest: Manifest, pooling: Pooling) -> str:
    from compress.exporters.card import Card, escaped, front_matter, licence

    card, vectors = Card.parse(fields), pooling.pool is not None
    gives = {
        None: "`last_hidden_state`, a vector for each token",
        "mean": "`sentence_embedding` is the mean of `last_hidden_state` over the tokens that the mask shows",
        "cls": "`sentence_embedding` is the first token of `last_hidden_state`",
        "max": "`sentence_embedding` holds the largest of each number over the tokens that the mask shows",
    }[pooling.pool]
    library, pipeline = (
        ("sentence-transformers", "sentence-similarity") if vectors else ("transformers", "feature-extraction")
    )
    return CARD.format(
        front=front_matter(card, library, pipeline),
        name=escaped(card.name),
        model_type=manifest.model_type,
        max_length=manifest.max_length,
        gives=gives + ", of length 1" * pooling.normalise,
        load=VECTORS if vectors else TOKENS,
        licence=licence(card),
    )


VECTORS = """from pathlib import Path
from compress import Bundle
from sentence_transformers import SentenceTransformer

SentenceTransformer(".").encode(["a text"])  # with torch
Bundle.load(Path(".")).embed(["a text"])  # int8, without torch"""
TOKENS = """from transformers import AutoModel, AutoTokenizer

model, tokenizer = AutoModel.from_pretrained("."), AutoTokenizer.from_pretrained(".")
vectors = model(**tokenizer("a text", return_tensors="pt")).last_hidden_state"""
