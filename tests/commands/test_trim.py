"""Trimming leaves the corpus read and answered as before, everything else spelled, and says what it saved and cost."""

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedTokenizerFast,
)

from compress import trimming as tables
from compress.commands.trim import trim
from compress.data.encoder import TextEncoder, text_encoder_of
from compress.errors import BundleError, CompressError, TeacherError
from compress.exporters.artifact import TEXT, Bundle
from compress.exporters.checkpoint import load_source
from compress.exporters.fp16 import to_float16
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.onnx import to_onnx
from compress.exporters.session import open_session, read_certificate
from compress.exporters.tokenizer.text_model import text_model
from compress.exporters.weight_only import quantize_weights
from compress.quantization.certify import ScoreDrop
from compress.records.run_report import Report
from compress.trimming import (
    Trimmed,
    compare_encodings,
    find_frequent,
    trim_bundle,
    trim_checkpoint,
    trim_tokenizer,
)
from tests import command, forks, generative, tiny

CORPUS = ("the film was good and the actor was warm", "a dull plot, never fun!", "slowly starring the actors")
OTHER = "this story is quite sad but great; unseen words like zebra"
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def wordpiece(*more: str) -> BertTokenizer:
    words = dict.fromkeys((*tiny.WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *more))
    vocabulary = ("[PAD]", *(f"[unused{n}]" for n in range(9)), *tiny.SPECIAL[1:], *words)
    return BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}, do_lower_case=True)


TEXTS = tuple(" ".join(random.Random(seed).choices(tiny.WORDS[:30], k=8)) for seed in range(200))


def byte_bpe(*, special: Sequence[str] = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")) -> PreTrainedTokenizerFast:
    """As RoBERTa's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        cls_token="<s>", sep_token="</s>", mask_token="<mask>",
    )  # fmt: skip


def unigram() -> PreTrainedTokenizerFast:
    """As ALBERT's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


TOKENIZERS: dict[str, Callable[[], Any]] = {"wordpiece": wordpiece, "byte bpe": byte_bpe, "unigram": unigram}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_the_corpus_is_encoded_as_before(kind: str, seed: int) -> None:
    before = TOKENIZERS[kind]().backend_tokenizer
    draw = random.Random(seed)
    corpus = ["".join(draw.choice((*tiny.WORDS, *LETTERS, " ", " ", " ")) for _ in range(20)) for _ in range(12)]
    found = trim_tokenizer(TextEncoder.from_backend(before), corpus, min_count=1, keep=(), pinned=set())
    after = found.tokenizer
    assert [row.tokens for row in after.encode_batch(corpus)] == [row.tokens for row in before.encode_batch(corpus)]
    assert after.get_vocab_size() < before.get_vocab_size()
    assert sorted(after.get_vocab().values()) == list(range(after.get_vocab_size())), "no gaps between ids"
    assert {before.token_to_id(token): number for token, number in after.get_vocab().items()} == {
        old: new for new, old in enumerate(found.kept)
    }
    other, reference = (each.encode("the quick brown zebra was never so slow") for each in (after, before))
    assert "".join(other.tokens).replace("##", "") == "".join(reference.tokens).replace("##", ""), "still spelled"
    assert [other.ids[0], other.ids[-1]] == [after.token_to_id(token) for token in (other.tokens[0], other.tokens[-1])]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_that_changes_does_not_change_those_after_it(kind: str) -> None:
    before = TextEncoder.from_backend(TOKENIZERS[kind]().backend_tokenizer)
    known = ["the film was never slow", "a quick story"]
    trimmed = trim_tokenizer(before, known, min_count=1, keep=(), pinned=set())
    after = trimmed.encoder(before)
    changed = next(text for text, same in compare_encodings(before, after, [*known, *tiny.WORDS]) if not same)
    assert [same for _, same in compare_encodings(before, after, [changed, *known])] == [False, True, True]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_frequent_tokens_come_first(kind: str) -> None:
    backend = TOKENIZERS[kind]().backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    found = [backend.id_to_token(number) for number in find_frequent({"model": model}, 10)]
    scores = dict(model["vocab"]) if kind == "unigram" else {}
    best = sorted(scores, key=lambda token: -scores[token])
    expected = {
        "wordpiece": [word for word in tiny.WORDS if len(word) > 1][:10],
        "byte bpe": ["".join(merge) for merge in model.get("merges", ())][:10],
        "unigram": [token for token in best if len(token) > 1 and token[0] not in "[<"][:10],
    }[kind]
    assert found == expected


def test_byte_bpe_keeps_merges_and_bytes() -> None:
    found = trim_tokenizer(text_encoder_of(byte_bpe()), ["the film"], min_count=1, keep=(), pinned=set())
    vocabulary, merges = found.config["model"]["vocab"], found.config["model"]["merges"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    assert pairs
    assert all(one in vocabulary and other in vocabulary and one + other in vocabulary for one, other in pairs)
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocabulary)
    text = "zebra 🙂 \x00 한국"
    assert found.tokenizer.decode(found.tokenizer.encode(text).ids) == text


def test_wordpiece_keeps_used_tokens_and_letters() -> None:
    tokens = trim_tokenizer(
        text_encoder_of(wordpiece()), ["good films"], min_count=1, keep=["zebra plot"], pinned=set()
    )
    kept = set(tokens.tokenizer.get_vocab())
    assert kept == {*tiny.SPECIAL, "good", "film", "##s", "plot", *LETTERS, *(f"##{letter}" for letter in LETTERS)} | {
        "!", ".", ",", "?",
    }  # fmt: skip


def test_a_word_to_keep_is_kept_after_a_space_too(tmp_path: Path) -> None:
    """Byte-level BPE has a token for each: `film` and `Ġfilm`."""
    tokenizer = byte_bpe()
    tiny.model("gpt2", head=AutoModelForCausalLM, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    trim_checkpoint(tmp_path / "whole", ["never"], tmp_path / "small", keep=["film"])
    words = AutoTokenizer.from_pretrained(tmp_path / "small")
    for text in ("film", "a film"):
        assert words.tokenize(text) == tokenizer.tokenize(text)
    assert len(tokenizer.tokenize(" film")) == 1


def test_min_count_drops_rare_tokens() -> None:
    corpus = ["good film", "good plot", "good film"]
    kept = trim_tokenizer(
        text_encoder_of(wordpiece()), corpus, min_count=2, keep=(), pinned=set()
    ).tokenizer.get_vocab()
    assert {"good", "film"} <= set(kept)
    assert "plot" not in kept


def test_unknown_words_stay_unknown() -> None:
    """`abc` + ♥ was unknown as nothing goes on after `abc`; without `abc`, `ab` and `##c♥` would read it."""
    before = wordpiece("abc", "ab", "##c♥").backend_tokenizer
    corpus = ["abc♥", "ab xc♥ good"]
    assert before.encode("abc♥", add_special_tokens=False).tokens == ["[UNK]"]
    after = trim_tokenizer(TextEncoder.from_backend(before), corpus, min_count=1, keep=(), pinned=set()).tokenizer
    assert [row.tokens for row in after.encode_batch(corpus)] == [row.tokens for row in before.encode_batch(corpus)]


def write(path: Path, tokenizer: Any = None, model: Any = None) -> Bundle:
    chosen = wordpiece() if tokenizer is None else tokenizer
    model = tiny.bert(vocab_size=len(chosen) + 3, hidden=64) if model is None else model
    return tiny.bundle(path, model=model, tokenizer=chosen, max_length=32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """In five precisions, with a text file."""
    folder = tmp_path_factory.mktemp("whole")
    made = write(folder / "bundle")
    made_of = made.files()["fp32"]
    batches = [{name: np.array([ids]) for name, ids in row.items()} for row in rows(made, CORPUS)]
    to_float16(made_of, folder / "fp16.onnx", batches)
    quantize_weights(made_of, folder / "w8.onnx", bits=8)
    quantize_weights(made_of, folder / "q4.onnx", bits=4)
    for precision in ("fp16", "w8", "q4"):
        made = made.put(precision, folder / f"{precision}.onnx")
    return text_model(made)


@pytest.fixture(scope="module")
def trimmed(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Trimmed:
    return trim_bundle(bundle, CORPUS, tmp_path_factory.mktemp("trimmed") / "bundle")


def rows(bundle: Bundle, texts: Sequence[str]) -> list[dict[str, list[int]]]:
    tokenizer = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    encoded = tokenizer.encode_batch(list(texts))
    return [{"input_ids": e.ids, "attention_mask": e.attention_mask, "token_type_ids": e.type_ids} for e in encoded]


@pytest.mark.parametrize("precision", BUNDLE_FILES)
def test_every_file_answers_the_corpus_with_the_same_logits(bundle: Bundle, trimmed: Trimmed, precision: Any) -> None:
    small = Bundle.load(trimmed.path)
    expected = bundle.logits(rows(bundle, CORPUS), precision=precision)
    np.testing.assert_array_equal(small.logits(rows(small, CORPUS), precision=precision), expected)
    before, after = (each.files()[precision].stat().st_size for each in (bundle, small))
    assert trimmed.bytes[BUNDLE_FILES[precision]] == (before, after)
    assert after < before
    onnx.checker.check_model(onnx.load_model(small.files()[precision]))


def test_the_weights_answer_as_the_files_do(bundle: Bundle, trimmed: Trimmed) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(trimmed.path).eval()
    tokenizer = AutoTokenizer.from_pretrained(trimmed.path)
    small = Bundle.load(trimmed.path)
    assert len(tokenizer) == len(trimmed.kept) == model.config.vocab_size
    assert trimmed.before == len(wordpiece())
    assert trimmed.whole == 1.0
    assert model.config.pad_token_id == tokenizer.pad_token_id == model.get_input_embeddings().padding_idx
    for text in (*CORPUS, OTHER):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt"))["logits"].numpy()
        np.testing.assert_allclose(logits, small.logits(rows(small, [text]), precision="fp32"), atol=1e-5)
    assert small.manifest.parameters == sum(each.numel() for each in model.parameters()) < bundle.manifest.parameters


def test_files_of_the_old_vocabulary_are_not_copied(bundle: Bundle, trimmed: Trimmed) -> None:
    small = Bundle.load(trimmed.path)
    assert TEXT in bundle.manifest.files
    assert set(small.manifest.files) == set(bundle.manifest.files) - {TEXT}
    assert "trimmed from" in (small.path / "README.md").read_text()
    assert text_model(small.copy_to(trimmed.path.parent / "again")).path.is_dir()


def test_a_bundle_with_other_logits_is_not_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trim_file = tables.trim_file

    def shifted(source: Path, target: Path, kept: Sequence[int]) -> None:
        trim_file(source, target, [*kept[1:], kept[0]])

    monkeypatch.setattr(tables, "trim_file", shifted)
    with pytest.raises(CompressError, match="changes the logits"):
        trim_bundle(bundle, CORPUS, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


FAMILIES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "bert masked": ("bert", AutoModelForMaskedLM, {}),
    "distilbert masked": ("distilbert", AutoModelForMaskedLM, {}),
    "albert": ("albert", AutoModelForSequenceClassification, {}),
    "mobilebert": ("mobilebert", AutoModelForSequenceClassification, {}),
    "deberta-v2": ("deberta-v2", AutoModelForTokenClassification, {}),
    "llama": ("llama", AutoModelForCausalLM, {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "gpt2": ("gpt2", AutoModelForCausalLM, {"pad_token_id": 1, "eos_token_id": 2}),  # its bos_token_id is 50256
    "roberta masked": ("roberta", AutoModelForMaskedLM, {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_of_all_families(name: str, tmp_path: Path) -> None:
    family, head, changes = FAMILIES[name]
    tokenizer = byte_bpe() if family in ("gpt2", "llama", "roberta") else wordpiece()
    model = tiny.model(family, head=head, **{"vocab_size": len(tokenizer), **changes})
    folder = tmp_path / "whole"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    result = trim_checkpoint(folder, CORPUS, tmp_path / "small")
    small = head.from_pretrained(result.path).eval()
    words = AutoTokenizer.from_pretrained(result.path)
    assert small.config.vocab_size == len(words) == len(result.kept) < len(tokenizer)
    assert words.convert_ids_to_tokens(small.config.pad_token_id) == words.pad_token
    for text in CORPUS:
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt"))["logits"]
            found = small(**words(text, return_tensors="pt"))["logits"]
        expected = expected if expected.shape == found.shape else expected[..., list(result.kept)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    if head is AutoModelForMaskedLM:
        assert small.get_output_embeddings().weight.shape[0] == len(result.kept)
        assert small.get_output_embeddings().weight is small.get_input_embeddings().weight, "still tied"


@pytest.mark.parametrize(
    ("make", "tied", "scaled"),
    [(generative.llama, True, False), (generative.t5, False, False), (generative.t5, True, True)],
)
def test_a_head_of_its_own_weights_stays_one(
    make: Callable[..., Any], tied: bool, scaled: bool, tmp_path: Path
) -> None:
    """Configs of Flan-T5 and mT5 tie their heads, and their files hold both matrices."""
    tokenizer = byte_bpe()
    special = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    model = generative.separated(make(vocab_size=len(tokenizer), tie_word_embeddings=tied, **special))
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    result = trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small")
    small = type(model).from_pretrained(result.path)
    settings = json.loads((result.path / "config.json").read_text())
    assert settings["tie_word_embeddings"] is scaled, "transformers 4 would tie and scale it"
    assert getattr(small.config, "scale_decoder_outputs", False) is scaled
    kept = list(result.kept)
    assert len(kept) < len(tokenizer)
    torch.testing.assert_close(small.lm_head.weight, model.lm_head.weight[kept])
    torch.testing.assert_close(small.get_input_embeddings().weight, model.get_input_embeddings().weight[kept])


def test_an_id_of_generation_that_is_no_token_keeps_none(tmp_path: Path) -> None:
    """The first checkpoints of Llama say that their padding token is -1."""
    tokenizer = byte_bpe()
    tiny.model("gpt2", head=AutoModelForCausalLM, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "generation_config.json").write_text('{"pad_token_id": -1}')
    kept = trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small").kept
    assert 0 < len(kept) < len(tokenizer)


def test_tokens_that_the_model_does_not_have_are_refused_at_once(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    tiny.model("bert", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "whole")
    tokenizer.add_tokens(["<brand>"])
    tokenizer.save_pretrained(tmp_path / "whole")
    with pytest.raises(TeacherError, match="do not belong together"):
        trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("family", ["clip", "encoder-decoder"])
def test_models_of_several_parts_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """CLIP wants an image too, and an encoder with a decoder has two tables of tokens."""
    tokenizer = wordpiece()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    words = sizes | {"vocab_size": len(tokenizer)}
    model: Any
    if family == "clip":
        vision = sizes | {"image_size": 32, "patch_size": 16}
        model = CLIPModel(CLIPConfig(text_config=words | {"eos_token_id": 3}, vision_config=vision, projection_dim=8))
    else:
        decoder = BertConfig(**words, is_decoder=True, add_cross_attention=True)
        model = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**words), decoder))
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    with pytest.raises(CompressError, match=f"{type(model).__name__} cannot be trimmed .*; expected a model with one"):
        trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_rules_of_generation_name_the_same_words(tmp_path: Path) -> None:
    """Rules for words that are removed are left out, and special tokens are kept."""
    tokenizer = byte_bpe()
    model = tiny.model("gpt2", head=AutoModelForCausalLM, vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2)
    ids = tokenizer(CORPUS[0])["input_ids"]
    kept = set(trimmed_ids(tmp_path / "probe", tokenizer, model))
    first, second = ids[0], ids[1]
    gone, forced, *_ = (number for number in range(len(tokenizer)) if number not in kept)
    model.generation_config.update(
        suppress_tokens=[first, gone],
        begin_suppress_tokens=[gone],
        bad_words_ids=[[first, second], [first, gone]],
        sequence_bias=[[[second], -2.0], [[gone], 5.0]],
        forced_eos_token_id=forced,
    )
    now = sorted(trimmed_ids(tmp_path / "all", tokenizer, model)).index
    rules = AutoModelForCausalLM.from_pretrained(tmp_path / "all" / "small").generation_config
    assert (rules.suppress_tokens, rules.begin_suppress_tokens) == ([now(first)], None)
    assert rules.bad_words_ids == [[now(first), now(second)]]
    assert rules.sequence_bias == [[[now(second)], -2.0]]
    assert rules.forced_eos_token_id == now(forced), "it is kept"


def trimmed_ids(folder: Path, tokenizer: Any, model: Any) -> Sequence[int]:
    """The ids that stay when a checkpoint is trimmed to the corpus."""
    model.save_pretrained(folder / "whole")
    tokenizer.save_pretrained(folder / "whole")
    return trim_checkpoint(folder / "whole", CORPUS, folder / "small").kept


@pytest.mark.parametrize("family", ["bert", "xlnet"])
def test_a_file_of_fewer_tokens(family: str, tmp_path: Path) -> None:
    """XLNet's graph transposes the ids before it looks them up."""
    whole, small = tmp_path / "whole.onnx", tmp_path / "small.onnx"
    to_onnx(tiny.model(family), whole, segments=False)
    tables.trim_file(whole, small, range(20))
    batch = tiny.batch((6, 4))
    feeds = {name: values.numpy() for name, values in (batch | {"input_ids": batch["input_ids"] % 20}).items()}
    answers = [open_session(path).run(["logits"], feeds)[0] for path in (whole, small)]
    np.testing.assert_array_equal(*answers)
    assert small.stat().st_size < whole.stat().st_size


def test_a_batch_of_a_decoder_finds_its_last_tokens(tmp_path: Path) -> None:
    """The graph of a Llama compares the ids with that of padding."""
    tokenizer = byte_bpe()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    padding = tokenizer.pad_token_id
    assert padding == len(tokenizer) - 1
    model = tiny.model("llama", labels=2, vocab_size=len(tokenizer), pad_token_id=padding)
    small = Bundle.load(trim_bundle(write(tmp_path / "whole", tokenizer, model), CORPUS, tmp_path / "small").path)
    encoded = rows(small, CORPUS)
    longest = max(len(row["input_ids"]) for row in encoded)
    empty = {"input_ids": small_padding(small), "attention_mask": 0}
    feeds = {
        name: np.array([row[name] + [filler] * (longest - len(row[name])) for row in encoded])
        for name, filler in empty.items()
    }
    found = open_session(small.files()["fp32"]).run(["logits"], feeds)[0]
    np.testing.assert_allclose(found, small.logits(encoded, precision="fp32"), atol=1e-5)


def small_padding(bundle: Bundle) -> int:
    return int(json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))["pad_token_id"])


def test_prompts_are_read_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    tiny.checkpoint(folder, tiny.model("bert", head=AutoModel, vocab_size=len(wordpiece())))
    wordpiece().save_pretrained(folder)
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean"}
    prompts = {"query": "this story is quite sad : ", "document": "great scene : "}
    told = {"prompts": prompts, "default_prompt_name": "query"}
    for name, content in (
        ("modules.json", MODULES), ("config_sentence_transformers.json", told), ("1_Pooling/config.json", pooling)
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    whole = load_source(folder).write(tmp_path / "whole")
    small = Bundle.load(trim_bundle(whole, CORPUS, tmp_path / "small").path)
    for name in (None, *prompts):
        expected = whole.embed(CORPUS, prompt_name=name, precision="fp32")
        np.testing.assert_allclose(small.embed(CORPUS, prompt_name=name, precision="fp32"), expected, atol=1e-6)


def test_an_encoder_in_a_folder_of_its_own_stays_there(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    encoder = folder / "0_Transformer"
    tiny.checkpoint(encoder, tiny.model("bert", head=AutoModel, vocab_size=len(wordpiece())))
    wordpiece().save_pretrained(encoder)
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "mean"}')
    (folder / "modules.json").write_text(json.dumps([{**MODULES[0], "path": "0_Transformer"}, MODULES[1]]))
    result = trim_checkpoint(folder, CORPUS, tmp_path / "small")
    assert sorted(result.bytes) == ["0_Transformer/model.safetensors", "0_Transformer/tokenizer.json"]
    assert not (result.path / "config.json").exists()
    expected = SentenceTransformer(str(folder), device="cpu").encode(list(CORPUS))
    found = SentenceTransformer(str(result.path), device="cpu").encode(list(CORPUS))
    np.testing.assert_allclose(found, expected, atol=1e-6)


MODULES = [
    {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for at, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
]


TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, {"default": TEMPLATE, "tool_use": "{{ tools }}"}])
def test_the_template_of_a_chat_is_kept(template: Any, tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    tokenizer.chat_template = template
    model = tiny.model("gpt2", head=AutoModelForCausalLM, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small")
    assert AutoTokenizer.from_pretrained(tmp_path / "small").chat_template == tokenizer.chat_template


def test_an_unreported_table_is_noticed(tmp_path: Path) -> None:
    """MobileBERT's language model has a second, untied part of its output layer."""
    tokenizer = wordpiece()
    model = tiny.model("mobilebert", head=AutoModelForMaskedLM, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    with pytest.raises(CompressError, match="trimming changes its outputs"):
        trim_checkpoint(tmp_path / "whole", CORPUS, tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_bad_input_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    def once() -> Iterator[str]:
        yield from CORPUS

    with pytest.raises(CompressError, match="more than once"):
        trim_bundle(bundle, once(), tmp_path / "out")
    with pytest.raises(CompressError, match="corpus is empty"):
        trim_bundle(bundle, [], tmp_path / "out")
    with pytest.raises(CompressError, match="min_count 0"):
        trim_bundle(bundle, CORPUS, tmp_path / "out", min_count=0)
    with pytest.raises(BundleError, match="exists"):
        trim_bundle(bundle, CORPUS, tmp_path)
    with pytest.raises(CompressError, match="no texts; give --data"):
        trim(str(bundle.path), tmp_path / "out")
    suffix = Tokenizer(models.BPE(vocab={"a</w>": 0}, merges=[], end_of_word_suffix="</w>"))
    with pytest.raises(CompressError, match="BPE with marks inside words"):
        trim_tokenizer(TextEncoder.from_backend(suffix), ["a"], min_count=1, keep=(), pinned=set())
    assert list(tmp_path.iterdir()) == []


def test_scores_before_and_after_are_reported(bundle: Bundle, tmp_path: Path) -> None:
    data = tiny.reviews(tmp_path / "reviews")
    found = trim(str(bundle.path), tmp_path / "out", data=data)
    small = Bundle.load(tmp_path / "out")
    assert [proof.artefact for proof in found.certificates] == list(BUNDLE_FILES.values())
    for proof in found.certificates:
        assert proof.before == proof.after
        assert (proof.agreement, proof.max_logit_difference, proof.certified, proof.rows) == (1.0, 0.0, True, 40)
        assert (
            proof.method == f"vocabulary trimming, {len(wordpiece())} to {len(found.trimmed.kept)} tokens (min_count 1)"
        )
    assert found.alike == 1.0
    assert Report.from_json(small.path / "report.json").certificates == found.certificates
    metadata = {each.key: each.value for each in onnx.load_model(small.files()["int8"]).metadata_props}
    assert json.loads(metadata["compress.certificate"])["method"] == found.certificates[1].method


def test_a_lower_score_is_reported_and_not_certified(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tiny.reviews(tmp_path / "reviews"), tmp_path / "out"
    outcome = ScoreDrop(0.96, 0.25, 0.3, 9.0, changed=28)
    monkeypatch.setattr("compress.jobs.trim.compare_answers", lambda *_, **__: outcome)
    result = command.run("trim", str(bundle.path), "--data", data, "--out", str(out), "--min-count", "10000", "--json")
    assert result.code == 3
    facts = json.loads(result.out)
    assert facts["alike"] == 0.0
    assert [proof["certified"] for proof in facts["certificates"]] == [False] * len(BUNDLE_FILES)
    made = Bundle.load(out)
    kept = Report.from_json(made.path / "report.json")
    assert [proof.certified for proof in kept.certificates] == [False] * len(BUNDLE_FILES)
    assert all(not json.loads(read_certificate(file))["certified"] for file in made.files().values())
    assert kept.title == "out"


def dies_before_it_is_certified(bundle: Path, out: Path, data: str, home: str) -> None:
    os.environ["COMPRESS_HOME"] = home
    with mock.patch("compress.jobs.trim.certify_files", lambda *_, **__: os._exit(9)):
        trim(str(bundle), out, data=data)


def test_a_kill_before_certification_leaves_nothing(tmp_path: Path, home: Path) -> None:
    data, out, bundle = tiny.reviews(tmp_path / "reviews"), tmp_path / "out", write(tmp_path / "bundle")
    child = forks.context().Process(target=dies_before_it_is_certified, args=(bundle.path, out, data, str(home)))
    child.start()
    child.join(120)
    assert child.exitcode == 9
    assert not out.exists()
    assert command.partial(tmp_path) != [], "the kill left its work beside"
    assert all(proof.certified for proof in trim(str(bundle.path), out, data=data).certificates)
    assert {path.name for path in tmp_path.iterdir()} <= {"bundle", "out", "reviews", "home"}
    Bundle.load(out)


def test_the_command_reports_sizes_and_scores(bundle: Bundle, tmp_path: Path) -> None:
    data = tiny.reviews(tmp_path / "reviews")
    result = command.run("trim", str(bundle.path), "--data", data, "--out", str(tmp_path / "a"), "--keep", "zebra")
    assert result.code == 0, result.err
    assert f"{len(wordpiece())} tokens to" in result.out
    assert "100.00% of the texts of the" in result.out
    result = command.run("trim", str(bundle.path), "--data", data, "--out", str(tmp_path / "b"), "--json")
    facts = json.loads(result.out)
    assert facts["trimmed"]["kept"] == len(Tokenizer.from_file(str(tmp_path / "b" / "tokenizer.json")).get_vocab())
    assert len(facts["certificates"]) == len(BUNDLE_FILES)
    assert command.refused(
        command.run("trim", str(bundle.path), "--data", data, "--out", str(tmp_path / "a")), tmp_path, "exists"
    )


def test_a_checkpoint_of_few_positions_is_trimmed(tmp_path: Path) -> None:
    folder = tiny.checkpoint(tmp_path / "teacher", tiny.bert(max_position_embeddings=8))
    result = trim_checkpoint(Path(folder), ["a good film and " * 10], tmp_path / "small")
    assert {"good", "film"} <= set(AutoTokenizer.from_pretrained(result.path).get_vocab())


def test_the_command_trims_checkpoints_for_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(CORPUS))
    checkpoint = tiny.checkpoint(tmp_path / "teacher")
    result = command.run("trim", checkpoint, "--corpus", str(tmp_path / "corpus.txt"), "--out", str(tmp_path / "small"))
    assert result.code == 0, result.err
    small = AutoTokenizer.from_pretrained(tmp_path / "small")
    assert small.tokenize(CORPUS[0]) == tiny.tokenizer().tokenize(CORPUS[0])
    assert "great" not in small.get_vocab()
