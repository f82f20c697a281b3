"""The rows of text are the tokens that a tokenizer makes of the text itself, for every kind of tokenizer and script.

Texts are drawn: scripts with and without spaces, quotes, several spaces, line ends, characters that are normalised or
removed, words and sentences longer than a row, documents longer than a passage.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compress.data.corpus import Corpus, encode_corpus, iterate_documents
from tests.campaign.cases import SEED, WHOLE, Record, draw, record

DOCUMENTS = 250 if WHOLE else 8
"""Documents for each tokenizer."""

WORDS = (
    "the film is good and was not so dull that nobody came to see it café naïve don't 3.5 U.S. Mr. e.g. x1 über",
    "这 部 电影 很 好看 我们 看 了 两 遍 结局 出人意料",
    "この 映画 は とても 良かった です 彼 の 物語",
    "이 영화는 정말 재미있었다 배우들도 좋았다",
    "فيلم جيد جدا هذا كان",
    "หนัง เรื่อง นี้ ดี มาก",
    "😀 👩\u200d👩\u200d👧 ½ ﬁne ＡＢＣ e\u0301 \u200bzero\u200b \xadsoft",
)
SPACELESS = (1, 2, 5)
"""The numbers of the scripts without spaces."""
ENDS = (".", "!", "?", "。", "！", ".”", '."', ".)", "。」", "...", "")


def word(rng: random.Random, script: int) -> str:
    if rng.random() < 0.01:
        return rng.choice("aé好") * rng.randint(30, 300)
    return rng.choice(WORDS[script].split())


def sentence(rng: random.Random) -> str:
    script = rng.randrange(len(WORDS))
    words = [word(rng, script) for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 40)))]
    space = "" if script in SPACELESS else " "
    opening = rng.choice(("", "", "", '"', "“", "「", "("))
    return (opening + space.join(words) + rng.choice(ENDS)).capitalize()


def document(rng: random.Random) -> str:
    """Draw a document of 1 to 20 sentences, now and then one that is longer than a passage."""
    parts = []
    for _ in range(200 if rng.random() < 0.05 else rng.choice((1, 2, 3, 8, 20))):
        between = rng.choice((" ", " ", " ", "", "  ", "\n", "\n", " \n\t", "\n\n", "\u3000"))
        parts += [sentence(rng), between]
    return "".join(parts)


def running(document: str) -> str:
    """Return a document as running text: its lines, with a space for each line end."""
    return " ".join(line.strip() for line in document.splitlines() if line.strip())


# Kinds of tokenizers. Each is trained on the words above, so that most are split into several tokens.

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def train(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    texts = [" ".join(WORDS)] * 3 + [running(document(random.Random(number))) for number in range(40)]
    tokenizer.train_from_iterator(texts, trainer)
    between: Any = tokenizer.post_processor
    framed = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    tokenizer.post_processor = processors.Sequence([between, framed]) if between else framed
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


def byte_level(*, prefix: bool, trim: bool) -> PreTrainedTokenizerFast:
    """Make a tokenizer like those of GPT-2, RoBERTa and ModernBERT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet))


def metaspace(*, scheme: str, split: bool = True, before: Sequence[Any] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer like those of T5, ALBERT, XLM-RoBERTa and DeBERTa-v3."""
    tokenizer = Tokenizer(models.Unigram())
    one_space = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), one_space])
    marked = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, marked])
    return train(tokenizer, trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>"))


def llama() -> PreTrainedTokenizerFast:
    """Make a tokenizer like Llama's: every text begins with a space, and nothing is split before BPE."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")  # training on whole texts takes long
    trained = train(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL))
    trained.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("\x00", "removed")  # as good as none
    return trained


def word_piece(*, lower: bool) -> PreTrainedTokenizerFast:
    """Make a tokenizer like those of BERT, DistilBERT and ELECTRA."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return train(tokenizer, trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL))


def whole_words() -> PreTrainedTokenizerFast:
    """Make a tokenizer that marks the ends of words, as the first GPT's and CLIP's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    return train(tokenizer, trainer)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": partial(byte_level, prefix=False, trim=False),
    "byte-level, trimmed": partial(byte_level, prefix=False, trim=True),
    "byte-level, prefix space": partial(byte_level, prefix=True, trim=False),
    "byte-level, prefix space, trimmed": partial(byte_level, prefix=True, trim=True),
    "metaspace, always": partial(metaspace, scheme="always"),
    "metaspace, first": partial(metaspace, scheme="first"),
    "metaspace, never": partial(metaspace, scheme="never"),
    "metaspace, not split": partial(metaspace, scheme="always", split=False),
    "metaspace after punctuation": partial(metaspace, scheme="always", before=[pre_tokenizers.Punctuation()]),
    "metaspace after white space": partial(metaspace, scheme="always", before=[pre_tokenizers.WhitespaceSplit()]),
    "llama": llama,
    "word pieces": partial(word_piece, lower=False),
    "word pieces, lower case": partial(word_piece, lower=True),
    "ends of words": whole_words,
    "bytes": ByT5Tokenizer,
    "characters": CanineTokenizer,
}
WITHOUT_BOUNDS = "metaspace, not split"
"""The kind whose best division of a text depends on all of it, so that only whole documents can be compared."""
make = cache(lambda kind: KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_text_are_the_tokens_of_the_text(
    kind: str, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count documents whose tokens in rows, joined, are not those of the document."""
    if kind != WITHOUT_BOUNDS:
        monkeypatch.setattr("compress.data.sentences.LONGEST_PASSAGE", 3000)
    tokenizer, rng = make(kind), draw("running text", kind)
    texts = [document(rng) for _ in range(DOCUMENTS)]
    corpus = Corpus("drawn", f"{SEED}/{kind}", lambda: iter(texts))
    expected = tokenizer([running(text) for text in texts], add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("", add_special_tokens=True)["input_ids"]
    blocks: list[list[int]] = [[] for _ in texts]
    for row in encode_corpus(corpus, tokenizer, rng.choice((32, 64, 500))):
        inside = row["input_ids"][1:-1] if len(around) == 2 else row["input_ids"][: len(row["input_ids"]) - len(around)]
        blocks[row["document"]] += inside
    sentences: list[list[int]] = [[] for _ in texts]
    for found in iterate_documents(corpus, tokenizer):
        sentences[found.number] = [token for ids in found.sentences for token in ids]
    faults = {
        running(text)[:200]: tokenizer.convert_ids_to_tokens(block)[:60]
        for text, block, whole, right in zip(texts, blocks, sentences, expected, strict=True)
        if not block == whole == right
    }
    record(record_property, "rows of text are its tokens", len(texts), faults)


def test_sentences_are_divided_where_they_begin() -> None:
    """A sentence keeps the space before it; a mark that covers two sentences belongs to the second."""
    texts = ["It was fun. So good!  It was.\nThe end", "你好。今天很好。"]
    corpus = Corpus("few", "few", lambda: iter(texts))

    def sentences(kind: str) -> Iterator[list[str]]:
        tokenizer = make(kind)
        for found in iterate_documents(corpus, tokenizer):
            yield ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in found.sentences]

    first, second = sentences("byte-level")
    assert first == ["ItĠwasĠfun.", "ĠSoĠgood!", "ĠĠItĠwas.", "ĠTheĠend"]
    assert len(second) == 2
    assert second[0].endswith("".join(make("byte-level").tokenize("。")))
    first, second = sentences("metaspace, always")
    assert first == ["▁It▁was▁fun.", "▁So▁good!", "▁It▁was.", "▁The▁end"]
    assert [text.count("▁") for text in second] == [1, 0]
