"""The generic engine: what is said to work loads and computes the same; everything else is an error."""

import inspect
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from compress.errors import PruneError
from compress.slicing import torch_pruning as engine
from compress.slicing.torch_pruning import prune_generic
from tests import tiny
from tests.slicing import families, their_pruner, unplanned

BATCH = tiny.batch((6, 6))


@pytest.mark.parametrize("family", unplanned.WORKING)
def test_works(family: str, tmp_path: Path) -> None:
    whole, batch = unplanned.model(family), unplanned.batch(family)
    before = whole(**batch).logits
    small = prune_generic(whole, batch, share=0.5)
    assert type(small) is type(whole)
    assert small.num_parameters() < 0.55 * whole.num_parameters()
    assert (small.config.hidden_size, small.config.num_attention_heads) == (16, 2)
    small.save_pretrained(tmp_path)
    again = type(whole).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**batch).logits, small(**batch).logits, rtol=0, atol=0)
    assert small(**batch).logits.shape == before.shape
    torch.testing.assert_close(whole(**batch).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("family", unplanned.REFUSED)
def test_is_refused(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, batch = unplanned.model(family), unplanned.batch(family)
        if family == "longformer":
            batch.pop("attention_mask")
        with pytest.raises(PruneError, match=type(whole).__name__):
            prune_generic(whole, batch, share=0.5)


def test_its_list_is_the_one_that_is_tried() -> None:
    said = " ".join(str(engine.__doc__).split())
    assert f"works {', '.join(sorted(unplanned.WORKING))} refused" in said
    assert all(family in said for family in unplanned.REFUSED)


def test_importance_by_gradients_keeps_what_the_loss_needs() -> None:
    """Neurons that nothing reads have no gradient and go first, however large they are."""
    whole, batch = unplanned.model("camembert"), unplanned.batch("camembert")
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
        (lambda: unplanned.model("camembert", head=AutoModelForMaskedLM), {}, "tied weights"),
        (lambda: unplanned.model("granite", head=AutoModelForCausalLM), {}, "does not end on grouped keys"),
        (lambda: unplanned.model("camembert"), {"share": 0.9}, "leaves 4 of 4 heads"),
        (lambda: unplanned.model("camembert"), {"share": 0.1}, "leaves 0 of 4 heads"),
        (lambda: unplanned.model("camembert"), {"importance": "taylor"}, "needs a loss"),
    ],
)
def test_what_cannot_be_is_said_before_it_is_tried(build: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PruneError, match=said):
        prune_generic(build(), unplanned.batch("camembert"), **{"share": 0.5, **asked})


@pytest.mark.parametrize(("share", "heads"), [(0.25, 1), (0.75, 3)])
def test_widths_are_exact(share: float, heads: int) -> None:
    config = prune_generic(unplanned.model("camembert"), BATCH, share=share).config
    assert (config.num_attention_heads, config.hidden_size, config.intermediate_size) == (heads, 8 * heads, 16 * heads)


def test_a_pooler_that_nothing_was_asked_of_is_cut_along() -> None:
    small = prune_generic(unplanned.model("camembert", head=AutoModel), BATCH, share=0.5)
    assert small(**BATCH).pooler_output.shape == (2, 16)


def test_models_with_frozen_embeddings_are_pruned_whole() -> None:
    whole = unplanned.model("camembert")
    whole.roberta.embeddings.requires_grad_(False)
    with torch.no_grad():  # in which the library alone stops
        small = prune_generic(whole.train(), BATCH, share=0.5)
    assert small.training
    assert whole.training
    assert not any(parameter.requires_grad for parameter in small.roberta.embeddings.parameters())
    assert all(parameter.requires_grad for parameter in small.roberta.encoder.parameters())


def test_the_source_keeps_its_parameters_and_the_library_no_model() -> None:
    """It replaces parameters, and holds models in the default of an argument."""
    whole = unplanned.model("camembert")
    before = {name: (parameter, parameter.clone()) for name, parameter in whole.named_parameters()}
    prune_generic(whole, BATCH, share=0.5)
    for name, parameter in whole.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    defaults = inspect.signature(their_pruner.torch_pruning.pruner.BasePruner.__init__).parameters
    assert defaults["out_channel_groups"].default == {}


def test_a_refusal_names_the_version_of_the_package() -> None:
    with pytest.raises(PruneError, match=f"torch-pruning {version('torch-pruning')}"):
        prune_generic(unplanned.model("convbert"), BATCH, share=0.5)
