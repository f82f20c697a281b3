"""What is cut computes what the whole does with the rest masked, in every family, along every axis."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
)

from compress.errors import PruneError
from compress.exporters.onnx import parity, to_onnx
from compress.slicing.cut import cut, reorder_units, slice_model
from compress.slicing.plan import VOCABULARY, Group, SlicePlan, parameters_of
from compress.slicing.select import Kept, choose, magnitude
from compress.slicing.sizes import Sizes, resize_config
from tests import generative, tiny
from tests.slicing.families import DISTINCT, axes, logits, model, ways
from tests.slicing.oracle import masked

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def kept_of(whole: Any, axis: str) -> Kept:
    """The most important by random numbers: magnitude would hide a mix-up of units of like size."""
    plan = SlicePlan.from_model(whole)
    draw = torch.Generator().manual_seed(3)
    importance = {group: torch.rand(count, generator=draw) for group, count in plan.groups.items()}
    importance[Group("layers")] = torch.tensor([0.9, 0.1, 0.5])
    return choose(plan, importance, Sizes.from_request(whole.config, **axes(whole.config.model_type)[axis]))


@pytest.mark.parametrize(("family", "axis"), ways())
def test_a_slice_is_the_whole_with_the_rest_masked(family: str, axis: str, tmp_path: Path) -> None:
    whole = model(family)
    before = {name: each.clone() for name, each in whole.state_dict().items()}
    kept = kept_of(whole, axis)
    small = slice_model(whole, kept)
    with masked(whole, kept):
        expected = logits(whole)
    torch.testing.assert_close(logits(small), expected, **CLOSE)
    assert not torch.allclose(logits(whole), expected, atol=1e-2) or axis == "heads", "something was cut"
    assert all(torch.equal(each, before[name]) for name, each in whole.state_dict().items()), "the whole stays"
    assert Sizes.from_config(small.config) == kept.sizes == SlicePlan.from_model(small).sizes

    small.save_pretrained(tmp_path)
    again = type(small).from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(small)), "it loads as any checkpoint does"
    mine, theirs = small.state_dict(), whole.state_dict()
    shared = {each.data_ptr() for each in theirs.values()} & {each.data_ptr() for each in mine.values()}
    assert not {pointer for pointer in shared if pointer}, "and has its own weights"


@pytest.mark.parametrize(
    ("family", "axis"),
    [way for way in ways() if way[1] == "everything"]
    + [("mobilebert", "bottleneck"), *((family, "smaller heads") for family in ("bert", "modernbert", "llama"))],
)
def test_a_slice_exports(family: str, axis: str, tmp_path: Path) -> None:
    """Cut along every axis at once, with heads and bottlenecks of no stock width."""
    whole = model(family)
    small = slice_model(whole, kept_of(whole, axis))
    to_onnx(small, tmp_path / "model.onnx", segments=False)
    assert parity(small, tmp_path / "model.onnx", [tiny.batch(), tiny.batch((3, 9))]) < 2e-5


@pytest.mark.parametrize("family", DISTINCT)
def test_reordered_units_compute_the_same_and_their_prefix_is_best(family: str) -> None:
    whole = model(family)
    plan = SlicePlan.from_model(whole)
    importance = magnitude(whole, plan)
    again = reorder_units(whole, importance)
    torch.testing.assert_close(logits(again), logits(whole), rtol=1e-4, atol=1e-4)
    sizes = Sizes.from_request(whole.config, **axes(family)["everything"])
    best = slice_model(whole, choose(plan, importance, sizes, layers=(0, 2)))
    first = slice_model(again, choose(SlicePlan.from_model(again), None, sizes, layers=(0, 2)))
    torch.testing.assert_close(logits(first), logits(best), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", AutoModelForMaskedLM),
        ("bert", AutoModelForPreTraining),
        ("roberta", AutoModelForMaskedLM),
        ("distilbert", AutoModelForMaskedLM),
        ("electra", AutoModelForMaskedLM),
        ("electra", AutoModelForPreTraining),
        ("albert", AutoModelForMaskedLM),
        ("albert", AutoModelForPreTraining),
        ("deberta-v2", AutoModelForMaskedLM),
        ("gpt2", AutoModelForCausalLM),
        ("modernbert", AutoModelForMaskedLM),
        ("llama", AutoModelForCausalLM),
        ("qwen3", AutoModelForCausalLM),
    ],
)
def test_language_models_keep_their_ties(family: str, head: Any, tmp_path: Path) -> None:
    whole = model(family, head=head)
    plan = SlicePlan.from_model(whole)
    sizes = Sizes.from_request(whole.config, hidden=24, heads=2 if family in tiny.LIKE_LLAMA else 3)
    kept = choose(plan, magnitude(whole, plan), sizes)
    small = slice_model(whole, kept)

    def said(of: Any) -> torch.Tensor:
        with torch.no_grad():
            out = of(**tiny.batch())
        return next(
            getattr(out, name) for name in ("logits", "prediction_logits") if getattr(out, name, None) is not None
        )

    with masked(whole, kept):
        expected = said(whole)
    torch.testing.assert_close(said(small), expected, **CLOSE)
    ends, begins = small.get_output_embeddings(), small.get_input_embeddings()
    if ends is not None and whole.get_output_embeddings().weight is whole.get_input_embeddings().weight:
        assert ends.weight is begins.weight
    small.save_pretrained(tmp_path)
    torch.testing.assert_close(said(type(small).from_pretrained(tmp_path)), said(small), rtol=1e-6, atol=1e-6)


def test_tokens_are_cut_from_table_and_tied_head() -> None:
    whole = model("bert", head=AutoModelForMaskedLM)
    plan = SlicePlan.from_model(whole)
    tokens = torch.tensor([0, 1, 2, 3, 4, 7, 9, 11])
    kept = Kept(plan.sizes, (0, 1, 2), {VOCABULARY: tokens})
    small = slice_model(whole, kept)
    batch = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        mine = small(**batch).logits
        theirs = whole(**batch | {"input_ids": tokens[batch["input_ids"]]}).logits
    torch.testing.assert_close(mine, theirs[..., tokens], **CLOSE)
    assert small.config.vocab_size == 8


def test_new_rows_start_at_zero_and_learn() -> None:
    whole = model("bert")
    kept = choose(SlicePlan.from_model(whole), magnitude(whole), Sizes.from_request(whole.config, heads=2))
    small = slice_model(whole, kept).train()
    assert small.config.num_attention_heads == 2 and kept.sizes.head_size == 16
    small(**tiny.batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
    attention = small.bert.encoder.layer[0].attention
    new = torch.arange(16)[8:]
    for weight, dim in ((attention.self.key.weight, 0), (attention.output.dense.weight, 1)):
        assert not weight.index_select(dim, new).any(), "exact at first"
        assert weight.grad.index_select(dim, new).any(), "and not for ever"


def test_gradients_flow_to_the_whole_through_a_cut() -> None:
    whole = model("bert")
    plan = SlicePlan.from_model(whole)
    kept = choose(plan, None, Sizes.from_request(whole.config, layers=2, hidden=24, heads=3, ffn=40), layers=(0, 2))
    small = slice_model(whole, kept)
    labels = torch.tensor([0, 1, 2])
    small(**tiny.batch(), labels=labels).loss.backward()
    weights = cut(plan, parameters_of(whole), kept)
    torch.func.functional_call(small, weights, (), tiny.batch() | {"labels": labels}).loss.backward()
    query = "bert.encoder.layer.{}.attention.self.query.weight"
    mine = dict(whole.named_parameters())[query.format(2)].grad
    torch.testing.assert_close(mine[:24, :24], dict(small.named_parameters())[query.format(1)].grad, **CLOSE)
    assert not mine[24:].any() and not mine[:, 24:].any()
    assert dict(whole.named_parameters())[query.format(1)].grad is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"hidden": 0.5}, "3 layers, hidden 16, 2 heads of 8, ffn 64"),
        ({"hidden": 0.7}, "3 layers, hidden 24, 3 heads of 8, ffn 64"),
        ({"hidden": 28}, "3 layers, hidden 28, 4 heads of 7, ffn 64"),
        ({"hidden": 24, "heads": 4}, "3 layers, hidden 24, 4 heads of 6, ffn 64"),
        ({"hidden": 0.7, "heads": 4}, "3 layers, hidden 24, 4 heads of 6, ffn 64"),
        ({"heads": 0.5}, "3 layers, hidden 32, 2 heads of 16, ffn 64"),
        ({"layers": 0.34, "ffn": 1}, "1 layers, hidden 32, 4 heads of 8, ffn 1"),
        ({}, "3 layers, hidden 32, 4 heads of 8, ffn 64"),
    ],
)
def test_requests_resolve_to_sizes(asked: dict[str, float], found: str) -> None:
    assert str(Sizes.from_request(model("bert").config, **asked)) == found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"heads": 0.4}, "3 layers, hidden 32, 2 heads of 8, ffn 64"),
        ({"hidden": 0.7}, "3 layers, hidden 24, 4 heads of 8, ffn 64"),
        ({"hidden": 0.7, "heads": 2}, "3 layers, hidden 22, 2 heads of 8, ffn 64"),
        ({"hidden": 12, "ffn": 0.5}, "3 layers, hidden 12, 4 heads of 8, ffn 32"),
    ],
)
def test_a_llamas_heads_stay_in_groups(asked: dict[str, float], found: str) -> None:
    """Four heads, of which two share keys and values."""
    config = model("llama").config
    sizes = Sizes.from_request(config, **asked)
    assert str(sizes) == found
    smaller = resize_config(config, sizes)
    assert (smaller.head_dim, smaller.num_key_value_heads) == (8, sizes.heads // 2)


@pytest.mark.parametrize(
    ("family", "asked", "said"),
    [
        ("llama", {"heads": 3}, "heads: 3 is not a multiple of 2: 2 heads share .*; the nearest that are: 2, 4"),
        ("llama", {"hidden": 30}, "hidden: 30 is not a multiple of 4: .*; the nearest that are: 28, 32"),
        ("bert", {"hidden": 33}, "hidden: 33 is more than the model's 32"),
        ("bert", {"hidden": 24, "heads": 5}, "heads: 5 is more than the model's 4"),
        ("bert", {"hidden": 25, "heads": 2}, "the nearest that are: 24, 26"),
        ("bert", {"ffn": 2.5}, "ffn: 2.5; expected a whole number"),
        ("bert", {"layers": 0}, "layers: 0; expected a whole number"),
        ("bert", {"ffn": -0.5}, "ffn: -0.5; expected a whole number"),
        ("bert", {"embedding": 0.5}, "this bert model has no such size"),
        ("electra", {"hidden": 16}, "equals the width of the embedding"),
    ],
)
def test_an_impossible_size_names_possible_ones(family: str, asked: dict[str, float], said: str) -> None:
    with pytest.raises(PruneError, match=said):
        Sizes.from_request(model(family).config, **asked)


def test_frozen_models_are_cut_alike() -> None:
    frozen, other = (
        slice_model(each, kept_of(each, "everything")) for each in (model("bert").requires_grad_(False), model("bert"))
    )
    torch.testing.assert_close(logits(frozen), logits(other), rtol=0, atol=0)


@pytest.mark.parametrize("setting", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_scores_of_another_scale_are_refused(setting: dict[str, bool]) -> None:
    (name,) = setting
    with pytest.raises(PruneError, match=f"{name} is {setting[name]} in its config; expected {not setting[name]}"):
        SlicePlan.from_model(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=45, **setting)))


def test_a_family_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(PruneError, match="no slice plan for 'xlnet'; there is one for albert, bert"):
        SlicePlan.from_model(tiny.model("xlnet"))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"hidden": 0.5}, "3 layers, hidden 16, 2 heads of 8, ffn 64"),
        ({"hidden": 28}, "the nearest that are: 24, 32"),
        ({"hidden": 0.8}, "3 layers, hidden 24, 3 heads of 8, ffn 64"),
        ({"hidden": 24, "heads": 4}, "with 4 heads; the nearest that are: 16, 32"),
        ({"hidden": 0.75, "heads": 4}, "3 layers, hidden 16, 4 heads of 4, ffn 64"),
        ({"heads": 0.5}, "3 layers, hidden 32, 2 heads of 16, ffn 64"),
    ],
)
def test_rotary_heads_change_by_whole_factors(asked: dict[str, float], found: str) -> None:
    config = model("modernbert").config
    try:
        came_to = str(Sizes.from_request(config, **asked))
    except PruneError as error:
        came_to = str(error)
    assert came_to.endswith(found)


def test_rescaled_rotary_frequencies_keep_the_head_size() -> None:
    config = model("modernbert").config
    yarn = {"rope_type": "yarn", "rope_theta": 160_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    config.rope_parameters["full_attention"] = yarn
    assert Sizes.from_request(config, hidden=16).head_size == 8
    with pytest.raises(PruneError, match="nearest that are: 32"):
        Sizes.from_request(config, hidden=16, heads=4)


def test_layers_keep_their_kind_and_the_first_stays_first() -> None:
    whole = model("modernbert")
    plan = SlicePlan.from_model(whole)
    importance = magnitude(whole, plan) | {Group("layers"): torch.tensor([0.1, 0.2, 0.9])}
    kept = choose(plan, importance, Sizes.from_request(whole.config, layers=2))
    assert kept.layers == (0, 2), "whatever its importance"
    assert slice_model(whole, kept).config.layer_types == ["full_attention", "sliding_attention"]
    for layers in ("last", (1, 2), (0, 0)):
        with pytest.raises(PruneError, match="no norm before its attention"):
            choose(plan, importance, Sizes.from_request(whole.config, layers=2), layers=layers)
    with pytest.raises(PruneError, match="no norm before its attention"):
        slice_model(whole, Kept(kept.sizes, (2, 1), {}))


def test_rotary_heads_of_other_sizes_are_refused() -> None:
    plan = SlicePlan.from_model(model("modernbert"))
    with pytest.raises(PruneError, match="heads of 6: the model's heads of 8 have rotary"):
        choose(plan, None, replace(plan.sizes, hidden=24, head_size=6))


def test_blocks_of_different_sizes_are_refused() -> None:
    whole = model("bert")
    plan = SlicePlan.from_model(whole)
    kept = Kept(plan.sizes, (0, 1, 2), {Group("ffn", "1"): torch.arange(8)})
    with pytest.raises(PruneError, match=r"ffn\.1: 8 units are kept, but the sizes say 64"):
        slice_model(whole, kept)


def test_shared_layers_are_refused() -> None:
    from compress.models.sharing import share

    whole = model("bert")
    share(whole, ffn=1)
    with pytest.raises(PruneError, match="prune the model first, and share weights"):
        reorder_units(whole, magnitude(whole))


def test_a_head_of_its_own_weights_stays_one_whatever_the_config_ties() -> None:
    whole = generative.separated(generative.llama(tie_word_embeddings=True))
    same = reorder_units(whole, magnitude(whole, SlicePlan.from_model(whole)))
    rows = generative.rows("a good film")
    torch.testing.assert_close(same(**rows).logits, whole(**rows).logits, atol=1e-4, rtol=0)
