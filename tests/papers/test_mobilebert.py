"""MobileBERT's mechanisms: one layer after the other, rates of the layers, what is copied, the mixed label."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForPreTraining, AutoModelForSequenceClassification, MobileBertConfig

from compress.config.recipe import Recipe
from compress.config.reference import Call
from compress.config.stages import StudentSpec
from compress.config.term import Term
from compress.errors import ObjectiveError, StudentError
from compress.models.ibbert import IBBertConfig
from compress.models.signals import open_attention, read
from compress.models.student import build
from compress.papers import bert, mobilebert
from compress.papers.mobilebert import Progressive, active_layer, base_factor, from_bert, from_teacher
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.optimizer import Lamb
from compress.training.step import Distillation
from tests import tiny
from tests.papers.case import authors, random

N = 3
SAME = {
    "vocab_size": len(tiny.SPECIAL) + len(tiny.WORDS),
    "embedding_size": 8,
    "hidden_size": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TERMS = (Term("mobilebert.feature_maps", weight=100.0), Term("mobilebert.attention"))


def taught(layers: int = N, *, head: Any = AutoModelForPreTraining, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"intra_bottleneck_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    return head.from_config(IBBertConfig(**{**SAME, **sizes, **changes})).eval()


def learner(layers: int = N, *, head: Any = AutoModelForPreTraining, seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"intra_bottleneck_size": 8, "intermediate_size": 16, "num_hidden_layers": layers}
    return head.from_config(MobileBertConfig(**{**SAME, **sizes, **changes}))


def transfer(student: Any, teacher: Any, terms: Sequence[Term] = TERMS, **options: float) -> Progressive:
    objective = Objective(terms, Shape.from_config(student.config), Shape.from_config(teacher.config))
    return Progressive(student, teacher, objective, **options).train()


# The schedule


def test_layers_take_turns_of_equal_length() -> None:
    assert [active_layer(step, 12, 3) for step in range(12)] == 4 * [0] + 4 * [1] + 4 * [2]
    assert [active_layer(step, 7, 3) for step in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    turns = [active_layer(step, 240_000, 24) for step in range(240_000)]  # Sec. 4.2
    assert [turns.count(layer) for layer in range(24)] == 24 * [10_000]
    assert turns == sorted(turns)


def test_the_base_factor_is_the_authors_but_for_the_last_step_of_a_layer() -> None:
    """Theirs at global step s = ours + 1, a turn of 10,000 steps."""
    for s in (1, 500, 999, 1000, 5000, 9999, 10_001, 215_000):
        t = s % 10_000 / 10_000
        assert base_factor(s - 1, 240_000, 24) == pytest.approx(min(0.9 + 0.1 * math.sqrt(1 - t), 10 * t))
    assert base_factor(9_999, 240_000, 24) == base_factor(239_999, 240_000, 24) == pytest.approx(0.9)


def test_factors_are_3_for_the_active_layer_and_a_tenth_of_that_below() -> None:
    step = transfer(learner(), taught())
    base = base_factor(5, 12, N)
    assert step.factors(5, 12) == {
        "layer.0": pytest.approx(0.3 * base),
        "layer.1": pytest.approx(3 * base),
        "layer.2": 0.0,
    }
    chosen = transfer(learner(), taught(), active=1.0, lower=0.0).factors(5, 12)
    assert chosen == {"layer.0": 0.0, "layer.1": pytest.approx(base), "layer.2": 0.0}


def test_schedule_and_updates_are_the_authors_but_for_the_last_step_of_each_turn() -> None:
    """In that step theirs trains nothing and sets the moments of all gradients back to 0; their step s is ours + 1."""
    given, expected = authors("mobilebert")
    layers, total = given["layers"], given["total"]
    step = transfer(learner(layers), taught(layers))
    weights = [nn.Parameter(torch.tensor(each)) for each in given["weights"]]
    groups = [{"params": [each], "group": f"layer.{n}"} for n, each in enumerate(weights)]
    optimizer = Lamb(groups, lr=given["rate"], weight_decay=0.01)
    for s in range(1, total + 1):
        factors = [step.factors(s - 1, total)[f"layer.{n}"] for n in range(layers)]
        if s * layers % total == 0:
            assert expected["factors"][s] == [0.0] * layers
            assert max(factors) == pytest.approx(3 * 0.9)
            optimizer.state.clear()
        else:
            assert factors == pytest.approx(expected["factors"][s])
            for n, (each, group) in enumerate(zip(weights, optimizer.param_groups, strict=True)):
                each.grad = torch.tensor(given["gradients"][s][n]) if factors[n] else None
                group["lr"] = given["rate"] * factors[n]
            optimizer.step()
        torch.testing.assert_close(torch.stack(weights).detach(), torch.tensor(expected["weights"][s]))


def test_a_plain_loop_changes_exactly_the_papers_layers_at_each_step() -> None:
    student, teacher = learner(), taught()
    from_teacher(student, teacher)
    step, total = transfer(student, teacher), 6
    groups = [{"params": parameters, "group": name} for name, parameters in step.groups().items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)
    for at in range(total):
        step.begin(at, total)
        factors = step.factors(at, total)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factors[group["group"]]
        before = {name: value.clone() for name, value in student.state_dict().items()}
        optimizer.zero_grad()
        step(**tiny.batch(seed=at))["loss"].backward()
        optimizer.step()
        changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
        reached = tuple(f"mobilebert.encoder.layer.{layer}." for layer in range(at // 2 + 1))
        matrices = {name for name, value in before.items() if name.startswith(reached) and value.dim() == 2}
        assert matrices <= changed
        assert all(name.startswith(reached) for name in changed)


def test_the_transfer_teaches() -> None:
    """The student's feature maps, layer by layer, are nearer to the teacher's than they were."""
    student, teacher = learner(), taught()
    from_teacher(student, teacher)
    step, total = transfer(student, teacher), 60
    groups = [{"params": parameters, "group": name} for name, parameters in step.groups().items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    before = distances(student, teacher)
    for at in range(total):
        step.begin(at, total)
        factors = step.factors(at, total)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factors[group["group"]]
        optimizer.zero_grad()
        step(**tiny.batch())["loss"].backward()
        optimizer.step()
    assert all(now < 0.7 * then for now, then in zip(distances(student, teacher), before, strict=True))


def distances(student: Any, teacher: Any) -> list[float]:
    wants = frozenset({"layers"})
    mine, theirs = (read(each.eval(), tiny.batch(), wants) for each in (student, teacher))
    pairs = zip(mine.layers, theirs.layers, strict=True)
    return [mobilebert.feature_maps(s_BLD, t_BLD, mine.mask_BL).item() for s_BLD, t_BLD in pairs]


# What a step computes


def test_only_the_active_layers_terms_count() -> None:
    student, teacher = learner(), taught()
    step = transfer(student, teacher)
    wants = frozenset({"layers", "scores"})
    for model in (student, teacher):
        open_attention(model)
    mine, theirs = read(student, tiny.batch(), wants), read(teacher, tiny.batch(), wants)
    for layer in range(N):
        step.begin(2 * layer, 2 * N)
        parts = step(**tiny.batch())
        maps = 100 / N * mobilebert.feature_maps(mine.layers[layer], theirs.layers[layer], mine.mask_BL)
        attention = 1 / N * mobilebert.attention(mine.scores[layer], theirs.scores[layer], mine.mask_BL)
        torch.testing.assert_close(parts["mobilebert.feature_maps"], maps.detach())
        torch.testing.assert_close(parts["mobilebert.attention"], attention.detach())
        torch.testing.assert_close(parts["loss"], maps + attention)


class Calls:
    """How often each of these layers computed."""

    def __init__(self, model: Any) -> None:
        layers = model.base_model.encoder.layer
        self.counts = [0] * len(layers)
        for at, layer in enumerate(layers):
            part = layer.attention
            part.register_forward_pre_hook(lambda *_, at=at: self.counts.__setitem__(at, self.counts[at] + 1))


def test_layers_above_are_not_computed_and_come_back() -> None:
    student, teacher = learner(), taught()
    step = transfer(student, teacher)
    mine, theirs = Calls(student), Calls(teacher)
    step.begin(2, 6)
    step(**tiny.batch())
    assert mine.counts == theirs.counts == [1, 1, 0]
    wants = frozenset({"layers", "scores"})
    shown = read(student, tiny.batch(), wants)
    assert mine.counts == [2, 2, 1]
    assert len(shown.layers) == len(shown.scores) == N
    assert not torch.equal(shown.layers[2], shown.layers[1])


def test_a_shallower_student_learns_from_every_second_layer() -> None:
    student, teacher = learner(2), taught(4)
    step = transfer(student, teacher)
    theirs = Calls(teacher)
    wants = frozenset({"layers"})
    for layer in range(2):
        step.begin(layer, 2)
        maps = step(**tiny.batch())["mobilebert.feature_maps"]
        s_BLD, t_BLD = (read(student, tiny.batch(), wants).layers[layer], read(teacher, tiny.batch(), wants).layers)
        expected = mobilebert.feature_maps(s_BLD, t_BLD[2 * layer + 1], tiny.batch()["attention_mask"])
        torch.testing.assert_close(maps, 100 / 2 * expected.detach())
    assert theirs.counts == [4, 4, 3, 3]  # twice for the comparison; the first turn stops after two


def test_the_student_has_no_dropout_while_it_learns_from_the_teacher() -> None:
    student = learner(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5)
    step = transfer(student, taught())
    step.begin(5, 6)
    assert step(**tiny.batch())["loss"].item() == step(**tiny.batch())["loss"].item()


@pytest.mark.parametrize("recipe", ["mobilebert", "mobilebert-tiny"])
def test_pretraining_distillation_has_no_dropout_but_fine_tuning_has(recipe: str) -> None:
    *_, distill, task = Recipe.load(recipe).training
    assert distill.step is not None
    assert task.step is None
    student, teacher = learner(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.5), taught()
    objective = Objective(distill.objective, Shape.from_config(student.config), Shape.from_config(teacher.config))
    batch = tiny.batch() | {"labels": tiny.batch()["input_ids"], "next_sentence": torch.tensor([0, 1, 0])}
    plain = Distillation(student.eval(), teacher, objective)(**batch)
    step = distill.step(student, teacher, objective).train()
    found = step(**batch)
    assert {name: part.item() for name, part in found.items()} == {name: part.item() for name, part in plain.items()}
    found["loss"].backward()
    assert all(each.grad is not None for each in student.mobilebert.encoder.parameters())
    dropped = Distillation(student, teacher, objective).train()
    assert dropped(**batch)["loss"].item() != dropped(**batch)["loss"].item()


def test_what_was_frozen_is_trained_again_afterwards() -> None:
    student = learner()
    student.cls.seq_relationship.requires_grad_(False)
    step = transfer(student, taught())
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in student.named_parameters() if ".encoder.layer." in name}
    assert {id(p) for group in step.groups().values() for p in group} == {
        id(p) for p in student.parameters() if p.requires_grad
    }
    step.finish()
    still = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    assert still == {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}


def test_its_weights_are_the_students_once_and_not_the_teachers() -> None:
    student = learner()
    step = transfer(student, taught())
    own = {name for name, _ in student.named_parameters()}
    assert {name.removeprefix("distillation.student.") for name in step.state_dict()} == own, "tied ones once"
    assert step.student is student


def test_learned_projections_follow_the_active_layer() -> None:
    student, teacher = learner(hidden_size=12), taught()
    step = transfer(student, teacher, [Term("mobilebert.feature_maps", project=True)])
    factors = step.factors(5, 12)
    assert factors["projections"] == factors["layer.1"]
    assert [p.shape for p in step.groups()["projections"]] == [(16, 12)]


@pytest.mark.parametrize(
    "term", [Term("mobilebert.attention", layers="last"), Term("bert.masked_lm"), Term("distilbert.soft_targets")]
)
def test_terms_that_leave_a_layer_out_are_refused(term: Term) -> None:
    with pytest.raises(ObjectiveError, match=rf"{term.name}\S* must compare each of them"):
        transfer(learner(), taught(), [*TERMS, term])


def test_fewer_steps_than_layers_are_refused() -> None:
    with pytest.raises(ObjectiveError, match="2 steps cannot teach 3 layers"):
        transfer(learner(), taught()).begin(0, 2)


def test_it_needs_a_teacher_with_layers() -> None:
    objective = Objective(TERMS, Shape.from_config(learner().config), Shape.from_config(taught().config))
    with pytest.raises(ObjectiveError, match="needs a teacher"):
        Progressive(learner(), None, objective)
    with pytest.raises(ObjectiveError, match=r"DistilBertFor\w+ has none"):
        Progressive(learner(), tiny.model("distilbert"), objective)


# What is copied


@pytest.mark.parametrize("head", [AutoModelForPreTraining, AutoModelForSequenceClassification])
def test_embeddings_pooler_and_heads_are_the_teachers(head: Any) -> None:
    student, teacher = learner(head=head), taught(head=head)
    drawn = {name: value.clone() for name, value in student.state_dict().items()}
    from_teacher(student, teacher)
    theirs = {name.replace("ib_bert.", "mobilebert."): value for name, value in teacher.state_dict().items()}
    for name, value in student.state_dict().items():
        if ".encoder." in name or "embeddings.LayerNorm" in name:
            assert torch.equal(value, drawn[name]), name
        else:
            assert torch.equal(value, theirs[name]), name
    weights = {name for name in drawn if name.endswith("weight") and drawn[name].dim() == 2}
    assert any("pooler" in name for name in weights)
    assert len(weights - {name for name in weights if ".encoder." in name}) >= 6


def test_a_student_that_reads_cls_as_it_is_has_no_pooler_to_fill() -> None:
    student, teacher = learner(classifier_activation=False), taught()
    from_teacher(student, teacher)
    torch.testing.assert_close(student.cls.seq_relationship.weight, teacher.cls.seq_relationship.weight)
    assert not any("pooler" in name for name in student.state_dict())


def test_copied_embeddings_stay_tied_and_are_the_students_own() -> None:
    student, teacher = learner(), taught()
    from_teacher(student, teacher)
    words = student.get_input_embeddings().weight
    assert student.cls.predictions.decoder.weight is words
    assert words.data_ptr() != teacher.get_input_embeddings().weight.data_ptr()


def test_other_widths_are_refused() -> None:
    message = r"embeddings\.word_embeddings\.weight is \(\d+, 4\) in the student and \(\d+, 8\) in the"
    with pytest.raises(StudentError, match=message):
        from_teacher(learner(embedding_size=4), taught())


# A student of an ordinary BERT


def embedded(student: Any, ids_BL: Tensor) -> Tensor:
    """What enters the first layer, one row for each token alone in its text."""
    return student.base_model.embeddings(ids_BL)[:, 0]


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_the_stream_begins_with_the_teachers_embedding_up_to_a_rotation(family: str) -> None:
    """With room for all of its directions: all distances between words are the teacher's, times one factor."""
    teacher = tiny.model(family, hidden=12, heads=2, **({"embedding_size": 12} if family == "electra" else {}))
    student = learner(head=AutoModelForSequenceClassification, embedding_size=12, num_attention_heads=2)
    from_bert(student, teacher)
    ids_B1 = torch.arange(5, SAME["vocab_size"])[:, None]
    words_VW = teacher.get_input_embeddings().weight[5:]
    words_VW = words_VW - words_VW.mean(-1, keepdim=True)  # the teacher's norm takes each row's mean off
    mine_VV, theirs_VV = (
        torch.cdist(embedded(student, ids_B1), embedded(student, ids_B1)),
        torch.cdist(words_VW, words_VW),
    )
    off = ~torch.eye(len(ids_B1), dtype=torch.bool)
    ratio = mine_VV[off] / theirs_VV[off]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)


def test_fewer_directions_keep_most_of_it_and_the_stream_has_mean_square_1() -> None:
    teacher = tiny.model("bert", hidden=64, layers=1)
    student = learner(head=AutoModelForSequenceClassification, hidden_size=32, embedding_size=16)
    from_bert(student, teacher)
    stream_VD = embedded(student, torch.arange(5, SAME["vocab_size"])[:, None])
    assert stream_VD.pow(2).mean().item() == pytest.approx(1, abs=0.3)
    trigram_DE3 = student.base_model.embeddings.embedding_transformation.weight
    assert not trigram_DE3[:, :16].any() and not trigram_DE3[:, 32:].any()


@pytest.mark.parametrize("further", [{"intra_bottleneck_size": 16}, {"use_bottleneck": False}])
def test_a_students_bottleneck_is_as_wide_as_its_recipe_says(further: dict[str, Any]) -> None:
    init = Call("mobilebert.from_bert")
    spec = StudentSpec(family="mobilebert", layers=2, hidden=32, heads=2, embedding=16, init=init, config=further)
    student = build(spec, tiny.bert())
    width = further.get("intra_bottleneck_size", 32)
    assert student.base_model.encoder.layer[0].attention.self.query.weight.shape == (width, width)
    assert student.eval()(**tiny.batch()).logits.isfinite().all()
    assert Shape.from_config(student.config).head_size == width // 2


@pytest.mark.parametrize("tiny_shape", [True, False])
def test_layers_keep_the_size_of_a_stream_that_nothing_normalises(tiny_shape: bool) -> None:
    shape = {"use_bottleneck_attention": True, "key_query_shared_bottleneck": False, "num_feedforward_networks": 2}
    sizes = {"hidden_size": 64, "intra_bottleneck_size": 32, "intermediate_size": 64, "embedding_size": 16}
    head = AutoModelForSequenceClassification
    student = learner(12, head=head, **sizes, **(shape if tiny_shape else {})).eval()
    from_bert(student, tiny.model("bert", hidden=16))
    batch = tiny.batch((7, 7, 7))
    sizes_N = [state.pow(2).mean().sqrt().item() for state in student(**batch, output_hidden_states=True).hidden_states]
    assert all(0.9 < after / before < 2 for before, after in pairwise(sizes_N))
    assert sizes_N[-1] / sizes_N[0] < 60


@pytest.mark.parametrize(
    ("teacher", "changes", "message"),
    [
        ("deberta-v2", {}, "not mobilebert of deberta-v2"),
        ("bert", {"embedding_size": 20}, "a stream no narrower than the embedding"),
        ("bert", {"vocab_size": 90}, r"it needs the teacher's \d+ tokens"),
    ],
)
def test_unsuitable_teachers_and_students_are_refused(teacher: str, changes: dict[str, Any], message: str) -> None:
    student = learner(head=AutoModelForSequenceClassification)
    for name, value in changes.items():
        setattr(student.config, name, value)
    with pytest.raises(StudentError, match=message):
        from_bert(student, tiny.model(teacher))


# Pre-training distillation


def test_the_two_halves_are_the_cross_entropy_to_the_mixed_label() -> None:
    """q = 0.5 onehot + 0.5 softmax(teacher), at masked positions."""
    student_BLV, teacher_BLV = random(2, 4, 7, seed=1), random(2, 4, 7, seed=2)
    labels_BL = torch.tensor([[-100, 3, -100, 6], [0, -100, -100, -100]])
    mask_BL = (labels_BL != -100).long()
    halves = 0.5 * bert.masked_lm(student_BLV, labels_BL, None)
    halves = halves + 0.5 * mobilebert.masked_lm(student_BLV, teacher_BLV, mask_BL)
    onehot_BLV = nn.functional.one_hot(labels_BL.clamp_min(0), 7).float()
    q_BLV = 0.5 * onehot_BLV + 0.5 * teacher_BLV.softmax(-1)
    entropy_BL: Tensor = -(q_BLV * student_BLV.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(halves, entropy_BL[labels_BL != -100].mean())


def test_chosen_rows_are_the_masked_positions() -> None:
    """The frame may ask the head at labelled positions only."""
    student_BLV, teacher_BLV = random(2, 4, 7, seed=1), random(2, 4, 7, seed=2)
    mask_BL = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0]])
    rows = mobilebert.masked_lm(student_BLV[mask_BL.bool()], teacher_BLV[mask_BL.bool()], torch.ones(3))
    torch.testing.assert_close(rows, mobilebert.masked_lm(student_BLV, teacher_BLV, mask_BL))
