"""Rows are those of the checkpoint's own tokenizer, and what it cannot say is refused by name."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, BatchEncoding, BertTokenizer, CanineTokenizer, PreTrainedTokenizerFast

from compress.data.encoder import (
    TOKENIZER_CONFIG,
    SlowEncoder,
    TextEncoder,
    TokenizerSettings,
    check_saved,
    clean_up,
    encoder_of,
    text_encoder_of,
)
from compress.errors import BundleError, CompressError, DataError
from compress.models.checkpoints import save_checkpoint
from tests import generative, tiny

LONG = " ".join(tiny.WORDS[:26]) + " good bad"


def tokenizer(**settings: Any) -> Any:
    made = tiny.tokenizer()
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def ids(tokenizer: Any, text: Any, max_length: int | None = None) -> list[int]:
    (row,) = encoder_of(tokenizer).encode([text], max_length)
    return row["input_ids"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_end_that_the_tokenizer_names_is_cut_off(side: str) -> None:
    made = tokenizer(truncation_side=side)
    kept = {"right": "a the", "left": "good bad"}[side]
    assert ids(made, LONG, 4) == ids(made, kept) == made(LONG, truncation=True, max_length=4)["input_ids"]
    pair = (LONG, "the film is so dull and so slow")
    assert ids(made, pair, 9) == made(*pair, truncation=True, max_length=9)["input_ids"]


@pytest.mark.parametrize(("text", "least"), [("film", 3), (("film", "plot"), 5)])
def test_a_length_without_room_is_refused(text: Any, least: int) -> None:
    """tokenizers itself does not truncate then, so that rows are longer than the model's positions."""
    assert len(ids(tokenizer(), text, least)) == least
    for max_length in (0, 1, least - 1):
        with pytest.raises(DataError, match=f"max_length {max_length} has no room.*at least {least}"):
            ids(tokenizer(), text, max_length)


@pytest.mark.parametrize("text", ["a \ud800 b", ("a", "\udfff"), None, 3, ("a", None), ("a", "b", "c"), b"a"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(DataError, match=r"surrogate pair|is not a text"):
        ids(tokenizer(), text)
    good = "a" if isinstance(text, str) or not isinstance(text, tuple) else ("a", "b")
    with pytest.raises(DataError, match=r"surrogate pair|is not a text"):
        encoder_of(tokenizer()).encode([good, text], 12)


def test_surrogates_among_words_and_contexts_are_refused() -> None:
    with pytest.raises(DataError, match=r"character 1 is U\+D83D"):
        encoder_of(tokenizer()).words([["a", "\ud83d"]], 12)
    with pytest.raises(DataError, match=r"character 5 is U\+D83D"):
        encoder_of(tokenizer()).questions(["is it"], ["it i\ud83d"], 12)


@pytest.mark.parametrize("text", ["", "  \n", "\x00", "a\x00b", "[SEP]", "[CLS] a [PAD]", "🙂", "שלום", "a" * 10**6])
def test_unusual_texts_are_read(text: str) -> None:
    made = tokenizer(truncation_side="left")
    began = time.perf_counter()
    assert ids(made, text, 16) == made(text, truncation=True, max_length=16)["input_ids"]
    assert time.perf_counter() - began < 30


def test_special_tokens_in_a_text_are_split_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    made = tokenizer(split_special_tokens=True)
    assert ids(made, "a [SEP] b") == made("a [SEP] b")["input_ids"] != ids(tokenizer(), "a [SEP] b")
    save_checkpoint(tmp_path, tiny.bert(), made, 16)
    assert ids(TextEncoder.from_folder(tmp_path), "a [SEP] b") == ids(made, "a [SEP] b")
    assert encoder_of(made).fingerprint() != encoder_of(tokenizer()).fingerprint()


def test_settings_that_were_changed_after_loading_are_saved(tmp_path: Path) -> None:
    made = tokenizer(truncation_side="left", pad_token="[MASK]", model_max_length=100)
    save_checkpoint(tmp_path, tiny.bert(), made, 16)
    opened = TextEncoder.from_folder(tmp_path)
    expected = TokenizerSettings("left", pad_token_id=4, special_ids=(1, 2, 3, 4), model_max_length=16)
    assert opened.settings == expected
    assert TokenizerSettings.from_tokenizer(AutoTokenizer.from_pretrained(tmp_path)) == expected
    assert opened.encode([LONG], 8) == encoder_of(made).encode([LONG], 8)


def test_special_tokens_are_those_that_the_config_declares(tmp_path: Path) -> None:
    """As sentence-transformers counts the tokens of a prompt: by `all_special_ids`."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "<x>": 3, "<u>": 4}, unk_token="<u>"))
    backend.add_special_tokens(["<s>", "</s>", "<x>", "<u>"])
    for number, declared in enumerate(({}, {"eos_token": "</s>"}, {"additional_special_tokens": ["<x>", "<s>"]})):
        made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<u>", **declared)
        made.save_pretrained(tmp_path / str(number))
        expected = tuple(sorted(made.all_special_ids))
        assert encoder_of(made).settings.special_ids == expected
        assert TextEncoder.from_folder(tmp_path / str(number)).settings.special_ids == expected
    assert expected == (0, 3, 4)


def test_a_bundle_of_before_has_the_settings_of_its_tokenizer_file(tmp_path: Path) -> None:
    made = tokenizer()
    made.backend_tokenizer.enable_truncation(8, direction="left")
    made.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"pad_token": {"content": "[PAD]"}}), encoding="utf-8")
    assert TextEncoder.from_folder(tmp_path).settings == TokenizerSettings("left", pad_token_id=0, special_ids=(0,))


@pytest.mark.parametrize(
    ("content", "word"),
    [("[]", "object"), ("{", "cannot be read"), ('{"truncation_side": "both"}', "truncation_side is 'both'"),
     ('{"truncation_strategy": "do_not_truncate"}', "truncation_strategy is 'do_not_truncate'"),
     ('{"truncation_strategy": false}', "truncation_strategy is False")],
)  # fmt: skip
def test_settings_that_cannot_be_read_are_refused(content: str, word: str, tmp_path: Path) -> None:
    tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / TOKENIZER_CONFIG).write_text(content, encoding="utf-8")
    with pytest.raises(CompressError, match=word):
        TextEncoder.from_folder(tmp_path)


@pytest.mark.parametrize("strategy", ["only_first", "only_second"])
def test_another_strategy_is_refused_for_pairs_alone(strategy: str) -> None:
    made = tokenizer()
    made.init_kwargs["truncation_strategy"] = strategy
    encoder = encoder_of(made)
    assert len(encoder.encode([LONG], 8)[0]["input_ids"]) == 8
    assert encoder.questions(["is it"], [LONG], 12)
    with pytest.raises(DataError, match=f"truncation_strategy of its tokenizer is {strategy}"):
        encoder.encode([(LONG, LONG)], 12)


def test_tokens_that_are_drawn_at_random_are_refused() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], dropout=0.5))
    with pytest.raises(DataError, match=r"model\.dropout.*0\.5"):
        encoder_of(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_text_without_tokens_needs_a_padding_token() -> None:
    bare = generative.gpt2_tokenizer(pad=False)
    with pytest.raises(DataError, match="no padding token"):
        ids(bare, "")
    assert ids(generative.gpt2_tokenizer(), "") == [0]


def test_token_types_are_made_where_the_tokenizer_names_them() -> None:
    made = tokenizer(model_input_names=["input_ids", "attention_mask"])
    assert set(encoder_of(made).encode([("a", "b")])[0]) == {"input_ids", "attention_mask"}
    assert encoder_of(tokenizer()).encode([("a", "film")])[0]["token_type_ids"] == [0, 0, 0, 1, 1]


def test_a_slow_tokenizer_encodes_by_itself() -> None:
    slow = CanineTokenizer()
    for slow.truncation_side in ("right", "left"):
        encoder = encoder_of(slow)
        assert isinstance(encoder, SlowEncoder)
        assert encoder.encode(["a film"], 6) == [dict(slow("a film", truncation=True, max_length=6))]
        assert encoder.encode([("a film", "is it")], 6) == [
            dict(slow("a film", "is it", truncation=True, max_length=6))
        ]
    assert encoder.pieces(["ab"]) == [[97, 98]]
    with pytest.raises(DataError, match="no room"):
        encoder.encode(["a"], 2)
    with pytest.raises(DataError, match="expected a fast tokenizer"):
        encoder.questions(["a"], ["b"], 16)
    with pytest.raises(DataError, match=r"tokenizer\.json form"):
        text_encoder_of(slow)


class Placed(BertTokenizer):
    """A tokenizer whose class needs more than a text, as those of layouts do."""

    def __call__(self, text: Any, boxes: Any = None, **kwargs: Any) -> BatchEncoding:
        if boxes is None:
            raise ValueError("You must provide corresponding bounding boxes")
        return super().__call__(text, **kwargs)


class Shouting(BertTokenizer):
    """A tokenizer whose class changes texts, which no file says."""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> BatchEncoding:
        return super().__call__(text.replace("a", "!"), *args, **kwargs)


def test_a_tokenizer_that_does_more_than_its_files_is_not_saved(tmp_path: Path) -> None:
    vocabulary = {word: at for at, word in enumerate((*tiny.SPECIAL, *tiny.WORDS))}
    made = tiny.tokenizer()
    made.save_pretrained(tmp_path)
    check_saved(tmp_path, made)
    for kind, problem in ((Shouting, "Shouting encodes"), (Placed, "Placed cannot encode a text by itself")):
        with pytest.raises(BundleError, match=problem):
            check_saved(tmp_path, kind(vocab=vocabulary))


def test_decoded_texts_are_cleaned_up_as_by_transformers(tmp_path: Path) -> None:
    text = "it is n't so , is it ? i 'm sure ! he 's , we 've , they 're ' quite ' . "
    assert clean_up(text) == tiny.tokenizer().clean_up_tokenization(text)
    for cleaned in (True, False):
        made = tokenizer(clean_up_tokenization_spaces=cleaned)
        row = ids(made, "a film , is it good ? !")
        assert text_encoder_of(made).decode(row) == made.decode(row, skip_special_tokens=True)
    bpe = generative.gpt2_tokenizer()
    bpe.clean_up_tokenization_spaces = True
    assert text_encoder_of(bpe).decode(ids(bpe, "a ,b")) == bpe.decode(ids(bpe, "a ,b")) == "a ,b"


def test_threads_get_the_same_rows() -> None:
    encoder = encoder_of(tokenizer(truncation_side="left"))
    texts = [" ".join(tiny.WORDS[at % 20 : at % 20 + 12]) for at in range(200)]
    expected = [encoder.encode([text], 8) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: encoder.encode([text], 8), texts)) == expected
