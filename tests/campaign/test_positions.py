"""Every family reads as many tokens as it is said to have positions, and one that has no limit reads any number."""

import pytest
import torch

from compress.slicing.shape import positions
from tests.campaign.cases import Record, record, sample
from tests.campaign.test_attention import FAMILIES, build

QUICK = (
    "bart", "bert", "bigbird_pegasus", "codegen", "ctrl", "gpt2", "gptj", "ibert", "llama", "marian", "mra",
    "nystromformer", "openai-gpt", "opt", "roberta", "roformer", "t5", "xlm", "xlnet", "yoso",
)  # fmt: skip
UNKNOWN = ("prophetnet",)
"""Families of which we do not know what they read: their decoder predicts several tokens at once."""


@pytest.mark.parametrize("family", sample([each for each in FAMILIES if each not in UNKNOWN], 6, quick=QUICK))
def test_a_model_reads_as_many_tokens_as_it_has_positions(family: str, record_property: Record) -> None:
    try:
        model, _ = build(family)
        _read(model, 7)
    except Exception as error:
        assert family not in QUICK, f"{family} is one that can be built"
        pytest.skip(f"{family} cannot be built this small, or needs more than text: {error}"[:200])
    known = positions(model)
    faults: dict[str, object] = {}
    for tokens in (64, 65, 66, 200) if known is None else (known,):
        try:
            _read(model, tokens)
        except (IndexError, RuntimeError, ValueError) as error:
            faults[f"{family}, {tokens} tokens of {known}"] = str(error)
    record(record_property, "positions of a family", 1, faults)


@torch.no_grad()
def _read(model: torch.nn.Module, tokens: int) -> None:
    ids = torch.randint(5, 64, (2, tokens), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model(**inputs, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))  # type: ignore[union-attr]
