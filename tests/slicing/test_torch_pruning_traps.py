"""What goes wrong, mostly in silence, with torch-pruning 1.6.1 on transformers: that it does, and that ours does not.

Where the first half of a test fails after an update, the library has mended it, and `slicing.generic` may do
with less.
"""

import copy
import gc
import inspect
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, BertForMaskedLM, BertModel
from transformers.utils import logging

from compress.errors import PruneError
from compress.slicing.cut import slice_model
from compress.slicing.plan import HIDDEN, Group, SlicePlan
from compress.slicing.select import Kept, choose, magnitude
from compress.slicing.sizes import Sizes
from compress.slicing.torch_pruning import prune_generic
from tests import tiny
from tests.pruning import measured
from tests.slicing import families, their_pruner, unplanned

BATCH = tiny.batch((6, 6))


def bert(**changes: Any) -> Any:
    return families.model("bert", **changes)


def camembert() -> Any:
    """A family without a plan of ours, for what stands around torch-pruning."""
    return unplanned.model("camembert")


def cut(model: Any, **asked: float) -> Any:
    plan = SlicePlan.from_model(model)
    return slice_model(model, choose(plan, magnitude(model, plan), Sizes.from_request(model.config, **asked)))


def half(model: Any) -> Any:
    return cut(model, hidden=0.5, heads=2, ffn=0.5)


def reloaded(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


@pytest.fixture(autouse=True)
def no_load_reports() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def test_a_the_config_says_what_the_weights_are(tmp_path: Path) -> None:
    theirs = their_pruner.pruned(bert(), BATCH)
    assert theirs.config.hidden_size == 32
    with pytest.raises(RuntimeError, match="mismatch"):
        reloaded(theirs, tmp_path / "theirs")
    for ours in (half(bert()), prune_generic(camembert(), BATCH, share=0.5)):
        assert (ours.config.hidden_size, ours.config.num_attention_heads, ours.config.intermediate_size) == (16, 2, 32)
        again = reloaded(ours, tmp_path / ours.config.model_type)
        torch.testing.assert_close(families.logits(again), families.logits(ours), rtol=0, atol=0)


def test_b_heads_alone_can_be_pruned() -> None:
    theirs = their_pruner.pruned(bert(), BATCH, pruning_ratio=0.0)
    assert theirs.bert.encoder.layer[0].attention.self.num_attention_heads == 4
    ours = cut(bert(), heads=2)
    assert ours.bert.encoder.layer[0].attention.self.num_attention_heads == 2
    assert (families.logits(ours) - families.logits(bert())).abs().max() > 1e-3


def test_c_widths_are_exact() -> None:
    theirs = their_pruner.pruned(bert(), BATCH, pruning_ratio=1e-9, head_pruning_ratio=0.0)
    assert theirs.bert.encoder.layer[0].intermediate.dense.out_features == 63
    assert cut(bert(), ffn=1 - 1e-9).config.intermediate_size == 64
    assert cut(bert(), ffn=63).config.intermediate_size == 63
    for share, heads in ((0.25, 1), (0.5, 2), (0.75, 3)):
        config = prune_generic(camembert(), BATCH, share=share).config
        assert (config.num_attention_heads, config.hidden_size, config.intermediate_size) == (
            heads,
            8 * heads,
            16 * heads,
        )


def test_d_the_pooler_is_cut_along() -> None:
    model = bert()
    theirs = their_pruner.pruned(model, BATCH, ignored_layers=[model.bert.pooler, model.classifier])
    assert theirs.bert.pooler.dense.weight.shape == (32, 16)
    assert half(bert()).bert.pooler.dense.weight.shape == (16, 16)


def test_d_a_pooler_that_nothing_was_asked_of_is_cut_along() -> None:
    torch.manual_seed(0)
    encoder = BertModel(tiny.config("bert")).eval()
    last = {"output_transform": lambda out: out.last_hidden_state}
    theirs = their_pruner.pruned(copy.deepcopy(encoder), BATCH, **last)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        theirs(**BATCH)
    assert half(encoder)(**BATCH).pooler_output.shape == (2, 16)
    other = prune_generic(unplanned.model("camembert", head=AutoModel), BATCH, share=0.5)
    assert other(**BATCH).pooler_output.shape == (2, 16)


def masked_lm() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(tiny.config("bert")).eval()


def test_e_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model = masked_lm()
    theirs = their_pruner.pruned(model, BATCH, ignored_layers=[model.cls.predictions.decoder])
    words, out = theirs.bert.embeddings.word_embeddings.weight, theirs.cls.predictions.decoder.weight
    assert words is not out
    assert not torch.equal(words, out)
    ours = half(masked_lm())
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    again = reloaded(ours, tmp_path)
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight
    torch.testing.assert_close(families.logits(again), families.logits(ours), rtol=0, atol=0)


def test_e_ties_are_refused_where_they_cannot_be_kept() -> None:
    model = unplanned.model("camembert", head=AutoModelForMaskedLM)
    with pytest.raises(PruneError, match="tied weights"):
        prune_generic(model, BATCH, share=0.5)


def test_f_smaller_heads_keep_their_scale(tmp_path: Path) -> None:
    theirs = bert()
    made = their_pruner.pruner(theirs, BATCH, prune_num_heads=False, prune_head_dims=True)
    made.step()
    for layer in theirs.bert.encoder.layer:
        layer.attention.self.attention_head_size = 4
        layer.attention.self.all_head_size = 16
    again = reloaded(their_pruner.with_config(theirs), tmp_path / "theirs")
    assert (families.logits(again) - families.logits(theirs)).abs().max() > 1e-3
    ours = cut(bert(), hidden=16, heads=4)
    assert ours.bert.encoder.layer[0].attention.self.attention_head_size == 4
    again = reloaded(ours, tmp_path / "ours")
    torch.testing.assert_close(families.logits(again), families.logits(ours), rtol=0, atol=0)


def test_g_frozen_models_are_pruned_and_stay_frozen() -> None:
    theirs = bert().requires_grad_(False)
    before = their_pruner.sizes(theirs)
    assert their_pruner.sizes(their_pruner.pruned(theirs, BATCH)) == before
    frozen = bert().requires_grad_(False)
    torch.testing.assert_close(families.logits(half(frozen)), families.logits(half(bert())), rtol=0, atol=0)


def test_g_models_with_frozen_embeddings_are_pruned_whole() -> None:
    theirs = bert()
    theirs.bert.embeddings.requires_grad_(False)
    their_pruner.pruned(theirs, BATCH)
    with pytest.raises(RuntimeError):
        theirs(**BATCH)
    ours = camembert()
    ours.roberta.embeddings.requires_grad_(False)
    with torch.no_grad():  # in which the library alone stops
        small = prune_generic(ours.train(), BATCH, share=0.5)
    assert small.training
    assert ours.training
    assert not any(parameter.requires_grad for parameter in small.roberta.embeddings.parameters())
    assert all(parameter.requires_grad for parameter in small.roberta.encoder.parameters())


def test_h_every_layer_has_as_many_as_the_config_says() -> None:
    model = bert()
    with torch.no_grad():
        for n, layer in enumerate(model.bert.encoder.layer):
            layer.intermediate.dense.weight *= 3**n
    theirs = their_pruner.pruned(copy.deepcopy(model), BATCH, global_pruning=True)
    assert len({layer.intermediate.dense.out_features for layer in theirs.bert.encoder.layer}) > 1
    ours = half(model)
    assert {layer.intermediate.dense.out_features for layer in ours.bert.encoder.layer} == {32}
    plan = SlicePlan.from_model(model)
    uneven = {Group("ffn", "0"): torch.arange(10)}
    with pytest.raises(PruneError, match="10 units are kept where 64"):
        slice_model(model, Kept(plan.sizes, (0, 1, 2), uneven))


def test_i_what_no_config_can_say_is_refused_with_what_can() -> None:
    """Residual width kept, heads fewer: their model runs, and cannot be loaded."""
    with pytest.raises(PruneError, match=r"20 is not a multiple of 3 heads.*18, 21"):
        Sizes.from_request(bert().config, hidden=20, heads=3)
    assert Sizes.from_request(bert().config, heads=2).head_size == 16


def test_j_every_sample_counts_in_the_fisher_information() -> None:
    model = bert()
    losses = list(model(**tiny.batch((6, 6, 6))).logits.sum(-1))
    theirs, last = their_pruner.accumulated(model, losses), their_pruner.accumulated(model, losses[-1:])
    weight = model.classifier.weight
    assert theirs._counter[weight] == 1
    assert torch.equal(theirs._accu_grad[weight], last._accu_grad[weight])
    rows, one = measured.rows(6), measured.rated("theis.fisher", tiny.bert(3), measured.rows(6).select([5]))
    found = measured.rated("theis.fisher", tiny.bert(3), rows)
    each = [measured.rated("theis.fisher", tiny.bert(3), rows.select([n])) for n in range(6)]
    group = Group("ffn", "1")
    expected = torch.stack([alone[group] for alone in each]).mean(0)
    torch.testing.assert_close(found[group], expected, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(found[group], one[group], rtol=0.1)


def test_k_every_batch_counts_in_the_activations() -> None:
    model, batches = bert(), [tiny.batch((6, 6), seed=seed) for seed in range(2)]
    both, last = (their_pruner.activations(copy.deepcopy(model), some) for some in (batches, batches[1:]))
    assert all(torch.equal(both[name], last[name]) for name in last)
    found = measured.rated("minitron.activation", tiny.bert(3), measured.rows(6), batch=2)
    alone = measured.rated("minitron.activation", tiny.bert(3), measured.rows(6), batch=6)
    torch.testing.assert_close(found[HIDDEN], alone[HIDDEN], rtol=1e-4, atol=1e-6)


def test_l_embeddings_count_in_what_hidden_widths_matter() -> None:
    """Eight columns of the word embedding a thousand times as large."""
    model, large = bert(), bert()
    with torch.no_grad():
        large.bert.embeddings.word_embeddings.weight[:, :8] *= 1000
    theirs = [
        their_pruner.importance_of(each, BATCH, each.bert.encoder.layer[0].output.dense) for each in (model, large)
    ]
    torch.testing.assert_close(*theirs, rtol=0, atol=0)
    before, after = (measured.rated("minitron.activation", each)[HIDDEN] for each in (model, large))
    assert after[:8].mean() / after[8:].mean() > 1.2 * before[:8].mean() / before[8:].mean()


def test_m_pruned_models_are_let_go() -> None:
    defaults = inspect.signature(their_pruner.torch_pruning.pruner.BasePruner.__init__).parameters
    held = defaults["out_channel_groups"].default
    assert held == {}
    prune_generic(camembert(), BATCH, share=0.5)
    assert held == {}
    ours = half(bert())
    gone = weakref.ref(ours)
    del ours
    gc.collect()
    assert gone() is None


def test_n_the_source_is_as_before_and_can_still_be_trained() -> None:
    for model, prune in ((bert(), half), (camembert(), lambda each: prune_generic(each, BATCH, share=0.5))):
        before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
        prune(model)
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(parameter, before[name][1])


def test_n_theirs_has_other_parameters_than_the_optimizer() -> None:
    model = bert()
    held = {id(parameter) for parameter in model.parameters()}
    their_pruner.pruned(model, BATCH)
    assert not held & {id(parameter) for parameter in model.bert.parameters()}


def test_o_the_version_is_that_of_the_package() -> None:
    assert their_pruner.torch_pruning.__version__ != version("torch-pruning")
    with pytest.raises(PruneError, match=f"torch-pruning {version('torch-pruning')}"):
        prune_generic(unplanned.model("convbert"), BATCH, share=0.5)
