"""Texts in, vectors out: an encoder in the layout of sentence-transformers, with its ONNX files.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json  modules.json  1_Pooling/  README.md
    onnx/model.onnx  onnx/model_quantized.onnx  contents.json

Loading and embedding import neither torch nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from compress.errors import BundleError, ExportError
from compress.exporters import manifest as contents
from compress.exporters.manifest import Contents
from compress.records.certificate import Certificate

if TYPE_CHECKING:
    from compress.exporters.predictor import Row

Pool = Literal["mean", "cls", "max"]
POOLS: tuple[Pool, ...] = get_args(Pool)
MODULES, POOLING, SIZES = "modules.json", "1_Pooling", "sentence_bert_config.json"
UNLIMITED = 10**6
"""What a tokenizer without a limit calls its limit is above this."""


@dataclass(frozen=True)
class Reading:
    """pool        the mean of all tokens, the first token, or the largest of each number; None: tokens only
    normalise   whether the vector is divided by its length
    max_length  tokens a text is cut to, where the folder says so
    """

    pool: Pool | None
    normalise: bool = False
    max_length: int | None = None

    @classmethod
    def of(cls, folder: Path) -> "Reading":
        """What a folder says; a folder without modules.json is an encoder that gives tokens only.

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
        """The files that sentence-transformers, of any version, reads this from."""
        prefix = "sentence_transformers.models"
        kinds = [("", "Transformer"), (POOLING, "Pooling"), *([("2_Normalize", "Normalize")] * self.normalise)]
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"{prefix}.{kind}"}
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
        _write(folder / MODULES, modules)
        _write(folder / POOLING / "config.json", {"word_embedding_dimension": width, **modes})
        _write(folder / SIZES, {"max_seq_length": max_length, "do_lower_case": False})


def _pool(path: Path) -> Pool:
    """Of both forms that sentence-transformers writes: a name, or a yes or no for each."""
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


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


Floats = NDArray[np.float32]
FILES = {"fp32": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
"""The names that sentence-transformers, optimum and transformers.js look for."""

MAX_DROP = 0.01
"""How far the order of similarities may be from fp32's (1 - Spearman) for an int8 file to be certified."""


@dataclass(frozen=True)
class Embeddings:
    """A folder of embeddings on disk, checked. `reading`: how tokens become a vector."""

    path: Path
    contents: Contents
    reading: Reading

    @classmethod
    def load(cls, path: Path) -> "Embeddings":
        """Raises BundleError for a folder that is none, or is damaged."""
        return cls(path, Contents.read(path, "embeddings"), Reading.of(path))

    def embed(self, texts: Sequence[str], *, precision: Literal["fp32", "int8"] = "int8", threads: int = 1) -> Floats:
        """A vector (texts, hidden) for each text. Each is run by itself: an int8 graph scales activations by the
        whole batch. Raises BundleError where it is not known how to pool."""
        if self.reading.pool is None:
            raise BundleError(
                f"{self.path}: gives token states only; to get a vector per text, export it again with a pooling"
            )
        return embedded(self.path, self.path / FILES[precision], texts, self.contents.max_length, threads)

    def certificate(self) -> Certificate | None:
        """Read what was measured of the int8 file when it was written; None where it was not."""
        from compress.exporters.session import certificate

        text = certificate(self.path / FILES["int8"])
        return Certificate.from_json(text) if text else None


def embedded(folder: Path, file: Path, texts: Sequence[str], max_length: int, threads: int) -> Floats:
    """What `sentence_embedding` of an ONNX file is for each text, with the tokenizer of the folder."""
    from concurrent.futures import ThreadPoolExecutor

    from compress.data.windows import plain
    from compress.exporters.predictor import open_tokenizer, rows_of
    from compress.exporters.session import open_session

    tokenizer: Any = plain(open_tokenizer(folder))
    tokenizer.enable_truncation(max_length)
    session = open_session(file, threads=1)
    names = [node.name for node in session.get_inputs()]

    def vector(row: "Row") -> Floats:
        feeds = {name: np.asarray([row[name]], dtype=np.int64) for name in names}
        found: Floats = session.run(["sentence_embedding"], feeds)[0][0]
        return found

    with ThreadPoolExecutor(threads) as pool:
        vectors = list(pool.map(vector, rows_of(tokenizer, texts)))
    return np.stack(vectors) if vectors else np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Likeness:
    """How alike two embeddings of the same texts are.

    cosine    mean cosine of a text's two vectors
    spearman  Spearman's rho of the cosines of all pairs of texts: whether the same texts are near each other
    """

    cosine: float
    spearman: float
    texts: int

    @classmethod
    def of(cls, one: Floats, other: Floats) -> "Likeness":
        """Of (texts, hidden) each; at least three texts. Zero vectors are like nothing."""
        from scipy.stats import rankdata

        a, b = (_unit(vectors.astype(np.float64)) for vectors in (one, other))
        upper = np.triu_indices(len(a), 1)
        ranks = [rankdata((vectors @ vectors.T)[upper]) for vectors in (a, b)]
        return cls(float((a * b).sum(1).mean()), float(np.corrcoef(*ranks)[0, 1]), len(a))


def write(
    path: Path,
    *,
    encoder: Any,
    tokenizer: Any,
    reading: Reading,
    max_length: int,
    name: str,
    texts: Sequence[str] = (),
    data: str = "",
    opset: int = 17,
) -> Embeddings:
    """Ships an encoder: weights, tokenizer, ONNX in fp32 and int8, and how to pool.

    `texts`, of the corpus `data`: what int8 is compared with fp32 on; its certificate goes into the file. Where the
    reading knows no pooling, or there are no texts, nothing is certified. Raises ExportError as `to_onnx` does.
    """
    from compress.exporters.int8 import quantize_dynamic
    from compress.exporters.onnx import Pooled, as_float32, makes_segments, to_onnx
    from compress.models.saving import save_checkpoint

    plain = as_float32(encoder)
    with contents.made(path, "embeddings", plain.config.model_type, max_length) as folder:
        save_checkpoint(folder, plain, tokenizer, max_length)
        if reading.pool is not None:
            reading.write(folder, plain.config.hidden_size, max_length)
        fp32, int8 = (folder / file for file in FILES.values())
        to_onnx(Pooled(plain, reading), fp32, opset=opset, segments=makes_segments(tokenizer))
        quantize_dynamic(fp32, int8)
        if reading.pool is not None and texts:
            exact, small = (embedded(folder, file, texts, max_length, threads=1) for file in (fp32, int8))
            _certify(int8, exact, small, data)
        (folder / "README.md").write_text(_card(name, plain.config.model_type, reading, max_length), encoding="utf-8")
    return Embeddings.load(path)


def _certify(path: Path, exact: Floats, small: Floats, data: str) -> None:
    import onnxruntime

    from compress.exporters.session import certified

    like = Likeness.of(exact, small)
    drop = 1.0 - like.spearman
    proof = Certificate(
        artefact=FILES["int8"],
        method="dynamic int8",
        metric="spearman of similarities with fp32's",
        before=1.0,
        after=like.spearman,
        max_drop=MAX_DROP,
        agreement=like.cosine,
        max_logit_difference=float(np.abs(exact - small).max()),
        rows=like.texts,
        split="",
        data=data,
        device="local",
        runtime=f"onnxruntime {onnxruntime.__version__}",
        certified=drop <= MAX_DROP,
        reason=f"mean cosine with fp32 {like.cosine:.4f}; the order of similarities changes by {drop:.4f}",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    certified(path, path, proof)


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return scaled


CARD = """---
library_name: {library}
pipeline_tag: {tag}
tags: [compress, onnx, int8]
---

# {name}

{model_type} encoder of texts of at most {max_length} tokens: {gives}. Made with compress.

`onnx/model.onnx` is the model in float32, `onnx/model_quantized.onnx` in int8. Inputs: input_ids, attention_mask and,
where the model has segments, token_type_ids.
"""


def _card(title: str, model_type: str, reading: Reading, max_length: int) -> str:
    from compress.exporters.card import escaped

    gives = {
        None: "`last_hidden_state`, a vector for each token",
        "mean": "`sentence_embedding` is the mean of `last_hidden_state` over the tokens that the mask shows",
        "cls": "`sentence_embedding` is the first token of `last_hidden_state`",
        "max": "`sentence_embedding` holds the largest of each number over the tokens that the mask shows",
    }[reading.pool]
    vectors = reading.pool is not None
    return CARD.format(
        library="sentence-transformers" if vectors else "transformers",
        tag="sentence-similarity" if vectors else "feature-extraction",
        name=escaped(title),
        model_type=model_type,
        max_length=max_length,
        gives=gives + ", of length 1" * reading.normalise,
    )
