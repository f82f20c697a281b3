"""Wang et al. 2020: no loss of the common form; its Lagrangian is in test_cofi.py."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
