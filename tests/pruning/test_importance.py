"""Importance once: whatever the batch, the padding and the process; kept on disk; refused where it says nothing."""

import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForQuestionAnswering, AutoModelForTokenClassification

from compress.config.reference import Call
from compress.errors import PruneError, RecipeError
from compress.models.teacher import Teacher
from compress.pruning import importance
from compress.pruning import importance as rating
from compress.pruning.importance import Batches, Targets, answer_loss, compute_importance, gradients
from compress.slicing.plan import Group, SlicePlan
from compress.slicing.select import Importance, Kept, choose, magnitude
from compress.slicing.sizes import Sizes
from tests import forks, tiny
from tests.pruning import measured
from tests.slicing import families

NAMES = ("molchanov.taylor", "theis.fisher", "minitron.activation")
ONE_OF_EACH = ("bert", "albert", "mobilebert", "deberta-v2")


def same(one: Importance, other: Importance, tolerance: float = 1e-3) -> None:
    assert one.keys() == other.keys()
    for group, vector in one.items():
        atol = tolerance * float(vector.abs().max())
        torch.testing.assert_close(other[group], vector, rtol=tolerance, atol=atol, msg=str(group))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_batches_and_padding_do_not_matter(name: str, family: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(family)
    plan = SlicePlan.from_model(model)
    expected = measured.rated(name, model, batch=1)
    same(expected, measured.rated(name, model, batch=5))

    def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        wider = torch.nn.functional.pad
        batch = measured.COLLATE(rows)
        wide = {key: wider(value, (0, 6)) for key, value in batch.items() if value.dim() == 2}
        return {**batch, **wide}

    monkeypatch.setenv("COMPRESS_HOME", str(home / "padded"))
    same(expected, compute_importance(Call(name), model, plan, measured.rows(), padded, batch=5))


@pytest.mark.parametrize("targets", ["drawn", "teacher"])
def test_answers_without_labels_do_not_depend_on_batches(targets: Targets) -> None:
    heads = (AutoModel, AutoModelForMaskedLM, AutoModelForQuestionAnswering, AutoModelForTokenClassification)
    for head in heads:
        labels = 2 if head is AutoModelForQuestionAnswering else 3
        model, other = (tiny.model("bert", head=head, seed=seed, labels=labels) for seed in range(2))
        plan, data = SlicePlan.from_model(model), measured.rows().remove_columns("labels")
        found = []
        for size in (1, 6):
            total: dict[Group, Tensor] = {}
            batches = Batches(data, measured.COLLATE, size, teacher=other)
            for of_batch in gradients(model, batches, plan, targets=targets):
                for group, gradient in of_batch.items():
                    total[group] = total.get(group, torch.zeros(())) + gradient.abs().sum(0)
            found.append(total)
        same(*found)
        assert found[0][Group("hidden")].max() > 1e-3


@pytest.mark.parametrize("config", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}])
def test_regression_and_multilabel_answers_are_supported(config: dict[str, Any]) -> None:
    labels = config["num_labels"]
    model, other = (tiny.bert(labels, seed=seed, problem_type=config.get("problem_type")) for seed in range(2))
    data = measured.rows().remove_columns("labels")
    for options, teacher in (({"targets": "drawn"}, None), ({"targets": "teacher"}, of_model(other))):
        call = Call("theis.fisher", options)
        found = compute_importance(
            call, model, SlicePlan.from_model(model), data, measured.COLLATE, batch=4, teacher=teacher
        )
        assert found[Group("ffn", "0")].min() > 0


def of_model(model: Any) -> Teacher:
    return Teacher("other", Path("other"), model, tiny.tokenizer(), digest="other", trained=True)


def test_drawn_answers_follow_the_models_probabilities() -> None:
    """Over many texts each class is drawn as often as it is likely."""
    model = tiny.bert(3, initializer_range=1e-4)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.6, 0.3, 0.1]).log())
    ids = torch.randint(5, 40, (400, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    answer_loss(model, batch, "drawn", None).backward()
    drawn = 400 * torch.tensor([0.6, 0.3, 0.1]) - model.classifier.bias.grad  # the gradient is p - y
    torch.testing.assert_close(drawn / 400, torch.tensor([0.6, 0.3, 0.1]), rtol=0, atol=0.06)


def test_low_precision_ranks_alike() -> None:
    model = tiny.bert(3)
    plan, call = SlicePlan.from_model(model), Call("molchanov.taylor")
    full, low = (
        compute_importance(call, model, plan, measured.rows(), measured.COLLATE, bf16=bf16) for bf16 in (False, True)
    )
    pairs = torch.stack([full[Group("ffn", "0")], low[Group("ffn", "0")]])
    assert torch.corrcoef(pairs)[0, 1] > 0.99
    assert not torch.equal(*pairs)


@pytest.mark.parametrize("family", ["bert", "mobilebert", "llama"])
def test_li_magnitude_is_magnitude(family: str) -> None:
    model = families.model(family)
    found, expected = measured.rated("li.magnitude", model), magnitude(model)
    assert found.keys() == expected.keys()
    for group, vector in expected.items():
        torch.testing.assert_close(found[group] * len(measured.rows()), vector)


# On disk


def test_results_are_cached(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.bert(3)
    first = measured.rated("theis.fisher", model)
    (file,) = (home / "importance").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(rating, "_mean", None)  # which is needed where anything is computed
        again = measured.rated("theis.fisher", model)
    assert all(torch.equal(first[group], again[group]) for group in first)
    shutil.rmtree(file)
    recomputed = measured.rated("theis.fisher", model)
    assert all(torch.equal(first[group], recomputed[group]) for group in first)


def test_the_cache_key_covers_call_rows_and_weights(home: Path) -> None:
    model = tiny.bert(3)
    measured.rated("molchanov.taylor", model)
    measured.rated("theis.fisher", model)
    measured.rated("molchanov.taylor", model, targets="drawn")
    measured.rated("molchanov.taylor", model, measured.rows(15))
    with torch.no_grad():
        model.classifier.bias += 1
    measured.rated("molchanov.taylor", model)
    assert len(list((home / "importance").iterdir())) == 5


# By several processes


TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "molchanov.taylor": {}, "minitron.activation": {}, "li.magnitude": {},
    "movement.movement": {"steps": 3, "lr": 1e-2},
}  # fmt: skip


def test_two_processes_agree_with_one_and_refuse_to_disagree(tmp_path: Path) -> None:
    """Also movement, whose processes train together. Each has a cache of its own; afterwards only the first has it."""
    together(tmp_path)
    for name, options in TOGETHER.items():
        one, other = (load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2))
        alone = measured.rated(name, tiny.bert(3), batch=4, **options)
        assert all(torch.equal(one[key], other[key]) for key in one)
        for group, vector in alone.items():
            found, scale = one[str(group)], vector.abs().max()
            torch.testing.assert_close(found / scale, vector / scale, rtol=1e-3, atol=1e-4, msg=str(group))
    assert len(list((tmp_path / "home-0" / "importance").iterdir())) == len(TOGETHER)
    assert not (tmp_path / "home-1").exists()
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "processes keep different units"


def together(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    started = []
    for rank in range(2):
        named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
        home = {"COMPRESS_HOME": str(folder / f"home-{rank}")}
        child = forks.context().Process(target=_rates, args=(shared | named | home, folder, rank))
        child.start()
        started.append(child)
    for child in started:
        child.join(120)
        assert child.exitcode == 0


def _rates(environment: dict[str, str], folder: Path, rank: int) -> None:
    from accelerate import PartialState

    os.environ.update(environment)
    assert PartialState(cpu=True).num_processes == 2
    model = tiny.bert(3)
    plan, sizes = SlicePlan.from_model(model), Sizes.from_request(model.config, ffn=0.5, heads=2, hidden=16)
    for name, options in TOGETHER.items():
        found = measured.rated(name, tiny.bert(3), batch=4, **options)
        importance.check_agreement(choose(plan, found, sizes))
        save_file({str(group): vector for group, vector in found.items()}, folder / f"{name}-{rank}.safetensors")
    with pytest.raises(PruneError) as error:
        importance.check_agreement(
            Kept(Sizes.from_config(model.config), (0, 1), {Group("ffn", "0"): torch.tensor([rank])})
        )
    (folder / f"{rank}.txt").write_text(str(error.value).partition(":")[0])


# What cannot be


def says_nothing_of_ffn(student: Any, batches: Any, plan: SlicePlan) -> Importance:
    return {group: torch.ones(count) for group, count in plan.groups.items() if group.axis != "ffn"}


def says_nan(student: Any, batches: Any, plan: SlicePlan) -> Importance:
    return {group: torch.full((count,), torch.nan) for group, count in plan.groups.items()}


def says_zero(student: Any, batches: Any, plan: SlicePlan) -> Importance:
    return {group: torch.zeros(count) for group, count in plan.groups.items()}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("molchanov.taylor", {"targets": "teacher"}), "no teacher was given"),
        (Call("own.ffn", code=says_nothing_of_ffn), r"does not rate ffn\.0, ffn\.1"),
        (Call("own.nan", code=says_nan), "is not finite"),
        (Call("own.zero", code=says_zero), "the importance of everything is 0"),
        (Call("movement.movement", {"steps": 40, "lr": 1e30}), "lower lr"),
    ],
)
def test_invalid_importance_is_refused(call: Call, said: str, home: Path) -> None:
    with pytest.raises(PruneError, match=said):
        measured.rated(call, tiny.bert(3))
    assert not (home / "importance").exists()


def test_rows_without_labels_are_refused() -> None:
    with pytest.raises(PruneError, match="use targets: drawn"):
        measured.rated("molchanov.taylor", tiny.bert(3), measured.rows().remove_columns("labels"))


def test_no_rows_are_refused() -> None:
    with pytest.raises(PruneError, match="there are none"):
        measured.rated("molchanov.taylor", tiny.bert(3), measured.rows().select([]))


def test_a_student_equal_to_its_teacher_is_refused() -> None:
    model, call = tiny.bert(3), Call("molchanov.taylor", {"targets": "teacher"})
    with pytest.raises(PruneError, match="answers as its teacher does"):
        compute_importance(
            call, model, SlicePlan.from_model(model), measured.rows(), measured.COLLATE, teacher=of_model(model)
        )


def test_misspelled_options_are_named() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'targets'"):
        measured.rated("molchanov.taylor", tiny.bert(3), target="drawn")
    with pytest.raises(RecipeError, match="targets"):
        measured.rated("molchanov.taylor", tiny.bert(3), targets="label")
