"""Activation and movement are what their papers say, written out for BERT; what is rated low does little."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from compress.slicing.plan import LAYERS, Group, SlicePlan
from tests import tiny
from tests.pruning import measured

HEADS, SIZE = 4, 8


def bert(**changes: Any) -> Any:
    return tiny.bert(3, layers=3, **changes)


def loss_of(model: Any, batch: Mapping[str, Tensor], reduction: str = "mean") -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits, batch["labels"], reduction=reduction)


def activations(model: Any) -> dict[Group, Tensor]:
    """Sums over every token of every example, from hooks on BERT's own modules."""
    sums: dict[Group, Tensor] = defaultdict(lambda: torch.zeros(()))
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, args, out, name=name: seen.update({name: out[0] if isinstance(out, tuple) else out})
        )
    for batch in measured.singles():
        with torch.no_grad():
            model(batch["input_ids"], attention_mask=batch["attention_mask"])
        sums[Group("hidden")] = sums[Group("hidden")] + seen["bert.embeddings.LayerNorm"][0].abs().sum(0)
        sums[Group("hidden")] = sums[Group("hidden")] + seen["bert.pooler"][0].abs()
        before = seen["bert.embeddings"]
        for n in range(3):
            layer, block = f"bert.encoder.layer.{n}", str(n)
            for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
                sums[Group("hidden")] = sums[Group("hidden")] + seen[f"{layer}.{norm}"][0].abs().sum(0)
            attended = seen[f"{layer}.attention.self"][0]
            sums[Group("value", block)] = sums[Group("value", block)] + attended.abs().sum(0)
            lengths = attended.view(-1, HEADS, SIZE).pow(2).sum(-1).sqrt()
            sums[Group("heads", block)] = sums[Group("heads", block)] + lengths.sum(0)
            sides = [seen[f"{layer}.attention.self.{side}"][0].abs() for side in ("query", "key")]
            sums[Group("query", block)] = sums[Group("query", block)] + sides[0].sum(0) * sides[1].mean(0)
            neurons = seen[f"{layer}.intermediate"][0].abs().sum(0)
            sums[Group("ffn", block)] = sums[Group("ffn", block)] + neurons
            turned = (1 - cosine_similarity(before, seen[layer], dim=-1)).sum()
            sums[LAYERS] = sums[LAYERS] + turned * torch.eye(3)[n]
            before = seen[layer]
    return sums


def test_activation_is_the_mean_over_tokens_of_all_examples() -> None:
    model = bert()
    found = measured.rated("minitron.activation", model)
    for group, total in activations(copy.deepcopy(model)).items():
        torch.testing.assert_close(found[group], total / len(measured.rows()), rtol=1e-4, atol=1e-5)


def test_a_group_of_a_llamas_heads_is_as_long_as_what_its_heads_give() -> None:
    """Two of the four heads read each head of keys and values."""
    model = tiny.model("llama", layers=3)
    found, expected = measured.rated("minitron.activation", model), torch.zeros(3, 2)

    def add(n: int, read_BLD: Tensor) -> None:
        expected[n] += read_BLD[0].view(-1, 2, 2 * SIZE).pow(2).sum(-1).sqrt().sum(0)

    for n, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, n=n: add(n, args[0]))
    for batch in measured.singles():
        with torch.no_grad():
            model(batch["input_ids"], attention_mask=batch["attention_mask"])
    for n in range(3):
        torch.testing.assert_close(found[Group("heads", str(n))], expected[n] / len(measured.rows()))
    assert {group.axis for group in found} == {"hidden", "heads", "ffn", "layers"}


def test_a_layers_importance_may_be_the_loss_without_it() -> None:
    model = bert()
    found = measured.rated("minitron.activation", model, depth="loss")[LAYERS]
    expected = torch.zeros(3)
    for batch in measured.singles():
        with torch.no_grad():
            whole = loss_of(model, batch)
            for n in range(3):
                shallow = copy.deepcopy(model)
                del shallow.bert.encoder.layer[n]
                shallow.config.num_hidden_layers = 2
                expected[n] += (loss_of(shallow, batch) - whole) / len(measured.rows())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_movement_is_weight_times_update() -> None:
    """Three steps of AdamW, scores from the weights of before each."""
    model, size, steps = bert(), 5, 3
    found = measured.rated("movement.movement", model, batch=size, steps=steps, lr=1e-2)
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0)
    neurons, rows = torch.zeros(64), torch.zeros(32)
    for batch in measured.batches(size=size).turns(steps):
        assert len(batch["labels"]) == size
        optimizer.zero_grad()
        loss_of(trained, batch).backward()
        layer = trained.bert.encoder.layer[1]
        up, down = layer.intermediate.dense, layer.output.dense
        neurons -= (up.weight * up.weight.grad).sum(1) + up.bias * up.bias.grad
        neurons -= (down.weight * down.weight.grad).sum(0)
        value, out = layer.attention.self.value, layer.attention.output.dense
        rows -= (value.weight * value.weight.grad).sum(1) + value.bias * value.bias.grad
        rows -= (out.weight * out.weight.grad).sum(0)
        optimizer.step()
    mean = len(measured.rows())
    torch.testing.assert_close(found[Group("ffn", "1")] * mean, neurons.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[Group("value", "1")] * mean, rows.detach(), rtol=1e-3, atol=1e-5)


def test_movement_rates_a_llamas_heads_by_the_group() -> None:
    model = tiny.model("llama", labels=3)
    plan = SlicePlan.from_model(model)
    found = measured.rated("movement.movement", model, steps=2, lr=1e-2)
    assert all(of_unit.shape == (plan.groups[group],) for group, of_unit in found.items())
    assert found[Group("heads", "1")].shape == (2,) and found[Group("heads", "1")].any()


def test_movement_has_both_signs() -> None:
    """A neuron whose gradient asks for less of it is rated below 0."""
    found = measured.rated("movement.movement", bert(), steps=20, lr=1e-3)
    assert any((vector < 0).any() for vector in found.values())
    assert any((vector > 0).any() for vector in found.values())


def effects(model: Any, plan: SlicePlan, group: Group) -> Tensor:
    """(U,) by brute force: the mean over examples of how far the loss moves when the unit is taken away."""
    (batch,) = [measured.COLLATE(list(measured.rows()))]
    found = []
    with torch.no_grad():
        whole = loss_of(model, batch, "none")
        for unit in range(plan.groups[group]):
            gate = torch.ones(plan.groups[group])
            gate[unit] = 0
            with measured.gated(model, plan, {group: gate}):
                found.append((loss_of(model, batch, "none") - whole).abs().mean())
    return torch.stack(found)


@cache
def effects_of_seed(seed: int) -> dict[Group, Tensor]:
    model = bert(seed=seed)
    plan = SlicePlan.from_model(model)
    return {group: effects(model, plan, group) for group in (Group("ffn", "0"), Group("ffn", "2"), Group("value", "1"))}


@pytest.mark.parametrize("name", ["molchanov.taylor", "theis.fisher"])
def test_importance_ranks_units_by_their_effect(name: str) -> None:
    """Compare with removing every unit in turn, on random models."""
    order, ranks = [], []
    for seed in range(2):
        found = measured.rated(name, bert(seed=seed))
        for group, effect in effects_of_seed(seed).items():
            order.append(spearmanr(found[group], effect).statistic)
            ranks.append(int((effect < effect[found[group].argmin()]).sum()) / len(effect))
    assert sum(order) / len(order) > 0.9
    assert sum(ranks) / len(ranks) < 0.05  # the unit rated least is among the few that do least


def test_inactive_neurons_rank_last_by_gradient() -> None:
    """By brute force again: a neuron with large weights that is never active does nothing."""
    from compress.slicing.select import magnitude

    model = bert()
    layer, group = model.bert.encoder.layer[0], Group("ffn", "0")
    with torch.no_grad():
        layer.intermediate.dense.weight[7] *= 5
        layer.intermediate.dense.bias[7] = -1000
    found = measured.rated("molchanov.taylor", model)[group]
    assert int(found.argmin()) == 7
    assert int(magnitude(model)[group].argmax()) == 7
    assert effects(model, SlicePlan.from_model(model), group)[7] == 0
