"""Draw folders of sentence-transformers as they are on the hub: every version's files, every module that is read, every
setting of it, and now and then something that is not read, which has to be refused by its name.

The folders are written file by file, not saved by the library, so that they have the forms of all its versions.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compress.models.sentence_folder import ENCODER_FILES
from compress.models.sentence_modules import ELEMENTWISE_ACTIVATIONS, MODES

WORDS = (
    *("the", "a", "this", "film", "story", "was", "is", "and", "not", "very", "good", "great", "bad", "dull", "slow"),
    *("red", "Blue", "LIGHT", "we", "it", "of", "in"),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HIDDEN, POSITIONS = 16, 40
TEXTS = (
    "",
    " ",
    "the film was good",
    "The Film Was GOOD and the story was Not",
    "LIGHT Blue red",
    "[SEP] in a text [sep] [MASK]",
    "naïve Straße İstanbul ΣΑΣ ÀÉ e\u0301",
    "日本 🙂 , don't ( stop ) !",
    "very " * 60 + "Good",
    "a dull story , and it was slow " * 4,
)
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1, "max_position_embeddings": POSITIONS + 1},
    "distilbert": {},
}
_SIZES = {
    "bert": {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "distilbert": {"dim": HIDDEN, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
}


@dataclass
class Drawn:
    """A folder that was written.

    refused   the things that are not supported, of which the message has to name one; none: it must be read
    about     what was drawn, for a report of a fault
    prompts   the names of prompts to try
    """

    folder: Path
    refused: list[str] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    prompts: list[str | None] = field(default_factory=lambda: [None, "query", "document"])


def make_tokenizer(draw: random.Random, **options: Any) -> PreTrainedTokenizerFast:
    """Make a WordPiece tokenizer, cased or not."""
    letters = [chr(code) for code in range(33, 127)]
    vocabulary = dict.fromkeys((*SPECIAL, *WORDS, *letters, *("##" + letter for letter in letters)))
    made = Tokenizer(models.WordPiece({token: n for n, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=draw.random() < 0.3)  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    if draw.random() < 0.9:
        made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    else:
        made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 2)]
        )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": token for name, token in names.items()}, **options
    )


def write(folder: Path, draw: random.Random) -> Drawn:
    """Write a random folder."""
    drawn = Drawn(folder)
    place = draw.choices(["", "0_Transformer", "parts/encoder"], [8, 2, 1])[0]
    _write_encoder(folder / place, draw, drawn)
    _write_encoder_file(folder / place, draw, drawn)
    modules = _draw_modules(draw, drawn)
    listed = [_entry(0, place, "Transformer", draw)]
    for number, (kind, config, layer) in enumerate(modules, start=1):
        path = draw.choices([f"{number}_{kind}", f"{number}_Map", f"modules/{number}"], [6, 1, 1])[0]
        listed.append(_entry(number, path, kind, draw))
        (folder / path).mkdir(parents=True)
        if config:
            if draw.random() < 0.02:
                config["strength"] = 2
                drawn.refused.append("strength")
            _write_json(folder / path / "config.json", config)
        if layer is not None:
            torch.manual_seed(draw.randrange(10**6))
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.3)
            save_file(layer.state_dict(), folder / path / "model.safetensors")
    if draw.random() < 0.02:
        listed[-1]["type"] = "custom_module.Whiten"
        drawn.refused.append("custom_module.Whiten")
    elif draw.random() < 0.03:
        other = draw.choice(["CNN", "LSTM", "WeightedLayerPooling", "WordWeights", "SpladePooling", "Router"])
        listed[-1]["type"] = f"sentence_transformers.models.{other}"
        drawn.refused.append(other)
    _write_json(folder / "modules.json", listed)
    _write_model_file(folder, draw, drawn)
    drawn.about.append(" > ".join(kind for kind, _, _ in modules))
    return drawn


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _entry(number: int, path: str, kind: str, draw: random.Random) -> dict[str, Any]:
    homes = {
        "Transformer": "base.modules.transformer",
        "Dense": "base.modules.dense",
        "Normalize": "base.modules.normalize",
        "Pooling": "sentence_transformer.modules.pooling",
        "LayerNorm": "sentence_transformer.modules.layer_norm",
        "Dropout": "sentence_transformer.modules.dropout",
    }
    home = draw.choice(["models", "models", homes[kind], "sentence_transformer.modules"])
    return {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{home}.{kind}"}


def _write_encoder(folder: Path, draw: random.Random, drawn: Drawn) -> None:
    family = draw.choices(list(FAMILIES), [6, 2, 2])[0]
    drawn.about.append(family)
    options: dict[str, Any] = {"model_max_length": draw.choice([POSITIONS, 20, 10**30])}
    if draw.random() < 0.2:
        options["truncation_side"] = "left"
    if draw.random() < 0.2:
        options["padding_side"] = "left"
    names = ["input_ids", "token_type_ids", "attention_mask"] if family == "bert" else ["input_ids", "attention_mask"]
    tokenizer = make_tokenizer(draw, model_input_names=names, **options)
    tokenizer.save_pretrained(folder)
    sizes = _SIZES.get(family, _SIZES["bert"]) | {"max_position_embeddings": POSITIONS} | dict(FAMILIES[family])
    torch.manual_seed(draw.randrange(10**6))
    config = CONFIG_MAPPING[family](vocab_size=len(tokenizer), initializer_range=0.3, pad_token_id=0, **sizes)
    AutoModel.from_config(config).save_pretrained(folder)


def _write_encoder_file(folder: Path, draw: random.Random, drawn: Drawn) -> None:
    """Write how the encoder reads texts, under a name of any version; sometimes nothing."""
    if draw.random() < 0.15:
        return
    config: dict[str, Any] = {}
    if draw.random() < 0.8:
        config["max_seq_length"] = draw.choice([None, 8, 12, POSITIONS, POSITIONS, 66, 8192])
    if draw.random() < 0.8:
        config["do_lower_case"] = draw.random() < 0.4
    if draw.random() < 0.2:
        config["transformer_task"] = "feature-extraction"
        config["modality_config"] = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
        config["module_output_name"] = "token_embeddings"
    if draw.random() < 0.1:
        config["unpad_inputs"] = draw.choice([True, False, None])
    if draw.random() < 0.1:
        config[draw.choice(["tokenizer_args", "processor_kwargs"])] = draw.choice(
            [{"model_max_length": 11}, {"padding_side": "left"}, {"truncation_side": "left"}]
        )
    if draw.random() < 0.1:
        config[draw.choice(["model_args", "model_kwargs"])] = draw.choice(
            [{"torch_dtype": "float32"}, {"attn_implementation": "eager"}, {"low_cpu_mem_usage": True}, {}]
        )
    if draw.random() < 0.05:
        config["config_args"] = {"output_attentions": False}
    if draw.random() < 0.1:
        config["processing_kwargs"] = {
            "text": draw.choice([{"max_length": 9}, {"padding": True}, {"truncation": True}])
        }
    odd: list[tuple[str, Any, str]] = [
        ("query_length", 8, "query_length"),
        ("module_output_name", "scores", "module_output_name"),
        ("max_sequence_length", 8, "max_sequence_length"),
        ("tokenizer_name_or_path", "bert-base-uncased", "tokenizer_name_or_path"),
        ("processing_kwargs", {"text": {"add_special_tokens": False}}, "add_special_tokens"),
        ("model_args", {"revision": "main"}, "revision"),
        ("tokenizer_args", {"vocab_file": "vocab.txt"}, "vocab_file"),
    ]
    for name, value, named in odd:
        if draw.random() < 0.006:
            config[name] = value
            drawn.refused.append(named)
    name = draw.choices(ENCODER_FILES, [6, 1, 1, 1, 1, 1, 1])[0]
    _write_json(folder / name, config)
    drawn.about.append(f"{name} {config}")


Module = tuple[str, dict[str, Any], nn.Module | None]


def _draw_modules(draw: random.Random, drawn: Drawn) -> list[Module]:
    """Draw the modules after the encoder, each with its config and weights."""
    modules: list[Module] = []
    width = HIDDEN
    if draw.random() < 0.15:
        width = draw.choice([12, HIDDEN])
        modules.append(_dense(HIDDEN, width, draw, source="token_embeddings", target="token_embeddings"))
    if draw.random() < 0.08:
        modules.append(("Normalize", {"module_input_name": "token_embeddings"}, None))
    modes = draw.sample(MODES, draw.choices([1, 2, 3], [8, 2, 1])[0])
    modules.append(("Pooling", _pooling(width, modes, draw), None))
    width *= len(modes)
    for _ in range(draw.choices([0, 1, 2, 3, 4], [2, 4, 3, 2, 1])[0]):
        kind = draw.choices(["Dense", "Normalize", "LayerNorm", "Dropout"], [4, 4, 1, 1])[0]
        if kind == "Dense":
            after = draw.choice([8, 16, 24])
            modules.append(_dense(width, after, draw))
            width = after
        elif kind == "LayerNorm":
            modules.append((kind, {"dimension": width}, nn.ModuleDict({"norm": nn.LayerNorm(width)})))
        else:
            modules.append((kind, {"dropout": 0.1} if kind == "Dropout" else {}, None))
    if draw.random() < 0.05:
        modules.append(_dense(width, 8, draw, target="projected"))
        if draw.random() < 0.5:
            names = {"module_input_name": "projected", "module_output_name": "sentence_embedding"}
            modules.append(("Normalize", names, None))
    if draw.random() < 0.03:
        modules.insert(0, ("Normalize", {}, None))
        drawn.refused.append("sentence_embedding")
    if draw.random() < 0.02:
        modules.append(_dense(width + 1, 8, draw))
        drawn.refused.append("in_features")
    return modules


def _dense(
    before: int,
    after: int,
    draw: random.Random,
    *,
    source: str = "sentence_embedding",
    target: str = "sentence_embedding",
) -> Module:
    residual, bias = draw.random() < 0.2, draw.random() < 0.7
    activation = draw.choice(["Tanh", "Identity", *sorted(ELEMENTWISE_ACTIVATIONS)])
    home = "linear" if activation == "Identity" else "activation"
    home = draw.choice([f"torch.nn.modules.{home}", "torch.nn"])
    config: dict[str, Any] = {"in_features": before, "out_features": after}
    if not bias or draw.random() < 0.8:
        config["bias"] = bias
    if activation != "Tanh" or draw.random() < 0.8:
        config["activation_function"] = f"{home}.{activation}"
    if residual:
        config["use_residual"] = True
    if (source, target) != ("sentence_embedding", "sentence_embedding") or draw.random() < 0.2:
        config["module_input_name"] = source
        config["module_output_name"] = draw.choice([target, None]) if source == target else target
    layers = {"linear": nn.Linear(before, after, bias)}
    if residual and before != after:
        layers["residual"] = nn.Linear(before, after, bias=False)
    return "Dense", config, nn.ModuleDict(layers)


def _pooling(width: int, modes: list[str], draw: random.Random) -> dict[str, Any]:
    """Write either form: a name or names, or a flag for each way."""
    config: dict[str, Any] = {draw.choice(["word_embedding_dimension", "embedding_dimension"]): width}
    flags = {
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
        "mean": "pooling_mode_mean_tokens",
        "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    if draw.random() < 0.5:
        config["pooling_mode"] = modes[0] if len(modes) == 1 and draw.random() < 0.8 else modes
    else:
        config |= {flag: mode in modes for mode, flag in flags.items() if mode in modes or draw.random() < 0.6}
    if draw.random() < 0.4:
        config["include_prompt"] = draw.random() < 0.4
    return config


def _write_model_file(folder: Path, draw: random.Random, drawn: Drawn) -> None:
    """Write the settings of the whole model; sometimes nothing."""
    if draw.random() < 0.2:
        return
    config: dict[str, Any] = {}
    if draw.random() < 0.5:
        config["__version__"] = {"sentence_transformers": "3.0.1", "transformers": "4.40.0", "pytorch": "2.2.0"}
    if draw.random() < 0.3:
        config["model_type"] = "SentenceTransformer"
    names = ["query", "document", "passage", "corpus", "search_query", "s2p_query", "Retrieval-query"]
    texts = ["query: ", "Find a FILM : ", "[SEP] ", "", None, "a long prompt , which is longer than most texts : "]
    prompts = {name: draw.choice(texts) for name in draw.sample(names, draw.choice([0, 1, 2, 3]))}
    if prompts or draw.random() < 0.3:
        config["prompts"] = prompts
        drawn.prompts += list(prompts)[:1]
    if draw.random() < 0.3:
        config["default_prompt_name"] = draw.choice([None, "query", *prompts])
    if draw.random() < 0.03:
        config["default_prompt_name"] = "none_such"
        drawn.refused.append("none_such")
    if draw.random() < 0.4:
        config["similarity_fn_name"] = draw.choice(["cosine", "dot", "euclidean", "manhattan", None])
    if draw.random() < 0.15:
        config["truncate_dim"] = draw.choice([None, 4, 8, 1000])
    if draw.random() < 0.02:
        config["query_prefix"] = "[Q] "
        drawn.refused.append("query_prefix")
    if draw.random() < 0.02:
        config["model_type"] = draw.choice(["SparseEncoder", "MultiVectorEncoder"])
        drawn.refused.append("model_type")
    _write_json(folder / "config_sentence_transformers.json", config)
    drawn.about.append(f"prompts {config}")
