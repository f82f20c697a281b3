"""Taylor and Fisher are the formulas: explicit gates in the model, one example after another, in loops."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compress.pruning.hooks import KEY_AXIS, passing_over, taps
from compress.slicing.plan import LAYERS, Group, SlicePlan
from compress.slicing.select import choose, counts
from tests import tiny
from tests.pruning import measured
from tests.slicing import families
from tests.slicing.oracle import masked


def model(family: str) -> Any:
    return families.model(family)


def by_loops(model: Any, plan: SlicePlan) -> tuple[dict[Group, Tensor], dict[Group, Tensor]]:
    """(mean |dL/dg|, mean (dL/dg)^2) over examples, each by a backward pass of its own through gates of 1."""
    groups = [group for group in plan.groups if group.axis not in ("vocabulary", "layers")]
    gates = {group: torch.ones(plan.groups[group], requires_grad=True) for group in groups}
    absolute, squared = ({group: torch.zeros(plan.groups[group]) for group in groups} for _ in range(2))
    examples = list(measured.singles())
    with measured.gated(model, plan, gates):
        for batch in examples:
            loss = cross_entropy(answer(model, batch), batch["labels"])
            for group, slope in zip(groups, torch.autograd.grad(loss, list(gates.values())), strict=True):
                absolute[group] += slope.abs() / len(examples)
                squared[group] += slope**2 / len(examples)
    return absolute, squared


def answer(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits


@pytest.mark.parametrize("family", families.FAMILIES)
def test_taylor_and_fisher_are_gates_in_loops(family: str) -> None:
    asked = model(family)
    plan = SlicePlan.from_model(asked)
    targets = "drawn" if family == "t5" else "labels"  # T5's head answers per token
    found = {name: measured.rated(name, asked, targets=targets) for name in ("molchanov.taylor", "theis.fisher")}
    for rated in found.values():
        assert {group for group in plan.groups if group.axis != "vocabulary"} == rated.keys()
        for group, of_unit in rated.items():
            assert (of_unit.shape, of_unit.dtype) == ((plan.groups[group],), torch.float32)
    if family not in families.DISTINCT or family == "t5":
        return
    absolute, squared = by_loops(asked, plan)
    for group in absolute:
        close(found["molchanov.taylor"][group], absolute[group])
        close(found["theis.fisher"][group], squared[group])
        assert absolute[group].max() > 1e-6, f"{group} shows nowhere"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


@pytest.mark.parametrize("family", families.DISTINCT)
def test_a_closed_gate_equals_masked_weights(family: str) -> None:
    """The taps are all of a unit: heads and neurons, of which no norm makes the two differ."""
    asked, batch = model(family), tiny.batch()
    plan = SlicePlan.from_model(asked)
    differences = []
    for axis in ("ffn", "heads"):
        for group in plan.blocks(axis):
            gate = torch.ones(plan.groups[group])
            gate[1] = 0
            with measured.gated(asked, plan, {group: gate}):
                shut = families.logits(asked, batch)
            weights = copy.deepcopy(asked)
            zero(weights, plan, group)
            torch.testing.assert_close(families.logits(weights, batch), shut, rtol=1e-4, atol=1e-5)
            differences.append((shut - families.logits(asked, batch)).abs().max())
    assert max(differences) > 1e-3


@torch.no_grad()
def zero(model: Any, plan: SlicePlan, group: Group) -> None:
    """Unit 1 of the group writes nothing: its columns of what reads it are zero."""
    weights = dict(model.named_parameters())
    readers = [rows for rows in plan.heads if plan.heads[rows] == group] or [group]
    for each in readers:
        for name, cut, place, _ in plan.along(each):
            if cut.role in ("ffn_out", "attention_out") and name.endswith("weight"):
                width = weights[name].shape[place.dim] // plan.groups[group]
                weights[name].narrow(place.dim, width, width).zero_()


def test_layer_importance_is_the_gates_finite_difference() -> None:
    """d loss / d g of x + g (f(x) - x), by finite differences of an explicit gate."""
    asked = tiny.model("bert", layers=3, labels=3).double()
    step = 1e-5
    found = measured.rated("molchanov.taylor", asked)[LAYERS]
    expected = torch.zeros(3)
    examples = list(measured.singles())
    for number, layer in enumerate(asked.bert.encoder.layer):
        for batch in examples:
            losses = []
            for gate in (1 + step, 1 - step):
                hook = layer.register_forward_hook(lambda _, args, out, gate=gate: args[0] + gate * (out - args[0]))
                losses.append(cross_entropy(answer(asked, batch), batch["labels"]).item())
                hook.remove()
            expected[number] += abs(losses[0] - losses[1]) / (2 * step) / len(examples)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("family", [family for family in families.DISTINCT if family != "albert"])
def test_skipping_a_layer_equals_masking_it(family: str) -> None:
    asked, batch = model(family), tiny.batch()
    plan = SlicePlan.from_model(asked)
    importance = {group: torch.ones(plan.groups[group]) for group in (*counts(plan, plan.sizes), *plan.heads)}
    kept = choose(plan, importance, replace(plan.sizes, layers=2), layers=[0, 2])
    with passing_over(asked, plan, 1):
        passed = families.logits(asked, batch)
    with masked(asked, kept):
        torch.testing.assert_close(families.logits(asked, batch), passed, rtol=1e-5, atol=1e-6)


def test_the_model_is_unchanged() -> None:
    asked = model("bert").train()
    asked.classifier.eval()
    asked.bert.embeddings.requires_grad_(False)
    state = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in asked.named_parameters()}
    modes = [module.training for module in asked.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in asked.modules()]
    for name in ("molchanov.taylor", "minitron.activation", "movement.movement"):
        measured.rated(name, asked, **({"steps": 2} if name.startswith("movement") else {}))
    assert [module.training for module in asked.modules()] == modes
    assert [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in asked.modules()] == hooks
    for name, tensor in asked.named_parameters():
        assert torch.equal(tensor, state[name][0])
        assert tensor.requires_grad == state[name][1]
        assert tensor.grad is None


def test_taps_name_only_groups_of_the_plan() -> None:
    for family in families.FAMILIES:
        asked = model(family)
        plan = SlicePlan.from_model(asked)
        named = {group for tap in taps(asked, plan) for group in tap.groups if group is not None}
        assert {group for group in named if group.axis != KEY_AXIS} <= plan.groups.keys()
