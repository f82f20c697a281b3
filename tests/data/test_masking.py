"""What corruptions know of a vocabulary."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from compress.data import masking
from compress.data.masking import Words, counts
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
def test_marked_beginnings_and_what_has_no_letter_begin_words(mark: str) -> None:
    assert starts(f"{mark}film", f"{mark}a", "s", ",", "ly", "'", "3", mark) == [
        "<pad>", f"{mark}film", f"{mark}a", ",", "'", mark,
    ]  # fmt: skip


def test_a_vocabulary_without_marks_is_of_whole_words() -> None:
    assert starts("film", "a", ",") == ["<pad>", "film", "a", ","]


def test_without_mask_token_the_corruption_that_needs_it_is_refused() -> None:
    with pytest.raises(DataError, match=r"bert\.mask needs a mask token"):
        Words.from_tokenizer(tokenizer("<pad>", "a")).need_mask("bert.mask")
    assert Words.from_tokenizer(tiny.tokenizer()).need_mask("bert.mask") == 4


def test_without_padding_token_it_is_refused() -> None:
    with pytest.raises(DataError, match="no padding token"):
        Words.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))))


def test_counts_are_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "ROWS_PER_CALL", 2)
    rows = Dataset.from_dict({"input_ids": [[1, 2, 2], [4], [], [1, 4, 4, 4]], "length": [3, 1, 0, 4]})
    found = counts(rows, 6)
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 2, 2, 0, 4, 0]
    assert counts(rows.select([3, 0]), 6).tolist() == [0, 2, 2, 0, 3, 0]
    assert Words.from_tokenizer(tiny.tokenizer(), found).counts_V is found


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="token 4 does not exist: the vocabulary has 4"):
        counts(Dataset.from_dict({"input_ids": [[4]]}), 4)
