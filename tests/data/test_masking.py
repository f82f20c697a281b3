"""What corruptions know of a vocabulary, and how a tokenizer frames one text and a pair."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from compress.data import masking
from compress.data.masking import Frame, Words, count_tokens
from compress.errors import DataError
from tests import tiny


def tokenizer(*tokens: str, **special: str) -> PreTrainedTokenizerFast:
    model = Tokenizer(WordLevel({token: n for n, token in enumerate(tokens)}, unk_token=tokens[0]))
    return PreTrainedTokenizerFast(tokenizer_object=model, **({"pad_token": tokens[0]} | special))


def starts(*tokens: str) -> list[str]:
    found = Words.from_tokenizer(tokenizer("<pad>", *tokens)).starts_V.tolist()
    return [token for token, start in zip(("<pad>", *tokens), found, strict=True) if start]


def test_word_pieces() -> None:
    known = Words.from_tokenizer(tiny.tokenizer())
    size = len(tiny.SPECIAL) + len(tiny.WORDS)
    assert (known.size, known.pad, known.mask) == (size, 0, 4)
    assert known.special_V.tolist() == [True] * 5 + [False] * len(tiny.WORDS)
    assert known.starts_V.tolist() == [True] * 5 + [not word.startswith("##") for word in tiny.WORDS]
    assert known.counts_V is None


@pytest.mark.parametrize("mark", ["▁", "Ġ"])
def test_word_starts_by_mark(mark: str) -> None:
    assert starts(f"{mark}film", f"{mark}a", "s", ",", "ly", "'", "3", mark) == [
        "<pad>", f"{mark}film", f"{mark}a", ",", "'", mark,
    ]  # fmt: skip


def test_word_starts_without_marks() -> None:
    assert starts("film", "a", ",") == ["<pad>", "film", "a", ","]


def test_missing_mask_token() -> None:
    with pytest.raises(DataError, match=r"bert\.mask needs a mask token"):
        Words.from_tokenizer(tokenizer("<pad>", "a")).need_mask("bert.mask")
    assert Words.from_tokenizer(tiny.tokenizer()).need_mask("bert.mask") == 4


def test_without_padding_token_it_is_refused() -> None:
    with pytest.raises(DataError, match="no padding token"):
        Words.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))))


def test_counts_are_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "ROWS_PER_MASK", 2)
    rows = Dataset.from_dict({"input_ids": [[1, 2, 2], [4], [], [1, 4, 4, 4]], "length": [3, 1, 0, 4]})
    found = count_tokens(rows, 6)
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 2, 2, 0, 4, 0]
    assert count_tokens(rows.select([3, 0]), 6).tolist() == [0, 2, 2, 0, 3, 0]
    assert Words.from_tokenizer(tiny.tokenizer(), found).counts_V is found


def test_token_beyond_the_vocabulary() -> None:
    with pytest.raises(DataError, match="token 4 is not in the vocabulary of 4"):
        count_tokens(Dataset.from_dict({"input_ids": [[4]]}), 4)


# Frames


def framed(single: str, pair: str, **options: object) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with ids <s> 0, </s> 1, <pad> 2, a 3, b 4, and these templates."""
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "a": 3, "b": 4}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", **options)


TYPED = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}


@pytest.mark.parametrize(
    ("single", "pair", "expected"),
    [
        ("<s> $A </s>", "<s> $A </s> $B </s>", ([0, 3, 4, 1], [0, 3, 4, 1, 4, 1], 2, 3)),
        ("<s> $A </s>", "<s> $A </s> </s> $B </s>", ([0, 3, 4, 1], [0, 3, 4, 1, 1, 4, 1], 2, 4)),
        ("$A </s> <s>", "$A </s> $B </s> <s>", ([3, 4, 1, 0], [3, 4, 1, 4, 1, 0], 2, 3)),
        ("$A", "$A $B", ([3, 4], [3, 4, 4], 0, 0)),
    ],
)
def test_a_frame_is_what_the_tokenizer_writes(single: str, pair: str, expected: tuple[list[int], ...]) -> None:
    tokenizer = framed(single, pair)
    frame = Frame.from_tokenizer(tokenizer)
    assert frame.single([3, 4]) == {"input_ids": expected[0]} == {"input_ids": tokenizer("a b")["input_ids"]}
    assert frame.pair([3, 4], [4]) == {"input_ids": expected[1]} == {"input_ids": tokenizer("a b", "b")["input_ids"]}
    assert (frame.room(), frame.room(pair=True)) == expected[2:]


def test_token_types_are_the_tokenizers_own() -> None:
    tokenizer = framed("$A:0 </s>:0 <s>:2", "$A:0 </s>:0 $B:1 </s>:1 <s>:2", **TYPED)  # as XLNet frames
    frame = Frame.from_tokenizer(tokenizer)
    assert frame.single([3, 4])["token_type_ids"] == [0, 0, 0, 2]
    assert frame.pair([3], [4, 4]) == {"input_ids": [3, 1, 4, 4, 1, 0], "token_type_ids": [0, 0, 1, 1, 1, 2]}
    whole = tokenizer("a", "b b")
    assert frame.pair([3], [4, 4]) == {name: whole[name] for name in ("input_ids", "token_type_ids")}


def test_tokenizer_without_a_frame() -> None:
    tokenizer = framed("<s> $A </s>", "<s> $A </s> $B </s>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    with pytest.raises(DataError, match=r"cannot find its special tokens around 1 text"):
        Frame.from_tokenizer(tokenizer)
