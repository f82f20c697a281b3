"""Conneau & Lample 2019: no loss of its own."""

from tests.papers.case import Case

CASES: dict[str, Case] = {}
