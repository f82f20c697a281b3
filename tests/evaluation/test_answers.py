"""Spans, exact match, F1 and the threshold of no answer, worked out by hand."""

import itertools
import json
import os
import random
import re
import string
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from compress.evaluation import qa
from compress.evaluation.qa import Spans, Windows


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0, 1.0),  # case, articles
        ("an apple.", "Apple", 1.0, 1.0),
        ("U.S.", "US", 1.0, 1.0),  # punctuation goes without leaving a space
        ("rock-n-roll", "rock n roll", 0.0, 0.0),
        ("  10th  and 11th\tcenturies", "10th and 11th centuries", 1.0, 1.0),
        ("theatre", "atre", 0.0, 0.0),  # an article inside a word is none
        ("in the 10th century", "10th century", 0.0, 2 * 2 / (3 + 2)),
        ("to be or not to be", "to be", 0.0, 2 * 2 / (6 + 2)),  # words count as often as both have them
        ("the", "the", 1.0, 1.0),
        ("", "something", 0.0, 0.0),
        ("« oui »", "oui", 0.0, 2 / 4),  # only ASCII punctuation goes, as in the official script
    ],
)
def test_exact_match_and_f1(answer: str, gold: str, exact: float, f1: float) -> None:
    right = qa.right_answers([gold])
    assert qa.exact(answer, right, gold) == exact
    assert qa.f1(answer, right, gold) == pytest.approx(f1)


# Languages without spaces between words

CHINESE = "秦始皇統一六國，建立中國歷史上第一個王朝（公元前221年）。首都在咸陽。"
ENGLISH = "The Yuan dynasty (元朝) was founded by Kublai Khan; Guo Shoujing made its calendar (授時暦)."


@pytest.mark.parametrize(
    ("answer", "gold", "context", "exact", "f1"),
    [
        ("北京市", "北京", CHINESE, 0.0, 2 * 2 / (3 + 2)),
        ("北京。", "「北京」", CHINESE, 1.0, 1.0),  # punctuation of every script
        ("公元前221年", "前221 年", CHINESE, 0.0, 2 * 3 / (5 + 3)),  # a number is one word
        ("Apple公司", "apple 公司", CHINESE, 1.0, 1.0),
        ("the 公司", "公司", CHINESE, 0.0, 2 * 2 / (3 + 2)),  # there are no articles
        ("1998", "1998", CHINESE, 1.0, 1.0),
        ("とうきょう", "とうきょうと", "とうきょうとはにほんのしゅとです。", 0.0, 2 * 5 / (5 + 6)),
        ("カタカナ", "ひらがな", "カタカナとひらがなです", 0.0, 0.0),
        ("ภาษา", "ภาษาไทย", "ภาษาไทยเป็นภาษาของประเทศไทย", 0.0, 2 * 4 / (4 + 7)),
        ("한국어", "한국", "한국어는 한국에서 쓰는 말이다.", 0.0, 0.0),  # Korean has spaces
        ("元朝", "元", ENGLISH, 0.0, 0.0),  # a quotation in English
        ("the 元朝", "元朝", ENGLISH, 1.0, 1.0),
    ],
)
def test_answers_in_languages_without_spaces(answer: str, gold: str, context: str, exact: float, f1: float) -> None:
    assert qa.exact(answer, [gold], context) == exact
    assert qa.f1(answer, [gold], context) == pytest.approx(f1)


def by_mlqas_rules(answer: str, gold: str) -> tuple[float, float]:
    """Compare as MLQA's script does in Chinese: characters alone, the rest divided at spaces, no punctuation."""

    def words(text: str) -> list[str]:
        kept = [c for c in text.lower() if unicodedata.category(c)[0] != "P" and c not in string.punctuation]
        return "".join(f" {c} " if "\u4e00" <= c <= "\u9fa5" else c for c in kept).split()

    one, other = words(answer), words(gold)
    same = sum(min(one.count(word), other.count(word)) for word in set(one))
    return float(one == other), 2 * same / (len(one) + len(other)) if same else 0.0


def by_squads_rules(answer: str, gold: str) -> tuple[float, float]:
    def words(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", kept).split()

    one, other = words(answer), words(gold)
    same = sum(min(one.count(word), other.count(word)) for word in set(one))
    return float(one == other), 2 * same / (len(one) + len(other)) if same else float(one == other)


def drawn(rng: random.Random, letters: str) -> str:
    return "".join(rng.choices(letters, k=rng.randint(1, 12)))


def test_chinese_answers_are_scored_as_mlqas_script_scores_them() -> None:
    rng, letters = random.Random(0), "北京市中國秦皇一二三，。「」（）·a the12 APL-.$"
    for _ in range(2000):
        answer, gold = drawn(rng, letters), drawn(rng, letters)
        expected = by_mlqas_rules(answer, gold)
        if expected[1]:
            found = qa.exact(answer, [gold], CHINESE), qa.f1(answer, [gold], CHINESE)
            assert found == pytest.approx(expected), (answer, gold)


@pytest.mark.parametrize(
    "letters", ["the an a of (),.-'«»äéñ üß 12 ABC", "фильм é хорош, .", "فيلم جيد ال .", "फिल्म है।", "영화는 좋다"]
)
def test_answers_in_languages_with_spaces_are_scored_as_squads_script_scores_them(letters: str) -> None:
    rng = random.Random(0)
    for _ in range(500):
        answer, gold = drawn(rng, letters), drawn(rng, letters)
        for context in (letters * 20, ENGLISH):
            found = qa.exact(answer, [gold], context), qa.f1(answer, [gold], context)
            assert found == pytest.approx(by_squads_rules(answer, gold)), (answer, gold)


@pytest.mark.parametrize("name", ["mlqa_en_dev/dev-context-en-question-en.json", "squad2_half_dev/dev-v2.0.json"])
def test_real_english_questions_are_scored_as_before(name: str) -> None:
    """Every answer against the first of the question before it and its own, in the context that it is from."""
    root = Path(os.environ.get("COMPRESS_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (root / name).is_file():
        pytest.skip(f"no {name} in {root}: set COMPRESS_DATA")
    paragraphs = [each for article in json.loads((root / name).read_text())["data"] for each in article["paragraphs"]]
    before, count = "the end", 0
    for paragraph in paragraphs:
        for question in paragraph["qas"]:
            for gold in [answer["text"] for answer in question["answers"]][:1]:
                for answer in (before, f"the {gold[2:]}."):
                    found = qa.exact(answer, [gold], paragraph["context"]), qa.f1(answer, [gold], paragraph["context"])
                    assert found == pytest.approx(by_squads_rules(answer, gold)), (answer, gold)
                before, count = gold, count + 1
    assert count > 1000


def test_best_gold_answer() -> None:
    assert qa.f1("10th century", ["11th century", "the 10th century"], "a 10th century tale") == 1.0


def test_answers_that_normalise_to_nothing() -> None:
    assert qa.right_answers([]) == qa.right_answers(["the", "."]) == [""]
    assert qa.right_answers(["the", "one"]) == ["one"]
    assert qa.exact("The", [""], "The tale") == 1.0


def test_scores_by_answerability() -> None:
    found = qa.answer_scores(["yes", "", "no"], [["yes"], [], []], ["yes or no"] * 3)
    assert found["f1"] == found["exact"] == pytest.approx(2 / 3)
    assert (found["f1_answerable"], found["no_answer"]) == (1.0, 0.5)
    assert set(qa.answer_scores(["yes"], [["yes"]], ["yes"])) == {"f1", "exact"}


def windows(lengths: list[int], questions: list[int], heads: int = 2) -> Windows:
    """Rows of a null token, `heads - 1` of a question, context of one character a token, and a last special one."""
    starts = [np.array([-1] * heads + list(range(n - heads - 1)) + [-1]) for n in lengths]
    begins = np.concatenate(starts)
    return Windows(
        begins,
        np.where(begins < 0, -1, begins + 1),
        np.array(lengths),
        np.zeros(len(lengths), int),
        np.array(questions),
    )


def brute(logits: np.ndarray, where: Windows, question: int) -> tuple[float, int, int]:
    begins = np.concatenate([[0], np.cumsum(where.lengths_R)])
    best = (-np.inf, 0, 0)
    for row in np.flatnonzero(where.question_R == question):
        inside = [t for t in range(begins[row], begins[row + 1]) if where.starts_T[t] >= 0]
        for i, j in itertools.product(inside, inside):
            if i <= j < i + qa.LONGEST_ANSWER:
                best = max(best, (logits[i, 0] + logits[j, 1], i, j))
    return best


def test_best_span_equals_brute_force() -> None:
    where = windows([7, 45, 9, 6], [0, 1, 1, 2])
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=(67, 2))
        found = qa.best_spans(logits, where)
        for question in range(3):
            score, first, last = brute(logits, where, question)
            assert (found.first_Q[question], found.last_Q[question]) == (first, last)
            assert found.starts_Q[question] == where.starts_T[first]
            assert found.ends_Q[question] == where.ends_T[last]
            rows = np.flatnonzero(where.question_R == question)
            nulls = [logits[where.lengths_R[:row].sum()].sum() for row in rows]
            assert found.margin_Q[question] == pytest.approx(min(nulls) - score)


def test_invalid_spans() -> None:
    where = windows([60, 10], [0, 0])
    logits = np.zeros((70, 2))
    logits[10, 0] = logits[50, 1] = 9.0  # too far apart
    logits[40, 0] = logits[20, 1] = 8.0  # the wrong way round
    logits[58, 0] = logits[63, 1] = 7.0  # in two rows
    logits[30, 0], logits[33, 1] = 3.0, 3.5
    found = qa.best_spans(logits, where)
    # 9 and nothing: 10 .. any end within 30 with logit 8 at 20
    assert (found.first_Q[0], found.last_Q[0]) == (10, 20)


def test_context_without_tokens() -> None:
    found = qa.best_spans(np.ones((7, 2)), windows([3, 4], [0, 1]))
    assert np.isposinf(found.margin_Q[0])
    assert found.texts(["", "x"], 1e9) == ["", "x"]


def spans(margins: list[float]) -> Spans:
    n = np.arange(len(margins))
    return Spans(0 * n, 0 * n + 3, n, n, np.array(margins))


@pytest.mark.parametrize(
    ("margins", "golds", "expected", "score"),
    [
        ([-2.0, -1.0, 1.0, 2.0], [["yes"], ["yes"], [], []], 0.0, 1.0),
        ([-2.0, -1.0, 1.0, 2.0], [["yes"], ["yes"], ["yes"], ["yes"]], 3.0, 1.0),  # always answer
        ([-2.0, -1.0, 1.0, 2.0], [[], [], [], []], -3.0, 1.0),  # never
        ([-2.0, 1.0, 1.0, 2.0], [["yes"], ["yes"], [], []], -0.5, 0.75),  # equal margins cannot be parted
    ],
)
def test_best_threshold(margins: list[float], golds: list[list[str]], expected: float, score: float) -> None:
    contexts = ["yes"] * len(margins)
    threshold = qa.best_threshold(spans(margins), contexts, golds, metric="f1")
    assert threshold == pytest.approx(expected)
    assert qa.answer_scores(spans(margins).texts(contexts, threshold), golds, contexts)["f1"] == pytest.approx(score)


def test_best_threshold_equals_search() -> None:
    draw = np.random.default_rng(1)
    for _ in range(20):
        found, contexts = spans(draw.integers(-5, 5, 12).tolist()), ["yes"] * 12
        golds = [[["yes"], ["yes", "no"], ["yes sir"], []][k] for k in draw.integers(0, 4, 12)]
        chosen = qa.best_threshold(found, contexts, golds, metric="f1")
        best, *others = (
            qa.answer_scores(found.texts(contexts, threshold), golds, contexts)["f1"]
            for threshold in (chosen, *np.arange(-7, 7, 0.5))
        )
        assert best >= max(others) - 1e-12
