"""Raffel et al. 2020: no loss of its own; what it does is in test_t5.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
