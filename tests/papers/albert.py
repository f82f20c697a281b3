"""Lan et al. 2020."""

from tests.papers.bert import CLASSES, MASK, classes, sure_of
from tests.papers.case import Case, random

CASES = {"sentence_order_prediction": Case(random(3, 2, seed=8), CLASSES % 2, MASK, classes, sure_of(CLASSES % 2, 2))}
