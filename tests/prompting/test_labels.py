"""A prompted model as a teacher: probabilities of labels for texts, and what is said of them."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console

from compress.data.task import Task
from compress.errors import PromptError, TeacherError
from compress.prompting.labels import (
    PromptedTeacher,
    average_by_label,
    build_task_prompt,
    calibrate,
    check_labels,
    content_free_prior,
    normalise,
    open_language_model,
)
from compress.prompting.prompt import Prompt
from tests.prompting import language_models
from tests.prompting.language_models import FakeLanguageModel

TASK = Task("classification", ("text",), "label", ("negative", "positive"), "accuracy")
PLAIN: dict[str, Any] = {
    "name": "p", "template": "Review: {{ text }}\nSentiment: {{ label }}",
    "labels": {"negative": "bad", "positive": "good"}, "normalise": "none", "calibrate": "none",
}  # fmt: skip
SAYS = {"dull": (-1.0, -3.0), "warm": (-2.5, -0.5), "N/A": (-1.0, -2.0), "Answer:": (-1.0, -4.0)}
TEXTS = ["dull", "warm", "strange"]


def teacher(speaker: Any = None, **changes: Any) -> PromptedTeacher:
    questions = build_task_prompt(Prompt.model_validate(PLAIN | changes), TASK, train=rows(), seed=0)
    return PromptedTeacher(
        speaker or FakeLanguageModel(SAYS, (-2.0, -2.0)), questions, Console(file=io.StringIO(), width=300)
    )


def rows() -> Dataset:
    return Dataset.from_dict({"text": [f"{TEXTS[i % 2]} {i}" for i in range(20)], "label": [i % 2 for i in range(20)]})


def shares(log_p: list[float]) -> list[float]:
    p = np.exp(log_p)
    return (p / p.sum()).tolist()


def test_probabilities_are_the_answers_likelihoods() -> None:
    soft = teacher().label([[text] for text in TEXTS])
    expected = [shares([-1, -3]), shares([-2.5, -0.5]), [0.5, 0.5]]
    np.testing.assert_allclose(np.exp(soft.log_p_NC), expected, rtol=1e-6)
    assert soft.log_p_NC.dtype == np.float32
    assert soft.labels == TASK.labels


def test_calibration_asks_with_the_same_examples_about_nothing() -> None:
    speaker = FakeLanguageModel(SAYS, (-2.0, -2.0))
    tutor = teacher(speaker, calibrate="content_free", content_free=["N/A"], examples=2)
    soft = tutor.label([["dull"]])
    np.testing.assert_allclose(np.exp(soft.log_p_NC), [shares([-1 + 1, -3 + 2])], rtol=1e-6)
    question, nothing = speaker.asked
    assert question.replace("dull", "N/A").rpartition("\n\n")[0].count("Sentiment:") == 2
    assert nothing == question.rpartition("\n\n")[0] + "\n\nReview: N/A\nSentiment:"


def test_both_texts_of_a_pair_are_without_content() -> None:
    speaker = FakeLanguageModel({}, (-1.0, -1.0))
    task = Task("classification", ("a", "b"), "label", TASK.labels, "accuracy")
    prompt = Prompt.model_validate(
        PLAIN | {"template": "{{ text }} / {{ text_pair }}: {{ label }}", "calibrate": "content_free"}
    )
    pairs = Dataset.from_dict({"text": ["one"], "text_pair": ["two"]})
    questions = build_task_prompt(prompt, task, train=pairs, seed=0)
    PromptedTeacher(speaker, questions, Console(quiet=True)).label_split(pairs)
    assert speaker.asked == ["one / two:", "N/A / N/A:", " / :", "[MASK] / [MASK]:"]


def test_other_settings_reuse_the_cache() -> None:
    """What is kept are the likelihoods, so reading them in another way asks only for what that way needs."""
    teacher(FakeLanguageModel(SAYS, (-2.0, -2.0))).label([[text] for text in TEXTS])
    again = FakeLanguageModel(SAYS, (-2.0, -2.0))
    teacher(again, normalise="length", calibrate="content_free", content_free=["", "dull"]).label([["warm"]])
    assert again.asked == ["Review: \nSentiment:"]


def test_cut_texts_are_reported_once() -> None:
    tutor = teacher(max_length=16)
    soft = tutor.label([["dull " * 30], ["warm"], ["dull " * 40]])
    assert soft.notes == ("2 of 3 texts were cut to fit 16 tokens with their prompt",)
    assert tutor.console.file.getvalue().count("were cut") == 1  # type: ignore[attr-defined]
    assert max(len(question.split()) for question in tutor.language_model.asked) == 15  # type: ignore[attr-defined]


def test_the_model_s_own_length_is_not_exceeded() -> None:
    speaker = language_models.local(language_models.gpt2(positions=64), language_models.byte_bpe())
    soft = teacher(speaker).label([["a dull film " * 60]])
    assert "fit 64 tokens" in soft.notes[0]
    assert np.isfinite(soft.log_p_NC).all()


def test_unlisted_answers_are_counted() -> None:
    from collections.abc import Iterator

    from compress.prompting.answers import Likelihood

    class Partial(FakeLanguageModel):
        def likelihoods(self, prompts: Any, answers: Any) -> "Iterator[tuple[int, Likelihood]]":
            for number, each in FakeLanguageModel.likelihoods(self, prompts, answers):
                yield number, Likelihood(each.log_p, each.tokens, absent=1)

    soft = teacher(Partial(SAYS, (-2.0, -2.0))).label([[text] for text in TEXTS])
    assert soft.notes[0].startswith("told reported the likelihood of 50.0% of the answers")


def test_balance_and_entropy() -> None:
    soft = teacher().label([["dull"], ["dull too"], ["warm"], ["dull again"]])
    assert soft.shares == {"negative": 0.75, "positive": 0.25}
    p, q = np.array(shares([-1, -3])), np.array(shares([-2.5, -0.5]))
    expected = (3 * -(p * np.log(p)).sum() - (q * np.log(q)).sum()) / 4 / np.log(2)
    assert soft.entropy == pytest.approx(expected, rel=1e-5)
    assert soft.balance("train") == (
        f"train: answers negative 75.0%, positive 25.0%; mean entropy {expected:.2f} of the maximum"
    )


def test_the_same_label_everywhere_is_refused() -> None:
    soft = teacher().label([[f"dull {n}"] for n in range(20)])
    with pytest.raises(TeacherError, match=r"every one of 20 train rows the label 'negative'"):
        check_labels(soft, "told", "train", strict=True)
    (note,) = check_labels(soft, "told", "train", strict=False)
    assert "nothing to learn" in note
    few = teacher().label([[f"dull {n}"] for n in range(19)])
    assert check_labels(few, "told", "train", strict=True) == []
    mixed = teacher().label([["warm"], *([f"dull {n}"] for n in range(19))])
    assert check_labels(mixed, "told", "train", strict=True) == []


def test_a_prompt_answers_with_classes() -> None:
    task = Task("regression", ("text",), "label", (), "pearson")
    with pytest.raises(PromptError, match="the task is regression"):
        build_task_prompt(Prompt.model_validate(PLAIN), task, train=rows(), seed=0)


def test_digest_covers_everything_that_decides_the_labels() -> None:
    def of(**changes: Any) -> str:
        return teacher(FakeLanguageModel(SAYS, (0.0, 0.0), digest=changes.pop("speaker", "told")), **changes).digest

    assert of() == of(name="q", about="other words")
    different = [
        of(),
        of(speaker="other"),
        of(examples=2),
        of(normalise="length"),
        of(labels={"negative": "x", "positive": "y"}),
    ]
    assert len(set(different)) == 5


def test_models_of_both_kinds_teach(tmp_path: Path) -> None:
    for name, model, tokenizer in (
        ("gpt2", language_models.gpt2(), language_models.byte_bpe()),
        ("t5", language_models.t5(), language_models.pieces()),
    ):
        speaker = open_language_model(language_models.saved(tmp_path / name, model, tokenizer))
        soft = teacher(speaker, normalise="length", calibrate="content_free", examples=2, max_length=200).label_split(
            rows()
        )
        assert soft.log_p_NC.shape == (20, 2)
        np.testing.assert_allclose(np.exp(soft.log_p_NC).sum(1), 1, rtol=1e-5)
        assert len(np.unique(soft.log_p_NC[:, 0])) > 10, "texts get probabilities of their own"


# Calibration: the papers' formulas, by hand

LOG_P = np.array([[-2.0, -6.0, -1.0], [-4.0, -3.0, -9.0]])
TOKENS = np.array([[1, 3, 2], [2, 3, 3]])


def test_length_is_per_token() -> None:
    found = normalise(LOG_P, TOKENS, "length")
    for row in range(2):
        for answer in range(3):
            assert found[row, answer] == LOG_P[row, answer] / TOKENS[row, answer]
    assert normalise(LOG_P, TOKENS, "none") is LOG_P


def test_unconditional_divides_by_the_answer_s_own_probability() -> None:
    alone = np.array([-1.0, -5.0, -0.5])
    found = np.exp(normalise(LOG_P, TOKENS, "unconditional", alone))
    for row in range(2):
        for answer in range(3):
            assert found[row, answer] == pytest.approx(math.exp(LOG_P[row, answer]) / math.exp(alone[answer]))


def test_a_label_is_the_mean_of_its_words() -> None:
    found = np.exp(average_by_label(LOG_P, (1, 0, 1)))
    for row in range(2):
        p = [math.exp(each) for each in LOG_P[row]]
        assert found[row].tolist() == pytest.approx([p[1], (p[0] + p[2]) / 2])


def test_content_free_is_the_mean_then_normalise() -> None:
    scores = np.log([[0.5, 0.1], [0.2, 0.3]])
    means = [(0.5 + 0.2) / 2, (0.1 + 0.3) / 2]
    assert np.exp(content_free_prior(scores)).tolist() == pytest.approx([mean / sum(means) for mean in means])


def test_calibration_is_the_diagonal_matrix_and_a_sum_of_one() -> None:
    p, p_cf = np.array([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]]), np.array([0.6, 0.3, 0.1])
    weighted = p @ np.linalg.inv(np.diag(p_cf)).T
    expected = weighted / weighted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(calibrate(np.log(p), np.log(p_cf))), expected, rtol=1e-12)
    assert p[0].argmax() == 0
    assert expected[1].argmax() == 2, "calibration may change the answer"


def test_the_label_order_is_the_paper_s_own() -> None:
    """softmax(W p), which the paper writes, and W p divided by its sum order the labels alike."""
    draw = np.random.default_rng(0)
    p, p_cf = draw.dirichlet(np.ones(4), 50), draw.dirichlet(np.ones(4))
    paper = np.exp(p / p_cf) / np.exp(p / p_cf).sum(1, keepdims=True)
    ours = calibrate(np.log(p), np.log(p_cf))
    assert (paper.argsort(1) == ours.argsort(1)).all()


def test_a_prompt_without_bias_and_no_calibration_leave_p_as_it_is() -> None:
    p = np.array([[0.7, 0.2, 0.1]])
    for p_cf in (np.log(np.full(3, 1 / 3)), None):
        np.testing.assert_allclose(np.exp(calibrate(np.log(3 * p), p_cf)), p, rtol=1e-12)


def test_tiny_likelihoods_do_not_vanish() -> None:
    scores = np.array([[-2000.0, -2001.0]])
    assert np.exp(calibrate(scores, None)).tolist()[0] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
