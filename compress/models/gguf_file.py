"""Turn a GGUF file into a checkpoint folder in the hub's layout, once, in the cache, so
that no other code has to know GGUF.

The package `gguf` (extra `gguf`) and transformers read the file. Whatever they would
silently drop is refused here by name: settings that change what the model computes,
tensors without a place in it, and tokenizers that would split texts differently.

Imports neither torch nor transformers until a file is converted.
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from compress.errors import TeacherError
from compress.models.folder import MODULES, explain_load_errors
from compress.progress import note
from compress.provenance import find_missing, install_command

GGUF: Final = ".gguf"
_OTHER_WEIGHTS: Final = ("*.safetensors", "*.bin")
_TOKENIZERS: Final = ("gpt2", "llama")
"""Byte-level BPE, and SentencePiece's BPE. Others have normalisers that transformers
does not read from GGUF."""
_WORDS_OF_GPT2: Final = ("gpt-2", "phi-2")
_SINGLE_DIGITS: Final = ("refact", "smollm", "starcoder")
"""Names in GGUF of pre-tokenizers that split as GPT-2 does; _SINGLE_DIGITS: after
splitting off each digit."""
_GIVE_ORIGINAL: Final = "Use the checkpoint that this file was made from"


def find(place: Path) -> Path | None:
    """Return the GGUF file at a path: the file itself, or the only one in a folder
    without other weights.

    Raises TeacherError for a folder with several, and for a file of several parts.
    """
    files = [place] if place.is_file() else sorted(place.glob(f"*{GGUF}"))
    files = [file for file in files if file.suffix == GGUF]
    others = (*_OTHER_WEIGHTS, MODULES)
    if not files or any(any(place.glob(each)) for each in others):
        return None
    if re.search(r"-\d+-of-\d+\.gguf$", files[0].name):
        raise TeacherError(
            f"{files[0]}: is one part of a GGUF file; expected a whole file: join the "
            "parts with `llama-gguf-split --merge` of llama.cpp"
        )
    if len(files) > 1:
        raise TeacherError(
            f"{place}: has {len(files)} GGUF files, such as {files[0].name} and "
            f"{files[1].name}; expected one: pass the path of the file"
        )
    return files[0]


def check(file: Path) -> None:
    """Raise TeacherError if the packages that read GGUF are missing or too old, or if
    the file does not begin like a GGUF file."""
    if absent := find_missing("gguf"):
        raise TeacherError(
            f"{file}: GGUF files need packages ({absent}): {install_command('gguf')}"
        )
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise TeacherError(
                f"{file}: does not begin with the letters GGUF: it is damaged, or not "
                "a GGUF file; download it again"
            )


def convert(file: Path) -> Path:
    """Return the folder of a GGUF file's model, which is written to the cache the first
    time. Raises TeacherError."""
    from compress.data import cache

    check(file)
    libraries = (f"{each} {version(each)}" for each in ("gguf", "transformers"))
    key = cache.digest(file, *libraries)

    def make(folder: Path) -> None:
        note(f"{file}: converting it to safetensors, once, in {cache.home()}")
        _write(file, folder)

    return cache.load_or_create(cache.home() / "gguf" / key, make)


def _write(file: Path, folder: Path) -> None:
    """Write config, weights in float32, tokenizer and licence."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    from compress.models.flops import count_parameters
    from compress.models.loader import load_gguf

    said, weights = _read(file)
    family = said.get("general.architecture")
    known = sorted(GGUF_CONFIG_MAPPING.keys() - {"general", "tokenizer"})
    if family not in known:
        raise TeacherError(
            f"{file}: its architecture {family!r} is not read; expected one of "
            f"{', '.join(known)}. {_GIVE_ORIGINAL}"
        )
    words = said.get("tokenizer.ggml.model")
    if words not in _TOKENIZERS:
        raise TeacherError(
            f"{file}: its tokenizer {words!r} is not read; expected one of "
            f"{', '.join(_TOKENIZERS)}. {_GIVE_ORIGINAL}"
        )
    model, tokenizer = load_gguf(file)
    _check_settings(file, said, model.config)
    _check_tokenizer(file, said, tokenizer)
    held = count_parameters(model)
    if weights != held:
        raise TeacherError(
            f"{file}: holds {weights:,} weights, and {type(model).__name__} of "
            f"transformers has {held:,}: some weights would be ignored, such as the "
            f"factors of Llama 3's positions. {_GIVE_ORIGINAL}"
        )
    tokenizer.model_max_length = said[f"{family}.context_length"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if licence := said.get("general.license"):
        card = f"---\nlicense: {json.dumps(licence)}\n---\n"
        (folder / "README.md").write_text(card, encoding="utf-8")


def _read(file: Path) -> tuple[dict[str, Any], int]:
    """Return the metadata of a file, without its lists of tokens, and the number of its
    weights."""
    from gguf import GGUFReader

    with explain_load_errors(file):
        reader = GGUFReader(file)
        said = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.ggml.") or len(field.data) == 1
        }
    return said, sum(int(each.n_elements) for each in reader.tensors)


def _check_settings(file: Path, said: Mapping[str, Any], config: Any) -> None:
    """Raise TeacherError for a setting of the model that is not in its config."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    family = said["general.architecture"]
    read: Any = GGUF_CONFIG_MAPPING[family]
    head_width = getattr(config, "head_dim", None)
    if head_width is None:
        head_width = config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", 1)
    known = {
        "attention.key_length": head_width,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attention.value_length": head_width,
        "rope.dimension_count": int(head_width * share),
        "rope.freq_base": rope.get("rope_theta"),
    }
    for name, value in said.items():
        start, _, setting = name.partition(".")
        if start != family or value in (0, "", "none"):
            continue
        if setting not in known and setting in read:
            continue
        if value != known.get(setting, getattr(config, setting, None)):
            raise TeacherError(
                f"{file}: {name} is {value!r}, which transformers ignores, so the "
                f"model would not compute what it was trained to. {_GIVE_ORIGINAL}"
            )


def _check_tokenizer(file: Path, said: Mapping[str, Any], tokenizer: Any) -> None:
    """Let a byte-level tokenizer split texts into words as the file says. Raises
    TeacherError for a tokenizer that would make other tokens than the file says."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    words = said.get("tokenizer.ggml.pre")
    # what transformers takes if it does not know the name
    if isinstance(backend.pre_tokenizer, ByteLevel) and words not in _WORDS_OF_GPT2:
        if words not in _SINGLE_DIGITS:
            raise TeacherError(
                f"{file}: tokenizer.ggml.pre is {words!r}, an unknown way to split "
                f"texts into words. {_GIVE_ORIGINAL}"
            )
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    (first, *_) = backend.encode("a", add_special_tokens=False).tokens
    tokens = tokenizer("a")["input_ids"]
    does = {
        "add_bos_token": tokens[0] == tokenizer.bos_token_id,
        "add_eos_token": tokens[-1] == tokenizer.eos_token_id,
        "add_space_prefix": first.startswith(("\u2581", "\u0120")),
    }
    for setting, found in does.items():
        expected = said.get(f"tokenizer.ggml.{setting}", found)
        if expected != found:
            raise TeacherError(
                f"{file}: tokenizer.ggml.{setting} is {expected}, but the tokenizer "
                "that transformers makes of this file behaves otherwise. "
                f"{_GIVE_ORIGINAL}"
            )
