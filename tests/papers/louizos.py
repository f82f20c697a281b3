"""Louizos et al. 2018: no loss of its own; its gates are in test_cofi.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
