"""A row in a batch has the result that it has alone, for every family, whatever side its tokenizer pads on."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from compress.data.collate import Collate
from compress.errors import ObjectiveError, TeacherError
from compress.models.padding import align_padding, first_token, hide_padding, pads_left
from compress.models.sentence_modules import MODES
from compress.models.sentence_settings import SentenceSettings
from compress.models.signals import ATTENTION, SIGNAL_NAMES, Signals, open_attention, read
from compress.papers import pkd
from tests import generative, tiny

WORDS = len(tiny.SPECIAL) + len(tiny.WORDS)
LIKE_BERT: Mapping[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 66, "initializer_range": 0.2, "num_labels": 3,
}  # fmt: skip
XLM: Mapping[str, Any] = {
    "vocab_size": WORDS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "pad_index": 0,
    "pad_token_id": 0, "num_labels": 3, "n_langs": 1, "embed_init_std": 0.2,
}  # fmt: skip
OTHERS: Mapping[str, Any] = {
    "mpnet": lambda: CONFIG_MAPPING["mpnet"](**LIKE_BERT, pad_token_id=0),
    "gpt2": lambda: CONFIG_MAPPING["gpt2"](
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, pad_token_id=0,
        num_labels=3,
    ),
    "xlm": lambda: CONFIG_MAPPING["xlm"](**XLM),
    "xlm, last": lambda: CONFIG_MAPPING["xlm"](**XLM, summary_type="last"),
    "flaubert, last": lambda: CONFIG_MAPPING["flaubert"](**XLM, summary_type="cls_index"),
    "t5": lambda: CONFIG_MAPPING["t5"](
        vocab_size=WORDS, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, decoder_start_token_id=0,
        eos_token_id=3, pad_token_id=0, num_labels=3, initializer_factor=0.3,
    ),
    **{family: lambda family=family: tiny.config(family) for family in tiny.FAMILIES},
    **{family: lambda family=family: tiny.config(family) for family in tiny.LIKE_LLAMA},
}  # fmt: skip
HEADS: Mapping[str, Any] = {
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
}
PLACES = [
    *((family, head) for family in OTHERS for head in ("classification", "tagging")),
    *((family, "qa") for family in ("bert", "deberta-v2", "modernbert", "t5")),
]


def model_of(family: str, head: str) -> Any:
    torch.manual_seed(0)
    config = OTHERS[family]()
    config.num_labels = 2 if head == "qa" else 3
    model = HEADS[head].from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    hide_padding(model)
    return model


def rows() -> list[dict[str, list[int]]]:
    """Rows of 1 to 16 tokens that end with the token at which T5 classifies."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for length in (9, 1, 16, 4, 15, 2):
        ids = torch.randint(5, WORDS, (length,), generator=draw).tolist()
        ids[-1] = 3
        made.append({"input_ids": ids, "token_type_ids": [0] * length})
    return made


def wanted(model: Any, head: str) -> frozenset[str]:
    """All signals that this model shows."""
    wants = frozenset(SIGNAL_NAMES) - {"pair", "encoder_layers"}
    if head == "qa" and model.config.is_encoder_decoder:
        wants -= {"embeddings", "layers"}
    try:
        open_attention(model)
        read(model, {"input_ids": torch.tensor([[5, 3]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}, wants)
    except ObjectiveError:  # XLNet and XLM show none
        return wants - ATTENTION
    return wants


def of_row(signals: Signals, name: str, row: int, real_L: Tensor) -> list[Tensor]:
    """Select a row's values at its real tokens."""
    if name == "logits":
        logits = signals.logits
        assert logits is not None
        return [logits[row] if logits.dim() == 2 else logits[row][real_L]]
    if name == "embeddings":
        return [signals.embeddings[row][real_L]]
    values = getattr(signals, name)
    if name == "layers":
        return [each[row][real_L] for each in values]
    if name == "scores":
        return [each[row][:, real_L][:, :, real_L] for each in values]
    return [each[row][:, real_L] for each in values]


@torch.no_grad()
@pytest.mark.parametrize(("family", "head"), PLACES)
def test_a_row_in_a_batch_is_the_row_alone(family: str, head: str) -> None:
    model = model_of(family, head)
    wants = wanted(model, head)
    decoder = model.config.is_encoder_decoder
    for side in ("right", "left"):
        tokenizer = tiny.tokenizer()
        tokenizer.padding_side = side
        batch = Collate(tokenizer, left=pads_left(model))(rows())
        together = read(model, batch, wants)
        for at, row in enumerate(rows()):
            alone_row = {name: torch.tensor([values]) for name, values in row.items()}
            alone = read(model, alone_row | {"attention_mask": torch.ones_like(alone_row["input_ids"])}, wants)
            real_L = batch["attention_mask"][at].bool()
            every_L = torch.ones(len(row["input_ids"]), dtype=torch.bool)
            for name in sorted(wants):
                if decoder and name != "logits":  # the decoder reads what is given to it
                    continue
                for found, expected in zip(
                    of_row(together, name, at, real_L), of_row(alone, name, 0, every_L), strict=True
                ):
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{name}, row {at}, {side}")


@torch.no_grad()
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_vector_in_a_batch_is_the_vector_alone(mode: str, left: bool) -> None:
    settings = SentenceSettings.pooled(32, mode, normalise=True)
    encoder = tiny.with_settings(model_of("bert", "classification").bert, settings)
    batch = Collate(tiny.tokenizer(), left=left)(rows())
    together = encoder(**batch).sentence_embedding
    alone = [encoder(input_ids=torch.tensor([row["input_ids"]])).sentence_embedding for row in rows()]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_the_first_token_is_not_padding() -> None:
    states_BLD = torch.arange(12.0).reshape(2, 3, 2)
    mask_BL = torch.tensor([[0, 0, 1], [1, 1, 0]])
    assert first_token(states_BLD, mask_BL).tolist() == [[4, 5], [6, 7]]
    assert first_token(states_BLD, None).tolist() == [[0, 1], [6, 7]]
    other_BLD = states_BLD.flip(0)
    moved = pkd.patience(states_BLD.roll(1, 1), other_BLD.roll(1, 1), mask_BL.roll(1, 1))
    torch.testing.assert_close(pkd.patience(states_BLD, other_BLD, mask_BL), moved)


def test_a_mean_over_padding_is_refused() -> None:
    config = CONFIG_MAPPING["xlm"](**XLM, summary_type="mean")
    with pytest.raises(TeacherError, match="summary_type"):
        pads_left(AutoModelForSequenceClassification.from_config(config))
    assert not pads_left(AutoModelForTokenClassification.from_config(config))


def test_only_mobilebert_loses_the_embedding_of_padding() -> None:
    for family in ("mobilebert", "bert"):
        model = tiny.model(family)
        model.get_input_embeddings().weight.data += 1.0
        hide_padding(model)
        assert bool(model.get_input_embeddings().weight[0].any()) == (family == "bert")
        assert model.get_input_embeddings().weight[1:].any()


PADDED: Mapping[str, tuple[Any, int | None, bool, str]] = {
    "the model's": ("[PAD]", 1, False, "[UNK]"),
    "the tokenizer's": ("[PAD]", None, False, "[PAD]"),
    "the end of a text, if it has none": (None, None, False, "[MASK]"),
    "not the end, if it is read": ("[SEP]", None, True, "[MASK]"),
    "none of the vocabulary": ("[PAD]", -1, False, "[PAD]"),
}
"""pad_token, the config's pad_token_id, whether texts end with [SEP], and the padding token of both."""


@pytest.mark.parametrize("case", PADDED)
def test_a_decoder_and_its_tokenizer_have_the_same_padding(case: str) -> None:
    pad, own, framed, expected = PADDED[case]
    tokenizer = tiny.tokenizer() if framed else generative.gpt2_tokenizer(pad=False)
    if not framed:
        tokenizer.add_special_tokens({"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"})
    tokenizer.eos_token = "[MASK]"
    tokenizer.pad_token = pad
    vocabulary = tokenizer.get_vocab()
    config = CONFIG_MAPPING["gpt2"](pad_token_id=vocabulary["[UNK]"] if own == 1 else own)
    align_padding(tokenizer, config)
    assert tokenizer.pad_token == expected
    assert config.pad_token_id == vocabulary[expected]


def test_the_padding_of_an_encoder_stays() -> None:
    tokenizer, config = tiny.tokenizer(), tiny.config("bert", pad_token_id=4)
    align_padding(tokenizer, config)
    assert (tokenizer.pad_token, config.pad_token_id) == ("[PAD]", 4)
    tokenizer.pad_token = None
    align_padding(tokenizer, config)
    assert tokenizer.pad_token == "[MASK]"
