"""Tokenizers as the hub has them: files of many kinds, whose settings agree, contradict each other or are absent."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = (
    *("the", "a", "film", "story", "was", "is", "not", "very", "good", "bad", "dull", "un", "able", "play", "ing"),
    *("The", "Film", "É", "é", "e", "zoë", "zoe", "straße", "中", "文", "日本", "שלום", "مرحبا", "🙂", "!", ".", ","),
)
LETTERS = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'-#[]<>/|")
EXTRA = ("<ent>", "[Q]", "@user", "hyper text")
TEXTS = (
    "", " ", " \t\n ", "the film was good", "The FILM wasn't Good!", "  two  spaces ", "Zoë's café straße É",
    "中文日本", "שלום مرحبا the", "🙂👍🏽 e\u0301", "a\x00b \u200b\ufeff", "unable playing", "a", "!",
    "the [SEP] film [MASK] [PAD]",
    "<s> film </s> <mask> <pad> <unk> <|endoftext|>", "[CLS]the[SEP]", "<ent> film [Q]a @user's hyper text <ent>a",
    "the film " * 40, "good bad dull not very " * 20 + "[SEP]", "x" * 110, "É" * 60, "中" * 60,
)  # fmt: skip


class Draw:
    """Draw the files of a tokenizer with a generator of its own."""

    def __init__(self, seed: object) -> None:
        self.rng = random.Random(str(seed))

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def often(self, share: float) -> bool:
        return self.rng.random() < share

    def texts(self, count: int) -> list[str]:
        """Draw texts: fixed ones, and ones of words, letters and special tokens."""
        parts = (*WORDS, *LETTERS[:26], "[SEP]", "<s>", "</s>", *EXTRA, "\n")
        made = [" ".join(self.rng.choices(parts, k=self.rng.randint(1, 40))) for _ in range(count)]
        return [*self.rng.sample(TEXTS, min(count, len(TEXTS))), *made]


def write(folder: Path, draw: Draw) -> str:
    """Write the files of a tokenizer, with a config.json of some family; return its kind."""
    folder.mkdir(parents=True)
    kind: str = draw.one("wordpiece", "wordpiece", "byte bpe", "byte bpe", "unigram", "unigram", "words")
    backend, classes, special = {"wordpiece": wordpiece, "byte bpe": byte_bpe, "unigram": unigram, "words": words}[
        kind
    ](draw)
    config = settings(draw, special)
    name, family = draw.one(*classes)
    config["tokenizer_class"] = name
    if kind == "wordpiece":
        config |= {key: draw.one(True, False) for key in ("do_lower_case", "tokenize_chinese_chars") if draw.often(0.4)}
        if draw.often(0.3):
            config["strip_accents"] = draw.one(True, False, None)
    if kind in ("byte bpe", "unigram") and draw.often(0.4):
        config["add_prefix_space"] = draw.one(True, False)
    added = [
        AddedToken(token, lstrip=draw.often(0.3), rstrip=draw.often(0.3), single_word=draw.often(0.2),
                   normalized=draw.often(0.5), special=draw.often(0.5))
        for token in EXTRA if draw.often(0.3)
    ]  # fmt: skip
    backend.add_tokens(added)
    if draw.often(0.3):
        backend.enable_truncation(
            draw.one(8, 16, 128), stride=draw.one(0, 0, 2), direction=draw.one("right", "left"),
            strategy=draw.one(*["longest_first"] * 6, "only_first", "only_second"),
        )  # fmt: skip
    if draw.often(0.3):
        backend.enable_padding(
            direction=draw.one("right", "left"), pad_id=draw.one(0, 1), pad_token=special.get("pad_token", "[PAD]"),
            length=draw.one(None, 24), pad_to_multiple_of=draw.one(None, 8),
        )  # fmt: skip
    if draw.often(0.1) and not added and name.startswith(("Bert", "Roberta", "GPT2")):  # as the oldest checkpoints
        _write_vocabulary(folder, backend)
    else:
        backend.save(str(folder / "tokenizer.json"))
    stated = {key: value for key, value in special.items() if draw.often(0.9) or key == "unk_token"}
    if draw.often(0.2):  # as before transformers 4.40
        (folder / "special_tokens_map.json").write_text(json.dumps(stated), encoding="utf-8")
    config |= stated
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    return kind


def _write_vocabulary(folder: Path, backend: Tokenizer) -> None:
    """Write vocab.txt, or vocab.json and merges.txt, instead of tokenizer.json."""
    model = json.loads(backend.to_str())["model"]
    if model["type"] == "WordPiece":
        (folder / "vocab.txt").write_text("\n".join(model["vocab"]) + "\n", encoding="utf-8")
        return
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")


def settings(draw: Draw, special: dict[str, str]) -> dict[str, Any]:
    """Draw what tokenizer_config.json says."""
    config: dict[str, Any] = {}
    choices: dict[str, Sequence[Any]] = {
        "truncation_side": ("right", "left", "left"),
        "padding_side": ("right", "left"),
        "model_max_length": (8, 16, 33, 512, 1e30, 1000000000000000019884624838656),
        "model_input_names": (
            ["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"],
            ["attention_mask", "input_ids"],
        ),
        "split_special_tokens": (True, False),
        "clean_up_tokenization_spaces": (True, False),
        "add_bos_token": (True, False),
        "add_eos_token": (True, False),
        "pad_token_type_id": (0, 3),
        "extra_special_tokens": (["<ent>"], ["[Q]", "@user"], []),
        "additional_special_tokens": (["<ent>", "[Q]"], []),
        "stride": (0, 4),
        "max_length": (8, 64),
        "name_or_path": ("somebody/some-model",),
    }  # fmt: skip
    for name, values in choices.items():
        if draw.often(0.35):
            config[name] = draw.one(*values)
    return config


BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
ROBERTA = {
    "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>",
    "sep_token": "</s>", "mask_token": "<mask>",
}  # fmt: skip
ANY = (("PreTrainedTokenizerFast", "bert"), ("TokenizersBackend", "roberta"), ("PreTrainedTokenizerFast", "modernbert"))


def _special(backend: Tokenizer, tokens: Sequence[str]) -> None:
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])


def wordpiece(draw: Draw) -> tuple[Tokenizer, Sequence[tuple[str, str]], dict[str, str]]:
    tokens = dict.fromkeys(
        [*BERT.values(), *WORDS, *LETTERS, *(f"##{each}" for each in (*LETTERS[:36], "ing", "able"))]
    )
    backend = Tokenizer(
        models.WordPiece(
            {token: at for at, token in enumerate(tokens)}, unk_token="[UNK]", max_input_chars_per_word=100
        )
    )
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=draw.often(0.5), strip_accents=draw.one(None, True, False), handle_chinese_chars=draw.often(0.8)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = draw.one(
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
        processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        ),
    )
    _special(backend, list(BERT.values()))
    classes = (
        *ANY, ("BertTokenizer", "bert"), ("BertTokenizerFast", "bert"), ("DistilBertTokenizer", "distilbert"),
        ("ElectraTokenizer", "electra"), ("MobileBertTokenizerFast", "mobilebert"), ("BertTokenizer", "roberta"),
    )  # fmt: skip
    return backend, classes, dict(BERT)


def byte_bpe(draw: Draw) -> tuple[Tokenizer, Sequence[tuple[str, str]], dict[str, str]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("f", "i"), ("l", "m"), ("fi", "lm"), ("Ġ", "film"), ("o", "o")]
    gpt2 = draw.often(0.4)
    special = ["<|endoftext|>"] if gpt2 else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = dict.fromkeys([*special, *alphabet, *("".join(pair) for pair in merges)])
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=draw.often(0.3))
    _special(backend, special)
    if gpt2:
        end = special[0]
        backend.post_processor = draw.one(
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, 0)]),
        )
        classes = (*ANY, ("GPT2Tokenizer", "gpt2"), ("GPT2TokenizerFast", "gpt2"), ("Qwen2Tokenizer", "qwen2"))
        return backend, classes, {"bos_token": end, "eos_token": end, "unk_token": end}
    backend.post_processor = draw.one(
        processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=draw.often(0.3)),
        processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
        ),
    )
    classes = (
        *ANY, ("RobertaTokenizer", "roberta"), ("RobertaTokenizerFast", "roberta"), ("RobertaTokenizer", "camembert"),
        ("LlamaTokenizerFast", "llama"),
    )  # fmt: skip
    return backend, classes, dict(ROBERTA)


def unigram(draw: Draw) -> tuple[Tokenizer, Sequence[tuple[str, str]], dict[str, str]]:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = dict.fromkeys(special, 0.0) | {"▁": -3.0}
    for at, word in enumerate((*WORDS, *LETTERS)):
        pieces |= {f"▁{word}": -4.0 - at / 50, word: -6.0 - at / 40}
    backend = Tokenizer(models.Unigram(list(pieces.items()), 3, byte_fallback=False))
    if draw.often(0.7):
        backend.normalizer = draw.one(
            normalizers.NFKC(), normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]),
            normalizers.Lowercase(),
        )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=draw.one("always", "first", "never"))
    _special(backend, [*special, "<mask>"])
    backend.post_processor = draw.one(
        processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        ),
        processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]),
    )
    classes = (
        *ANY, ("XLMRobertaTokenizer", "xlm-roberta"), ("XLMRobertaTokenizerFast", "xlm-roberta"),
        ("AlbertTokenizer", "albert"), ("T5Tokenizer", "t5"), ("CamembertTokenizer", "camembert"),
        ("DebertaV2Tokenizer", "deberta-v2"), ("XLNetTokenizer", "xlnet"),
    )  # fmt: skip
    return backend, classes, dict(ROBERTA)


def words(draw: Draw) -> tuple[Tokenizer, Sequence[tuple[str, str]], dict[str, str]]:
    tokens = dict.fromkeys([*BERT.values(), *WORDS])
    backend = Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    _special(backend, list(BERT.values()))
    if draw.often(0.6):
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return backend, ANY, dict(BERT)
