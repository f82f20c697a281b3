"""Fast libraries give the rows of `tokenizers`, or are not used."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from compress.data import fast_tokens
from compress.data.encoder import MANY_TEXTS, TextEncoder, TokenizerSettings, encoder_of
from compress.data.fast_tokens import COMPARED_CHARACTERS, FIXED_STRINGS, TokenArrays, difficult_strings, open_fast
from compress.errors import DataError
from tests import tiny

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
STRINGS = 1500
"""Of each kind that are drawn."""


def word_piece(lower: bool) -> Tokenizer:
    """Make a WordPiece tokenizer that knows every letter of the fixed strings."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, trainers.WordPieceTrainer(vocab_size=900, special_tokens=SPECIAL))


def byte_level(pattern: str = "", *, normalizer: Any = None, missing: str = "") -> Tokenizer:
    """Make a tokenizer like RoBERTa's, or with a pattern, like those of newer models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*missing})
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet))


def trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator([*FIXED_STRINGS, *FIXED_STRINGS, *tiny.WORDS], trainer)
    framed = processors.TemplateProcessing("<s> $A:1 </s>:2", special_tokens=[("<s>", 2), ("</s>", 3)])
    tokenizer.post_processor = framed
    return tokenizer


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
    "word pieces": ("nanotoken", lambda: word_piece(False)),
    "word pieces, lower case": ("nanotoken", lambda: word_piece(True)),
    "BERT's": ("nanotoken", lambda: tiny.tokenizer().backend_tokenizer),
    "bytes": ("gigatoken", byte_level),
    "bytes as Qwen's": ("gigatoken", lambda: byte_level(QWEN, normalizer=normalizers.NFC())),
}


def drawn(seed: str, count: int = STRINGS) -> list[str]:
    """Draw strings of characters of every plane, parts of difficult strings and special tokens."""
    rng = random.Random(seed)
    pieces = ["".join(FIXED_STRINGS), " ".join([*SPECIAL, "[SEP]", "[CLS]"]), " ".join(tiny.WORDS)]
    texts = []
    for _ in range(count):
        text = ""
        for _ in range(rng.randint(0, 15)):
            piece = rng.choice(pieces)
            begin = rng.randrange(len(piece))
            text += piece[begin : begin + rng.randint(0, 12)]
            number = rng.randrange(rng.choice((0x80, 0x600, 0x3100, 0x10000, 0x110000)))
            text += "" if 0xD800 <= number < 0xE000 else chr(number)
        texts.append(text)
    return texts


def encoder(backend: Tokenizer, **settings: Any) -> TextEncoder:
    return TextEncoder.from_backend(backend, TokenizerSettings(pad_token_id=0, **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_texts_have_the_rows_of_tokenizers(kind: str) -> None:
    library, make = KINDS[kind]
    pytest.importorskip(library)
    backend = make()
    texts = drawn(kind)
    for side, length in (("right", None), ("right", 9), ("left", 5)):
        made = encoder(backend, truncation_side=side)
        assert made.fast is not None
        found = made.arrays(texts, length)
        assert made.fast.agrees, "not dropped"
        made.truncate(length, pair=False)
        expected = made.backend.encode_batch(texts)
        assert list(found.rows()) == [(row.ids, row.type_ids) for row in expected]
        assert made.encode(texts, length) == [
            {"input_ids": row.ids, "attention_mask": [1] * len(row.ids), "token_type_ids": row.type_ids}
            for row in expected
        ]
    made.backend.no_truncation()
    bare = made.backend.encode_batch(texts, add_special_tokens=False)
    assert [ids for ids, _ in made.piece_arrays(texts).rows()] == [row.ids for row in bare]


def test_every_character_has_the_tokens_of_tokenizers() -> None:
    """Every 23rd one, beside letters: a library has tables of its own of what is a letter, a mark or a space."""
    texts = [f"a{chr(code)}b {chr(code)}" for code in range(0, 0x110000, 23) if not 0xD800 <= code < 0xE000]
    for library, make in (("nanotoken", lambda: word_piece(True)), ("gigatoken", byte_level)):
        pytest.importorskip(library)
        made = encoder(make())
        assert made.fast is not None
        assert made.fast.library.find_difference(texts) is None


def wrong(backend: Tokenizer, on: str) -> Callable[[str], fast_tokens.EncodeBatch]:
    """Make a library that gives a text that contains `on` another first token."""

    def encode_batch(texts: list[str]) -> tuple[Any, Any]:
        rows = [each.ids for each in backend.encode_batch(texts, add_special_tokens=False)]
        for text, row in zip(texts, rows, strict=True):
            if on in text:
                row[0] += 1
        arrays = TokenArrays.from_rows(rows)
        return arrays.ids, arrays.bounds

    return lambda state: encode_batch


@pytest.fixture(autouse=True)
def opened_anew() -> None:
    fast_tokens._open_library.cache_clear()


def test_a_vocabulary_without_a_byte_is_left_to_tokenizers() -> None:
    """SmolLM2's has no token for the byte 4, and its library then raises."""
    assert open_fast(byte_level(missing="\u0104"), "tiny") is None


@pytest.mark.parametrize("on", ["GOOD film", "my own text"])
def test_a_library_with_other_rows_is_dropped(
    on: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where difficult strings differ as well as where only the user's do."""
    backend = tiny.tokenizer().backend_tokenizer
    monkeypatch.setattr(fast_tokens, "_open_nanotoken", wrong(Tokenizer.from_str(backend.to_str()), on))
    made = encoder(backend)
    texts = [f"a good film {number}" for number in range(MANY_TEXTS)] + ["my own text"]
    expected = made.encode(texts[:100], 8) + made.encode(texts[100:], 8)
    assert not capsys.readouterr().err, "few texts need no library"
    for _ in range(2):
        assert made.encode(texts, 8) == expected
        assert [ids for ids, _ in made.arrays(texts, 8).rows()] == [row["input_ids"] for row in expected]
    (line,) = capsys.readouterr().err.splitlines()
    assert "tokenizer.json" in line
    assert on in line


def test_only_the_first_texts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tiny.tokenizer().backend_tokenizer
    monkeypatch.setattr(fast_tokens, "_open_nanotoken", wrong(Tokenizer.from_str(backend.to_str()), "@@@"))
    fast = open_fast(backend, "mine")
    assert fast is not None
    first = ["a good film"] * (COMPARED_CHARACTERS // 11 + 1)
    assert fast.encode([*first, "@@@"]) is not None
    assert fast.encode(["a good film"]) is not None
    assert fast.encode(["@@@"]) is not None
    assert fast.agrees


@pytest.mark.parametrize("error", [ImportError, ValueError])
def test_without_a_library_tokenizers_encodes(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise error(name)

    monkeypatch.setattr(fast_tokens, "import_module", missing)
    made = encoder(tiny.tokenizer().backend_tokenizer)
    texts = ["a good film", "", "a bad plot"] * MANY_TEXTS
    rows = made.encode(texts)
    assert made.fast is None
    found = made.arrays(texts)
    assert [ids for ids, _ in found.rows()] == [row["input_ids"] for row in rows]
    assert found.types is not None
    assert [ids for ids, _ in made.piece_arrays(texts).rows()] == made.pieces(texts)


def test_other_tokenizers_have_no_fast_library() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    assert open_fast(words, "words") is None
    split = tiny.tokenizer().backend_tokenizer
    split.encode_special_tokens = True
    assert open_fast(split, "split") is None


@pytest.mark.parametrize("bad", ["a \ud800 b", None, 3, b"a"])
@pytest.mark.parametrize("kind", ["BERT's", "bytes"])
def test_what_is_no_text_is_refused(kind: str, bad: Any) -> None:
    made = encoder(KINDS[kind][1]())
    texts: Any = [*["a good film"] * MANY_TEXTS, bad]
    for encode in (made.encode, made.arrays, made.piece_arrays):
        with pytest.raises(DataError, match=r"surrogate pair|is not a text"):
            encode(texts)
    with pytest.raises(DataError, match="max_length 2 has no room"):
        made.arrays(texts[:-1], 2)


def test_texts_without_tokens_become_a_padding_token() -> None:
    backend = tiny.tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    made = encoder(backend)
    texts = ["a film", "", "plot", "\u200b"] * MANY_TEXTS
    assert [ids for ids, _ in made.arrays(texts).rows()] == [row["input_ids"] for row in made.encode(texts)]
    assert made.arrays(texts).lengths.min() == 1
    with pytest.raises(DataError, match="no tokens"):
        TextEncoder.from_backend(backend).arrays(texts)
    assert made.piece_arrays(texts).lengths.min() == 0


def test_arrays_of_pairs_and_slow_tokenizers_are_those_of_their_rows() -> None:
    texts = [("a good film", "the plot"), ("", "a")] * MANY_TEXTS
    made = encoder_of(tiny.tokenizer())
    rows = made.encode(texts, 7)
    found = made.arrays(texts, 7)
    assert list(found.rows()) == [(row["input_ids"], row["token_type_ids"]) for row in rows]
    assert found.types is not None
    assert found.types.max() == 1
    assert len(made.arrays([])) == 0


def test_what_is_cut_is_copied_nowhere() -> None:
    tokens = TokenArrays.from_rows([[1, 2, 3], [], [4], [5, 6]])
    assert tokens.truncate(3, "left") is tokens
    assert [ids for ids, _ in tokens.truncate(1, "left").rows()] == [[3], [], [4], [6]]
    assert [ids for ids, _ in tokens.truncate(2, "right").rows()] == [[1, 2], [], [4], [5, 6]]
    assert [ids for ids, _ in tokens.take(np.array([3, 1, 0])).rows()] == [[5, 6], [], [1, 2, 3]]


def test_difficult_strings_contain_the_added_tokens() -> None:
    tokenizer = BertTokenizer(vocab={word: at for at, word in enumerate((*tiny.SPECIAL, *tiny.WORDS))})
    tokenizer.add_tokens(["<new>"])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    strings = difficult_strings(tokenizer.backend_tokenizer)
    assert strings == difficult_strings(tokenizer.backend_tokenizer)
    assert {"a<new>b", "a[MASK]b", *FIXED_STRINGS} <= set(strings)
