"""From likelihoods to probabilities: the papers' formulas, by hand."""

import math

import numpy as np
import pytest

from compress.prompting.labels import average_by_label, calibrate, content_free_prior, normalise

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


def test_what_a_content_free_text_gives_is_calibrated_to_uniform() -> None:
    scores = np.log(np.array([[0.05, 0.8, 0.3]]))
    np.testing.assert_allclose(
        np.exp(calibrate(scores, content_free_prior(scores))), np.full((1, 3), 1 / 3), rtol=1e-12
    )


def test_tiny_likelihoods_do_not_vanish() -> None:
    scores = np.array([[-2000.0, -2001.0]])
    assert np.exp(calibrate(scores, None)).tolist()[0] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
