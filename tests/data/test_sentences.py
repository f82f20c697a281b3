"""Sentences that are encoded one by one have the tokens of their text, and blocks are those of a token at a time."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from compress.data.corpus import Corpus, encode_corpus, iterate_documents
from compress.data.encoder import encoder_of
from compress.data.encoding_processes import encode_documents
from compress.data.sentences import RunningTextEncoder, split_sentences
from tests import tiny
from tests.data import blocks_by_token

SCRIPTS = tuple(
    words.split("|")
    for words in (
        "the|film|is|Good|and|was|not|so|dull|café|naïve|don't|3.5|U.S.|Mr.|e.g.|[SEP]|<s>|x1",
        "这|部|电影|很|好看|我们|看|了|两|遍",
        "이|영화는|정말|재미있었다|배우들도|좋았다",
        "😀|👩\u200d👩|½|ﬁne|e\u0301|\u0301|\u200bzero|\x1c|\x85|\xa0|" + "a" * 150,
    )
)
ENDS = (".", "!", "?", "。", "！", ".”", '."', ".)", "。」", "...", ".'", "")
FEW = ["The film is good. So fun!\nIt was dull."] * 20
BETWEEN = (" ", " ", " ", "", "  ", "\n", " \n\t", "\n\n", "\u3000", "\xa0", "\x1c", "\x0b")


def document(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.choice((0, 1, 2, 5, 20, 60))):
        script = rng.choice(SCRIPTS)
        words = [rng.choice(script) for _ in range(rng.choice((1, 2, 5, 13, 40)))]
        parts += [rng.choice(("", "", '"', "“", "(")), rng.choice((" ", " ", "")).join(words)]
        parts += [rng.choice(ENDS), rng.choice(BETWEEN)]
    return "".join(parts)


def documents(seed: str, count: int = 60) -> list[str]:
    rng = random.Random(seed)
    long = " ".join(rng.choice(SCRIPTS[0]) for _ in range(6000))
    return [*(document(rng) for _ in range(count)), long, "x" * 25_000 + ". Y", "", " \n "]


def trained(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator([*FEW, *(document(random.Random(number)) for number in range(40))], trainer)
    framed = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    tokenizer.post_processor = framed
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def word_piece(lower: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL))


def byte_level(*, prefix: bool = False, regex: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet))


def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return trained(tokenizer, trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>"))


def right_stripping() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token that takes the space after it, across the end of a line."""
    made = byte_level()
    made.add_tokens([AddedToken("film", rstrip=True)])
    return made


def trimmed() -> PreTrainedTokenizerFast:
    """Make a tokenizer that reports no characters for a token of spaces, as RoBERTa's."""
    made = byte_level()
    backend: Any = made.backend_tokenizer
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), backend.post_processor])
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "word pieces": lambda: word_piece(False),
    "word pieces, lower case": lambda: word_piece(True),
    "BERT's": tiny.tokenizer,
    "bytes": byte_level,
    "bytes, prefix": lambda: byte_level(prefix=True),
    "bytes, not split": lambda: byte_level(regex=False),
    "bytes, a token that strips": right_stripping,
    "bytes, trimmed": trimmed,
    "metaspace": metaspace,
}
APART = {"word pieces", "word pieces, lower case", "BERT's", "bytes", "bytes, prefix", "bytes, trimmed"}
"""The kinds whose sentences are encoded one by one."""


@pytest.mark.parametrize("length", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_a_token_at_a_time(kind: str, length: int) -> None:
    tokenizer = KINDS[kind]()
    texts = documents(kind)
    found = encode_corpus(Corpus(kind, f"{kind} {length}", lambda: iter(texts)), tokenizer, length)
    expected = list(blocks_by_token.blocks(texts, tokenizer, length))
    assert found["input_ids"][:] == [row["input_ids"] for row in expected]
    assert found["document"][:] == [row["document"] for row in expected]
    assert found["length"][:] == [len(row["input_ids"]) for row in expected]
    assert found["index"][:] == list(range(len(expected)))
    assert not any(any(row.get("token_type_ids", ())) for row in expected)


CODE = "def f(x):\n    if x:\n        return 1.  \n\n    return 2.\n\nThe end. "


@pytest.mark.parametrize("kind", KINDS)
def test_a_causal_language_model_reads_the_text_unchanged(kind: str) -> None:
    tokenizer = KINDS[kind]()
    texts = [text for text in [CODE, CODE * 600, f"\n {CODE}", *documents(kind)] if text.strip()]
    corpus = Corpus(kind, kind, lambda: iter(texts)).with_line_ends()
    found: list[list[int]] = [[] for _ in texts]
    for document in iterate_documents(corpus, tokenizer):
        found[document.number] = [token for sentence in document.sentences for token in sentence]
    assert found == tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_which_sentences_are_encoded_one_by_one(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(number, FEW[0]) for number in range(1500)]
    whole = []
    encode_whole = RunningTextEncoder.encode_whole

    def counted(self: RunningTextEncoder, batch: Any) -> Any:
        whole.extend(batch)
        return encode_whole(self, batch)

    monkeypatch.setattr(RunningTextEncoder, "encode_whole", counted)
    found = list(encode_documents(texts, encoder_of(KINDS[kind]())))
    assert np.array_equal(np.concatenate([each.documents for each in found]), np.repeat(np.arange(1500), 3))
    assert (len(whole) < len(texts)) == (kind in APART)
    assert ("cross sentence boundaries" in capsys.readouterr().err) == (kind == "bytes, not split")


def test_sentences_end_where_they_did() -> None:
    rng = random.Random(1)
    for text in [*documents("ends", 300), "a.  b", ".", "。", "a. ", "a b" * 20_000, "é" * 30_000]:
        for line in map(str.strip, text.splitlines()):
            old = [line[begin:end] for begin, end in blocks_by_token._find_sentences(line)]
            assert list(split_sentences(line)) == old
    marks = " .!?\"')]”’。！？aA\u3000"
    for _ in range(3000):
        line = "".join(rng.choices(marks, k=rng.randint(0, 12))).strip()
        assert list(split_sentences(line)) == [line[i:j] for i, j in blocks_by_token._find_sentences(line)]
