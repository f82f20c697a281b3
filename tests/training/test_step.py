"""A step is one module for every loop: it trains the student and its projections, never the teacher."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    T5Config,
    T5EncoderModel,
    Trainer,
    TrainingArguments,
)

from compress.config.term import LAYERED, Term
from compress.errors import ObjectiveError
from compress.models.signals import Signals, open_attention, read
from compress.papers import bert
from compress.slicing.shape import Shape
from compress.training.objective import Objective
from compress.training.reads import reads
from compress.training.step import Distillation, fill_labels
from tests import tiny
from tests.papers.case import losses, papers

TERMS = [
    Term("hinton.soft_targets", 0.5, options={"temperature": 2.0}),
    Term("bert.labels", 0.5),
    Term("tinybert.hidden", project=True),
    Term("tinybert.attention"),
]

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def labelled(seed: int = 0) -> dict[str, Tensor]:
    return tiny.batch((6, 4, 2), seed=seed) | {"labels": torch.tensor([0, 2, 1])}


def distillation(terms: list[Term] | None = None) -> Distillation:
    student = tiny.model("bert", hidden=16, seed=1, **NO_DROPOUT)
    teacher = tiny.model("bert", layers=4, seed=2)
    torch.manual_seed(3)
    return Distillation(student, teacher, terms or TERMS)


def teacher_of(step: Distillation) -> nn.Module:
    assert isinstance(step.teacher, nn.Module)
    return step.teacher


def test_a_batch_gives_the_loss_and_its_parts_by_name() -> None:
    out = distillation()(**labelled())
    assert list(out) == ["loss", "hinton.soft_targets", "bert.labels", "tinybert.hidden", "tinybert.attention"]
    assert out["loss"].requires_grad
    assert not any(part.requires_grad for name, part in out.items() if name != "loss")
    torch.testing.assert_close(out["loss"].detach(), sum(part for name, part in out.items() if name != "loss"))


def test_the_batch_is_left_as_it_was() -> None:
    batch = labelled()
    kept = copy.deepcopy(batch)
    distillation()(**batch)
    assert batch.keys() == kept.keys()
    assert all(torch.equal(batch[name], kept[name]) for name in kept)


# Attention that is not BERT's: losses compare what each model computes, where both look


def t5_encoder(seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}
    return T5EncoderModel._from_config(T5Config(**sizes, initializer_factor=2.0), **changes).eval()


@pytest.mark.parametrize("family", ["bert", "llama", "mistral", "t5"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_attention_is_compared_as_the_models_compute_it(family: str, side: str) -> None:
    """MiniLM's first loss is the divergence of the attention that transformers itself reports."""

    def make(seed: int, **changes: Any) -> Any:
        return t5_encoder(seed, **changes) if family == "t5" else tiny.model(family, seed=seed, **changes)

    batch = tiny.batch((7, 5, 2))
    if side == "left":
        batch = {name: column.flip(1) for name, column in batch.items()}
    eager = {"attn_implementation": "eager"} if family == "t5" else {"eager": True}
    with torch.no_grad():
        student_BHLL, teacher_BHLL = (
            make(seed, **eager)(**batch, output_attentions=True).attentions[-1] for seed in (1, 2)
        )
    kl_BHL = (teacher_BHLL * (teacher_BHLL.clamp_min(1e-30) / student_BHLL.clamp_min(1e-30)).log()).sum(-1)
    real_BL = batch["attention_mask"]
    expected = ((kl_BHL.mean(1) * real_BL).sum(1) / real_BL.sum(1)).mean()
    step = Distillation(make(1), make(2), [Term("minilm.attention", layers="last")])
    torch.testing.assert_close(step(**batch)["loss"].detach(), expected, rtol=1e-4, atol=1e-6)


def test_scores_of_later_tokens_do_not_count() -> None:
    """A causal model never takes the softmax of them; they weigh as much as the others in a mean over all pairs."""
    batch = tiny.batch((6, 4))
    step = Distillation(tiny.model("llama", seed=1), tiny.model("llama", seed=2), [Term("tinybert.attention")])
    shown = [read(model, batch, frozenset({"scores"})).scores for model in (step.student, teacher_of(step))]
    expected = 0.0
    shown = [[scores.detach() for scores in each] for each in shown]
    for student_BHLL, teacher_BHLL in zip(*shown, strict=True):
        for row, length in enumerate((6, 4)):
            error_LL = (student_BHLL[row] - teacher_BHLL[row]).square().mean(0)
            seen = [float(error_LL[i, j]) for i in range(length) for j in range(i + 1)]
            expected += length**2 * sum(seen) / len(seen) / (6**2 + 4**2)
    assert float(step(**batch)["loss"].detach()) == pytest.approx(expected, rel=1e-5)


def test_a_loss_on_all_pairs_refuses_causal_attention() -> None:
    @reads("scores")
    def distance(student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().mean()

    step = Distillation(tiny.model("llama"), tiny.model("llama"), [Term(distance)])
    with pytest.raises(ObjectiveError, match=r"distance compares attention of all pairs.*earlier tokens only"):
        step(**tiny.batch())
    whole = Distillation(tiny.model("bert"), tiny.model("bert", seed=1), [Term(distance)])
    assert float(whole(**tiny.batch())["loss"].detach()) > 0


def test_a_layer_that_shows_no_attention_is_named() -> None:
    step = Distillation(tiny.model("bert"), tiny.model("bert"), [Term("tinybert.attention")])
    step.objective.pairs = [[(0, 0), (2, 1)]]
    with pytest.raises(ObjectiveError, match=r"scores of layer 2 of the student, which has recorded them for 2 layers"):
        step(**tiny.batch())


# The teacher


def test_the_teacher_is_not_registered_in_the_step() -> None:
    step = distillation()
    teacher = {id(each) for each in teacher_of(step).parameters()}
    assert not teacher & {id(each) for each in step.parameters()}
    assert all(name.startswith(("student.", "objective.projections.")) for name in step.state_dict())
    assert all(module is not step.teacher for module in step.modules())


@pytest.mark.parametrize("head", [AutoModelForMaskedLM, AutoModelForSequenceClassification], ids=["tokens", "examples"])
def test_no_loss_of_any_paper_sends_a_gradient_to_the_teacher(head: type) -> None:
    """Every loss that reads a teacher, at once, logits of one kind; heads, widths and labels agree."""
    found = {f"{paper}.{name}": loss.reading for paper in papers() for name, loss in losses(paper).items()}
    needed = {"matryoshka.nested": {"of": "leaf.l2", "sizes": [1.0, 0.5]}}
    terms = [
        Term(name, options={"heads": 8} if name.endswith("_relations") else {}, layers="last")
        if reading.signal in LAYERED
        else Term(name, options=needed.get(name, {}))
        for name, reading in found.items()
        if reading.against == "teacher"
        and reading.signal != "encoder_layers"  # of encoder-decoders: see tests/papers/test_seq2seq.py
        and reading.per not in ("query", "preference")  # of rankings: see tests/evaluation/test_rankings.py
        and not name.startswith("electra.")  # of discriminators: see tests/papers/test_electra.py
        and (reading.signal != "logits" or (reading.per == "example") == (head is AutoModelForSequenceClassification))
    ]
    student, teacher = tiny.model("bert", head=head), tiny.model("bert", head=head, seed=1)
    before = copy.deepcopy(teacher.state_dict())
    step = Distillation(student, teacher, terms)
    batch = tiny.batch()
    step(**batch, labels=batch["input_ids"])["loss"].backward()
    assert all(each.grad is None and not each.requires_grad for each in teacher.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert all(each.grad is None or each.grad.isfinite().all() for each in student.parameters())
    assert student.bert.embeddings.word_embeddings.weight.grad.any()


def test_the_teacher_stays_in_eval_mode() -> None:
    """TinyBERT's own scripts left its dropout on."""
    student, teacher = tiny.model("bert", hidden=16), tiny.model("bert", layers=4).train()
    step = Distillation(student, teacher, TERMS).train()
    assert student.training
    assert not any(module.training for module in teacher.modules())
    step.eval()
    assert not student.training


def test_the_teacher_follows_the_step_to_another_type_or_device() -> None:
    step = distillation().to(torch.float64)
    assert {each.dtype for each in teacher_of(step).parameters()} == {torch.float64}
    assert {each.dtype for each in step.parameters()} == {torch.float64}
    out = step(**labelled())
    out["loss"].backward()
    torch.testing.assert_close(out["loss"], distillation()(**labelled())["loss"])
    assert {each.device.type for each in teacher_of(step.to("meta")).parameters()} == {"meta"}


def test_labels_alone_need_no_teacher() -> None:
    step = Distillation(tiny.model("bert"), None, [Term("bert.labels")])
    batch = labelled()
    expected = tiny.model("bert")(**batch).loss
    torch.testing.assert_close(step(**batch)["loss"], expected)
    assert step.teacher is None


def test_a_masked_language_model_learns_from_labels_as_in_transformers() -> None:
    batch = tiny.batch()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    step = Distillation(tiny.model("bert", head=AutoModelForMaskedLM), None, [Term("bert.masked_lm")])
    expected = tiny.model("bert", head=AutoModelForMaskedLM)(**batch, labels=labels).loss
    torch.testing.assert_close(step(**batch, labels=labels)["loss"], expected)


class Stored:
    """A cache of a teacher's outputs plays the teacher."""

    def __init__(self, teacher: nn.Module, batch: Mapping[str, Tensor], wants: frozenset[str]) -> None:
        open_attention(teacher)
        with torch.no_grad():
            self.shown = read(teacher, batch, wants)
        self.asked: list[frozenset[str]] = []

    def signals(self, batch: Mapping[str, Tensor], wants: frozenset[str]) -> Signals:
        self.asked.append(wants)
        return self.shown


def test_stored_outputs_may_play_the_teacher() -> None:
    online, batch = distillation(), labelled()
    stored = Stored(teacher_of(online), batch, online.objective.teacher_wants)
    step = Distillation(online.student, stored, online.objective)
    assert step(**batch)["loss"].item() == online(**batch)["loss"].item()
    assert stored.asked == [frozenset({"logits", "layers", "scores"})]
    step.to(torch.float64)


def test_an_objective_may_be_built_beforehand() -> None:
    step = distillation()
    shapes = [Shape.from_config(model.config) for model in (step.student, teacher_of(step))]
    objective = Objective(TERMS, *shapes, kind="classification")
    objective.load_state_dict(step.objective.state_dict())
    again = Distillation(step.student, step.teacher, objective)
    assert again(**labelled())["loss"].item() == step(**labelled())["loss"].item()


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "xlnet"])
def test_every_family_teaches_and_learns(family: str) -> None:
    """From a BERT, and to one, with different widths; relations bridge the rest."""
    terms = [
        Term("hinton.soft_targets"),
        Term("tinybert.embeddings", project=True),
        Term("tinybert.hidden", project=True),
        Term("minilm.value_relations", layers="last", options={"heads": 8}),
    ]
    other, bert = tiny.model(family, seed=1), tiny.model("bert", hidden=16, seed=2)
    for student, teacher in ((bert, other), (copy.deepcopy(other), copy.deepcopy(bert))):
        student.requires_grad_(True)
        out = Distillation(student, teacher, terms)(**labelled())
        out["loss"].backward()
        assert all(part.isfinite() and part > 0 for part in out.values())
        assert student.base_model.get_input_embeddings().weight.grad.any()


# Loops


def loop(step: Distillation, batches: list[dict[str, Tensor]]) -> None:
    optimiser = torch.optim.SGD(step.parameters(), lr=0.05)
    for batch in batches:
        optimiser.zero_grad()
        step(**batch)["loss"].backward()
        optimiser.step()


def only(batches: list[Any]) -> Any:
    (batch,) = batches
    return batch


def test_trainer_is_the_plain_loop(tmp_path: Path) -> None:
    batches = [labelled(seed) for seed in range(3)]
    by_hand, by_trainer = distillation(), distillation()
    before = copy.deepcopy(by_hand.state_dict())
    loop(by_hand, batches)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=1,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    Trainer(model=by_trainer, args=arguments, data_collator=only, train_dataset=batches).train()
    for name, expected in by_hand.state_dict().items():
        torch.testing.assert_close(by_trainer.state_dict()[name], expected)
    assert not torch.equal(before["student.classifier.weight"], by_hand.state_dict()["student.classifier.weight"])
    projection = next(name for name in before if "projections" in name)
    assert not torch.equal(before[projection], by_hand.state_dict()[projection])


MASKED = [Term("distilbert.masked_soft_targets"), Term("bert.masked_lm")]


def masked_step(seed: int = 0) -> Distillation:
    student = tiny.model("bert", head=AutoModelForMaskedLM, layers=1, seed=seed, **NO_DROPOUT)
    teacher = tiny.model("bert", head=AutoModelForMaskedLM, layers=2, seed=9)
    return Distillation(student, teacher, MASKED)


def test_transformers_trainer_saves_and_resumes_a_student_with_tied_weights(tmp_path: Path) -> None:
    rows = [{name: column[0] for name, column in tiny.batch((7,)).items()} for _ in range(4)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        activation_checkpointing=True, dataloader_pin_memory=False,
    )  # fmt: skip
    step = masked_step()
    Trainer(model=step, args=arguments, train_dataset=rows).train()
    again = masked_step(seed=5)
    Trainer(model=again, args=arguments, train_dataset=rows).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    for name, parameter in step.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter)
    assert again.student.cls.predictions.decoder.weight is again.student.get_input_embeddings().weight


def test_a_state_has_tied_tensors_once() -> None:
    step = masked_step()
    table, decoder = "student.bert.embeddings.word_embeddings.weight", "student.cls.predictions.decoder.weight"
    state = step.state_dict()
    assert table in state and decoder not in state
    other = masked_step(seed=5)
    assert other.load_state_dict(state).missing_keys == []
    torch.testing.assert_close(other.student.get_input_embeddings().weight, state[table])


def test_a_causal_model_does_not_learn_to_repeat_its_input() -> None:
    """transformers' collators write the input itself as labels, and its models shift them."""
    batch = tiny.batch((7, 5))
    student, teacher = (tiny.model("gpt2", head=AutoModelForCausalLM, layers=n) for n in (1, 2))
    copied = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    answers_only = copied.clone()
    answers_only[:, :2] = -100
    for labels in (copied, answers_only):
        with pytest.raises(ObjectiveError, match=r"expected the next tokens; pass batches through .*next_tokens"):
            Distillation(student, teacher, [Term("bert.masked_lm")])(**batch, labels=labels)
    shifted = copied.roll(-1, 1)
    shifted[:, -1] = -100
    step = Distillation(student, teacher, [Term("bert.masked_lm")])
    expected = student(**{name: batch[name] for name in ("input_ids", "attention_mask")}, labels=copied).loss
    torch.testing.assert_close(step(**batch, labels=shifted)["loss"], expected)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_reads_the_labels_before(family: str) -> None:
    config = CONFIG_MAPPING[family](
        vocab_size=50, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        decoder_start_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    batch = {name: column for name, column in tiny.batch((7, 5)).items() if name != "token_type_ids"}
    labels = torch.randint(3, 50, (2, 4))
    found = Distillation(model, None, [Term("bert.masked_lm")])(**batch, labels=labels)["loss"]
    torch.testing.assert_close(found, model(**batch, labels=labels).loss)


def test_a_projection_reads_a_student_in_half_precision() -> None:
    student, teacher = (tiny.model("bert", hidden=hidden, seed=1) for hidden in (16, 32))
    out = Distillation(student.bfloat16(), teacher, [Term("tinybert.hidden", project=True)])(**tiny.batch())
    assert out["loss"].dtype == torch.float32 and out["loss"].isfinite()


@pytest.mark.parametrize(
    ("outputs", "labels", "known"),
    [
        (3, torch.tensor([2, -100, 0]), [0, 2]),
        (3, torch.tensor([-100, -100, -100]), []),
        (1, torch.tensor([1.0, math.nan, 3.0]), [0, 2]),
        (1, torch.tensor([math.nan, math.nan, math.nan]), []),
        (2, torch.tensor([[1.0, 0.0], [math.nan, math.nan], [0.0, 0.0]]), [0, 2]),
    ],
)
def test_rows_without_a_label_do_not_count(outputs: int, labels: Tensor, known: list[int]) -> None:
    scores = torch.randn(3, outputs, requires_grad=True)
    found = bert.labels(scores, labels, None)
    found.backward()
    expected = bert.labels(scores[known], labels[known], None) if known else torch.tensor(0.0)
    torch.testing.assert_close(found, expected)
    assert scores.grad is not None and scores.grad.isfinite().all()
    assert {row for row in range(3) if scores.grad[row].any()} == set(known)


def test_one_output_has_no_classes() -> None:
    with pytest.raises(ObjectiveError, match=r"the model has one output, .*expected numbers as floats"):
        bert.labels(torch.zeros(2, 1), torch.tensor([0, 1]), None)


@pytest.mark.parametrize(
    ("labels", "teacher_BV", "expected"),
    [
        ([1, -100, 0], [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], [1, 1, 0]),
        ([0.5, math.nan], [[2.0], [3.0]], [0.5, 3.0]),
        ([[1.0, 0.0], [math.nan, math.nan]], [[-1.0, 1.0], [-1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]),
        ([[1, -100], [-100, -100]], [[0.0, 1.0], [0.0, 1.0]], [[1, -100], [-100, -100]]),
    ],
)
def test_the_teacher_answers_for_examples_without_a_label(labels: Any, teacher_BV: Any, expected: Any) -> None:
    filled = fill_labels(torch.tensor(labels), torch.tensor(teacher_BV))
    assert torch.equal(filled, torch.tensor(expected))


def test_the_teacher_answers_for_words_without_a_tag() -> None:
    tags = torch.tensor([[-100, 2, -1], [-1, -100, -100]])
    teacher_BLC = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2], [1, 1, 1]]), 3).float()
    assert fill_labels(tags, teacher_BLC, tags=True).tolist() == [[-100, 2, 2], [1, -100, -100]]


def test_a_missing_label_is_learned_as_the_teachers_answer() -> None:
    step, given = distillation(), labelled()
    with torch.no_grad():
        answer = teacher_of(step)(**tiny.batch((6, 4, 2))).logits.argmax(-1)
    missing = step(**given | {"labels": torch.tensor([0, -100, 1])})
    answered = step(**given | {"labels": torch.stack([torch.tensor(0), answer[1], torch.tensor(1)])})
    assert torch.equal(missing["loss"], answered["loss"])
