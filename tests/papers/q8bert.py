"""Zafrir et al. 2019: no loss of its own; what it does is in test_q8bert.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
