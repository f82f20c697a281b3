"""Count parameters, and the FLOPs of matrix products, on any device and without changing the model."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, GPT2Config, T5Config

from compress import families
from compress.models.flops import COUNTED_TOKENS, count_parameters, flops_per_token, measure_size
from tests import tiny


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("family", "layers", "tokens", "products"),
    [
        # four projections, two attention products, two of the FFN; the pooler once
        *(("bert", 3, tokens, 3 * (4 * 32**2 + 2 * tokens * 32 + 2 * 32 * 64) + 32**2 / tokens) for tokens in (8, 40)),
        ("modernbert", 4, 40, 4 * (4 * 32**2 + 2 * 40 * 32 + 3 * 32 * 64)),  # three products in its FFN
        ("qwen3", 3, 24, 3 * (2 * 32 * 48 + 2 * 32 * 24 + 2 * 24 * 48 + 3 * 32 * 64)),  # 4 heads of 12, 2 for keys
    ],
)
def test_matrix_products(family: str, layers: int, tokens: int, products: float, device: str) -> None:
    more = {"local_attention": 4} if family == "modernbert" else {}
    with torch.device(device):
        model = AutoModel.from_config(tiny.config(family, layers=layers, **more))
    assert flops_per_token(model, tokens) == 2 * products


def test_size_of_a_modernbert() -> None:
    """Local layers compute all pairs."""
    with torch.device("meta"):
        model = AutoModel.from_config(tiny.config("modernbert", layers=4, local_attention=4))
    assert model.config.layer_types.count("sliding_attention") == 2
    assert measure_size(model).flops_per_token == 2 * 4 * (4 * 32**2 + 2 * COUNTED_TOKENS * 32 + 3 * 32 * 64)
    table = 32 * model.config.vocab_size
    assert count_parameters(model) == 4 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) - 32 + 2 * 32 + table


PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M": ("llama", 134_515_008, (30, 576, 9, 3, 1536, 49152)),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 494_032_768, (24, 896, 14, 2, 4864, 151936)),
    "Qwen/Qwen3-0.6B": ("qwen3", 596_049_920, (28, 1024, 16, 8, 3072, 151936)),
}
"""Family, parameters (each tied one once), and the sizes in its config.json."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    family, expected, sizes = PUBLISHED[name]
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = CONFIG_MAPPING[family](**dict(zip((*names, "vocab_size"), sizes, strict=True)), tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(model) == expected


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gpt2"])
def test_every_family(family: str) -> None:
    """DeBERTa passes parameters to modules, XLNet has no positions; without weights most give the same figure."""
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50) if family == "gpt2" else tiny.config(family)
    model = AutoModel.from_config(config)
    next(model.parameters()).requires_grad_(False)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    model.train()
    counted = flops_per_token(model, 32)
    assert counted > 2 * 2 * (4 * 32 * 32)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    if not families.find(family).reads_values:
        assert flops_per_token(model.to("meta"), 32) == counted


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_experts_count_where_they_are_used(device: str) -> None:
    """Two of four experts for each token: three products each, and the router's."""
    config = CONFIG_MAPPING["mixtral"](
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModel.from_config(config)
    before = model.config._experts_implementation
    assert flops_per_token(model, 16) == 2 * (4 * 32**2 + 2 * 16 * 32 + 2 * 3 * 32 * 64 + 32 * 4)
    assert model.config._experts_implementation == before


def test_modes_of_modules_stay() -> None:
    model = tiny.bert().train()
    model.bert.embeddings.eval()
    flops_per_token(model, 8)
    assert model.training and not model.bert.embeddings.training


def test_length_is_limited_by_positions() -> None:
    model = tiny.model("roberta", head=AutoModel, max_position_embeddings=18)
    assert flops_per_token(model, 500) == flops_per_token(model, 17)


def test_the_encoder_of_an_encoder_decoder() -> None:
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    encoder = AutoModel.from_config(config).get_encoder()
    assert flops_per_token(encoder, 16) == 2 * 2 * (4 * 32 * 32 + 2 * 16 * 32 + 2 * 32 * 64)


def test_tied_parameters_count_once() -> None:
    model = tiny.bert()
    before = count_parameters(model)
    model.bert.encoder.layer[1].intermediate = model.bert.encoder.layer[0].intermediate
    assert count_parameters(model) == before - (32 * 64 + 64)
