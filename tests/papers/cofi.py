"""Xia et al. 2022: its layers and steps are in test_cofi.py, no loss of the common form."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
