"""Tiny random models, tokenizers, data and recipes for tests, instead of downloads."""

import copy
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    PreTrainedModel,
)

from compress.data.task import Task
from compress.exporters.artifact import Bundle
from compress.models.sentence_encoder import AutoModelForSentenceEmbedding, SentenceEncoder
from compress.models.sentence_settings import SentenceSettings, set_settings

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("a", "the", "this", "that", "film", "movie", "story", "actor", "scene", "plot", "is", "was", "and", "but"),
    *("not", "never", "very", "quite", "too", "so", "good", "great", "fine", "fun", "sharp", "warm"),
    *("bad", "dull", "poor", "sad", "slow", "cold", "!", ".", ",", "?", "##s", "##ly", "##ing", "##er"),
)


def tokenizer(words: tuple[str, ...] = WORDS) -> BertTokenizer:
    """Make a lower-casing WordPiece tokenizer with ids in the order SPECIAL + words."""
    return BertTokenizer(vocab={word: index for index, word in enumerate((*SPECIAL, *words))}, do_lower_case=True)


def bert(labels: int = 2, *, layers: int = 2, hidden: int = 32, seed: int = 0, **config: Any) -> Any:
    """Make a BERT classifier of `labels` outputs over the tiny tokenizer's vocabulary, in eval mode.

    Weights have standard deviation 0.2, so that different texts have clearly different logits.
    """
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": hidden, "num_hidden_layers": layers}
    shape = {"num_attention_heads": 4, "intermediate_size": 2 * hidden, "max_position_embeddings": 64}
    return BertForSequenceClassification(
        BertConfig(**{**sizes, **shape, "num_labels": labels, "initializer_range": 0.2, **config})
    ).eval()


SENTIMENT = Task("classification", ("sentence",), "label", ("negative", "positive"), "accuracy")


def bundle(path: Path, **changed: Any) -> Bundle:
    """Write a bundle of tiny parts, replaced by those in `changed`."""
    parts = {"tokenizer": tokenizer(), "task": SENTIMENT, "max_length": 16, "recipe": "stages: []\n"}
    if "model" not in changed:
        parts["model"] = bert()
    return Bundle.write(path, **{**parts, "card": {"name": "tiny"}, **changed})


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "distilbert": {},
    "roberta": {"type_vocab_size": 1},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "ernie": {},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
    "xlnet": {},
    "llama": {"num_key_value_heads": 2},
}
"""Settings of each family, besides the sizes, whose names `config` knows."""
LIKE_LLAMA: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "qwen2": {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
}
"""Settings of the `grouped` families with every feature: biases, windows, wide heads."""
_SPELLED = {
    "gpt2": {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "ffn": "n_inner"},
    "distilbert": {"layers": "n_layers", "hidden": "dim", "heads": "n_heads", "ffn": "hidden_dim"},
    "xlnet": {"layers": "n_layer", "hidden": "d_model", "heads": "n_head", "ffn": "d_inner"},
}
_SPELLED_AS_BERT = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
}


def config(family: str, *, layers: int = 2, hidden: int = 32, heads: int = 4, labels: int = 3, **changes: Any) -> Any:
    """Make a new config: transformers stores the attention implementation in it."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 2 * hidden}
    spelled = {_SPELLED.get(family, _SPELLED_AS_BERT)[size]: value for size, value in sizes.items()}
    common = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "pad_token_id": 0,
        "num_labels": labels,
        "initializer_range": 0.2,
    }
    positions = {} if family == "xlnet" else {"max_position_embeddings": 64}
    own = FAMILIES.get(family) or LIKE_LLAMA.get(family, {})
    return CONFIG_MAPPING[family](**{**common, **positions, **spelled, **own, **changes})


def model(
    family: str, *, seed: int = 0, head: Any = AutoModelForSequenceClassification, eager: bool = False, **changes: Any
) -> Any:
    """Make a random model in eval mode; the same seed gives the same weights with any attention implementation."""
    torch.manual_seed(seed)
    implementation = {"attn_implementation": "eager"} if eager else {}
    return head.from_config(config(family, **changes), **implementation).eval()


def with_settings(encoder: PreTrainedModel, settings: SentenceSettings) -> SentenceEncoder:
    """Wrap an encoder, which is not copied, in a sentence encoder whose modules have no weights."""
    config = copy.deepcopy(encoder.config)
    set_settings(config, settings)
    with torch.device("meta"):
        model = AutoModelForSentenceEmbedding.from_config(config)
    setattr(model, model.base_model_prefix, encoder)
    return model.train(encoder.training)


def call(function: Callable[..., Any], **flat: Any) -> Any:
    """Call a command's function with flat settings, gathering them into its groups of options."""
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(group := parameter.default):
            own = {each.name: flat.pop(each.name) for each in fields(group) if each.name in flat}
            flat[name] = flat.get(name, replace(group, **own))
    return function(**flat)


def batch(lengths: Sequence[int] = (7, 5, 1), *, seed: int = 0) -> dict[str, Tensor]:
    """Make random rows of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(len(SPECIAL), len(SPECIAL) + len(WORDS), shape, generator=generator)
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def checkpoint(folder: Path, saved: Any = None) -> str:
    """Save a model (by default a headless tiny BERT) with the tiny tokenizer, and return the path."""
    (bert(initializer_range=0.1).bert if saved is None else saved).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def reviews(folder: Path, *, train: int = 96, dev: int = 40) -> str:
    """Write a folder of two-class data, with texts of 2 to 9 words of which one decides, and return its path."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for split, rows in (("train", train), ("dev", dev)):
        lines = ["text\tlabel"]
        for i in range(rows):
            words = [draw.choice(WORDS[:12]) for _ in range(draw.randint(1, 8))]
            words.insert(draw.randint(0, len(words)), ("bad", "good")[i % 2])
            lines.append(f"{' '.join(words)}\t{('negative', 'positive')[i % 2]}")
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


RECIPE = """
paper: {title: A tiny test, authors: Nobody, year: 2025, url: https://example.org}
about: Two short stages with every kind of part.
teacher: {finetune: teacher, steps: 24, batch: 16, lr: 1.0e-2, max_length: 32, evaluate: 1, checkpoint: 6}
student: {layers: 1, hidden: 16, ffn: 32, heads: 2}
stages:
  - distill: intermediate
    steps: 12
    batch: 16
    max_length: 32
    lr: 1.0e-3
    checkpoint: 4
    objective:
      - {loss: tinybert.hidden, project: true}
      - {loss: minilm.value_relations, layers: last, heads: 2}
  - distill: prediction
    steps: 24
    batch: 16
    max_length: 32
    lr: 2.0e-2
    checkpoint: 5
    objective:
      - {loss: hinton.soft_targets, weight: 0.5, temperature: 2.0}
      - {loss: bert.labels, weight: 0.5}
"""


def recipe(folder: Path, text: str = RECIPE) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")
    return str(folder / "tiny.yaml")
