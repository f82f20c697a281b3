"""CoFi and what it stands on: hard concrete gates, the Lagrangian, matched layers; gates == slices."""

import math
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, get_linear_schedule_with_warmup

from compress import families
from compress.config.reference import Call
from compress.config.term import Term
from compress.errors import ObjectiveError, PruneError
from compress.papers.cofi import Gated, Matched, MatchOptions, distances, layers, matched
from compress.papers.louizos import BETA, active, drawn, settled
from compress.papers.wang import Multipliers, lagrangian, wanted
from compress.pruning.l0 import Gates, TargetSizes, fold
from compress.slicing.cut import slice_model
from compress.slicing.plan import SlicePlan
from compress.slicing.shape import Shape
from compress.slicing.sizes import Sizes
from compress.training.objective import Objective
from compress.training.trainer import group_parameters, set_group_rates
from tests import tiny
from tests.papers.case import authors, random
from tests.slicing.families import logits, model

TERMS = (Term("hinton.soft_targets", 0.1),)
UNIFORM: Mapping[str, Mapping[str, float]] = {
    "heads": {"heads": 2},
    "neurons": {"ffn": 20},
    "stream": {"hidden": 24, "heads": 3},
    "smaller heads": {"hidden": 24, "heads": 4},
    "half": {"hidden": 24, "heads": 3, "ffn": 0.5},
    "all": {"layers": 2, "hidden": 24, "heads": 2, "ffn": 40},
}


def gated(student: Any, teacher: Any = None, **options: Any) -> Gated:
    teacher = teacher or model("bert", seed=1)
    objective = Objective(TERMS, Shape.from_config(student.config), Shape.from_config(teacher.config))
    made: Gated = Call("cofi.Gated", options)(student, teacher, objective)
    scatter(made.gates)
    return made.train()


def scatter(gates: Gates, *, seed: int = 4) -> None:
    """Gates as they are after training: some open, some closed, some between."""
    draw = torch.Generator().manual_seed(seed)
    for each in gates.log_alpha.values():
        each.data = 3 * torch.randn(each.shape, generator=draw) + 1


def test_a_gate_is_drawn_by_the_papers_formula() -> None:
    log_alpha, noise = random(7, seed=1), torch.rand(7, generator=torch.Generator().manual_seed(2))
    for found, a, u in zip(drawn(log_alpha, noise).tolist(), log_alpha.tolist(), noise.tolist(), strict=True):
        s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + a) / (2 / 3)))
        assert found == pytest.approx(min(1, max(0, s * 1.2 - 0.1)), abs=1e-6)
    ends = drawn(torch.zeros(2), torch.tensor([0.0, 1.0]))
    assert ends.tolist() == [0, 1], "noise at its ends is finite, and gates reach both of theirs"


def test_known_values_of_the_distribution() -> None:
    zero = torch.zeros(())
    assert float(active(zero)) == pytest.approx(11 ** (2 / 3) / (1 + 11 ** (2 / 3)))
    assert float(settled(zero)) == 0.5
    assert settled(torch.tensor([-4.6, 4.6])).tolist() == [0, 1]
    for a in (-2.0, 0.0, 1.5):
        torch.manual_seed(0)
        draws = drawn(torch.full((100_000,), a))
        assert float((draws > 0).float().mean()) == pytest.approx(float(active(torch.tensor(a))), abs=0.005)


def test_gates_have_float32_gradients_for_any_dtype() -> None:
    log_alpha = torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    z = drawn(log_alpha)
    torch.autograd.backward(z.sum())
    assert z.dtype == active(log_alpha).dtype == settled(log_alpha).dtype == torch.float32
    assert log_alpha.grad is not None
    assert log_alpha.grad.isfinite().all()
    assert (log_alpha.grad > 0).any()


def test_the_lagrangian_and_its_ascent() -> None:
    excess, multipliers = torch.tensor([0.2, -0.1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert float(lagrangian(excess, multipliers)) == pytest.approx(0.2 - 0.2 + 3 * 0.04 + 4 * 0.01)
    climbing = Multipliers(2)
    optimizer = torch.optim.SGD(climbing.parameters(), lr=1.0)
    climbing(excess).backward()
    optimizer.step()
    torch.testing.assert_close(climbing.lambda_2C.detach(), torch.stack([excess, excess.square()]))
    assert [wanted(step, 10, 20) for step in (0, 10, 15, 30, 99)] == [0, 0, 0.25, 1, 1]
    assert [wanted(step, 10, 0) for step in (9, 10)] == [0, 1]


def test_gates_and_lagrangian_are_those_of_the_authors_module() -> None:
    given, expected = authors("cofi")
    log_alpha, noise = torch.tensor(given["log_alpha"]), torch.tensor(given["uniform"])
    torch.testing.assert_close(active(log_alpha), torch.tensor(expected["active"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(drawn(log_alpha, noise), torch.tensor(expected["drawn"]), rtol=1e-5, atol=1e-6)
    student = tiny.model("bert", intermediate_size=log_alpha.shape[1])
    plan = SlicePlan.from_model(student)
    gates = Gates(plan, TargetSizes.from_request(student, plan, {"ffn": given["left"]}), begin=0.0)
    gates.log_alpha["ffn"].data = log_alpha
    multipliers = Multipliers(2)
    multipliers.lambda_2C.data = torch.tensor(given["multipliers"])
    share = wanted(given["step"], 0, given["warm_up"])
    assert share * (1 - given["left"]) == pytest.approx(expected["target"][0])
    excess = gates.target.excess(gates.active(), share)
    torch.testing.assert_close(
        excess.detach(), torch.tensor(expected["gone"]) - torch.tensor(expected["target"]), rtol=1e-5, atol=2e-6
    )
    held = multipliers(excess)
    held.backward()
    assert held.item() == pytest.approx(expected["lagrangian"], rel=1e-4)  # their gate of the layer is 1 - 1e-6
    found = gates.log_alpha["ffn"].grad
    assert found is not None
    torch.testing.assert_close(found, torch.tensor(expected["gradient"]), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("layer", [0, 1])
def test_without_noise_the_same_gates_close_as_in_the_authors_code(layer: int) -> None:
    given, expected = authors("cofi")
    log_alpha, theirs = torch.tensor(given["log_alpha"]), torch.tensor(expected["settled"])[layer]
    student = tiny.model("bert", intermediate_size=log_alpha.shape[1])
    plan = SlicePlan.from_model(student)
    target = TargetSizes.from_request(student, plan, {"ffn": int((theirs > 0).sum())})
    gates = Gates(plan, target, begin=0.0)
    gates.log_alpha["ffn"].data = log_alpha
    ours = gates.settled(target.kept(gates.active()))["ffn"][layer]
    assert ((ours > 0) == (theirs > 0)).all()
    deviation = (0.8 * log_alpha[layer] / BETA).sigmoid()
    torch.testing.assert_close(theirs, deviation * (ours > 0), rtol=1e-5, atol=1e-6)


MODERN = {"all": {"layers": 2, "hidden": 16, "heads": 2, "ffn": 40}}
"""Heads that turn by the tokens' places keep their size."""


GATED = [family.name for family in families.known() if family.gates]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [*product(GATED, ("all", "smaller heads")), *product(("bert",), ("heads", "neurons", "stream", "half"))],
)
def test_a_pruned_model_of_exact_sizes_is_a_stock_model(family: str, sizes: str) -> None:
    student = model(family)
    asked = MODERN.get(sizes, UNIFORM[sizes]) if family == "modernbert" else UNIFORM[sizes]
    if family == "modernbert" and sizes == "smaller heads":
        with pytest.raises(PruneError, match="heads of 4: gates cannot choose rows within heads of 8"):
            gated(student, model(family), sizes={"hidden": 16, "heads": 4})
        return
    step = gated(student, model(family, seed=1) if family == "modernbert" else None, sizes=asked)
    student.eval()
    expected = logits(student)
    step.finish()
    assert type(step.student) is type(student)
    kept = getattr(step.student.config, "hidden_of_teacher", [])
    assert kept == sorted(kept)
    torch.testing.assert_close(logits(step.student), expected, rtol=1e-5, atol=1e-5)
    assert Sizes.from_config(step.student.config) == Sizes.from_request(student.config, **asked)


def test_heads_that_answer_per_token_and_for_tokens_are_gated_too() -> None:
    for head in (AutoModelForTokenClassification, AutoModelForMaskedLM):
        for family in ("bert", "roberta", "electra"):
            student, plain = (tiny.model(family, head=head, layers=3) for _ in range(2))
            plan = SlicePlan.from_model(student)
            gates = Gates(plan, TargetSizes.from_request(student, plan, UNIFORM["all"]), begin=0.0)
            scatter(gates)
            gates.attach(student)
            student.eval()
            expected, values, kept = logits(student), gates.values, gates.target.kept(gates.active())
            gates.detach()
            torch.testing.assert_close(logits(student), logits(plain))
            fold(student, plan, values)
            torch.testing.assert_close(logits(slice_model(student, kept)), expected, rtol=1e-5, atol=1e-5)


def test_open_gates_change_nothing_and_waiting_ones_neither() -> None:
    student, batch = model("bert"), tiny.batch()
    expected = logits(model("bert"))
    step = gated(student, sizes=UNIFORM["half"], wait=0.5)
    for each in step.gates.log_alpha.values():
        each.data.fill_(10.0)
    student.eval()  # no dropout
    step.gates.train()
    torch.testing.assert_close(logits(student), expected, rtol=1e-5, atol=1e-5)
    scatter(step.gates)
    step.begin(4, 10)
    step.gates.train()
    torch.testing.assert_close(logits(student), expected)
    assert step.rates(4, 10) == {"gates": 0.0, "multipliers": 0.0}
    held = step(**batch)
    assert float(held["lagrangian"]) == 0
    step.begin(5, 10)
    assert not torch.allclose(logits(student), expected, atol=1e-3)
    assert step.rates(5, 10)["gates"] > 0


def test_gates_are_initialised_like_the_authors() -> None:
    """CoFiPruning at da855a8, models/l0_module.py: reset_loga(mean=10), but for neurons log (1 - p) / p."""
    student = model("bert")
    objective = Objective(TERMS, Shape.from_config(student.config), Shape.from_config(student.config))
    step = Call("cofi.Gated", {"sizes": UNIFORM["half"], "drop_rate": 0.25})(student, model("bert"), objective)
    begins = {axis: float(each.detach().mean()) for axis, each in step.gates.log_alpha.items()}
    assert begins == pytest.approx({"hidden": 10, "heads": 10, "ffn": math.log(3)}, abs=0.02)
    step.begin(0, 10)
    assert float(step.gates.log_alpha["heads"].detach().max()) == pytest.approx(math.log(100)), "and as far as they may"


def test_gates_learn_at_their_own_rate_while_the_stages_falls() -> None:
    """0.01 where there are steps enough, else what leads log alpha four times through its range."""
    step = gated(model("bert"), sizes=UNIFORM["half"], wait=0.25)
    optimizer = torch.optim.SGD(group_parameters(step, set(), 0.0), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 8)
    set_group_rates(scheduler, step, 8)
    seen = []
    for _ in range(8):
        seen.append({group["group"]: group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        scheduler.step()
    fast = 8 * math.log(100) / 6
    assert [each["gates"] for each in seen] == pytest.approx([0, 0, *6 * [fast]])
    assert [each["multipliers"] for each in seen] == pytest.approx([0, 0, *6 * [fast]])
    assert [each["model"] for each in seen] == pytest.approx([2e-5 * (1 - n / 8) for n in range(8)])
    assert step.rates(9_000, 10_000)["gates"] == 0.01


def test_the_masks_of_a_pass_are_drawn_anew_and_settled_ones_are_not() -> None:
    student = model("bert")
    step = gated(student, sizes=UNIFORM["half"], wait=0.0)
    step.gates.train()
    assert not torch.equal(logits(student), logits(student))
    student.eval()
    assert torch.equal(logits(student), logits(student))
    values = step.gates.values
    assert all(((each >= 0) & (each <= 1)).all() for each in values.values())


@pytest.mark.parametrize("sizes", ["all", "smaller heads"])
def test_every_gate_learns_from_what_it_does(sizes: str) -> None:
    """In bfloat16 too, and beside every weight but the embeddings' tables."""
    torch.manual_seed(0)
    student = model("bert", seed=2)
    step = gated(student, wait=0.0, sizes=UNIFORM[sizes])
    for each in step.gates.log_alpha.values():
        each.data.zero_()
    step.begin(1, 10)
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(step(**tiny.batch())["loss"])
    assert step.gates.log_alpha.keys() == step.target.shapes.keys()
    for axis, each in step.gates.log_alpha.items():
        assert each.grad is not None, axis
        assert each.grad.isfinite().all(), axis
        assert each.grad.any(), axis
    assert all(each.grad is not None for each in student.parameters() if each.requires_grad)
    assert step.multipliers.lambda_2C.grad is not None


def test_layers_are_the_papers_formula() -> None:
    """Eq. 4 and 5 in nested loops, over real tokens."""
    student, teacher = [random(2, 3, 4, seed=n) for n in range(3)], [random(2, 3, 4, seed=9), random(2, 3, 4, seed=8)]
    mask, alive = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([True, False, True])
    total = 0.0
    for theirs in teacher:
        found = {}
        for m, mine in enumerate(student):
            errors = [
                (float(mine[b, n, d]) - float(theirs[b, n, d])) ** 2
                for b in range(2) for n in range(3) for d in range(4) if mask[b, n]
            ]  # fmt: skip
            found[m] = sum(errors) / len(errors)
        total += min(found[m] for m in (0, 2))
    assert float(layers(student, teacher, mask, alive)) == pytest.approx(total, rel=1e-5)
    assert float(layers(teacher, teacher, mask, alive[:2] | True)) == 0
    padded = [each.clone() for each in student]
    for each in padded:
        each[1, 1:] = 99.0
    assert torch.equal(distances(padded, teacher, mask), distances(student, teacher, mask))
    assert layers([each.bfloat16() for each in student], teacher, mask, alive).dtype == torch.float32


def test_which_layers_are_matched() -> None:
    near = torch.tensor([[0.3, 0.1, 0.5, 0.4], [0.3, 0.1, 0.2, 0.9], [0.9, 0.1, 0.5, 0.7]])
    everything = torch.ones(4, dtype=torch.bool)
    assert matched(near, everything) == [1, 1, 1]
    assert matched(near, torch.tensor([True, False, True, True])) == [0, 2, 2]
    assert matched(near, everything, ordered=True) == [0, 0, 1], "where none is left below, the same again"
    assert matched(near[:, [0, 2, 1, 3]], everything, ordered=True) == [0, 1, 2]
    assert matched(near, ~everything) == [3, 3, 3], "the last where none is alive"


def test_a_recovering_student_is_mapped_back_to_the_teachers_dimensions() -> None:
    teacher = model("bert", layers=5)
    step = gated(model("bert", layers=5), teacher, sizes=UNIFORM["half"])
    step.finish()
    objective = Objective(TERMS, Shape.from_config(step.student.config), Shape.from_config(teacher.config))
    recovering = Matched(step.student, teacher, objective, match=MatchOptions())
    kept = step.student.config.hidden_of_teacher
    one = torch.arange(1.0, len(kept) + 1)
    assert recovering.W(one)[kept].equal(one)
    assert recovering.matched_layers == [0, 1, 2, 4]
    assert recovering.alive().all()
    parts = recovering(**tiny.batch())
    parts["loss"].backward()
    apart = parts["cofi.layers"] + parts["hinton.soft_targets"]
    torch.testing.assert_close(parts["loss"].detach(), apart)
    assert recovering.W.weight.grad is not None
    assert all(each.grad is None for each in teacher.parameters())


@pytest.mark.parametrize("total", [300, 600])
def test_the_target_is_reached(total: int) -> None:
    """The expected size, where every gate is worth something else, by the groups and rates that the trainer uses."""
    step = learned({"heads": 2, "ffn": 0.5}, total)
    gone = step.target.excess(step.gates.active(), 0.0).detach()
    assert gone.tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert (step.multipliers.lambda_2C[1] > 0).all(), "the square's climbs alone"
    assert step.finish() is None


def test_a_missed_target_is_reported() -> None:
    said = learned({"heads": 2, "ffn": 0.5}, 300, until=40).finish()
    assert said is not None
    closed = {axis: float(share) for share, axis in re.findall(r"(0\.\d+) of (\w+) instead of 0\.50", said)}
    assert closed["heads"] < 0.45


def learned(sizes: Mapping[str, float], total: int, *, until: int | None = None) -> Gated:
    """Gates that have learned without a model for `until` of `total` steps."""
    student, teacher = (model("bert", layers=1) for _ in range(2))
    objective = Objective(TERMS, Shape.from_config(student.config), Shape.from_config(teacher.config))
    step = Gated(student, teacher, objective, sizes=sizes, match=MatchOptions()).train()
    gates = step.gates.log_alpha
    worth = {axis: torch.rand(each.shape, generator=torch.Generator().manual_seed(6)) for axis, each in gates.items()}
    groups = [{"params": each, "group": name} for name, each in step.groups().items() if name != "model"]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for number in range(until or total):
        step.begin(number, total)
        for group in optimizer.param_groups:
            group["lr"] = step.rates(number, total)[group["group"]]
        optimizer.zero_grad()
        probabilities = step.gates.active()
        held = step.multipliers(step.target.excess(probabilities, step.share))
        lost = torch.stack([(worth[axis] * (1 - each)).mean() for axis, each in probabilities.items()]).sum()
        torch.autograd.backward(held + 0.01 * lost)
        optimizer.step()
    return step


def test_embeddings_rest_while_masks_are_learned_and_no_gate_is_beyond_return() -> None:
    student = model("bert")
    step = gated(student, sizes=UNIFORM["half"])
    assert not any(each.requires_grad for each in student.bert.embeddings.word_embeddings.parameters())
    assert student.bert.embeddings.LayerNorm.weight.requires_grad
    step.gates.log_alpha["heads"].data.fill_(-50.0)
    step.begin(0, 10)
    assert float(step.gates.log_alpha["heads"].detach().max()) == pytest.approx(-math.log(100))
    trained = {id(each) for group in step.groups().values() for each in group}
    assert {id(each) for each in step.parameters()} == trained
    step.finish()
    assert all(each.requires_grad for each in step.student.parameters())
    assert not hasattr(step.student, "gates")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sizes": {"haeds": 2}}, PruneError, "gates cannot prune 'haeds'.*heads"),
        ({"sizes": {"heads": 9}}, PruneError, "heads: 9 is more than the model's 4"),
        ({"sizes": {"heads": 4}}, PruneError, "nothing is to be pruned"),
        ({"sizes": UNIFORM["half"], "wait": 0.9, "warm": 0.2}, ObjectiveError, "together at most 1"),
        (
            {"sizes": UNIFORM["half"], "matched_layers": [3]},
            ObjectiveError,
            r"matched_layers \[3\]; the teacher's are 0 to 2",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        gated(model("bert"), **options)


def test_families_without_gates_are_named() -> None:
    student = model("albert")
    with pytest.raises(PruneError, match="no gates for 'albert'; there are for bert, distilbert"):
        gated(student, model("albert", seed=1), sizes={"hidden": 0.5})
