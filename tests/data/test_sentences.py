"""Documents as sentences of tokens, and the special tokens around one text and a pair."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from compress.data.corpus import Corpus, Document, tokenised_documents
from compress.data.masking import Frame
from compress.errors import DataError
from tests import tiny


def corpus(*texts: str) -> Corpus:
    return Corpus("small", "|".join(texts), lambda: iter(texts))


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


def test_a_tokenizer_that_hides_its_frame_is_refused() -> None:
    tokenizer = framed("<s> $A </s>", "<s> $A </s> $B </s>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    with pytest.raises(DataError, match=r"cannot see how it frames 1 text"):
        Frame.from_tokenizer(tokenizer)


def test_documents_are_their_sentences_and_keep_their_numbers() -> None:
    tokenizer = tiny.tokenizer()
    found = list(tokenised_documents(corpus("The film. A plot!\nSo fun", "\u200b", "Never."), tokenizer))
    ids = tokenizer(["the film.", "a plot!", "so fun", "never."], add_special_tokens=False)["input_ids"]
    assert found == [Document(0, ids[:3]), Document(2, ids[3:])]


def test_documents_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.corpus.SENTENCES_PER_CALL", 4)
    read = []

    def texts() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield "The film. A plot."

    stream = tokenised_documents(Corpus("long", "long", texts), tiny.tokenizer())
    for number, document in zip(range(100), stream, strict=False):
        assert document.number == number
        assert len(document.sentences) == 2
        assert len(read) <= number + 5


def test_a_sentence_keeps_the_space_before_it_where_the_tokenizer_keeps_spaces() -> None:
    words = {"<pad>": 0, "a": 1, "Ġa": 2, ".": 3}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>")
    (found,) = tokenised_documents(corpus("a.\na."), tokenizer)
    assert found.sentences == [[1, 3], [2, 3]]


def test_a_parallel_document_is_two_sentences_whatever_is_in_them() -> None:
    texts = ("The film. A plot!\nSo fun. So good", "\u200b\nnever")
    tokenizer = tiny.tokenizer()
    (found,) = tokenised_documents(Corpus("pairs", "pairs", lambda: iter(texts), parallel=True), tokenizer)
    ids = tokenizer(["the film. a plot!", "so fun. so good"], add_special_tokens=False)["input_ids"]
    assert found == Document(0, ids, parallel=True)
