"""Pruning with torch-pruning: families listed as working load and compute the same; all others raise PruneError.

Here are a few of each; `tests/campaign/test_torch_pruning.py` tries all.
"""

import inspect
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from compress.errors import PruneError
from compress.pruning import torch_pruning as engine
from compress.pruning.torch_pruning import prune_generic
from tests import tiny
from tests.slicing import families

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"max_position_embeddings": 64, "vocab_size": 45, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGES = ("vit", "beit", "dinov2", "vit_msn")
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}
_OWN: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "big_bird": {"attention_type": "original_full", "sep_token_id": 3},
        "convbert": {"embedding_size": 32},
        "deberta": _DISENTANGLED,
        "esm": {"mask_token_id": 4},
        "longformer": {"attention_window": 8},
        "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
        "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
        "roformer": {"embedding_size": 32},
        "squeezebert": {"embedding_size": 32},
        "xmod": {"languages": ["en"], "default_language": "en"},
    }
)
WORKING = (
    *("beit", "camembert", "data2vec-text", "flaubert", "layoutlm", "megatron-bert", "rembert"),
    *("roberta-prelayernorm", "vit", "vit_msn", "xlm", "xlm-roberta-xl", "xmod", "yoso"),
)
REFUSED = (
    *("deberta", "fnet", "ibert", "squeezebert", "convbert", "longformer", "big_bird", "canine"),
    *("dinov2", "esm", "luke", "mpnet", "mra", "nystromformer", "roformer"),
)


def model(family: str, *, head: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    if family in _IMAGES:
        head, own = AutoModelForImageClassification, {"image_size": 16, "patch_size": 8}
    else:
        own = {**_TEXT, **_OWN.get(family, {})}
    config = CONFIG_MAPPING[family](**{**_SIZES, **own, "num_labels": 3, "initializer_range": 0.2, **changes})
    return (head or AutoModelForSequenceClassification).from_config(config).eval()


def batch_for(family: str) -> dict[str, Tensor]:
    if family in _IMAGES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return tiny.batch((6, 6))


BATCH = tiny.batch((6, 6))


@pytest.mark.parametrize("family", ["flaubert", "rembert", "vit", "xmod"])
def test_a_working_family_is_pruned(family: str, tmp_path: Path) -> None:
    check_working(family, tmp_path)


def check_working(family: str, folder: Path) -> None:
    whole, batch = model(family), batch_for(family)
    before = whole(**batch).logits
    small = prune_generic(whole, batch, share=0.5)
    assert type(small) is type(whole)
    assert small.num_parameters() < 0.55 * whole.num_parameters()
    assert (small.config.hidden_size, small.config.num_attention_heads) == (16, 2)
    small.save_pretrained(folder)
    again = type(whole).from_pretrained(folder).eval()
    torch.testing.assert_close(again(**batch).logits, small(**batch).logits, rtol=0, atol=0)
    assert small(**batch).logits.shape == before.shape
    torch.testing.assert_close(whole(**batch).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["deberta", "convbert", "big_bird", "mpnet"])
def test_other_families_are_refused(family: str) -> None:
    check_refused(family)


def check_refused(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, batch = model(family), batch_for(family)
        if family == "longformer":
            batch.pop("attention_mask")
        with pytest.raises(PruneError, match=type(whole).__name__):
            prune_generic(whole, batch, share=0.5)


def test_the_docstring_lists_these_families() -> None:
    said = " ".join(str(engine.__doc__).split())
    assert f"works {', '.join(sorted(WORKING))} refused" in said
    assert all(family in said for family in REFUSED)


def test_taylor_keeps_units_that_the_loss_depends_on() -> None:
    """Neurons that nothing reads have no gradient and go first, however large they are."""
    whole, batch = model("camembert"), batch_for("camembert")
    layers = whole.roberta.encoder.layer
    with torch.no_grad():
        for layer in layers:
            layer.intermediate.dense.weight[::2] *= 10
            layer.output.dense.weight[:, ::2] = 0
    labels = torch.tensor([0, 2])
    small = prune_generic(whole, batch, share=0.5, importance="taylor", loss=lambda m: m(**batch, labels=labels).loss)
    for large, little in zip(layers, small.roberta.encoder.layer, strict=True):
        assert little.output.dense.weight.abs().sum(0).min() > 0
        assert large.output.dense.weight.abs().sum(0).min() == 0


@pytest.mark.parametrize(
    ("build", "asked", "said"),
    [
        (lambda: families.model("bert"), {}, "has a slice plan"),
        (lambda: families.model("gpt2"), {}, "has a slice plan"),
        (lambda: model("camembert", head=AutoModelForMaskedLM), {}, "tied weights"),
        (lambda: model("granite", head=AutoModelForCausalLM), {}, "never ends on grouped keys"),
        (lambda: model("convbert"), {}, f"torch-pruning {version('torch-pruning')}"),
        (lambda: model("camembert"), {"share": 0.9}, "leaves 4 of 4 heads"),
        (lambda: model("camembert"), {"share": 0.1}, "leaves 0 of 4 heads"),
        (lambda: model("camembert"), {"importance": "taylor"}, "needs a loss"),
    ],
)
def test_unsupported_requests_are_refused(build: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PruneError, match=said):
        prune_generic(build(), BATCH, **{"share": 0.5, **asked})


@pytest.mark.parametrize(("share", "heads"), [(0.25, 1), (0.75, 3)])
def test_widths_are_exact(share: float, heads: int) -> None:
    config = prune_generic(model("camembert"), BATCH, share=share).config
    assert (config.num_attention_heads, config.hidden_size, config.intermediate_size) == (heads, 8 * heads, 16 * heads)


def test_an_unused_pooler_is_cut_too() -> None:
    small = prune_generic(model("camembert", head=AutoModel), BATCH, share=0.5)
    assert small(**BATCH).pooler_output.shape == (2, 16)


def test_frozen_embeddings_are_pruned_and_stay_frozen() -> None:
    whole = model("camembert")
    whole.roberta.embeddings.requires_grad_(False)
    with torch.no_grad():  # in which the library alone stops
        small = prune_generic(whole.train(), BATCH, share=0.5)
    assert small.training
    assert whole.training
    assert not any(parameter.requires_grad for parameter in small.roberta.embeddings.parameters())
    assert all(parameter.requires_grad for parameter in small.roberta.encoder.parameters())


def test_the_source_is_unchanged_and_not_kept_alive() -> None:
    """It replaces parameters, and holds models in the default of an argument."""
    whole = model("camembert")
    before = {name: (parameter, parameter.clone()) for name, parameter in whole.named_parameters()}
    prune_generic(whole, BATCH, share=0.5)
    for name, parameter in whole.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    import torch_pruning

    defaults = inspect.signature(torch_pruning.pruner.BasePruner.__init__).parameters
    assert defaults["out_channel_groups"].default == {}
