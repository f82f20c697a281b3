"""GGUF files: the folder that one becomes computes and cuts texts as the model that it was made from, or is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.commands.inspect import inspect
from compress.errors import TeacherError
from compress.models import checkpoints, gguf_file
from compress.models.loader import load_model, load_tokenizer
from compress.prompting.local_model import open_model
from compress.provenance import find_missing
from tests import command, generative, tiny

NEEDS_GGUF = pytest.mark.skipif(bool(find_missing("gguf")), reason="the extra gguf is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gguf")


TOKENS = (*generative.GPT2_SPECIAL, "\u0120", *generative.PIECES, "in")


def llama(seed: int = 0, size: int = len(TOKENS)) -> Any:
    return generative.llama(vocab_size=size, seed=seed)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Order the rows of queries or keys as llama.cpp rotates them: in pairs, not in halves of a head."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def write(path: Path, model: Any, change: Callable[[Any], Any] = lambda writer: None, **said: Any) -> Path:
    """Write a Llama over the tokenizer of GPT-2; `change` may add to the file, `said` replaces settings."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), said.pop("architecture", "llama"))
    settings = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    for name, value in settings.items():
        writer.add_uint32(name, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_string("general.license", "apache-2.0")
    writer.add_tokenizer_model(said.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(said.pop("words", "smollm"))
    tokens = said.pop("tokens", TOKENS)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    if tokens is TOKENS:
        writer.add_token_merges(["i n"])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        end = name.partition("self_attn.")[2]
        rows = interleave(weight, heads[end]) if end in heads else weight
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", rows.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama())


@NEEDS_GGUF
def test_it_computes_as_the_model(written: Path) -> None:
    loaded = load_model(checkpoints.resolve(str(written)), AutoModelForCausalLM).model
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, llama()(ids).logits)


@NEEDS_GGUF
def test_its_tokenizer_cuts_off_digits(written: Path) -> None:
    folder = checkpoints.resolve(str(written))
    tokenizer = load_tokenizer(folder)
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2024 x")
    assert [word for word, _ in cut] == ["in", "\u0120", "2", "0", "2", "4", "\u0120x"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 12")["input_ids"]) == ["in", "\u0120", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|endoftext|>", 64)


@NEEDS_GGUF
def test_a_beginning_is_marked_if_the_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), lambda writer: writer.add_add_bos_token(True))
    assert load_tokenizer(checkpoints.resolve(str(path)))("in")["input_ids"] == [0, TOKENS.index("in")]


@NEEDS_GGUF
def test_pieces_of_sentencepiece(tmp_path: Path) -> None:
    """Merges are found from the scores, and a space is put before a text."""
    tokens = tuple(token.replace("\u0120", "\u2581") for token in (*TOKENS[:-1], "\u2581i", "\u2581in"))
    path = write(tmp_path / "tiny.gguf", llama(size=len(tokens)), tokenizer="llama", tokens=tokens)
    tokenizer = load_tokenizer(checkpoints.resolve(str(path)))
    assert tokenizer.tokenize("in a", add_special_tokens=True) == [tokens[0], "\u2581in", "\u2581", "a"]
    assert tokenizer.decode(tokenizer("in a")["input_ids"], skip_special_tokens=True) == "in a"


@NEEDS_GGUF
def test_it_is_converted_once_and_alone(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside the file changes nothing; a folder with one file is that file."""
    folder = checkpoints.resolve(str(written))
    beside = tmp_path / "beside"
    tiny.checkpoint(beside)
    (beside / "model.safetensors").unlink()
    shutil.copy(written, beside / "other.gguf")
    monkeypatch.setattr(gguf_file, "_write", lambda *_: pytest.fail("is converted again"))
    assert checkpoints.resolve(str(beside)) == folder
    assert checkpoints.config_folder(str(beside)) == folder
    assert checkpoints.describe_origin(str(written), folder) == {"license": "apache-2.0"}


@NEEDS_GGUF
def test_a_folder_with_safetensors_is_read_as_before(written: Path, tmp_path: Path) -> None:
    name = tiny.checkpoint(tmp_path / "model")
    shutil.copy(written, tmp_path / "model" / "other.gguf")
    assert checkpoints.resolve(name) == tmp_path / "model"


@NEEDS_GGUF
def test_the_files_beside_it_are_not_read(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path / "tiny.gguf", llama(seed=1))
    folder = checkpoints.resolve(str(tmp_path))
    assert load_tokenizer(folder).get_vocab() == {token: index for index, token in enumerate(TOKENS)}


@NEEDS_GGUF
def test_commands_take_it(written: Path, tmp_path: Path) -> None:
    assert open_model(str(written)).model.config.model_type == "llama"
    assert command.run("export", str(written), "--out", str(tmp_path / "out")).code == 0
    assert "apache-2.0" in (tmp_path / "out" / "README.md").read_text()
    found = inspect(str(written))
    assert (found.form, found.licence, found.facts["class"]) == ("checkpoint", "apache-2.0", "LlamaForCausalLM")


@NEEDS_GGUF
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"architecture": "bert"}, "'bert' is not read"),
        ({"tokenizer": "t5"}, "'t5' is not read"),
        ({"words": "dbrx-x"}, "'dbrx-x'"),
        ({"change": lambda writer: writer.add_rope_scaling_type(scaling())}, "llama.rope.scaling.type is 'yarn'"),
        ({"change": lambda writer: writer.add_key_length(4)}, "llama.attention.key_length is 4"),
        ({"change": lambda writer: writer.add_add_space_prefix(True)}, "add_space_prefix is True"),
        ({"change": lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())}, "weights"),
    ],
)
def test_what_would_be_dropped_is_refused(tmp_path: Path, said: dict[str, Any], expected: str) -> None:
    path = write(tmp_path / "tiny.gguf", llama(), **said)
    out = tmp_path / "out"
    assert command.refused(command.run("export", str(path), "--out", str(out), "--quiet"), out, expected)


def scaling() -> Any:
    import gguf

    return gguf.RopeScalingType.YARN


@NEEDS_GGUF
def test_a_damaged_file_is_refused(written: Path, tmp_path: Path) -> None:
    content = written.read_bytes()
    path = tmp_path / "tiny.gguf"
    for size in (40, len(content) // 3, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(TeacherError, match=r"tiny\.gguf: cannot be loaded"):
            checkpoints.resolve(str(path))


@NEEDS_GGUF
def test_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("a text")
    with pytest.raises(TeacherError, match="does not begin"):
        checkpoints.check(str(tmp_path))
    with pytest.raises(TeacherError, match="no such file"):
        checkpoints.check("missing.gguf")


def test_parts_and_several_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(TeacherError, match="llama-gguf-split --merge"):
        checkpoints.check(str(tmp_path))
    (tmp_path / "a-00001-of-00002.gguf").rename(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(TeacherError, match=r"a\.gguf and b\.gguf"):
        checkpoints.check(str(tmp_path))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_file, "find_missing", lambda extra: f"{extra}: not installed")
    with pytest.raises(TeacherError, match="pip install 'gguf"):
        checkpoints.check(str(tmp_path / "a.gguf"))
