"""Li et al. 2017: no loss of its own; what it rates is in tests/pruning."""

from collections.abc import Mapping

from tests.papers.case import Case

CASES: Mapping[str, Case] = {}
