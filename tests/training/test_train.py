"""Training is the plain loop one would write, whatever the batch is split into; the best student is kept."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from compress.config.reference import Call
from compress.config.stages import Stage
from compress.config.term import Term
from compress.data.collate import LengthGrouped
from compress.errors import CompressError, ObjectiveError
from compress.training.stage import Trained, _make_step, _positions
from compress.training.step import Distillation
from tests import learning, tiny

NAMES = [term.name for term in learning.TERMS]


def trained(path: Path, stage: Stage, *, score: Any = None, dropout: bool = False) -> Distillation:
    step = learning.step(stage.objective, dropout=dropout)
    learning.train(step, stage, path, score=score)
    return step


def by_hand(
    stage: Stage, until: int | None = None, *, vocabulary: int | None = None
) -> tuple[Distillation, list[dict[str, float]]]:
    """The loop one would write: batches of like lengths, AdamW without decay of biases and norms, warm-up, clipping."""
    assert stage.steps is not None
    step, rows, collate = learning.step(stage.objective), learning.rows(vocabulary=vocabulary), learning.collate()
    plain = [each for name, each in step.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    decayed = [each for each in step.parameters() if not any(each is other for other in plain)]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": stage.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=stage.betas,
        eps=stage.eps,
    )
    warm_up, found = math.ceil(stage.steps * stage.warmup), []
    for done, batch in zip(range(until or stage.steps), batches(rows, stage), strict=False):
        for group in optimiser.param_groups:
            left = (stage.steps - done) / (stage.steps - warm_up)
            group["lr"] = min(stage.lr * done / warm_up, stage.lr_end + (stage.lr - stage.lr_end) * left)
        optimiser.zero_grad()
        parts = step(**collate([rows[i] for i in batch]))
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(step.parameters(), stage.clip)
        optimiser.step()
        found.append({name: part.item() for name, part in parts.items()})
    return step, found


def batches(rows: Dataset, stage: Stage) -> Iterator[list[int]]:
    """Row numbers, epoch after epoch; batches of like lengths, every one whole."""
    sampler = LengthGrouped(rows["length"], stage.batch, seed=7, whole=True)
    while True:
        order = list(sampler)
        yield from (order[at : at + stage.batch] for at in range(0, len(order), stage.batch))
        sampler.set_epoch(sampler.epoch + 1)


def assert_same(one: Distillation, other: Distillation, *, atol: float) -> None:
    ours, theirs = learning.weights(one), learning.weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("lr_end", [0.0, 4e-3])
def test_training_is_the_plain_loop(lr_end: float, tmp_path: Path) -> None:
    stage = learning.stage(weight_decay=0.1, clip=0.5, lr_end=lr_end)
    ours = trained(tmp_path, stage)
    plain, parts = by_hand(stage)
    assert_same(ours, plain, atol=1e-6)
    for entry, expected in zip(losses(tmp_path), parts, strict=True):
        assert entry == pytest.approx(expected | {"step": entry["step"]}, rel=1e-5)
    before = learning.weights(learning.step())
    assert all(
        not torch.equal(before[name], tensor) for name, tensor in learning.weights(ours).items() if "dense" in name
    )


def test_tokens_that_never_occur_keep_their_weights_and_change_nothing_else(tmp_path: Path) -> None:
    """Only the rows in use are trained; the plain loop decays the others too, if it decays."""
    step, stage = learning.step(), learning.stage(weight_decay=0.0, evaluate=1)
    rows = learning.rows(vocabulary=10)
    learning.train(step, stage, tmp_path / "plain", data=rows, score=Scores(0.1, 0.2, 0.3))
    assert_same(step, by_hand(stage, vocabulary=10)[0], atol=1e-6)
    decayed = learning.step()
    words = decayed.student.get_input_embeddings().weight
    before = words.detach().clone()
    learning.train(decayed, stage.model_copy(update={"weight_decay": 0.1}), tmp_path / "run", data=rows)
    assert decayed.student.get_input_embeddings().weight is words
    changed = (words != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted({token for row in rows["input_ids"] for token in row})


def test_lamb_is_chosen_by_the_stage_and_trains_every_row_of_the_embedding(tmp_path: Path) -> None:
    """A tensor's length is that of all its rows; those of tokens that never occur decay."""
    stage = learning.stage(optimizer="lamb", weight_decay=0.1, clip=0.0, steps=1, schedule="constant", warmup=0.0)
    step, rows = learning.step(), learning.rows(vocabulary=10)
    before = learning.weights(step)
    learning.train(step, stage, tmp_path, data=rows)
    for name, tensor in learning.weights(step).items():
        moved = (tensor - before[name]).norm() / before[name].norm()
        if name.endswith("weight") and "LayerNorm" not in name and "type" not in name:
            assert float(moved) == pytest.approx(stage.lr, rel=1e-4), name
    words = step.student.get_input_embeddings().weight
    changed_V = (words != before["student.bert.embeddings.word_embeddings.weight"]).any(1)
    assert bool(changed_V[1:].all()), "all but padding, which is 0"


@pytest.mark.parametrize("micro_batch", [4, 1])
def test_accumulated_parts_make_the_whole_batch(tmp_path: Path, micro_batch: int) -> None:
    """With losses per token and per pair of tokens, and parts of unequal lengths."""
    whole = trained(tmp_path / "whole", learning.stage())
    parts = trained(tmp_path / "parts", learning.stage(micro_batch=micro_batch))
    assert_same(parts, whole, atol=1e-5)
    for one, other in zip(losses(tmp_path / "parts"), losses(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_batch_that_cannot_be_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompressError, match="stage lesson: micro_batch 3 does not divide the 8 examples"):
        trained(tmp_path, learning.stage(micro_batch=3))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(CompressError, match="batch 8 cannot be split evenly over 3 processes"):
        trained(tmp_path, learning.stage())


# Scores


class Scores:
    """Gives the student these scores in turn and remembers the weights it had."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores
        self.weights: list[dict[str, Tensor]] = []

    def __call__(self, student: Any) -> Mapping[str, float]:
        student.eval()
        self.weights.append({name: tensor.clone() for name, tensor in student.state_dict().items()})
        return {"score": self.scores[len(self.weights) - 1], "accuracy": 0.5}


def test_the_best_weights_are_kept_not_the_last(tmp_path: Path) -> None:
    score = Scores(0.25, 0.75, 0.75, 0.5)
    stage, step = learning.stage(steps=8, epochs=2, evaluate=2), learning.step()
    facts = learning.train(step, stage, tmp_path, data=learning.rows(32), score=score)
    assert facts == Trained(8, 64, facts.seconds, score=0.75, best_step=4, peak_rss_mb=facts.peak_rss_mb)
    kept = step.student.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in score.weights[1].items())
    assert not all(torch.equal(kept[name], tensor) for name, tensor in score.weights[3].items())
    evaluated = [entry["step"] for entry in logged(tmp_path) if "eval_score" in entry]
    assert evaluated == [2, 4, 6, 8], "twice per epoch of four steps, each once"


class Late(Distillation):
    """Ready from step 5 on, with something to say in the end."""

    ready = False

    def begin(self, step: int, total: int) -> None:
        self.ready = step >= 5

    def finish(self) -> str:
        return "only just"


def test_a_step_keeps_no_weights_before_it_is_ready_and_what_it_says_is_recorded(tmp_path: Path) -> None:
    step, score = learning.step(), Scores(0.75, 0.75, 0.5, 0.25)
    late = Late(step.student, step.teacher, step.objective)
    stage = learning.stage(steps=8, epochs=2, evaluate=2)
    facts = learning.train(late, stage, tmp_path, data=learning.rows(32), score=score)
    assert (facts.best_step, facts.score) == (6, 0.5)
    assert all(torch.equal(late.student.state_dict()[name], each) for name, each in score.weights[2].items())
    facts.write(tmp_path)
    assert Trained.read(tmp_path).note == "lesson: only just"


def test_a_function_of_the_users_that_makes_no_step_is_refused() -> None:
    own = Call("mine.step", code=lambda student, teacher, objective: student)
    stage = learning.stage([Term("bert.labels")], step=own)
    others: Any = {"words": None, "rows": learning.rows(), "origin_D": None, "unit": 1.0, "seed": 0}
    with pytest.raises(ObjectiveError, match=r"mine\.step makes a BertForSequenceClassification"):
        _make_step(stage, tiny.bert(), None, learning.context(), **others)


def test_the_last_weights_are_scored_too(tmp_path: Path) -> None:
    score = Scores(0.0, 0.1, 0.2)
    facts = learning.train(learning.step(), learning.stage(evaluate=1), tmp_path, score=score)
    assert facts.best_step == 8
    assert [entry["step"] for entry in logged(tmp_path) if "eval_score" in entry] == [3, 6, 8]


def test_without_scores_the_last_weights_stay(tmp_path: Path) -> None:
    step = learning.step()
    facts = learning.train(step, learning.stage(), tmp_path)
    assert (facts.score, facts.best_step) == (None, None)
    assert_same(step, by_hand(learning.stage())[0], atol=1e-6)


# What is written


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(path: Path) -> list[dict[str, float]]:
    return [{name: entry[name] for name in ("step", "loss", *NAMES)} for entry in logged(path) if "loss" in entry]


def test_every_part_of_the_loss_and_every_score_is_logged(tmp_path: Path) -> None:
    terms = [*learning.TERMS, Term("tinybert.hidden", 2.0, layers="last", project=True)]
    trained(tmp_path, learning.stage(terms, evaluate=1), score=Scores(0.1, 0.2, 0.3))
    names = {"hinton.soft_targets", "bert.labels", "tinybert.hidden", "tinybert.attention", "tinybert.hidden#2"}
    steps = [entry for entry in logged(tmp_path) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 9))
    for entry in steps:
        assert entry["stage"] == "lesson"
        assert names < entry.keys()
        assert entry["loss"] == pytest.approx(sum(entry[name] for name in names), rel=1e-5)
    assert [entry["eval_accuracy"] for entry in logged(tmp_path) if "eval_score" in entry] == [0.5] * 3
    (events,) = (tmp_path / "tensorboard" / "lesson").iterdir()
    assert events.stat().st_size > 0


def test_a_logged_loss_is_the_mean_since_the_last(tmp_path: Path) -> None:
    stage = learning.stage(steps=200, lr=1e-3)
    step = learning.step()
    learning.interrupt(step, 6)
    with pytest.raises(KeyboardInterrupt):
        learning.train(step, stage, tmp_path)
    _, each = by_hand(stage, until=6)
    means = [{name: (each[i][name] + each[i + 1][name]) / 2 for name in each[i]} for i in (0, 2, 4)]
    for entry, mean, number in zip(losses(tmp_path), means, (2, 4, 6), strict=True):
        assert entry == pytest.approx(mean | {"step": number}, rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_stage(tmp_path: Path) -> None:
    teacher = tiny.model("bert", layers=4, seed=2)
    teacher.classifier.bias.data[0] = float("nan")
    step = learning.step(teacher=teacher)
    with pytest.raises(CompressError, match=r"stage lesson: the loss is nan at step 1; lower lr \(now 0\.01\)"):
        learning.train(step, learning.stage(), tmp_path)


# Continuing


class ByStep:
    """Scores that depend on the number of steps taken alone, as those of a model do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, student: Any) -> Mapping[str, float]:
        student.eval()
        return {"score": (0.1, 0.4, 0.3, 0.2, 0.6, 0.5, 0.1, 0.0)[logged(self.path)[-1]["step"] - 1]}


CONTINUED = {
    "every step is kept": learning.stage(schedule="constant", checkpoint=1),
    "accumulated, best weights older than the checkpoint": learning.stage(
        schedule="constant", checkpoint=3, micro_batch=4, evaluate=3
    ),
    "by LAMB": learning.stage(schedule="constant", checkpoint=2, optimizer="lamb"),
    "by Adafactor": learning.stage(schedule="constant", checkpoint=2, optimizer="adafactor"),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Distillation, Path]]:
    paths = {name: tmp_path_factory.mktemp("whole") for name in CONTINUED}
    return {
        name: (trained(path, CONTINUED[name], score=ByStep(path), dropout=True), path) for name, path in paths.items()
    }


@pytest.mark.parametrize(
    ("case", "at"),
    [(case, at) for case in CONTINUED for at in (0, 2, 3, 5, 7) if at in (3, 5) or not case.startswith("by")],
)
def test_a_continued_stage_ends_with_the_same_weights(
    tmp_path: Path,
    case: str,
    at: int,
    uninterrupted: Mapping[str, tuple[Distillation, Path]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """stopped before any of its steps: within an epoch, between two, before the first checkpoint, after the best."""
    stage, score = CONTINUED[case], ByStep(tmp_path)
    step = learning.step(dropout=True)
    learning.interrupt(step, at * (stage.batch // (stage.micro_batch or stage.batch)))
    with pytest.raises(KeyboardInterrupt):
        learning.train(step, stage, tmp_path, score=score)
    torch.manual_seed(99)
    again = trained(tmp_path, stage, score=score, dropout=True)
    whole, path = uninterrupted[case]
    assert_same(again, whole, atol=0)
    assert [entry["step"] for entry in logged(tmp_path)] == [entry["step"] for entry in logged(path)], "each step once"
    assert not caplog.records, "no library warns of what is as it should be"


def test_a_stage_stopped_after_its_last_step_takes_no_further_step(tmp_path: Path) -> None:
    """Its steps end within an epoch, and the schedule would still move the weights."""
    stage = learning.stage(schedule="constant", evaluate=1)
    whole = trained(tmp_path, stage, dropout=True, score=ByStep(tmp_path))
    again = learning.step(dropout=True)
    facts = learning.train(again, stage, tmp_path, score=ByStep(tmp_path))
    assert_same(again, whole, atol=0)
    assert (facts.steps, facts.examples, facts.score, facts.best_step) == (8, 64, 0.5, 6)


def test_a_budget_of_tokens_makes_larger_batches_of_shorter_rows(tmp_path: Path) -> None:
    """RoBERTa Sec. 4.2: the batch grows so that it holds as many tokens."""
    step, seen = learning.step(), []
    step.register_forward_pre_hook(lambda _, args, batch: seen.append(batch["input_ids"].shape), with_kwargs=True)
    stage = learning.stage(tokens=64, max_length=32, micro_batch=1, steps=9, evaluate=0)
    facts = learning.train(step, stage, tmp_path)
    assert len(seen) == 2 * facts.steps == 18, "two passes of 32 tokens"
    assert all(rows * tokens <= 32 for rows, tokens in seen)
    assert len({rows for rows, _ in seen}) > 1
    assert sum(rows * tokens for rows, tokens in seen) > 0.7 * 18 * 32


def test_a_budget_of_tokens_is_resumed_where_it_was(tmp_path: Path) -> None:
    stage = learning.stage(tokens=64, max_length=32, checkpoint=3, steps=9, evaluate=0)
    whole, halved, again = learning.step(), learning.step(), learning.step()
    learning.train(whole, stage, tmp_path / "whole")
    learning.interrupt(halved, 6)
    with pytest.raises(KeyboardInterrupt):
        learning.train(halved, stage, tmp_path / "halved")
    learning.train(again, stage, tmp_path / "halved")
    assert_same(again, whole, atol=0)


@pytest.mark.parametrize(("family", "table"), [("bert", "position_embeddings"), ("gpt2", "wpe")])
def test_a_table_of_positions_is_found(family: str, table: str) -> None:
    model = tiny.model(family)
    (found,) = _positions(model)
    assert [name.split(".")[-2] for name, each in model.named_parameters() if each is found] == [table]


@pytest.mark.parametrize("family", ["deberta-v2", "llama"])
def test_a_model_with_other_positions_is_trained_whole(family: str) -> None:
    assert list(_positions(tiny.model(family))) == []
