"""A text file reads every text as its tokenizer does, answers as the bundle does, and is refused where it would not."""

import json
import os
import random
import re
import string
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertTokenizer,
    BigBirdTokenizer,
    CamembertTokenizer,
    DebertaV2Tokenizer,
    MBartTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from compress.data.answers import Answer, Marked, Prediction
from compress.data.encoder import Text, TextEncoder, text_encoder_of
from compress.data.task import Task
from compress.errors import ArgumentError, ExportError
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.manifest import Precision
from compress.exporters.onnx import to_onnx
from compress.exporters.session import open_session, read_model
from compress.exporters.tokenizer import build as frames
from compress.exporters.tokenizer import text_model as texting
from compress.exporters.tokenizer import wordpiece
from compress.exporters.tokenizer.build import RowTemplate, reader
from compress.exporters.tokenizer.bytelevel import ByteLevel
from compress.exporters.tokenizer.charsmap import EXTENDS, find_classes, read_charsmap, write_charsmap
from compress.exporters.tokenizer.nfc import read_composition
from compress.exporters.tokenizer.text_model import (
    TEXTS,
    TokenDifference,
    find_differences,
    list_hard_texts,
    read_proof,
    run_text,
    take_apart,
    text_model,
)
from compress.exporters.tokenizer.unigram import Unigram
from compress.exporters.tokenizer.wordpiece import CharacterMap
from compress.kinds import Kind
from tests import tiny
from tests.campaign.cases import WHOLE

LETTERS = tuple(sorted({*string.ascii_letters, *string.digits, *"".join(TEXTS[4:60])} - {" ", "\u0301"}))
"""Half of what the hard texts are made of has a token, the other half is unknown."""
WORDS = (
    *tiny.WORDS,
    *(letter for letter in LETTERS[::2] if letter.isprintable()),
    *(f"##{letter}" for letter in LETTERS[::2] if letter.isprintable() and letter.isalnum()),
    *("cafe", "##fe", "naive", "한국", "\u1112\u1161\u11ab", "##\u1100\u116e", "中", "strasse", "straße"),
    *("un", "##aff", "##able"),
)


def words(*, lower: bool = True, accents: bool | None = None, chinese: bool = True) -> BertTokenizer:
    vocabulary = dict.fromkeys((*tiny.SPECIAL, *WORDS))
    return BertTokenizer(
        vocab={word: index for index, word in enumerate(vocabulary)},
        do_lower_case=lower,
        strip_accents=accents,
        tokenize_chinese_chars=chinese,
    )


def build_reader(
    encoder: TextEncoder, *, pair: bool = False, max_length: int = 32, kind: Kind = "classification"
) -> tuple[onnx.ModelProto, RowTemplate]:
    """Build the graph of a tokenizer, and the template of its rows."""
    frame = frames.read_template(encoder, pair=pair, max_length=max_length, kind=kind)
    like = onnx.helper.make_model(
        onnx.helper.make_graph([], "none", [], []), opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    )
    return reader(take_apart(encoder), frame, like), frame


def read(tokenizer: Any, texts: Sequence[Text] = (), **settings: Any) -> list[TokenDifference]:
    """Compare a graph of this tokenizer with it, on the hard texts if none are given."""
    encoder = text_encoder_of(tokenizer)
    model, frame = build_reader(encoder, **settings)
    onnx.checker.check_model(model, full_check=False)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return find_differences(session, encoder, frame, list(texts) or list_hard_texts(frame))


def drawn(count: int) -> int:
    """The number of random texts: all of them in the whole campaign, a quarter in the suite."""
    return count if WHOLE else count // 4


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def cached_readers(shared_home: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the graph of each tokenizer once."""
    monkeypatch.setenv("COMPRESS_HOME", str(shared_home))


SETTINGS = [
    pytest.param({}, id="uncased"),
    pytest.param({"lower": False}, id="cased"),
    pytest.param({"lower": True, "accents": False}, id="uncased with accents"),
    pytest.param({"lower": False, "accents": True, "chinese": False}, id="cased without accents"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_hard_texts_are_tokenized_alike(settings: dict[str, bool]) -> None:
    assert read(words(**settings)) == []
    assert read(words(**settings), kind="qa", pair=True, max_length=64) == []


def cut(tokenizer: Any, side: str) -> Any:
    """Let a tokenizer cut off this end of a long text."""
    tokenizer.truncation_side = side
    return tokenizer


@pytest.mark.parametrize(("max_length", "side"), [(5, "right"), (16, "right"), (33, "right"), (16, "left")])
def test_pairs_are_truncated_alike(max_length: int, side: str) -> None:
    assert read(cut(words(), side), pair=True, max_length=max_length) == []


def test_the_beginning_is_cut_off_alike() -> None:
    assert read(cut(words(), "left"), kind="tagging", max_length=12) == []
    assert read(cut(unigram(), "left"), max_length=12) == []


@pytest.mark.parametrize("kind", ["wordpiece", "byte bpe", "unigram"])
def test_special_tokens_that_are_split_are_split_alike(kind: str) -> None:
    tokenizer = {"wordpiece": words, "byte bpe": byte_level, "unigram": unigram}[kind]()
    tokenizer.split_special_tokens = True
    texts = [text for text in TEXTS if "[" in text or "<" in text]
    assert read(tokenizer, texts) == []


def test_random_texts_are_tokenized_alike() -> None:
    draw = random.Random(0)
    pieces = [word.removeprefix("##") for word in WORDS]
    low = [chr(code) for code in (*range(0x250), *range(0x300, 0x370), *range(0x1100, 0x1200), *range(0x4E00, 0x4E20))]
    texts = ["".join(draw.choice(draw.choice((pieces, low, [" "]))) for _ in range(30)) for _ in range(drawn(1500))]
    assert read(words(), texts, max_length=128) == []


@pytest.mark.parametrize("settings", SETTINGS)
def test_words_of_hard_texts_are_tokenized_alike(settings: dict[str, bool]) -> None:
    assert read(words(**settings), kind="tagging", max_length=128) == []


@pytest.mark.parametrize("kind", ["tagging", "qa"])
def test_offsets_of_random_texts_are_alike(kind: Kind) -> None:
    draw = random.Random(1)
    pieces = [word.removeprefix("##") for word in WORDS]
    low = [chr(code) for code in (*range(0x250), *range(0x300, 0x370), *range(0x1100, 0x1200), *range(0xE000, 0xE010))]
    marks = ["http://", "https://t.co/", "@", "#", "-", "'", "’", ".", "&", "_", "[SEP]", "\u200b", " "]
    texts = ["".join(draw.choice(draw.choice((pieces, low, marks))) for _ in range(20)) for _ in range(drawn(800))]
    given = list(zip(texts, reversed(texts), strict=True)) if kind == "qa" else texts
    assert read(words(), given, pair=kind == "qa", max_length=200, kind=kind) == []


@pytest.mark.parametrize(("max_length", "side"), [(8, "right"), (16, "right"), (129, "right"), (16, "left")])
def test_questions_are_truncated_alike(max_length: int, side: str) -> None:
    assert read(cut(words(), side), kind="qa", pair=True, max_length=max_length) == []


MASK = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
AS_ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
KEEPING = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=True)
AS_GPT2 = processors.ByteLevel(trim_offsets=False)
UNTRIMMED = processors.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
)


def byte_level(
    *,
    prefix: bool = False,
    processor: Any = AS_ROBERTA,
    added: Sequence[AddedToken] = (MASK,),
    composed: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on half of the hard texts."""
    tokenizer = Tokenizer(models.BPE())
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS[::2] * 2, *tiny.WORDS * 4], trainer)
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processor
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


BYTE_LEVEL = [
    pytest.param({}, id="as RoBERTa"),
    pytest.param({"prefix": True, "processor": KEEPING}, id="with a space before a text"),
    pytest.param({"prefix": True, "processor": UNTRIMMED}, id="untrimmed"),
    pytest.param({"processor": UNTRIMMED, "added": (MASK, AddedToken("   "), AddedToken("  "))}, id="blank tokens"),
    pytest.param(
        {"processor": UNTRIMMED, "composed": True, "added": (MASK, AddedToken("|||IP|||"), AddedToken("  "))},
        id="as ModernBERT",
    ),
]
HOW = read_composition()
COMPOSED = [sorted("".join(some)) for some in (HOW.composed, HOW.decomposed, HOW.classes)]
"""Characters that NFC composes, decomposes and sorts."""


@pytest.mark.parametrize("settings", BYTE_LEVEL)
def test_hard_texts_are_read_as_byte_level_bpe_reads_them(settings: dict[str, Any]) -> None:
    assert read(byte_level(**settings), max_length=128) == []
    assert read(byte_level(**settings), kind="qa", pair=True, max_length=64) == []


def test_words_of_hard_texts_are_read_as_byte_level_bpe_reads_them() -> None:
    tokenizer = byte_level(prefix=True, processor=KEEPING, added=(MASK, AddedToken("   "), AddedToken("  ")))
    assert read(tokenizer, kind="tagging", max_length=128) == []


@pytest.mark.parametrize("settings", BYTE_LEVEL)
def test_random_texts_are_read_as_byte_level_bpe_reads_them(settings: dict[str, Any]) -> None:
    draw = random.Random(2)
    marks = [
        *"'  \n\t.!5srlve",
        *("'s", "'ll", "'re", " '", "   ", "\u00a0", "\u3000", "\x1c", "\x85", "<mask>", "</s>"),
    ]
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    sets = (marks, marks, tiny.WORDS, every, *COMPOSED)
    texts = ["".join(draw.choice(draw.choice(sets)) for _ in range(30)) for _ in range(drawn(400))]
    pairs = list(zip(texts, reversed(texts), strict=True))
    assert read(byte_level(**settings), pairs, kind="qa", pair=True, max_length=200) == []


@pytest.mark.parametrize("kind", ["classification", "tagging"])
def test_a_text_without_tokens_is_a_padding_token(kind: Kind) -> None:
    assert read(byte_level(prefix=True, processor=AS_GPT2, added=()), ["", "a", ""], kind=kind) == []
    assert read(byte_level(prefix=True, processor=AS_GPT2, added=()), [""], kind=kind) == []


def test_repeated_letters_are_merged_from_the_left() -> None:
    texts = [letter * count for letter in "ae!" for count in range(1, 80)]
    assert read(byte_level(), texts, max_length=128) == []


def described(**settings: Any) -> Any:
    return json.loads(byte_level(**settings).backend_tokenizer.to_str())


def test_byte_level_bpe_with_other_parts_is_refused() -> None:
    whole = described()
    assert ByteLevel.list_unsupported(whole) == []
    merges = whole["model"]["merges"]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("NFKC", {"normalizer": {"type": "NFKC"}}),
        ("Whitespace", {"pre_tokenizer": {"type": "Whitespace"}}),
        ("use_regex", {"pre_tokenizer": whole["pre_tokenizer"] | {"use_regex": False}}),
        ("dropout", {"model": whole["model"] | {"dropout": 0.1}}),
        ("end_of_word_suffix", {"model": whole["model"] | {"end_of_word_suffix": "</w>"}}),
        ("256", {"model": whole["model"] | {"vocab": {"a": 0}, "merges": []}}),
        ("later", {"model": whole["model"] | {"merges": merges[::-1]}}),
    ]
    for word, change in changes:
        (problem,) = ByteLevel.list_unsupported(whole | change)
        assert word in problem


@pytest.mark.parametrize(
    ("word", "added"),
    [
        ("rstrip", [AddedToken("<x>", rstrip=True)]),
        ("overlap", [AddedToken("<x>", normalized=True), AddedToken("x>y", normalized=False)]),
        ("lstrip", [AddedToken("<x>", lstrip=True, normalized=False), AddedToken("  ", normalized=False)]),
        ("NFC", [AddedToken("<x", normalized=True)]),
        ("NFC", [AddedToken("<K>", normalized=True)]),
    ],
)
def test_byte_level_bpe_with_other_added_tokens_is_refused(word: str, added: list[AddedToken]) -> None:
    (problem,) = ByteLevel.list_unsupported(described(added=added, composed=word == "NFC"))
    assert word in problem


def test_a_taggers_token_that_begins_with_a_space_is_refused() -> None:
    with pytest.raises(ExportError, match="begins with a space"):
        read(byte_level(added=[AddedToken(" x")]), kind="tagging")


KEYS = {
    **{
        "ﬁ": "fi",
        "ﬃ": "ffi",
        "½": "1⁄2",
        "…": "...",
        "℃": "°C",
        "①": "1",
        "ﷺ": "صلى الله",
        "ｶ": "カ",
        "A": "a",
        "B": "b",
    },
    **{"\u00a0": " ", "\t": " ", "\n": " ", "\r": " ", "\u3000": " ", "\u200b": "", "\x01": "", "\ufeff": "", "è": ""},
    **{"e\u0301": "é", "o\u0323\u0302": "ộ", "a\u030a": "å", "Å": "å", "É": "é", "\u0308": "¨"},
}
"""A map of characters as SentencePiece writes it: some become several, or nothing; some are clusters."""

MAPPED = normalizers.Precompiled(write_charsmap(KEYS))
CLEAN = (normalizers.Replace("``", '"'), normalizers.Replace("''", '"'))
SINGLE = (normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase())
RIGHT = normalizers.Strip(left=False, right=True)
ALL_SPACE = pre_tokenizers.WhitespaceSplit()


def mark(scheme: str = "always", *, split: bool = True) -> pre_tokenizers.Metaspace:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def unigram(
    normalizer: Sequence[Any] = (MAPPED,),
    splitter: Sequence[Any] = (ALL_SPACE, mark()),
    added: Sequence[AddedToken] = (MASK,),
) -> PreTrainedTokenizerFast:
    """Build a Unigram tokenizer of half of the characters of hard texts, and of words of which many score the same."""
    draw = random.Random(0)
    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -3.0} | {each: -draw.uniform(4, 12) for each in LETTERS[::2]}
    for word in (*tiny.WORDS, "a", "aa", "aaa", "aaaa", "un", "able", "ation", "中文", "日本", "fi", "oo", "11"):
        pieces |= {word: -float(draw.randint(4, 9)), f"▁{word}": -draw.uniform(3, 9)}
    tokenizer = Tokenizer(models.Unigram(list(pieces.items()), 0, byte_fallback=False))
    if normalizer:
        tokenizer.normalizer = normalizers.Sequence(list(normalizer))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitter))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in ("<s>", "</s>", "<unk>")])
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>", unk_token="<unk>")


UNIGRAM = [
    pytest.param({"normalizer": (*CLEAN, *SINGLE, MAPPED)}, id="as ALBERT"),
    pytest.param({}, id="as XLM-R"),
    pytest.param({"normalizer": (), "splitter": (mark(split=False),)}, id="whole texts"),
    pytest.param(
        {
            "normalizer": (MAPPED, RIGHT, normalizers.Replace(Regex(" {2,}"), "▁")),
            "splitter": (mark("first"),),
            "added": (AddedToken("<mask>", normalized=False), AddedToken("(", normalized=False)),
        },
        id="as T5",
    ),
    pytest.param(
        {
            "normalizer": (normalizers.Strip(), MAPPED, normalizers.Replace(Regex(" {2,}"), " ")),
            "splitter": (mark(),),
        },
        id="as DeBERTa",
    ),
    pytest.param(
        {
            "normalizer": (
                normalizers.Lowercase(),
                normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
                normalizers.NFC(),
                RIGHT,
            ),
            "splitter": (mark(),),
        },
        id="as DeBERTa of transformers 5",
    ),
    pytest.param(
        {
            "normalizer": (normalizers.Nmt(), normalizers.Lowercase(), normalizers.Strip(right=False), MAPPED),
            "splitter": (mark("never"),),
        },
        id="without marks before texts",
    ),
]


@pytest.mark.parametrize("settings", UNIGRAM)
def test_hard_texts_are_read_as_unigram_reads_them(settings: dict[str, Any]) -> None:
    assert read(unigram(**settings), max_length=128) == []
    assert read(unigram(**settings), kind="qa", pair=True, max_length=64) == []
    assert read(unigram(**settings), kind="tagging", max_length=128) == []


@pytest.mark.parametrize("kind", ["tagging", "qa"])
@pytest.mark.parametrize("settings", UNIGRAM)
def test_random_texts_are_read_as_unigram_reads_them(settings: dict[str, Any], kind: Kind) -> None:
    draw = random.Random(3)
    marks = ("<mask>", "</s>", "<unk>", *"    ▁", "  ", "``", "''", "(", "\r\n", "\u0301", "\u0302", "\u200d", *KEYS)
    every = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    sets = (marks, marks, LETTERS, every[:0x600], every, (*tiny.WORDS, *"aaaaa"), *COMPOSED)
    texts = ["".join(draw.choice(draw.choice(sets)) for _ in range(draw.randint(0, 30))) for _ in range(drawn(800))]
    given = list(zip(texts, reversed(texts), strict=True)) if kind == "qa" else texts
    assert read(unigram(**settings), given, pair=kind == "qa", max_length=200, kind=kind) == []


@pytest.mark.parametrize(
    "family",
    [XLMRobertaTokenizer, T5Tokenizer, CamembertTokenizer, MBartTokenizer, BigBirdTokenizer, DebertaV2Tokenizer],
)
def test_unigram_is_read_as_transformers_builds_it(family: Any) -> None:
    pieces = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>", "<pad>")] + [("▁", -3.0), ("▁the", -4.0), ("oo", -4.0)]
    tokenizer = family(vocab=[*pieces, *((letter, -5.0 - index / 7) for index, letter in enumerate(LETTERS[::2]))])
    assert read(tokenizer, max_length=128) == []


def test_of_equal_segmentations_the_one_with_the_longest_last_piece_is_taken() -> None:
    texts = ["a" * count + end for count in range(1, 80) for end in ("", "b", " a")]
    assert read(unigram(), texts, max_length=128) == []


def test_a_map_of_characters_is_read_as_it_was_written() -> None:
    keys = {**KEYS, "x\u0301\u0302": "yz"}
    assert read_charsmap(write_charsmap(keys)) == keys
    whole = normalizers.Precompiled(write_charsmap(keys))
    assert [whole.normalize_str(key) for key in keys] == list(keys.values())
    longer = {"abcdef": "?", "abcde": "!"}  # clusters of more than five bytes are never looked up
    assert read_charsmap(write_charsmap(longer)) == {"abcde": "!"}


def test_classes_of_characters_are_unicodes() -> None:
    extends = [chr(code) for code, kind in enumerate(find_classes()) if kind == EXTENDS]
    marks = [each for each in extends if unicodedata.category(each) in ("Mn", "Me", "Mc")]
    assert len(marks) > 2000
    assert {unicodedata.name(each, "")[:4] for each in set(extends) - set(marks)} >= {"ZERO", "EMOJ", "TAG "}


def test_unigram_with_other_parts_is_refused() -> None:
    whole = json.loads(unigram().backend_tokenizer.to_str())
    assert Unigram.list_unsupported(whole) == []
    mapped = json.loads(unigram((normalizers.Precompiled(write_charsmap({"©": "c"})),)).backend_tokenizer.to_str())
    strings = [{"type": "Replace", "pattern": {"String": each}, "content": "b"} for each in ("a", "b")]
    token = whole["added_tokens"][0]
    changes: list[tuple[str, dict[str, Any]]] = [
        ("unk_id", {"model": whole["model"] | {"unk_id": None}}),
        ("byte_fallback", {"model": whole["model"] | {"byte_fallback": True}}),
        ("log probabilities", {"model": whole["model"] | {"vocab": [["<unk>", 11.0], ["a", 12.0]]}}),
        ("Whitespace", {"pre_tokenizer": {"type": "Whitespace"}}),
        (
            "prepend_scheme first",
            {"pre_tokenizer": json.loads(pre_tokenizers.Sequence([ALL_SPACE, mark("first")]).__getstate__())},
        ),
        ("NFKC", {"normalizer": {"type": "NFKC"}}),
        ("StripAccents", {"normalizer": {"type": "NFKD"}}),
        ("in common", {"normalizer": {"type": "Sequence", "normalizers": strings}}),
        ("'©'", {"normalizer": mapped["normalizer"]}),
        ("rstrip", {"added_tokens": [token | {"rstrip": True}]}),
        ("overlaps", {"normalizer": strings[0], "added_tokens": [token | {"content": "<a>"}]}),
        ("white space", {"added_tokens": [token | {"content": " x"}]}),
    ]
    for word, change in changes:
        (problem,) = Unigram.list_unsupported(whole | change)
        assert word in problem


@pytest.mark.parametrize(
    ("make", "kind", "operators"),
    [
        (byte_level, "BPE", {("com.microsoft", "MurmurHash3")}),
        (lambda: byte_level(processor=AS_GPT2), "BPE", {("com.microsoft", "MurmurHash3")}),
        (unigram, "Unigram", set()),
    ],
)
def test_a_model_of_another_family_answers_as_its_bundle(
    make: Callable[[], PreTrainedTokenizerFast], kind: str, operators: set[tuple[str, str]], tmp_path: Path
) -> None:
    tokenizer = make()
    model = tiny.model("roberta", labels=2, vocab_size=len(tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=2)
    bundle = text_model(tiny.bundle(tmp_path, model=model, tokenizer=tokenizer, max_length=32), precision="fp32")
    found, expected = run_text(bundle.path / TEXT, ["", *TEXTS]), bundle.predict(["", *TEXTS], precision="fp32")
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, Prediction) and isinstance(theirs, Prediction)
        assert mine.label == theirs.label
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-5)
    assert read_proof(bundle.path / TEXT).tokenizer == kind
    used = {(node.domain, node.op_type) for node in read_model(bundle.path / TEXT).graph.node if node.domain}
    assert used == {("com.microsoft", "Tokenizer"), ("ai.onnx.ml", "LabelEncoder")} | operators


TASKS = {
    "classification": Task("classification", ("sentence",), "label", ("negative", "positive"), "accuracy"),
    "pairs": Task("classification", ("one", "other"), "label", ("no", "yes", "maybe"), "accuracy"),
    "multilabel": Task("multilabel", ("sentence",), "labels", ("funny", "sad", "long"), "f1"),
    "regression": Task("regression", ("one", "other"), "score", (), "pearson"),
}


def write(path: Path, task: Task, side: str = "right") -> Bundle:
    tokenizer = cut(words(), side)
    model = tiny.bert(task.outputs, vocab_size=len(tokenizer))
    return tiny.bundle(path, model=model, tokenizer=tokenizer, task=task, max_length=32)


def opens_strictly(file: Path) -> None:
    """Open a file whose declared shapes are those of its graph: browsers refuse others."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.strict_shape_type_inference", "1")
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("name", "side"),
    [("classification", "right"), ("pairs", "left"), ("multilabel", "left"), ("regression", "right")],
)
def test_it_answers_as_the_bundle_does(name: str, side: str, tmp_path: Path) -> None:
    bundle = text_model(write(tmp_path / "bundle", TASKS[name], side))
    opens_strictly(bundle.path / TEXT)
    texts: list[Text] = [*TEXTS]
    if bundle.task.pair:
        texts = [(one, other) for one, other in zip(TEXTS, reversed(TEXTS), strict=True)]
    found, expected = run_text(bundle.path / TEXT, texts), bundle.predict(texts)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(theirs, Prediction)
        assert mine.label == theirs.label
        assert mine.score == pytest.approx(theirs.score, abs=1e-5)
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-5)
    assert len({mine.label for mine in found}) > 1 or name == "regression", "different texts, different answers"
    assert Bundle.load(bundle.path).manifest.files[TEXT].bytes == (bundle.path / TEXT).stat().st_size


def test_a_label_of_a_logit_of_0_is_given_nowhere(tmp_path: Path) -> None:
    """Scoring, `predict` and the text file agree: as for sklearn, a label needs more than 0.5. A logit that float32
    rounds to a probability of 0.5 counts by its sign."""
    tokenizer = cut(words(), "right")
    model = tiny.bert(3, vocab_size=len(tokenizer))
    logits = np.array([0.0, 1e-12, -1.0], np.float32)
    model.classifier.weight.data.zero_()
    model.classifier.bias.data.copy_(torch.from_numpy(logits))
    task = TASKS["multilabel"]
    bundle = text_model(tiny.bundle(tmp_path / "bundle", model=model, tokenizer=tokenizer, task=task), precision="fp32")
    (found,) = bundle.predict(["a film"], precision="fp32")
    (written,) = run_text(bundle.path / TEXT, ["a film"])
    assert found.label == written.label == "sad"
    assert task.score_rows(logits[None], np.array([[0.0, 1.0, 0.0]]))["accuracy"] == 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write(tmp_path_factory.mktemp("text") / "bundle", TASKS["classification"])


def test_a_batch_is_answered_as_its_texts_alone(bundle: Bundle, tmp_path: Path) -> None:
    made = text_model(bundle.copy_to(tmp_path / "bundle"), precision="fp32")
    session = open_session(made.path / TEXT)
    texts = np.array(TEXTS, dtype=object)
    together = session.run(["label", "logits"], {"text": texts})
    alone = [session.run(["label", "logits"], {"text": texts[index : index + 1]}) for index in range(len(texts))]
    assert together[0].tolist() == [label[0] for label, _ in alone]
    np.testing.assert_allclose(together[1], np.concatenate([logits for _, logits in alone]), atol=1e-4)


def test_a_model_that_reads_the_last_place_of_a_row_is_refused(tmp_path: Path) -> None:
    tokenizer = words()
    for summary in ("last", "first"):
        model = tiny.model("xlnet", labels=2, layers=1, vocab_size=len(tokenizer), summary_type=summary)
        bundle = tiny.bundle(tmp_path / summary, model=model, tokenizer=tokenizer)
        if summary == "last":
            with pytest.raises(ExportError, match="summary_type"):
                text_model(bundle, precision="fp32")
        else:
            assert (text_model(bundle, precision="fp32").path / TEXT).is_file()


def test_an_older_opset_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """Sums of scattered numbers came with opset 16."""
    old = bundle.copy_to(tmp_path / "old")
    to_onnx(tiny.bert(), tmp_path / "model.onnx", opset=15)
    with pytest.raises(ExportError, match="is of opset 15; a text file needs 16 or newer"):
        text_model(old.put("fp32", tmp_path / "model.onnx"), precision="fp32")


def test_only_operators_that_a_standard_onnxruntime_has(bundle: Bundle, tmp_path: Path) -> None:
    made = text_model(bundle.copy_to(tmp_path / "bundle"))
    model = read_model(made.path / TEXT)
    mine = {(node.domain, node.op_type) for node in model.graph.node if node.domain}
    assert mine == {("com.microsoft", "Tokenizer"), ("ai.onnx.ml", "LabelEncoder")}
    assert [node.name for node in model.graph.input] == ["text"]
    assert [node.name for node in model.graph.output] == ["label", "score", "probabilities", "logits"]


@pytest.mark.parametrize("texts", ["abc", [5], ["\ud800"], [("a", "b")], [None]])
def test_what_is_no_list_of_texts_is_refused_as_predict_refuses_it(bundle: Bundle, texts: Any, tmp_path: Path) -> None:
    made = text_model(bundle.copy_to(tmp_path / "bundle"))
    for answer in (
        lambda: made.predict(texts),
        lambda: run_text(made.path / TEXT, texts),
        lambda: text_model(made, texts=texts),
    ):
        with pytest.raises(ArgumentError, match="texts"):
            answer()


def test_the_proof_is_stored_in_the_file(bundle: Bundle, tmp_path: Path) -> None:
    made = text_model(bundle.copy_to(tmp_path / "bundle"), texts=["my own text", "and another"])
    verdict = read_proof(made.path / TEXT)
    assert (verdict.given, verdict.precision, verdict.max_length) == (2, "int8", 32)
    assert verdict.hard > len(TEXTS)
    assert verdict.labels == ("negative", "positive")
    with pytest.raises(ExportError, match="no tokenizer inside"):
        run_text(bundle.files()["int8"], ["a film"])


def test_a_different_tokenization_is_refused(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = wordpiece.read_characters

    def keeps_accents(tokenizer: Tokenizer, known: frozenset[str]) -> CharacterMap:
        reading = original(tokenizer, known)
        listed = {letter: parts for letter, parts in reading.listed.items() if letter != "é"}
        return CharacterMap(listed, reading.dropped, reading.alone)

    monkeypatch.setattr(wordpiece, "read_characters", keeps_accents)
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    copy = bundle.copy_to(tmp_path / "bundle")
    with pytest.raises(ExportError) as refusal:
        text_model(copy)
    assert "'café CAFÉ" in str(refusal.value)
    assert "at token 1: expected" in str(refusal.value)
    assert Bundle.load(copy.path).manifest.files == bundle.manifest.files
    assert not (copy.path / TEXT).exists()


def test_differing_logits_are_refused(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = bundle.copy_to(tmp_path / "bundle")
    monkeypatch.setattr(texting, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="logits differ"):
        text_model(copy)
    assert not (copy.path / TEXT).exists()


SENTENCES = (
    *("A good film by the actor, never dull!", "see https://t.co/a_film and @the_actor #story...", "", "  "),
    *(
        "cafe\u0301 the\u200bfilm \u200b the fi\u200blm",
        "это 中文 film 🙂 movie",
        "x\u0301y हिन्दी film",
        "नरेंद्र मोदी दिल्ली में हैं। वाङ्\u200cमय 葛\U000e0100城 ❤\ufe0ffilm\u00ads \u0301",
        "王明2021年去iPhone店 カタか\u3099 서울에서 @北 #film",
        "İstanbul STRASSE [SEP] film",
    ),
)


def tokenwise(path: Path, kind: Kind, *, max_length: int = 64) -> Bundle:
    from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

    tokenizer = words()
    if kind == "qa":
        task, head = Task("qa", ("question", "context"), "answers", (), "f1"), AutoModelForQuestionAnswering
    else:
        labels = ("O", "B-A", "I-A", "B-B", "I-B")
        task, head = Task("tagging", ("words",), "tags", labels, "f1"), AutoModelForTokenClassification
    model = tiny.model("bert", head=head, labels=task.outputs, vocab_size=len(tokenizer))
    return tiny.bundle(path, model=model, tokenizer=tokenizer, task=task, max_length=max_length)


@pytest.fixture(scope="module")
def tagger(shared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tagger with an fp32 text file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_HOME", str(shared_home))
        return text_model(tokenwise(tmp_path_factory.mktemp("tagger") / "bundle", "tagging"), precision="fp32")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_tagger_marks_what_the_bundle_marks(precision: Precision, tagger: Bundle, tmp_path: Path) -> None:
    bundle = tagger if precision == "fp32" else text_model(tagger.copy_to(tmp_path / "bundle"))
    expected = bundle.predict(SENTENCES, precision=precision)
    found = run_text(bundle.path / TEXT, SENTENCES)
    opens_strictly(bundle.path / TEXT)
    assert sum(len(each.marks) for each in expected if isinstance(each, Marked)) > 10
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, Marked) and isinstance(theirs, Marked)
        assert [(mark.text, mark.label, mark.start, mark.end) for mark in mine.marks] == [
            (mark.text, mark.label, mark.start, mark.end) for mark in theirs.marks
        ]
        assert [mark.score for mark in mine.marks] == pytest.approx([mark.score for mark in theirs.marks], abs=1e-5)


def test_an_app_reads_words_and_labels_off_a_tagger(tagger: Bundle) -> None:
    session = open_session(tagger.path / TEXT)
    names = [node.name for node in session.get_outputs()]
    assert names == ["label", "score", "probabilities", "logits", "offsets", "words"]
    text = SENTENCES[1]
    out = dict(zip(names, session.run(None, {"text": np.array([text, "film"], dtype=object)}), strict=True))
    found = [(text[a:b], label) for (a, b), label in zip(out["words"][0], out["label"][0], strict=True) if label]
    assert [word for word, _ in found] == [
        *("see", "https://t.co/a_film", "and", "@the_actor", "#story", ".", ".", ".")
    ]
    best = out["logits"][0].argmax(1)
    assert [label for _, label in found] == [
        tagger.task.labels[best[at]] for at, (_, end) in enumerate(out["words"][0]) if end
    ]
    assert out["label"][1].tolist()[:2] == ["", tagger.task.labels[out["logits"][1][1].argmax()]]
    assert not any(out["label"][1].tolist()[2:])
    covered = [text[a:b] for a, b in out["offsets"][0] if b]
    assert "".join(covered) == text.replace(" ", "")


def test_the_code_in_the_documentation_finds_the_bundles_entities(tagger: Bundle) -> None:
    page = (Path(__file__).parents[2] / "docs" / "text-in-label-out.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(session = .*?)```", page, re.DOTALL)
    code = code.replace('"model_text.onnx"', repr(str(tagger.path / TEXT)))
    assert code.count('"Ada Lovelace met Charles Babbage in London."') == 1
    for text, expected in zip(SENTENCES, tagger.predict(SENTENCES, precision="fp32"), strict=True):
        known: dict[str, Any] = {"onnxruntime": onnxruntime, "np": np}
        exec(code.replace('"Ada Lovelace met Charles Babbage in London."', repr(text)), known)
        assert isinstance(expected, Marked)
        assert known["found"] == [(mark.label, mark.text, mark.start, mark.end) for mark in expected.marks]


@pytest.mark.parametrize("threshold", [float("inf"), -1.0])
def test_a_question_is_answered_as_the_bundle_answers_it(threshold: float, tmp_path: Path) -> None:
    made = tokenwise(tmp_path / "bundle", "qa").set_threshold(threshold)
    bundle = text_model(made, precision="fp32")
    opens_strictly(bundle.path / TEXT)
    pairs = [(one, other) for one in SENTENCES for other in SENTENCES]
    found, expected = run_text(bundle.path / TEXT, pairs), bundle.predict(pairs, precision="fp32")
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, Answer) and isinstance(theirs, Answer)
        assert (mine.text, mine.start, mine.end) == (theirs.text, theirs.start, theirs.end)
        assert mine.score == pytest.approx(theirs.score, abs=1e-5)
    changed = bundle.set_threshold(0.5)
    assert TEXT not in changed.manifest.files and not (bundle.path / TEXT).exists(), "it has the old threshold"
    silent = sum(not each.text for each in found if isinstance(each, Answer))
    assert silent == 2 * len(SENTENCES) if threshold > 0 else 2 * len(SENTENCES) < silent < len(pairs)


def test_an_answer_keeps_the_accents_that_its_tokenizer_drops(tmp_path: Path) -> None:
    bundle = text_model(tokenwise(tmp_path / "bundle", "qa").set_threshold(float("inf")), precision="fp32")
    pairs = [("film", "film\u0301"), ("film", " हिन्दी"), ("film", "\u0301")]
    for answers in (bundle.predict(pairs, precision="fp32"), run_text(bundle.path / TEXT, pairs)):
        found = [(each.text, each.start, each.end) for each in answers if isinstance(each, Answer)]
        assert found == [("film\u0301", 0, 5), ("हिन्दी", 1, 7), ("", 0, 0)]


def test_an_answer_has_no_space_around_it(tmp_path: Path) -> None:
    """A token of byte-level BPE begins with the space before its word."""
    from transformers import AutoModelForQuestionAnswering

    tokenizer = byte_level(processor=UNTRIMMED, composed=True)
    # room for each text in one row: a text file reads no others
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 514}
    model = tiny.model("roberta", head=AutoModelForQuestionAnswering, labels=2, **sizes)
    task = Task("qa", ("question", "context"), "answers", (), "f1")
    made = tiny.bundle(tmp_path / "bundle", model=model, tokenizer=tokenizer, task=task, max_length=512)
    whole = text_model(made, precision="fp32")
    path = whole.path / TEXT
    pairs = [(one, other) for one in SENTENCES for other in SENTENCES]
    for mine, theirs in zip(run_text(path, pairs), made.predict(pairs, precision="fp32"), strict=True):
        assert isinstance(mine, Answer) and isinstance(theirs, Answer)
        assert (mine.text, mine.start, mine.end) == (theirs.text, theirs.start, theirs.end)
    weights = made.files()["fp32"]
    assert TEXT in (more := whole.put("fp16", weights)).manifest.files, "another file is added"
    assert TEXT not in more.put("fp32", weights).manifest.files and not path.exists(), "it has a copy of the old one"


def test_wrong_offsets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenwise(tmp_path / "bundle", "tagging")
    monkeypatch.setattr(
        texting.frames, "_list_matches", lambda pattern: ((32, 32),) if pattern == r"\s" else ((97, 122),)
    )
    monkeypatch.setenv("COMPRESS_HOME", str(tmp_path / "home"))
    with pytest.raises(ExportError, match="texts differently from"):
        text_model(made)
    assert not (made.path / TEXT).exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase (expected BertNormalizer)"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer Whitespace (expected BertPreTokenizer)"),
        ({"lstrip": True}, "added token '[MASK]' with lstrip"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(
    change: dict[str, Any], problem: str, bundle: Bundle, tmp_path: Path
) -> None:
    copy = bundle.copy_to(tmp_path / "bundle")
    described = json.loads((copy.path / "tokenizer.json").read_text(encoding="utf-8"))
    changed = next(token for token in described["added_tokens"] if token["content"] == "[MASK]")
    (changed if "lstrip" in change else described).update(change)
    (copy.path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(ExportError) as refusal:
        text_model(copy)
    assert problem in str(refusal.value)


def test_files_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    made = {"a": words(), "b": byte_level(composed=True), "c": unigram((*CLEAN, *SINGLE, MAPPED))}
    for name, tokenizer in made.items():
        tokenizer.backend_tokenizer.save(str(tmp_path / f"{name}.json"))
    code = (
        "import hashlib, sys; from pathlib import Path; from tokenizers import Tokenizer\n"
        "from compress.data.encoder import TextEncoder\n"
        "from tests.exporters.test_text import build_reader\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.json')):\n"
        "    model = build_reader(TextEncoder.from_backend(Tokenizer.from_file(str(path))))[0]\n"
        "    print(hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest())"
    )
    command, root = [sys.executable, "-c", code, str(tmp_path)], Path(__file__).parents[2]
    told = [
        subprocess.run(
            command, cwd=root, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.split()
        for seed in ("0", "1")
    ]
    assert told[0] == told[1] and len(set(told[0])) == len(made)
